//! Random Function Descent (RFD): an optimizer whose step sizes follow from the statistics of the cost, with no learning rate
//! to tune (Benning and Döring, NeurIPS 2024).
//!
//! 1. [`estimation::AutoFit`] draws losses and gradient norms of your network at random initialisations and estimates the
//!    cost's mean and variances, the [`Moments`].
//! 2. [`covariance::Model`] makes a covariance model of them, which knows the step size for any loss and gradient norm.
//! 3. [`optimizer::Optimizer`] takes the steps on the CPU, `optimizer::DeviceOptimizer` on a CUDA device; each has an example.
//!
//! The method in two pages is `docs/method.md` in the repository, the arithmetic of a step `docs/summation.md`.

#![warn(missing_docs)]

mod backend;
#[doc(hidden)]
pub mod capi;
pub mod covariance;
pub mod cuda;
pub mod device;
mod error;
pub mod estimation;
#[doc(hidden)]
pub mod files;
mod moments;
mod numeric;
pub mod optimizer;
mod tensor;

pub use error::{Error, Result};
pub use moments::Moments;
pub use tensor::{DType, GradRef, ParamMut};

/// The README's examples, compiled and run with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
