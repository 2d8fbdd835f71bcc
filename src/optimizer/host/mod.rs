//! Steps on tensors in the process's own memory, on the CPU backend.

mod state;

use super::adaptive::{Advance, History, Seen, Sums};
use super::decision::{Decision, Norms, TotalSquares, decide, lock};
use super::{
    Adaptive, Group, Method, Options, Outcome, SkipReason, SquaredNorm, StepInput, StepReport, TensorSpec,
    refuse_norm_lock, validate,
};
use crate::backend::cpu::{self, FloatEnvironment, Momentum, StochasticBits, TensorUpdate};
use crate::covariance::Model;
use crate::error::{Error, Result};
use crate::numeric::{fold, power_of_two};
use crate::tensor::{DType, GradRef, ParamMut};

/// Random Function Descent over a fixed list of tensors.
///
/// ```
/// use rfdescent::covariance::{Family, Model};
/// use rfdescent::optimizer::{Optimizer, Options, StepInput, TensorSpec};
/// use rfdescent::{DType, GradRef, Moments, ParamMut};
///
/// # fn main() -> rfdescent::Result<()> {
/// let moments = Moments {
///     mean: 2.3,
///     variance: 0.01,
///     noise_variance: 0.9,
///     grad_variance: 4.0,
///     noise_grad_variance: 200.0,
///     dims: 3,
/// };
/// let model = Model::new(Family::SquaredExponential, moments)?;
/// let specs = vec![TensorSpec::new("weight", &[3], DType::F32)];
/// let mut optimizer = Optimizer::new(model, Options::default(), specs)?;
///
/// let mut weight = [0.5_f32, -0.5, 1.0];
/// let gradient = [1.0_f32, 0.0, 2.0];
/// let report = optimizer.step(
///     &mut [ParamMut::from(&mut weight[..])],
///     &[GradRef::from(&gradient[..])],
///     &StepInput::new(2.1),
/// )?;
/// assert!(report.step_size > 0.0 && weight[0] < 0.5);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Optimizer {
    method: Method,
    /// What the adaptive method remembers; of no tensor with RFD as published.
    history: History,
    options: Options,
    tensors: Vec<TensorState>,
    applied_steps: u64,
    skipped_steps: u64,
}

/// A tensor and what the optimizer remembers of it.
#[derive(Clone, Debug)]
struct TensorState {
    spec: TensorSpec,
    len: usize,
    /// Made by the first step with momentum.
    momentum: Option<Momentum>,
    /// Made from the parameter by the first applied step.
    master: Option<Vec<f32>>,
}

/// What a step is going to do.
struct StepPlan {
    decision: Decision,
    /// By tensor: multiplies what all tensors' updates share.
    scales: Vec<f64>,
    history: History,
}

impl Optimizer {
    /// An optimizer for the given tensors; the method is a fitted [`Model`] or [`Adaptive`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] names an option outside its domain or of another method, [`Error::Tensor`] a tensor that is listed twice, whose
    /// group does not exist or whose shape is too large.
    pub fn new(method: impl Into<Method>, options: Options, specs: Vec<TensorSpec>) -> Result<Self> {
        let method = method.into();
        let options = method.prepare(options)?;
        method.check_groups(&specs)?;
        let lengths = validate(&options, &specs)?;
        let tensors: Vec<TensorState> = specs
            .into_iter()
            .zip(lengths)
            .map(|(spec, len)| TensorState { spec, len, momentum: None, master: None })
            .collect();
        let history = History::new(if method.is_adaptive() { tensors.len() } else { 0 });
        Ok(Self { method, history, options, tensors, applied_steps: 0, skipped_steps: 0 })
    }

    /// How steps are chosen.
    pub fn method(&self) -> &Method {
        &self.method
    }

    /// The fitted covariance model; `None` with the adaptive method.
    pub fn model(&self) -> Option<&Model> {
        self.method.model()
    }

    /// The options in force.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The tensors, in the order in which steps expect them.
    pub fn specs(&self) -> impl ExactSizeIterator<Item = &TensorSpec> {
        self.tensors.iter().map(|t| &t.spec)
    }

    /// Steps applied so far.
    pub fn applied_steps(&self) -> u64 {
        self.applied_steps
    }

    /// Steps skipped so far.
    pub fn skipped_steps(&self) -> u64 {
        self.skipped_steps
    }

    /// Sets [`Options::multiplier`] from the next step on.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a negative or non-finite number.
    pub fn set_multiplier(&mut self, multiplier: f64) -> Result<()> {
        self.change_options(|options| options.multiplier = multiplier)
    }

    /// Sets [`Options::inv_batch_size`] from the next step on.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a negative or non-finite number.
    pub fn set_inv_batch_size(&mut self, inv_batch_size: f64) -> Result<()> {
        self.change_options(|options| options.inv_batch_size = inv_batch_size)
    }

    /// Sets the options of one group from the next step on.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a group that does not exist or a value outside its domain.
    pub fn set_group(&mut self, index: usize, group: Group) -> Result<()> {
        let count = self.options.groups.len();
        if index >= count {
            return Err(Error::invalid("group", index, format!("there are {count} groups")));
        }
        let group = self.method.prepare_group(index, group)?;
        self.options.groups[index] = group;
        if group.momentum == 0.0 {
            // Momentum that is switched on again starts at rest.
            for tensor in self.tensors.iter_mut().filter(|tensor| tensor.spec.group == index) {
                tensor.momentum = None;
            }
        }
        Ok(())
    }

    fn change_options(&mut self, change: impl FnOnce(&mut Options)) -> Result<()> {
        let mut options = self.options.clone();
        change(&mut options);
        self.options = self.method.prepare(options)?;
        Ok(())
    }

    /// One step: norms, step size, update.
    ///
    /// `params` and `grads` follow the order of the tensors given to [`Optimizer::new`]. NaN or infinite input, a zero
    /// gradient or `found_inf` skip the step; the report says so and nothing has changed.
    ///
    /// # Errors
    /// [`Error::Tensor`] names a tensor whose length or format differs from its description, [`Error::InvalidArgument`] a
    /// wrong number of tensors or a gradient scale that is not positive. Nothing has changed then.
    pub fn step(
        &mut self,
        params: &mut [ParamMut<'_>],
        grads: &[GradRef<'_>],
        input: &StepInput,
    ) -> Result<StepReport> {
        let _ieee = FloatEnvironment::ieee();
        self.check(params, grads, input)?;
        if input.found_inf != 0.0 {
            return Ok(self.skip(input, None, SkipReason::FoundInf));
        }
        let (squares, directions) = match &self.method {
            Method::Adaptive(rule) if rule.averaging > 0.0 => {
                let velocities: Vec<_> =
                    self.tensors.iter().map(|t| (t.spec.dtype, t.momentum.as_ref())).collect();
                let (squares, directions) =
                    cpu::averaged_norms(grads, &velocities, rule.averaging, 1.0 / input.grad_scale);
                (squares, Some(directions))
            }
            _ => (cpu::squared_norms(grads), None),
        };
        // A tensor that does not count in the norm must still be finite.
        let all_finite = squares.squares.iter().all(|square| square.is_finite());
        let norms = Norms::new(self.total(&squares), input.grad_scale);
        if !all_finite {
            return Ok(self.skip(input, Some(norms), SkipReason::NonFiniteGradient));
        }
        let plan = match &self.method {
            Method::Published(model) => self.plan_published(model, norms, input),
            Method::Adaptive(rule) => {
                let seen = self.seen(grads, &squares, directions.as_deref(), input);
                self.plan_adaptive(rule, &seen, norms, input)
            }
        };
        Ok(self.apply(params, grads, input, norms, plan))
    }

    /// What the adaptive method sees of each tensor. `directions` are the squared norms of new velocities, where gradients
    /// are averaged.
    fn seen(
        &self,
        grads: &[GradRef<'_>],
        squares: &cpu::SquaredNorms,
        directions: Option<&[f64]>,
        input: &StepInput,
    ) -> Vec<Seen<'_>> {
        let unscale = 1.0 / input.grad_scale;
        (self.tensors.iter().zip(grads).enumerate())
            .map(|(k, (tensor, grad))| {
                let takes_part = tensor.len > 0 && !matches!(grad, GradRef::Missing);
                let squares = squares.squares[k] * unscale * unscale;
                Seen {
                    group: &self.options.groups[tensor.spec.group],
                    counts_in_norm: tensor.spec.counts_in_norm,
                    len: tensor.len,
                    sums: takes_part
                        .then(|| Sums { squares, direction: directions.map_or(squares, |sums| sums[k]) }),
                }
            })
            .collect()
    }

    /// The first half of a step in sharded training: squared norms of this rank's gradients that count in the norm.
    ///
    /// The squares are plain f64: f64 gradients beyond 10¹⁵⁰ overflow here, where [`Optimizer::step`] rescales them. NaN where
    /// any gradient is not finite, counted or not; a sum over ranks stays NaN, and all skip.
    ///
    /// # Errors
    /// As [`Optimizer::step`], for the gradients; [`Error::InvalidArgument`] with the adaptive method.
    pub fn local_squared_norm(&self, grads: &[GradRef<'_>]) -> Result<SquaredNorm> {
        let _ieee = FloatEnvironment::ieee();
        self.check_grads(grads)?;
        self.method.published()?;
        let norms = cpu::squared_norms(grads);
        if norms.squares.iter().any(|square| !square.is_finite()) {
            // Also from a tensor that does not count: then every rank has to skip.
            return Ok(SquaredNorm { euclidean: f64::NAN, sigma: f64::NAN });
        }
        let total = self.total(&norms);
        let square = |s: f64| s * power_of_two(total.exponent) * power_of_two(total.exponent);
        Ok(SquaredNorm { euclidean: square(total.euclidean), sigma: square(total.sigma) })
    }

    /// The second half of a step in sharded training: the update with the norm of all ranks. Every rank must give the same
    /// `norm` and `input`, both reduced over the ranks; then all take bitwise the same step.
    ///
    /// # Errors
    /// As [`Optimizer::step`]; [`Error::InvalidArgument`] with the adaptive method and when a group has norm lock:
    /// a shard doesn't know the norms that they need.
    pub fn step_with_norm(
        &mut self,
        params: &mut [ParamMut<'_>],
        grads: &[GradRef<'_>],
        norm: SquaredNorm,
        input: &StepInput,
    ) -> Result<StepReport> {
        let _ieee = FloatEnvironment::ieee();
        self.check(params, grads, input)?;
        let model = self.method.published()?;
        refuse_norm_lock(&self.options)?;
        if input.found_inf != 0.0 {
            return Ok(self.skip(input, None, SkipReason::FoundInf));
        }
        let total = TotalSquares { euclidean: norm.euclidean, sigma: norm.sigma, exponent: 0 };
        let norms = Norms::new(total, input.grad_scale);
        let plan = self.plan_published(model, norms, input);
        Ok(self.apply(params, grads, input, norms, plan))
    }

    /// The global norms: tensors fold in the fixed order; one that does not count is a 0.
    fn total(&self, norms: &cpu::SquaredNorms) -> TotalSquares {
        let counted = |weight: fn(&Group) -> f64| {
            let terms: Vec<f64> = self
                .tensors
                .iter()
                .zip(&norms.squares)
                .map(|(tensor, &square)| match tensor.spec.counts_in_norm {
                    true => weight(&self.options.groups[tensor.spec.group]) * square,
                    false => 0.0,
                })
                .collect();
            fold(&terms)
        };
        TotalSquares {
            euclidean: counted(|_| 1.0),
            sigma: counted(|group| group.length_scale_factor * group.length_scale_factor),
            exponent: norms.exponent,
        }
    }

    fn plan_published(
        &self,
        model: &Model,
        norms: Norms,
        input: &StepInput,
    ) -> std::result::Result<StepPlan, SkipReason> {
        let decision = decide(model, &self.options, norms, input)?;
        if !self.options.groups.iter().all(|group| decision.fits_velocities(group, 1.0)) {
            return Err(SkipReason::OutOfRange);
        }
        Ok(StepPlan { decision, scales: vec![1.0; self.tensors.len()], history: self.history.clone() })
    }

    fn plan_adaptive(
        &self,
        rule: &Adaptive,
        seen: &[Seen<'_>],
        norms: Norms,
        input: &StepInput,
    ) -> std::result::Result<StepPlan, SkipReason> {
        let Advance { history, decision, scales } =
            self.history.advance(rule, &self.options, self.applied_steps, seen, norms, input)?;
        let fits = |(seen, &scale): (&Seen<'_>, _)| decision.fits_velocities(seen.group, scale);
        if !seen.iter().zip(&scales).all(fits) {
            return Err(SkipReason::OutOfRange);
        }
        Ok(StepPlan { decision, scales, history })
    }

    fn apply(
        &mut self,
        params: &mut [ParamMut<'_>],
        grads: &[GradRef<'_>],
        input: &StepInput,
        norms: Norms,
        plan: std::result::Result<StepPlan, SkipReason>,
    ) -> StepReport {
        let StepPlan { decision, scales, history } = match plan {
            Ok(plan) => plan,
            Err(reason) => return self.skip(input, Some(norms), reason),
        };
        let mut updates = Vec::with_capacity(params.len());
        let tensors = self.tensors.iter_mut().zip(params).zip(grads).enumerate();
        for (index, ((tensor, param), &grad)) in tensors {
            if matches!(grad, GradRef::Missing) {
                continue;
            }
            let group = &self.options.groups[tensor.spec.group];
            let half = matches!(tensor.spec.dtype, DType::F16 | DType::BF16);
            if self.options.master_weights && half {
                tensor.master.get_or_insert_with(|| cpu::to_f32(param));
            }
            if group.momentum > 0.0 {
                tensor.momentum.get_or_insert_with(|| Momentum::zeros(tensor.spec.dtype, tensor.len));
            }
            let momentum = tensor.momentum.as_mut().filter(|_| group.momentum > 0.0);
            let mut scalars = decision.scalars(group, scales[index]);
            if group.norm_lock && tensor.len > 1 {
                let sums =
                    cpu::lock_sums(param, tensor.master.as_deref(), grad, momentum.as_deref(), &scalars);
                scalars = lock(scalars, sums);
            }
            let stochastic = self.options.stochastic_rounding.filter(|_| half && tensor.master.is_none());
            updates.push(TensorUpdate {
                param: param.reborrow(),
                grad,
                momentum,
                master: tensor.master.as_deref_mut(),
                scalars,
                stochastic: stochastic.map(|seed| StochasticBits {
                    seed,
                    step: self.applied_steps as u32,
                    tensor: index as u32,
                    first: tensor.spec.offset,
                }),
            });
        }
        cpu::update(updates);
        self.applied_steps += 1;
        self.history = history;
        StepReport {
            outcome: Outcome::Applied,
            loss: input.loss,
            grad_norm: norms.euclidean,
            sigma_norm: decision.sigma_norm,
            theta: decision.theta,
            step_size: decision.step_size,
            learning_rate: decision.learning_rate,
            applied_steps: self.applied_steps,
            skipped_steps: self.skipped_steps,
        }
    }

    fn skip(&mut self, input: &StepInput, norms: Option<Norms>, reason: SkipReason) -> StepReport {
        self.skipped_steps += 1;
        StepReport {
            outcome: Outcome::Skipped(reason),
            loss: input.loss,
            grad_norm: norms.map_or(0.0, |n| n.euclidean),
            sigma_norm: norms.map_or(0.0, |n| n.sigma),
            theta: 0.0,
            step_size: 0.0,
            learning_rate: 0.0,
            applied_steps: self.applied_steps,
            skipped_steps: self.skipped_steps,
        }
    }

    fn check(&self, params: &[ParamMut<'_>], grads: &[GradRef<'_>], input: &StepInput) -> Result<()> {
        if !(input.grad_scale > 0.0 && input.grad_scale.is_finite()) {
            let expected = "give the positive number that the gradients were multiplied with, 1 for none";
            return Err(Error::invalid("grad_scale", input.grad_scale, expected));
        }
        self.check_count("params", params.len())?;
        for (tensor, param) in self.tensors.iter().zip(params) {
            let TensorState { spec, len, .. } = tensor;
            if param.dtype() != spec.dtype {
                let problem = format!("was described as {} but is {}", spec.dtype, param.dtype());
                return Err(Error::tensor(&spec.name, problem));
            }
            if param.len() != *len {
                let problem = format!("was described with {len} elements but has {}", param.len());
                return Err(Error::tensor(&spec.name, problem));
            }
        }
        self.check_grads(grads)
    }

    fn check_grads(&self, grads: &[GradRef<'_>]) -> Result<()> {
        self.check_count("grads", grads.len())?;
        for (tensor, grad) in self.tensors.iter().zip(grads) {
            if let Some(len) = grad.len()
                && len != tensor.len
            {
                let problem = format!("has {} elements but its gradient has {len}", tensor.len);
                return Err(Error::tensor(&tensor.spec.name, problem));
            }
        }
        Ok(())
    }

    fn check_count(&self, what: &str, count: usize) -> Result<()> {
        if count == self.tensors.len() {
            return Ok(());
        }
        let expected =
            format!("the optimizer was made for {} tensors; give one for each", self.tensors.len());
        Err(Error::invalid(&format!("number of {what}"), count, expected))
    }
}
