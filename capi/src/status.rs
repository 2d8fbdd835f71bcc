//! Status codes, the last error of a thread, versions, and the guard around every function.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::RFD_ABI_VERSION;
use rfdescent::Error;
use rfdescent::estimation::EstimationError;

/// What a function returns: RFD_OK or one of RFD_ERROR_*. Numbers are never used again for something else;
/// later releases may add some, so treat what you do not know as an error.
pub type rfd_status = u32;

/// Success.
pub const RFD_OK: rfd_status = 0;
/// A pointer is null that must not be.
pub const RFD_ERROR_NULL: rfd_status = 1;
/// An argument, a field or an option is outside its domain.
pub const RFD_ERROR_INVALID_ARGUMENT: rfd_status = 2;
/// The `size` of a struct is none that any release had: it was not set, or the header is newer than the
/// library.
pub const RFD_ERROR_STRUCT_SIZE: rfd_status = 3;
/// The operating system refused to read or write a file.
pub const RFD_ERROR_IO: rfd_status = 4;
/// A file or a text was read, but what it holds is not what it should be.
pub const RFD_ERROR_FILE: rfd_status = 5;
/// The samples do not determine the covariance.
pub const RFD_ERROR_ESTIMATION: rfd_status = 6;
/// A tensor does not fit the optimizer, or its descriptor is wrong.
pub const RFD_ERROR_TENSOR: rfd_status = 7;
/// A saved optimizer state is damaged or belongs to another optimizer.
pub const RFD_ERROR_STATE: rfd_status = 8;
/// A device or its driver is missing, unsuitable, or failed.
pub const RFD_ERROR_DEVICE: rfd_status = 9;
/// This library was built without what was asked for.
pub const RFD_ERROR_UNSUPPORTED: rfd_status = 10;
/// A callback returned an error.
pub const RFD_ERROR_CALLBACK: rfd_status = 11;
/// The progress callback asked to stop.
pub const RFD_ERROR_STOPPED: rfd_status = 12;
/// There is no step: loss or gradient norm are not finite, or the norm is zero.
pub const RFD_ERROR_NO_STEP: rfd_status = 13;
/// Another thread is using the same handle at this moment.
pub const RFD_ERROR_BUSY: rfd_status = 14;
/// A fault of the library; please report it with the message. The handle that was used must be destroyed.
pub const RFD_ERROR_PANIC: rfd_status = 15;

/// A status and a message.
pub(super) struct Failure {
    status: rfd_status,
    message: String,
}

pub(super) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub fn new(status: rfd_status, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    pub fn invalid(name: &str, value: impl ToString, expected: &str) -> Self {
        let (name, value, expected) = (name.into(), value.to_string(), expected.into());
        Error::InvalidArgument { name, value, expected }.into()
    }

    pub fn tensor(name: &str, problem: impl Into<String>) -> Self {
        Error::Tensor { tensor: name.into(), problem: problem.into() }.into()
    }

    /// The same failure of a part, which is named.
    pub fn at(self, what: &str) -> Self {
        Self { status: self.status, message: format!("{what}: {}", self.message) }
    }

    fn panicked(payload: Box<dyn Any + Send>) -> Self {
        let text = payload
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("no message");
        let failure =
            Self::new(RFD_ERROR_PANIC, format!("panic: {text}; a fault of the library, please report it"));
        // Dropping it could panic again.
        std::mem::forget(payload);
        failure
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match &error {
            Error::InvalidArgument { .. } => RFD_ERROR_INVALID_ARGUMENT,
            Error::Io { .. } => RFD_ERROR_IO,
            Error::File { .. } => RFD_ERROR_FILE,
            Error::Estimation(EstimationError::Interrupted { .. }) => RFD_ERROR_STOPPED,
            Error::Estimation(EstimationError::Sampler { source, .. })
                if source.is::<super::auto_fit::CallbackError>() =>
            {
                RFD_ERROR_CALLBACK
            }
            Error::Estimation(EstimationError::InvalidSample { .. }) => RFD_ERROR_INVALID_ARGUMENT,
            Error::Estimation(EstimationError::Statistics(_)) => RFD_ERROR_FILE,
            Error::Estimation(_) => RFD_ERROR_ESTIMATION,
            Error::Tensor { .. } => RFD_ERROR_TENSOR,
            Error::State(_) => RFD_ERROR_STATE,
            Error::Device(_) => RFD_ERROR_DEVICE,
            // There is no other kind, but the Rust library may add some.
            _ => RFD_ERROR_PANIC,
        };
        Self::new(status, error.to_string())
    }
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

fn record(message: String) {
    let mut bytes = message.into_bytes();
    bytes.retain(|&byte| byte != 0);
    let message = CString::new(bytes).unwrap_or_default();
    // Without effect while the thread's storage is being destroyed.
    let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = message);
}

/// Runs the body of a function: an error or a panic becomes a status, its message that of `rfd_last_error`.
pub(super) fn guard(body: impl FnOnce() -> Result<()>) -> rfd_status {
    let outcome =
        catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(Failure::panicked(payload)));
    match outcome {
        Ok(()) => RFD_OK,
        Err(Failure { status, message }) => {
            record(message);
            status
        }
    }
}

/// What the last function said that did not return RFD_OK on this thread; "" when none has failed. The
/// message names the tensor, file, row or option at fault and says what to do.
///
/// Never null. The text belongs to the library and is valid until the next call on the same thread that
/// fails, or the thread's end. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn rfd_last_error() -> *const c_char {
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// A name for a status, e.g. "RFD_ERROR_TENSOR"; "unknown status" for numbers that this release does not
/// know.
///
/// Never null. The text is a constant. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn rfd_status_string(status: rfd_status) -> *const c_char {
    let name: &CStr = match status {
        RFD_OK => c"RFD_OK",
        RFD_ERROR_NULL => c"RFD_ERROR_NULL",
        RFD_ERROR_INVALID_ARGUMENT => c"RFD_ERROR_INVALID_ARGUMENT",
        RFD_ERROR_STRUCT_SIZE => c"RFD_ERROR_STRUCT_SIZE",
        RFD_ERROR_IO => c"RFD_ERROR_IO",
        RFD_ERROR_FILE => c"RFD_ERROR_FILE",
        RFD_ERROR_ESTIMATION => c"RFD_ERROR_ESTIMATION",
        RFD_ERROR_TENSOR => c"RFD_ERROR_TENSOR",
        RFD_ERROR_STATE => c"RFD_ERROR_STATE",
        RFD_ERROR_DEVICE => c"RFD_ERROR_DEVICE",
        RFD_ERROR_UNSUPPORTED => c"RFD_ERROR_UNSUPPORTED",
        RFD_ERROR_CALLBACK => c"RFD_ERROR_CALLBACK",
        RFD_ERROR_STOPPED => c"RFD_ERROR_STOPPED",
        RFD_ERROR_NO_STEP => c"RFD_ERROR_NO_STEP",
        RFD_ERROR_BUSY => c"RFD_ERROR_BUSY",
        RFD_ERROR_PANIC => c"RFD_ERROR_PANIC",
        _ => c"unknown status",
    };
    name.as_ptr()
}

/// The library's release, e.g. "0.1.0".
///
/// Never null. The text is a constant. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn rfd_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => panic!("a version has no zero byte"),
        };
    VERSION.as_ptr()
}

/// The version of the library's ABI. A program should refuse one that is not the RFD_ABI_VERSION of its
/// header; with the shared library the loader does, by the soname. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn rfd_abi_version() -> u32 {
    RFD_ABI_VERSION
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last_error() -> String {
        // SAFETY: the function returns a string that ends with 0 and lives until the next failure on this
        // thread.
        unsafe { CStr::from_ptr(rfd_last_error()) }.to_str().unwrap().to_string()
    }

    #[test]
    fn a_panic_becomes_a_status_with_its_text() {
        assert_eq!(guard(|| panic!("of {}", 7)), RFD_ERROR_PANIC);
        assert!(last_error().starts_with("panic: of 7;"), "{}", last_error());
        assert_eq!(guard(|| std::panic::panic_any(3)), RFD_ERROR_PANIC);
        assert!(last_error().starts_with("panic: no message;"), "{}", last_error());
    }

    #[test]
    fn success_keeps_the_message_and_zero_bytes_do_not_cut_it() {
        guard(|| Err(Failure::new(RFD_ERROR_FILE, "a\0b")));
        assert_eq!(guard(|| Ok(())), RFD_OK);
        assert_eq!(last_error(), "ab");
        std::thread::spawn(|| assert_eq!(last_error(), "")).join().unwrap();
    }

    #[test]
    fn every_status_has_its_name_once() {
        // SAFETY: the names are constants.
        let name = |status| unsafe { CStr::from_ptr(rfd_status_string(status)) };
        let names: std::collections::HashSet<_> = (RFD_OK..=RFD_ERROR_PANIC).map(name).collect();
        assert_eq!(names.len() as u32, RFD_ERROR_PANIC + 1);
        assert!(!names.contains(c"unknown status"));
        assert_eq!(name(rfd_status::MAX), c"unknown status");
        assert_eq!(name(RFD_ERROR_PANIC + 1), c"unknown status");
    }
}
