//! The driver library: whether it is there and new enough, what its errors mean, and contexts for the time of
//! a call.

use std::ffi::{CStr, c_int};
use std::fmt::Display;
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUresult};

use crate::error::{Error, Result};

/// CUDA 12.1: from there on kernels take as many parameters as ours have, and the PTX is understood.
const OLDEST: i32 = 12_010;

/// Names under which the driver installs its library; all are among those that cudarc looks for.
const LIBRARIES: [&str; 3] = if cfg!(windows) {
    ["nvcuda.dll", "nvcuda", "nvcuda.dll"]
} else {
    ["libcuda.so.1", "libcuda.so", "libcuda.dylib"]
};

/// Makes sure that the driver may be called; its version, e.g. 12010 for CUDA 12.1. Every other function of
/// this module may be called after this one has succeeded only.
pub(super) fn initialise() -> Result<i32> {
    static DRIVER: OnceLock<std::result::Result<i32, String>> = OnceLock::new();
    DRIVER.get_or_init(load).clone().map_err(Error::Device)
}

fn load() -> std::result::Result<i32, String> {
    // cudarc panics where the library is missing, so look for it first.
    let library = open()?;
    // It stays loaded for the life of the program, as cudarc's handle to it does.
    std::mem::forget(library);
    // SAFETY: the library is loaded; 0 is the only value that the flags may have.
    let status = unsafe { sys::cuInit(0) };
    if status != CUresult::CUDA_SUCCESS {
        return Err(explain("cuInit", status));
    }
    let mut version: c_int = 0;
    // SAFETY: writes one integer to a live variable.
    let status = unsafe { sys::cuDriverGetVersion(&mut version) };
    if status != CUresult::CUDA_SUCCESS {
        return Err(explain("cuDriverGetVersion", status));
    }
    if version < OLDEST {
        return Err(format!(
            "the driver is made for CUDA {}; rfdescent needs CUDA {}, driver release 530 or newer: update it",
            version_text(version),
            version_text(OLDEST)
        ));
    }
    Ok(version)
}

/// The library, under the first name that can be loaded.
fn open() -> std::result::Result<libloading::Library, String> {
    let mut broken = None;
    for name in LIBRARIES {
        // SAFETY: the driver's library; loading it runs its initialisers, as every CUDA program does.
        match unsafe { libloading::Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => broken = broken.or_else(|| broken_library(name, &error)),
        }
    }
    Err(match broken {
        Some(reason) => format!(
            "CUDA's driver library cannot be loaded ({reason}); repair or install NVIDIA's driver, release 530 or newer, or \
             use the CPU"
        ),
        None => format!(
            "CUDA's driver library ({}) was not found; install NVIDIA's driver, release 530 or newer, or use the CPU",
            LIBRARIES[0]
        ),
    })
}

/// The loader's own reason; none where it says just that there is no file of this name.
fn broken_library(name: &str, error: &libloading::Error) -> Option<String> {
    let reason = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    // One line: macOS tells of each place that was tried in one of its own.
    let reason = reason.split_whitespace().collect::<Vec<_>>().join(" ");
    let reason = if reason.contains(name) { reason } else { format!("{name}: {reason}") };
    // glibc, musl, macOS, Windows. A library that it needs and that is missing goes by another name, but for
    // Windows, which names none.
    let absent = [
        format!("{name}: cannot open shared object file: No such file or directory"),
        format!("Error loading shared library {name}: No such file or directory"),
        format!("dlopen({name}, "),
        format!("{name}: The specified module could not be found."),
    ];
    let absent = absent.iter().any(|start| reason.starts_with(start));
    (!absent || reason.contains("not a mach-o file") || reason.contains("incompatible architecture"))
        .then_some(reason)
}

/// `12.1` for 12010.
pub(super) fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// An error unless the driver reports success.
pub(super) fn check(what: impl Display, status: CUresult) -> Result<()> {
    if status == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(Error::Device(explain(what, status))) }
}

/// What failed, the driver's own words, and what to do where that is known.
fn explain(what: impl Display, status: CUresult) -> String {
    let text = |get: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = ptr::null();
        // SAFETY: the driver writes one pointer, to a constant string or null.
        let known = unsafe { get(status, &mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
        // SAFETY: not null, so a constant string that ends with 0.
        known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    let name = text(sys::cuGetErrorName).unwrap_or_else(|| format!("error {}", status as u32));
    let words = text(sys::cuGetErrorString).unwrap_or_else(|| "unknown".into());
    let remedy = match status {
        CUresult::CUDA_ERROR_NO_DEVICE => "; no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES",
        CUresult::CUDA_ERROR_STUB_LIBRARY => {
            "; a toolkit's stub was found instead of the driver: take its stubs folder out of LD_LIBRARY_PATH"
        }
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "; kernel module and library are of different driver releases: restart the machine"
        }
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => "; the device's memory is full",
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => {
            "; a kernel used an invalid address: check addresses and lengths of all tensors, then restart the program"
        }
        CUresult::CUDA_ERROR_INVALID_HANDLE | CUresult::CUDA_ERROR_INVALID_CONTEXT => {
            "; streams must be live ones of the device's primary context"
        }
        CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => {
            "; the default stream can't be used while another one is captured: pass the captured stream"
        }
        _ => "",
    };
    format!("{what}: {name} ({words}){remedy}")
}

/// A device's primary context, retained.
#[derive(Debug)]
pub(super) struct Context {
    handle: sys::CUcontext,
    device: sys::CUdevice,
}

// SAFETY: two handles; the driver lets any thread bind and release a primary context.
unsafe impl Send for Context {}
// SAFETY: by reference a context can only be bound, which the driver allows on several threads at once.
unsafe impl Sync for Context {}

impl Context {
    pub fn primary(device: sys::CUdevice) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: the driver is initialised, as `device` shows; it writes one handle.
        let status = unsafe { sys::cuDevicePrimaryCtxRetain(&mut handle, device) };
        check("cuDevicePrimaryCtxRetain", status)?;
        Ok(Self { handle, device })
    }

    /// Makes it the calling thread's context until the guard is dropped.
    pub fn bind(&self) -> Result<Bound> {
        // SAFETY: the context is retained.
        check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.handle) })?;
        Ok(Bound { thread: std::marker::PhantomData })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // An error at the end of a program, when the driver has shut down already, has no one to tell.
        // SAFETY: retained once by `primary`.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// While it lives the context is current on this thread; then the one before is again.
pub(super) struct Bound {
    /// Contexts are current per thread: not to be dropped on another one.
    thread: std::marker::PhantomData<*const ()>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = self.thread;
        let mut popped = ptr::null_mut();
        // SAFETY: pops what `bind` pushed on this thread.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
    }
}

/// While it lives this thread may do what a capture in global mode, of whatever stream, would forbid: nothing
/// of it touches the stream that is captured.
pub(super) struct Relaxed {
    before: sys::CUstreamCaptureMode,
    /// The mode is one of this thread.
    thread: std::marker::PhantomData<*const ()>,
}

impl Relaxed {
    pub fn new() -> Result<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: one number is exchanged.
        check("cuThreadExchangeStreamCaptureMode", unsafe {
            sys::cuThreadExchangeStreamCaptureMode(&mut mode)
        })?;
        Ok(Self { before: mode, thread: std::marker::PhantomData })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        let _ = self.thread;
        // SAFETY: one number is exchanged, on the thread that `new` has exchanged it on.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.before) };
    }
}
