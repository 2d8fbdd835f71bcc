//! Steps on borrowed buffers.

use cust::stream::Stream;
use rfdescent::optimizer::{DeviceOptimizer, Method, Options, RawTensor, StepReport, TensorSpec};
use rfdescent::{Error, Result};

use crate::context::{device, stream as raw_stream};
use crate::input::Input;
use crate::tensor::Tensor;

/// The library's device optimizer over buffers of cust, whose lengths and formats it checks in every step.
#[derive(Debug)]
pub struct Optimizer {
    inner: DeviceOptimizer,
}

impl Optimizer {
    /// An optimizer on the device of the current context; the method is a fitted
    /// [`Model`](rfdescent::covariance::Model) or [`Adaptive`](rfdescent::optimizer::Adaptive).
    ///
    /// # Errors
    /// As [`device`] and [`DeviceOptimizer::new`].
    pub fn new(method: impl Into<Method>, options: Options, specs: Vec<TensorSpec>) -> Result<Self> {
        Ok(DeviceOptimizer::new(method, options, specs, &device()?)?.into())
    }

    /// Queues one step on the stream. Nothing waits, so that it can be captured in a graph like a step of the
    /// library.
    ///
    /// # Safety
    /// The borrow ends when this returns, but the work has not: buffers and numbers must not be freed,
    /// parameters not be used and gradients not be written by other work, nor the stream be dropped, until
    /// the stream has done the step (for a captured one: its last replay). All must be of this optimizer's
    /// device, made with its primary context current.
    ///
    /// # Errors
    /// [`Error::Tensor`] names a tensor of another length or format than its spec; else as
    /// [`DeviceOptimizer::step`]. Nothing has changed then.
    pub unsafe fn step(&mut self, tensors: &[Tensor<'_>], input: &Input<'_>, stream: &Stream) -> Result<()> {
        let tensors = self.checked(tensors)?;
        // SAFETY: lengths and formats are checked, the caller vouches for the rest.
        unsafe { self.inner.step(&tensors, &input.raw(), raw_stream(stream)) }
    }

    /// Takes one step and waits for it; what it did.
    ///
    /// # Safety
    /// No other stream may use parameters or write gradients meanwhile, and all buffers and numbers must be
    /// of this optimizer's device, made with its primary context current. That they live long enough is what
    /// the borrow says.
    ///
    /// # Errors
    /// As [`Optimizer::step`]; [`Error::Device`] with what the driver reports while waiting.
    pub unsafe fn step_and_wait(
        &mut self,
        tensors: &[Tensor<'_>],
        input: &Input<'_>,
        stream: &Stream,
    ) -> Result<StepReport> {
        // SAFETY: the borrows outlive the wait below; the caller vouches for the rest.
        unsafe { self.step(tensors, input, stream)? };
        self.inner.wait_report(raw_stream(stream))?.ok_or_else(|| {
            Error::Device("a step was queued but has left no report; something overwrote it".into())
        })
    }

    /// The library's optimizer: for its report, settings and saved states, which take the stream by way of
    /// [`stream`](crate::stream).
    pub fn inner(&self) -> &DeviceOptimizer {
        &self.inner
    }

    /// The same, to be changed.
    pub fn inner_mut(&mut self) -> &mut DeviceOptimizer {
        &mut self.inner
    }

    /// The addresses, if lengths and formats are those that the specs say; the library counts them.
    fn checked(&self, tensors: &[Tensor<'_>]) -> Result<Vec<RawTensor>> {
        let mut specs = self.inner.specs().iter();
        tensors
            .iter()
            .map(|tensor| match specs.next() {
                Some(spec) => tensor.checked(spec),
                None => Ok(tensor.raw()),
            })
            .collect()
    }
}

impl From<DeviceOptimizer> for Optimizer {
    fn from(inner: DeviceOptimizer) -> Self {
        Self { inner }
    }
}
