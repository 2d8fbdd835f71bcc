//! The layers networks are made of, and the builder that names their tensors.

use candle_core::{DType, Device, Result, Tensor, Var};

use super::batch_norm::BatchNorm;
use super::init::Init;
use super::{Buffer, Forward, Network, Parameter};

/// Collects the tensors of a network in the order in which its layers are made.
pub struct Builder {
    dtype: DType,
    parameters: Vec<Parameter>,
    buffers: Vec<Buffer>,
}

impl Builder {
    pub fn new(dtype: DType) -> Self {
        Builder { dtype, parameters: Vec::new(), buffers: Vec::new() }
    }

    pub fn parameter(&mut self, name: String, shape: &[usize], init: Init) -> Result<Var> {
        let var = Var::zeros(shape, self.dtype, &Device::Cpu)?;
        self.parameters.push(Parameter { name, var: var.clone(), init });
        Ok(var)
    }

    pub fn buffer(&mut self, name: String, shape: &[usize], initial: f32) -> Result<Var> {
        let var = Var::zeros(shape, self.dtype, &Device::Cpu)?;
        self.buffers.push(Buffer { name, var: var.clone(), initial });
        Ok(var)
    }

    pub fn linear(&mut self, name: &str, inputs: usize, outputs: usize) -> Result<Linear> {
        let init = Init::Uniform { fan_in: inputs };
        Ok(Linear {
            weight: self.parameter(format!("{name}.weight"), &[outputs, inputs], init)?,
            bias: self.parameter(format!("{name}.bias"), &[outputs], init)?,
        })
    }

    pub fn batch_norm(&mut self, name: &str, features: usize) -> Result<BatchNorm> {
        Ok(BatchNorm {
            weight: self.parameter(format!("{name}.weight"), &[features], Init::Constant(1.0))?,
            bias: self.parameter(format!("{name}.bias"), &[features], Init::Constant(0.0))?,
            running_mean: self.buffer(format!("{name}.running_mean"), &[features], 0.0)?,
            running_var: self.buffer(format!("{name}.running_var"), &[features], 1.0)?,
        })
    }

    pub fn finish(self, forward: Box<dyn Forward>) -> Network {
        Network { parameters: self.parameters, buffers: self.buffers, forward }
    }
}

/// x ↦ x·Wᵀ + b.
pub struct Linear {
    weight: Var,
    bias: Var,
}

impl Linear {
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.weight.t()?)?.broadcast_add(&self.bias)
    }
}
