//! Gathers what a machine has for CUDA.

use super::driver::{initialise, version_text};
use super::{compute_capability, device, device_count, device_name, get_device};
use crate::cuda::{DeviceReport, Report};
use crate::error::Result;

/// What device code this build has.
pub const DEVICE_CODE: &str = if cfg!(rfd_fatbin) {
    "machine code from the build's nvcc, and PTX for everything from compute capability 7.0 on"
} else {
    "machine code for compute capability 8.0 to 9.0, and PTX for everything from 7.0 on"
};

/// As [`crate::cuda::report`].
pub fn report() -> Report {
    match initialise() {
        Ok(version) => Report { driver: Ok(version_text(version)), devices: devices().unwrap_or_default() },
        Err(error) => Report { driver: Err(error.to_string()), devices: Vec::new() },
    }
}

fn devices() -> Result<Vec<DeviceReport>> {
    (0..device_count()?)
        .map(|number| {
            let handle = get_device(number)?;
            let (major, minor) = compute_capability(handle)?;
            let ordinal = number as usize;
            Ok(DeviceReport {
                ordinal,
                title: format!("{}, compute capability {major}.{minor}", device_name(handle)?),
                usable: device(ordinal).map(|device| device.name()).map_err(|error| error.to_string()),
            })
        })
        .collect()
}
