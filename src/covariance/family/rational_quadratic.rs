//! The rational quadratic covariance.

use super::special::ln_1p_minus;
use super::{Covariance, Profile};
use crate::{Error, Result};

/// Newton iterations for the step size's root. From the quadratic's root, four reach rounding for every β and
/// every ratio of gradient to cost; three leave up to 8e-10 (tests/covariance_reference.rs measures it). The
/// fifth is reserve.
pub(crate) const NEWTON_ITERATIONS: usize = 5;

/// Rational quadratic, C(h) = (1 + 2h/β)^(−β/2) with β > 0 (paper, Eq. "rational quadratic").
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RationalQuadratic {
    beta: f64,
}

impl RationalQuadratic {
    /// A model with the given β; an error unless it is positive and finite.
    pub fn new(beta: f64) -> Result<Self> {
        // Below the smallest normal number 1/β overflows.
        if beta.is_normal() && beta > 0.0 {
            Ok(RationalQuadratic { beta })
        } else {
            Err(Error::invalid(
                "beta",
                beta,
                "the rational quadratic's β must be a positive, finite number, e.g. 1",
            ))
        }
    }

    /// β, the weight of the tails: the smaller, the heavier.
    pub fn beta(&self) -> f64 {
        self.beta
    }
}

impl Covariance for RationalQuadratic {
    fn name(&self) -> String {
        format!("rational_quadratic:{}", self.beta)
    }

    fn c(&self, h: f64) -> f64 {
        (-self.beta / 2.0 * (2.0 * h / self.beta).ln_1p()).exp()
    }

    fn dc(&self, h: f64) -> f64 {
        -((-self.beta / 2.0 - 1.0) * (2.0 * h / self.beta).ln_1p()).exp()
    }

    fn ddc(&self, h: f64) -> f64 {
        (1.0 + 2.0 / self.beta) * ((-self.beta / 2.0 - 2.0) * (2.0 * h / self.beta).ln_1p()).exp()
    }

    /// Table "RFD step size": the unique positive root of −a + b·u + a·(1 + 1/β)·u² + b·u³/β.
    ///
    /// In y = u/α with α = min(1, √β) all coefficients stay in range for every β. The polynomial increases
    /// and is convex, and without its cubic term its root lies to the right, so that Newton's iteration
    /// descends to the root. The number of iterations is fixed and each is plain IEEE arithmetic, so the
    /// result is the same bits anywhere.
    fn closed_form_step(&self, a: f64, b: f64) -> Option<f64> {
        let (alpha, square, cube) = if self.beta <= 1.0 {
            (self.beta.sqrt(), 1.0 + self.beta, 1.0)
        } else {
            (1.0, 1.0 + 1.0 / self.beta, 1.0 / self.beta)
        };
        let linear = b * alpha;
        let largest = if a >= linear { a } else { linear };
        let (a, linear) = (a / largest, linear / largest);
        let (square, cube) = (a * square, linear * cube);
        let mut y = 2.0 * a / (linear + (linear * linear + 4.0 * (a * square)).sqrt());
        for _ in 0..NEWTON_ITERATIONS {
            let value = ((cube * y + square) * y + linear) * y - a;
            let slope = (3.0 * cube * y + 2.0 * square) * y + linear;
            y -= value / slope;
        }
        Some(alpha * y)
    }

    /// With τ = u²/β: ρ = (1 + τ)^(−β/2), κ = (1 + τ)^(−β/2−1), D = 1 − (1 + τ)^(−β)(1 + βτ/(1 + τ)²),
    /// dD/dτ = β(1 + τ)^(−β−3)·τ(3 + β + τ).
    fn profile(&self, u: f64) -> Profile {
        let beta = self.beta;
        let tau = u * u / beta;
        let log = tau.ln_1p();
        let rho = (-beta / 2.0 * log).exp();
        let kappa = rho / (1.0 + tau);
        let relative = tau / (1.0 + tau);
        let bend = beta * (relative / (1.0 + tau));
        // ln(1 − D); for small τ its terms of order τ cancel, so they are taken out by hand.
        let log_explained = if tau < 0.5 {
            -beta * ln_1p_minus(tau) + ln_1p_minus(bend) - beta * tau * relative * ((2.0 + tau) / (1.0 + tau))
        } else {
            -beta * log + bend.ln_1p()
        };
        Profile {
            rho,
            drop: -(-beta / 2.0 * log).exp_m1(),
            kappa,
            ukappa_slope: kappa * ((1.0 - u * u * (1.0 + 1.0 / beta)) / (1.0 + tau)),
            unexplained: -log_explained.exp_m1(),
            // dτ/du = 2u/β cancels the β in front.
            unexplained_slope: 2.0 * u * (kappa * kappa) * relative * (3.0 + beta + tau),
        }
    }
}
