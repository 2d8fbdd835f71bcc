//! Covariance models and their step sizes.
//!
//! A [`Model`] is a covariance together with the [`Moments`](crate::Moments) that estimation produced. Given
//! what an optimizer observed, the mini-batch loss and the norm of its gradient, [`Model::step`] says how far
//! to go along the negative gradient: to the minimum of the cost's conditional expectation (paper, Definition
//! "Random Function Descent" and Theorem "Explicit RFD").
//!
//! The built-in covariances are those of [`Family`]; anything else that is a function of the distance can be
//! used by implementing [`Covariance`].

mod anisotropy;
mod family;
mod model;
mod model_file;
mod rule;
mod search;

pub use anisotropy::{TensorFactor, sigma_norm};
pub(crate) use anisotropy::{check_sizes, is_factor};
pub use family::*;
pub(crate) use model::quantile;
pub use model::{Model, ValueAndSlope};
pub use rule::{NoStep, Observation, Step, StepMode, StepRule, validate_inv_batch_size};

/// Numbers that the kernels have too; `optimizer::device` has the compiler check that they are the same.
pub(crate) mod shared {
    pub(crate) use super::VANISHED;
    pub(crate) use super::family::shared::*;
    pub(crate) use super::model::{FORCE_EXPONENT, SMALL_FORCE};
    pub(crate) use super::search::{MARGIN, POINTS_PER_E, ROOT_ITERATIONS, SHORTEST};
}

/// Beyond this argument e⁻ˣ times any power of x that occurs here is exactly 0; capping x keeps ∞·0 away.
pub(crate) const VANISHED: f64 = 1e4;

/// A stationary isotropic covariance C, as a function of half the squared distance, h = ‖x − y‖²/2 (paper,
/// section "A distribution over cost functions").
///
/// To use a covariance of your own, implement [`name`](Self::name), [`c`](Self::c), [`dc`](Self::dc) and
/// [`ddc`](Self::ddc). Neither C(0) = 1 nor any particular unit of length is required: what counts is the
/// shape, and [`Model::with_covariance`] finds the length scale for which C(0) and C'(0) are the estimated
/// ones. The provided methods work from these functions alone; the built-in covariances replace them by
/// closed forms.
///
/// C has to be differentiable at 0, with C(0) > 0 > C'(0), and decrease with the distance, as every
/// covariance does that exists in all dimensions (it is then a mixture of squared exponentials). Steps are
/// looked for up to the plateau, which then contains them.
///
/// ```
/// use rfdescent::covariance::{Covariance, Model, Observation, StepRule};
///
/// /// The mean of two squared exponentials, one three times as wide as the other.
/// #[derive(Debug)]
/// struct TwoScales;
///
/// impl Covariance for TwoScales {
///     fn name(&self) -> String {
///         "two scales".into()
///     }
///     fn c(&self, h: f64) -> f64 {
///         ((-h).exp() + (-h / 9.0).exp()) / 2.0
///     }
///     fn dc(&self, h: f64) -> f64 {
///         -((-h).exp() + (-h / 9.0).exp() / 9.0) / 2.0
///     }
///     fn ddc(&self, h: f64) -> f64 {
///         ((-h).exp() + (-h / 9.0).exp() / 81.0) / 2.0
///     }
/// }
///
/// let moments = rfdescent::Moments {
///     mean: 2.3,
///     variance: 0.01,
///     noise_variance: 0.9,
///     grad_variance: 500.0,
///     noise_grad_variance: 9e4,
///     dims: 1_000_000,
/// };
/// let model = Model::with_covariance(std::sync::Arc::new(TwoScales), moments)?;
/// let observation = Observation { loss: 2.1, grad_norm: 3.0, inv_batch_size: 1.0 / 128.0 };
/// let step = model.step(&observation, &StepRule::default()).expect("loss and gradient are finite");
/// assert!(step.step_size > 0.0 && step.step_size <= model.plateau_step_size());
/// # Ok::<(), rfdescent::Error>(())
/// ```
pub trait Covariance: std::fmt::Debug + Send + Sync {
    /// A name for messages, e.g. `squared_exponential`.
    fn name(&self) -> String;

    /// C(h), h ≥ 0.
    fn c(&self, h: f64) -> f64;

    /// C'(h), h ≥ 0.
    fn dc(&self, h: f64) -> f64;

    /// C''(h), h > 0. It is never called at 0, where it may be infinite.
    fn ddc(&self, h: f64) -> f64;

    /// −ρ'(0) of the correlation ρ = C/C(0): 1/2 of the curvature at distance 0.
    fn slope(&self) -> f64 {
        -self.dc(0.0) / self.c(0.0)
    }

    /// The step u ≥ 0, as a multiple of the length scale, that minimises −b·ρ(u²/2) − a·u·ρ'(u²/2)/ρ'(0),
    /// where it is known in closed form; `None`, the default, has it searched numerically.
    ///
    /// a, b ≥ 0 and max(a, b) = 1. (a, b) = (1, 0) yields the plateau.
    ///
    /// The result has to be finite and at least 0, the plateau above 0. [`Model::with_covariance`] tries a
    /// few (a, b) and refuses a covariance that breaks this; where a later step does, the numerical search
    /// takes its place. Whether the result is the minimiser is not checked.
    fn closed_form_step(&self, a: f64, b: f64) -> Option<f64> {
        let _ = (a, b);
        None
    }

    /// What the step size and the conditional moments are computed from, at distance u ≥ 0 in units of the
    /// length scale.
    ///
    /// The default has an absolute error of a few rounding errors where the exact value is tiny: enough for
    /// risk-neutral steps at any scale. For conservative steps shorter than 1e-6 length scales override it by
    /// expressions that do not cancel.
    fn profile(&self, u: f64) -> Profile {
        search::generic_profile(self, u)
    }
}

/// A covariance at one distance u, in units of the length scale; κ(u) = ρ'(u²/2)/ρ'(0).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Profile {
    /// ρ(u²/2), the correlation.
    pub rho: f64,
    /// 1 − ρ, which for small u holds digits that ρ cannot.
    pub drop: f64,
    /// κ.
    pub kappa: f64,
    /// The derivative of u·κ(u).
    pub ukappa_slope: f64,
    /// D = 1 − ρ² − u²·ρ'(u²/2)²/(−ρ'(0)), the share of the variance which an exact loss and gradient leave.
    pub unexplained: f64,
    /// The derivative of D.
    pub unexplained_slope: f64,
}
