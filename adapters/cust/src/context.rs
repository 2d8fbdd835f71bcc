//! Devices and streams.

use std::ptr;

use cust::context::CurrentContext;
use cust::device::Device as CustDevice;
use cust::error::CudaError;
use cust::sys::{self, CUcontext, CUresult};
use rfdescent::device::{Device, Stream};
use rfdescent::{Error, Result};

/// The device of the calling thread's current context, with the library's kernels loaded. The first call
/// takes as long as the driver needs to compile them; keep the result.
///
/// # Errors
/// [`Error::Device`] when no context is current, when it is not the device's primary one, or when the device
/// can't be used, with the remedy.
pub fn device() -> Result<Device> {
    let mut current: CUcontext = ptr::null_mut();
    // SAFETY: one handle is written. Before cust is initialised the driver returns an error.
    let status = unsafe { sys::cuCtxGetCurrent(&mut current) };
    if status != CUresult::CUDA_SUCCESS || current.is_null() {
        return Err(Error::Device(
            "no CUDA context is current on this thread; keep what `cust::quick_init()` returns, or call \
             `cust::context::CurrentContext::set_current` with it on this thread"
                .into(),
        ));
    }
    let device =
        CurrentContext::get_device().map_err(|error| failed("the current context's device", error))?;
    if primary_context(device)? != current {
        return Err(Error::Device(
            "the current CUDA context is not the device's primary one; make it with `cust::quick_init()` or \
             `cust::context::Context::new`, not with `cust::context::legacy`"
                .into(),
        ));
    }
    rfdescent::cuda::device(ordinal(device)?)
}

/// The stream as the library's own calls take it. The cust stream must live as long as work is queued by way
/// of the result.
pub fn stream(stream: &cust::stream::Stream) -> Stream {
    Stream::from_raw(stream.as_inner().expose_provenance() as u64)
}

/// The handle of a device's primary context, which is the same for everybody as long as anybody retains it.
fn primary_context(device: CustDevice) -> Result<CUcontext> {
    let mut primary: CUcontext = ptr::null_mut();
    // SAFETY: the device comes from the driver; one handle is written. `cust::context::Context::new` would do
    // the same but make the context current as well.
    let status = unsafe { sys::cuDevicePrimaryCtxRetain(&mut primary, device.as_raw()) };
    if status != CUresult::CUDA_SUCCESS {
        return Err(Error::Device(format!("the device's primary context: {status:?}")));
    }
    // SAFETY: retained above. Where this was the only use of it, it is not the current context either, and
    // only the handle is compared.
    let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(device.as_raw()) };
    Ok(primary)
}

/// The number of a device among those that CUDA_VISIBLE_DEVICES leaves; the driver's handle need not be it.
fn ordinal(device: CustDevice) -> Result<usize> {
    let count = CustDevice::num_devices().map_err(|error| failed("the number of devices", error))?;
    (0..count)
        .find(|&ordinal| CustDevice::get_device(ordinal).is_ok_and(|other| other.as_raw() == device.as_raw()))
        .map(|ordinal| ordinal as usize)
        .ok_or_else(|| Error::Device("the current context's device is none of the visible ones".into()))
}

fn failed(what: &str, error: CudaError) -> Error {
    Error::Device(format!("{what}: {error}"))
}
