//! Random Function Descent on a candle network, through the library's optimizer.

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor};
use rfdescent::covariance::Model;
use rfdescent::optimizer::{Optimizer, Options, Outcome, StepInput, TensorSpec};
use rfdescent::{DType, GradRef, ParamMut};

use super::sampler::host_gradients;
use super::{Method, MethodStep};
use crate::error::CliError;
use crate::network::Network;

/// The optimizer and its own copy of the parameters, which the network's tensors follow after every step.
pub struct Rfd<'a> {
    network: &'a Network,
    optimizer: Optimizer,
    values: Vec<Vec<f32>>,
}

impl<'a> Rfd<'a> {
    /// RFD with a fitted model, from the network's parameters as they are now.
    pub fn new(network: &'a Network, model: Model, options: Options) -> Result<Self, CliError> {
        let parameters = network.parameters();
        let specs = parameters.iter().map(|p| TensorSpec::new(&p.name, p.var.dims(), DType::F32)).collect();
        let values = parameters
            .iter()
            .map(|p| p.var.flatten_all()?.to_vec1::<f32>())
            .collect::<candle_core::Result<_>>()?;
        Ok(Rfd { network, optimizer: Optimizer::new(model, options, specs)?, values })
    }
}

impl Method for Rfd<'_> {
    fn step(&mut self, loss: f64, gradients: &GradStore) -> Result<MethodStep, CliError> {
        let gradients = host_gradients(self.network, gradients)?;
        let gradients: Vec<GradRef> = gradients.iter().map(|g| GradRef::from(&g[..])).collect();
        let mut values: Vec<ParamMut> = self.values.iter_mut().map(|v| ParamMut::from(&mut v[..])).collect();
        let report = self.optimizer.step(&mut values, &gradients, &StepInput::new(loss))?;
        if let Outcome::Skipped(reason) = report.outcome {
            return Ok(MethodStep { skipped: Some(reason.to_string()), ..MethodStep::default() });
        }
        for (parameter, values) in self.network.parameters().iter().zip(&self.values) {
            parameter.var.set(&Tensor::from_slice(values, parameter.var.shape(), &Device::Cpu)?)?;
        }
        Ok(MethodStep {
            grad_norm: Some(report.grad_norm),
            theta: Some(report.theta),
            step_size: Some(report.step_size),
            learning_rate: Some(report.learning_rate),
            skipped: None,
        })
    }
}
