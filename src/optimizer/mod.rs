//! The optimizer: joins a fitted covariance model with a backend.
//!
//! A step is three things: the backend sums ‖g_k‖² of every tensor, `decision` turns norms and loss into a step
//! size and each tensor's scalars, the backend applies them. All or nothing: a skipped step changes no parameter, no
//! velocity and no count of applied steps.

pub(crate) mod adaptive;
mod decision;
pub(crate) mod device;
mod host;
mod method;
mod options;
mod report;
mod spec;
pub(crate) mod state_file;

use std::collections::HashSet;

pub use device::{DeviceInput, DeviceLoss, DeviceOptimizer, DeviceTensor};
pub use host::Optimizer;
pub use method::{Adaptive, Anisotropy, Method};
pub use options::{Group, Options};
pub use report::{Outcome, SkipReason, StepInput, StepReport};
pub use spec::TensorSpec;

use crate::error::{Error, Result};

/// Squared norms of a part of all gradients, for training that is sharded over machines: add those of all ranks, then
/// give the sum to [`Optimizer::step_with_norm`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SquaredNorm {
    /// Σ ‖g_k‖² over the tensors that count, gradient scale not removed.
    pub euclidean: f64,
    /// Σ f²‖g_k‖² over the same tensors.
    pub sigma: f64,
}

/// Checks options and tensors before an optimizer is made of them; the lengths of the tensors.
pub(crate) fn validate(options: &Options, specs: &[TensorSpec]) -> Result<Vec<usize>> {
    options.validate()?;
    let mut names = HashSet::new();
    specs
        .iter()
        .map(|spec| {
            if !names.insert(&spec.name) {
                return Err(Error::tensor(
                    &spec.name,
                    "is listed twice; give each tensor once, by a name of its own",
                ));
            }
            if spec.group >= options.groups.len() {
                let problem =
                    format!("belongs to group {}, but there are {} groups", spec.group, options.groups.len());
                return Err(Error::tensor(&spec.name, problem));
            }
            let len = spec.len()?;
            if spec.offset.checked_add(len as u64).is_none() {
                return Err(Error::tensor(
                    &spec.name,
                    format!("ends beyond 2^64 elements, at offset {}", spec.offset),
                ));
            }
            Ok(len)
        })
        .collect()
}

/// An error if a group has norm lock, in sharded training.
pub(crate) fn refuse_norm_lock(options: &Options) -> Result<()> {
    if options.groups.iter().any(|group| group.norm_lock) {
        let expected =
            "a shard does not know the norm of the whole tensor; use `step`, or switch norm lock off";
        return Err(Error::invalid("norm_lock", true, expected));
    }
    Ok(())
}
