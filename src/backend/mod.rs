//! Where the arithmetic over whole tensors runs.
//!
//! A backend does three things and knows nothing of covariances: it sums products over a list of tensors in the
//! fixed order of [`cpu::sum`], and applies a linear update with given scalars. Everything between the two is
//! scalar and lives in [`crate::optimizer`].

pub(crate) mod cpu;
