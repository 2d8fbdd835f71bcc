//! The fully connected network.

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use super::batch_norm::BatchNorm;
use super::layers::Linear;
use super::{Forward, Mode};
use crate::data::{CLASSES, PIXELS};

/// Inputs, hidden layers, outputs of the default network.
pub const WIDTHS: &[usize] = &[PIXELS, 512, 256, CLASSES];

/// Linear layers, each with batch normalisation, ReLU between them.
///
/// The outputs are normalised too, as in the networks of the paper's experiments: then the scale of no weight
/// matters, which is what makes the cost's statistics at initialisation a fair guess for its statistics
/// elsewhere.
pub struct Mlp {
    layers: Vec<(Linear, BatchNorm)>,
}

impl Mlp {
    pub fn new(widths: &[usize], vb: VarBuilder) -> Result<Self> {
        let mut layers = Vec::with_capacity(widths.len() - 1);
        for (number, ends) in (1..).zip(widths.windows(2)) {
            layers.push((
                Linear::new(ends[0], ends[1], vb.pp(format!("linear{number}")))?,
                BatchNorm::new(ends[1], vb.pp(format!("norm{number}")))?,
            ));
        }
        Ok(Mlp { layers })
    }
}

impl Forward for Mlp {
    fn forward(&self, images: &Tensor, mode: Mode) -> Result<Tensor> {
        let mut x = images.clone();
        for (layer, (linear, norm)) in self.layers.iter().enumerate() {
            let input = if layer == 0 { x } else { x.relu()? };
            x = norm.forward(&linear.forward(&input)?, mode)?;
        }
        Ok(x)
    }
}
