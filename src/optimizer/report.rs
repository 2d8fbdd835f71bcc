//! What goes into a step beside tensors, and what comes out of it.

use serde::Serialize;

use crate::backend::abi::*;
use crate::covariance::NoStep;

/// The scalars of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepInput {
    /// The mini-batch loss at the current parameters: the mean over the batch that the gradients are the mean
    /// of, without gradient scale.
    pub loss: f64,
    /// S when the gradients given are S times the real ones, as with a gradient scaler. Default 1.
    pub grad_scale: f64,
    /// Any value but 0 skips the step: a gradient scaler found an overflow. Default 0.
    pub found_inf: f64,
}

impl StepInput {
    /// A step with the given loss, no gradient scale and no overflow.
    pub fn new(loss: f64) -> Self {
        Self { loss, grad_scale: 1.0, found_inf: 0.0 }
    }
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepReport {
    /// Whether parameters changed, or why not.
    pub outcome: Outcome,
    /// The loss given.
    pub loss: f64,
    /// ‖g‖, the Euclidean norm over all tensors that count, gradient scale removed. Not finite when a
    /// gradient is not; 0 when `found_inf` skipped the step before it was computed.
    pub grad_norm: f64,
    /// √(Σ f²‖g_k‖²), the norm that Θ and the step refer to; equal to `grad_norm` when all length-scale
    /// factors are 1. With the adaptive method it is the norm √(Σ f²Σ_k‖ḡ_k‖²) of the averaged gradient in
    /// its own geometry (`docs/adaptive.md`), but in a skipped step.
    pub sigma_norm: f64,
    /// Θ, the gradient cost quotient with the S-RFD correction; infinite at loss ≥ μ and with the adaptive
    /// method, whose steps are those at the mean; 0 in a skipped step.
    pub theta: f64,
    /// η: the length of the step, multiplier and cap included; 0 in a skipped step.
    pub step_size: f64,
    /// η / `sigma_norm`: what the gradient, or its average, is multiplied with; 0 in a skipped step.
    pub learning_rate: f64,
    /// How far the adaptive method trusts its model: a factor on the step, between 0.001 and 4; 0 in a
    /// skipped step and with other methods. Below 0.01 for long, either the loss can't fall any more, or the
    /// gradients are not those of the loss.
    pub trust: f64,
    /// What limits the step of the adaptive method.
    pub limit: Limit,
    /// Steps applied so far, this one included.
    pub applied_steps: u64,
    /// Steps skipped so far, this one included.
    pub skipped_steps: u64,
}

/// What limits a step of the adaptive method (`docs/adaptive.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The step is skipped, or of another method.
    None,
    /// The largest rate.
    Rate,
    /// The share of the loss that a step may promise to lower it by.
    Loss,
    /// [`Options::max_step_size`](super::Options::max_step_size).
    Size,
}

impl Limit {
    const ALL: [Limit; 4] = [Limit::None, Limit::Rate, Limit::Loss, Limit::Size];

    /// Its number, the same in Rust, C (`RFD_LIMIT_*`) and kernels.
    pub const fn code(self) -> u32 {
        match self {
            Limit::None => RFD_LIMIT_NONE,
            Limit::Rate => RFD_LIMIT_RATE,
            Limit::Loss => RFD_LIMIT_LOSS,
            Limit::Size => RFD_LIMIT_SIZE,
        }
    }

    /// The limit with this number, if there is one.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|limit| limit.code() == code)
    }
}

/// Whether a step was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Parameters were updated.
    Applied,
    /// Nothing changed: no parameter, no velocity, no count of applied steps.
    Skipped(SkipReason),
}

/// Why a step changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipReason {
    /// `found_inf` was not 0.
    FoundInf,
    /// The loss is NaN or infinite.
    NonFiniteLoss,
    /// A gradient has a NaN or infinite element, or the norm exceeds the range of f64.
    NonFiniteGradient,
    /// The gradient is 0: there is no direction to go.
    ZeroGradient,
    /// An option is outside its domain. Setting one on the host is refused at once; this is for options that
    /// a device reads from its own memory.
    InvalidOption,
    /// Gradient norm or learning rate leave the range of f32, in which velocities are kept. Only with
    /// momentum and with the adaptive method.
    OutOfRange,
    /// The loss is below the lower bound given to the adaptive method.
    LossBelowBound,
}

impl Outcome {
    const ALL: [Outcome; 8] = [
        Outcome::Applied,
        Outcome::Skipped(SkipReason::FoundInf),
        Outcome::Skipped(SkipReason::NonFiniteLoss),
        Outcome::Skipped(SkipReason::NonFiniteGradient),
        Outcome::Skipped(SkipReason::ZeroGradient),
        Outcome::Skipped(SkipReason::InvalidOption),
        Outcome::Skipped(SkipReason::OutOfRange),
        Outcome::Skipped(SkipReason::LossBelowBound),
    ];

    /// Its number, the same in Rust, C (`RFD_OUTCOME_*`) and kernels.
    pub const fn code(self) -> u32 {
        match self {
            Outcome::Applied => RFD_OUTCOME_APPLIED,
            Outcome::Skipped(SkipReason::FoundInf) => RFD_OUTCOME_FOUND_INF,
            Outcome::Skipped(SkipReason::NonFiniteLoss) => RFD_OUTCOME_NON_FINITE_LOSS,
            Outcome::Skipped(SkipReason::NonFiniteGradient) => RFD_OUTCOME_NON_FINITE_GRADIENT,
            Outcome::Skipped(SkipReason::ZeroGradient) => RFD_OUTCOME_ZERO_GRADIENT,
            Outcome::Skipped(SkipReason::InvalidOption) => RFD_OUTCOME_INVALID_OPTION,
            Outcome::Skipped(SkipReason::OutOfRange) => RFD_OUTCOME_OUT_OF_RANGE,
            Outcome::Skipped(SkipReason::LossBelowBound) => RFD_OUTCOME_LOSS_BELOW_BOUND,
        }
    }

    /// The outcome with this number, if there is one.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|outcome| outcome.code() == code)
    }
}

impl From<NoStep> for SkipReason {
    fn from(reason: NoStep) -> Self {
        match reason {
            NoStep::NonFiniteLoss => SkipReason::NonFiniteLoss,
            NoStep::NonFiniteGradient => SkipReason::NonFiniteGradient,
            NoStep::ZeroGradient => SkipReason::ZeroGradient,
            NoStep::InvalidArgument => SkipReason::InvalidOption,
        }
    }
}

impl std::fmt::Display for SkipReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            SkipReason::FoundInf => "the gradient scaler found an overflow",
            SkipReason::NonFiniteLoss => "the loss is not finite",
            SkipReason::NonFiniteGradient => "a gradient is not finite",
            SkipReason::ZeroGradient => "the gradient is zero",
            SkipReason::InvalidOption => "an option is outside its domain",
            SkipReason::OutOfRange => {
                "gradient norm, loss or learning rate are beyond what momentum and averages can hold"
            }
            SkipReason::LossBelowBound => "the loss is below its lower bound: give a smaller `loss_bound`",
        })
    }
}
