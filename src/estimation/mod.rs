//! From samples to the numbers a covariance model is made of.

/// Why samples do not determine a covariance.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EstimationError {}
