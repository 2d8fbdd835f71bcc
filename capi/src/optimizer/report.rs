//! What the last step did.

use std::ffi::c_void;

use super::super::buffer::rfd_buffer;
use super::super::pointers::{Out, OutStruct, shared};
use super::super::status::{guard, rfd_status};
use super::{rfd_optimizer, rfd_step_report};

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
        out.set(&optimizer.reports.wait(super::stream(stream))?.into());
        Ok(())
    })
}

/// The name of the kernels that the last step on a device took, before it of those that one will take whose
/// gradients have the parameters' formats; where they are the generic ones, which are slower, also the tensor
/// or setting that asks for them. "CPU" on the CPU.
///
/// No pointer may be null. On success `*text` is a new buffer that the caller frees with rfd_buffer_destroy.
/// One thread at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_kernels(
    optimizer: *const rfd_optimizer,
    text: *mut *mut rfd_buffer,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (optimizer, out) = unsafe { (shared(optimizer, "optimizer")?, Out::new(text, "text")?) };
        out.set_handle(rfd_buffer::new(optimizer.lock()?.optimizer.explain_kernels()));
        Ok(())
    })
}
