//! The step size for an observation: closed forms where there are any, else a search.

use statrs::function::erf::erf_inv;

use super::{Model, is_step};
use crate::covariance::search::{Noise, Objective};
use crate::covariance::{NoStep, Observation, Step, StepMode, StepRule, validate_inv_batch_size};

/// Forces out of range are scaled by 2 to this, or to minus this.
pub(crate) const FORCE_EXPONENT: u64 = 512;

/// Both forces below are out of range: what follows would round them to 0.
pub(crate) const SMALL_FORCE: f64 = 1e-150;

/// What pulls a step forward and back.
struct Forces {
    /// s·p·‖g‖, times `scale`.
    a: f64,
    /// q·(μ − loss), times `scale`.
    b: f64,
    /// A power of two.
    scale: f64,
    /// a/(s·b).
    theta: f64,
}

impl Model {
    /// The step size for an observation.
    ///
    /// With a = s·p·‖g‖ and b = q·(μ − loss), where p and q are the signal shares of gradient and loss
    /// (paper, Extension "S-RFD"), it is s times the u that minimises −b·ρ(u²/2) − a·u·ρ'(u²/2)/ρ'(0). For
    /// loss ≥ μ it is the step at loss = μ: [`plateau_step_size`](Self::plateau_step_size) in every mode,
    /// less with conservatism. Beyond, the minimiser would grow past the plateau.
    ///
    /// Without conservatism and with a built-in covariance the step size is computed by additions,
    /// multiplications, divisions and square roots only, so it has the same bits on every machine.
    /// Conservative steps use exponentials and the normal quantile and have not.
    pub fn step(&self, observation: &Observation, rule: &StepRule) -> std::result::Result<Step, NoStep> {
        let &Observation { loss, grad_norm, inv_batch_size } = observation;
        if rule.validate().is_err() || validate_inv_batch_size(inv_batch_size).is_err() {
            return Err(NoStep::InvalidArgument);
        }
        if !loss.is_finite() {
            return Err(NoStep::NonFiniteLoss);
        }
        if !(grad_norm >= 0.0 && grad_norm.is_finite()) {
            return Err(NoStep::NonFiniteGradient);
        }
        if grad_norm == 0.0 {
            return Err(NoStep::ZeroGradient);
        }
        let inner = &*self.inner;
        // Above μ the step is the one at μ: the formulas, made for losses below, would go on beyond it.
        let loss = loss.min(inner.moments.mean);
        if loss == inner.moments.mean && rule.conservatism == 0.0 {
            return Ok(Step { step_size: self.plateau_step_size(), theta: f64::INFINITY });
        }
        let forces = self.forces(loss, grad_norm, inv_batch_size);
        let u = match rule.mode {
            StepMode::Rfd if rule.conservatism > 0.0 => {
                self.conservative(&forces, rule.conservatism, inv_batch_size)
            }
            StepMode::Rfd => self.risk_neutral(forces.a, forces.b),
            StepMode::ARfd => forces.a / forces.b / inner.slope,
            StepMode::ClippedARfd => (forces.a / forces.b / inner.slope).min(inner.plateau),
        };
        Ok(Step { step_size: (inner.length_scale * u).min(f64::MAX), theta: forces.theta })
    }

    /// a and b for loss < μ, scaled by a power of two where they would leave the range of f64.
    fn forces(&self, loss: f64, grad_norm: f64, inv_batch_size: f64) -> Forces {
        // Powers of two, so that scaling by them is exact.
        const QUARTER: f64 = 0.25;
        const UP: f64 = f64::from_bits((1023 + FORCE_EXPONENT) << 52);
        const DOWN: f64 = f64::from_bits((1023 - FORCE_EXPONENT) << 52);
        let mean = self.inner.moments.mean;
        let shares = self.signal_shares(inv_batch_size);
        let at = |grad_norm: f64, gap: f64| {
            (self.inner.length_scale * (shares.gradient * grad_norm), shares.loss * gap)
        };
        let (mut scale, mut grad_norm, mut gap) = (1.0, grad_norm, mean - loss);
        if gap.is_infinite() {
            (scale, grad_norm, gap) = (QUARTER, grad_norm * QUARTER, mean * QUARTER - loss * QUARTER);
        }
        let mut theta = (shares.gradient * grad_norm) / (shares.loss * gap);
        if theta.is_nan() {
            // 0/0: both products underflowed. The shares are at least 1e-100, so scaled up neither does.
            theta = (shares.gradient * (grad_norm * UP)) / (shares.loss * (gap * UP));
        }
        let (mut a, mut b) = at(grad_norm, gap);
        if a.is_infinite() || (a < SMALL_FORCE && b < SMALL_FORCE) {
            let factor = if a.is_infinite() { DOWN } else { UP };
            scale *= factor;
            (a, b) = at(grad_norm * factor, gap * factor);
        }
        Forces { a, b, scale, theta }
    }

    /// The minimiser without conservatism, in length scales.
    fn risk_neutral(&self, a: f64, b: f64) -> f64 {
        let inner = &*self.inner;
        let largest = if a >= b { a } else { b };
        let (a, b) = (a / largest, b / largest);
        let u = match inner.covariance.closed_form_step(a, b) {
            Some(u) if is_step(u) => u,
            _ => {
                let noise = Noise { loss: 0.0, gradient: 0.0 };
                Objective { covariance: &*inner.covariance, a, b, z: 0.0, noise }.minimise(inner.plateau)
            }
        };
        // Rounding must not lift a step over the plateau.
        if u <= inner.plateau { u } else { inner.plateau }
    }

    /// The minimiser of the upper confidence bound, in length scales.
    fn conservative(&self, forces: &Forces, conservatism: f64, inv_batch_size: f64) -> f64 {
        let inner = &*self.inner;
        let z = quantile(conservatism) * (inner.moments.variance.sqrt() * forces.scale);
        let largest = forces.a.max(forces.b).max(z);
        Objective {
            covariance: &*inner.covariance,
            a: forces.a / largest,
            b: forces.b / largest,
            z: z / largest,
            noise: self.noise(inv_batch_size),
        }
        .minimise(inner.plateau)
    }
}

/// Φ⁻¹((1 + c)/2), without rounding (1 + c)/2.
pub(crate) fn quantile(conservatism: f64) -> f64 {
    std::f64::consts::SQRT_2 * erf_inv(conservatism)
}
