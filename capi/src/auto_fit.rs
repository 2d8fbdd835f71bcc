//! Auto-fit around callbacks of the caller.

use std::ffi::{c_char, c_void};
use std::ops::ControlFlow;

use super::buffer::rfd_buffer;
use super::design::kind;
use super::fit::rfd_fit;
use super::model::code;
use super::pointers::{Out, OutStruct, Versioned, initialise, path, read_or_default, versioned};
use super::statistics::rfd_statistics;
use super::status::{Failure, RFD_ERROR_NULL, Result, guard, rfd_status};
use rfdescent::estimation::{AutoFit, BatchRequest, BatchSample, OnForeign, Progress, Sampler, SamplerError};

/// Evaluates the cost for rfd_auto_fit: initialises the parameters at random, draws `batch_size` examples at
/// random, and writes the mean loss over them and the squared norm of that mean's gradient. All randomness
/// should come from `seed`.
///
/// Returns 0, or any other number to end the run with RFD_ERROR_CALLBACK. Must not throw, longjmp or
/// otherwise unwind. Called on the thread that called rfd_auto_fit.
pub type rfd_sample_callback = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        batch_size: u64,
        seed: u64,
        loss: *mut f64,
        sq_grad_norm: *mut f64,
    ) -> i32,
>;

/// Evaluates the cost at `count` mini-batches for rfd_auto_fit_many: as rfd_sample_callback for each, of
/// `batch_sizes[i]` examples with `seeds[i]`, into `losses[i]` and `sq_grad_norms[i]`. So a device's results
/// can be waited for once.
///
/// Sets `*done` to the number of mini-batches, from the first on, that were evaluated; they count even when
/// it returns another number than 0 to end the run. More than `count` end the run with RFD_ERROR_CALLBACK,
/// and none of them counts.
pub type rfd_sample_many_callback = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        count: usize,
        batch_sizes: *const u64,
        seeds: *const u64,
        losses: *mut f64,
        sq_grad_norms: *mut f64,
        done: *mut usize,
    ) -> i32,
>;

/// Hears how far rfd_auto_fit has come: once before the first sample is drawn and after each. Returns 0 to go
/// on, any other number to end the run with RFD_ERROR_STOPPED. `progress` is valid during the call only.
/// Otherwise as rfd_sample_callback.
pub type rfd_progress_callback =
    Option<unsafe extern "C" fn(user_data: *mut c_void, progress: *const rfd_progress) -> i32>;

/// How far rfd_auto_fit has come.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rfd_progress {
    /// The struct's size in the library, which may have more fields than the caller's header.
    pub size: usize,
    /// Mini-batches so far.
    pub batches: u64,
    /// Examples so far.
    pub examples: u64,
    /// Examples that will have been needed in the end, by the last fit; 0 before the first.
    pub needed: u64,
    /// Relative standard deviation of the variance in the last fit; NaN before the first.
    pub relative_std: f64,
    /// Where it has to come below.
    pub tolerance: f64,
    /// Examples to expect in the end, `max_budget` at most: `needed` once there is a fit. Before, and so
    /// before the first sample is drawn, what a first guess of the variances would need.
    pub expected: u64,
    /// How long those still to be drawn will take, judged by the ones drawn so far; NaN before the first.
    pub remaining_seconds: f64,
}

/// Foreign samples end the run with RFD_ERROR_ESTIMATION where they decide over the fit, changing a variance
/// by more than a factor of 2, or leave none: no number of further samples would make up for that. Where they
/// do not, a warning names them.
pub const RFD_FOREIGN_REFUSE: u32 = 0;
/// Foreign samples are left out of the fit, as with RFD_FIT_ROBUST; a warning names them.
pub const RFD_FOREIGN_LEAVE_OUT: u32 = 1;
/// Foreign samples are part of the fit, for losses that are known to have heavy tails; a warning names them.
pub const RFD_FOREIGN_KEEP: u32 = 2;

/// Options of rfd_auto_fit; rfd_auto_fit_options_init sets the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rfd_auto_fit_options {
    /// sizeof(rfd_auto_fit_options).
    pub size: usize,
    /// Relative standard deviation of the variance at which to stop. Default 0.3.
    pub tolerance: f64,
    /// Examples to draw before the first fit. Default 6000.
    pub initial_budget: u64,
    /// Examples to draw at most, those in the cache included. Default 1,000,000.
    pub max_budget: u64,
    /// Smallest batch size to draw. Default 20.
    pub min_batch_size: u64,
    /// Largest batch size to draw: the size of the data set. 0, the default: the budget is the limit.
    pub max_batch_size: u64,
    /// All that is random follows from it. Default 0.
    pub seed: u64,
    /// CSV file that keeps the samples: created, or gone on from, so that an interrupted run loses none.
    /// Null, the default: none.
    pub cache: *const c_char,
    /// One of RFD_DESIGN_*. Default RFD_DESIGN_GIBBS.
    pub design: u32,
    /// What to do about samples that look foreign to the others, as those of initialisations that blow up:
    /// one of RFD_FOREIGN_*. Default RFD_FOREIGN_REFUSE.
    pub on_foreign: u32,
}

versioned!(rfd_auto_fit_options {
    tolerance: 0.3,
    initial_budget: 6000,
    max_budget: 1_000_000,
    min_batch_size: 20
});

/// By their code.
const FOREIGN: [OnForeign; 3] = [OnForeign::Refuse, OnForeign::LeaveOut, OnForeign::Keep];

impl rfd_auto_fit_options {
    /// # Safety
    /// `cache` is null or a string that ends with 0.
    unsafe fn convert(&self) -> Result<AutoFit> {
        let cache = if self.cache.is_null() {
            None
        } else {
            // SAFETY: the caller vouches for it.
            Some(unsafe { path(self.cache, "cache")? }.to_path_buf())
        };
        Ok(AutoFit {
            tolerance: self.tolerance,
            initial_budget: self.initial_budget,
            max_budget: self.max_budget,
            min_batch_size: self.min_batch_size,
            max_batch_size: (self.max_batch_size > 0).then_some(self.max_batch_size),
            seed: self.seed,
            design: kind(self.design)?,
            on_foreign: code("on_foreign", self.on_foreign, &FOREIGN, "must be one of RFD_FOREIGN_*")?,
            cache,
        })
    }
}

/// What was wrong with a sample callback.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallbackError {
    #[error("the sample callback returned {0}")]
    Returned(i32),
    #[error(
        "the sample callback set *done = {done}, but was given count = {count} mini-batches; set it to the number of \
         those it has evaluated"
    )]
    TooMany { done: usize, count: usize },
}

/// The callback of rfd_auto_fit_many as a sampler.
struct Many {
    dims: u64,
    most_at_once: usize,
    sample: unsafe extern "C" fn(
        *mut c_void,
        usize,
        *const u64,
        *const u64,
        *mut f64,
        *mut f64,
        *mut usize,
    ) -> i32,
    user_data: *mut c_void,
}

impl Sampler for Many {
    fn dims(&self) -> u64 {
        self.dims
    }

    fn sample(&mut self, batch_size: u64, seed: u64) -> std::result::Result<BatchSample, SamplerError> {
        let mut drawn = Vec::new();
        self.sample_many(&[BatchRequest { batch_size, seed }], &mut drawn)?;
        drawn.pop().ok_or_else(|| "the sample callback gave no sample".into())
    }

    fn most_at_once(&self) -> usize {
        self.most_at_once
    }

    fn sample_many(
        &mut self,
        requests: &[BatchRequest],
        drawn: &mut Vec<BatchSample>,
    ) -> std::result::Result<(), SamplerError> {
        let count = requests.len();
        let batch_sizes: Vec<u64> = requests.iter().map(|request| request.batch_size).collect();
        let seeds: Vec<u64> = requests.iter().map(|request| request.seed).collect();
        // What a callback does not write is refused as not finite.
        let (mut losses, mut squares, mut done) = (vec![f64::NAN; count], vec![f64::NAN; count], 0);
        // SAFETY: a function of this type that does not unwind, says the header; all lists have `count`
        // elements.
        let code = unsafe {
            (self.sample)(
                self.user_data,
                count,
                batch_sizes.as_ptr(),
                seeds.as_ptr(),
                losses.as_mut_ptr(),
                squares.as_mut_ptr(),
                &raw mut done,
            )
        };
        if done > count {
            return Err(CallbackError::TooMany { done, count }.into());
        }
        let samples = losses.into_iter().zip(squares).take(done);
        drawn.extend(samples.map(|(loss, sq_grad_norm)| BatchSample { loss, sq_grad_norm }));
        if code == 0 { Ok(()) } else { Err(CallbackError::Returned(code).into()) }
    }
}

/// Sets all options to their defaults; `size` is sizeof(rfd_auto_fit_options).
///
/// `options` must not be null. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_auto_fit_options_init(
    options: *mut rfd_auto_fit_options,
    size: usize,
) -> rfd_status {
    // SAFETY: the header says what it may point to.
    guard(|| unsafe { initialise(options, size) })
}

/// Draws samples at batch sizes of its choice, by way of a callback, until the fitted variance is known well
/// enough or the budget is used up; then the fit is there all the same, with a warning. Set `fit->size`
/// before the call.
///
/// `options` may be null for the defaults, `progress` for no reports; `user_data` is passed to both callbacks
/// and may be anything. `dims` is the number of parameters. `fit` must not be null. Outputs that are null are
/// left out: on success `*statistics` is a new handle, of the samples that were fitted, which the caller
/// frees with rfd_statistics_destroy; `*warnings` a new buffer with a line for each warning, empty for none,
/// to be freed with rfd_buffer_destroy. There is a warning wherever the tolerance was not reached.
///
/// Any thread; the callbacks run on it. RFD_ERROR_CALLBACK and RFD_ERROR_STOPPED when a callback ended the
/// run, RFD_ERROR_ESTIMATION when a sample is not finite, foreign samples decide over the fit (`on_foreign`),
/// all losses or norms are one number, or the budget ended without any fit, RFD_ERROR_IO and RFD_ERROR_FILE
/// when the cache can't be used. The cache keeps every sample drawn in each of these
/// cases.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_auto_fit(
    options: *const rfd_auto_fit_options,
    dims: u64,
    sample: rfd_sample_callback,
    progress: rfd_progress_callback,
    user_data: *mut c_void,
    fit: *mut rfd_fit,
    statistics: *mut *mut rfd_statistics,
    warnings: *mut *mut rfd_buffer,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let call = unsafe { Call::new(options, fit, statistics, warnings)? };
        let Some(sample) = sample else { return Err(Failure::new(RFD_ERROR_NULL, "sample is null")) };
        let evaluate = |batch_size: u64, seed: u64| {
            // What a callback does not write is refused as not finite.
            let mut drawn = BatchSample { loss: f64::NAN, sq_grad_norm: f64::NAN };
            // SAFETY: a function of this type that does not unwind, says the header; both outputs are live.
            let code = unsafe {
                sample(user_data, batch_size, seed, &raw mut drawn.loss, &raw mut drawn.sq_grad_norm)
            };
            if code == 0 { Ok(drawn) } else { Err(CallbackError::Returned(code).into()) }
        };
        // SAFETY: the header says that `progress` is null or takes `user_data`.
        unsafe { call.run(&mut (dims, evaluate), progress, user_data) }
    })
}

/// The same as rfd_auto_fit for a callback that takes up to `most_at_once` mini-batches (at least 1) at once;
/// `progress` hears of these together. A cache that one of both began, the other goes on from, with the same
/// samples.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_auto_fit_many(
    options: *const rfd_auto_fit_options,
    dims: u64,
    most_at_once: usize,
    sample: rfd_sample_many_callback,
    progress: rfd_progress_callback,
    user_data: *mut c_void,
    fit: *mut rfd_fit,
    statistics: *mut *mut rfd_statistics,
    warnings: *mut *mut rfd_buffer,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let call = unsafe { Call::new(options, fit, statistics, warnings)? };
        let Some(sample) = sample else { return Err(Failure::new(RFD_ERROR_NULL, "sample is null")) };
        if most_at_once == 0 {
            return Err(Failure::invalid("most_at_once", most_at_once, "must be at least 1"));
        }
        // SAFETY: the header says that `progress` is null or takes `user_data`.
        unsafe { call.run(&mut Many { dims, most_at_once, sample, user_data }, progress, user_data) }
    })
}

/// What a run is asked to do and where its results go.
struct Call {
    options: AutoFit,
    fit: OutStruct<rfd_fit>,
    statistics: Option<Out<*mut rfd_statistics>>,
    warnings: Option<Out<*mut rfd_buffer>>,
}

impl Call {
    /// # Safety
    /// What the header says of these pointers.
    unsafe fn new(
        options: *const rfd_auto_fit_options,
        fit: *mut rfd_fit,
        statistics: *mut *mut rfd_statistics,
        warnings: *mut *mut rfd_buffer,
    ) -> Result<Self> {
        // SAFETY: the caller vouches for them.
        unsafe {
            Ok(Call {
                options: read_or_default(options)?.convert()?,
                fit: OutStruct::new(fit)?,
                statistics: Out::optional(statistics, "statistics")?,
                warnings: Out::optional(warnings, "warnings")?,
            })
        }
    }

    /// # Safety
    /// `progress` may be called with `user_data`.
    unsafe fn run(
        self,
        sampler: &mut dyn Sampler,
        progress: rfd_progress_callback,
        user_data: *mut c_void,
    ) -> Result<()> {
        let mut report = |now: &Progress| {
            let Some(progress) = progress else { return ControlFlow::Continue(()) };
            let now = rfd_progress {
                size: size_of::<rfd_progress>(),
                batches: now.batches,
                examples: now.examples,
                needed: now.needed.unwrap_or(0),
                relative_std: now.relative_std.unwrap_or(f64::NAN),
                tolerance: now.tolerance,
                expected: now.expected,
                remaining_seconds: now.remaining_seconds.unwrap_or(f64::NAN),
            };
            // SAFETY: a function of this type that does not unwind, says the header.
            match unsafe { progress(user_data, &raw const now) } {
                0 => ControlFlow::Continue(()),
                _ => ControlFlow::Break(()),
            }
        };
        let fitted = self.options.run(sampler, &mut report)?;
        self.fit.set(&fitted.fit.into());
        if let Some(out) = self.statistics {
            out.set_handle(rfd_statistics::new(fitted.statistics));
        }
        if let Some(out) = self.warnings {
            out.set_handle(rfd_buffer::lines(&fitted.warnings));
        }
        Ok(())
    }
}
