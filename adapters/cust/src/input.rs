//! The scalars of a step.

use std::marker::PhantomData;

use cust::memory::DeviceBox;
use rfdescent::optimizer::{DeviceInput, DeviceLoss};

use crate::element::Element;

/// The mini-batch loss, a number on the host or borrowed on the device, where it is read when the step runs.
#[derive(Clone, Copy, Debug)]
pub struct Loss<'a> {
    loss: DeviceLoss,
    number: PhantomData<&'a ()>,
}

impl From<f64> for Loss<'_> {
    fn from(value: f64) -> Self {
        Self { loss: DeviceLoss::Host(value), number: PhantomData }
    }
}

impl<'a, T: Element> From<&'a DeviceBox<T>> for Loss<'a> {
    fn from(number: &'a DeviceBox<T>) -> Self {
        let address = number.as_device_ptr().as_raw();
        Self { loss: DeviceLoss::Address { address, dtype: T::DTYPE }, number: PhantomData }
    }
}

/// What goes into a step beside tensors.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The mean over the batch that the gradients are the mean of, without gradient scale.
    pub loss: Loss<'a>,
    /// S when the gradients are S times the real ones, as with a gradient scaler; `None` for 1.
    pub grad_scale: Option<&'a DeviceBox<f32>>,
    /// Any value but 0 skips the step.
    pub found_inf: Option<&'a DeviceBox<f32>>,
}

impl<'a> Input<'a> {
    /// A step with the given loss, no gradient scale and no overflow.
    pub fn new(loss: impl Into<Loss<'a>>) -> Self {
        Self { loss: loss.into(), grad_scale: None, found_inf: None }
    }

    pub(crate) fn raw(&self) -> DeviceInput {
        let address = |number: &DeviceBox<f32>| number.as_device_ptr().as_raw();
        DeviceInput {
            loss: self.loss.loss,
            grad_scale: self.grad_scale.map(address),
            found_inf: self.found_inf.map(address),
        }
    }
}
