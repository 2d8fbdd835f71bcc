//! Steps on tensors in the process's own memory, on the CPU backend.

mod state;

use std::ops::Deref;

use super::core::Core;
use super::decision::{Norms, TotalSquares, lock};
use super::method::{History, Seen, StepPlan, TensorSums};
use super::{
    Group, Limit, Method, Options, Outcome, SkipReason, SquaredNorm, StepInput, StepReport, TensorSpec,
};
use crate::backend::cpu::{self, FloatEnvironment, StochasticBits, TensorUpdate, Threads, Velocity};
use crate::error::{Error, Result};
use crate::numeric::{fold, power_of_two};
use crate::tensor::{GradRef, ParamMut};

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
    core: Core,
    buffers: Vec<Buffers>,
    history: History,
    applied_steps: u64,
    skipped_steps: u64,
    _threads: Threads,
}

/// What is kept of a tensor.
#[derive(Clone, Debug, Default)]
struct Buffers {
    /// Made by the first step that moves by it.
    velocity: Option<Velocity>,
    /// Made from the parameter by the first applied step.
    master: Option<Vec<f32>>,
    /// Averages of the squared gradients of its columns, and of its rows; empty for a method without rows.
    columns: Vec<f64>,
    rows: Vec<f64>,
    /// What columns weigh in the next step.
    column_scales: Vec<f32>,
}

impl Deref for Optimizer {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl Optimizer {
    /// An optimizer for the given tensors; the method is a fitted [`Model`](crate::covariance::Model),
    /// [`Fitted`](super::Fitted) or [`Adaptive`](super::Adaptive).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] names an option outside its domain, [`Error::Tensor`] a tensor that is
    /// listed twice, whose group does not exist or whose shape is too large.
    pub fn new(method: impl Into<Method>, options: Options, specs: Vec<TensorSpec>) -> Result<Self> {
        let core = Core::new(method, options, specs)?;
        let has_rows = core.method().descent().has_rows();
        let buffers = (core.rows().iter().zip(core.lens()))
            .map(|(rows, &len)| {
                let (rows, columns) = if has_rows { (rows.count(len), rows.columns) } else { (0, 0) };
                Buffers {
                    rows: vec![0.0; rows],
                    columns: vec![0.0; columns],
                    column_scales: vec![1.0; columns],
                    ..Buffers::default()
                }
            })
            .collect();
        Ok(Self {
            history: core.method().fresh_history(core.specs().len()),
            buffers,
            core,
            applied_steps: 0,
            skipped_steps: 0,
            _threads: Threads::new(),
        })
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
        self.core.change_options(|options| options.multiplier = multiplier)
    }

    /// Sets [`Options::max_step_size`] from the next step on.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a number that is not positive.
    pub fn set_max_step_size(&mut self, max_step_size: Option<f64>) -> Result<()> {
        self.core.change_options(|options| options.max_step_size = max_step_size)
    }

    /// Sets the options of one group from the next step on.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a group that does not exist or a value outside its domain.
    pub fn set_group(&mut self, index: usize, group: Group) -> Result<()> {
        self.core.set_group(index, group).map(drop)
    }

    /// Replaces the settings of the method from the next step on. Of [`Fitted`](super::Fitted) batch size and
    /// momentum may change, of [`Adaptive`](super::Adaptive) nothing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another method, a setting that can't change, or a value outside its
    /// domain.
    pub fn set_method(&mut self, method: impl Into<Method>) -> Result<()> {
        self.core.set_method(method.into())?;
        for (tensor, buffers) in self.buffers.iter_mut().enumerate() {
            if self.core.velocity_decay_of(tensor) == 0.0 {
                // Momentum that is switched on again starts at rest.
                buffers.velocity = None;
            }
        }
        Ok(())
    }

    /// One step: norms, step size, update.
    ///
    /// `params` and `grads` follow the order of the tensors given to [`Optimizer::new`]. NaN or infinite
    /// input, a zero gradient or `found_inf` skip the step; the report says so and nothing has changed.
    ///
    /// # Errors
    /// [`Error::Tensor`] names a tensor whose length or format differs from its description,
    /// [`Error::InvalidArgument`] a wrong number of tensors or a gradient scale that is not positive. Nothing
    /// has changed then.
    pub fn step(
        &mut self,
        params: &mut [ParamMut<'_>],
        grads: &[GradRef<'_>],
        input: &StepInput,
    ) -> Result<StepReport> {
        let _ieee = FloatEnvironment::ieee();
        self.check(params, grads, input)?;
        self.measure(params);
        if input.found_inf != 0.0 {
            return Ok(self.skip(input, None, SkipReason::FoundInf));
        }
        let cpu::RowNorms { squares, directions, sampled, averages } = self.sums(grads, input);
        // A tensor that does not count in the norm must still be finite.
        let all_finite = squares.squares.iter().all(|square| square.is_finite());
        let norms = Norms::new(self.total(&squares), input.grad_scale);
        if !all_finite {
            return Ok(self.skip(input, Some(norms), SkipReason::NonFiniteGradient));
        }
        let unscale = 1.0 / input.grad_scale;
        let tensors: Vec<_> = (grads.iter().zip(self.core.lens()).enumerate())
            .map(|(k, (grad, &len))| {
                let squares = squares.squares[k] * unscale * unscale;
                let direction = directions.get(k).copied().unwrap_or_default();
                let takes_part = len > 0 && !matches!(grad, GradRef::Missing);
                let sampled = sampled.get(k).copied().unwrap_or_default();
                takes_part.then_some(TensorSums { squares, direction, sampled })
            })
            .collect();
        let plan = self.decide(norms, &tensors, input);
        Ok(self.apply(params, grads, input, norms, plan, averages))
    }

    /// Before the first step, what the method takes from the parameters.
    fn measure(&mut self, params: &[ParamMut<'_>]) {
        let descent = self.core.method().descent();
        if !descent.lacks_measures(&self.history) {
            return;
        }
        let values: Vec<GradRef<'_>> = params.iter().map(ParamMut::as_values).collect();
        let mean_squares: Vec<f64> = (cpu::plain_squares(&values).iter().zip(self.core.lens()))
            .map(|(squares, &len)| squares / (len.max(1) as f64))
            .collect();
        descent.measure(&mut self.history, self.core.specs(), &mean_squares);
    }

    /// What the method decides by.
    fn sums(&self, grads: &[GradRef<'_>], input: &StepInput) -> cpu::RowNorms {
        if !self.core.method().descent().has_rows() {
            return cpu::RowNorms::without_rows(cpu::squared_norms(grads));
        }
        let moving: Vec<_> = (self.core.specs().iter().zip(&self.buffers).enumerate())
            .map(|(tensor, (spec, buffers))| cpu::Moving {
                dtype: spec.dtype,
                velocity: buffers.velocity.as_ref(),
                decay: self.core.velocity_decay_of(tensor),
                variances: self.variances(tensor, &buffers.rows, &buffers.column_scales),
                column_averages: &buffers.columns,
                column_rule: self.core.method().descent().column_variance(&self.history, tensor),
            })
            .collect();
        cpu::row_norms(grads, &moving, 1.0 / input.grad_scale, self.applied_steps)
    }

    /// What the elements of a tensor weigh in the step to come, with these averages of rows.
    fn variances<'a>(
        &self,
        tensor: usize,
        averages: &'a [f64],
        column_scales: &'a [f32],
    ) -> cpu::Variances<'a> {
        let len = self.core.lens()[tensor] as f64;
        let rule = self.core.method().descent().row_variance(&self.history, tensor, len);
        cpu::Variances { rows: self.core.rows()[tensor], rule, averages, column_scales }
    }

    fn decide(
        &self,
        norms: Norms,
        tensors: &[Option<TensorSums>],
        input: &StepInput,
    ) -> std::result::Result<StepPlan, SkipReason> {
        let seen = Seen { core: &self.core, input, norms, applied_steps: self.applied_steps, tensors };
        self.core.method().descent().decide(&seen, &self.history)
    }

    /// The first half of a step in sharded training: squared norms of this rank's gradients that count in the
    /// norm.
    ///
    /// The squares are plain f64: f64 gradients beyond 10¹⁵⁰ overflow here, where [`Optimizer::step`]
    /// rescales them. NaN where any gradient is not finite, counted or not; a sum over ranks stays NaN, and
    /// all skip.
    ///
    /// # Errors
    /// As [`Optimizer::step`], for the gradients; [`Error::InvalidArgument`] with a method that needs more
    /// than norms over all tensors.
    pub fn local_squared_norm(&self, grads: &[GradRef<'_>]) -> Result<SquaredNorm> {
        let _ieee = FloatEnvironment::ieee();
        self.check_grads(grads)?;
        self.core.method().descent().check_sharded()?;
        let norms = cpu::squared_norms(grads);
        if norms.squares.iter().any(|square| !square.is_finite()) {
            // Also from a tensor that does not count: then every rank has to skip.
            return Ok(SquaredNorm { euclidean: f64::NAN, sigma: f64::NAN });
        }
        let total = self.total(&norms);
        let square = |s: f64| s * power_of_two(total.exponent) * power_of_two(total.exponent);
        Ok(SquaredNorm { euclidean: square(total.euclidean), sigma: square(total.sigma) })
    }

    /// The second half of a step in sharded training: the update with the norm of all ranks. Every rank must
    /// give the same `norm` and `input`, both reduced over the ranks; then all take bitwise the same step.
    ///
    /// # Errors
    /// As [`Optimizer::step`]; [`Error::InvalidArgument`] with a method that needs more, and when a group has
    /// norm lock: a shard doesn't know the norms that they need.
    pub fn step_with_norm(
        &mut self,
        params: &mut [ParamMut<'_>],
        grads: &[GradRef<'_>],
        norm: SquaredNorm,
        input: &StepInput,
    ) -> Result<StepReport> {
        let _ieee = FloatEnvironment::ieee();
        self.check(params, grads, input)?;
        self.core.check_sharded()?;
        if input.found_inf != 0.0 {
            return Ok(self.skip(input, None, SkipReason::FoundInf));
        }
        let total = TotalSquares { euclidean: norm.euclidean, sigma: norm.sigma, exponent: 0 };
        let norms = Norms::new(total, input.grad_scale);
        let plan = self.decide(norms, &[], input);
        Ok(self.apply(params, grads, input, norms, plan, Vec::new()))
    }

    /// The global norms: tensors fold in the fixed order; one that does not count is a 0.
    fn total(&self, norms: &cpu::SquaredNorms) -> TotalSquares {
        let counted = |weight: fn(&Group) -> f64| {
            let tensors = self.core.specs().iter().zip(&norms.squares).enumerate();
            fold(tensors.map(|(tensor, (spec, &square))| match spec.counts_in_norm {
                true => weight(self.core.group_of(tensor)) * square,
                false => 0.0,
            }))
        };
        TotalSquares {
            euclidean: counted(|_| 1.0),
            sigma: counted(|group| group.length_scale_factor * group.length_scale_factor),
            exponent: norms.exponent,
        }
    }

    fn apply(
        &mut self,
        params: &mut [ParamMut<'_>],
        grads: &[GradRef<'_>],
        input: &StepInput,
        norms: Norms,
        plan: std::result::Result<StepPlan, SkipReason>,
        averages: Vec<cpu::Averages>,
    ) -> StepReport {
        let plan = match plan {
            Ok(plan) => plan,
            Err(reason) => return self.skip(input, Some(norms), reason),
        };
        let column_scales: Vec<Vec<f32>> =
            self.buffers.iter_mut().map(|buffers| std::mem::take(&mut buffers.column_scales)).collect();
        let variances: Vec<_> = (averages.iter().zip(&column_scales).enumerate())
            .map(|(k, (averages, scales))| self.variances(k, &averages.rows, scales))
            .collect();
        let Self { core, buffers, .. } = self;
        let options = core.options();
        let mut updates = Vec::with_capacity(params.len());
        let tensors = core.specs().iter().zip(&mut *buffers).zip(params).zip(grads).enumerate();
        for (index, (((spec, buffers), param), &grad)) in tensors {
            if matches!(grad, GradRef::Missing) {
                continue;
            }
            let (group, decay, len) =
                (core.group_of(index), core.velocity_decay_of(index), core.lens()[index]);
            if options.master_weights && spec.dtype.is_half() {
                buffers.master.get_or_insert_with(|| cpu::to_f32(param));
            }
            if decay > 0.0 {
                buffers.velocity.get_or_insert_with(|| Velocity::zeros(spec.dtype, len));
            }
            let velocity = buffers.velocity.as_mut().filter(|_| decay > 0.0);
            let mut scalars = plan.decision.scalars(group, decay, plan.scale(index));
            let variances = variances.get(index).copied();
            if group.norm_lock && len > 1 {
                let sums = cpu::lock_sums(
                    param,
                    buffers.master.as_deref(),
                    grad,
                    velocity.as_deref(),
                    &scalars,
                    variances,
                );
                scalars = lock(scalars, sums);
            }
            let rounds = spec.dtype.is_half() && buffers.master.is_none();
            updates.push(TensorUpdate {
                param: param.reborrow(),
                grad,
                velocity,
                master: buffers.master.as_deref_mut(),
                scalars,
                variances,
                stochastic: options.stochastic_rounding.filter(|_| rounds).map(|seed| StochasticBits {
                    seed,
                    step: self.applied_steps as u32,
                    tensor: index as u32,
                    first: spec.offset,
                }),
            });
        }
        cpu::update(updates);
        self.applied_steps += 1;
        self.history = plan.history;
        for (buffers, scales) in self.buffers.iter_mut().zip(column_scales) {
            buffers.column_scales = scales;
        }
        for (k, cpu::Averages { columns, rows }) in averages.into_iter().enumerate() {
            if matches!(grads[k], GradRef::Missing) {
                continue;
            }
            let rule = self.core.method().descent().column_variance(&self.history, k);
            let buffers = &mut self.buffers[k];
            buffers.column_scales = columns.iter().map(|&average| rule.scale(average)).collect();
            (buffers.columns, buffers.rows) = (columns, rows);
        }
        StepReport {
            outcome: Outcome::Applied,
            loss: input.loss,
            grad_norm: norms.euclidean,
            sigma_norm: plan.decision.sigma_norm,
            theta: plan.decision.theta,
            step_size: plan.decision.step_size,
            learning_rate: plan.decision.learning_rate,
            trust: plan.decision.trust,
            limit: plan.decision.limit,
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
            trust: 0.0,
            limit: Limit::None,
            applied_steps: self.applied_steps,
            skipped_steps: self.skipped_steps,
        }
    }

    fn check(&self, params: &[ParamMut<'_>], grads: &[GradRef<'_>], input: &StepInput) -> Result<()> {
        if !(input.grad_scale > 0.0 && input.grad_scale.is_finite()) {
            let expected = "give the positive number that the gradients were multiplied with, 1 for none";
            return Err(Error::invalid("grad_scale", input.grad_scale, expected));
        }
        self.core.check_count("params", params.len())?;
        for ((spec, len), param) in self.core.specs().iter().zip(self.core.lens()).zip(params) {
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
        self.core.check_count("grads", grads.len())?;
        for ((spec, own), grad) in self.core.specs().iter().zip(self.core.lens()).zip(grads) {
            if let Some(len) = grad.len()
                && len != *own
            {
                let problem = format!("has {own} elements but its gradient has {len}");
                return Err(Error::tensor(&spec.name, problem));
            }
        }
        Ok(())
    }
}
