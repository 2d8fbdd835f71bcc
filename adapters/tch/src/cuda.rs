//! Steps on a CUDA device: the library's device optimizer on the memory of libtorch's tensors, on libtorch's
//! current stream.

use std::ffi::c_void;
use std::sync::OnceLock;

use libloading::Library;
use rfdescent::device::Stream;
use rfdescent::optimizer::{DeviceInput, DeviceLoss, DeviceOptimizer, DeviceTensor};
use tch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::input::{Scalar, StepTensors, device_f32, scalar};
use crate::parameter::Place;

/// The optimizer and the device's number, which is the same for libtorch and the driver: both count the
/// devices that CUDA_VISIBLE_DEVICES leaves.
#[derive(Debug)]
pub(crate) struct Cuda {
    pub optimizer: DeviceOptimizer,
    ordinal: usize,
}

impl Cuda {
    pub fn new(optimizer: DeviceOptimizer, ordinal: usize) -> Self {
        Self { optimizer, ordinal }
    }

    /// Queues a step.
    pub fn step(&mut self, places: &[Place], input: &StepTensors<'_>) -> Result<()> {
        let device = Device::Cuda(self.ordinal);
        let f32_address = |name, tensor: Option<&Tensor>| -> Result<Option<(Tensor, u64)>> {
            let Some(tensor) = tensor else { return Ok(None) };
            let tensor = device_f32(name, tensor, device)?;
            let address = address(tensor.data_ptr());
            Ok(Some((tensor, address)))
        };
        let loss = scalar("loss", input.loss, device)?;
        let grad_scale = f32_address("grad_scale", input.grad_scale)?;
        let found_inf = f32_address("found_inf", input.found_inf)?;
        let device_input = DeviceInput {
            loss: match &loss {
                Scalar::Value(value) => DeviceLoss::Host(*value),
                Scalar::Device { tensor, dtype } => {
                    DeviceLoss::Address { address: address(tensor.data_ptr()), dtype: *dtype }
                }
            },
            grad_scale: grad_scale.as_ref().map(|(_, address)| *address),
            found_inf: found_inf.as_ref().map(|(_, address)| *address),
        };
        let tensors: Vec<DeviceTensor> = (places.iter())
            .map(|place| match &place.grad {
                // An empty tensor has no address; neither has its gradient.
                Some(grad) if place.len > 0 => {
                    DeviceTensor::new(address(place.param), address(grad.first), grad.dtype)
                }
                _ => DeviceTensor::without_grad(address(place.param)),
            })
            .collect();
        let stream = self.stream()?;
        // SAFETY: `place` has checked that parameters and gradients are dense tensors of this length and
        // format on this device. libtorch gives memory that was freed to later work of the same stream only,
        // so gradients, copies and scalars may be dropped before the step has run. libtorch's streams are
        // those of the primary context.
        unsafe { self.optimizer.step(&tensors, &device_input, stream)? };
        Ok(())
    }

    /// libtorch's current stream on the device.
    pub fn stream(&self) -> Result<Stream> {
        current_stream(self.ordinal)
    }
}

fn address(first: *const c_void) -> u64 {
    first.expose_provenance() as u64
}

/// `AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream)`, 0 for
/// success; part of libtorch's stable C interface.
type GetCurrentStream = unsafe extern "C" fn(i32, *mut *mut c_void) -> i32;

const LIBRARY: &str = if cfg!(windows) { "torch_cuda.dll" } else { "libtorch_cuda.so" };

/// The current stream of the calling thread on the device.
///
/// tch has no call for it. libtorch's C interface has one, in the part of libtorch that only its builds with
/// CUDA have: so it is looked up when it is first needed, and one build of this crate works with both.
fn current_stream(ordinal: usize) -> Result<Stream> {
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
    Ok(Stream::from_raw(address(stream)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_current_stream_or_a_reason() {
        match (current_stream(0), tch::Cuda::is_available()) {
            // PyTorch's current stream is the legacy default stream until it is changed.
            (Ok(stream), true) => assert_eq!(stream, Stream::DEFAULT),
            (Err(error), false) => {
                let message = error.to_string();
                assert!(message.contains("CUDA device 0") && message.contains("needs libtorch"), "{message}");
                println!("skipped: no CUDA device; {message}");
            }
            (outcome, available) => panic!("{outcome:?} where CUDA is available: {available}"),
        }
        assert!(current_stream(usize::MAX).is_err());
    }
}
