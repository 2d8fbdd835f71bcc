//! The layers networks are made of: PyTorch's, with its default initialisation.

use candle_core::{Result, Tensor, Var};
use candle_nn::VarBuilder;
use candle_nn::init::Init;

use super::batch_norm::BatchNorm;

/// x ↦ x·Wᵀ + b.
pub struct Linear {
    weight: Tensor,
    bias: Tensor,
}

impl Linear {
    /// Weights and biases uniform on (−1/√inputs, 1/√inputs), as of `torch.nn.Linear` and `Conv2d`.
    pub fn new(inputs: usize, outputs: usize, vb: VarBuilder) -> Result<Self> {
        let bound = f64::from(1.0 / (inputs as f32).sqrt());
        let init = Init::Uniform { lo: -bound, up: bound };
        Ok(Linear {
            weight: vb.get_with_hints((outputs, inputs), "weight", init)?,
            bias: vb.get_with_hints(outputs, "bias", init)?,
        })
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.weight.t()?)?.broadcast_add(&self.bias)
    }
}

impl BatchNorm {
    /// The identity at first.
    pub fn new(features: usize, vb: VarBuilder) -> Result<Self> {
        let constant = |name: &str, value: f64| -> Result<Var> {
            Var::from_tensor(&vb.get_with_hints(features, name, Init::Const(value))?)
        };
        Ok(BatchNorm {
            weight: constant("weight", 1.0)?,
            bias: constant("bias", 0.0)?,
            running_mean: constant("running_mean", 0.0)?,
            running_var: constant("running_var", 1.0)?,
        })
    }
}
