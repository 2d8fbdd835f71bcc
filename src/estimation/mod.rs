//! From samples to the numbers a covariance model is made of.
//!
//! Samples (loss, ‖g‖², batch size) at random initialisations → [`SampleStatistics`] → [`fit`] → [`Fit`],
//! whose [`moments`](Fit::moments) make a covariance model. Which batch sizes to sample: [`DesignProblem`].
//! All of it in a loop around a function of yours that evaluates a mini-batch: [`AutoFit`]. Samples that also
//! say what each tensor of parameters adds to ‖g‖² determine a length scale for each: [`fit_tensors`].

mod auto_fit;
mod cache;
mod design;
mod diagnostics;
mod error;
mod fit;
mod least_squares;
mod samples;
mod statistics;
mod tensors;

pub use auto_fit::{AutoFit, AutoFitted, BatchRequest, BatchSample, Progress, Sampler, SamplerError};
pub use design::{Design, DesignKind, DesignProblem};
pub use diagnostics::Diagnostics;
pub use error::EstimationError;
pub use fit::{Fit, Unreliable, fit};
pub use samples::{SampleTable, read_samples};
pub use statistics::{Sample, SampleStatistics};
pub use tensors::{TensorDims, TensorFit, TensorFits, TensorVariance, fit_tensors, tensor_variances};
