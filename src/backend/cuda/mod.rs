//! CUDA: the driver interface by way of cudarc, opened when it is first asked for.
//!
//! [`driver`] finds the library and binds contexts, [`module`] loads the kernels, [`report`] says what was
//! found. Everything uses the device's primary context, which is the one of CUDA's runtime and so of every
//! framework.

mod driver;
mod module;
mod report;

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUdevice_attribute, CUpointer_attribute, CUresult};

use self::driver::{Context, Relaxed, check, initialise};
use self::module::Module;
use super::abi::RFD_THREADS;
use super::executor::{Device, Executor, HostBlock, Kernel, Launch, Launched, Stream};
use crate::error::{Error, Result};

pub use report::{DEVICE_CODE, report};

/// Lowest compute capability of the PTX.
const OLDEST_GPU: (i32, i32) = (7, 0);

/// As [`crate::cuda::device`].
pub fn device(ordinal: usize) -> Result<Device> {
    initialise()?;
    let count = device_count()?;
    let Some(number) = c_int::try_from(ordinal).ok().filter(|&number| number < count) else {
        let there = match count {
            0 => "no CUDA device is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES".to_string(),
            1 => "there is one CUDA device, 0".to_string(),
            _ => format!("there are {count} CUDA devices, 0 to {}", count - 1),
        };
        return Err(Error::Device(format!("CUDA device {ordinal} does not exist; {there}")));
    };
    Ok(Device::new(Arc::new(Cuda::open(number)?)))
}

/// As [`crate::cuda::device_of`].
pub fn device_of(address: u64) -> Result<Device> {
    initialise()?;
    let context = any_context()?;
    let _bound = context.as_ref().map(Context::bind).transpose()?;
    let mut ordinal: c_int = -1;
    // SAFETY: this attribute is one integer; the driver checks the address.
    let status = unsafe {
        sys::cuPointerGetAttribute(
            (&raw mut ordinal).cast(),
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            address,
        )
    };
    check(format_args!("{address:#x} is no address on a CUDA device"), status)?;
    let ordinal = usize::try_from(ordinal)
        .map_err(|_| Error::Device(format!("{address:#x} lies on no CUDA device; pass a device address")))?;
    device(ordinal)
}

/// A primary context that is in use, of any device: where there is memory there is one.
fn any_context() -> Result<Option<Context>> {
    for number in 0..device_count()? {
        let device = get_device(number)?;
        let (mut flags, mut active) = (0, 0);
        // SAFETY: `device` is valid; two integers are written.
        let status = unsafe { sys::cuDevicePrimaryCtxGetState(device, &mut flags, &mut active) };
        check("cuDevicePrimaryCtxGetState", status)?;
        if active != 0 {
            return Context::primary(device).map(Some);
        }
    }
    Ok(None)
}

fn device_count() -> Result<c_int> {
    let mut count = 0;
    // SAFETY: the driver is initialised; one integer is written.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    Ok(count)
}

fn get_device(number: c_int) -> Result<sys::CUdevice> {
    let mut device = 0;
    // SAFETY: the driver is initialised and checks the number; one handle is written.
    check(format_args!("CUDA device {number}"), unsafe { sys::cuDeviceGet(&mut device, number) })?;
    Ok(device)
}

fn attribute(device: sys::CUdevice, attribute: CUdevice_attribute) -> Result<i32> {
    let mut value = 0;
    // SAFETY: `device` is valid; one integer is written.
    check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) })?;
    Ok(value)
}

fn compute_capability(device: sys::CUdevice) -> Result<(i32, i32)> {
    Ok((
        attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ))
}

fn device_name(device: sys::CUdevice) -> Result<String> {
    let mut name = [0_u8; 256];
    // SAFETY: the driver writes at most as many bytes as it is told, the last of them 0.
    check("cuDeviceGetName", unsafe {
        sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, device)
    })?;
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    Ok(String::from_utf8_lossy(&name[..end]).into_owned())
}

/// A CUDA device with the kernels loaded.
#[derive(Debug)]
struct Cuda {
    context: Context,
    module: Module,
    /// For the work that no caller's stream is given for; blocks none and is blocked by none.
    own_stream: OwnStream,
    name: String,
    cooperative: bool,
    /// Host memory that was given back and is not freed yet.
    released: Mutex<Vec<HostBlock>>,
}

#[derive(Debug)]
struct OwnStream(sys::CUstream);

// SAFETY: a handle; the driver lets any thread use and destroy a stream.
unsafe impl Send for OwnStream {}
// SAFETY: the driver takes work for one stream from several threads at once, and orders it.
unsafe impl Sync for OwnStream {}

impl Cuda {
    fn open(number: c_int) -> Result<Self> {
        let device = get_device(number)?;
        let (major, minor) = compute_capability(device)?;
        let title = device_name(device)?;
        if (major, minor) < OLDEST_GPU {
            return Err(Error::Device(format!(
                "{title} (CUDA device {number}) has compute capability {major}.{minor}; the kernels need 7.0 (Volta) or \
                 newer: use another device or the CPU"
            )));
        }
        let context = Context::primary(device)?;
        let bound = context.bind()?;
        let multiprocessors =
            attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let cooperative = attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)? != 0;
        let module = Module::load((major, minor), u32::try_from(multiprocessors).unwrap_or(0))?;
        let name =
            format!("{title} (CUDA device {number}, compute capability {major}.{minor}, {})", module.code);
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: a context is bound; one handle is written.
        let status = unsafe { sys::cuStreamCreate(&mut stream, flags) };
        drop(bound);
        // Made before the check, so that an error unloads the module too.
        let cuda = Self {
            context,
            module,
            own_stream: OwnStream(stream),
            name,
            cooperative,
            released: Mutex::default(),
        };
        check("cuStreamCreate", status)?;
        Ok(cuda)
    }
}

impl Cuda {
    /// Frees the host memory that was given back; the context is bound.
    fn free_released(&self) {
        let blocks = std::mem::take(&mut *self.released.lock().unwrap_or_else(PoisonError::into_inner));
        if !blocks.is_empty() {
            // SAFETY: a context is bound. Kernels that write to the blocks are done after this.
            let _ = unsafe { sys::cuCtxSynchronize() };
        }
        for block in blocks {
            // SAFETY: the trait says that `allocate_host` gave the block, and it is in no list any more.
            let _ = unsafe { sys::cuMemFreeHost(block.host.cast()) };
        }
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if let (Ok(_bound), Ok(_relaxed)) = (self.context.bind(), Relaxed::new()) {
            self.free_released();
            if !self.own_stream.0.is_null() {
                // SAFETY: made by `open`, and destroyed here alone.
                let _ = unsafe { sys::cuStreamDestroy_v2(self.own_stream.0) };
            }
            self.module.unload();
        }
    }
}

fn raw(stream: Stream) -> sys::CUstream {
    // Handles 0, 1 and 2 are numbers, not addresses; the driver knows them.
    ptr::with_exposed_provenance_mut(stream.as_raw() as usize)
}

impl Executor for Cuda {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let _bound = self.context.bind()?;
        let mut address = 0;
        // SAFETY: a context is bound; one address is written.
        check(format_args!("{bytes} bytes of device memory"), unsafe {
            sys::cuMemAlloc_v2(&mut address, bytes)
        })?;
        // SAFETY: fills the memory just allocated, on the executor's own live stream.
        let status = unsafe {
            match sys::cuMemsetD8Async(address, 0, bytes, self.own_stream.0) {
                CUresult::CUDA_SUCCESS => sys::cuStreamSynchronize(self.own_stream.0),
                error => error,
            }
        };
        if let Err(error) = check("clearing device memory", status) {
            // SAFETY: allocated above, and given to no one.
            let _ = unsafe { sys::cuMemFree_v2(address) };
            return Err(error);
        }
        Ok(address)
    }

    fn release(&self, address: u64) {
        // Another stream may be captured meanwhile, which this must not break.
        if let (Ok(_bound), Ok(_relaxed)) = (self.context.bind(), Relaxed::new()) {
            // It waits for the device's work. An error at the end of a program has no one to tell.
            // SAFETY: the trait says that `allocate` gave the address.
            let _ = unsafe { sys::cuMemFree_v2(address) };
        }
    }

    fn allocate_host(&self, bytes: usize) -> Result<HostBlock> {
        let _bound = self.context.bind()?;
        self.free_released();
        let mut host = ptr::null_mut();
        // Portable: the same for every context. Mapped: the device writes to it.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a context is bound; one pointer is written.
        check("pinned host memory", unsafe { sys::cuMemHostAlloc(&mut host, bytes, flags) })?;
        // SAFETY: `bytes` bytes were allocated at `host`; zeros are valid for them.
        unsafe { ptr::write_bytes(host.cast::<u8>(), 0, bytes) };
        let mut device = 0;
        // SAFETY: `host` is mapped memory; one address is written.
        let status = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0) };
        if let Err(error) = check("address of pinned host memory", status) {
            // SAFETY: allocated above, and given to no one.
            let _ = unsafe { sys::cuMemFreeHost(host) };
            return Err(error);
        }
        Ok(HostBlock { host: host.cast(), device })
    }

    fn release_host(&self, block: HostBlock) {
        // A stream may be captured now, and a wait for the device would break that: put off until memory is
        // asked for, which no capture allows either. Blocks are few and small.
        self.released.lock().unwrap_or_else(PoisonError::into_inner).push(block);
    }

    fn capturing(&self, stream: Stream) -> Result<bool> {
        let _bound = self.context.bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the driver checks the handle, which the caller vouches for; one number is written. Allowed
        // in a capture.
        check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(raw(stream), &mut status) })?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: the driver checks the handle, which the caller vouches for.
        check("waiting for the stream", unsafe { sys::cuStreamSynchronize(raw(stream)) })
    }

    unsafe fn copy_to_device(&self, to: u64, from: *const u8, bytes: usize, stream: Stream) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: the caller vouches for both ranges until the stream has done the copy.
        let status = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, raw(stream)) };
        check(format_args!("copy of {bytes} bytes to the device"), status)
    }

    unsafe fn copy_to_host(&self, to: *mut u8, from: u64, bytes: usize, stream: Stream) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: the caller vouches for both ranges until the stream has done the copy.
        let status = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, raw(stream)) };
        check(format_args!("copy of {bytes} bytes from the device"), status)
    }

    unsafe fn fill(&self, address: u64, word: u32, count: usize, stream: Stream) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: the caller vouches for the range and its alignment.
        check("writing settings", unsafe { sys::cuMemsetD32Async(address, word, count, raw(stream)) })
    }

    fn resident_blocks(&self, kernel: Kernel) -> Result<u32> {
        let _bound = self.context.bind()?;
        Ok(self.module.function(kernel)?.resident_blocks)
    }

    fn cooperative(&self) -> bool {
        self.cooperative
    }

    unsafe fn launch(&self, launch: &Launch<'_>, stream: Stream) -> Result<Launched> {
        let &Launch { kernel, cooperative, grid, step, table } = launch;
        let mut parameters: [*mut c_void; 2] =
            [ptr::from_ref(step).cast_mut().cast(), ptr::from_ref(table).cast_mut().cast()];
        let _bound = self.context.bind()?;
        let function = self.module.function(kernel)?.handle;
        // SAFETY: every kernel takes these two structs, whose layout is checked when they are compiled; the
        // driver copies them before it returns. The caller vouches for the addresses in them.
        let status = unsafe {
            let (parameters, stream) = (parameters.as_mut_ptr(), raw(stream));
            if cooperative {
                sys::cuLaunchCooperativeKernel(function, grid, 1, 1, RFD_THREADS, 1, 1, 0, stream, parameters)
            } else {
                sys::cuLaunchKernel(
                    function,
                    grid,
                    1,
                    1,
                    RFD_THREADS,
                    1,
                    1,
                    0,
                    stream,
                    parameters,
                    ptr::null_mut(),
                )
            }
        };
        match status {
            CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE | CUresult::CUDA_ERROR_NOT_SUPPORTED
                if cooperative =>
            {
                Ok(Launched::Refused)
            }
            _ => check(format_args!("launch of {kernel:?} with {grid} blocks"), status)
                .map(|()| Launched::Queued),
        }
    }
}
