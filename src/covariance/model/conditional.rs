//! What a model expects of the cost along the gradient, and how sure it is.

use super::Model;
use crate::covariance::{Observation, Profile, validate_inv_batch_size};
use crate::{Error, Result};

/// A function of the step size at one point: its value and its derivative.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValueAndSlope {
    /// The value.
    pub value: f64,
    /// The derivative with respect to the step size.
    pub slope: f64,
}

impl ValueAndSlope {
    fn finite(self, quantity: &str, step_size: f64) -> Result<Self> {
        if self.value.is_finite() && self.slope.is_finite() {
            return Ok(self);
        }
        let expected =
            format!("the {quantity} or its derivative there is beyond the range of f64; rescale the cost");
        Err(Error::invalid("step_size", step_size, expected))
    }
}

impl Model {
    /// E[J(x − η·g/‖g‖) | loss, gradient] of the cost J and its derivative in η, at the step size η ≥ 0
    /// (paper, Lemma "Explicit first order stochastic Taylor approximation" and the proof of Extension
    /// "S-RFD"): μ + q·(loss − μ)·ρ − p·η·‖g‖·κ with ρ = ρ(u²/2), κ = ρ'(u²/2)/ρ'(0), u = η/s.
    pub fn conditional_mean(&self, observation: &Observation, step_size: f64) -> Result<ValueAndSlope> {
        let &Observation { loss, grad_norm, inv_batch_size } = observation;
        validate_inv_batch_size(inv_batch_size)?;
        if !loss.is_finite() {
            return Err(Error::invalid("loss", loss, "must be finite"));
        }
        if !(grad_norm >= 0.0 && grad_norm.is_finite()) {
            return Err(Error::invalid("grad_norm", grad_norm, "must be finite and not negative"));
        }
        let (u, profile) = self.profile_at(step_size)?;
        let inner = &*self.inner;
        let shares = self.signal_shares(inv_batch_size);
        let deviation = shares.loss * (loss - inner.moments.mean);
        let gradient = shares.gradient * grad_norm;
        ValueAndSlope {
            value: inner.moments.mean + deviation * profile.rho - gradient * (step_size * profile.kappa),
            slope: -deviation * (inner.slope * u * profile.kappa / inner.length_scale)
                - gradient * profile.ukappa_slope,
        }
        .finite("conditional mean", step_size)
    }

    /// Var[J(x − η·g/‖g‖) | loss, gradient] of the cost J and its derivative in η, at the step size η ≥ 0
    /// (paper, Lemma "An γ-upper bound", with the noise of a mini-batch in loss and gradient): C(0)·(1 − q·ρ²
    /// − p·u²ρ'²/(−ρ'(0))).
    ///
    /// It does not depend on the values observed.
    pub fn conditional_variance(&self, inv_batch_size: f64, step_size: f64) -> Result<ValueAndSlope> {
        validate_inv_batch_size(inv_batch_size)?;
        let (u, profile) = self.profile_at(step_size)?;
        let inner = &*self.inner;
        let (value, slope) = self.noise(inv_batch_size).variance(&profile, u, inner.slope);
        ValueAndSlope {
            value: inner.moments.variance * value,
            slope: inner.moments.variance * (slope / inner.length_scale),
        }
        .finite("conditional variance", step_size)
    }

    fn profile_at(&self, step_size: f64) -> Result<(f64, Profile)> {
        // The square of the distance has to be representable.
        const FARTHEST: f64 = 1e150;
        let u = step_size / self.inner.length_scale;
        if !(0.0..=FARTHEST).contains(&u) {
            let expected = "must be at least 0 and at most 1e150 length scales";
            return Err(Error::invalid("step_size", step_size, expected));
        }
        Ok((u, self.inner.covariance.profile(u)))
    }
}
