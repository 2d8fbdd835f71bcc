//! The Matérn covariance with ν = 3/2.

use super::special::exp_tail;
use super::{Covariance, Profile, VANISHED};

/// √3, correctly rounded.
pub(crate) const SQRT_3: f64 = 1.732_050_807_568_877_2;

/// Matérn with ν = 3/2, C(h) = (1 + w)e⁻ʷ with w = √(6h) (paper, Eq. "matern model").
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matern32;

impl Covariance for Matern32 {
    fn name(&self) -> String {
        "matern:1.5".into()
    }

    fn c(&self, h: f64) -> f64 {
        let w = (6.0 * h).sqrt();
        (1.0 + w) * (-w).exp()
    }

    fn dc(&self, h: f64) -> f64 {
        -3.0 * (-(6.0 * h).sqrt()).exp()
    }

    /// Infinite at h = 0: the random function is differentiable once only.
    fn ddc(&self, h: f64) -> f64 {
        let w = (6.0 * h).sqrt();
        9.0 / w * (-w).exp()
    }

    /// Table "RFD step size": u = 1/(√3·(1 + √3·b/a)), written without the quotient.
    fn closed_form_step(&self, a: f64, b: f64) -> Option<f64> {
        Some(a / (SQRT_3 * a + 3.0 * b))
    }

    /// With w = √3·u: ρ = (1 + w)e⁻ʷ, κ = e⁻ʷ; with z = 2w: D = 1 − e⁻ᶻ(1 + z + z²/2), dD/dz = e⁻ᶻz²/2.
    fn profile(&self, u: f64) -> Profile {
        let w = (SQRT_3 * u).min(VANISHED);
        let z = 2.0 * w;
        let kappa = (-w).exp();
        Profile {
            rho: (1.0 + w) * kappa,
            drop: exp_tail(2, w),
            kappa,
            ukappa_slope: (1.0 - w) * kappa,
            unexplained: exp_tail(3, z),
            unexplained_slope: 2.0 * SQRT_3 * (z * z / 2.0) * (-z).exp(),
        }
    }
}
