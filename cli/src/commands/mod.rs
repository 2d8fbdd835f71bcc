//! One file a subcommand.

pub mod fit;
pub mod plan;
pub mod step_size;
pub mod train;
