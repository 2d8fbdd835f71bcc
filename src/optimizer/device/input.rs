//! What a step on a device is given, by address.

use super::plan::{dtype_code, size_of};
use crate::backend::abi::RfdStep;
use crate::error::{Error, Result};
use crate::tensor::DType;

/// Where one parameter and its gradient lie on the device. Length and format of the parameter are those of its
/// [`TensorSpec`](crate::optimizer::TensorSpec); both are contiguous, and need be aligned to their elements only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTensor {
    /// Address of the parameter's first element.
    pub param: u64,
    /// Address of the gradient's first element; 0 when it is missing: the tensor stays as it is and counts in no norm.
    pub grad: u64,
    /// Format of the gradient, whatever that of the parameter.
    pub grad_dtype: DType,
}

impl DeviceTensor {
    /// A parameter and its gradient.
    pub const fn new(param: u64, grad: u64, grad_dtype: DType) -> Self {
        Self { param, grad, grad_dtype }
    }

    /// A parameter that has no gradient in this step.
    pub const fn without_grad(param: u64) -> Self {
        Self { param, grad: 0, grad_dtype: DType::F32 }
    }
}

/// The mini-batch loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DeviceLoss {
    /// A number that the host knows. A captured graph keeps it.
    Host(f64),
    /// A number on the device, read when the step runs.
    Address {
        /// Where it lies.
        address: u64,
        /// Its format.
        dtype: DType,
    },
}

/// What goes into a step beside tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceInput {
    /// The mini-batch loss at the current parameters, without gradient scale.
    pub loss: DeviceLoss,
    /// Address of an f32 S when the gradients are S times the real ones, as with a gradient scaler.
    pub grad_scale: Option<u64>,
    /// Address of an f32: any value but 0 skips the step.
    pub found_inf: Option<u64>,
}

impl DeviceInput {
    /// A step with the given loss, no gradient scale and no overflow.
    pub const fn new(loss: DeviceLoss) -> Self {
        Self { loss, grad_scale: None, found_inf: None }
    }

    /// Writes the addresses into the launch's parameters.
    pub(super) fn apply(&self, step: &mut RfdStep) -> Result<()> {
        match self.loss {
            DeviceLoss::Host(value) => {
                step.loss = 0;
                step.loss_value = value;
            }
            DeviceLoss::Address { address, dtype } => {
                step.loss = scalar("loss", address, dtype)?;
                step.loss_dtype = dtype_code(dtype);
            }
        }
        let optional =
            |name, address: Option<u64>| address.map_or(Ok(0), |address| scalar(name, address, DType::F32));
        step.grad_scale = optional("grad_scale", self.grad_scale)?;
        step.found_inf = optional("found_inf", self.found_inf)?;
        Ok(())
    }
}

/// Checks the address of a number.
pub(super) fn scalar(name: &str, address: u64, dtype: DType) -> Result<u64> {
    if address != 0 && address.is_multiple_of(size_of(dtype)) {
        return Ok(address);
    }
    let expected = format!("give the device address of an {dtype}, aligned to {} bytes", size_of(dtype));
    Err(Error::invalid(name, format!("address {address:#x}"), expected))
}
