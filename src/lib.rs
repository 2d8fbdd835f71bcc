//! Random Function Descent (RFD): an optimizer whose step sizes follow from the statistics of the cost, with
//! no learning rate to tune (Benning and Döring, NeurIPS 2024).
//!
//! There are two methods:
//!
//! - *adaptive*, for all networks: [`optimizer::Adaptive`] takes from training itself what it has to know.
//! - *fitted*, RFD as published: [`estimation::AutoFit`] draws losses and gradient norms of your network at
//!   random initialisations and estimates the cost's mean and variances, the [`Moments`];
//!   [`covariance::Model`] makes a covariance model of them, which knows the step size for any loss and
//!   gradient norm; [`optimizer::Fitted`] steps by it.
//!
//! [`optimizer::Optimizer`] takes the steps of either on the CPU, [`optimizer::DeviceOptimizer`] on a CUDA
//! device, and [`optimizer::AnyOptimizer`] is one of the two, for programs that choose when they run.
//!
//! ```
//! use rfdescent::optimizer::{Adaptive, Optimizer, Options, StepInput, TensorSpec};
//! use rfdescent::{DType, GradRef, ParamMut};
//!
//! # fn main() -> rfdescent::Result<()> {
//! let specs = vec![TensorSpec::new("weight", &[3], DType::F32)];
//! let mut optimizer = Optimizer::new(Adaptive::default(), Options::default(), specs)?;
//! let (mut weight, gradient) = ([0.5_f32, -0.5, 1.0], [1.0_f32, 0.0, 2.0]);
//! optimizer.step(
//!     &mut [ParamMut::from(&mut weight[..])],
//!     &[GradRef::from(&gradient[..])],
//!     &StepInput::new(2.1),
//! )?;
//! # Ok(())
//! # }
//! ```
//!
//! Both methods are derived in `docs/method.md` and `docs/adaptive.md` in the repository, the arithmetic of a
//! step in `docs/summation.md`.

#![warn(missing_docs)]

mod backend;
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
mod rows;
#[doc(hidden)]
pub mod tables;
mod tensor;
mod threads;

pub use error::{Error, Result};
pub use moments::Moments;
pub use tensor::{DType, GradRef, ParamMut};
pub use threads::{instructions, set_threads, threads};

/// The README's examples, compiled and run with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
