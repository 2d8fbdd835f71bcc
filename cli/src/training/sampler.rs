//! Samples of loss and gradient norm at random initialisations of a network: what auto-fit asks for.

use candle_core::backprop::GradStore;
use rfdescent::estimation::{BatchSample, Sampler, SamplerError};

use super::DTYPE;
use crate::data::{Dataset, draw_batch};
use crate::error::CliError;
use crate::network::Network;
use crate::seed::{Purpose, generator};

/// The gradients in the order of the network's parameters, each as a plain list.
pub fn host_gradients(network: &Network, gradients: &GradStore) -> Result<Vec<Vec<f32>>, CliError> {
    network
        .parameters()
        .iter()
        .map(|parameter| match gradients.get(&parameter.var) {
            Some(gradient) => Ok(gradient.flatten_all()?.to_vec1::<f32>()?),
            None => Err(CliError::Data(format!("parameter `{}` has no gradient", parameter.name))),
        })
        .collect()
}

/// Initialises a network anew for each sample and takes the loss and the squared gradient norm on a fresh batch.
pub struct NetworkSampler<'a> {
    network: &'a Network,
    data: &'a Dataset,
}

impl<'a> NetworkSampler<'a> {
    /// The parameters of `network` are overwritten by every sample.
    pub fn new(network: &'a Network, data: &'a Dataset) -> Self {
        NetworkSampler { network, data }
    }

    fn draw(&self, batch_size: u64, seed: u64) -> Result<BatchSample, CliError> {
        let mut rng = generator(seed, Purpose::Sample);
        self.network.initialise_from(&mut rng)?;
        let indices = draw_batch(self.data.train.len(), batch_size as usize, &mut rng);
        let batch = self.data.batch(&self.data.train, &indices, DTYPE)?;
        let loss = self.network.training_loss(&batch)?;
        let gradients = host_gradients(self.network, &loss.backward()?)?;
        let squares = gradients.iter().flatten().map(|&g| f64::from(g) * f64::from(g));
        Ok(BatchSample { loss: f64::from(loss.to_scalar::<f32>()?), sq_grad_norm: squares.sum() })
    }
}

impl Sampler for NetworkSampler<'_> {
    fn dims(&self) -> u64 {
        self.network.dims()
    }

    fn sample(&mut self, batch_size: u64, seed: u64) -> Result<BatchSample, SamplerError> {
        self.draw(batch_size, seed).map_err(|error| error.to_string().into())
    }
}
