//! What a covariance model is made of: five numbers that estimation finds, and the number of parameters.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Mean and variances of the random cost and of its mini-batch noise, as estimated at random initialisations.
///
/// A mini-batch loss of batch size b has variance `variance + noise_variance / b`, its squared gradient norm
/// has expectation `grad_variance + noise_grad_variance / b` (paper, Eq. "variance of mini batch" and the
/// remark on partial derivatives in section "Variance estimation").
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moments {
    /// μ, the mean of the cost.
    pub mean: f64,
    /// C(0), the variance of the cost; > 0.
    pub variance: f64,
    /// C_ε(0), the variance of one example's loss around the cost; ≥ 0 and at most 1e100 times `variance`.
    pub noise_variance: f64,
    /// −d·C'(0), the expected squared norm of the cost's gradient; > 0.
    pub grad_variance: f64,
    /// −d·C'_ε(0), the expected squared norm of one example's gradient noise; ≥ 0 and at most 1e100 times
    /// `grad_variance`.
    pub noise_grad_variance: f64,
    /// d, the number of parameters; ≥ 1.
    pub dims: u64,
}

impl Moments {
    /// An error that names the first moment outside its domain and says what to do.
    pub fn validate(&self) -> Result<()> {
        let check = |holds: bool, name: &str, value: f64, expected: &str| {
            if holds { Ok(()) } else { Err(Error::invalid(name, value, expected)) }
        };
        let positive = |value: f64| value > 0.0 && value.is_finite();
        let not_negative = |value: f64| value >= 0.0 && value.is_finite();
        check(self.mean.is_finite(), "mean", self.mean, "must be finite; check the sampled losses")?;
        check(
            positive(self.variance),
            "variance",
            self.variance,
            "must be positive and finite; draw more samples, at larger batch sizes, and fit again",
        )?;
        check(
            not_negative(self.noise_variance),
            "noise_variance",
            self.noise_variance,
            "must be finite and at least 0; draw more samples, at smaller batch sizes, and fit again",
        )?;
        check(
            positive(self.grad_variance),
            "grad_variance",
            self.grad_variance,
            "must be positive and finite; draw more samples, at larger batch sizes, and fit again",
        )?;
        check(
            not_negative(self.noise_grad_variance),
            "noise_grad_variance",
            self.noise_grad_variance,
            "must be finite and at least 0; draw more samples, at smaller batch sizes, and fit again",
        )?;
        let sums = "the cost's and the noise's variances must add up to a finite number; rescale the cost";
        check(
            (self.variance + self.noise_variance).is_finite(),
            "noise_variance",
            self.noise_variance,
            sums,
        )?;
        check(
            (self.grad_variance + self.noise_grad_variance).is_finite(),
            "noise_grad_variance",
            self.noise_grad_variance,
            sums,
        )?;
        // Beyond, a mini-batch says nothing about the cost, and products with such shares underflow.
        const SMALLEST_SHARE: f64 = 1e-100;
        let share = |signal: f64, noise: f64| signal / (signal + noise) >= SMALLEST_SHARE;
        check(
            share(self.variance, self.noise_variance),
            "noise_variance",
            self.noise_variance,
            "must not exceed 1e100 times `variance`; draw more samples, at larger batch sizes, and fit again",
        )?;
        check(
            share(self.grad_variance, self.noise_grad_variance),
            "noise_grad_variance",
            self.noise_grad_variance,
            "must not exceed 1e100 times `grad_variance`; draw more samples, at larger batch sizes, and fit again",
        )?;
        check(self.dims >= 1, "dims", self.dims as f64, "must be at least 1: the number of parameters")
    }
}
