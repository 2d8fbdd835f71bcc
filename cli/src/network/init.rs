//! PyTorch's default initialisation, from our own generator: candle's CPU generator cannot be seeded.

use candle_core::{DType, Device, Tensor, Var};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// How a tensor starts.
#[derive(Clone, Copy, Debug)]
pub enum Init {
    /// Uniform on (−1/√fan_in, 1/√fan_in): `torch.nn.Linear` and `Conv2d`, weights and biases alike.
    Uniform {
        /// Inputs of one output.
        fan_in: usize,
    },
    /// The same value everywhere.
    Constant(f32),
}

impl Init {
    /// Overwrites `var`.
    pub fn fill(self, var: &Var, rng: &mut ChaCha8Rng) -> candle_core::Result<()> {
        let values: Vec<f32> = match self {
            Init::Uniform { fan_in } => {
                let bound = 1.0 / (fan_in as f32).sqrt();
                (0..var.elem_count()).map(|_| (2.0 * rng.random::<f32>() - 1.0) * bound).collect()
            }
            Init::Constant(value) => vec![value; var.elem_count()],
        };
        let values = Tensor::from_vec(values, var.shape(), &Device::Cpu)?;
        var.set(&if var.dtype() == DType::F32 { values } else { values.to_dtype(var.dtype())? })
    }
}
