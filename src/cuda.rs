//! CUDA devices.
//!
//! The driver is opened when it is first asked for: building and starting need no CUDA, and what is missing
//! is an error that says so, also where this build has none. All work runs in the device's primary context,
//! the one of CUDA's runtime, which is bound for the time of a call only; any thread may call.

use std::fmt;

#[cfg(feature = "cuda")]
use crate::backend::cuda as backend;
use crate::backend::executor::Device;
use crate::error::Result;

/// What a build without the feature `cuda` has in its place.
#[cfg(not(feature = "cuda"))]
mod backend {
    use super::{Device, Report};
    use crate::error::{Error, Result};

    pub const DEVICE_CODE: &str = "none, as this build has no CUDA";

    pub fn device(_: usize) -> Result<Device> {
        Err(Error::Device("this build of rfdescent has no CUDA; enable its feature `cuda`".into()))
    }

    pub fn device_of(_: u64) -> Result<Device> {
        device(0)
    }

    pub fn report() -> Report {
        let driver = device(0).map(|device| device.name()).map_err(|error| error.to_string());
        Report { driver, devices: Vec::new() }
    }
}

/// The CUDA device with this number, as CUDA_VISIBLE_DEVICES counts.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) says what is missing (a build with CUDA, driver, device, compute
/// capability) and what to do; never a panic.
pub fn device(ordinal: usize) -> Result<Device> {
    backend::device(ordinal)
}

/// The CUDA device on which memory lies. Not while a stream is captured.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) when it is no address of CUDA memory; else as [`device`].
pub fn device_of(address: u64) -> Result<Device> {
    backend::device_of(address)
}

/// Looks for the driver and opens every device once. Never fails: what is missing is part of the report.
pub fn report() -> Report {
    backend::report()
}

/// Which settings ask for the slower kernels.
const GENERIC: &str = "the generic ones, slower than the others, for norm lock, conservative steps, f64, the adaptive \
                       method without averages, bf16 with momentum and f16 without master weights, gradients of another \
                       format, and tensors that differ in format";

/// What was found of CUDA: driver and devices, and which device code each would use.
#[derive(Clone, Debug)]
pub struct Report {
    /// The CUDA version of the driver, or why there is none that can be used.
    pub driver: std::result::Result<String, String>,
    /// The visible devices.
    pub devices: Vec<DeviceReport>,
}

/// What was found of one device.
#[derive(Clone, Debug)]
pub struct DeviceReport {
    /// Number, as CUDA_VISIBLE_DEVICES counts.
    pub ordinal: usize,
    /// Name and compute capability.
    pub title: String,
    /// What it is with the device code that it uses, or why it can't be used.
    pub usable: std::result::Result<String, String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.driver {
            Ok(version) => writeln!(f, "CUDA driver: for CUDA {version}")?,
            Err(problem) => writeln!(f, "CUDA driver: not usable. {problem}")?,
        }
        writeln!(f, "device code in this library: {}", backend::DEVICE_CODE)?;
        writeln!(f, "kernels: {GENERIC}")?;
        for device in &self.devices {
            match &device.usable {
                Ok(name) => writeln!(f, "device {}: usable. {name}", device.ordinal)?,
                Err(problem) => {
                    writeln!(f, "device {}: {} not usable. {problem}", device.ordinal, device.title)?
                }
            }
        }
        if self.driver.is_ok() && self.devices.is_empty() {
            writeln!(f, "no CUDA device is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES")?;
        }
        Ok(())
    }
}
