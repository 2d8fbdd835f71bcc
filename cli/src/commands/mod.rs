//! One file a subcommand.

pub mod step_size;
pub mod train;
