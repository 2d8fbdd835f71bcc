//! A fitted covariance model: the step sizes and the conditional moments that follow from it.

use std::sync::Arc;

use statrs::function::erf::erf_inv;

use super::search::{self, Noise, Objective};
use super::{
    Covariance, Family, NoStep, Observation, Profile, Step, StepMode, StepRule, TensorFactor, anisotropy,
    validate_inv_batch_size,
};
use crate::{Error, Moments, Result};

/// A covariance with the mean, variances and length scale that were estimated for it. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Model {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    family: Option<Family>,
    covariance: Arc<dyn Covariance>,
    moments: Moments,
    length_scale: f64,
    /// −ρ'(0).
    slope: f64,
    /// The step at loss = μ, in length scales.
    plateau: f64,
    tensors: Vec<TensorFactor>,
}

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

/// The signal shares of a mini-batch's loss and gradient.
struct SignalShares {
    /// C(0)/(C(0) + C_ε(0)/b).
    loss: f64,
    /// C'(0)/(C'(0) + C'_ε(0)/b).
    gradient: f64,
}

impl Model {
    /// A model with a built-in covariance.
    ///
    /// The length scale s follows from the moments: s² = C(0)·(−ρ'(0))·d/grad_variance, where ρ is the
    /// correlation in units of s. An error names the moment that is out of its domain.
    pub fn new(family: Family, moments: Moments) -> Result<Model> {
        Self::build(Some(family), family.covariance()?, moments)
    }

    /// A model with any covariance. It can do all that a built-in one can, but not be saved.
    ///
    /// An error says which of C(0), C'(0) or the moments is out of its domain, that C decreases too slowly
    /// for a step at loss = μ to exist, or that [`closed_form_step`](Covariance::closed_form_step) is not
    /// finite or negative at one of the points tried.
    pub fn with_covariance(covariance: Arc<dyn Covariance>, moments: Moments) -> Result<Model> {
        Self::build(None, covariance, moments)
    }

    fn build(family: Option<Family>, covariance: Arc<dyn Covariance>, moments: Moments) -> Result<Model> {
        moments.validate()?;
        let name = covariance.name();
        let (c0, dc0, slope) = (covariance.c(0.0), covariance.dc(0.0), covariance.slope());
        if !(c0 > 0.0 && c0.is_finite()) {
            return Err(Error::invalid(
                &format!("C(0) of covariance `{name}`"),
                c0,
                "must be positive and finite",
            ));
        }
        if !(dc0 < 0.0 && dc0.is_finite()) {
            let expected = "must be negative and finite; without it the gradient has no variance";
            return Err(Error::invalid(&format!("C'(0) of covariance `{name}`"), dc0, expected));
        }
        if !(slope > 0.0 && slope.is_normal()) {
            let expected = "must be positive and representable; change the unit of h";
            return Err(Error::invalid(&format!("-C'(0)/C(0) of covariance `{name}`"), slope, expected));
        }
        let square = moments.variance * slope / moments.grad_variance * moments.dims as f64;
        if !square.is_normal() {
            let expected =
                "the length scale is the root of this and must be representable; check the moments";
            return Err(Error::invalid("dims * variance / grad_variance", square, expected));
        }
        check_closed_form(&*covariance)?;
        let plateau = covariance.closed_form_step(1.0, 0.0).or_else(|| search::plateau(&*covariance));
        let Some(plateau) = plateau else {
            let expected = "has no step at loss = mean: its derivative decreases too slowly or is not finite";
            return Err(Error::invalid("covariance", name, expected));
        };
        let length_scale = square.sqrt();
        let inner = Inner { family, covariance, moments, length_scale, slope, plateau, tensors: Vec::new() };
        Ok(Model { inner: Arc::new(inner) })
    }

    /// The same model in a geometry where each tensor of parameters has a length scale of its own (paper,
    /// section "Geometric anisotropy/Adaptive step sizes"). The moments have to belong to that geometry, as
    /// those of [`TensorFits::moments`](crate::estimation::TensorFits::moments) do; step sizes and norms are
    /// then those of [`sigma_norm`](super::sigma_norm).
    ///
    /// The model only carries the factors, also through files; an optimizer gets them by
    /// [`Options::per_tensor`](crate::optimizer::Options::per_tensor).
    ///
    /// # Errors
    /// [`Error::Tensor`] names a tensor that is listed twice, has no elements or a factor outside its domain;
    /// [`Error::InvalidArgument`] when the sizes do not add up to d.
    pub fn with_tensors(self, tensors: Vec<TensorFactor>) -> Result<Model> {
        anisotropy::validate(&tensors, self.moments().dims)?;
        let inner = &*self.inner;
        let (family, covariance, moments) = (inner.family, inner.covariance.clone(), inner.moments);
        let Inner { length_scale, slope, plateau, .. } = *inner;
        let inner = Inner { family, covariance, moments, length_scale, slope, plateau, tensors };
        Ok(Model { inner: Arc::new(inner) })
    }

    /// The tensors with length scales of their own; empty for one length scale.
    pub fn tensors(&self) -> &[TensorFactor] {
        &self.inner.tensors
    }

    /// The moments the model was made from.
    pub fn moments(&self) -> &Moments {
        &self.inner.moments
    }

    /// The built-in covariance, or `None` for a user's own.
    pub fn family(&self) -> Option<Family> {
        self.inner.family
    }

    /// The covariance, in units of the length scale.
    pub fn covariance(&self) -> &Arc<dyn Covariance> {
        &self.inner.covariance
    }

    /// s, the length that is 1 in the covariance's own units.
    pub fn length_scale(&self) -> f64 {
        self.inner.length_scale
    }

    /// −ρ'(0) of the correlation, in units of the length scale.
    #[cfg(any(feature = "cuda", feature = "shim"))]
    pub(crate) fn slope(&self) -> f64 {
        self.inner.slope
    }

    /// η*(∞) in length scales.
    #[cfg(any(feature = "cuda", feature = "shim"))]
    pub(crate) fn plateau(&self) -> f64 {
        self.inner.plateau
    }

    /// η*(∞), the step size at loss = μ (paper, Table "RFD step size").
    ///
    /// It is the longest step of RFD, hence the threshold if RFD is to be imitated by gradient clipping, and
    /// the step at the start of training that a learning-rate warm-up imitates (section "RFD step sizes
    /// explain common step size heuristics").
    pub fn plateau_step_size(&self) -> f64 {
        self.inner.length_scale * self.inner.plateau
    }

    /// The learning rate towards which RFD's tends when the loss tends to `limiting_loss` (paper, Eq.
    /// "asymptotic lr s-rfd"): (C(0) + C_ε(0)/b)/((−C'(0) − C'_ε(0)/b)·(μ − limiting_loss)).
    ///
    /// It does not depend on the covariance, since C(0) and C'(0) are the moments'. An error if the limiting
    /// loss is not below the mean.
    pub fn asymptotic_learning_rate(&self, limiting_loss: f64, inv_batch_size: f64) -> Result<f64> {
        validate_inv_batch_size(inv_batch_size)?;
        let moments = self.moments();
        if !(limiting_loss < moments.mean && limiting_loss.is_finite()) {
            let expected = format!("must be finite and below the cost's mean {}", moments.mean);
            return Err(Error::invalid("limiting_loss", limiting_loss, expected));
        }
        let variance = moments.variance + moments.noise_variance * inv_batch_size;
        let grad_variance = moments.grad_variance + moments.noise_grad_variance * inv_batch_size;
        let gap = moments.mean - limiting_loss;
        Ok((variance / grad_variance * moments.dims as f64 / gap).min(f64::MAX))
    }

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

    fn signal_shares(&self, inv_batch_size: f64) -> SignalShares {
        let moments = self.moments();
        SignalShares {
            loss: moments.variance / (moments.variance + moments.noise_variance * inv_batch_size),
            gradient: moments.grad_variance
                / (moments.grad_variance + moments.noise_grad_variance * inv_batch_size),
        }
    }

    fn noise(&self, inv_batch_size: f64) -> Noise {
        let moments = self.moments();
        Noise {
            loss: moments.noise_variance / moments.variance * inv_batch_size,
            gradient: moments.noise_grad_variance / moments.grad_variance * inv_batch_size,
        }
    }

    /// a and b for loss < μ, scaled by a power of two where they would leave the range of f64.
    fn forces(&self, loss: f64, grad_norm: f64, inv_batch_size: f64) -> Forces {
        // Powers of two, so that scaling by them is exact.
        const QUARTER: f64 = 0.25;
        const UP: f64 = f64::from_bits((1023 + 512) << 52);
        const DOWN: f64 = f64::from_bits((1023 - 512) << 52);
        const SMALL: f64 = 1e-150;
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
        if a.is_infinite() || (a < SMALL && b < SMALL) {
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

/// Whether u may be what [`Covariance::closed_form_step`] returns.
fn is_step(u: f64) -> bool {
    u >= 0.0 && u.is_finite()
}

/// An error if a closed form, where there is one, is no step at one of a few points from end to end of its
/// domain.
fn check_closed_form(covariance: &dyn Covariance) -> Result<()> {
    const POINTS: [(f64, f64); 9] = [
        (1.0, 0.0),
        (1.0, 1e-12),
        (1.0, 1e-3),
        (1.0, 0.5),
        (1.0, 1.0),
        (0.5, 1.0),
        (1e-3, 1.0),
        (1e-12, 1.0),
        (0.0, 1.0),
    ];
    for (a, b) in POINTS {
        match covariance.closed_form_step(a, b) {
            Some(u) if !(is_step(u) && (u > 0.0 || b > 0.0)) => {
                let name = format!("closed_form_step({a}, {b}) of covariance `{}`", covariance.name());
                let expected = "must be finite, at least 0, and above 0 at (1, 0), the plateau";
                return Err(Error::invalid(&name, u, expected));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Φ⁻¹((1 + c)/2), without rounding (1 + c)/2.
pub(crate) fn quantile(conservatism: f64) -> f64 {
    std::f64::consts::SQRT_2 * erf_inv(conservatism)
}

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
