//! Random Function Descent on a candle network. (stopgap arithmetic until the library's optimizer lands)

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};

use super::fit::Moments;
use super::sampler::host_gradients;
use super::{Method, MethodStep};
use crate::error::CliError;
use crate::network::Network;

pub struct Rfd<'a> {
    network: &'a Network,
    vars: Vec<Var>,
    values: Vec<Vec<f32>>,
    moments: Moments,
    inv_batch: f64,
}

impl<'a> Rfd<'a> {
    pub fn new(network: &'a Network, moments: Moments, inv_batch: f64) -> Result<Self, CliError> {
        let vars: Vec<Var> = network.parameters().iter().map(|p| p.var.clone()).collect();
        let values = vars
            .iter()
            .map(|v| v.flatten_all()?.to_vec1::<f32>())
            .collect::<Result<_, _>>()?;
        Ok(Rfd {
            network,
            vars,
            values,
            moments,
            inv_batch,
        })
    }
}

impl Method for Rfd<'_> {
    fn step(&mut self, loss: f64, gradients: &GradStore) -> Result<MethodStep, CliError> {
        let gradients = host_gradients(self.network, gradients)?;
        let squares: f64 = gradients
            .iter()
            .flatten()
            .map(|&g| f64::from(g) * f64::from(g))
            .sum();
        let norm = squares.sqrt();
        let m = &self.moments;
        let s2 = m.variance * m.dims as f64 / m.grad_variance;
        let share_loss = m.variance / (m.variance + m.noise_variance * self.inv_batch);
        let share_grad = m.grad_variance / (m.grad_variance + m.noise_grad_variance * self.inv_batch);
        let gap = (m.mean - loss).max(0.0) * share_loss / share_grad;
        let half = gap / 2.0;
        let eta = s2 * norm / ((half * half + s2 * squares).sqrt() + half);
        let lr = eta / norm;
        for ((var, values), gradient) in self.vars.iter().zip(&mut self.values).zip(&gradients) {
            for (v, g) in values.iter_mut().zip(gradient) {
                *v -= lr as f32 * g;
            }
            var.set(&Tensor::from_slice(values, var.shape(), &Device::Cpu)?)?;
        }
        Ok(MethodStep {
            grad_norm: Some(norm),
            theta: Some(gap / norm),
            step_size: Some(eta),
            learning_rate: Some(lr),
            skipped: None,
        })
    }
}
