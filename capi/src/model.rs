//! The handle of a fitted covariance model.

use std::ffi::{CStr, CString, c_char};

use super::buffer::rfd_buffer;
use super::fit::rfd_fit;
use super::pointers::{Out, OutStruct, Versioned, destroy, path, read, shared, slice, text, versioned};
use super::status::{Failure, RFD_ERROR_INVALID_ARGUMENT, RFD_ERROR_NO_STEP, Result, guard, rfd_status};
use rfdescent::Moments;
use rfdescent::covariance::{Family, Model, NoStep, Observation, StepMode, StepRule, ValueAndSlope};

/// The minimiser of the conditional expectation: RFD as published.
pub const RFD_MODE_RFD: u32 = 0;
/// Its asymptote for small gradient cost quotients: a constant learning rate for a given loss.
pub const RFD_MODE_A_RFD: u32 = 1;
/// The asymptote, but no step longer than RFD's longest.
pub const RFD_MODE_CLIPPED_A_RFD: u32 = 2;

/// A fitted covariance model. Immutable, so any number of threads may use it at once.
pub struct rfd_model {
    pub(super) model: Model,
    covariance: CString,
}

/// Mean and variances of the cost and of its mini-batch noise.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rfd_moments {
    /// sizeof(rfd_moments).
    pub size: usize,
    /// Mean of the cost.
    pub mean: f64,
    /// Variance of the cost; > 0.
    pub variance: f64,
    /// Variance of one example's loss around the cost; >= 0.
    pub noise_variance: f64,
    /// Expected squared norm of the cost's gradient; > 0.
    pub grad_variance: f64,
    /// Expected squared norm of one example's gradient noise; >= 0.
    pub noise_grad_variance: f64,
    /// Number of parameters; >= 1.
    pub dims: u64,
}

versioned!(rfd_moments {});

impl From<rfd_moments> for Moments {
    fn from(from: rfd_moments) -> Self {
        let rfd_moments { size: _, mean, variance, noise_variance, grad_variance, noise_grad_variance, dims } =
            from;
        Self { mean, variance, noise_variance, grad_variance, noise_grad_variance, dims }
    }
}

impl From<Moments> for rfd_moments {
    fn from(from: Moments) -> Self {
        let Moments { mean, variance, noise_variance, grad_variance, noise_grad_variance, dims } = from;
        let size = size_of::<Self>();
        Self { size, mean, variance, noise_variance, grad_variance, noise_grad_variance, dims }
    }
}

impl rfd_model {
    fn new(model: Model) -> Self {
        let name = model.family().map_or_else(|| model.covariance().name(), |family| family.to_string());
        Self { model, covariance: CString::new(name).unwrap_or_default() }
    }
}

/// Looks a number up that stands for a value.
pub(super) fn code<T: Copy>(name: &str, value: u32, values: &[T], expected: &str) -> Result<T> {
    values.get(value as usize).copied().ok_or_else(|| Failure::invalid(name, value, expected))
}

pub(super) fn rule(mode: u32, conservatism: f64) -> Result<StepRule> {
    let modes = [StepMode::Rfd, StepMode::ARfd, StepMode::ClippedARfd];
    Ok(StepRule::new(code("mode", mode, &modes, "must be one of RFD_MODE_*")?, conservatism)?)
}

/// Makes a model from moments.
///
/// `covariance` is "squared_exponential" (or "se"), "rational_quadratic:BETA" (or "rq:BETA"; BETA is 1 when
/// left out with its colon), "matern:1.5" or "matern:2.5". No pointer may be null; both inputs are copied.
/// On success `*model` is a new handle that the caller frees with rfd_model_destroy. Any thread.
/// RFD_ERROR_INVALID_ARGUMENT names the moment that is outside its domain.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_model_create(
    covariance: *const c_char,
    moments: *const rfd_moments,
    model: *mut *mut rfd_model,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (covariance, moments, out) =
            unsafe { (text(covariance, "covariance")?, read(moments)?, Out::new(model, "model")?) };
        out.set_handle(rfd_model::new(Model::new(covariance.parse::<Family>()?, moments.into())?));
        Ok(())
    })
}

/// Makes a model from a fit, for a cost of `dims` parameters. Otherwise as rfd_model_create.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_model_create_from_fit(
    covariance: *const c_char,
    fit: *const rfd_fit,
    dims: u64,
    model: *mut *mut rfd_model,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (covariance, fit, out) =
            unsafe { (text(covariance, "covariance")?, read(fit)?, Out::new(model, "model")?) };
        out.set_handle(rfd_model::new(Model::new(covariance.parse::<Family>()?, fit.moments(dims))?));
        Ok(())
    })
}

/// Frees a model. Null does nothing. Optimizers that were made with it keep what they need.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_model_destroy(model: *mut rfd_model) {
    // SAFETY: null, or a model that its owner uses no more.
    unsafe { destroy(model) }
}

/// Reads a file that rfd_model_save, or the Rust library, wrote.
///
/// No pointer may be null. On success `*model` is a new handle that the caller frees with rfd_model_destroy.
/// Any thread. RFD_ERROR_IO when the file can't be read, RFD_ERROR_FILE when it is no model or one of another
/// version.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_model_load(file: *const c_char, model: *mut *mut rfd_model) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (file, out) = unsafe { (path(file, "file")?, Out::new(model, "model")?) };
        out.set_handle(rfd_model::new(Model::load(file)?));
        Ok(())
    })
}

/// Writes a model to a file, whole or not at all.
///
/// No pointer may be null. Any thread. RFD_ERROR_IO when the file can't be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_model_save(model: *const rfd_model, file: *const c_char) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (model, file) = unsafe { (shared(model, "model")?, path(file, "file")?) };
        Ok(model.model.save(file)?)
    })
}

/// Reads what rfd_model_to_json wrote: `size` bytes at `json`.
///
/// No pointer may be null; the text is not kept. On success `*model` is a new handle that the caller frees
/// with rfd_model_destroy. Any thread. RFD_ERROR_FILE when it is no model or one of another version.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_model_from_json(
    json: *const c_char,
    size: usize,
    model: *mut *mut rfd_model,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (json, out) = unsafe { (utf8(json, size, "json")?, Out::new(model, "model")?) };
        out.set_handle(rfd_model::new(Model::from_json(json)?));
        Ok(())
    })
}

/// Text by length.
///
/// # Safety
/// As [`slice`].
pub(super) unsafe fn utf8<'a>(pointer: *const c_char, size: usize, name: &str) -> Result<&'a str> {
    // SAFETY: null, or valid for reads of `size` bytes, says the caller.
    let bytes = unsafe { slice(pointer.cast::<u8>(), size, name)? };
    std::str::from_utf8(bytes).map_err(|error| Failure::invalid(name, error, "must be UTF-8"))
}

/// The model as JSON text.
///
/// No pointer may be null. On success `*json` is a new buffer that the caller frees with rfd_buffer_destroy.
/// Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_model_to_json(
    model: *const rfd_model,
    json: *mut *mut rfd_buffer,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (model, out) = unsafe { (shared(model, "model")?, Out::new(json, "json")?) };
        out.set_handle(rfd_buffer::new(model.model.to_json()?));
        Ok(())
    })
}

/// The name of the covariance, as rfd_model_create takes it; "" when `model` is null.
///
/// Never null. The text belongs to the model. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_model_covariance(model: *const rfd_model) -> *const c_char {
    const NONE: &CStr = c"";
    let mut name = NONE.as_ptr();
    guard(|| {
        // SAFETY: null or a live model, says the header.
        name = unsafe { shared(model, "model") }?.covariance.as_ptr();
        Ok(())
    });
    name
}

/// The moments the model was made from. Set `moments->size` before the call.
///
/// No pointer may be null. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_model_moments(model: *const rfd_model, moments: *mut rfd_moments) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (model, out) = unsafe { (shared(model, "model")?, OutStruct::new(moments)?) };
        out.set(&(*model.model.moments()).into());
        Ok(())
    })
}

/// The length scale that follows from the moments, and the longest step: that at a loss of the cost's mean.
///
/// `model` must not be null; an output that is null is left out. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_model_scales(
    model: *const rfd_model,
    length_scale: *mut f64,
    plateau_step_size: *mut f64,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (model, length_scale, plateau) = unsafe {
            (
                &shared(model, "model")?.model,
                Out::optional(length_scale, "length_scale")?,
                Out::optional(plateau_step_size, "plateau_step_size")?,
            )
        };
        set(length_scale, model.length_scale());
        set(plateau, model.plateau_step_size());
        Ok(())
    })
}

fn set<T>(out: Option<Out<T>>, value: T) {
    if let Some(out) = out {
        out.set(value);
    }
}

/// The learning rate towards which RFD's tends when the loss tends to `limiting_loss`, which must be below
/// the mean.
///
/// `inv_batch_size` is 1/b for batches of b examples, or 0 for no noise. No pointer may be null. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_model_asymptotic_learning_rate(
    model: *const rfd_model,
    limiting_loss: f64,
    inv_batch_size: f64,
    learning_rate: *mut f64,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (model, out) = unsafe { (shared(model, "model")?, Out::new(learning_rate, "learning_rate")?) };
        out.set(model.model.asymptotic_learning_rate(limiting_loss, inv_batch_size)?);
        Ok(())
    })
}

/// The step size for a loss and the norm of its gradient, without an optimizer.
///
/// `inv_batch_size` is 1/b for batches of b examples, or 0 for no noise; `mode` one of RFD_MODE_*;
/// `conservatism` in [0, 1), 0 for none. `*step_size` is the length of the step: divide it by the norm for
/// the learning rate. `*theta` is the gradient cost quotient, infinite at a loss of the mean or above.
/// `model` must not be null; an output that is null is left out. Any thread. RFD_ERROR_NO_STEP when loss or
/// norm are not finite, or the norm is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_model_step(
    model: *const rfd_model,
    loss: f64,
    grad_norm: f64,
    inv_batch_size: f64,
    mode: u32,
    conservatism: f64,
    step_size: *mut f64,
    theta: *mut f64,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (model, step_size, theta) = unsafe {
            (
                &shared(model, "model")?.model,
                Out::optional(step_size, "step_size")?,
                Out::optional(theta, "theta")?,
            )
        };
        rfdescent::covariance::validate_inv_batch_size(inv_batch_size)?;
        let observation = Observation { loss, grad_norm, inv_batch_size };
        let step = model.step(&observation, &rule(mode, conservatism)?).map_err(no_step)?;
        set(step_size, step.step_size);
        set(theta, step.theta);
        Ok(())
    })
}

fn no_step(reason: NoStep) -> Failure {
    let status = match reason {
        NoStep::InvalidArgument => RFD_ERROR_INVALID_ARGUMENT,
        NoStep::NonFiniteLoss | NoStep::NonFiniteGradient | NoStep::ZeroGradient => RFD_ERROR_NO_STEP,
    };
    Failure::new(status, format!("no step: {reason}"))
}

/// The cost expected after a step of the given size, knowing loss and gradient norm here, and its derivative
/// in the step size.
///
/// `model` must not be null; an output that is null is left out. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_model_conditional_mean(
    model: *const rfd_model,
    loss: f64,
    grad_norm: f64,
    inv_batch_size: f64,
    step_size: f64,
    value: *mut f64,
    slope: *mut f64,
) -> rfd_status {
    guard(|| {
        let observation = Observation { loss, grad_norm, inv_batch_size };
        // SAFETY: the header says what these may point to.
        unsafe {
            value_and_slope(model, value, slope, |model| model.conditional_mean(&observation, step_size))
        }
    })
}

/// The variance of the cost after a step of the given size, knowing loss and gradient here, and its
/// derivative in the step size. It does not depend on the values that were observed.
///
/// `model` must not be null; an output that is null is left out. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_model_conditional_variance(
    model: *const rfd_model,
    inv_batch_size: f64,
    step_size: f64,
    value: *mut f64,
    slope: *mut f64,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        unsafe {
            value_and_slope(model, value, slope, |model| {
                model.conditional_variance(inv_batch_size, step_size)
            })
        }
    })
}

/// # Safety
/// `model` is null or a live model, the outputs are null or valid for writes.
unsafe fn value_and_slope(
    model: *const rfd_model,
    value: *mut f64,
    slope: *mut f64,
    compute: impl FnOnce(&Model) -> rfdescent::Result<ValueAndSlope>,
) -> Result<()> {
    // SAFETY: the caller vouches for these.
    let (model, value, slope) =
        unsafe { (shared(model, "model")?, Out::optional(value, "value")?, Out::optional(slope, "slope")?) };
    let result = compute(&model.model)?;
    set(value, result.value);
    set(slope, result.slope);
    Ok(())
}
