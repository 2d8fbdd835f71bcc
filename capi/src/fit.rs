//! Fits as plain structs.

use std::ffi::c_char;

use super::buffer::rfd_buffer;
use super::pointers::{Out, OutStruct, Versioned, path, read, versioned};
use super::statistics::collect;
use super::status::{Failure, Result, guard, rfd_status};
use rfdescent::Moments;
use rfdescent::estimation::{AutoFit, Fit, FitOptions, SampleTable};

/// A flag of a fit: samples that look foreign to the others, as those of initialisations that blow up, are
/// left out. Where there are none the fit is the same to the bit.
pub const RFD_FIT_ROBUST: u32 = 1;

/// Mean and variances that were estimated from samples.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rfd_fit {
    /// sizeof(rfd_fit).
    pub size: usize,
    /// Mean of the cost.
    pub mean: f64,
    /// Variance of the cost.
    pub variance: f64,
    /// Variance of one example's loss around the cost.
    pub noise_variance: f64,
    /// Expected squared norm of the cost's gradient.
    pub grad_variance: f64,
    /// Expected squared norm of one example's gradient noise.
    pub noise_grad_variance: f64,
    /// Estimated standard deviation of `variance` divided by it; 0.3 is good enough for training.
    pub relative_std: f64,
    /// Mini-batches used: as many as samples.
    pub batches: u64,
    /// Examples used: the sum of the batch sizes.
    pub examples: u64,
    /// Reweightings until mean, variance and noise variance settled.
    pub iterations_loss: u32,
    /// Reweightings until the gradient's variances settled.
    pub iterations_grad: u32,
}

versioned!(rfd_fit {});

impl From<Fit> for rfd_fit {
    fn from(fit: Fit) -> Self {
        Self {
            size: size_of::<Self>(),
            mean: fit.mean,
            variance: fit.variance,
            noise_variance: fit.noise_variance,
            grad_variance: fit.grad_variance,
            noise_grad_variance: fit.noise_grad_variance,
            relative_std: fit.relative_std,
            batches: fit.batches,
            examples: fit.examples,
            iterations_loss: fit.iterations_loss,
            iterations_grad: fit.iterations_grad,
        }
    }
}

impl From<rfd_fit> for Fit {
    fn from(fit: rfd_fit) -> Self {
        Self {
            mean: fit.mean,
            variance: fit.variance,
            noise_variance: fit.noise_variance,
            grad_variance: fit.grad_variance,
            noise_grad_variance: fit.noise_grad_variance,
            relative_std: fit.relative_std,
            batches: fit.batches,
            examples: fit.examples,
            iterations_loss: fit.iterations_loss,
            iterations_grad: fit.iterations_grad,
        }
    }
}

impl rfd_fit {
    pub(super) fn moments(self, dims: u64) -> Moments {
        Fit::from(self).moments(dims)
    }
}

/// Where a fit goes, and what there is to say about it.
struct Outputs {
    options: FitOptions,
    result: OutStruct<rfd_fit>,
    warnings: Option<Out<*mut rfd_buffer>>,
}

impl Outputs {
    /// # Safety
    /// What the header says of these pointers.
    unsafe fn new(flags: u32, result: *mut rfd_fit, warnings: *mut *mut rfd_buffer) -> Result<Self> {
        if flags & !RFD_FIT_ROBUST != 0 {
            return Err(Failure::invalid("flags", flags, "must be RFD_FIT_* or 0"));
        }
        // SAFETY: the caller vouches for them.
        let (result, warnings) = unsafe { (OutStruct::new(result)?, Out::optional(warnings, "warnings")?) };
        Ok(Self { options: FitOptions { robust: flags & RFD_FIT_ROBUST != 0 }, result, warnings })
    }

    fn set(self, samples: &SampleTable) -> Result<()> {
        let fitted = samples.fit(&self.options)?;
        if let Some(out) = self.warnings {
            out.set_handle(rfd_buffer::lines(&fitted.warnings(AutoFit::default().tolerance)));
        }
        self.result.set(&fitted.fit.into());
        Ok(())
    }
}

/// Fits mean and variances to `count` samples: mean losses of mini-batches at random initialisations, squared
/// norms of their gradients, and batch sizes, of which there must be at least two different ones. Set
/// `result->size` before the call.
///
/// `flags` is RFD_FIT_ROBUST or 0. `warnings` may be null, no other pointer unless `count` is 0. On success
/// `*warnings` is a new buffer, to be freed with rfd_buffer_destroy, with a line for each warning, empty for
/// none. Warnings are about samples that look foreign to the others (by their place from 0, with how far from
/// these they are and what the fit is without them), losses of two populations, and heavy tails.
///
/// Any thread. RFD_ERROR_INVALID_ARGUMENT names the sample that is outside its domain, RFD_ERROR_ESTIMATION
/// says which samples are missing, or that foreign ones prevent a fit.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_fit_array(
    losses: *const f64,
    sq_grad_norms: *const f64,
    batch_sizes: *const u64,
    count: usize,
    flags: u32,
    result: *mut rfd_fit,
    warnings: *mut *mut rfd_buffer,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (samples, out) = unsafe {
            (collect(losses, sq_grad_norms, batch_sizes, count)?, Outputs::new(flags, result, warnings)?)
        };
        out.set(&SampleTable::from(samples))
    })
}

/// Fits mean and variances to a CSV file with the columns `loss`, `grad_norm` (or `sq_grad_norm`) and
/// `batchsize`. Set `result->size` before the call.
///
/// As rfd_fit_array, but warnings name rows. No pointer may be null but `warnings`. RFD_ERROR_IO when the
/// file can't be read; the message of RFD_ERROR_FILE has row and column.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_fit_csv(
    file: *const c_char,
    flags: u32,
    result: *mut rfd_fit,
    warnings: *mut *mut rfd_buffer,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (file, out) = unsafe { (path(file, "file")?, Outputs::new(flags, result, warnings)?) };
        out.set(&SampleTable::read(file)?)
    })
}

/// How many more examples a fit needs for its relative standard deviation to fall to `tolerance`, at batch
/// sizes in the same proportions; 0 when it is there.
///
/// No pointer may be null. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_fit_further_examples(
    fit: *const rfd_fit,
    tolerance: f64,
    examples: *mut u64,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (fit, out) = unsafe { (read(fit)?, Out::new(examples, "examples")?) };
        out.set(Fit::from(fit).reliability(tolerance).map_or(0, |unreliable| unreliable.further_examples));
        Ok(())
    })
}
