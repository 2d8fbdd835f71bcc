//! Steps, whole and in halves.

use std::ffi::c_void;

use super::super::pointers::{Array, Out, OutStruct, address, check, read, shared};
use super::super::status::{Failure, Result, guard, rfd_status};
use super::tensors::Tensors;
use super::{Inner, rfd_optimizer, rfd_step_input, rfd_step_report, rfd_tensor, stream};

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
        let norm = unsafe { optimizer.local_squared_norm(scratch, super::stream(stream))? };
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
        unsafe { optimizer.init_master_weights(scratch, super::stream(stream))? };
        Ok(())
    })
}
