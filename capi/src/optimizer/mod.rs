//! The handle of an optimizer.

mod methods;
mod structs;
mod tensors;

use std::ffi::{c_char, c_void};
use std::sync::{Mutex, MutexGuard};

pub use self::methods::*;
pub use self::structs::*;
use self::tensors::{Place, Tensors};
use super::buffer::rfd_buffer;
use super::pointers::{
    Array, Out, OutStruct, address, check, destroy, lock, path, read, read_or_default, shared, slice,
};
use super::status::{Failure, RFD_ERROR_UNSUPPORTED, Result, guard, rfd_status};
use rfdescent::device::{Stream, Target};
use rfdescent::optimizer::{AnyOptimizer, Group, Method, RawTensor, ReportReader};

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

/// Frees an optimizer. Null does nothing. On a device it waits for the work that uses the optimizer's memory;
/// captured steps must not be replayed any more. Parameters and gradients stay the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_destroy(optimizer: *mut rfd_optimizer) {
    // SAFETY: null, or a handle that its owner uses no more.
    unsafe { destroy(optimizer) }
}

/// The optimizer and the tensors of a step, which are given by pointer.
///
/// # Safety
/// `optimizer` is null or a live handle; the lists are null or point to `count` descriptors.
unsafe fn arguments<'a>(
    optimizer: *mut rfd_optimizer,
    params: *const rfd_tensor,
    grads: *const rfd_tensor,
    count: usize,
) -> Result<(&'a rfd_optimizer, Tensors<'a>)> {
    // SAFETY: the caller vouches for these.
    unsafe {
        let optimizer = shared(optimizer, "optimizer")?;
        let grads = Some(Array::new(grads, count, "grads")?);
        Ok((
            optimizer,
            Tensors { params: Array::new(params, count, "params")?, grads, place: optimizer.place },
        ))
    }
}

/// A whole step, or with `norm` the second half of one.
///
/// # Safety
/// The arguments are what the header says of those of rfd_optimizer_step, and so is the memory of
/// the tensors; `norm` points to two numbers where the tensors are.
unsafe fn step(
    (optimizer, tensors): (&rfd_optimizer, Tensors<'_>),
    norm: Option<*const f64>,
    input: *const rfd_step_input,
    on: *mut c_void,
    report: *mut rfd_step_report,
) -> Result<()> {
    // SAFETY: null or structs whose size says how long they are, says the caller.
    let (input, out) =
        unsafe { (read(input)?, if report.is_null() { None } else { Some(OutStruct::new(report)?) }) };
    let input = input.convert()?;
    let mut inner = optimizer.lock()?;
    let Inner { optimizer, tensors: scratch } = &mut *inner;
    if out.is_some() && optimizer.is_on_device() {
        let expected = "must be null: a step on a device is only queued; ask rfd_optimizer_report";
        return Err(Failure::invalid("report", format!("{report:p}"), expected));
    }
    tensors.locate(optimizer, scratch)?;
    // SAFETY: `locate` compared lengths, formats and places with the specs; the caller vouches for the memory
    // and the stream.
    let done = unsafe {
        match norm {
            None => optimizer.step(scratch, &input, stream(on))?,
            Some(norm) => optimizer.step_with_norm(scratch, address(norm), &input, stream(on))?,
        }
    };
    if let (Some(out), Some(done)) = (out, done) {
        out.set(&done.into());
    }
    Ok(())
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
        unsafe { step(arguments(optimizer, params, grads, count)?, None, input, stream, report) }
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
        let ((optimizer, tensors), out) =
            unsafe { (arguments(optimizer, params, grads, count)?, Out::new(norm, "norm")?) };
        let mut inner = optimizer.lock()?;
        let Inner { optimizer, tensors: scratch } = &mut *inner;
        tensors.locate(optimizer, scratch)?;
        // SAFETY: `locate` compared lengths, formats and places with the specs; the header says that the
        // memory is there.
        let norm = unsafe { optimizer.local_squared_norm(scratch, self::stream(stream))? };
        out.set(std::ptr::with_exposed_provenance_mut(norm as usize));
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
        check(norm, "norm")?;
        // SAFETY: the header says what these may point to.
        unsafe { step(arguments(optimizer, params, grads, count)?, Some(norm), input, stream, report) }
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
        let tensors = Tensors { params, grads: None, place: optimizer.place };
        let mut inner = optimizer.lock()?;
        let Inner { optimizer, tensors: scratch } = &mut *inner;
        tensors.locate(optimizer, scratch)?;
        // SAFETY: `locate` compared lengths, formats and places with the specs; the header says that the
        // memory is there.
        Ok(unsafe { optimizer.init_master_weights(scratch, self::stream(stream))? })
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
        out.set(&optimizer.reports.read()?.into());
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
        if optimizer.place.kind == RFD_DEVICE_CPU && !stream.is_null() {
            let expected = "must be null: this optimizer works on the CPU";
            return Err(Failure::invalid("stream", format!("{stream:p}"), expected));
        }
        out.set(&optimizer.reports.wait(self::stream(stream))?.into());
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
        let optimizer = unsafe { shared(optimizer, "optimizer")? };
        Ok(optimizer.lock()?.optimizer.set_multiplier(multiplier, self::stream(stream))?)
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
        let mut inner = optimizer.lock()?;
        let old = inner.optimizer.options().groups.get(group).copied();
        // A group that does not exist is the optimizer's to refuse.
        let new = Group { weight_decay, ..old.unwrap_or_default() };
        Ok(inner.optimizer.set_group(group, new, self::stream(stream))?)
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
        Ok(optimizer.lock()?.optimizer.set_group(group, settings.convert()?, self::stream(stream))?)
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
        Ok(optimizer.lock()?.optimizer.save_state(file, self::stream(stream))?)
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
        Ok(optimizer.lock()?.optimizer.load_state(file, self::stream(stream))?)
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
        let bytes = optimizer.lock()?.optimizer.state_to_bytes(self::stream(stream))?;
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
        Ok(optimizer.lock()?.optimizer.load_state_from_bytes(state, self::stream(stream))?)
    })
}
