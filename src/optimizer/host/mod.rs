//! Steps on tensors in the process's own memory, on the CPU backend.

mod halves;
mod state;

use std::ops::Deref;

use super::core::{Brief, Core};
use super::decision::{Decision, Norms, TotalSquares, lock};
use super::method::{History, Next, Seen, TensorSums};
use super::{Group, Limit, Method, Options, Outcome, SkipReason, StepInput, StepReport, TensorSpec};
use crate::backend::cpu::{
    self, FloatEnvironment, StochasticBits, TensorUpdate, Threads, UpdateScalars, Velocity,
};
use crate::error::{Error, Result};
use crate::numeric::fold;
use crate::rows::Rows;
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
    /// `None` before the first step, and while one is taken.
    space: Option<Box<Space>>,
    _threads: Threads,
}

/// What is kept of a tensor.
#[derive(Clone, Debug, Default)]
struct Buffers {
    /// Made by the first step that moves by it.
    velocity: Option<Velocity>,
    /// Made from the parameter by the first applied step.
    master: Option<Vec<f32>>,
    /// Of the squared gradients; empty for a method without rows.
    averages: cpu::Averages,
    /// The same with the step that is being taken, if the tensor takes part in it.
    next: cpu::Averages,
    /// What the rows of this part weigh in the step that is being taken.
    row_scales: Vec<f64>,
    /// What columns weigh in the next step.
    column_scales: Vec<f32>,
}

/// What a step works out, in memory that the next one uses again.
#[derive(Clone, Debug, Default)]
struct Space {
    /// By tensor, how the variances of its rows change. Empty for a method without rows.
    rules: Vec<cpu::RowVariance>,
    norms: cpu::Norms,
    /// By tensor, `None` for one that takes no part. Empty for a method without rows.
    tensors: Vec<Option<TensorSums>>,
    next: Next,
    /// By group.
    of_groups: Vec<UpdateScalars>,
    /// By tensor.
    scalars: Vec<UpdateScalars>,
    locks: cpu::Sums<3>,
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
                    averages: cpu::Averages { columns: vec![0.0; columns], rows: vec![0.0; rows] },
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
            space: None,
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
        let mut space = self.space.take().unwrap_or_default();
        let report = self.step_in(&mut space, params, grads, input);
        self.space = Some(space);
        Ok(report)
    }

    fn step_in(
        &mut self,
        space: &mut Space,
        params: &mut [ParamMut<'_>],
        grads: &[GradRef<'_>],
        input: &StepInput,
    ) -> StepReport {
        self.form_norms(grads, input.grad_scale, true, space);
        let cpu::Norms { squares, directions, sampled, columns, rows, .. } = &space.norms;
        // A tensor that does not count in the norm must still be finite.
        let all_finite = squares.squares.iter().all(|square| square.is_finite());
        let norms = Norms::new(self.total(squares), input.grad_scale);
        if !all_finite {
            return self.skip(input, Some(norms), SkipReason::NonFiniteGradient);
        }
        space.tensors.clear();
        let unscale = 1.0 / input.grad_scale;
        let descent = self.core.method().descent();
        for (k, (means, rows)) in columns.iter().zip(rows).enumerate() {
            if grads[k].is_empty() {
                space.tensors.push(None);
                continue;
            }
            space.tensors.push(Some(TensorSums {
                squares: squares.squares[k] * unscale * unscale,
                direction: directions[k],
                sampled: sampled[k],
                counts: self.core.briefs()[k].counts_in_norm,
            }));
            let Buffers { averages, next, row_scales, .. } = &mut self.buffers[k];
            if !means.is_empty() {
                next.take_columns(descent.column_variance(&self.history, k), &averages.columns, means);
            }
            next.rows.clear();
            next.rows.extend(rows.iter().map(|&[average, _]| average));
            row_scales.clear();
            row_scales.extend(rows.iter().map(|&[_, scale]| scale));
        }
        self.take(space, params, grads, input, norms)
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

    /// What the method decides by; `rescales` as in [`cpu::Norms::form_with_rows`].
    fn form_norms(&self, grads: &[GradRef<'_>], grad_scale: f64, rescales: bool, space: &mut Space) {
        let Self { core, buffers, .. } = self;
        if !core.method().descent().has_rows() {
            return space.norms.form_without_rows(grads);
        }
        self.find_rules(&mut space.rules);
        let rules = &space.rules;
        let moving = |tensor: usize| {
            let (part, buffers): (_, &Buffers) = (&core.parts()[tensor], &buffers[tensor]);
            cpu::Moving {
                dtype: core.briefs()[tensor].dtype,
                velocity: buffers.velocity.as_ref(),
                decay: core.velocity_decay_of(tensor),
                rows: part.rows,
                rule: rules[tensor],
                averages: &buffers.averages.rows,
                column_scales: &buffers.column_scales,
                shares_rows: part.shared.is_some(),
            }
        };
        let rows_of = |tensor: usize| core.parts()[tensor].rows;
        let unscale = 1.0 / grad_scale;
        space.norms.form_with_rows(grads, rows_of, moving, unscale, self.applied_steps, rescales);
    }

    /// How the variances of each tensor's rows change, for a method that has rows.
    fn find_rules(&self, rules: &mut Vec<cpu::RowVariance>) {
        self.core.method().descent().row_variances(&self.history, self.core.parts(), rules);
    }

    /// The global norms: tensors fold in the fixed order; one that does not count is a 0.
    fn total(&self, norms: &cpu::SquaredNorms) -> TotalSquares {
        self.total_where(norms, |brief| brief.counts_in_norm)
    }

    fn total_where(&self, norms: &cpu::SquaredNorms, counts: impl Fn(&Brief) -> bool) -> TotalSquares {
        let groups = &self.core.options().groups;
        let tensors = || self.core.briefs().iter().zip(&norms.squares);
        let euclidean = fold(tensors().map(|(brief, &square)| if counts(brief) { square } else { 0.0 }));
        let sigma = if groups.iter().all(|group| group.length_scale_factor == 1.0) {
            euclidean
        } else {
            fold(tensors().map(|(brief, &square)| {
                let factor = groups[brief.group].length_scale_factor;
                if counts(brief) { factor * factor * square } else { 0.0 }
            }))
        };
        TotalSquares { euclidean, sigma, exponent: norms.exponent }
    }

    /// Decides on the step and takes it, with the sums of tensors and the next averages of those that take
    /// part.
    fn take(
        &mut self,
        space: &mut Space,
        params: &mut [ParamMut<'_>],
        grads: &[GradRef<'_>],
        input: &StepInput,
        norms: Norms,
    ) -> StepReport {
        let Space { tensors, next, .. } = space;
        let seen = Seen { core: &self.core, input, norms, applied_steps: self.applied_steps, tensors };
        let decision = match self.core.method().descent().decide(&seen, &self.history, next) {
            Ok(decision) => decision,
            Err(reason) => return self.skip(input, Some(norms), reason),
        };
        self.find_scalars(space, params, grads, &decision);
        self.update(space, params, grads);
        self.applied_steps += 1;
        if space.tensors.is_empty() {
            return self.applied(input, norms, &decision);
        }
        std::mem::swap(&mut self.history, &mut space.next.history);
        let descent = self.core.method().descent();
        // The averages of a tensor that takes no part wait.
        for (k, buffers) in self.buffers.iter_mut().enumerate().filter(|(k, _)| space.has_averages(*k)) {
            std::mem::swap(&mut buffers.averages, &mut buffers.next);
            if buffers.column_scales.is_empty() {
                continue;
            }
            let rule = descent.column_variance(&self.history, k);
            for (scale, &average) in buffers.column_scales.iter_mut().zip(&buffers.averages.columns) {
                *scale = rule.scale(average);
            }
        }
        self.applied(input, norms, &decision)
    }

    /// The scalars of each tensor's update, with norm lock; makes the memory that updates need.
    fn find_scalars(
        &mut self,
        space: &mut Space,
        params: &[ParamMut<'_>],
        grads: &[GradRef<'_>],
        decision: &Decision,
    ) {
        let Self { core, buffers, .. } = self;
        let (groups, descent) = (&core.options().groups, core.method().descent());
        space.of_groups.clear();
        for (index, group) in groups.iter().enumerate() {
            space.of_groups.push(decision.scalars(group, descent.velocity_decay(index)));
        }
        space.scalars.clear();
        let tensors = params.iter().zip(grads).zip(buffers).zip(core.briefs()).enumerate();
        for (k, (((param, &grad), buffers), &Brief { dtype, group, .. })) in tensors {
            if matches!(grad, GradRef::Missing) {
                space.scalars.push(UpdateScalars::default());
                continue;
            }
            let of_group = &space.of_groups[group];
            let coefficient = of_group.coefficient * space.next.scale(k);
            let mut own = UpdateScalars { coefficient, ..*of_group };
            if core.options().master_weights && dtype.is_half() {
                buffers.master.get_or_insert_with(|| cpu::to_f32(param));
            }
            let (moves, len) = (own.velocity_decay > 0.0, core.lens()[k]);
            if moves && buffers.velocity.is_none() {
                buffers.velocity = Some(Velocity::zeros(dtype, len));
            }
            if groups[group].norm_lock && len > 1 {
                let velocity = buffers.velocity.as_ref().filter(|_| moves);
                let weights = (space.has_averages(k)).then(|| buffers.weights(core.parts()[k].rows));
                let (master, locks) = (buffers.master.as_deref(), &mut space.locks);
                // A copy is lent, as what is lent has to lie in memory.
                let sums = cpu::lock_sums(param, master, grad, velocity, &{ own }, weights, locks);
                own = lock(own, sums);
            }
            space.scalars.push(own);
        }
    }

    /// Changes the parameters.
    fn update(&mut self, space: &Space, params: &mut [ParamMut<'_>], grads: &[GradRef<'_>]) {
        let Self { core, buffers, applied_steps, .. } = self;
        let (core, step) = (&*core, *applied_steps as u32);
        let tensors = buffers.iter_mut().zip(params).zip(grads).zip(&space.scalars).enumerate();
        // The last one first: what the sums have read last is in the caches.
        let updates = tensors.rev().map(|(index, (((buffers, param), &grad), scalars))| {
            let Buffers { velocity, master, row_scales, column_scales, .. } = buffers;
            let rounds = param.dtype().is_half() && master.is_none();
            let stochastic = core.options().stochastic_rounding.filter(|_| rounds);
            TensorUpdate {
                param: param.reborrow(),
                grad,
                velocity: velocity.as_mut().filter(|_| scalars.velocity_decay > 0.0).into(),
                master: master.as_deref_mut(),
                scalars,
                weights: (space.has_averages(index)).then(|| cpu::Weights {
                    rows: core.parts()[index].rows,
                    row_scales,
                    column_scales,
                }),
                stochastic: stochastic.map(|seed| StochasticBits {
                    seed,
                    step,
                    tensor: index as u32,
                    first: core.specs()[index].offset,
                }),
            }
        });
        cpu::update(core.elements(), updates);
    }

    fn applied(&self, input: &StepInput, norms: Norms, decision: &Decision) -> StepReport {
        StepReport {
            outcome: Outcome::Applied,
            loss: input.loss,
            grad_norm: norms.euclidean,
            sigma_norm: decision.sigma_norm,
            theta: decision.theta,
            step_size: decision.step_size,
            learning_rate: decision.learning_rate,
            trust: decision.trust,
            limit: decision.limit,
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

    /// An error for what a step alone would refuse beside tensors.
    pub(super) fn check_input(&self, input: &StepInput) -> Result<()> {
        check_scale(input.grad_scale)?;
        self.core.check_alone()
    }

    fn check(&self, params: &[ParamMut<'_>], grads: &[GradRef<'_>], grad_scale: f64) -> Result<()> {
        check_scale(grad_scale)?;
        self.core.check_count("params", params.len())?;
        let known = self.core.briefs().iter().zip(self.core.lens()).enumerate();
        for ((k, (brief, len)), param) in known.zip(params) {
            if param.dtype() == brief.dtype && param.len() == *len {
                continue;
            }
            let spec = &self.core.specs()[k];
            if param.dtype() != spec.dtype {
                let problem = format!("was described as {} but is {}", spec.dtype, param.dtype());
                return Err(Error::tensor(&spec.name, problem));
            }
            let problem = format!("was described with {len} elements but has {}", param.len());
            return Err(Error::tensor(&spec.name, problem));
        }
        self.core.check_count("grads", grads.len())?;
        for ((k, own), grad) in self.core.lens().iter().enumerate().zip(grads) {
            if let Some(len) = grad.len()
                && len != *own
            {
                let problem = format!("has {own} elements but its gradient has {len}");
                return Err(Error::tensor(&self.core.specs()[k].name, problem));
            }
        }
        Ok(())
    }
}

fn check_scale(grad_scale: f64) -> Result<()> {
    if grad_scale > 0.0 && grad_scale.is_finite() {
        return Ok(());
    }
    let expected = "give the positive number that the gradients were multiplied with, 1 for none";
    Err(Error::invalid("grad_scale", grad_scale, expected))
}

impl Space {
    /// Whether the step changes averages of a tensor.
    fn has_averages(&self, tensor: usize) -> bool {
        self.tensors.get(tensor).is_some_and(Option::is_some)
    }
}

impl Buffers {
    /// What elements weigh in the step that is being taken.
    fn weights(&self, rows: Rows) -> cpu::Weights<'_> {
        cpu::Weights { rows, row_scales: &self.row_scales, column_scales: &self.column_scales }
    }
}
