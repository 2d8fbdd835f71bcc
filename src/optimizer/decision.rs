//! From norms and loss to the scalars of the update. Plain f64 arithmetic (add, multiply, divide, square
//! root), in one fixed order, so that a GPU can repeat it bit for bit.

use super::options::Group;
use super::report::{Limit, StepInput};
use crate::backend::abi::RFD_COMFORTABLE_EXPONENT;
use crate::backend::cpu::{LockSums, UpdateScalars};
use crate::numeric::{exponent_of, power_of_two};

/// ‖g‖² and Σ f²‖g_k‖² of the scaled gradients, each times 4^exponent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TotalSquares {
    pub euclidean: f64,
    pub sigma: f64,
    pub exponent: i32,
}

/// The two norms of the unscaled gradients, and the Σ-norm of the gradients as they were given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norms {
    pub euclidean: f64,
    pub sigma: f64,
    scaled_sigma: f64,
    /// That of [`TotalSquares`].
    pub exponent: i32,
}

impl Norms {
    pub(super) fn new(squares: TotalSquares, grad_scale: f64) -> Self {
        let root = |square: f64| square.sqrt() * power_of_two(squares.exponent);
        let scaled_sigma = root(squares.sigma);
        Self {
            euclidean: root(squares.euclidean) / grad_scale,
            sigma: scaled_sigma / grad_scale,
            scaled_sigma,
            exponent: squares.exponent,
        }
    }
}

/// The step that all tensors share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decision {
    pub theta: f64,
    /// The Σ-norm that the step refers to.
    pub sigma_norm: f64,
    /// η times the multiplier, capped.
    pub step_size: f64,
    /// The step size over the Σ-norm.
    pub learning_rate: f64,
    /// The step size over the prescaled Σ-norm of the gradients as given.
    prescaled_rate: f64,
    prescale: f64,
    unscale: f64,
    /// The Euclidean norm, which bounds every element of the gradient.
    grad_norm: f64,
    /// Of the adaptive method: how far it trusts its model, and what limits the step.
    pub trust: f64,
    pub limit: Limit,
    /// The share of the learning rate that weight decay is multiplied with.
    decay_share: f64,
}

/// Gradient norms with exponents up to this need no prescaling: coefficients stay far inside the range of
/// f32.
const COMFORTABLE_EXPONENT: i32 = RFD_COMFORTABLE_EXPONENT as i32;

impl Decision {
    /// A step along the gradient.
    pub(super) fn along_gradient(theta: f64, step_size: f64, norms: Norms, input: &StepInput) -> Self {
        let exponent = exponent_of(norms.scaled_sigma);
        let prescale = if exponent.abs() <= COMFORTABLE_EXPONENT {
            1.0
        } else {
            // ±126 keeps the scale a normal f32; what is left is for the coefficient, whose range then
            // suffices.
            power_of_two((-exponent).clamp(-126, 126))
        };
        Self {
            theta,
            sigma_norm: norms.sigma,
            step_size,
            learning_rate: (step_size / norms.sigma).min(f64::MAX),
            prescaled_rate: step_size / (norms.scaled_sigma * prescale),
            prescale,
            unscale: 1.0 / input.grad_scale,
            grad_norm: norms.euclidean,
            trust: 0.0,
            limit: Limit::None,
            decay_share: 1.0,
        }
    }

    /// A step along the averaged gradient, or along the gradient itself where nothing is averaged;
    /// `sigma_norm` is that of the average.
    pub(super) fn along_average(
        step_size: f64,
        sigma_norm: f64,
        learning_rate: f64,
        norms: Norms,
        input: &StepInput,
    ) -> Self {
        let unscale = 1.0 / input.grad_scale;
        Self {
            theta: f64::INFINITY,
            sigma_norm,
            step_size,
            learning_rate,
            prescaled_rate: learning_rate * unscale,
            prescale: 1.0,
            unscale,
            grad_norm: norms.euclidean,
            trust: 0.0,
            limit: Limit::None,
            decay_share: 1.0,
        }
    }

    /// The same step, with what is said of it and its share of weight decay.
    pub(super) fn trusted(self, trust: f64, limit: Limit, decay_share: f64) -> Self {
        Self { trust, limit, decay_share, ..self }
    }

    /// Whether velocities in f32 can follow: |v| ≤ max ‖g‖/(1 − m) stays finite, and so does the learning
    /// rate.
    pub(super) fn fits_velocities(&self, group: &Group, velocity_decay: f64, scale: f64) -> bool {
        const LARGEST: f64 = f32::MAX as f64;
        velocity_decay == 0.0
            || self.grad_norm <= LARGEST * (1.0 - velocity_decay)
                && self.scalars(group, velocity_decay).coefficient * scale <= LARGEST
    }

    /// The update of the tensors of a group: each has a scale of its own that multiplies the coefficient, and
    /// norm lock comes on top with [`lock`].
    pub(super) fn scalars(&self, group: &Group, velocity_decay: f64) -> UpdateScalars {
        let factor = group.multiplier * (group.length_scale_factor * group.length_scale_factor);
        let rate = if velocity_decay > 0.0 { self.learning_rate } else { self.prescaled_rate };
        let shrink = self.learning_rate * self.decay_share * group.multiplier * group.weight_decay;
        UpdateScalars {
            decay: (1.0 - shrink).max(0.0),
            coefficient: rate * factor,
            prescale: self.prescale,
            velocity_decay,
            unscale: self.unscale,
        }
    }
}

/// Scales the update so that the parameter keeps its norm: ‖αp − βd‖² = α²‖p‖² − 2αβ⟨p, d⟩ + β²‖d‖².
pub(super) fn lock(scalars: UpdateScalars, sums: LockSums) -> UpdateScalars {
    let (alpha, beta) = if scalars.velocity_decay > 0.0 {
        (scalars.decay, scalars.coefficient)
    } else {
        (scalars.decay, scalars.coefficient * scalars.prescale)
    };
    let moved =
        alpha * alpha * sums.parameter - 2.0 * (alpha * beta) * sums.product + beta * beta * sums.direction;
    let ratio = (sums.parameter / moved).sqrt();
    // Norm 0 before or after the step, or sums beyond the range of f64: there is nothing to scale back to.
    if !(ratio > 0.0 && ratio.is_finite()) {
        return scalars;
    }
    UpdateScalars { decay: scalars.decay * ratio, coefficient: scalars.coefficient * ratio, ..scalars }
}
