//! The networks that the command line trains.

mod batch_norm;
mod cnn;
mod images;
mod init;
mod layers;
mod mlp;

use candle_core::{DType, Tensor, Var};
use rand_chacha::ChaCha8Rng;

use crate::error::CliError;
use crate::seed::{Purpose, generator};
use init::Init;

/// Which network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NetworkKind {
    /// Linear layers 784-512-256-10, each with batch normalisation
    Mlp,
    /// Two 5×5 convolutions of 16 and 32 channels and a linear layer, each with batch normalisation
    Cnn,
}

impl std::fmt::Display for NetworkKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            NetworkKind::Mlp => "mlp",
            NetworkKind::Cnn => "cnn",
        })
    }
}

/// Which statistics batch normalisation uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Those of the batch; the running averages follow them.
    Train,
    /// The running averages.
    Evaluate,
}

/// A trained tensor.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// Its name, `layer.weight` or `layer.bias`.
    pub name: String,
    /// Its value.
    pub var: Var,
    init: Init,
}

/// A tensor that is kept with the network but not trained.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// Its name.
    pub name: String,
    /// Its value.
    pub var: Var,
    initial: f32,
}

/// A function of the images with trained parameters in a fixed order.
pub struct Network {
    parameters: Vec<Parameter>,
    buffers: Vec<Buffer>,
    forward: Box<dyn Forward>,
}

/// The layers of a network, in order.
trait Forward {
    /// From images (batch × pixels) to logits (batch × classes).
    fn forward(&self, images: &Tensor, mode: Mode) -> candle_core::Result<Tensor>;
}

impl Network {
    /// A network, initialised from `seed`.
    pub fn new(kind: NetworkKind, dtype: DType, seed: u64) -> Result<Self, CliError> {
        let mut builder = layers::Builder::new(dtype);
        let forward: Box<dyn Forward> = match kind {
            NetworkKind::Mlp => Box::new(mlp::Mlp::new(&mut builder, mlp::WIDTHS)?),
            NetworkKind::Cnn => Box::new(cnn::Cnn::new(&mut builder)?),
        };
        let network = builder.finish(forward);
        network.initialise(seed)?;
        Ok(network)
    }

    /// A linear classifier, to see what more than that is worth.
    #[cfg(test)]
    pub fn linear(dtype: DType, seed: u64) -> Result<Self, CliError> {
        let mut builder = layers::Builder::new(dtype);
        let forward = mlp::Mlp::new(&mut builder, &[crate::data::PIXELS, crate::data::CLASSES])?;
        let network = builder.finish(Box::new(forward));
        network.initialise(seed)?;
        Ok(network)
    }

    /// Draws all parameters anew and resets the running averages, in place.
    pub fn initialise(&self, seed: u64) -> Result<(), CliError> {
        self.initialise_from(&mut generator(seed, Purpose::Initialisation))
    }

    /// The same from a generator.
    pub fn initialise_from(&self, rng: &mut ChaCha8Rng) -> Result<(), CliError> {
        for parameter in &self.parameters {
            parameter.init.fill(&parameter.var, rng)?;
        }
        for buffer in &self.buffers {
            Init::Constant(buffer.initial).fill(&buffer.var, rng)?;
        }
        Ok(())
    }

    /// The trained tensors, always in the same order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The number of trained numbers, d.
    pub fn dims(&self) -> u64 {
        self.parameters.iter().map(|p| p.var.elem_count() as u64).sum()
    }

    /// From images to logits.
    pub fn forward(&self, images: &Tensor, mode: Mode) -> Result<Tensor, CliError> {
        Ok(self.forward.forward(images, mode)?)
    }

    /// The mean cross-entropy of a batch in training mode, still differentiable.
    pub fn training_loss(&self, batch: &crate::data::Batch) -> Result<Tensor, CliError> {
        let logits = self.forward(&batch.images, Mode::Train)?;
        Ok(candle_nn::loss::cross_entropy(&logits, &batch.labels)?)
    }

    /// Every tensor needed to use the network, parameters and running averages, by name.
    pub fn tensors(&self) -> std::collections::HashMap<String, Tensor> {
        let parameters = self.parameters.iter().map(|p| (p.name.clone(), p.var.as_tensor().clone()));
        let buffers = self.buffers.iter().map(|b| (b.name.clone(), b.var.as_tensor().clone()));
        parameters.chain(buffers).collect()
    }
}

#[cfg(test)]
mod tests;
