//! The adaptive method (`docs/adaptive.md`): from squared norms and losses to the scalars of the update.
//! Plain f64 arithmetic (add, multiply, divide, square root), in one fixed order, which
//! `kernels/methods/adaptive.cuh` repeats bit for bit.

use super::{Descent, History, Method, Names, Next, Seen, TensorSums, another_method, fixed, trust};
use crate::backend::abi::{RFD_METHOD_ADAPTIVE, RfdAdaptive, RfdHistory, RfdStep, RfdTensorHistory};
use crate::backend::cpu::{ColumnVariance, RowVariance, averaged};
use crate::backend::executor::InstanceKind;
use crate::error::{Error, Result};
use crate::numeric::{fold, power_of_two};
use crate::optimizer::decision::Decision;
use crate::optimizer::options::Group;
use crate::optimizer::report::{Limit, SkipReason};
use crate::optimizer::spec::TensorSpec;
use crate::optimizer::state::damaged_history;

/// RFD with length scales and variances that training itself shows (`docs/adaptive.md`). It needs no samples
/// and trains networks whose cost is far from stationary, where RFD as published diverges. The defaults are
/// for all networks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adaptive {
    /// β, the decay of the averages of gradients and losses, in [0, 1). 0 means no averages, and no buffer
    /// for that of the gradients. Default 0.85. The buffer is f32 for all but f64 parameters.
    pub averaging: f64,
    /// The largest lower bound of the loss that is known; steps with a loss below it are skipped. Default
    /// `None`: losses are taken to have the bound 0 until one is negative, and then to have none.
    pub loss_bound: Option<f64>,
}

impl Default for Adaptive {
    fn default() -> Self {
        Self { averaging: 0.85, loss_bound: None }
    }
}

/// r, the largest rate of a step that is fully trusted: the part of its length scale that a row moves by.
const LARGEST_RATE: f64 = 0.03;
/// No step promises to lower the averaged loss by more than this share, to first order: Polyak's step, as a
/// bound.
const LOSS_SHARE: f64 = 0.5;
/// Decay of the averages of squared gradients.
const VARIANCE_DECAY: f64 = 0.98;
/// A row's variance counts as at least this share of the mean over its tensor: the plateau of RFD's steps.
const VARIANCE_FLOOR: f64 = 0.03;
/// A loss above the average by more than this many times what that is above its bound counts as just that.
const LOSS_GROWTH: f64 = 2.0;
/// The same in standard deviations, where no bound is known.
const NOISE_GROWTH: f64 = 10.0;
/// So many losses in a row are cut to that; more of them are no outliers, but what training has come to.
const CUT_LOSSES: f64 = 3.0;
/// Steps before losses are cut: the first ones may rise.
const SETTLED: u64 = 10;
/// λ is multiplied with this share of the rate: weight decays as people bring them are of the size that goes
/// with other learning rates.
const DECAY_SHARE: f64 = 0.1;
/// A tensor has the length scale √(LENGTH_SHARE·size), between its own size (the root mean square of its
/// elements before the first step) and a common one.
const LENGTH_SHARE: f64 = 0.1;
/// What that size counts as at least, in matrices and in vectors: shifts begin at 0, gains at 1.
const SMALLEST_MATRIX: f64 = 0.01;
const SMALLEST_VECTOR: f64 = 0.1;
/// The first step is 2^(1 − RAMP) of what the rule says, each one after it twice as much: at a saddle, where
/// deep networks start, the gradient does not tell how far the linear model holds.
const RAMP: u64 = 8;
/// Which rule has left a state: the first one remembered no variances of rows.
const RULE: f64 = 2.0;

/// What is remembered before the first step: averages have the weight that they still lack, which is βⁿ after
/// n steps.
fn fresh(tensors: usize) -> History {
    let shared = RfdHistory { loss_rest: 1.0, trust: 1.0, ..RfdHistory::default() };
    let tensor = RfdTensorHistory { squares_rest: 1.0, average_rest: 1.0, ..RfdTensorHistory::default() };
    History::new(&shared, &vec![tensor; tensors])
}

/// The step that the averaged loss and the squared norm allow.
struct Rate {
    rate: f64,
    limit: Limit,
}

impl Adaptive {
    /// Averages with this step's sums in them.
    fn observe(&self, history: &RfdTensorHistory, sums: &TensorSums) -> RfdTensorHistory {
        RfdTensorHistory {
            squares: averaged(VARIANCE_DECAY, history.squares, sums.squares),
            column_mean: averaged(VARIANCE_DECAY, history.column_mean, sums.sampled),
            squares_rest: history.squares_rest * VARIANCE_DECAY,
            average_rest: history.average_rest * self.averaging,
            length: history.length,
            turn: 1.0 - history.turn,
        }
    }

    /// The bound below all losses, as far as one is known.
    fn floor(&self, below: f64) -> Option<f64> {
        self.loss_bound.or_else(|| (below == 0.0).then_some(0.0))
    }

    /// What the next loss counts as at most, so that a wrong one does not stay in the average.
    fn most(&self, before: &RfdHistory, applied_steps: u64) -> f64 {
        if applied_steps < SETTLED {
            return f64::INFINITY;
        }
        let average = before.loss / (1.0 - before.loss_rest);
        match self.floor(before.below) {
            Some(floor) if average > floor => average + LOSS_GROWTH * (average - floor),
            None if before.windows > 0.0 => average + NOISE_GROWTH * trust::deviation(before),
            _ => f64::INFINITY,
        }
    }

    /// What is remembered of all tensors together, but for what the step promises.
    fn observe_loss(&self, before: &RfdHistory, applied_steps: u64, loss: f64) -> RfdHistory {
        let most = self.most(before, applied_steps);
        let cut = if loss > most { (before.cut + 1.0).min(CUT_LOSSES + 1.0) } else { 0.0 };
        let counted = if cut > CUT_LOSSES { loss } else { loss.min(most) };
        let below = if self.loss_bound.is_none() && loss < 0.0 { 1.0 } else { before.below };
        RfdHistory {
            loss: self.averaging * before.loss + (1.0 - self.averaging) * counted,
            loss_rest: before.loss_rest * self.averaging,
            below,
            cut,
            ..trust::observe(before, counted)
        }
    }

    fn rate(&self, history: &RfdHistory, applied_steps: u64, squared: f64) -> Rate {
        let loss = history.loss / (1.0 - history.loss_rest);
        // A mean of losses at the bound may be rounded below it.
        let promise = self.floor(history.below).map(|floor| LOSS_SHARE * (loss - floor).max(0.0));
        let (rate, limit) = match promise {
            Some(promise) if promise < LARGEST_RATE * squared => (promise / squared, Limit::Loss),
            _ => (LARGEST_RATE, Limit::Rate),
        };
        Rate { rate: history.trust * (ramp(applied_steps) * rate), limit }
    }
}

/// The share of the full step that step number `applied_steps` + 1 takes.
fn ramp(applied_steps: u64) -> f64 {
    let last = RAMP - 1;
    if applied_steps < last { power_of_two(applied_steps as i32 - last as i32) } else { 1.0 }
}

impl Descent for Adaptive {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn check(&self, _groups: usize) -> Result<()> {
        if !(0.0..1.0).contains(&self.averaging) {
            return Err(Error::invalid("averaging", self.averaging, "give a number in [0, 1)"));
        }
        if let Some(bound) = self.loss_bound.filter(|bound| !bound.is_finite()) {
            let expected = "give a finite number that no loss falls below, or none";
            return Err(Error::invalid("loss_bound", bound, expected));
        }
        Ok(())
    }

    /// Nothing may change: averages are of one decay, and all settings are part of a captured step.
    fn check_change(&self, new: &Method) -> Result<()> {
        let Method::Adaptive(new) = new else { return Err(another_method(self.name(), new.name())) };
        if new.averaging != self.averaging {
            return Err(fixed("averaging", new.averaging));
        }
        if new.loss_bound != self.loss_bound {
            return Err(fixed("loss_bound", new.loss_bound.map_or("none".into(), |bound| bound.to_string())));
        }
        Ok(())
    }

    /// The velocity is the sum that the average is made of: v = −Σ βⁱ g.
    fn velocity_decay(&self, _group: usize) -> f64 {
        self.averaging
    }

    fn kind(&self) -> InstanceKind {
        if self.averaging > 0.0 { InstanceKind::Averaged } else { InstanceKind::Generic }
    }

    fn has_rows(&self) -> bool {
        true
    }

    fn row_variance(&self, history: &History, tensor: usize, elements: f64) -> RowVariance {
        let before: &RfdTensorHistory = history.of_tensor(tensor);
        let seen = 1.0 - before.squares_rest;
        // The mean over the tensor before this step.
        let mean = if seen > 0.0 { before.squares / seen / elements } else { 0.0 };
        RowVariance {
            decay: VARIANCE_DECAY,
            weight: 1.0 - before.squares_rest * VARIANCE_DECAY,
            floor: VARIANCE_FLOOR * mean,
        }
    }

    fn column_variance(&self, history: &History, tensor: usize) -> ColumnVariance {
        let now: &RfdTensorHistory = history.of_tensor(tensor);
        ColumnVariance {
            decay: VARIANCE_DECAY,
            mean: now.column_mean,
            floor: VARIANCE_FLOOR * now.column_mean,
        }
    }

    fn turn(&self, history: &History, tensor: usize) -> usize {
        usize::from(history.of_tensor::<RfdTensorHistory>(tensor).turn != 0.0)
    }

    fn lacks_measures(&self, history: &History) -> bool {
        history.any_tensor(|tensor: &RfdTensorHistory| tensor.length == 0.0)
    }

    fn measure(&self, history: &mut History, specs: &[TensorSpec], mean_squares: &[f64]) {
        let (shared, mut tensors) = history.read::<RfdHistory, RfdTensorHistory>();
        for ((tensor, spec), mean_square) in tensors.iter_mut().zip(specs).zip(mean_squares) {
            // A tensor that is new in a state has none yet.
            if tensor.length > 0.0 {
                continue;
            }
            // Sizes that are not finite would never do.
            let size = mean_square.sqrt();
            let smallest = if spec.is_matrix() { SMALLEST_MATRIX } else { SMALLEST_VECTOR };
            let size = if size > smallest && size < f64::INFINITY { size } else { smallest };
            tensor.length = (LENGTH_SHARE * size).sqrt();
        }
        *history = History::new(&shared, &tensors);
    }

    fn decide(
        &self,
        seen: &Seen<'_>,
        history: &History,
        next: &mut Next,
    ) -> std::result::Result<Decision, SkipReason> {
        let (core, input, norms) = (seen.core, seen.input, seen.norms);
        if !input.loss.is_finite() {
            return Err(SkipReason::NonFiniteLoss);
        }
        if norms.euclidean == 0.0 {
            return Err(SkipReason::ZeroGradient);
        }
        if self.loss_bound.is_some_and(|bound| input.loss < bound) {
            return Err(SkipReason::LossBelowBound);
        }
        if norms.exponent != 0 {
            return Err(SkipReason::OutOfRange);
        }
        let mut shared = self.observe_loss(&history.shared(), seen.applied_steps, input.loss);
        let Next { scales, squares, history: new } = next;
        scales.clear();
        squares.clear();
        let mut squares_are_finite = true;
        let groups = &core.options().groups;
        let after = new.each_tensor_mut::<RfdTensorHistory>(seen.tensors.len());
        let before: &[RfdTensorHistory] = history.each_tensor();
        let tensors = before.iter().zip(after).zip(seen.tensors).zip(core.briefs());
        for (((before, after), sums), brief) in tensors {
            let Some(sums) = sums else {
                squares_are_finite &= before.squares.is_finite();
                *after = *before;
                scales.push(0.0);
                squares.push(0.0);
                continue;
            };
            let now = self.observe(before, sums);
            let average = (1.0 - self.averaging) / (1.0 - now.average_rest);
            let scale = now.length * average;
            squares_are_finite &= now.squares.is_finite();
            *after = now;
            scales.push(scale);
            let Group { multiplier, length_scale_factor, .. } = &groups[brief.group];
            let factor = multiplier * (length_scale_factor * length_scale_factor);
            let square = factor * ((scale * average) * sums.direction);
            squares.push(if sums.counts { square } else { 0.0 });
        }
        // N², the squared Σ-norm of the averaged gradient; a tensor that does not count is a 0.
        let squared = fold(squares.iter().copied());
        let Rate { rate, mut limit } = self.rate(&shared, seen.applied_steps, squared);
        let norm = squared.sqrt();
        let wanted = rate * core.options().multiplier;
        let step_size = core.options().capped(wanted * norm);
        let mut learning_rate = wanted;
        if step_size < wanted * norm {
            learning_rate = step_size / norm;
            limit = Limit::Size;
        }
        shared.promised += step_size * norm;
        let RfdHistory { sum, squares, promised, sum_before, squares_before, promised_before, .. } = shared;
        let remembered = [sum, squares, promised, sum_before, squares_before, promised_before];
        let finite = [squared, learning_rate].into_iter().chain(remembered);
        if !squares_are_finite || !finite.into_iter().all(f64::is_finite) {
            return Err(SkipReason::OutOfRange);
        }
        new.set_shared(&shared);
        let decision = Decision::along_average(step_size, norm, learning_rate, norms, input).trusted(
            shared.trust,
            limit,
            DECAY_SHARE,
        );
        let mut scales = scales.iter().zip(core.briefs());
        if !scales
            .all(|(&scale, brief)| decision.fits_velocities(&groups[brief.group], self.averaging, scale))
        {
            return Err(SkipReason::OutOfRange);
        }
        Ok(decision)
    }

    fn names(&self) -> Names {
        Names::of::<RfdHistory, RfdTensorHistory>(fresh)
    }

    fn check_history(&self, history: &History) -> Result<()> {
        let (shared, tensors) = history.read::<RfdHistory, RfdTensorHistory>();
        let RfdHistory { loss, loss_rest, below, cut, trust, last, high, steps, windows, .. } = shared;
        let RfdHistory { sum, squares, promised, sum_before, squares_before, promised_before, .. } = shared;
        let share = |x: f64| (0.0..=1.0).contains(&x);
        let flag = |x: f64| x == 0.0 || x == 1.0;
        let not_negative = |x: f64| x >= 0.0 && x.is_finite();
        let sound = share(loss_rest)
            && flag(below)
            && (0.0..=CUT_LOSSES + 1.0).contains(&cut)
            && (trust::SMALLEST..=trust::LARGEST).contains(&trust)
            && (0.0..=trust::ALARM_LOSSES).contains(&high)
            && (0.0..trust::WINDOW).contains(&steps)
            && [windows, squares, squares_before].into_iter().all(not_negative)
            && [loss, last, sum, promised, sum_before, promised_before].into_iter().all(f64::is_finite)
            && tensors.iter().all(|tensor| {
                [tensor.squares, tensor.column_mean, tensor.length].into_iter().all(not_negative)
                    && share(tensor.squares_rest)
                    && share(tensor.average_rest)
                    && flag(tensor.turn)
                    // Only before a step that it takes part in.
                    && (tensor.length > 0.0 || tensor.squares_rest == 1.0)
            });
        if !sound {
            return Err(damaged_history("a value is outside its domain"));
        }
        // Such a state is of another loss. Before the first step there is no average; a mean of losses at the
        // bound may be rounded below it.
        let average = loss / (1.0 - loss_rest);
        if let Some(bound) = self.loss_bound.filter(|bound| average < bound - 1e-9 * bound.abs()) {
            return Err(Error::State(format!(
                "its averaged loss {average} is below the optimizer's loss_bound {bound}; make the optimizer with the \
                 loss_bound that the state was saved with"
            )));
        }
        Ok(())
    }

    fn lasting_settings(&self) -> Vec<(&'static str, f64)> {
        vec![("averaging", self.averaging), ("rule", RULE)]
    }

    fn place(&self, step: &mut RfdStep, history: u64) -> Result<()> {
        step.method = RFD_METHOD_ADAPTIVE;
        step.adaptive = RfdAdaptive {
            history,
            averaging: self.averaging,
            loss_bound: self.loss_bound.unwrap_or(f64::NEG_INFINITY),
            largest_rate: LARGEST_RATE,
            loss_share: LOSS_SHARE,
            variance_decay: VARIANCE_DECAY,
            variance_floor: VARIANCE_FLOOR,
            loss_growth: LOSS_GROWTH,
            noise_growth: NOISE_GROWTH,
            cut_losses: CUT_LOSSES,
            settled: SETTLED as f64,
            decay_share: DECAY_SHARE,
            length_share: LENGTH_SHARE,
            smallest_matrix: SMALLEST_MATRIX,
            smallest_vector: SMALLEST_VECTOR,
            ramp: RAMP,
            ..RfdAdaptive::default()
        };
        trust::place(&mut step.adaptive);
        Ok(())
    }
}
