//! CUDA devices.
//!
//! The driver is opened when it is first asked for: building and starting need no CUDA, and what is missing is an error
//! that says so. All work runs in the device's primary context, the one of CUDA's runtime, which is bound for the time of a
//! call only; any thread may call.

pub use crate::backend::cuda::{DeviceReport, Report, device, device_of, report};
