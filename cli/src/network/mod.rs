//! The networks that the command line trains.

mod batch_norm;
mod cnn;
mod images;
mod layers;
mod mlp;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use rfdescent_candle::{Parameter, SeededVars};

use crate::data::Batch;
use crate::error::CliError;
use crate::seed::{Purpose, generator};

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

/// A function of the images, without a list of its parameters: what samples are taken of.
pub struct Layers(Box<dyn Forward>);

/// The layers of a network, in order.
trait Forward {
    /// From images (batch × pixels) to logits (batch × classes).
    fn forward(&self, images: &Tensor, mode: Mode) -> candle_core::Result<Tensor>;
}

impl Layers {
    /// The layers of a network of this kind, with variables from the builder.
    pub fn new(kind: NetworkKind, vb: VarBuilder) -> candle_core::Result<Self> {
        Ok(Layers(match kind {
            NetworkKind::Mlp => Box::new(mlp::Mlp::new(mlp::WIDTHS, vb)?),
            NetworkKind::Cnn => Box::new(cnn::Cnn::new(vb)?),
        }))
    }

    /// From images to logits.
    pub fn forward(&self, images: &Tensor, mode: Mode) -> candle_core::Result<Tensor> {
        self.0.forward(images, mode)
    }

    /// The mean cross-entropy of a batch in training mode, still differentiable.
    pub fn training_loss(&self, batch: &Batch) -> candle_core::Result<Tensor> {
        candle_nn::loss::cross_entropy(&self.forward(&batch.images, Mode::Train)?, &batch.labels)
    }
}

/// Layers with all their variables, in a fixed order.
pub struct Network {
    layers: Layers,
    /// Trained ones and running averages.
    variables: Vec<Parameter>,
}

impl Network {
    /// A network, initialised from `seed`.
    pub fn new(kind: NetworkKind, dtype: DType, seed: u64) -> Result<Self, CliError> {
        Self::of(|vb| Layers::new(kind, vb), dtype, seed)
    }

    /// A linear classifier, to see what more than that is worth.
    #[cfg(test)]
    pub fn linear(dtype: DType, seed: u64) -> Result<Self, CliError> {
        Self::mlp(&[crate::data::PIXELS, crate::data::CLASSES], dtype, seed)
    }

    #[cfg(test)]
    fn mlp(widths: &[usize], dtype: DType, seed: u64) -> Result<Self, CliError> {
        Self::of(|vb| Ok(Layers(Box::new(mlp::Mlp::new(widths, vb)?))), dtype, seed)
    }

    fn of(
        build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<Layers>,
        dtype: DType,
        seed: u64,
    ) -> Result<Self, CliError> {
        let vars = SeededVars::new(generator(seed, Purpose::Initialisation));
        let layers = build(vars.builder(dtype, &Device::Cpu))?;
        Ok(Network { layers, variables: vars.parameters() })
    }

    /// The trained variables, always in the same order.
    pub fn parameters(&self) -> Vec<Parameter> {
        let trained = |variable: &&Parameter| !batch_norm::is_running_average(&variable.name);
        self.variables.iter().filter(trained).cloned().collect()
    }

    /// The number of trained numbers, d.
    pub fn dims(&self) -> u64 {
        self.parameters().iter().map(|p| p.var.elem_count() as u64).sum()
    }

    /// Every tensor needed to use the network, parameters and running averages, by name.
    pub fn tensors(&self) -> std::collections::HashMap<String, Tensor> {
        self.variables.iter().map(|v| (v.name.clone(), v.var.as_tensor().clone())).collect()
    }
}

impl std::ops::Deref for Network {
    type Target = Layers;

    fn deref(&self) -> &Layers {
        &self.layers
    }
}

#[cfg(test)]
mod tests;
