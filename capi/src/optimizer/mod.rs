//! The handle of an optimizer.

mod methods;
mod report;
mod settings;
mod state;
mod step;
mod structs;
mod tensors;

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard};

pub use self::methods::*;
pub use self::report::*;
pub use self::settings::*;
pub use self::state::*;
pub use self::step::*;
pub use self::structs::*;
use self::tensors::Place;
use super::pointers::{Array, address, destroy, lock, read_or_default};
use super::status::{Failure, RFD_ERROR_UNSUPPORTED, Result};
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

/// An optimizer of any method.
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

/// Frees an optimizer. Null does nothing. On a device it waits for the work that uses the optimizer's memory;
/// captured steps must not be replayed any more. Parameters and gradients stay the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_destroy(optimizer: *mut rfd_optimizer) {
    // SAFETY: null, or a handle that its owner uses no more.
    unsafe { destroy(optimizer) }
}
