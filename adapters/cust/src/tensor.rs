//! Parameters and gradients.

use std::marker::PhantomData;

use cust::memory::DeviceSlice;
use rfdescent::optimizer::{RawTensor, TensorSpec};
use rfdescent::{DType, Error, Result};

use crate::element::Element;

/// A parameter and its gradient, borrowed from buffers of cust; a `DeviceBuffer` is taken as the
/// `DeviceSlice` it derefs to.
///
/// The borrow keeps the buffers from being freed or used while the tensor lives, as far as cust does: it lets
/// a `DeviceSlice` be copied out of its buffer.
///
/// ```compile_fail
/// # fn f(mut weight: cust::memory::DeviceBuffer<f32>, gradient: cust::memory::DeviceBuffer<f32>) {
/// let tensor = rfdescent_cust::Tensor::new(&mut weight, &gradient);
/// drop(gradient); // still borrowed
/// # let _ = tensor;
/// # }
/// ```
#[derive(Debug)]
pub struct Tensor<'a> {
    addresses: RawTensor,
    len: usize,
    dtype: DType,
    grad_len: Option<usize>,
    buffers: PhantomData<&'a mut ()>,
}

impl<'a> Tensor<'a> {
    /// A parameter and its gradient, which may have another format.
    pub fn new<P: Element, G: Element>(param: &'a mut DeviceSlice<P>, grad: &'a DeviceSlice<G>) -> Self {
        let addresses =
            RawTensor::new(param.as_device_ptr().as_raw(), grad.as_device_ptr().as_raw(), G::DTYPE);
        Self { addresses, grad_len: Some(grad.len()), ..Self::without_grad(param) }
    }

    /// A parameter that has no gradient in this step: it stays as it is and counts in no norm.
    pub fn without_grad<P: Element>(param: &'a mut DeviceSlice<P>) -> Self {
        Self {
            addresses: RawTensor::without_grad(param.as_device_ptr().as_raw()),
            len: param.len(),
            dtype: P::DTYPE,
            grad_len: None,
            buffers: PhantomData,
        }
    }

    /// The addresses, unchecked.
    pub(crate) fn raw(&self) -> RawTensor {
        self.addresses
    }

    /// The addresses, if lengths and formats are those that the spec says.
    pub(crate) fn checked(&self, spec: &TensorSpec) -> Result<RawTensor> {
        let refuse = |problem: String| Err(Error::Tensor { tensor: spec.name.clone(), problem });
        if self.dtype != spec.dtype {
            return refuse(format!("was described as {} but is {}", spec.dtype, self.dtype));
        }
        let len = spec.len()?;
        if self.len != len {
            return refuse(format!("was described with {len} elements but has {}", self.len));
        }
        match self.grad_len {
            Some(grad_len) if grad_len != len => {
                refuse(format!("has {len} elements but its gradient has {grad_len}"))
            }
            // A gradient without elements has no address, which would mean a missing one.
            _ if len == 0 => Ok(RawTensor::without_grad(self.addresses.param)),
            _ => Ok(self.addresses),
        }
    }
}
