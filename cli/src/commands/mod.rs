//! One file a subcommand.

pub mod bench;
mod bench_cpu;
pub mod doctor;
pub mod fit;
pub mod plan;
pub mod shell;
pub mod step_size;
pub mod train;
