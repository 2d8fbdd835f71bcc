//! Devices that tensors can live on, and which one to use.
//!
//! A [`Device`] comes from [`cuda::device`](crate::cuda::device) or
//! [`cuda::device_of`](crate::cuda::device_of); [`DeviceOptimizer`](crate::optimizer::DeviceOptimizer) takes
//! steps on it.

use std::fmt;

pub use crate::backend::executor::{Device, DeviceBuffer, Stream};
#[cfg(feature = "shim")]
#[doc(hidden)]
pub use crate::backend::shim::{Counts, Shim, ShimOptions};

/// Where steps can run.
#[derive(Clone, Debug)]
pub enum Target {
    /// On the processor: [`Optimizer`](crate::optimizer::Optimizer).
    Cpu,
    /// On a device: [`DeviceOptimizer`](crate::optimizer::DeviceOptimizer).
    Device(Device),
}

/// A target that was chosen, and why. As text it says both.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The target.
    pub target: Target,
    /// Why it and no other.
    pub reason: String,
}

impl Target {
    /// The first CUDA device if there is one that can be used, else the CPU, with the reason. Never fails.
    pub fn auto() -> Choice {
        match crate::cuda::device(0) {
            Ok(device) => {
                let reason = "the first CUDA device is usable".into();
                Choice { target: Target::Device(device), reason }
            }
            Err(error) => Choice { target: Target::Cpu, reason: error.to_string() },
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.target {
            Target::Cpu => write!(f, "CPU: {}", self.reason),
            Target::Device(device) => write!(f, "{}: {}", device.name(), self.reason),
        }
    }
}
