//! What a step is computed from, by which rule, and what comes out.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// What the optimizer saw at the current parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    /// The mini-batch loss, the mean over its examples.
    pub loss: f64,
    /// The Euclidean norm of the mini-batch loss's gradient; with geometric anisotropy the one of
    /// [`sigma_norm`](super::sigma_norm).
    pub grad_norm: f64,
    /// 1/b for a batch of b examples, in [0, 1]; 0 stands for the cost itself, without noise.
    pub inv_batch_size: f64,
}

/// An error unless an inverse batch size lies in [0, 1].
pub fn validate_inv_batch_size(inv_batch_size: f64) -> Result<()> {
    if (0.0..=1.0).contains(&inv_batch_size) {
        Ok(())
    } else {
        Err(Error::invalid(
            "inv_batch_size",
            inv_batch_size,
            "must be 1/b for a batch of b ≥ 1 examples, so in (0, 1], or 0 for a loss without noise",
        ))
    }
}

/// How a step size is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepRule {
    /// Which step size.
    pub mode: StepMode,
    /// In [0, 1): 0 minimises the conditional expectation; c > 0 the upper end of a one-sided confidence
    /// interval of level γ = (1 + c)/2 (paper, section "Conservative RFD"). Only with [`StepMode::Rfd`].
    pub conservatism: f64,
}

impl StepRule {
    /// A rule that has been [validated](Self::validate).
    pub fn new(mode: StepMode, conservatism: f64) -> Result<Self> {
        let rule = StepRule { mode, conservatism };
        rule.validate()?;
        Ok(rule)
    }

    /// An error if the conservatism lies outside [0, 1), or if it is not 0 in a mode that has none.
    pub fn validate(&self) -> Result<()> {
        if !(0.0..1.0).contains(&self.conservatism) {
            return Err(Error::invalid("conservatism", self.conservatism, "must be at least 0 and below 1"));
        }
        if self.conservatism > 0.0 && self.mode != StepMode::Rfd {
            let expected =
                format!("must be 0 in step-size mode {}; only mode rfd has conservative steps", self.mode);
            return Err(Error::invalid("conservatism", self.conservatism, expected));
        }
        Ok(())
    }
}

/// Which step size is taken. As text: `rfd`, `a-rfd`, `clipped-a-rfd`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StepMode {
    /// The minimiser itself (paper, Theorem "Explicit RFD" and Table "RFD step size").
    #[default]
    Rfd,
    /// Its asymptote for small Θ, η̂ = C(0)/(−C'(0))·Θ (paper, Definition "A-RFD"): a constant learning rate
    /// for a given loss, and steps that are too long at the start. It has no plateau; at loss ≥ μ that of RFD
    /// is used.
    #[serde(rename = "a-rfd")]
    ARfd,
    /// A-RFD, but no step beyond RFD's plateau (paper, section "RFD step sizes explain common step size
    /// heuristics", gradient clipping).
    #[serde(rename = "clipped-a-rfd")]
    ClippedARfd,
}

impl fmt::Display for StepMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StepMode::Rfd => "rfd",
            StepMode::ARfd => "a-rfd",
            StepMode::ClippedARfd => "clipped-a-rfd",
        })
    }
}

impl FromStr for StepMode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [StepMode::Rfd, StepMode::ARfd, StepMode::ClippedARfd]
            .into_iter()
            .find(|mode| mode.to_string() == text)
            .ok_or_else(|| Error::invalid("step-size mode", text, "must be one of rfd, a-rfd, clipped-a-rfd"))
    }
}

/// A step along the negative gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// η, the length of the step, ≥ 0. A conservative step may be 0: then every step makes the bound worse.
    pub step_size: f64,
    /// Θ, the gradient cost quotient ‖g‖/(μ − loss) with the correction of S-RFD (paper, Extension "S-RFD");
    /// +∞ at loss ≥ μ.
    pub theta: f64,
}

impl Step {
    /// η/‖g‖, the factor of the gradient itself.
    pub fn learning_rate(&self, grad_norm: f64) -> f64 {
        self.step_size / grad_norm
    }
}

/// Why no step can be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoStep {
    /// The loss is NaN or infinite.
    #[error("the loss is not finite")]
    NonFiniteLoss,
    /// The gradient's norm is NaN, infinite or negative.
    #[error("the gradient's norm is not finite")]
    NonFiniteGradient,
    /// The gradient is 0, so there is no direction.
    #[error("the gradient is zero")]
    ZeroGradient,
    /// The inverse batch size or the rule is one that [`validate_inv_batch_size`] or [`StepRule::validate`]
    /// rejects.
    #[error("the inverse batch size or the conservatism is out of range")]
    InvalidArgument,
}
