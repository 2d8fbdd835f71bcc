//! Geometric anisotropy with one length-scale factor per group of parameters.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The Σ-norm √(Σ_k f_k²·‖g_k‖²) of a gradient, from (f_k, ‖g_k‖²) of each group k (paper, section "Geometric
/// anisotropy/Adaptive step sizes").
///
/// The factor f_k multiplies the length scale of group k, so Σ is block diagonal with f_k⁻². The step's
/// direction is Σ⁻¹g, group by group f_k²·g_k; its length in the norm of Σ is this function's value, the norm
/// to pass in [`Observation::grad_norm`](super::Observation::grad_norm). Each group's parameters then move by
/// (η/‖·‖)·f_k²·g_k. Estimation has to measure the same norm, so that `grad_variance` belongs to it.
///
/// With mini-batch noise the exact direction is (−C'(0)Σ + N/b)⁻¹g, where N is the covariance of one
/// example's gradient noise. Where N is proportional to Σ that is Σ⁻¹g and the scalar correction of S-RFD is
/// exact; otherwise it is an approximation, and it is the one used here.
///
/// The sum runs in the order of the slice.
pub fn sigma_norm(parts: &[(f64, f64)]) -> f64 {
    parts.iter().map(|&(factor, sq_norm)| factor * factor * sq_norm).sum::<f64>().sqrt()
}

/// A tensor of parameters with a length scale of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorFactor {
    /// Unique name of the tensor.
    pub name: String,
    /// The number of its elements; ≥ 1.
    pub dims: u64,
    /// f_k, which multiplies the length scale of the tensor; between 1e-150 and 1e150.
    pub length_scale_factor: f64,
}

/// An error that names the tensor that is listed twice, has no elements or a factor outside its domain; or
/// says that the sizes do not add up to `dims`.
pub(super) fn validate(tensors: &[TensorFactor], dims: u64) -> Result<()> {
    check_sizes(tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.dims)), dims)?;
    for TensorFactor { name, length_scale_factor: factor, .. } in tensors {
        if !is_factor(*factor) {
            let problem = format!("has length-scale factor {factor}: it must be between 1e-150 and 1e150");
            return Err(Error::tensor(name, problem));
        }
    }
    Ok(())
}

/// Whether the number can multiply a length scale: its square enters the norm.
pub(crate) fn is_factor(factor: f64) -> bool {
    factor > 0.0 && (factor * factor).is_normal()
}

/// Checks names and sizes of tensors, if there are any: each listed once, none empty, all together `dims`
/// elements.
pub(crate) fn check_sizes<'a>(tensors: impl Iterator<Item = (&'a str, u64)>, dims: u64) -> Result<()> {
    let (mut names, mut sum) = (HashSet::new(), 0u128);
    for (name, size) in tensors {
        if !names.insert(name) {
            return Err(Error::tensor(name, "is listed twice: give each tensor a name of its own"));
        }
        if size == 0 {
            return Err(Error::tensor(name, "has no elements: leave it out"));
        }
        sum += u128::from(size);
    }
    if !names.is_empty() && sum != u128::from(dims) {
        let expected = format!("must be the sum of the tensors' sizes, {sum}: list all tensors");
        return Err(Error::invalid("dims", dims, expected));
    }
    Ok(())
}
