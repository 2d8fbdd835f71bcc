//! What a machine has for CUDA, for people.

use std::fmt;

use super::driver::{initialise, version_text};
use super::{compute_capability, device, device_count, device_name, get_device};
use crate::error::Result;

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

/// Looks for the driver and opens every device once. Never fails: what is missing is part of the report.
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

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.driver {
            Ok(version) => writeln!(f, "CUDA driver: for CUDA {version}")?,
            Err(problem) => writeln!(f, "CUDA driver: not usable. {problem}")?,
        }
        let code = if cfg!(rfd_fatbin) {
            "machine code from the build's nvcc, and PTX for everything from compute capability 7.0 on"
        } else {
            "PTX for everything from compute capability 7.0 on (the build found no nvcc)"
        };
        writeln!(f, "device code in this library: {code}")?;
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
