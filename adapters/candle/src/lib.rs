//! Random Function Descent (RFD) for [candle](candle_core): an optimizer that needs no learning rate.
//!
//! 1. [`NetworkSampler`] evaluates a network at random initialisations, for
//!    [`AutoFit`](rfdescent::estimation::AutoFit) to estimate the cost's mean and variances from.
//! 2. [`Rfd`] implements [`candle_nn::Optimizer`]: existing loops that call `backward_step(&loss)` work.
//!    With [`Adaptive`] in place of a fitted model it needs no samples.
//! 3. [`StepOp`] is a single step on one tensor as a candle operation.
//!
//! Variables may be f32, f64, f16 or bf16 in any mixture, on the CPU or, with the feature `cuda`, on a CUDA
//! device. Errors are candle's, with the library's words.

#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod error;
mod host;
#[cfg(not(feature = "cuda"))]
mod no_cuda;
mod op;
mod optimizer;
mod parameter;
mod sampler;
mod seeded_vars;
mod storage;
mod variables;

pub use op::StepOp;
pub use optimizer::{Config, Rfd};
pub use parameter::{Parameter, parameters};
pub use rfdescent;
pub use rfdescent::optimizer::{Adaptive, Fitted};
pub use sampler::NetworkSampler;
pub use seeded_vars::SeededVars;

/// The README's examples, compiled with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
