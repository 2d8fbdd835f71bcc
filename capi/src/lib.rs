//! The C ABI over the Rust library's public interface: `include/rfdescent.h` is made from these files.
//!
//! One file per handle. Every function body runs in `status::guard`, which turns errors and panics into a
//! status and a message; `pointers` checks what C passes. Outputs are written last, so only on success. Paths
//! between the files are relative, as `fuzz/` compiles them as a module of its own.
#![allow(non_camel_case_types)] // the names that C sees
#![allow(clippy::missing_safety_doc)] // their comments are the header's, which says what pointers may point to

mod abi_version;
mod auto_fit;
mod buffer;
mod design;
mod fit;
mod model;
mod optimizer;
mod pointers;
mod statistics;
mod status;
mod threads;

pub use abi_version::RFD_ABI_VERSION;
pub use auto_fit::*;
pub use buffer::*;
pub use design::*;
pub use fit::*;
pub use model::*;
pub use optimizer::*;
pub use statistics::*;
pub use status::*;
pub use threads::*;
