//! What the last step did.

use std::ffi::c_void;

use super::{rfd_optimizer, rfd_step_report};
use crate::pointers::{OutStruct, shared};
use crate::status::{guard, rfd_status};

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
