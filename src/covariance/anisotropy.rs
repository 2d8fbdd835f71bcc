//! Geometric anisotropy with one length-scale factor per group of parameters.

/// The Σ-norm √(Σ_k f_k²·‖g_k‖²) of a gradient, from (f_k, ‖g_k‖²) of each group k (paper, section "Geometric
/// anisotropy/Adaptive step sizes").
///
/// The factor f_k multiplies the length scale of group k, so Σ is block diagonal with f_k⁻². The step's direction is
/// Σ⁻¹g, group by group f_k²·g_k; its length in the norm of Σ is this function's value, the norm to pass in
/// [`Observation::grad_norm`](super::Observation::grad_norm). Each group's parameters then move by
/// (η/‖·‖)·f_k²·g_k. Estimation has to measure the same norm, so that `grad_variance` belongs to it.
///
/// With mini-batch noise the exact direction is (−C'(0)Σ + N/b)⁻¹g, where N is the covariance of one example's gradient
/// noise. Where N is proportional to Σ that is Σ⁻¹g and the scalar correction of S-RFD is exact; otherwise it is an
/// approximation, and it is the one used here.
///
/// The sum runs in the order of the slice.
pub fn sigma_norm(parts: &[(f64, f64)]) -> f64 {
    parts.iter().map(|&(factor, sq_norm)| factor * factor * sq_norm).sum::<f64>().sqrt()
}
