//! The optimizer: decides how far to go, and lets a backend do it.
//!
//! A step is three things: the backend sums ‖g_k‖² of every tensor (with the adaptive method also the squared
//! norms of the averaged gradients), the [`Method`] turns sums and loss into a step size and each tensor's
//! scalars, the backend applies them. All or nothing: a skipped step changes no parameter, no velocity and no
//! count of applied steps.
//!
//! [`Core`] is what all optimizers have in common, [`Optimizer`] and [`DeviceOptimizer`] are what differs
//! with the place of the tensors, and [`AnyOptimizer`] is either, for front ends. What differs by method
//! stands in the folder `method/` alone.

mod any;
pub(crate) mod core;
mod decision;
pub(crate) mod device;
mod host;
pub(crate) mod method;
mod options;
mod part;
mod raw;
mod reader;
mod report;
mod spec;
mod state;
mod sums;

pub use any::AnyOptimizer;
pub use core::Core;
pub use device::DeviceOptimizer;
pub use host::Optimizer;
pub use method::*;
pub use options::{Group, Options};
pub use raw::{RawInput, RawNumber, RawTensor};
pub use reader::ReportReader;
pub use report::{Limit, Outcome, SkipReason, StepInput, StepReport};
pub use spec::{TensorSpec, Whole};
pub use sums::LocalSums;
