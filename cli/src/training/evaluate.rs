//! Loss and accuracy on the validation images.

use candle_core::DType;

use super::DTYPE;
use crate::data::Dataset;
use crate::error::CliError;
use crate::network::{Mode, Network};

/// Images of one pass: large enough to keep the matrix products busy, small enough for the convolutions'
/// memory.
const BATCH: usize = 1000;

/// What the network does on images it was not trained on.
#[derive(Clone, Copy, Debug)]
pub struct Validation {
    /// Mean cross-entropy.
    pub loss: f64,
    /// Share classified rightly.
    pub accuracy: f64,
}

/// Evaluates on all validation images, with the running averages of batch normalisation.
pub fn evaluate(network: &Network, data: &Dataset) -> Result<Validation, CliError> {
    let images = &data.validation;
    let indices: Vec<u32> = (0..images.len() as u32).collect();
    let (mut loss, mut right) = (0.0, 0.0);
    for indices in indices.chunks(BATCH) {
        let batch = data.batch(images, indices, DTYPE)?;
        let logits = network.forward(&batch.images, Mode::Evaluate)?.detach();
        let mean = candle_nn::loss::cross_entropy(&logits, &batch.labels)?.to_dtype(DType::F64)?;
        loss += mean.to_scalar::<f64>()? * indices.len() as f64;
        let hits = logits.argmax(1)?.eq(&batch.labels)?.to_dtype(DType::F64)?.sum_all()?;
        right += hits.to_scalar::<f64>()?;
    }
    let count = images.len() as f64;
    Ok(Validation { loss: loss / count, accuracy: right / count })
}
