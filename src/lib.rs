//! Random Function Descent (RFD): an optimizer whose step sizes follow from the statistics of the cost.

#![warn(missing_docs)]

mod backend;
#[doc(hidden)]
pub mod capi;
pub mod covariance;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(any(feature = "cuda", feature = "shim"))]
pub mod device;
mod error;
pub mod estimation;
mod files;
mod moments;
pub mod optimizer;
mod tensor;

pub use error::{Error, Result};
pub use moments::Moments;
pub use tensor::{DType, GradRef, ParamMut};
