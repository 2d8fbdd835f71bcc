//! Random Function Descent for programs that use CUDA through [cust](https://docs.rs/cust): an optimizer over
//! buffers and streams of cust.
//!
//! [`device`] finds the device of the current context, [`Optimizer`] takes steps on [`Tensor`]s, which borrow
//! their buffers; [`stream`] is for the library's own calls.
//!
//! # Contexts
//! The library works in the device's primary context, the one of CUDA's runtime. `cust::quick_init` and
//! `cust::context::Context::new` make that one current. Contexts of `cust::context::legacy` are others, whose
//! memory and streams it can't use; [`device`] refuses them. Keep the `Context` for as long as buffers and
//! streams: cust says so. The optimizer retains the primary context by itself, and leaves the current context
//! of every thread as it was.

mod context;
mod element;
mod input;
mod optimizer;
mod tensor;

pub use context::{device, stream};
pub use element::Element;
pub use input::{Input, Loss};
pub use optimizer::Optimizer;
pub use tensor::Tensor;

/// The README's examples, compiled with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
