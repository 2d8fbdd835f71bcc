//! The convolutional network.

use candle_core::{Result, Tensor};

use super::batch_norm::BatchNorm;
use super::layers::{Builder, Conv, Linear};
use super::{Forward, Mode};
use crate::data::{CLASSES, SIDE};

const CHANNELS: [usize; 2] = [16, 32];
const KERNEL: usize = 5;
/// Side of the feature maps that reach the linear layer: 28 → 24 → 12 → 8 → 4.
const FINAL_SIDE: usize = after_block(after_block(SIDE));

/// A convolution without padding, then pooling by two.
const fn after_block(side: usize) -> usize {
    (side - KERNEL + 1) / 2
}

/// Twice convolution, batch normalisation, ReLU, 2×2 maximum; a linear output, normalised as that of the MLP.
pub struct Cnn {
    blocks: Vec<(Conv, BatchNorm)>,
    output: Linear,
    output_norm: BatchNorm,
}

impl Cnn {
    pub fn new(builder: &mut Builder) -> Result<Self> {
        let mut blocks = Vec::with_capacity(CHANNELS.len());
        let mut inputs = 1;
        for (layer, outputs) in (1..).zip(CHANNELS) {
            blocks.push((
                builder.conv(&format!("conv{layer}"), inputs, outputs, KERNEL)?,
                builder.batch_norm(&format!("norm{layer}"), outputs)?,
            ));
            inputs = outputs;
        }
        let output = builder.linear("output", inputs * FINAL_SIDE * FINAL_SIDE, CLASSES)?;
        let output_norm = builder.batch_norm("norm3", CLASSES)?;
        Ok(Cnn {
            blocks,
            output,
            output_norm,
        })
    }
}

impl Forward for Cnn {
    fn forward(&self, images: &Tensor, mode: Mode) -> Result<Tensor> {
        let mut x = images.reshape((images.dim(0)?, 1, SIDE, SIDE))?;
        for (conv, norm) in &self.blocks {
            x = norm.forward(&conv.forward(&x)?, mode)?.relu()?.max_pool2d(2)?;
        }
        self.output_norm
            .forward(&self.output.forward(&x.flatten_from(1)?)?, mode)
    }
}
