//! Random Function Descent (RFD): an optimizer whose step sizes follow from the statistics of the cost.

#![warn(missing_docs)]

pub mod backend;
pub mod covariance;
mod error;
pub mod estimation;
mod moments;
pub mod optimizer;

pub use error::{Error, Result};
pub use moments::Moments;
