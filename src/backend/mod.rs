//! Where the arithmetic over whole tensors runs.
//!
//! A backend does three things and knows nothing of covariances: it sums products over a list of tensors in the
//! fixed order of [`cpu::sum`], and applies a linear update with given scalars. Everything between the two is
//! scalar and lives in [`crate::optimizer`].

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(any(feature = "cuda", feature = "shim"))]
pub(crate) mod device;
#[cfg(feature = "shim")]
pub(crate) mod shim;
