//! From samples to the numbers a covariance model is made of.
//!
//! Samples (loss, ‖g‖², batch size) at random initialisations → [`SampleStatistics`] → [`fit`] → [`Fit`],
//! whose [`moments`](Fit::moments) make a covariance model. Which batch sizes to sample: [`DesignProblem`].
//! Statistics are all that a fit needs, but not all that can go wrong with samples shows in them: a
//! [`SampleTable`] keeps the samples, [`SampleTable::fit`] also says which look foreign, and leaves them out
//! on request.
//! All of it in a loop around a function of yours that evaluates a mini-batch: [`AutoFit`]. Samples that also
//! say what each tensor of parameters adds to ‖g‖² determine a length scale for each: [`fit_tensors`].

mod auto_fit;
mod cache;
mod design;
mod diagnostics;
mod error;
mod findings;
mod fit;
mod least_squares;
mod sample_fit;
mod samples;
mod statistics;
mod tensors;

pub use auto_fit::{
    AutoFit, AutoFitted, BatchRequest, BatchSample, Cost, OnForeign, Progress, Sampler, SamplerError,
};
pub use design::{Design, DesignKind, DesignProblem};
pub use diagnostics::Diagnostics;
pub use error::EstimationError;
pub use findings::{Findings, ForeignSample, Quantity, ShiftedBatchSize, TwoPopulations};
pub use fit::{Fit, Unreliable, fit};
pub use sample_fit::{FitOptions, SampleFit};
pub use samples::{SampleTable, read_samples};
pub use statistics::{Sample, SampleStatistics};
pub use tensors::{TensorDims, TensorFit, TensorFits, TensorVariance, fit_tensors, tensor_variances};
