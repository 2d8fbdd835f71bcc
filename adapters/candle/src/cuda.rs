//! What the adapter needs of candle's CUDA types, which candle has with its feature `cuda` only.

use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DevicePtrMut};
use candle_core::{CudaDevice, CudaStorage, DeviceLocation};
use rfdescent::Result;
use rfdescent::device::{Stream, Target};

/// The library's target for tensors on the device.
pub(crate) fn target(device: &CudaDevice) -> Result<Target> {
    let DeviceLocation::Cuda { gpu_id } = device.location() else {
        unreachable!("a CUDA device says that it is one")
    };
    rfdescent::cuda::device(gpu_id).map(Target::Device)
}

/// candle's stream of the device. It is live as long as the device is.
pub(crate) fn stream(device: &CudaDevice) -> Stream {
    Stream::from_raw(device.cuda_stream().cu_stream().expose_provenance() as u64)
}

/// Where a storage begins, whatever its format; 0 for a format without steps.
macro_rules! start {
    ($storage:expr, $pointer:ident, $stream:expr) => {
        match $storage {
            CudaStorageSlice::F32(slice) => slice.$pointer($stream).0,
            CudaStorageSlice::F64(slice) => slice.$pointer($stream).0,
            CudaStorageSlice::F16(slice) => slice.$pointer($stream).0,
            CudaStorageSlice::BF16(slice) => slice.$pointer($stream).0,
            _ => 0,
        }
    };
}

/// Where a storage to be read begins. The device's stream waits for what other streams write there.
pub(crate) fn read(storage: &CudaStorage, device: &CudaDevice) -> u64 {
    start!(&storage.slice, device_ptr, &device.cuda_stream())
}

/// Where a storage to be written begins. The device's stream waits for what other streams do there, and they
/// for what it has been given so far.
pub(crate) fn write(storage: &mut CudaStorage, device: &CudaDevice) -> u64 {
    start!(&mut storage.slice, device_ptr_mut, &device.cuda_stream())
}
