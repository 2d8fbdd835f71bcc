//! A step in two halves, between which ranks add up their sums.

use super::{Buffers, Optimizer, Space};
use crate::backend::abi::RfdTensorNumbers;
use crate::backend::cpu::{self, FloatEnvironment};
use crate::error::{Error, Result};
use crate::numeric::{fold, power_of_two};
use crate::optimizer::decision::Norms;
use crate::optimizer::method::TensorSums;
use crate::optimizer::sums::{LocalSums, TensorNumbers, total};
use crate::optimizer::{SkipReason, StepInput, StepReport};
use crate::tensor::{GradRef, ParamMut};

impl Optimizer {
    /// The first half of a step in sharded training: what the step is decided by, of this rank's parameters
    /// and gradients. Nothing changes.
    ///
    /// Squares are plain f64: those of f64 gradients beyond 10¹⁵⁰ overflow here, where [`Optimizer::step`]
    /// rescales them, and with the adaptive method those below 10⁻¹⁵⁰ underflow. Where any gradient is not
    /// finite, counted or not, a number isn't; neither is the sum over ranks, and all skip.
    ///
    /// # Errors
    /// As [`Optimizer::step`]; [`Error::InvalidArgument`] when a group has norm lock: a shard doesn't know
    /// the norms that it needs.
    pub fn local_sums(
        &self,
        params: &[ParamMut<'_>],
        grads: &[GradRef<'_>],
        grad_scale: f64,
    ) -> Result<LocalSums> {
        let _ieee = FloatEnvironment::ieee();
        self.check(params, grads, grad_scale)?;
        self.core.check_sharded()?;
        let steps = [self.applied_steps, self.skipped_steps];
        if !self.core.method().descent().has_rows() {
            return Ok(LocalSums { values: self.local_norms(grads), rows: Vec::new(), grad_scale, steps });
        }
        let parameters = if self.core.method().descent().lacks_measures(&self.history) {
            let values: Vec<GradRef<'_>> = params.iter().map(ParamMut::as_values).collect();
            cpu::plain_squares(&values)
        } else {
            vec![0.0; params.len()]
        };
        let mut space = Space::default();
        self.form_norms(grads, grad_scale, false, &mut space);
        let sums = space.norms;
        let mut values = Vec::with_capacity(self.core.sums_len());
        let mut rows = Vec::with_capacity(params.len());
        for (k, (of_rows, columns)) in sums.rows.into_iter().zip(sums.columns).enumerate() {
            let part = &self.core.parts()[k];
            let shares = part.shared.is_some();
            let holds = self.core.lens()[k] > 0;
            let numbers = TensorNumbers {
                own: RfdTensorNumbers {
                    elements: grads[k].len().unwrap_or(0) as f64,
                    squares: sums.squares.squares[k],
                    direction: if shares { 0.0 } else { sums.directions[k] },
                    sampled: sums.sampled[k] * part.share,
                    parameter: parameters[k],
                    present: f64::from(holds && grads[k].len().is_some()),
                    missing: f64::from(holds && grads[k].len().is_none()),
                },
                columns: columns.into_iter().map(|mean| mean * part.height_share).collect(),
                rows: if shares { of_rows.clone() } else { Vec::new() },
            };
            numbers.write(part, self.core.specs()[k].counts_in_norm, &mut values);
            rows.push(of_rows.into_iter().map(|[average, _]| average).collect());
        }
        Ok(LocalSums { values, rows, grad_scale, steps })
    }

    fn local_norms(&self, grads: &[GradRef<'_>]) -> Vec<f64> {
        let mut space = Space::default();
        self.form_norms(grads, 1.0, true, &mut space);
        let norms = space.norms.squares;
        if norms.squares.iter().any(|square| !square.is_finite()) {
            // Also from a tensor that does not count: then every rank has to skip.
            return vec![f64::NAN; 2];
        }
        let total = self.total(&norms);
        let square = |s: f64| s * power_of_two(total.exponent) * power_of_two(total.exponent);
        vec![square(total.euclidean), square(total.sigma)]
    }

    /// The second half: the update with the sums of all ranks. Every rank must give the same numbers and
    /// `input`, both reduced over the ranks, and the gradients that it gave before; then all take bitwise the
    /// same step.
    ///
    /// # Errors
    /// As [`Optimizer::step`]; [`Error::InvalidArgument`] for sums of another step, or formed with another
    /// gradient scale, and when a group has norm lock; [`Error::Tensor`] names one whose parts do not make up
    /// the whole, and the step counts as skipped then.
    pub fn step_with_sums(
        &mut self,
        params: &mut [ParamMut<'_>],
        grads: &[GradRef<'_>],
        sums: LocalSums,
        input: &StepInput,
    ) -> Result<StepReport> {
        let _ieee = FloatEnvironment::ieee();
        self.check(params, grads, input.grad_scale)?;
        self.core.check_sharded()?;
        self.core.check_sums(sums.values.len())?;
        let steps = [self.applied_steps, self.skipped_steps];
        if sums.steps != steps {
            let expected =
                format!("the optimizer has taken {steps:?} since; form sums anew before each step");
            return Err(Error::invalid(
                "applied and skipped steps before sums",
                format!("{:?}", sums.steps),
                expected,
            ));
        }
        if input.grad_scale != sums.grad_scale {
            let expected =
                format!("the sums were formed with {}; give both halves the same", sums.grad_scale);
            return Err(Error::invalid("grad_scale", input.grad_scale, expected));
        }
        if input.found_inf != 0.0 {
            return Ok(self.skip(input, None, SkipReason::FoundInf));
        }
        if !self.core.method().descent().has_rows() {
            let norms = Norms::new(total(&sums.values), input.grad_scale);
            return Ok(self.take(&mut Space::default(), params, grads, input, norms));
        }
        let numbers = TensorNumbers::read(&self.core, &sums.values);
        // A device counts a step with torn sums, as it queues it before they are known.
        let take_part: Vec<bool> = (numbers.iter().zip(grads).enumerate())
            .map(|(k, (numbers, grad))| {
                let here = (self.core.lens()[k] > 0).then_some(grad.len().is_some());
                numbers.takes_part(&self.core, k, here)
            })
            .collect::<Result<_>>()
            .inspect_err(|_| self.skipped_steps += 1)?;
        self.measure(numbers.iter().map(|numbers| numbers.own.parameter).collect());
        let squares = numbers.iter().map(|numbers| numbers.own.squares).collect();
        let squares = cpu::SquaredNorms { squares, exponent: 0 };
        let norms = Norms::new(self.total_where(&squares, |_| true), input.grad_scale);
        if squares.squares.iter().any(|square| !square.is_finite()) {
            return Ok(self.skip(input, Some(norms), SkipReason::NonFiniteGradient));
        }
        let unscale = 1.0 / input.grad_scale;
        let mut space = Space::default();
        self.find_rules(&mut space.rules);
        for (k, ((numbers, own_rows), takes_part)) in
            numbers.into_iter().zip(sums.rows).zip(take_part).enumerate()
        {
            if !takes_part {
                space.tensors.push(None);
                continue;
            }
            let shared = self.shared_rows(k, space.rules[k], &numbers.rows, unscale);
            let (rows, direction) = shared.unwrap_or((own_rows, numbers.own.direction));
            space.tensors.push(Some(TensorSums {
                squares: numbers.own.squares * unscale * unscale,
                direction,
                sampled: numbers.own.sampled,
                counts: true,
            }));
            let rule = self.core.method().descent().column_variance(&self.history, k);
            let Buffers { averages, next, row_scales, .. } = &mut self.buffers[k];
            next.take_columns(rule, &averages.columns, &numbers.columns);
            let own_rows = self.core.parts()[k].own_rows(self.core.lens()[k], &rows);
            *row_scales = own_rows.into_iter().map(|average| space.rules[k].scale(average)).collect();
            next.rows = rows;
        }
        Ok(self.take(&mut space, params, grads, input, norms))
    }

    /// The new averages of a tensor's rows that ranks share, and their part of the direction, by the sums of
    /// all ranks.
    fn shared_rows(
        &self,
        tensor: usize,
        rule: cpu::RowVariance,
        sums: &[[f64; 2]],
        unscale: f64,
    ) -> Option<(Vec<f64>, f64)> {
        let elements = self.core.parts()[tensor].shared?.elements as f64;
        let (averages, directions): (Vec<f64>, Vec<f64>) =
            (self.buffers[tensor].averages.rows.iter().zip(sums))
                .map(|(&before, &[squares, weighted])| {
                    let mean = squares * unscale * unscale / elements;
                    let average = cpu::averaged(rule.decay, before, mean);
                    (average, rule.scale(average) * weighted)
                })
                .unzip();
        Some((averages, fold(directions)))
    }
}
