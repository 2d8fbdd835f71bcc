//! The handle of a batch-size design.

use super::model::code;
use super::pointers::{Out, destroy, shared};
use super::statistics::rfd_statistics;
use super::status::{Failure, Result, guard, rfd_status};
use rfdescent::estimation::{Design, DesignKind, DesignProblem};

/// Spreads the batch sizes out, which is safe against a wrong first guess of the variances. As published.
pub const RFD_DESIGN_GIBBS: u32 = 0;
/// The two batch sizes that give the smallest variance per example.
pub const RFD_DESIGN_C_OPTIMAL: u32 = 1;

/// A distribution of batch sizes to sample. Immutable, so any number of threads may use it at once.
pub struct rfd_design {
    design: Design,
}

pub(super) fn kind(kind: u32) -> Result<DesignKind> {
    code("design", kind, &[DesignKind::Gibbs, DesignKind::COptimal], "must be one of RFD_DESIGN_*")
}

/// Makes the best design for a guess of the cost's variance and of one example's variance around it.
///
/// `max_batch_size` 0 stands for none; `kind` is one of RFD_DESIGN_*. `design` must not be null. On success
/// `*design` is a new handle that the caller frees with rfd_design_destroy. Any thread.
/// RFD_ERROR_INVALID_ARGUMENT names the number that is outside its domain.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_design_create(
    variance: f64,
    noise_variance: f64,
    min_batch_size: u64,
    max_batch_size: u64,
    kind: u32,
    design: *mut *mut rfd_design,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what it may point to.
        let out = unsafe { Out::new(design, "design")? };
        let max_batch_size = (max_batch_size > 0).then_some(max_batch_size);
        let problem = DesignProblem { variance, noise_variance, min_batch_size, max_batch_size };
        out.set_handle(rfd_design { design: problem.design(self::kind(kind)?)? });
        Ok(())
    })
}

/// Makes the design of the next `further` examples, given the samples drawn already.
///
/// No pointer may be null. On success `*next` is a new handle that the caller frees with rfd_design_destroy.
/// `statistics`: one thread at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_design_after(
    design: *const rfd_design,
    statistics: *const rfd_statistics,
    further: u64,
    next: *mut *mut rfd_design,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (design, statistics, out) = unsafe {
            (shared(design, "design")?, shared(statistics, "statistics")?, Out::new(next, "next")?)
        };
        let drawn = statistics.snapshot()?.counts();
        out.set_handle(rfd_design { design: design.design.after(&drawn, further) });
        Ok(())
    })
}

/// Frees a design. Null does nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_design_destroy(design: *mut rfd_design) {
    // SAFETY: null, or a handle that its owner uses no more.
    unsafe { destroy(design) }
}

/// Number of different batch sizes; 0 when `design` is null. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_design_size(design: *const rfd_design) -> usize {
    let mut size = 0;
    guard(|| {
        // SAFETY: null or a live design, says the header.
        size = unsafe { shared(design, "design") }?.design.points().len();
        Ok(())
    });
    size
}

/// One of the batch sizes, in increasing order, and its share of the mini-batches to draw.
///
/// `design` must not be null; an output that is null is left out. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_design_point(
    design: *const rfd_design,
    index: usize,
    batch_size: *mut u64,
    share: *mut f64,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (design, batch_size, share) = unsafe {
            (
                &shared(design, "design")?.design,
                Out::optional(batch_size, "batch_size")?,
                Out::optional(share, "share")?,
            )
        };
        let points = design.points();
        let Some(&(size, weight)) = points.get(index) else {
            let expected = format!("must be below rfd_design_size, which is {}", points.len());
            return Err(Failure::invalid("index", index, &expected));
        };
        if let Some(out) = batch_size {
            out.set(size);
        }
        if let Some(out) = share {
            out.set(weight);
        }
        Ok(())
    })
}

/// The batch size at the quantile `u` in [0, 1); with u uniform, a draw from the distribution.
///
/// No pointer may be null. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_design_quantile(
    design: *const rfd_design,
    u: f64,
    batch_size: *mut u64,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (design, out) = unsafe { (shared(design, "design")?, Out::new(batch_size, "batch_size")?) };
        if !(0.0..1.0).contains(&u) {
            return Err(Failure::invalid("u", u, "must be at least 0 and below 1"));
        }
        out.set(design.design.quantile(u));
        Ok(())
    })
}

/// Examples after which the relative standard deviation of the fitted variance is `tolerance`, and those that
/// a mini-batch costs on average.
///
/// `design` must not be null; an output that is null is left out. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_design_cost(
    design: *const rfd_design,
    tolerance: f64,
    examples: *mut f64,
    expected_batch_size: *mut f64,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (design, examples, expected) = unsafe {
            (
                &shared(design, "design")?.design,
                Out::optional(examples, "examples")?,
                Out::optional(expected_batch_size, "expected_batch_size")?,
            )
        };
        if !(tolerance > 0.0 && tolerance.is_finite()) {
            return Err(Failure::invalid("tolerance", tolerance, "must be positive and finite"));
        }
        if let Some(out) = examples {
            out.set(design.examples_needed(tolerance));
        }
        if let Some(out) = expected {
            out.set(design.expected_batch_size());
        }
        Ok(())
    })
}
