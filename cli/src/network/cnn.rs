//! The convolutional network.

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use super::batch_norm::BatchNorm;
use super::images::{max_pool, patches};
use super::layers::Linear;
use super::{Forward, Mode};
use crate::data::{CLASSES, SIDE};

const CHANNELS: [usize; 2] = [16, 32];
const PATCH: usize = 5;
/// Side of the feature maps that reach the last layer: 28 → 24 → 12 → 8 → 4.
const FINAL_SIDE: usize = after_block(after_block(SIDE));

/// A convolution without padding, then pooling by two.
const fn after_block(side: usize) -> usize {
    let positions = side - PATCH + 1;
    positions / 2
}

/// Twice convolution, batch normalisation, ReLU, 2×2 maximum; a linear output, normalised as that of the MLP.
pub struct Cnn {
    blocks: Vec<(Linear, BatchNorm)>,
    output: (Linear, BatchNorm),
}

impl Cnn {
    pub fn new(vb: VarBuilder) -> Result<Self> {
        let mut blocks = Vec::with_capacity(CHANNELS.len());
        let mut inputs = 1;
        for (number, outputs) in (1..).zip(CHANNELS) {
            blocks.push((
                Linear::new(PATCH * PATCH * inputs, outputs, vb.pp(format!("conv{number}")))?,
                BatchNorm::new(outputs, vb.pp(format!("norm{number}")))?,
            ));
            inputs = outputs;
        }
        let output = (
            Linear::new(inputs * FINAL_SIDE * FINAL_SIDE, CLASSES, vb.pp("linear"))?,
            BatchNorm::new(CLASSES, vb.pp("norm3"))?,
        );
        Ok(Cnn { blocks, output })
    }
}

impl Forward for Cnn {
    fn forward(&self, images: &Tensor, mode: Mode) -> Result<Tensor> {
        let batch = images.dim(0)?;
        let mut x = images.reshape((batch, SIDE, SIDE, 1))?;
        for (conv, norm) in &self.blocks {
            let side = x.dim(1)? - PATCH + 1;
            let features = norm.forward(&conv.forward(&patches(&x, PATCH)?)?, mode)?.relu()?;
            x = max_pool(&features.reshape((batch, side, side, ()))?)?;
        }
        let (linear, norm) = &self.output;
        norm.forward(&linear.forward(&x.flatten_from(1)?)?, mode)
    }
}
