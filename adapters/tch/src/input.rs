//! The scalars of a step.

use rfdescent::DType;
use rfdescent::optimizer::{RawInput, RawNumber};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::layout::{dtype, is_strided};

/// What goes into a step beside parameters and gradients. Each is a tensor of one element, on the parameters'
/// device or on the CPU.
#[derive(Clone, Copy, Debug)]
pub struct StepTensors<'a> {
    /// The mini-batch loss at the current parameters: the mean over the batch that the gradients are the mean
    /// of, without gradient scale.
    pub loss: &'a Tensor,
    /// S when the gradients are S times the real ones, as with a gradient scaler; `None` for 1. On a CUDA
    /// device it counts as f32.
    pub grad_scale: Option<&'a Tensor>,
    /// Any value but 0 skips the step: a gradient scaler found an overflow. On a CUDA device it counts as
    /// f32.
    pub found_inf: Option<&'a Tensor>,
}

impl<'a> StepTensors<'a> {
    /// A step with the given loss, no gradient scale and no overflow.
    pub fn new(loss: &'a Tensor) -> Self {
        Self { loss, grad_scale: None, found_inf: None }
    }
}

/// The scalars of a step; they keep the memory of those on the device.
#[derive(Debug)]
pub(crate) struct Scalars {
    loss: Scalar,
    grad_scale: Option<Scalar>,
    found_inf: Option<Scalar>,
}

impl Scalars {
    /// Finds them for a step on the given device. Reads tensors on the CPU only, so it never waits.
    pub fn new(input: &StepTensors<'_>, device: Device) -> Result<Self> {
        let optional =
            |name, tensor: Option<&Tensor>| tensor.map(|tensor| as_f32(name, tensor, device)).transpose();
        Ok(Self {
            loss: scalar("loss", input.loss, device)?,
            grad_scale: optional("grad_scale", input.grad_scale)?,
            found_inf: optional("found_inf", input.found_inf)?,
        })
    }

    /// As the library takes them.
    pub fn raw(&self) -> RawInput {
        let mut raw = RawInput::new(self.loss.raw());
        raw.grad_scale = self.grad_scale.as_ref().map_or(raw.grad_scale, Scalar::raw);
        raw.found_inf = self.found_inf.as_ref().map_or(raw.found_inf, Scalar::raw);
        raw
    }
}

/// A scalar, where a step on some device finds it.
#[derive(Debug)]
enum Scalar {
    /// On the host.
    Value(f64),
    /// On the step's device.
    Device { tensor: Tensor, dtype: DType },
}

impl Scalar {
    fn raw(&self) -> RawNumber {
        match self {
            Scalar::Value(value) => RawNumber::Host(*value),
            Scalar::Device { tensor, dtype } => {
                let address = tensor.data_ptr().expose_provenance() as u64;
                RawNumber::Address { address, dtype: *dtype }
            }
        }
    }
}

/// Finds a scalar for a step on the given device.
fn scalar(name: &str, tensor: &Tensor, device: Device) -> Result<Scalar> {
    if !tensor.defined() {
        return Err(Error::invalid(name, "undefined tensor", "give a tensor of one element"));
    }
    let (kind, size, own) = (tensor.f_kind()?, tensor.size(), tensor.device());
    let value = || format!("{size:?} {kind:?} on {own:?}");
    // On the host libtorch itself reads the number.
    let readable =
        if own == Device::Cpu { !tensor.is_sparse() && !tensor.is_mkldnn() } else { is_strided(tensor) };
    let Some(dtype) = dtype(kind).filter(|_| readable && tensor.numel() == 1) else {
        let expected = "give a dense tensor of one element of kind Float, Double, Half or BFloat16; a loss is the mean \
                        over the batch";
        return Err(Error::invalid(name, value(), expected));
    };
    match own {
        Device::Cpu => Ok(Scalar::Value(tensor.f_double_value(&[])?)),
        _ if own == device => {
            // What lies in memory may be the negative of the value.
            let tensor = tch::no_grad(|| tensor.f_detach()?.f_resolve_neg())?;
            Ok(Scalar::Device { tensor, dtype })
        }
        _ => {
            let expected = format!("the parameters are on {device:?}; move it there or to the CPU");
            Err(Error::invalid(name, value(), expected))
        }
    }
}

/// The same for what a device reads as f32 from its own memory, wherever the tensor is.
fn as_f32(name: &str, tensor: &Tensor, device: Device) -> Result<Scalar> {
    let tensor = match scalar(name, tensor, device)? {
        Scalar::Value(value) if device == Device::Cpu => return Ok(Scalar::Value(value)),
        Scalar::Value(value) => Tensor::f_full([], value, (Kind::Float, device))?,
        Scalar::Device { tensor, .. } => tensor.f_to_kind(Kind::Float)?,
    };
    Ok(Scalar::Device { tensor, dtype: DType::F32 })
}
