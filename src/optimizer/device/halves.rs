//! A step in two halves, between which ranks add up their sums.

use super::DeviceOptimizer;
use crate::backend::abi::{RFD_OUTCOME_FOUND_INF, RFD_OUTCOME_TORN_TENSOR, RfdStep};
use crate::backend::executor::{Kernel, Stream};
use crate::error::{Error, Result};
use crate::optimizer::raw::check_number;
use crate::optimizer::{RawInput, RawNumber, RawTensor};
use crate::tensor::DType;

impl DeviceOptimizer {
    /// Queues the first half of a step in sharded training, the sums of this rank's parameters and gradients:
    /// [`Core::sums_len`](super::Core::sums_len) f64 at the address returned, for the caller to add up over
    /// the ranks in place or elsewhere. The address stays the same. `grad_scale` is that of the step.
    ///
    /// The first steps of the adaptive method also sum up the parameters, until one is known to have been
    /// finished that `found_inf` did not skip and whose report is no error: don't capture before.
    ///
    /// # Safety
    /// As [`DeviceOptimizer::step`].
    ///
    /// # Errors
    /// As [`DeviceOptimizer::step`]; [`Error::InvalidArgument`] when a group has norm lock: a shard doesn't
    /// know the norms that it needs.
    pub unsafe fn local_sums(
        &mut self,
        tensors: &[RawTensor],
        grad_scale: impl Into<RawNumber>,
        stream: Stream,
    ) -> Result<u64> {
        self.core.check_sharded()?;
        // The loss does not matter to sums.
        let input = RawInput { grad_scale: grad_scale.into(), ..RawInput::new(0.0) };
        // SAFETY: the caller vouches for the addresses.
        let mut step = unsafe { self.prepare(tensors, &input, stream)? };
        self.see_whether_measured()?;
        let Some(ranks) = &self.ranks else {
            step.rank_sums = self.control.norm();
            // SAFETY: the caller vouches for the addresses of tensors; the others are this optimizer's own.
            unsafe {
                self.launch_norms(&step, stream)?;
                self.launch_rescale(&step, stream)?;
                self.launch(Kernel::TOTAL, false, 1, &step, stream)?;
            }
            return Ok(step.rank_sums);
        };
        self.half = None;
        ranks.clear(&self.device, stream)?;
        ranks.place(&mut step, 0, ranks.numbers());
        let expected =
            "take a step that `found_inf` does not skip, and wait for its report, before the capture begins";
        // SAFETY: the caller vouches for the addresses of tensors, which `prepare` has checked; the others
        // are this optimizer's own.
        unsafe {
            self.sum_parameters(tensors, Some(ranks), expected, stream)?;
            self.launch_norms(&step, stream)?;
            self.launch_by_tensor(Kernel::LOCAL_SUMS, &step, stream)?;
        }
        self.half = Some(tensors.iter().map(|tensor| tensor.grad != 0).collect());
        Ok(step.rank_sums)
    }

    /// The sums that the last [`DeviceOptimizer::local_sums`] wrote, after waiting for the stream: for those
    /// who add them up on the host.
    ///
    /// # Errors
    /// [`Error::Device`] with what the driver reports.
    pub fn read_sums(&self, stream: Stream) -> Result<Vec<f64>> {
        match &self.ranks {
            Some(ranks) => ranks.read(stream),
            None => self.control.read_norm(stream),
        }
    }

    /// Queues the second half: the update with the sums of all ranks,
    /// [`Core::sums_len`](super::Core::sums_len) f64 at the address `sums`. Every rank must give the same
    /// numbers and input, and the gradients and the gradient scale of the first half; then all take bitwise
    /// the same step.
    ///
    /// With the adaptive method a tensor whose parts do not make up the whole one, or have a gradient on some
    /// ranks only, is an error of [`DeviceOptimizer::report`], which names it; the step counts as skipped
    /// then.
    ///
    /// # Safety
    /// As [`DeviceOptimizer::step`], and for the numbers.
    ///
    /// # Errors
    /// As [`DeviceOptimizer::step`] and [`DeviceOptimizer::local_sums`]; with the adaptive method
    /// [`Error::InvalidArgument`] where there was no first half since the last step, and [`Error::Tensor`]
    /// names one that had a gradient in one half only.
    pub unsafe fn step_with_sums(
        &mut self,
        tensors: &[RawTensor],
        sums: u64,
        input: &RawInput,
        stream: Stream,
    ) -> Result<()> {
        self.core.check_sharded()?;
        let sums = check_number("sums", sums, DType::F64)?;
        if self.ranks.is_some() {
            self.check_half(tensors, sums)?;
        }
        // SAFETY: the caller vouches for the addresses.
        let mut step = unsafe { self.prepare(tensors, input, stream)? };
        step.rank_sums = sums;
        if let Some(ranks) = &self.ranks {
            ranks.place(&mut step, 0, sums);
            // SAFETY: as below.
            unsafe { self.launch_by_tensor(Kernel::TAKE_SUMS, &step, stream)? };
        }
        self.half = None;
        // SAFETY: `prepare` has checked the list and `check_number` the sums; that both are live memory of
        // the device the caller vouches for.
        unsafe { self.launch_update(&step, stream) }
    }

    /// An error unless the last thing done was a first half with these gradients.
    fn check_half(&self, tensors: &[RawTensor], sums: u64) -> Result<()> {
        self.core.check_count("tensors", tensors.len())?;
        let Some(half) = &self.half else {
            let expected = "there was no first half since the last step; add up what it gives";
            return Err(Error::invalid("sums", format!("address {sums:#x}"), expected));
        };
        let mut pairs = self.core.specs().iter().zip(half.iter().zip(tensors));
        match pairs.find(|(_, (had, tensor))| **had != (tensor.grad != 0)) {
            None => Ok(()),
            Some((spec, _)) => Err(Error::tensor(
                &spec.name,
                "has another gradient than in the first half, or none; give both halves the same",
            )),
        }
    }

    /// Length scales follow from the sums of all ranks in the first step that is neither skipped for
    /// `found_inf` nor for torn sums, which the device knows alone.
    fn see_whether_measured(&mut self) -> Result<()> {
        if self.unmeasured.is_some()
            && let Some(status) = self.mirror.read()?
            && ![RFD_OUTCOME_FOUND_INF, RFD_OUTCOME_TORN_TENSOR].map(u64::from).contains(&status.outcome)
        {
            self.unmeasured = None;
        }
        Ok(())
    }

    /// A block for each tensor, but no more than the device holds.
    ///
    /// # Safety
    /// As [`DeviceOptimizer::step`].
    unsafe fn launch_by_tensor(&self, kernel: Kernel, step: &RfdStep, stream: Stream) -> Result<()> {
        let held = self.device.executor().resident_blocks(kernel)?.min(self.max_blocks);
        // SAFETY: the caller vouches for the addresses.
        unsafe { self.launch(kernel, false, held.min(step.tensor_count).max(1), step, stream)? };
        Ok(())
    }
}
