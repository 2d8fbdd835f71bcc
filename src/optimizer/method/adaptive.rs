//! The adaptive method (`docs/adaptive.md`): from squared norms and losses to the scalars of the update.
//! Plain f64 arithmetic (add, multiply, divide, square root), in one fixed order, which
//! `kernels/methods/adaptive.cuh` repeats bit for bit.

use super::{Descent, History, Method, Names, Seen, StepPlan, TensorSums, another_method, fixed, trust};
use crate::backend::abi::{RFD_METHOD_ADAPTIVE, RfdAdaptive, RfdHistory, RfdStep, RfdTensorHistory};
use crate::backend::executor::InstanceKind;
use crate::error::{Error, Result};
use crate::numeric::{fold, power_of_two};
use crate::optimizer::decision::Decision;
use crate::optimizer::options::Group;
use crate::optimizer::report::SkipReason;
use crate::optimizer::state::damaged_history;

/// RFD on the logarithm of the cost, whose variances are those of the gradients seen last
/// (`docs/adaptive.md`). It needs no samples and trains networks whose cost is far from stationary, where RFD
/// as published diverges. The defaults are for all networks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adaptive {
    /// Whether each tensor has a length scale of its own. Default: each has.
    pub anisotropy: Anisotropy,
    /// β, the decay of the averages of gradients and losses, in [0, 1). 0 means no averages, and no buffer
    /// for that of the gradients. Default 0.9. The buffer is f32 for all but f64 parameters.
    pub averaging: f64,
    /// The largest known lower bound of the loss. Default 0, which is right for cross entropy and squared
    /// errors. Steps with a loss below it are skipped.
    pub loss_bound: f64,
}

/// Which parameters share a length scale, beside the factors of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anisotropy {
    /// All parameters.
    Isotropic,
    /// The elements of a tensor (paper, section "Geometric anisotropy/Adaptive step sizes").
    Tensorwise,
}

impl Default for Adaptive {
    fn default() -> Self {
        Self { anisotropy: Anisotropy::Tensorwise, averaging: 0.9, loss_bound: 0.0 }
    }
}

/// What a step lowers the logarithm of the cost by, to first order along the averaged gradient, once it is
/// trusted: √C(0) of the logarithm.
const DECREASE: f64 = 0.1;
/// The same bound along single gradients, whose norm has the noise in it.
const NOISY_DECREASE: f64 = 3.0;
/// Decay of the average of each tensor's ‖g_k‖².
const VARIANCE_DECAY: f64 = 0.9;
/// No tensor's variance counts as less than this share of the mean over all: its length scale would have no
/// end.
const SMALLEST_VARIANCE: f64 = 0.03;
/// Nor as more than this many times the mean: that would freeze a tensor of a few elements on which much
/// depends, such as the gains of an output.
const LARGEST_VARIANCE: f64 = 4.0;
/// The first step is 2^(1 − RAMP) of what the rule says, each one after it twice as much: at a saddle, where
/// deep networks start, the gradient does not tell how far the linear model holds.
const RAMP: i32 = 8;

/// What is remembered before the first step: averages have the weight that they still lack, which is βⁿ after
/// n steps.
fn fresh(tensors: usize) -> History {
    let shared = RfdHistory { loss_rest: 1.0, factor: 1.0, ..RfdHistory::default() };
    let tensor = RfdTensorHistory { squares: 0.0, squares_rest: 1.0, average_rest: 1.0 };
    History::new(&shared, &vec![tensor; tensors])
}

/// A tensor as the step sees it, its history with this step in it.
struct Tensor<'a> {
    group: &'a Group,
    counts_in_norm: bool,
    len: f64,
    /// `None` for one that takes no part in the step.
    sums: Option<TensorSums>,
    history: RfdTensorHistory,
}

impl Adaptive {
    /// Averages with this step's squared norm in them.
    fn observe(&self, history: &RfdTensorHistory, squares: f64) -> RfdTensorHistory {
        RfdTensorHistory {
            squares: VARIANCE_DECAY * history.squares + (1.0 - VARIANCE_DECAY) * squares,
            squares_rest: history.squares_rest * VARIANCE_DECAY,
            average_rest: history.average_rest * self.averaging,
        }
    }

    /// What makes minus the velocity the averaged gradient.
    fn average_scale(&self, history: &RfdTensorHistory) -> f64 {
        (1.0 - self.averaging) / (1.0 - history.average_rest)
    }

    /// Σ_k = √(v/v_k), v_k within bounds.
    fn scale(&self, tensor: &Tensor<'_>, mean: f64) -> f64 {
        match self.anisotropy {
            Anisotropy::Isotropic => 1.0,
            Anisotropy::Tensorwise => {
                let variance = mean_square(&tensor.history) / tensor.len;
                (mean / variance.max(SMALLEST_VARIANCE * mean).min(LARGEST_VARIANCE * mean)).sqrt()
            }
        }
    }
}

/// The average of ‖g_k‖²: d_k·v_k.
fn mean_square(history: &RfdTensorHistory) -> f64 {
    history.squares / (1.0 - history.squares_rest)
}

/// Σ over the tensors that count, in the fixed order; one that does not is a 0.
fn total(tensors: &[Tensor<'_>], term: impl Fn(&Tensor<'_>, TensorSums) -> f64) -> f64 {
    let terms: Vec<f64> = (tensors.iter())
        .map(|tensor| match tensor.sums {
            Some(sums) if tensor.counts_in_norm => term(tensor, sums),
            _ => 0.0,
        })
        .collect();
    fold(&terms)
}

/// The share of the full step that step number `applied_steps` + 1 takes.
fn ramp(applied_steps: u64) -> f64 {
    let last = (RAMP - 1) as u64;
    if applied_steps < last { power_of_two(applied_steps as i32 + 1 - RAMP) } else { 1.0 }
}

impl Descent for Adaptive {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn check(&self, _groups: usize) -> Result<()> {
        if !(0.0..1.0).contains(&self.averaging) {
            return Err(Error::invalid("averaging", self.averaging, "give a number in [0, 1)"));
        }
        if !self.loss_bound.is_finite() {
            let expected = "give a finite number that no loss falls below; 0 for most";
            return Err(Error::invalid("loss_bound", self.loss_bound, expected));
        }
        Ok(())
    }

    /// Nothing may change: averages are of one decay, and all settings are part of a captured step.
    fn check_change(&self, new: &Method) -> Result<()> {
        let Method::Adaptive(new) = new else { return Err(another_method(self.name(), new.name())) };
        if new.averaging != self.averaging {
            return Err(fixed("averaging", new.averaging));
        }
        if new.anisotropy != self.anisotropy {
            return Err(fixed("anisotropy", format!("{:?}", new.anisotropy)));
        }
        if new.loss_bound != self.loss_bound {
            return Err(fixed("loss_bound", new.loss_bound));
        }
        Ok(())
    }

    fn check_sharded(&self) -> Result<()> {
        let expected = "a shard does not know the norms of whole tensors; use `step`, or a fitted model";
        Err(Error::invalid("method", self.name(), expected))
    }

    /// The velocity is the sum that the average is made of: v = −Σ βⁱ g.
    fn velocity_decay(&self, _group: usize) -> f64 {
        self.averaging
    }

    fn kind(&self) -> InstanceKind {
        if self.averaging > 0.0 { InstanceKind::Averaged } else { InstanceKind::Generic }
    }

    fn sums_directions(&self) -> bool {
        self.averaging > 0.0
    }

    fn decide(&self, seen: &Seen<'_>, history: &History) -> std::result::Result<StepPlan, SkipReason> {
        let (core, input, norms) = (seen.core, seen.input, seen.norms);
        if !input.loss.is_finite() {
            return Err(SkipReason::NonFiniteLoss);
        }
        if norms.euclidean == 0.0 {
            return Err(SkipReason::ZeroGradient);
        }
        if input.loss < self.loss_bound {
            return Err(SkipReason::LossBelowBound);
        }
        if norms.exponent != 0 {
            return Err(SkipReason::OutOfRange);
        }
        let beta = self.averaging;
        let (before, tensors_before) = history.read::<RfdHistory, RfdTensorHistory>();
        let mut shared = RfdHistory {
            loss: beta * before.loss + (1.0 - beta) * input.loss,
            loss_rest: before.loss_rest * beta,
            ..trust::observe(&before, input.loss)
        };
        let tensors: Vec<Tensor<'_>> = (core.specs().iter().zip(core.lens()))
            .zip(seen.tensors.iter().zip(&tensors_before))
            .map(|((spec, &len), (&sums, before))| Tensor {
                group: &core.options().groups[spec.group],
                counts_in_norm: spec.counts_in_norm,
                len: len as f64,
                sums,
                history: sums.map_or(*before, |sums| self.observe(before, sums.squares)),
            })
            .collect();
        // v, the mean over the elements of all tensors that count.
        let mean = total(&tensors, |tensor, _| mean_square(&tensor.history))
            / total(&tensors, |tensor, _| tensor.len);
        let weight = |tensor: &Tensor<'_>| {
            tensor.group.length_scale_factor * tensor.group.length_scale_factor * self.scale(tensor, mean)
        };
        // The squared Σ-norm of the averaged gradient, and the mean one of single gradients.
        let averaged = total(&tensors, |tensor, sums| {
            let average = self.average_scale(&tensor.history);
            weight(tensor) * (sums.direction * (average * average))
        });
        let single = total(&tensors, |tensor, _| weight(tensor) * mean_square(&tensor.history));
        if averaged == 0.0 {
            return Err(SkipReason::ZeroGradient);
        }
        let loss = shared.loss / (1.0 - shared.loss_rest) - self.loss_bound;
        let rate = shared.factor
            * (ramp(seen.applied_steps) * DECREASE / averaged).min(NOISY_DECREASE / single)
            * loss;
        let norm = averaged.sqrt();
        let step_size = core.options().capped(rate * norm * core.options().multiplier);
        let learning_rate = step_size / norm;
        shared.promised += step_size * norm;
        let RfdHistory { sum, squares, promised, sum_before, squares_before, promised_before, .. } = shared;
        let remembered = [sum, squares, promised, sum_before, squares_before, promised_before];
        let finite = [averaged, single, learning_rate].into_iter().chain(remembered);
        if !finite.chain(tensors.iter().map(|tensor| tensor.history.squares)).all(f64::is_finite) {
            return Err(SkipReason::OutOfRange);
        }
        let scales: Vec<f64> = (tensors.iter())
            .map(|tensor| match tensor.sums {
                Some(_) => self.scale(tensor, mean) * self.average_scale(&tensor.history),
                None => 0.0,
            })
            .collect();
        let decision = Decision::along_average(step_size, norm, learning_rate, norms, input);
        let fits = |(tensor, &scale): (&Tensor<'_>, _)| decision.fits_velocities(tensor.group, beta, scale);
        if !tensors.iter().zip(&scales).all(fits) {
            return Err(SkipReason::OutOfRange);
        }
        let histories: Vec<RfdTensorHistory> = tensors.iter().map(|tensor| tensor.history).collect();
        Ok(StepPlan { decision, scales: Some(scales), history: History::new(&shared, &histories) })
    }

    fn names(&self) -> Names {
        Names::of::<RfdHistory, RfdTensorHistory>(fresh)
    }

    fn check_history(&self, history: &History) -> Result<()> {
        let (shared, tensors) = history.read::<RfdHistory, RfdTensorHistory>();
        let RfdHistory { loss, loss_rest, factor, last, steps, windows, sum, squares, promised, .. } = shared;
        let RfdHistory { sum_before, squares_before, promised_before, .. } = shared;
        let share = |x: f64| (0.0..=1.0).contains(&x);
        let not_negative = |x: f64| x >= 0.0 && x.is_finite();
        let sound = share(loss_rest)
            && (trust::SMALLEST..=1.0).contains(&factor)
            && (0.0..trust::WINDOW).contains(&steps)
            && [windows, squares, squares_before].into_iter().all(not_negative)
            && [loss, last, sum, promised, sum_before, promised_before].into_iter().all(f64::is_finite)
            && tensors.iter().all(|tensor| {
                not_negative(tensor.squares) && share(tensor.squares_rest) && share(tensor.average_rest)
            });
        if !sound {
            return Err(damaged_history("a value is outside its domain"));
        }
        // Steps would go uphill. Before the first one there is no average; a mean of losses at the bound may
        // be rounded below it.
        let average = loss / (1.0 - loss_rest);
        if average < self.loss_bound - 1e-9 * self.loss_bound.abs() {
            return Err(Error::State(format!(
                "its averaged loss {average} is below the optimizer's loss_bound {}; make the optimizer with the \
                 loss_bound that the state was saved with",
                self.loss_bound
            )));
        }
        Ok(())
    }

    fn lasting_settings(&self) -> Vec<(&'static str, f64)> {
        vec![("averaging", self.averaging)]
    }

    fn place(&self, step: &mut RfdStep, history: u64) -> Result<()> {
        step.method = RFD_METHOD_ADAPTIVE;
        step.adaptive = RfdAdaptive {
            history,
            averaging: self.averaging,
            loss_bound: self.loss_bound,
            decrease: DECREASE,
            noisy_decrease: NOISY_DECREASE,
            variance_decay: VARIANCE_DECAY,
            smallest_variance: SMALLEST_VARIANCE,
            largest_variance: LARGEST_VARIANCE,
            window: trust::WINDOW,
            share: trust::SHARE,
            after_less: trust::AFTER_LESS,
            after_more: trust::AFTER_MORE,
            smallest_trust: trust::SMALLEST,
            ramp: RAMP as u32,
            tensorwise: (self.anisotropy == Anisotropy::Tensorwise).into(),
        };
        Ok(())
    }
}
