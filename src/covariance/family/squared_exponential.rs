//! The squared exponential covariance.

use super::special::exp_tail;
use super::{Covariance, Profile, VANISHED};

/// Squared exponential, C(h) = e⁻ʰ (paper, Eq. "sqExp covariance model"), the limit of
/// [`super::RationalQuadratic`] for β → ∞ and of the Matérn models for ν → ∞.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SquaredExponential;

impl Covariance for SquaredExponential {
    fn name(&self) -> String {
        "squared_exponential".into()
    }

    fn c(&self, h: f64) -> f64 {
        (-h).exp()
    }

    fn dc(&self, h: f64) -> f64 {
        -(-h).exp()
    }

    fn ddc(&self, h: f64) -> f64 {
        (-h).exp()
    }

    /// The paper's stable form, Table "RFD step size": u = x/(√(1/4 + x²) + 1/2) with x = a/b.
    fn closed_form_step(&self, a: f64, b: f64) -> Option<f64> {
        Some(if a >= b {
            let r = b / a;
            1.0 / ((r * r / 4.0 + 1.0).sqrt() + r / 2.0)
        } else {
            let x = a / b;
            x / ((0.25 + x * x).sqrt() + 0.5)
        })
    }

    /// With t = u²: ρ = κ = e^(−t/2) and D = e⁻ᵗ(eᵗ − 1 − t), D' = 2u³e⁻ᵗ.
    fn profile(&self, u: f64) -> Profile {
        let t = (u * u).min(VANISHED);
        let rho = (-t / 2.0).exp();
        Profile {
            rho,
            drop: -(-t / 2.0).exp_m1(),
            kappa: rho,
            ukappa_slope: (1.0 - t) * rho,
            unexplained: exp_tail(2, t),
            unexplained_slope: 2.0 * t.sqrt() * t * (-t).exp(),
        }
    }
}
