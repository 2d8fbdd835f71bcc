//! A fitted covariance model: the step sizes and the conditional moments that follow from it.

mod conditional;
mod step;

use std::sync::Arc;

pub use conditional::ValueAndSlope;
pub(crate) use step::{FORCE_EXPONENT, SMALL_FORCE, quantile};

use super::search::{self, Noise};
use super::{Covariance, Family, TensorFactor, anisotropy, validate_inv_batch_size};
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
    /// [`Fitted::per_tensor`](crate::optimizer::Fitted::per_tensor).
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

    /// Whether both give the same steps: they are one and the same, or have equal built-in covariances,
    /// moments and tensors.
    pub(crate) fn is_same(&self, other: &Model) -> bool {
        let (one, two) = (&*self.inner, &*other.inner);
        Arc::ptr_eq(&self.inner, &other.inner)
            || one.family.is_some()
                && (one.family, &one.moments, &one.tensors) == (two.family, &two.moments, &two.tensors)
    }

    /// −ρ'(0) of the correlation, in units of the length scale.
    pub(crate) fn slope(&self) -> f64 {
        self.inner.slope
    }

    /// η*(∞) in length scales.
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
