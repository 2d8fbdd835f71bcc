//! The adaptive method (`docs/adaptive.md`): from squared norms and losses to the scalars of the update. Plain f64
//! arithmetic (add, multiply, divide, square root), in one fixed order, which `kernels/adaptive.cuh` repeats bit for bit.

use serde::{Deserialize, Serialize};

use super::decision::{Decision, Norms};
use super::report::{SkipReason, StepInput};
use super::{Adaptive, Anisotropy, Group, Options};
use crate::numeric::{fold, power_of_two};

/// What a step lowers the logarithm of the cost by, to first order along the averaged gradient, once it is trusted: √C(0) of the
/// logarithm.
pub(crate) const DECREASE: f64 = 0.1;
/// The same bound along single gradients, whose norm has the noise in it.
pub(crate) const NOISY_DECREASE: f64 = 3.0;
/// Decay of the average of each tensor's ‖g_k‖².
pub(crate) const VARIANCE_DECAY: f64 = 0.9;
/// No tensor's variance counts as less than this share of the mean over all: its length scale would have no end.
pub(crate) const SMALLEST_VARIANCE: f64 = 0.03;
/// Nor as more than this many times the mean: that would freeze a tensor of a few elements on which much depends, such as the
/// gains of an output.
pub(crate) const LARGEST_VARIANCE: f64 = 4.0;
/// The first step is 2^(1 − RAMP) of what the rule says, each one after it twice as much: at a saddle, where deep networks
/// start, the gradient does not tell how far the linear model holds.
pub(crate) const RAMP: i32 = 8;

/// What the adaptive method remembers, beside the velocities.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct History {
    /// Σ (1 − β)·βⁱ·loss of the step i steps ago.
    pub loss: f64,
    /// βⁿ after n steps: the weight that the average still lacks.
    pub loss_rest: f64,
    pub trust: Trust,
    /// In the order of the optimizer's tensors.
    pub tensors: Vec<TensorHistory>,
}

/// The same of one tensor, over the steps in which it had a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TensorHistory {
    /// The average of ‖g_k‖², like [`History::loss`].
    pub squares: f64,
    /// The weight that it still lacks.
    pub squares_rest: f64,
    /// The weight that the averaged gradient still lacks.
    pub average_rest: f64,
}

/// How far the model is trusted: a factor on steps, from means of the loss over windows of steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Trust {
    pub factor: f64,
    /// Loss of the last step.
    pub last: f64,
    /// Steps in this window.
    pub steps: f64,
    /// Windows that are complete.
    pub windows: f64,
    /// Sum of this window's losses.
    pub sum: f64,
    /// Sum of squared differences between each of its losses and the one before.
    pub squares: f64,
    /// What its steps were to lower the loss by, to first order.
    pub promised: f64,
    /// The same three of the window before.
    pub sum_before: f64,
    pub squares_before: f64,
    pub promised_before: f64,
}

/// What a step knows of a tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen<'a> {
    pub group: &'a Group,
    pub counts_in_norm: bool,
    pub len: usize,
    /// `None` for a tensor that takes no part in the step.
    pub sums: Option<Sums>,
}

/// Squared norms of one tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    /// ‖g_k‖², gradient scale removed.
    pub squares: f64,
    /// ‖v_k‖² of the new velocity; ‖g_k‖² without averaging.
    pub direction: f64,
}

/// A step, and what is remembered after it.
#[derive(Debug)]
pub(super) struct Advance {
    pub history: History,
    pub decision: Decision,
    /// Of each tensor: what its velocity is multiplied with beside what all share.
    pub scales: Vec<f64>,
}

impl History {
    pub(crate) fn new(tensors: usize) -> Self {
        let tensor = TensorHistory { squares: 0.0, squares_rest: 1.0, average_rest: 1.0 };
        Self { loss: 0.0, loss_rest: 1.0, trust: Trust::new(), tensors: vec![tensor; tensors] }
    }

    /// Whether it can be what steps have left: a history comes from a file, too.
    pub(crate) fn is_sound(&self) -> bool {
        let Trust { factor, last, steps, windows, sum, squares, promised, .. } = self.trust;
        let Trust { sum_before, squares_before, promised_before, .. } = self.trust;
        let share = |x: f64| (0.0..=1.0).contains(&x);
        let not_negative = |x: f64| x >= 0.0 && x.is_finite();
        share(self.loss_rest)
            && (Trust::SMALLEST..=1.0).contains(&factor)
            && (0.0..Trust::WINDOW).contains(&steps)
            && [windows, squares, squares_before].into_iter().all(not_negative)
            && [self.loss, last, sum, promised, sum_before, promised_before].into_iter().all(f64::is_finite)
            && self.tensors.iter().all(|tensor| {
                not_negative(tensor.squares) && share(tensor.squares_rest) && share(tensor.average_rest)
            })
    }

    /// The step for given norms, or why there is none. `norms` are those of the gradients alone.
    pub(super) fn advance(
        &self,
        rule: &Adaptive,
        options: &Options,
        applied_steps: u64,
        seen: &[Seen<'_>],
        norms: Norms,
        input: &StepInput,
    ) -> Result<Advance, SkipReason> {
        if !input.loss.is_finite() {
            return Err(SkipReason::NonFiniteLoss);
        }
        if norms.euclidean == 0.0 {
            return Err(SkipReason::ZeroGradient);
        }
        if input.loss < rule.loss_bound {
            return Err(SkipReason::LossBelowBound);
        }
        if norms.exponent != 0 {
            return Err(SkipReason::OutOfRange);
        }
        let beta = rule.averaging;
        let mut history = History {
            loss: beta * self.loss + (1.0 - beta) * input.loss,
            loss_rest: self.loss_rest * beta,
            trust: self.trust.observe(input.loss),
            tensors: (self.tensors.iter().zip(seen))
                .map(|(tensor, seen)| seen.sums.map_or(*tensor, |sums| tensor.observe(sums.squares, beta)))
                .collect(),
        };
        let mean = history.mean_variance(seen);
        let total = |term: &dyn Fn(&TensorHistory, &Group, f64, Sums) -> f64| {
            let terms: Vec<f64> = (history.tensors.iter().zip(seen))
                .map(|(tensor, seen)| match seen.sums {
                    Some(sums) if seen.counts_in_norm => term(tensor, seen.group, seen.len as f64, sums),
                    _ => 0.0,
                })
                .collect();
            fold(&terms)
        };
        let weight = |tensor: &TensorHistory, group: &Group, len: f64| {
            group.length_scale_factor * group.length_scale_factor * tensor.scale(rule.anisotropy, len, mean)
        };
        // The squared Σ-norm of the averaged gradient, and the mean one of single gradients.
        let averaged = total(&|tensor, group, len, sums| {
            let average = tensor.average_scale(beta);
            weight(tensor, group, len) * (sums.direction * (average * average))
        });
        let single = total(&|tensor, group, len, _| weight(tensor, group, len) * tensor.mean_square());
        if averaged == 0.0 {
            return Err(SkipReason::ZeroGradient);
        }
        let loss = history.loss / (1.0 - history.loss_rest) - rule.loss_bound;
        let rate = history.trust.factor
            * (ramp(applied_steps) * DECREASE / averaged).min(NOISY_DECREASE / single)
            * loss;
        let norm = averaged.sqrt();
        let step_size = (rate * norm * options.multiplier).min(options.max_step_size.unwrap_or(f64::MAX));
        let learning_rate = step_size / norm;
        history.trust.promised += step_size * norm;
        let Trust { sum, squares, promised, sum_before, squares_before, promised_before, .. } = history.trust;
        let remembered = [sum, squares, promised, sum_before, squares_before, promised_before];
        let finite = [averaged, single, learning_rate].into_iter().chain(remembered);
        if !finite.chain(history.tensors.iter().map(|tensor| tensor.squares)).all(f64::is_finite) {
            return Err(SkipReason::OutOfRange);
        }
        let scales = (history.tensors.iter().zip(seen))
            .map(|(tensor, seen)| match seen.sums {
                Some(_) => tensor.scale(rule.anisotropy, seen.len as f64, mean) * tensor.average_scale(beta),
                None => 0.0,
            })
            .collect();
        Ok(Advance {
            history,
            decision: Decision::adaptive(step_size, norm, learning_rate, norms, input),
            scales,
        })
    }

    /// v, the mean over the elements of all tensors that count.
    fn mean_variance(&self, seen: &[Seen<'_>]) -> f64 {
        let counted = |term: &dyn Fn(&TensorHistory, f64) -> f64| {
            let terms: Vec<f64> = (self.tensors.iter().zip(seen))
                .map(|(tensor, seen)| match seen.sums {
                    Some(_) if seen.counts_in_norm => term(tensor, seen.len as f64),
                    _ => 0.0,
                })
                .collect();
            fold(&terms)
        };
        counted(&|tensor, _| tensor.mean_square()) / counted(&|_, len| len)
    }
}

impl TensorHistory {
    fn observe(&self, squares: f64, beta: f64) -> Self {
        Self {
            squares: VARIANCE_DECAY * self.squares + (1.0 - VARIANCE_DECAY) * squares,
            squares_rest: self.squares_rest * VARIANCE_DECAY,
            average_rest: self.average_rest * beta,
        }
    }

    /// The average of ‖g_k‖²: d_k·v_k.
    fn mean_square(&self) -> f64 {
        self.squares / (1.0 - self.squares_rest)
    }

    /// What makes minus the velocity the averaged gradient.
    fn average_scale(&self, beta: f64) -> f64 {
        (1.0 - beta) / (1.0 - self.average_rest)
    }

    /// Σ_k = √(v/v_k), v_k within bounds.
    fn scale(&self, anisotropy: Anisotropy, len: f64, mean: f64) -> f64 {
        match anisotropy {
            Anisotropy::Isotropic => 1.0,
            Anisotropy::Tensorwise => {
                let variance = self.mean_square() / len;
                (mean / variance.max(SMALLEST_VARIANCE * mean).min(LARGEST_VARIANCE * mean)).sqrt()
            }
        }
    }
}

/// The share of the rule's step that step number `applied_steps` + 1 takes.
fn ramp(applied_steps: u64) -> f64 {
    let last = (RAMP - 1) as u64;
    if applied_steps < last { power_of_two(applied_steps as i32 + 1 - RAMP) } else { 1.0 }
}

impl Trust {
    /// Steps whose losses are compared with those of the steps before.
    pub(crate) const WINDOW: f64 = 16.0;
    pub(crate) const SMALLEST: f64 = 1e-3;
    /// The part of the promised fall that has to come: steps overshoot the minimum along their line most of the time, also in
    /// good runs.
    pub(crate) const SHARE: f64 = 0.1;
    /// What the factor is multiplied with after less and after more than that.
    pub(crate) const AFTER_LESS: f64 = 0.5;
    pub(crate) const AFTER_MORE: f64 = 1.5;

    fn new() -> Self {
        Self {
            factor: 1.0,
            last: 0.0,
            steps: 0.0,
            windows: 0.0,
            sum: 0.0,
            squares: 0.0,
            promised: 0.0,
            sum_before: 0.0,
            squares_before: 0.0,
            promised_before: 0.0,
        }
    }

    fn observe(&self, loss: f64) -> Self {
        let first = self.steps == 0.0 && self.windows == 0.0;
        let difference = if first { 0.0 } else { loss - self.last };
        let mut next = Self {
            last: loss,
            steps: self.steps + 1.0,
            sum: self.sum + loss,
            squares: self.squares + difference * difference,
            ..*self
        };
        if next.steps < Self::WINDOW {
            return next;
        }
        if next.windows > 0.0 {
            next.factor = (next.factor * next.verdict()).clamp(Self::SMALLEST, 1.0);
        }
        Self {
            steps: 0.0,
            windows: next.windows + 1.0,
            sum: 0.0,
            squares: 0.0,
            promised: 0.0,
            sum_before: next.sum,
            squares_before: next.squares,
            promised_before: next.promised,
            ..next
        }
    }

    /// From two complete windows: less than was promised beyond doubt, more than was promised, or neither. Between windows the
    /// sum of the losses should fall by their length times what the steps of one window promised. Half a mean squared difference of
    /// successive losses is the variance of their noise, whatever the trend; so the standard error of the fall is
    /// √((squares_before + squares)/2).
    fn verdict(&self) -> f64 {
        let fall = self.sum_before - self.sum;
        let promise = Self::SHARE * (Self::WINDOW * ((self.promised_before + self.promised) / 2.0));
        let noise = ((self.squares_before + self.squares) / 2.0).sqrt();
        if fall < promise - noise {
            Self::AFTER_LESS
        } else if fall > promise {
            Self::AFTER_MORE
        } else {
            1.0
        }
    }
}
