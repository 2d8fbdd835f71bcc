//! The Matérn covariance with ν = 5/2.

use super::special::exp_tail;
use super::{Covariance, Profile, VANISHED};

/// √5, correctly rounded.
pub(crate) const SQRT_5: f64 = 2.236_067_977_499_79;

/// Matérn with ν = 5/2, C(h) = (1 + w + w²/3)e⁻ʷ with w = √(10h) (paper, Eq. "matern model").
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matern52;

impl Covariance for Matern52 {
    fn name(&self) -> String {
        "matern:2.5".into()
    }

    fn c(&self, h: f64) -> f64 {
        let w = (10.0 * h).sqrt();
        (1.0 + w + w * w / 3.0) * (-w).exp()
    }

    fn dc(&self, h: f64) -> f64 {
        let w = (10.0 * h).sqrt();
        -5.0 / 3.0 * (1.0 + w) * (-w).exp()
    }

    fn ddc(&self, h: f64) -> f64 {
        25.0 / 3.0 * (-(10.0 * h).sqrt()).exp()
    }

    /// Table "RFD step size" in w = √5·u, the positive root of (a + c)w² − (a − c)w − a with c = √5·b/3 (so
    /// that the paper's ζ is c/a), in whichever of its two forms adds numbers of equal sign.
    fn closed_form_step(&self, a: f64, b: f64) -> Option<f64> {
        let c = SQRT_5 * b / 3.0;
        let sum = a + c;
        let root = (4.0 * (a * a) + sum * sum).sqrt();
        let w = if a >= c { ((a - c) + root) / (2.0 * sum) } else { 2.0 * a / ((c - a) + root) };
        Some(w / SQRT_5)
    }

    /// With w = √5·u: ρ = (1 + w + w²/3)e⁻ʷ, κ = (1 + w)e⁻ʷ; with z = 2w: D = 1 − e⁻ᶻ(1 + z + z²/2 + z³/6 +
    /// z⁴/36), dD/dz = e⁻ᶻ(z³/18 + z⁴/36).
    fn profile(&self, u: f64) -> Profile {
        let w = (SQRT_5 * u).min(VANISHED);
        let z = 2.0 * w;
        let (exp_w, exp_z) = ((-w).exp(), (-z).exp());
        let z3 = z * z * z;
        Profile {
            rho: (1.0 + w + w * w / 3.0) * exp_w,
            drop: w * w / 6.0 * exp_w + exp_tail(3, w),
            kappa: (1.0 + w) * exp_w,
            ukappa_slope: (1.0 + w - w * w) * exp_w,
            unexplained: z3 * z / 72.0 * exp_z + exp_tail(5, z),
            unexplained_slope: 2.0 * SQRT_5 * (z3 / 18.0 + z3 * z / 36.0) * exp_z,
        }
    }
}
