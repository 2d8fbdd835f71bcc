//! The scalars of a step.

use std::marker::PhantomData;

use cust::memory::DeviceBox;
use rfdescent::optimizer::{RawInput, RawNumber};

use crate::element::Element;

/// The mini-batch loss, a number on the host or borrowed on the device, where it is read when the step runs.
#[derive(Clone, Copy, Debug)]
pub struct Loss<'a> {
    raw: RawNumber,
    number: PhantomData<&'a ()>,
}

impl From<f64> for Loss<'_> {
    fn from(value: f64) -> Self {
        Self { raw: value.into(), number: PhantomData }
    }
}

impl<'a, T: Element> From<&'a DeviceBox<T>> for Loss<'a> {
    fn from(number: &'a DeviceBox<T>) -> Self {
        Self { raw: raw(number), number: PhantomData }
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

    /// As the library takes it.
    pub(crate) fn raw(&self) -> RawInput {
        let mut input = RawInput::new(self.loss.raw);
        input.grad_scale = self.grad_scale.map_or(input.grad_scale, raw);
        input.found_inf = self.found_inf.map_or(input.found_inf, raw);
        input
    }
}

fn raw<T: Element>(number: &DeviceBox<T>) -> RawNumber {
    RawNumber::Address { address: number.as_device_ptr().as_raw(), dtype: T::DTYPE }
}
