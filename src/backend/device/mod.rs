//! The step on a device: everything that does not depend on who executes it.
//!
//! [`executor`] says what a device must be able to do, [`plan`] lays out tensors for the kernels, [`optimizer`] owns state
//! and launches steps, [`history`] is what the adaptive method remembers, [`status`] reads what steps did. [`abi`] are the structs of `kernels/abi.h`.

#[allow(
    missing_docs,
    dead_code,
    clippy::undocumented_unsafe_blocks,
    clippy::ptr_as_ptr,
    clippy::missing_safety_doc
)]
pub(crate) mod abi;
pub(crate) mod executor;
mod history;
mod input;
mod optimizer;
mod plan;
mod settings;
mod state;
mod status;

pub use executor::{Device, DeviceBuffer, Stream};
pub use input::{DeviceInput, DeviceLoss, DeviceTensor};
pub use optimizer::DeviceOptimizer;
pub use status::StatusReader;
