//! Steps, whole and in halves.

use std::ffi::c_void;

use super::super::pointers::{Array, Out, OutStruct, address, check, read, shared};
use super::super::status::{Failure, Result, guard, rfd_status};
use super::tensors::{Flat, Tensors};
use super::{Inner, rfd_gradient, rfd_optimizer, rfd_step_input, rfd_step_report, rfd_tensor, stream};
use rfdescent::optimizer::{AnyOptimizer, RawTensor};

/// The optimizer and the tensors of a step, which are given by pointer.
///
/// # Safety
/// `optimizer` is null or a live handle; the lists are null or point to `count` descriptors.
unsafe fn arguments<'a>(
    optimizer: *mut rfd_optimizer,
    params: *const rfd_tensor,
    grads: *const rfd_gradient,
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

/// A whole step, or with `sums` the second half of one, over the tensors that `locate` finds: it compares
/// their lengths, formats and places with the specs.
///
/// # Safety
/// The arguments are what the header says of those of rfd_optimizer_step, and so is the memory of
/// the tensors; `sums` points to the numbers that ranks add up, where the tensors are.
unsafe fn step(
    optimizer: &rfd_optimizer,
    locate: impl FnOnce(&AnyOptimizer, &mut Vec<RawTensor>) -> Result<()>,
    sums: Option<*const f64>,
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
    locate(optimizer, scratch)?;
    // SAFETY: `locate` compared lengths, formats and places with the specs; the caller vouches for the memory
    // and the stream.
    let done = unsafe {
        match sums {
            None => optimizer.step(scratch, &input, stream(on))?,
            Some(sums) => optimizer.step_with_sums(scratch, address(sums), &input, stream(on))?,
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
    grads: *const rfd_gradient,
    count: usize,
    input: *const rfd_step_input,
    stream: *mut c_void,
    report: *mut rfd_step_report,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        unsafe {
            let (optimizer, tensors) = arguments(optimizer, params, grads, count)?;
            step(optimizer, |of, list| tensors.locate(of, list), None, input, stream, report)
        }
    })
}

/// One step for programs that keep all parameters in one array, and their gradients in another: the
/// optimizer's tensors one after the other, in the order of the specs, without gaps.
///
/// `params` and `grads` have `count` elements each, as many as all tensors together, in the format `dtype`,
/// which is that of every spec; they lie where the optimizer works, on the host or on its device. Gradients
/// are only read. No pointer may be null but `stream`, `report` and, when `count` is 0, the arrays. Otherwise
/// as rfd_optimizer_step, with the same result to the bit. RFD_ERROR_INVALID_ARGUMENT when `count` is another
/// number, RFD_ERROR_TENSOR names a tensor of another format.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_step_flat(
    optimizer: *mut rfd_optimizer,
    params: *mut c_void,
    grads: *const c_void,
    count: u64,
    dtype: u32,
    input: *const rfd_step_input,
    stream: *mut c_void,
    report: *mut rfd_step_report,
) -> rfd_status {
    guard(|| {
        // SAFETY: null or a live handle, says the header.
        let optimizer = unsafe { shared(optimizer, "optimizer")? };
        if count > 0 {
            check(params, "params")?;
            check(grads, "grads")?;
        }
        let arrays = Flat { params: address(params), grads: address(grads), count, dtype };
        // SAFETY: the header says what these may point to.
        unsafe { step(optimizer, |of, list| arrays.locate(of, list), None, input, stream, report) }
    })
}

/// Takes a copy of the gradient of tensor `index`, counted from 0 in the order of the specs, for programs
/// that update tensor by tensor: rfd_optimizer_finish takes the step when all are given, in any order.
///
/// A gradient that is given again before the step is added, in float, or in double as soon as one of the
/// tensor's gradients is double: so gradients are accumulated over several backward passes. Each is given
/// as it is; where the sum of m means was given, `grad_scale` of the step is m.
///
/// `grad` has `count` elements, as many as the tensor, in the format `dtype`, whatever that of the
/// parameter; it is only read, and free to be overwritten when the call returns. Neither it nor `optimizer`
/// may be null, but `grad` may be when `count` is 0. One thread at a time. The copies take as much memory
/// as float gradients do. Saved states do not hold them, and other steps leave them alone.
/// RFD_ERROR_INVALID_ARGUMENT when there is no such tensor, RFD_ERROR_TENSOR names one whose count or
/// alignment is wrong. On a device: RFD_ERROR_DEVICE; add gradients up there and give all of them to
/// rfd_optimizer_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_give_gradient(
    optimizer: *mut rfd_optimizer,
    index: usize,
    grad: *const c_void,
    count: u64,
    dtype: u32,
) -> rfd_status {
    guard(|| {
        // SAFETY: null or a live handle, says the header.
        let optimizer = unsafe { shared(optimizer, "optimizer")? };
        if count > 0 {
            check(grad, "grad")?;
        }
        let format = super::structs::dtype(dtype)?;
        let mut inner = optimizer.lock()?;
        if let Some(spec) = inner.optimizer.specs().get(index) {
            let len = spec.len()? as u64;
            if count != len {
                let problem = format!("was described with {len} elements but its gradient has {count}");
                return Err(Failure::tensor(&spec.name, problem));
            }
        }
        // SAFETY: the count is that of the tensor, where there is one; the header says that the memory is
        // there.
        unsafe { inner.optimizer.give_gradient(index, address(grad), format)? };
        Ok(())
    })
}

/// One step with the gradients that rfd_optimizer_give_gradient was given since the last one; those of
/// which none was given are missing. What the step did goes to `report`, unless it is null; set
/// `report->size` before.
///
/// `params` has `count` elements, in the order of the specs. `optimizer`, `params` and `input` must not be
/// null, but `params` may be when `count` is 0. One thread at a time. After RFD_OK gradients are given
/// anew, also where the step was skipped (with found_inf it only forgets them); after an error they are
/// still there. RFD_ERROR_INVALID_ARGUMENT when no gradient was given; otherwise as rfd_optimizer_step,
/// with the same result to the bit where each gradient was given once. On a device: RFD_ERROR_DEVICE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_finish(
    optimizer: *mut rfd_optimizer,
    params: *const rfd_tensor,
    count: usize,
    input: *const rfd_step_input,
    report: *mut rfd_step_report,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (optimizer, params, input, out) = unsafe {
            (
                shared(optimizer, "optimizer")?,
                Array::new(params, count, "params")?,
                read(input)?.convert()?,
                if report.is_null() { None } else { Some(OutStruct::new(report)?) },
            )
        };
        let tensors = Tensors { params, grads: None, place: optimizer.place };
        let mut inner = optimizer.lock()?;
        let Inner { optimizer, tensors: scratch } = &mut *inner;
        tensors.locate(optimizer, scratch)?;
        let params: Vec<u64> = scratch.iter().map(|tensor| tensor.param).collect();
        // SAFETY: `locate` compared lengths, formats and places with the specs; the header says that the
        // memory is there.
        let done = unsafe { optimizer.finish(&params, &input)? };
        if let Some(out) = out {
            out.set(&done.into());
        }
        Ok(())
    })
}

/// What rfd_optimizer_step with the same arguments would refuse, for processes that tell each other before
/// all take a step. It reads no tensor and changes nothing, and finds nothing that a step only skips.
///
/// Arguments, errors and threads are those of rfd_optimizer_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_check_step(
    optimizer: *mut rfd_optimizer,
    params: *const rfd_tensor,
    grads: *const rfd_gradient,
    count: usize,
    input: *const rfd_step_input,
    stream: *mut c_void,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let ((optimizer, tensors), input) =
            unsafe { (arguments(optimizer, params, grads, count)?, read(input)?.convert()?) };
        let mut inner = optimizer.lock()?;
        let Inner { optimizer, tensors: scratch } = &mut *inner;
        tensors.locate(optimizer, scratch)?;
        optimizer.check_step(scratch, &input, super::stream(stream))?;
        Ok(())
    })
}

/// How many doubles ranks add up between the halves of a step in sharded training: 2, or with the adaptive
/// method a number that follows from the list of tensors, the same on all ranks.
///
/// No pointer may be null. One thread at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_sums_len(
    optimizer: *mut rfd_optimizer,
    len: *mut usize,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (optimizer, out) = unsafe { (shared(optimizer, "optimizer")?, Out::new(len, "len")?) };
        out.set(optimizer.lock()?.optimizer.sums_len());
        Ok(())
    })
}

/// The first half of a step in sharded training: the sums of this rank's parameters and gradients by which
/// the step is decided. Of `input` it reads the gradient scale alone.
///
/// On success `*sums` points to as many doubles as rfd_optimizer_sums_len says, which belong to the
/// optimizer, host memory on the CPU, device memory on a device. The caller adds them up over all ranks,
/// number by number, there or elsewhere, and passes the result to rfd_optimizer_step_with_sums. They are
/// valid until the next step or half of one. No pointer may be null, except as in rfd_optimizer_step, whose
/// rules for `params`, `grads` and `stream` hold. One thread at a time. RFD_ERROR_INVALID_ARGUMENT when a
/// group has norm lock, which needs to know whole tensors.
///
/// On a device nothing waits, and both halves can be captured in a graph, with the adaptive method once a
/// step in halves that found_inf did not skip has been seen finished: until then they sum up the parameters
/// too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_local_sums(
    optimizer: *mut rfd_optimizer,
    params: *const rfd_tensor,
    grads: *const rfd_gradient,
    count: usize,
    input: *const rfd_step_input,
    stream: *mut c_void,
    sums: *mut *mut f64,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let ((optimizer, tensors), input, out) =
            unsafe { (arguments(optimizer, params, grads, count)?, read(input)?, Out::new(sums, "sums")?) };
        let scale = input.convert()?.grad_scale;
        let mut inner = optimizer.lock()?;
        let Inner { optimizer, tensors: scratch } = &mut *inner;
        tensors.locate(optimizer, scratch)?;
        // SAFETY: `locate` compared lengths, formats and places with the specs; the header says that the
        // memory is there.
        let sums = unsafe { optimizer.local_sums(scratch, scale, super::stream(stream))? };
        out.set(std::ptr::with_exposed_provenance_mut(sums as usize));
        Ok(())
    })
}

/// The second half: the update with the sums of all ranks, as many doubles at `sums` as
/// rfd_optimizer_sums_len says, on the host for the CPU, on the device for a device. Every rank must give the
/// same numbers and input, and the gradients and gradient scale of the first half; then all take bitwise the
/// same step.
///
/// `sums` must not be null; otherwise as rfd_optimizer_step. On the CPU, and with the adaptive method,
/// RFD_ERROR_INVALID_ARGUMENT where there was no first half since the last step, on the CPU also where it
/// had another gradient scale; besides as rfd_optimizer_local_sums. RFD_ERROR_TENSOR names a tensor whose
/// parts on the ranks do not make up the whole one; the step counts as skipped then. On a device, where the
/// sums are not known yet, rfd_optimizer_report and rfd_optimizer_wait_report return that error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_step_with_sums(
    optimizer: *mut rfd_optimizer,
    params: *const rfd_tensor,
    grads: *const rfd_gradient,
    count: usize,
    sums: *const f64,
    input: *const rfd_step_input,
    stream: *mut c_void,
    report: *mut rfd_step_report,
) -> rfd_status {
    guard(|| {
        check(sums, "sums")?;
        // SAFETY: the header says what these may point to.
        unsafe {
            let (optimizer, tensors) = arguments(optimizer, params, grads, count)?;
            step(optimizer, |of, list| tensors.locate(of, list), Some(sums), input, stream, report)
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
