//! Steps on tensors in the process's own memory, on the CPU backend.

mod halves;
mod state;

use std::ops::Deref;

use super::core::Core;
use super::decision::{Norms, TotalSquares, lock};
use super::method::{History, Seen, StepPlan, TensorSums};
use super::{Group, Limit, Method, Options, Outcome, SkipReason, StepInput, StepReport, TensorSpec};
use crate::backend::cpu::{self, FloatEnvironment, StochasticBits, TensorUpdate, Threads, Velocity};
use crate::error::{Error, Result};
use crate::numeric::fold;
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
        let buffers = (core.parts().iter())
            .map(|part| {
                let (rows, columns) = if has_rows { (part.row_averages, part.rows.columns) } else { (0, 0) };
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
        self.check(params, grads, input.grad_scale)?;
        self.core.check_alone()?;
        if self.core.method().descent().lacks_measures(&self.history) {
            let values: Vec<GradRef<'_>> = params.iter().map(ParamMut::as_values).collect();
            self.measure(cpu::plain_squares(&values));
        }
        if input.found_inf != 0.0 {
            return Ok(self.skip(input, None, SkipReason::FoundInf));
        }
        let cpu::RowNorms { squares, directions, sampled, columns, rows } =
            match self.core.method().descent().has_rows() {
                false => cpu::RowNorms::without_rows(cpu::squared_norms(grads)),
                true => {
                    let moving = self.moving();
                    self.sums(grads, &moving, input.grad_scale).in_range(grads, &moving)
                }
            };
        // A tensor that does not count in the norm must still be finite.
        let all_finite = squares.squares.iter().all(|square| square.is_finite());
        let norms = Norms::new(self.total(&squares), input.grad_scale);
        if !all_finite {
            return Ok(self.skip(input, Some(norms), SkipReason::NonFiniteGradient));
        }
        let unscale = 1.0 / input.grad_scale;
        let tensors: Vec<_> = (self.core.specs().iter().zip(grads).enumerate())
            .map(|(k, (spec, grad))| {
                let takes_part = grad.len().is_some_and(|len| len > 0);
                takes_part.then_some(TensorSums {
                    squares: squares.squares[k] * unscale * unscale,
                    direction: directions.get(k).copied().unwrap_or_default(),
                    sampled: sampled.get(k).copied().unwrap_or_default(),
                    counts: spec.counts_in_norm,
                })
            })
            .collect();
        let averages = (columns.iter().zip(rows).enumerate())
            .map(|(k, (means, rows))| {
                let rows = rows.into_iter().map(|[average, _]| average).collect();
                tensors[k].is_some().then(|| cpu::Averages { columns: self.next_columns(k, means), rows })
            })
            .collect();
        let plan = self.decide(norms, &tensors, input);
        Ok(self.apply(params, grads, input, norms, plan, averages))
    }

    /// Before the first step, what the method takes from the parameters, whose squares these are.
    fn measure(&mut self, squares: Vec<f64>) {
        let descent = self.core.method().descent();
        if !descent.lacks_measures(&self.history) {
            return;
        }
        let mean_squares: Vec<f64> = (squares.iter().zip(self.core.parts()))
            .map(|(squares, part)| squares / (part.elements.max(1) as f64))
            .collect();
        descent.measure(&mut self.history, self.core.specs(), &mean_squares);
    }

    /// The averages of a tensor's columns after a step with these mean squares.
    fn next_columns(&self, tensor: usize, means: &[f64]) -> Vec<f64> {
        let rule = self.core.method().descent().column_variance(&self.history, tensor);
        cpu::Averages::next_columns(rule, &self.buffers[tensor].columns, means)
    }

    /// What a method with rows decides by.
    fn sums(&self, grads: &[GradRef<'_>], moving: &[cpu::Moving<'_>], grad_scale: f64) -> cpu::RowNorms {
        cpu::row_norms(grads, moving, 1.0 / grad_scale, self.applied_steps)
    }

    fn moving(&self) -> Vec<cpu::Moving<'_>> {
        (self.core.specs().iter().zip(&self.buffers).enumerate())
            .map(|(tensor, (spec, buffers))| cpu::Moving {
                dtype: spec.dtype,
                velocity: buffers.velocity.as_ref(),
                decay: self.core.velocity_decay_of(tensor),
                variances: self.variances(tensor, &buffers.rows, &buffers.column_scales),
                shares_rows: self.core.parts()[tensor].shared.is_some(),
            })
            .collect()
    }

    /// What the elements of a tensor weigh in the step to come, with these averages of rows.
    fn variances<'a>(
        &self,
        tensor: usize,
        averages: &'a [f64],
        column_scales: &'a [f32],
    ) -> cpu::Variances<'a> {
        let part = &self.core.parts()[tensor];
        let rule = self.core.method().descent().row_variance(&self.history, tensor, part.elements as f64);
        cpu::Variances { rows: part.rows, rule, averages, column_scales }
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

    /// The global norms: tensors fold in the fixed order; one that does not count is a 0.
    fn total(&self, norms: &cpu::SquaredNorms) -> TotalSquares {
        self.total_where(norms, |spec| spec.counts_in_norm)
    }

    fn total_where(&self, norms: &cpu::SquaredNorms, counts: fn(&TensorSpec) -> bool) -> TotalSquares {
        let counted = |weight: fn(&Group) -> f64| {
            let tensors = self.core.specs().iter().zip(&norms.squares).enumerate();
            fold(tensors.map(|(tensor, (spec, &square))| match counts(spec) {
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
        averages: Vec<Option<cpu::Averages>>,
    ) -> StepReport {
        let plan = match plan {
            Ok(plan) => plan,
            Err(reason) => return self.skip(input, Some(norms), reason),
        };
        let column_scales: Vec<Vec<f32>> =
            self.buffers.iter_mut().map(|buffers| std::mem::take(&mut buffers.column_scales)).collect();
        let own_rows: Vec<Option<Vec<f64>>> = (averages.iter().enumerate())
            .map(|(k, averages)| {
                let (part, len) = (&self.core.parts()[k], self.core.lens()[k]);
                averages.as_ref().map(|averages| part.own_rows(len, &averages.rows))
            })
            .collect();
        let variances: Vec<_> = (own_rows.iter().zip(&column_scales).enumerate())
            .map(|(k, (rows, scales))| rows.as_deref().map(|rows| self.variances(k, rows, scales)))
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
            let variances = variances.get(index).copied().flatten();
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
        for (k, averages) in averages.into_iter().enumerate() {
            // The averages of a tensor that takes no part wait.
            let Some(cpu::Averages { columns, rows }) = averages else { continue };
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

    fn check(&self, params: &[ParamMut<'_>], grads: &[GradRef<'_>], grad_scale: f64) -> Result<()> {
        if !(grad_scale > 0.0 && grad_scale.is_finite()) {
            let expected = "give the positive number that the gradients were multiplied with, 1 for none";
            return Err(Error::invalid("grad_scale", grad_scale, expected));
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
