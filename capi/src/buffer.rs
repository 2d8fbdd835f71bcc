//! Bytes that the library made and the caller frees.

use super::pointers::{destroy, shared};
use super::status::guard;

/// Bytes that the library made: a text or a saved state. Immutable, so any thread may read it.
pub struct rfd_buffer {
    /// Followed by a 0 that does not count.
    bytes: Vec<u8>,
}

impl rfd_buffer {
    pub(super) fn new(bytes: impl Into<Vec<u8>>) -> Self {
        let mut bytes = bytes.into();
        bytes.push(0);
        Self { bytes }
    }

    /// A text of these lines, each with its line break.
    pub(super) fn lines(lines: &[String]) -> Self {
        Self::new(lines.iter().map(|line| format!("{line}\n")).collect::<String>())
    }
}

/// The bytes. One 0 follows them, so that a text can be used as a string.
///
/// `buffer` may be null: the result is null then. What it points to belongs to the buffer and lives as long
/// as it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_buffer_data(buffer: *const rfd_buffer) -> *const u8 {
    let mut data = std::ptr::null();
    guard(|| {
        // SAFETY: null or a live buffer, says the header.
        data = unsafe { shared(buffer, "buffer") }?.bytes.as_ptr();
        Ok(())
    });
    data
}

/// How many bytes there are, the 0 behind them not counted; 0 when `buffer` is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_buffer_size(buffer: *const rfd_buffer) -> usize {
    let mut size = 0;
    guard(|| {
        // SAFETY: null or a live buffer, says the header.
        size = unsafe { shared(buffer, "buffer") }?.bytes.len() - 1;
        Ok(())
    });
    size
}

/// Frees a buffer. Null does nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_buffer_destroy(buffer: *mut rfd_buffer) {
    // SAFETY: null, or a buffer that its owner uses no more.
    unsafe { destroy(buffer) }
}
