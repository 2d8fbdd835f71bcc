//! The handle of an optimizer.

mod adaptive;
mod fitted;
mod report;
mod settings;
mod state;
mod step;
mod structs;
mod tensors;

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard};

pub use self::adaptive::*;
pub use self::fitted::*;
pub use self::report::*;
pub use self::settings::*;
pub use self::state::*;
pub use self::step::*;
pub use self::structs::*;
use self::tensors::Place;
use super::pointers::{Array, Out, address, destroy, lock, read, read_or_default};
use super::status::{Failure, RFD_ERROR_UNSUPPORTED, Result, guard, rfd_status};
use rfdescent::device::{Stream, Target};
use rfdescent::optimizer::{AnyOptimizer, Method, RawTensor, ReportReader};

/// Random Function Descent over a fixed list of tensors, with what it remembers of them. One thread at a
/// time: a call while another thread is in one returns RFD_ERROR_BUSY; rfd_optimizer_report and
/// rfd_optimizer_wait_report may be called at any time. Different optimizers are independent.
pub struct rfd_optimizer {
    inner: Mutex<Inner>,
    /// Beside the optimizer, so that reports can be read while a step runs.
    reports: ReportReader,
    place: Place,
}

/// What one thread at a time may use.
struct Inner {
    optimizer: AnyOptimizer,
    /// The last step's, for their memory.
    tensors: Vec<RawTensor>,
}

impl rfd_optimizer {
    fn new(optimizer: AnyOptimizer, place: Place) -> Self {
        let reports = optimizer.report_reader();
        Self { inner: Mutex::new(Inner { optimizer, tensors: Vec::new() }), reports, place }
    }

    fn lock(&self) -> Result<MutexGuard<'_, Inner>> {
        lock(&self.inner, "optimizer")
    }
}

fn stream(stream: *mut c_void) -> Stream {
    Stream::from_raw(address(stream))
}

/// An optimizer of either method.
///
/// # Safety
/// `options` and `specs` are what the header says of them.
unsafe fn create(
    method: impl Into<Method>,
    options: *const rfd_optimizer_options,
    specs: *const rfd_tensor_spec,
    count: usize,
) -> Result<rfd_optimizer> {
    // SAFETY: the caller vouches for both, and for what they point to.
    let (options, converted, specs) = unsafe {
        let options = read_or_default(options)?;
        let specs = Array::new(specs, count, "specs")?;
        let converted = options.convert()?;
        (options, converted, specs.iter().map(|spec| spec?.convert()).collect::<Result<Vec<_>>>()?)
    };
    let place = Place { kind: options.device_kind, index: options.device_index };
    let optimizer = AnyOptimizer::new(method, converted, specs, &target(place)?)?;
    Ok(rfd_optimizer::new(optimizer, place))
}

fn target(place: Place) -> Result<Target> {
    match place.kind {
        RFD_DEVICE_CPU if place.index != 0 => {
            Err(Failure::invalid("device_index", place.index, "must be 0 for the CPU"))
        }
        RFD_DEVICE_CPU => Ok(Target::Cpu),
        RFD_DEVICE_CUDA if !cfg!(feature = "cuda") => Err(Failure::new(
            RFD_ERROR_UNSUPPORTED,
            "device_kind = RFD_DEVICE_CUDA: this library was built without CUDA; build it with the feature `cuda`",
        )),
        RFD_DEVICE_CUDA => Ok(Target::Device(rfdescent::cuda::device(place.index as usize)?)),
        kind => Err(Failure::invalid("device_kind", kind, "must be one of RFD_DEVICE_*")),
    }
}

/// Makes an optimizer of a fitted model for `count` tensors, whose order every step follows.
///
/// `fitted`, its `model` and `optimizer` must not be null; `options` may be, for the defaults; `specs` may be
/// when `count` is 0. All inputs are copied; the model may be freed afterwards. On success `*optimizer` is a
/// new handle that the caller frees with rfd_optimizer_destroy.
///
/// Any thread. For CUDA the device's primary context is used, the one of CUDA's runtime; it is bound during
/// calls only. RFD_ERROR_INVALID_ARGUMENT names an option outside its domain, RFD_ERROR_TENSOR a tensor that
/// is listed twice or whose group does not exist; RFD_ERROR_DEVICE says why a device can't be used,
/// RFD_ERROR_UNSUPPORTED that the library was built without that kind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_fitted_optimizer_create(
    fitted: *const rfd_fitted,
    options: *const rfd_optimizer_options,
    specs: *const rfd_tensor_spec,
    count: usize,
    optimizer: *mut *mut rfd_optimizer,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (fitted, out) = unsafe { (read(fitted)?.convert(None)?, Out::new(optimizer, "optimizer")?) };
        // SAFETY: the header says so of the options and the specs.
        out.set_handle(unsafe { create(fitted, options, specs, count)? });
        Ok(())
    })
}

/// Makes an optimizer of the adaptive method, whose steps follow from the losses and gradients of training
/// itself, without a fitted model. Otherwise as rfd_fitted_optimizer_create.
///
/// `adaptive` may be null, for the defaults. The halves of sharded steps, rfd_optimizer_squared_norm and
/// rfd_optimizer_step_with_norm, are refused: the method needs the norms of whole tensors. A saved state can
/// be loaded into an optimizer of the same method only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_adaptive_optimizer_create(
    adaptive: *const rfd_adaptive,
    options: *const rfd_optimizer_options,
    specs: *const rfd_tensor_spec,
    count: usize,
    optimizer: *mut *mut rfd_optimizer,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (adaptive, out) = unsafe { (read_or_default(adaptive)?, Out::new(optimizer, "optimizer")?) };
        // SAFETY: the header says so of the options and the specs.
        out.set_handle(unsafe { create(adaptive.convert()?, options, specs, count)? });
        Ok(())
    })
}

/// Frees an optimizer. Null does nothing. On a device it waits for the work that uses the optimizer's memory;
/// captured steps must not be replayed any more. Parameters and gradients stay the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_destroy(optimizer: *mut rfd_optimizer) {
    // SAFETY: null, or a handle that its owner uses no more.
    unsafe { destroy(optimizer) }
}
