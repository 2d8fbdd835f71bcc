//! Random Function Descent for [tch](https://docs.rs/tch): an optimizer over a `VarStore` that needs no
//! learning rate.
//!
//! 1. [`NetworkSampler`] draws losses and gradient norms of a network at random initialisations;
//!    [`AutoFit`](rfdescent::estimation::AutoFit) fits the covariance model to them.
//! 2. [`Rfd`] makes an [`Optimizer`] of the model and the variables of a store, in the manner of tch's
//!    `nn::Sgd`. With [`Adaptive`] in place of the model it needs no samples.
//! 3. [`Optimizer::backward_step`] trains.
//!
//! Parameters are changed in place, on the CPU and on CUDA devices. A CUDA step is queued on libtorch's
//! current stream and never waits: the loss stays a tensor on the device.

mod auto_fit;
mod error;
mod input;
mod layout;
mod optimizer;
mod parameter;
mod rfd;
mod stream;

pub use auto_fit::NetworkSampler;
pub use error::{Error, Result};
pub use input::StepTensors;
pub use optimizer::Optimizer;
pub use rfd::Rfd;
pub use rfdescent::optimizer::{Adaptive, Fitted};

/// The README's examples, compiled and run with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
