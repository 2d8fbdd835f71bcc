//! The device code that is built into the library, and loading it: that of the build's nvcc as a whole, the
//! machine code and the PTX that come with the crate part by part.

use std::ffi::{CString, c_uint, c_void};
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUjit_option, CUresult};

use super::driver::{Relaxed, check};
use crate::backend::abi::RFD_THREADS;
use crate::backend::executor::Kernel;
use crate::backend::kernels::{COMMON, MACHINE_CODE, PARTS, PTX, Packed};
use crate::error::{Error, Result};

/// Machine code of the architectures that the build's nvcc knew, aligned as the driver wants it.
#[cfg(rfd_fatbin)]
static FATBIN: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/rfd_step.fatbin")));

#[cfg(rfd_fatbin)]
#[repr(align(16))]
struct Aligned<T: ?Sized>(T);

/// The kernels, loaded when they are asked for: PTX has to be compiled for the GPU at hand, which takes some
/// tenths of a second a part where the driver has not kept the result, and most programs need one part and
/// the common one.
#[derive(Debug)]
pub(super) struct Module {
    /// Machine code of all parts.
    whole: Option<Handle>,
    /// Deflated machine code part by part.
    packed: Option<&'static Packed>,
    parts: [OnceLock<Part>; PARTS.len()],
    /// Held while a part is loaded.
    loading: Mutex<()>,
    multiprocessors: u32,
    /// Which code is used and why.
    pub code: String,
}

#[derive(Debug)]
struct Part {
    functions: Vec<(Kernel, Function)>,
    /// None where it is one of the whole.
    own: Option<Handle>,
}

/// A kernel and how many of its blocks the device holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function {
    pub handle: sys::CUfunction,
    pub resident_blocks: u32,
}

#[derive(Clone, Copy, Debug)]
struct Handle(sys::CUmodule);

// SAFETY: handles of the driver, which lets any thread launch functions and unload the module.
unsafe impl Send for Module {}
// SAFETY: by reference handles are only read; the driver loads modules and launches functions for several
// threads at once.
unsafe impl Sync for Module {}

impl Module {
    /// For the current context, and a device of this compute capability with so many multiprocessors. Loads
    /// the common part.
    pub fn load(capability: (i32, i32), multiprocessors: u32) -> Result<Self> {
        let (whole, code) = load_whole();
        let packed = if whole.is_none() { packed_for(capability) } else { None };
        let mut module =
            Self { whole, packed, parts: Default::default(), loading: Mutex::new(()), multiprocessors, code };
        if packed.is_some() {
            match module.part(COMMON) {
                Ok(_) => module.code = "machine code".into(),
                Err(problem) => {
                    module.packed = None;
                    module.code = format!("PTX, because the machine code does not fit: {problem}");
                }
            }
        }
        module.part(COMMON)?;
        Ok(module)
    }

    /// A kernel, whose part is loaded if it is not yet; the context that [`Module::load`] has seen must be
    /// current.
    pub fn function(&self, kernel: Kernel) -> Result<Function> {
        let functions = &self.part(kernel.part())?.functions;
        let found = functions.iter().find(|(own, _)| *own == kernel);
        found
            .map(|&(_, function)| function)
            .ok_or_else(|| Error::Device(format!("there is no kernel {kernel:?}")))
    }

    fn part(&self, index: usize) -> Result<&Part> {
        if self.parts[index].get().is_none() {
            let _loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
            // Another thread may have been first. What failed is tried again the next time, when memory may
            // be free.
            if self.parts[index].get().is_none() {
                let part = self.load_part(index)?;
                return Ok(self.parts[index].get_or_init(|| part));
            }
        }
        self.parts[index].get().ok_or_else(|| Error::Device("no device code was loaded".into()))
    }

    fn load_part(&self, index: usize) -> Result<Part> {
        // A list of another kind than expected may come first in a capture.
        let _relaxed = Relaxed::new()?;
        let own = match (self.whole, self.packed) {
            (Some(_), _) => None,
            (None, Some(packed)) => Some(Handle(load_packed(packed[index])?)),
            (None, None) => Some(Handle(load_ptx(PTX[index])?)),
        };
        let Some(Handle(module)) = own.or(self.whole) else {
            return Err(Error::Device("no device code was loaded".into()));
        };
        let functions =
            self.functions(index, module).inspect_err(|_| own.into_iter().for_each(Handle::unload))?;
        Ok(Part { functions, own })
    }

    /// The kernels of a part in the module that has them.
    fn functions(&self, index: usize, module: sys::CUmodule) -> Result<Vec<(Kernel, Function)>> {
        let mut functions = Vec::new();
        for kernel in Kernel::all().filter(|kernel| kernel.part() == index) {
            let mut function = ptr::null_mut();
            // SAFETY: the module is loaded, the name ends with 0, one handle is written.
            let status = unsafe { sys::cuModuleGetFunction(&mut function, module, kernel.name().as_ptr()) };
            check(format_args!("kernel {kernel:?}"), status)?;
            let mut blocks = 0;
            // SAFETY: the function belongs to the loaded module; one integer is written.
            let status = unsafe {
                sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, function, RFD_THREADS as i32, 0)
            };
            check(format_args!("occupancy of kernel {kernel:?}"), status)?;
            let resident_blocks = u32::try_from(blocks).unwrap_or(0).saturating_mul(self.multiprocessors);
            functions.push((kernel, Function { handle: function, resident_blocks }));
        }
        Ok(functions)
    }

    /// Unloads all; the context that it was loaded into must be current.
    pub fn unload(&mut self) {
        for part in &mut self.parts {
            if let Some(own) = part.take().and_then(|part| part.own) {
                own.unload();
            }
        }
        if let Some(whole) = self.whole.take() {
            whole.unload();
        }
    }
}

impl Handle {
    fn unload(self) {
        // SAFETY: loaded once, its owner gives it up, and callers have its context current. An error at the
        // end of a program has no one to tell.
        let _ = unsafe { sys::cuModuleUnload(self.0) };
    }
}

/// Machine code, where the build has some that fits; what is used and why.
#[cfg(rfd_fatbin)]
fn load_whole() -> (Option<Handle>, String) {
    match load(FATBIN.0.as_ptr().cast()) {
        Ok(module) => (Some(Handle(module)), "machine code from the build's nvcc".into()),
        Err(problem) => (None, format!("PTX, because the machine code does not fit: {problem}")),
    }
}

#[cfg(not(rfd_fatbin))]
fn load_whole() -> (Option<Handle>, String) {
    (None, "PTX, compiled by the driver".into())
}

/// The machine code for a device: that of the same major number and no later minor one.
fn packed_for((major, minor): (i32, i32)) -> Option<&'static Packed> {
    let fits = |(own_major, own_minor): (i32, i32)| own_major == major && own_minor <= minor;
    MACHINE_CODE.iter().rev().find(|(own, _)| fits(*own)).map(|(_, packed)| packed)
}

/// Machine code, as the driver wants it aligned; it says itself where it ends.
fn unpack(file: &[u8]) -> Option<Vec<u128>> {
    // Behind the line of text that says what it was made from.
    let packed = &file[file.iter().position(|&byte| byte == b'\n')? + 1..];
    let code = miniz_oxide::inflate::decompress_to_vec_zlib(packed).ok()?;
    let word = |chunk: &[u8]| {
        let mut bytes = [0; 16];
        bytes[..chunk.len()].copy_from_slice(chunk);
        u128::from_ne_bytes(bytes)
    };
    Some(code.chunks(16).map(word).collect())
}

fn load_packed(file: &[u8]) -> Result<sys::CUmodule> {
    let code = unpack(file)
        .ok_or_else(|| Error::Device("the library's machine code is damaged; build it again".into()))?;
    load(code.as_ptr().cast())
}

fn load_ptx(text: &str) -> Result<sys::CUmodule> {
    let text = CString::new(text)
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
    // SAFETY: the image is a fat binary of this build, ptxas's machine code, or PTX that ends with 0; options
    // and values are arrays of the length given, and the log is as large as they say. All live until the call
    // returns.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_is_machine_code_with_its_kernels() {
        for (capability, packed) in &MACHINE_CODE {
            for (index, file) in packed.iter().enumerate() {
                let code: Vec<u8> = unpack(file).unwrap().into_iter().flat_map(u128::to_ne_bytes).collect();
                let what = format!("{} for {capability:?}", PARTS[index]);
                assert!(code.starts_with(b"\x7fELF"), "{what}");
                // The architecture, in the flags of the ELF header.
                assert_eq!(i32::from(code[48]), 10 * capability.0 + capability.1, "{what}");
                for kernel in Kernel::all().filter(|kernel| kernel.part() == index) {
                    let name = [b".text.", kernel.name().to_bytes_with_nul()].concat();
                    assert!(code.windows(name.len()).any(|window| window == name), "{what}: {kernel:?}");
                }
            }
        }
    }

    #[test]
    fn later_devices_of_the_same_major_number_run_it() {
        let of =
            |capability| MACHINE_CODE.iter().find(|(own, _)| *own == capability).map(|(_, packed)| packed);
        for (device, code) in
            [((8, 0), Some((8, 0))), ((8, 6), Some((8, 0))), ((8, 9), Some((8, 0))), ((9, 0), Some((9, 0)))]
                .into_iter()
                .chain([((7, 0), None), ((7, 5), None), ((10, 0), None), ((12, 0), None)])
        {
            assert_eq!(packed_for(device), code.and_then(of), "{device:?}");
        }
    }

    #[test]
    fn what_is_damaged_is_no_code() {
        assert!(
            unpack(b"").is_none() && unpack(b"// Made by\n").is_none() && unpack(b"\nnot deflated").is_none()
        );
    }
}
