//! The handle of an optimizer.

mod adaptive;
mod backend;
mod device;
mod fitted;
mod host;
mod structs;

use std::ffi::{c_char, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use self::adaptive::*;
use self::backend::{Backend, Tensors};
pub use self::fitted::*;
use self::host::Host;
pub use self::structs::*;
use super::buffer::rfd_buffer;
use super::pointers::{
    Array, Out, OutStruct, Versioned, destroy, lock, no_stream, path, read, shared, slice,
};
use super::status::{Failure, RFD_ERROR_NULL, RFD_ERROR_UNSUPPORTED, Result, guard, rfd_status};
use rfdescent::device::{Device, StatusReader};
use rfdescent::optimizer::DeviceOptimizer;
use rfdescent::optimizer::{Group, Method, Optimizer, StepReport};

/// Random Function Descent over a fixed list of tensors, with what it remembers of them. One thread at a
/// time: a call while another thread is in one returns RFD_ERROR_BUSY; rfd_optimizer_report and
/// rfd_optimizer_wait_report may be called at any time. Different optimizers are independent.
pub struct rfd_optimizer {
    backend: Mutex<Box<dyn Backend>>,
    status: Status,
}

/// Where the report of the last step is, beside the optimizer, so that it can be read while a step runs.
enum Status {
    Host(Mutex<rfd_step_report>),
    Device(Device, StatusReader),
}

impl rfd_optimizer {
    fn on_host(optimizer: Optimizer) -> Self {
        let backend: Box<dyn Backend> = Box::new(Host::new(optimizer));
        let status = Status::Host(Mutex::new(rfd_step_report::from_none()));
        Self { backend: Mutex::new(backend), status }
    }

    fn on_device(optimizer: DeviceOptimizer, index: u32) -> Self {
        let status = Status::Device(optimizer.device().clone(), optimizer.status_reader());
        let backend: Box<dyn Backend> = Box::new(device::OnDevice::new(optimizer, index));
        Self { backend: Mutex::new(backend), status }
    }

    fn lock(&self) -> Result<MutexGuard<'_, Box<dyn Backend>>> {
        lock(&self.backend, "optimizer")
    }

    fn record(&self, report: StepReport) {
        match &self.status {
            Status::Host(last) => *last.lock().unwrap_or_else(PoisonError::into_inner) = report.into(),
            Status::Device(..) => {}
        }
    }

    fn report(&self) -> Result<rfd_step_report> {
        match &self.status {
            Status::Host(last) => Ok(*last.lock().unwrap_or_else(PoisonError::into_inner)),
            Status::Device(_, reader) => Ok(reader.read()?.map_or(rfd_step_report::from_none(), Into::into)),
        }
    }

    fn wait(&self, stream: *mut c_void) -> Result<()> {
        match &self.status {
            Status::Host(_) => no_stream(stream),
            Status::Device(device, _) => Ok(device.synchronize(device::stream(stream))?),
        }
    }
}

impl rfd_step_report {
    /// Before the first step.
    fn from_none() -> Self {
        Self::DEFAULT
    }
}

/// A struct that may be null, for its defaults.
///
/// # Safety
/// As [`read`].
unsafe fn read_or_default<T: Versioned>(pointer: *const T) -> Result<T> {
    // SAFETY: the caller vouches for the same.
    if pointer.is_null() { Ok(T::DEFAULT) } else { unsafe { read(pointer) } }
}

/// An optimizer of either method.
///
/// # Safety
/// `options` and `specs` are what the header says of them.
unsafe fn create(
    method: impl Into<Method>,
    fitted: Option<&Fitted>,
    options: *const rfd_optimizer_options,
    specs: *const rfd_tensor_spec,
    count: usize,
) -> Result<rfd_optimizer> {
    // SAFETY: the caller vouches for both, and for what they point to.
    let (options, mut converted, specs) = unsafe {
        let options = read_or_default(options)?;
        let specs = Array::new(specs, count, "specs")?;
        let converted = options.convert()?;
        (options, converted, specs.iter().map(|spec| spec?.convert()).collect::<Result<Vec<_>>>()?)
    };
    if let Some(fitted) = fitted {
        fitted.add_to(&mut converted)?;
    }
    match options.device_kind {
        RFD_DEVICE_CPU if options.device_index != 0 => {
            Err(Failure::invalid("device_index", options.device_index, "must be 0 for the CPU"))
        }
        RFD_DEVICE_CPU => Ok(rfd_optimizer::on_host(Optimizer::new(method, converted, specs)?)),
        RFD_DEVICE_CUDA if !cfg!(feature = "cuda") => Err(Failure::new(
            RFD_ERROR_UNSUPPORTED,
            "device_kind = RFD_DEVICE_CUDA: this library was built without CUDA; build it with the feature `cuda`",
        )),
        RFD_DEVICE_CUDA => {
            let device = rfdescent::cuda::device(options.device_index as usize)?;
            let optimizer = DeviceOptimizer::new(method, converted, specs, &device)?;
            Ok(rfd_optimizer::on_device(optimizer, options.device_index))
        }
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
        let (fitted, out) = unsafe { (read(fitted)?.convert()?, Out::new(optimizer, "optimizer")?) };
        let Some(model) = fitted.model.clone() else {
            return Err(Failure::new(RFD_ERROR_NULL, "model is null"));
        };
        // SAFETY: the header says so of the options and the specs.
        out.set_handle(unsafe { create(model, Some(&fitted), options, specs, count)? });
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
        out.set_handle(unsafe { create(adaptive.convert()?, None, options, specs, count)? });
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

/// Everything that a step is given by pointer.
struct StepArguments<'a> {
    optimizer: &'a rfd_optimizer,
    tensors: Tensors<'a>,
}

impl<'a> StepArguments<'a> {
    /// # Safety
    /// `optimizer` is null or a live handle; the lists are null or point to `count` descriptors.
    unsafe fn new(
        optimizer: *mut rfd_optimizer,
        params: *const rfd_tensor,
        grads: *const rfd_tensor,
        count: usize,
    ) -> Result<Self> {
        // SAFETY: the caller vouches for these.
        unsafe {
            let optimizer = shared(optimizer, "optimizer")?;
            let tensors = Tensors {
                params: Array::new(params, count, "params")?,
                grads: Array::new(grads, count, "grads")?,
            };
            Ok(Self { optimizer, tensors })
        }
    }

    /// # Safety As [`Backend::step`]; `input` and `report` are null or point to structs whose size says how
    /// long they are.
    unsafe fn step(
        self,
        norm: Option<*const f64>,
        input: *const rfd_step_input,
        stream: *mut c_void,
        report: *mut rfd_step_report,
    ) -> Result<()> {
        // SAFETY: the caller vouches for these.
        let (input, out) =
            unsafe { (read(input)?, if report.is_null() { None } else { Some(OutStruct::new(report)?) }) };
        if out.is_some() && !matches!(self.optimizer.status, Status::Host(_)) {
            let expected = "must be null: a step on a device is only queued; ask rfd_optimizer_report";
            return Err(Failure::invalid("report", format!("{report:p}"), expected));
        }
        let mut backend = self.optimizer.lock()?;
        // SAFETY: the caller vouches for the memory of the tensors.
        let done = unsafe { backend.step(self.tensors, norm, &input, stream)? };
        if let Some(done) = done {
            self.optimizer.record(done);
            if let Some(out) = out {
                out.set(&done.into());
            }
        }
        Ok(())
    }
}

/// One step: norm, step size, update of all parameters.
///
/// `params` and `grads` have `count` elements each, in the order of the specs; they and `input` are copied.
/// Parameters and gradients stay the caller's. `optimizer`, `params`, `grads` and `input` must not be null,
/// but `params` and `grads` may be when `count` is 0.
///
/// On the CPU `stream` is null, and `report`, unless it is null, receives what the step did; set
/// `report->size` before. On a CUDA device `stream` is a CUstream or cudaStream_t of the device's primary
/// context (null, 1 and 2 are the default streams), and `report` is null: the step is queued there and
/// nothing waits for it, so parameters must stay allocated, and gradients unchanged, until the stream has
/// done it. It can be captured in a CUDA graph; then call rfd_optimizer_init_master_weights before, if there
/// are master weights. Steps of one optimizer go to one stream, or to streams that the caller orders.
///
/// One thread at a time. Input that is not finite, a zero gradient or found_inf skip the step: RFD_OK,
/// nothing has changed, and the report says why. RFD_ERROR_TENSOR names a tensor whose count, format, device
/// or alignment is wrong, or that shares memory with another one; nothing has changed then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_step(
    optimizer: *mut rfd_optimizer,
    params: *const rfd_tensor,
    grads: *const rfd_tensor,
    count: usize,
    input: *const rfd_step_input,
    stream: *mut c_void,
    report: *mut rfd_step_report,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        unsafe { StepArguments::new(optimizer, params, grads, count)?.step(None, input, stream, report) }
    })
}

/// The first half of a step in sharded training: squared norms of this rank's gradients.
///
/// On success `*norm` points to two doubles that belong to the optimizer, host memory on the CPU, device
/// memory on a device: the squared norm over the tensors that count, and the same with length-scale factors.
/// The caller adds them up over all ranks, there or elsewhere, and passes the sums to
/// rfd_optimizer_step_with_norm. They are valid until the next step or half of one. No pointer may be null,
/// except as in rfd_optimizer_step, whose rules for `params`, `grads` and `stream` hold. One thread at a
/// time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_squared_norm(
    optimizer: *mut rfd_optimizer,
    params: *const rfd_tensor,
    grads: *const rfd_tensor,
    count: usize,
    stream: *mut c_void,
    norm: *mut *mut f64,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (step, out) =
            unsafe { (StepArguments::new(optimizer, params, grads, count)?, Out::new(norm, "norm")?) };
        let mut backend = step.optimizer.lock()?;
        // SAFETY: the header says so of the memory of the tensors.
        out.set(unsafe { backend.squared_norm(step.tensors, stream)? });
        Ok(())
    })
}

/// The second half: the update with the norm of all ranks, two doubles at `norm`, on the host for the CPU, on
/// the device for a device. Every rank must give the same norm and input; then all take bitwise the same
/// step.
///
/// `norm` must not be null; otherwise as rfd_optimizer_step. RFD_ERROR_INVALID_ARGUMENT when a group has norm
/// lock or the method is adaptive: a shard does not know the norms that they need.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_step_with_norm(
    optimizer: *mut rfd_optimizer,
    params: *const rfd_tensor,
    grads: *const rfd_tensor,
    count: usize,
    norm: *const f64,
    input: *const rfd_step_input,
    stream: *mut c_void,
    report: *mut rfd_step_report,
) -> rfd_status {
    guard(|| {
        super::pointers::check(norm, "norm")?;
        // SAFETY: the header says what these may point to.
        unsafe {
            StepArguments::new(optimizer, params, grads, count)?.step(Some(norm), input, stream, report)
        }
    })
}

/// Fills the master weights from the parameters: on a device before a first step that is captured in a graph.
/// On the CPU it does nothing, as the first step fills them.
///
/// `optimizer` must not be null, nor `params` unless `count` is 0. `stream` as in rfd_optimizer_step. One
/// thread at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_init_master_weights(
    optimizer: *mut rfd_optimizer,
    params: *const rfd_tensor,
    count: usize,
    stream: *mut c_void,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (optimizer, params) =
            unsafe { (shared(optimizer, "optimizer")?, Array::new(params, count, "params")?) };
        // SAFETY: the header says so of the memory of the tensors.
        unsafe { optimizer.lock()?.init_master_weights(params, stream) }
    })
}

/// What the last finished step did, without waiting for anything; RFD_OUTCOME_NONE before the first. Set
/// `report->size` before the call.
///
/// No pointer may be null. Any thread, also while a step runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_report(
    optimizer: *const rfd_optimizer,
    report: *mut rfd_step_report,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (optimizer, out) = unsafe { (shared(optimizer, "optimizer")?, OutStruct::new(report)?) };
        out.set(&optimizer.report()?);
        Ok(())
    })
}

/// Waits for all work on the stream, then as rfd_optimizer_report.
///
/// No pointer may be null but `stream`, which is null on the CPU. Any thread. RFD_ERROR_DEVICE with what the
/// driver reports, which may come from work queued earlier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_wait_report(
    optimizer: *const rfd_optimizer,
    stream: *mut c_void,
    report: *mut rfd_step_report,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (optimizer, out) = unsafe { (shared(optimizer, "optimizer")?, OutStruct::new(report)?) };
        optimizer.wait(stream)?;
        out.set(&optimizer.report()?);
        Ok(())
    })
}

/// Multiplies all step sizes from the next step on; for schedulers. On a device in the order of the stream's
/// work, for replays of captured steps too.
///
/// `optimizer` must not be null. `stream` as in rfd_optimizer_step. One thread at a time.
/// RFD_ERROR_INVALID_ARGUMENT for a negative or non-finite number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_set_multiplier(
    optimizer: *mut rfd_optimizer,
    multiplier: f64,
    stream: *mut c_void,
) -> rfd_status {
    guard(|| {
        // SAFETY: null or a live handle, says the header.
        unsafe { shared(optimizer, "optimizer")? }.lock()?.set_multiplier(multiplier, stream)
    })
}

/// Sets `inv_batch_size`, `momentum` and `group_momentum` from the next step on, in an optimizer of a fitted
/// model. All else must be as it was when the optimizer was made; `model` may be null.
/// RFD_ERROR_INVALID_ARGUMENT says what is not; nothing has changed then. Otherwise as
/// rfd_optimizer_set_multiplier; on a device switching momentum on or off means that steps must be captured
/// again.
///
/// `fitted` must not be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_set_fitted(
    optimizer: *mut rfd_optimizer,
    fitted: *const rfd_fitted,
    stream: *mut c_void,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (optimizer, fitted) = unsafe { (shared(optimizer, "optimizer")?, read(fitted)?.convert()?) };
        fitted.set(&mut **optimizer.lock()?, stream)
    })
}

/// Sets the weight decay of one group from the next step on. Otherwise as rfd_optimizer_set_multiplier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_set_weight_decay(
    optimizer: *mut rfd_optimizer,
    group: usize,
    weight_decay: f64,
    stream: *mut c_void,
) -> rfd_status {
    guard(|| {
        // SAFETY: null or a live handle, says the header.
        let optimizer = unsafe { shared(optimizer, "optimizer")? };
        let mut backend = optimizer.lock()?;
        let old = backend.options().groups.get(group).copied();
        // A group that does not exist is the optimizer's to refuse.
        backend.set_group(group, Group { weight_decay, ..old.unwrap_or_default() }, stream)
    })
}

/// Sets all settings of one group from the next step on. `settings` must not be null. Otherwise as
/// rfd_optimizer_set_multiplier; on a device switching norm lock on or off means that steps must be captured
/// again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_set_group(
    optimizer: *mut rfd_optimizer,
    group: usize,
    settings: *const rfd_group,
    stream: *mut c_void,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (optimizer, settings) = unsafe { (shared(optimizer, "optimizer")?, read(settings)?) };
        let mut backend = optimizer.lock()?;
        let momentum = backend.options().groups.get(group).map_or(0.0, |group| group.momentum);
        backend.set_group(group, Group { momentum, ..settings.convert()? }, stream)
    })
}

/// Writes velocities, master weights and counts to a safetensors file, whole or not at all. On a device it
/// waits for the stream.
///
/// No pointer may be null but `stream`, which is as in rfd_optimizer_step. One thread at a time. RFD_ERROR_IO
/// when the file can't be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_save_state(
    optimizer: *const rfd_optimizer,
    file: *const c_char,
    stream: *mut c_void,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (optimizer, file) = unsafe { (shared(optimizer, "optimizer")?, path(file, "file")?) };
        optimizer.lock()?.save_state(file, stream)
    })
}

/// Loads a state that was saved for the same tensors, on whatever device. On a device it waits for the
/// stream, and steps must be captured again.
///
/// No pointer may be null but `stream`, which is as in rfd_optimizer_step. One thread at a time. RFD_ERROR_IO
/// when the file can't be read, RFD_ERROR_FILE when it is no regular one; RFD_ERROR_STATE says what is
/// damaged, of another version, or which tensor differs; the optimizer is as it was then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_load_state(
    optimizer: *mut rfd_optimizer,
    file: *const c_char,
    stream: *mut c_void,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (optimizer, file) = unsafe { (shared(optimizer, "optimizer")?, path(file, "file")?) };
        optimizer.lock()?.load_state(file, stream)
    })
}

/// The state as the bytes of a safetensors file. On a device it waits for the stream.
///
/// No pointer may be null but `stream`, which is as in rfd_optimizer_step. On success `*state` is a new
/// buffer that the caller frees with rfd_buffer_destroy. One thread at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_get_state(
    optimizer: *const rfd_optimizer,
    stream: *mut c_void,
    state: *mut *mut rfd_buffer,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (optimizer, out) = unsafe { (shared(optimizer, "optimizer")?, Out::new(state, "state")?) };
        let bytes = optimizer.lock()?.state_to_bytes(stream)?;
        out.set_handle(rfd_buffer::new(bytes));
        Ok(())
    })
}

/// Loads a state from `size` bytes at `state`, which are not kept. Otherwise as rfd_optimizer_load_state.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_set_state(
    optimizer: *mut rfd_optimizer,
    state: *const c_void,
    size: usize,
    stream: *mut c_void,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (optimizer, state) =
            unsafe { (shared(optimizer, "optimizer")?, slice(state.cast::<u8>(), size, "state")?) };
        optimizer.lock()?.load_state_from_bytes(state, stream)
    })
}
