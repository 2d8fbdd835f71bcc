//! Where the arithmetic over whole tensors runs.
//!
//! A backend sees slices, addresses and plain scalars, and knows nothing of methods and covariances. [`cpu`]
//! sums products over a list of tensors in a fixed order and applies a linear update with given scalars. A
//! device does both, with the decision between them, in its kernels: [`executor`] says what it has to be able
//! to do, [`abi`] are the structs that it shares with the host, [`kernels`] is the table of its kernels; both
//! are generated from `kernels/`. [`words`] turns the structs into what lies in memory.

#[allow(
    missing_docs,
    dead_code,
    clippy::undocumented_unsafe_blocks,
    clippy::ptr_as_ptr,
    clippy::missing_safety_doc
)]
pub(crate) mod abi;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
// Some of both is dead code in a build without devices.
#[cfg_attr(not(any(feature = "cuda", feature = "shim")), allow(dead_code))]
pub(crate) mod executor;
#[cfg_attr(not(any(feature = "cuda", feature = "shim")), allow(dead_code))]
pub(crate) mod kernels;
pub(crate) mod memory;
#[cfg(feature = "shim")]
pub(crate) mod shim;
pub(crate) mod words;
