//! libtorch's current stream.

use std::ffi::c_void;
use std::sync::OnceLock;

use libloading::Library;
use rfdescent::device::Stream;
use tch::Device;

use crate::error::{Error, Result};

/// `AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream)`, 0 for
/// success; part of libtorch's stable C interface.
type GetCurrentStream = unsafe extern "C" fn(i32, *mut *mut c_void) -> i32;

const LIBRARY: &str = if cfg!(windows) { "torch_cuda.dll" } else { "libtorch_cuda.so" };

/// The current stream of the calling thread on the device; on the CPU, which has none, the default one.
///
/// tch has no call for it. libtorch's C interface has one, in the part of libtorch that only its builds with
/// CUDA have: so it is looked up when it is first needed, and one build of this crate works with both.
pub(crate) fn current_stream(device: Device) -> Result<Stream> {
    let Device::Cuda(ordinal) = device else { return Ok(Stream::DEFAULT) };
    static FUNCTION: OnceLock<std::result::Result<GetCurrentStream, String>> = OnceLock::new();
    let function = FUNCTION.get_or_init(|| {
        // SAFETY: where there are CUDA tensors, libtorch has loaded this library before; its initialisers
        // have run.
        let library = unsafe { Library::new(LIBRARY) }.map_err(|error| error.to_string())?;
        // SAFETY: the function of this name has had this signature since libtorch 2.1.
        let function = unsafe { library.get::<GetCurrentStream>(b"aoti_torch_get_current_cuda_stream\0") }
            .map(|function| *function)
            .map_err(|error| error.to_string());
        // It stays loaded for the life of the program, as libtorch does.
        std::mem::forget(library);
        function
    });
    let failed = |problem: &str| -> Error {
        let message = format!(
            "libtorch's current stream on CUDA device {ordinal}: {problem}; this needs libtorch 2.11 with CUDA, and the device"
        );
        rfdescent::Error::Device(message).into()
    };
    let function = function.as_ref().map_err(|problem| failed(problem))?;
    let index = i32::try_from(ordinal).map_err(|_| failed("no such device"))?;
    let mut stream = std::ptr::null_mut();
    // SAFETY: one pointer is written; errors are caught inside and returned as a number.
    let status = unsafe { function(index, &mut stream) };
    if status != 0 {
        return Err(failed("libtorch could not say"));
    }
    Ok(Stream::from_raw(stream.expose_provenance() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_current_stream_or_a_reason() {
        match (current_stream(Device::Cuda(0)), tch::Cuda::is_available()) {
            // PyTorch's current stream is the legacy default stream until it is changed.
            (Ok(stream), true) => assert_eq!(stream, Stream::DEFAULT),
            (Err(error), false) => {
                let message = error.to_string();
                assert!(message.contains("CUDA device 0") && message.contains("needs libtorch"), "{message}");
                println!("skipped: no CUDA device; {message}");
            }
            (outcome, available) => panic!("{outcome:?} where CUDA is available: {available}"),
        }
        assert!(current_stream(Device::Cuda(usize::MAX)).is_err());
        assert_eq!(current_stream(Device::Cpu).unwrap(), Stream::DEFAULT);
    }
}
