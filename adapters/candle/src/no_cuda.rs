//! What stands for the module `cuda` in a build without that feature, in which no tensor lies on a device.

use candle_core::{CudaDevice, CudaStorage};
use rfdescent::device::{Stream, Target};
use rfdescent::{Error, Result};

pub(crate) fn target(_: &CudaDevice) -> Result<Target> {
    Err(Error::Device("this build of rfdescent-candle has no CUDA: enable its feature `cuda`".into()))
}

pub(crate) fn stream(_: &CudaDevice) -> Stream {
    Stream::DEFAULT
}

pub(crate) fn read(_: &CudaStorage, _: &CudaDevice) -> u64 {
    0
}

pub(crate) fn write(_: &mut CudaStorage, _: &CudaDevice) -> u64 {
    0
}
