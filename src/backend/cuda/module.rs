//! The device code that is built into the library, and loading it.

use std::ffi::{CString, c_uint, c_void};
use std::ptr;

use cudarc::driver::sys::{self, CUjit_option, CUresult};

use super::driver::check;
use crate::backend::abi::RFD_THREADS;
use crate::backend::executor::Kernel;
use crate::error::{Error, Result};

/// PTX for compute capability 7.0 and newer, which the driver compiles for the GPU at hand (and keeps in its
/// cache).
const PTX: &str = include_str!("../../../kernels/prebuilt/rfd_step.ptx");

/// Machine code of the architectures that the build's nvcc knew, aligned as the driver wants it.
#[cfg(rfd_fatbin)]
static FATBIN: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/rfd_step.fatbin")));

#[cfg(rfd_fatbin)]
#[repr(align(16))]
struct Aligned<T: ?Sized>(T);

/// Loaded kernels.
#[derive(Debug)]
pub(super) struct Module {
    handle: sys::CUmodule,
    functions: Vec<Function>,
    /// Which code was loaded and why.
    pub code: String,
}

/// A kernel and how many of its blocks the device holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function {
    pub handle: sys::CUfunction,
    pub resident_blocks: u32,
}

// SAFETY: handles of the driver, which lets any thread launch functions and unload the module.
unsafe impl Send for Module {}
// SAFETY: by reference handles are only read; the driver launches functions for several threads at once.
unsafe impl Sync for Module {}

impl Module {
    /// Loads into the current context, for a device with so many multiprocessors. All kernels at once: a
    /// capture could not load one later.
    pub fn load(multiprocessors: u32) -> Result<Self> {
        let (handle, code) = load_any()?;
        // Owned from here on, so that an error below unloads it.
        let mut module = Self { handle, functions: Vec::with_capacity(Kernel::NAMES.len()), code };
        for name in Kernel::NAMES {
            let mut function = ptr::null_mut();
            // SAFETY: the module is loaded, the name ends with 0, one handle is written.
            let status = unsafe { sys::cuModuleGetFunction(&mut function, handle, name.as_ptr()) };
            check(format_args!("kernel {name:?}"), status)?;
            let mut blocks = 0;
            // SAFETY: the function belongs to the loaded module; one integer is written.
            let status = unsafe {
                sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, function, RFD_THREADS as i32, 0)
            };
            check(format_args!("occupancy of kernel {name:?}"), status)?;
            let resident_blocks = u32::try_from(blocks).unwrap_or(0).saturating_mul(multiprocessors);
            module.functions.push(Function { handle: function, resident_blocks });
        }
        Ok(module)
    }

    pub fn function(&self, kernel: Kernel) -> Function {
        self.functions[kernel.index()]
    }

    /// Unloads; the context that it was loaded into must be current.
    pub fn unload(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: loaded by `load` and not unloaded before. An error at the end of a program has no one
            // to tell.
            let _ = unsafe { sys::cuModuleUnload(self.handle) };
            self.handle = ptr::null_mut();
        }
    }
}

#[cfg(rfd_fatbin)]
fn load_any() -> Result<(sys::CUmodule, String)> {
    match load(FATBIN.0.as_ptr().cast()) {
        Ok(module) => Ok((module, "machine code from the build's nvcc".into())),
        Err(problem) => Ok((load_ptx()?, format!("PTX, because the machine code does not fit: {problem}"))),
    }
}

#[cfg(not(rfd_fatbin))]
fn load_any() -> Result<(sys::CUmodule, String)> {
    Ok((load_ptx()?, "PTX, compiled by the driver".into()))
}

fn load_ptx() -> Result<sys::CUmodule> {
    let text = CString::new(PTX)
        .map_err(|_| Error::Device("the library's PTX is damaged; build it again".into()))?;
    load(text.as_ptr().cast())
}

/// Loads an image, with the compiler's own words on an error.
fn load(image: *const c_void) -> Result<sys::CUmodule> {
    let mut log = vec![0_u8; 8192];
    let mut options =
        [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // The second value is the size itself, passed as a pointer.
    let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(log.len())];
    let mut module = ptr::null_mut();
    // SAFETY: the image is a fat binary of this build or PTX that ends with 0; options and values are arrays
    // of the length given, and the log is as large as they say. All live until the call returns.
    let status = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            image,
            options.len() as c_uint,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    if status == CUresult::CUDA_SUCCESS {
        return Ok(module);
    }
    let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
    let log = String::from_utf8_lossy(&log[..end]).trim().to_string();
    let what = if log.is_empty() {
        "loading the kernels".to_string()
    } else {
        format!("loading the kernels: {log}")
    };
    check(what, status)?;
    Ok(module)
}
