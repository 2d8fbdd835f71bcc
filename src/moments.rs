//! The six numbers that estimation produces and a covariance model is made of.

use serde::{Deserialize, Serialize};

/// Mean and variances of the random cost and of its mini-batch noise, as estimated at random initialisations.
///
/// A mini-batch loss of batch size b has variance `variance + noise_variance / b`, its squared gradient norm has
/// expectation `grad_variance + noise_grad_variance / b` (paper, Eq. "variance of mini batch" and the remark on
/// partial derivatives in section "Variance estimation").
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moments {
    /// μ, the mean of the cost.
    pub mean: f64,
    /// C(0), the variance of the cost; > 0.
    pub variance: f64,
    /// C_ε(0), the variance of one example's loss around the cost; ≥ 0.
    pub noise_variance: f64,
    /// −d·C'(0), the expected squared norm of the cost's gradient; > 0.
    pub grad_variance: f64,
    /// −d·C'_ε(0), the expected squared norm of one example's gradient noise; ≥ 0.
    pub noise_grad_variance: f64,
    /// d, the number of parameters; ≥ 1.
    pub dims: u64,
}
