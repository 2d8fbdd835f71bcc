//! An optimizer on the host with what a device's has beside: tensors by address, the last report, sums for
//! others to add up, and gradients that come one by one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::cpu::GradSum;
use crate::backend::executor::Stream;
use crate::backend::memory::{self, Range};
use crate::error::{Error, Result};
use crate::optimizer::core::Core;
use crate::optimizer::raw::{Placement, check_host_stream, check_number};
use crate::optimizer::reader::LastReport;
use crate::optimizer::{LocalSums, Optimizer, RawInput, RawTensor, StepInput, StepReport};
use crate::tensor::{DType, GradRef, ParamMut};

/// An optimizer on the host with what a [`DeviceOptimizer`] has beside: checked addresses, the last report
/// and the sums.
#[derive(Debug)]
pub(super) struct OnHost {
    pub optimizer: Optimizer,
    pub placement: Placement,
    pub last: Arc<LastReport>,
    /// What the last first half found, until the next step.
    half: Option<LocalSums>,
    /// Its numbers, the bits of f64; callers add them up over the ranks in place.
    sums: Box<[AtomicU64]>,
    /// What was given one by one since the last step that was finished.
    given: Vec<Given>,
}

/// One tensor's gradients so far.
#[derive(Clone, Debug, Default)]
struct Given {
    sum: GradSum,
    any: bool,
}

impl OnHost {
    pub fn new(optimizer: Optimizer) -> Self {
        Self {
            optimizer,
            placement: Placement::default(),
            last: Arc::default(),
            half: None,
            sums: Box::default(),
            given: Vec::new(),
        }
    }

    /// The optimizer, which needs no stream.
    pub fn alone(&mut self, stream: Stream) -> Result<&mut Optimizer> {
        check_host_stream(stream)?;
        Ok(&mut self.optimizer)
    }

    pub fn step(
        &mut self,
        params: &mut [ParamMut<'_>],
        grads: &[GradRef<'_>],
        input: &StepInput,
    ) -> Result<StepReport> {
        let report = self.optimizer.step(params, grads, input)?;
        self.last.set(report);
        Ok(report)
    }

    /// The first half of a step; the address of its numbers.
    pub fn local_sums(
        &mut self,
        params: &[ParamMut<'_>],
        grads: &[GradRef<'_>],
        grad_scale: f64,
    ) -> Result<u64> {
        let half = self.half.insert(self.optimizer.local_sums(params, grads, grad_scale)?);
        if self.sums.len() != half.values().len() {
            self.sums = half.values().iter().map(|_| AtomicU64::default()).collect();
        }
        for (place, value) in self.sums.iter().zip(half.values()) {
            place.store(value.to_bits(), Ordering::Relaxed);
        }
        Ok(self.sums.as_ptr().expose_provenance() as u64)
    }

    /// The second half, with the numbers at an address.
    ///
    /// # Safety
    /// As [`AnyOptimizer::step_with_sums`](super::AnyOptimizer::step_with_sums).
    pub unsafe fn step_with_sums(
        &mut self,
        tensors: &[RawTensor],
        sums: u64,
        input: &StepInput,
    ) -> Result<StepReport> {
        let address = check_number("sums", sums, DType::F64)?;
        // SAFETY: the caller vouches for the addresses.
        let (mut params, grads) = unsafe { self.slices(tensors)? };
        let Some(mut half) = self.half.take() else {
            let expected = "there was no first half since the last step; add up what it gives";
            return Err(Error::invalid("sums", format!("address {address:#x}"), expected));
        };
        // SAFETY: not null and aligned, checked above; the caller vouches for so many numbers.
        let given = unsafe { memory::grad_ref(address, half.values().len(), DType::F64) };
        if let GradRef::F64(given) = given {
            half.values_mut().copy_from_slice(given);
        }
        let report = self.optimizer.step_with_sums(&mut params, &grads, half, input)?;
        self.last.set(report);
        Ok(report)
    }

    /// Slices of all tensors, once it is known that no parameter overlaps anything.
    ///
    /// # Safety
    /// As [`AnyOptimizer::step`](super::AnyOptimizer::step), for `'a`.
    pub unsafe fn slices<'a>(
        &mut self,
        tensors: &[RawTensor],
    ) -> Result<(Vec<ParamMut<'a>>, Vec<GradRef<'a>>)> {
        let core: &Core = &self.optimizer;
        self.placement.check(core, tensors)?;
        let list = || core.specs().iter().zip(core.lens()).zip(tensors);
        let params = list()
            .map(|((spec, &len), tensor)| {
                // SAFETY: `check` has accepted address, length and format, and found that nothing else of
                // this step overlaps the parameter; the caller vouches for the rest.
                unsafe { memory::param_mut(tensor.param, len, spec.dtype) }
            })
            .collect();
        let grads = list()
            .map(|((_, &len), tensor)| match tensor.grad {
                0 => GradRef::Missing,
                // SAFETY: `check` has accepted address, length and format, and found that no parameter
                // overlaps the gradient; the caller vouches for the rest.
                grad => unsafe { memory::grad_ref(grad, len, tensor.grad_dtype) },
            })
            .collect();
        Ok((params, grads))
    }

    /// # Safety
    /// As [`AnyOptimizer::give_gradient`](super::AnyOptimizer::give_gradient).
    pub unsafe fn give_gradient(&mut self, index: usize, grad: u64, dtype: DType) -> Result<()> {
        let core: &Core = &self.optimizer;
        let count = core.specs().len();
        let Some((spec, &len)) = core.specs().get(index).zip(core.lens().get(index)) else {
            let expected = format!("the optimizer was made for {count} tensors; count them from 0");
            return Err(Error::invalid("index", index, expected));
        };
        let problem = match Range::new(grad, len as u64, dtype) {
            _ if grad == 0 && len > 0 => "is null; pass the address of its first element".into(),
            Ok(_) => String::new(),
            Err(problem) => problem,
        };
        if !problem.is_empty() {
            return Err(Error::tensor(&spec.name, format!("its gradient {problem}")));
        }
        // SAFETY: not null where there are elements, aligned, and within the address space, checked above;
        // the caller vouches for the rest.
        let grad = unsafe { memory::grad_ref(grad, len, dtype) };
        self.given.resize(count, Given::default());
        let given = &mut self.given[index];
        if given.any {
            given.sum.add(grad);
        } else {
            given.sum.set(grad);
            given.any = true;
        }
        Ok(())
    }

    /// # Safety
    /// As [`AnyOptimizer::finish`](super::AnyOptimizer::finish).
    pub unsafe fn finish(&mut self, params: &[u64], input: &RawInput) -> Result<StepReport> {
        let tensors: Vec<RawTensor> = params.iter().map(|&param| RawTensor::without_grad(param)).collect();
        // SAFETY: the caller vouches for the addresses.
        let (mut params, _) = unsafe { self.slices(&tensors)? };
        let given = std::mem::take(&mut self.given);
        let done = if !params.is_empty() && !given.iter().any(|given| given.any) {
            let expected = "none was given since the last step; give each tensor's before finishing one";
            Err(Error::invalid("number of gradients", 0, expected))
        } else {
            let grads: Vec<GradRef<'_>> = given
                .iter()
                .map(|given| if given.any { given.sum.get() } else { GradRef::Missing })
                .collect();
            input.on_host().and_then(|input| self.step(&mut params, &grads, &input))
        };
        self.given = given;
        if done.is_ok() {
            self.given.iter_mut().for_each(|given| given.any = false);
        }
        done
    }
}
