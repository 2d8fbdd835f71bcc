//! Settings that change while the optimizer lives; those of methods are with them.

use std::ffi::c_void;

use super::super::pointers::{read, shared};
use super::super::status::{guard, rfd_status};
use super::structs::cap;
use super::{rfd_group, rfd_optimizer};
use rfdescent::optimizer::Group;

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
        Ok(optimizer.lock()?.optimizer.set_multiplier(multiplier, super::stream(stream))?)
    })
}

/// Sets what step sizes times the multiplier are cut to, from the next step on; infinity for no cap.
/// RFD_ERROR_INVALID_ARGUMENT for a number that is not above 0. Otherwise as rfd_optimizer_set_multiplier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_set_max_step_size(
    optimizer: *mut rfd_optimizer,
    max_step_size: f64,
    stream: *mut c_void,
) -> rfd_status {
    guard(|| {
        // SAFETY: null or a live handle, says the header.
        let optimizer = unsafe { shared(optimizer, "optimizer")? };
        Ok(optimizer.lock()?.optimizer.set_max_step_size(cap(max_step_size), super::stream(stream))?)
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
        Ok(inner.optimizer.set_group(group, new, super::stream(stream))?)
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
        Ok(optimizer.lock()?.optimizer.set_group(group, settings.convert()?, super::stream(stream))?)
    })
}

/// Whether a step on a device may be one launch, whose blocks wait for one another: 1, the default, or 0 for
/// several launches, with the same bits, from the next step on. One launch needs room for all its blocks at
/// once; where kernels of other streams spin until another device comes, as those of communication do, and
/// that one waits behind a step of its own, take several, which wait for nothing. The halves of a step in
/// sharded training always are. No effect on the CPU.
///
/// `optimizer` must not be null. One thread at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_set_one_launch(
    optimizer: *mut rfd_optimizer,
    one_launch: u32,
) -> rfd_status {
    guard(|| {
        // SAFETY: null or a live handle, says the header.
        let optimizer = unsafe { shared(optimizer, "optimizer")? };
        if let Some(device) = optimizer.lock()?.optimizer.as_device() {
            device.set_cooperative(one_launch != 0);
        }
        Ok(())
    })
}
