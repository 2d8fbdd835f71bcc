//! Saving and loading what the optimizer remembers.

use std::ffi::{c_char, c_void};

use super::rfd_optimizer;
use crate::buffer::rfd_buffer;
use crate::pointers::{Out, path, shared, slice};
use crate::status::{guard, rfd_status};

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
        Ok(optimizer.lock()?.optimizer.save_state(file, super::stream(stream))?)
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
        Ok(optimizer.lock()?.optimizer.load_state(file, super::stream(stream))?)
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
        let bytes = optimizer.lock()?.optimizer.state_to_bytes(super::stream(stream))?;
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
        Ok(optimizer.lock()?.optimizer.load_state_from_bytes(state, super::stream(stream))?)
    })
}
