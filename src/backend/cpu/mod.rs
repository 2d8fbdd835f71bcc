//! The CPU backend: threads over pieces of tensors, results independent of their number.
//!
//! [`sum`] holds the order of summation, [`reduce`] applies it to lists of tensors, [`rows`] to those whose
//! rows have variances, [`update`] changes parameters, [`accumulate`] adds gradients up, [`element`] reads
//! and writes number formats, [`rounding`] draws the bits of stochastic rounding, [`simd`] is what vector
//! instructions need, [`threads`] where they run.

mod accumulate;
mod element;
mod float_env;
mod reduce;
mod rounding;
mod rows;
mod simd;
mod sum;
mod threads;
mod update;

pub(crate) use accumulate::GradSum;
pub(crate) use element::to_f32;
pub(crate) use float_env::FloatEnvironment;
pub(crate) use reduce::{LockSums, SquaredNorms, Sums, lock_sums, plain_squares};
pub(crate) use rounding::StochasticBits;
pub(crate) use rows::{Averages, ColumnVariance, Moving, Norms, RowVariance, Weights, averaged};
pub(crate) use simd::instructions;
pub(crate) use threads::{Lease as Threads, count as threads, set_count as set_threads};
pub(crate) use update::{TensorUpdate, UpdateScalars, Velocity, update};

/// Elements in one parallel task: 16 chunks, enough work to hide the scheduler, few enough to balance a small
/// model.
const TASK: usize = 16 * sum::CHUNK;

/// Below this many elements in the whole list one thread is faster than waking the others.
const SERIAL_BELOW: usize = 2 * TASK;

/// Whether there is so much to do that other threads are worth while.
fn is_large(elements: usize) -> bool {
    elements >= SERIAL_BELOW
}
