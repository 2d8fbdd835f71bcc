//! Times optimizer steps and checks them: a wrong step would make its time worthless.

pub mod cpu;
pub mod device;
mod device_steps;
mod plain;

use half::{bf16, f16};
use rayon::prelude::*;
use rfdescent::covariance::{Family, Model, Observation, StepRule};
use rfdescent::optimizer::{Method, Outcome, StepReport, TensorSpec};
use rfdescent::{DType, GradRef, Moments, ParamMut};

use self::plain::{Instructions, narrow_f16, widen_f16};
use crate::error::CliError;

/// The mini-batch loss of every step.
const LOSS: f64 = 2.0;

/// Elements of a row of each tensor, as where layers have so many inputs.
const ROW: usize = 1024;

/// Sums of up to 4e9 positive terms in f64 differ by less than this in any sensible order.
const SUMS: f64 = 1e-9;

/// A number format of parameters and gradients.
pub trait Element: Copy + Send + Sync + 'static {
    /// Its name.
    const DTYPE: DType;
    /// u, the largest relative error of rounding to it.
    const ROUNDING: f64;
    /// The smallest positive number.
    const SMALLEST: f64;

    /// Rounds to nearest.
    fn from_f32(value: f32) -> Self;
    /// Exact.
    fn to_f64(self) -> f64;
    /// Exact, in a form that the compiler finds vectors for.
    fn widen<I: Instructions, const N: usize>(list: &[Self; N]) -> [f32; N];
    /// The reverse, rounded to nearest; not for NaN.
    fn narrow<I: Instructions, const N: usize>(list: &[f32; N]) -> [Self; N];
    /// As the optimizer takes parameters.
    fn param(values: &mut [Self]) -> ParamMut<'_>;
    /// As the optimizer takes gradients.
    fn grad(values: &[Self]) -> GradRef<'_>;
    /// As they lie in memory.
    fn encode(values: &[Self]) -> Vec<u8>;
    /// The reverse.
    fn decode(bytes: &[u8], values: &mut [Self]);
}

macro_rules! element {
    ($type:ty, $dtype:expr, $digits:literal, $smallest:literal, $from:expr, $to:expr, $widen:expr, $narrow:expr) => {
        impl Element for $type {
            const DTYPE: DType = $dtype;
            const ROUNDING: f64 = 1.0 / (1_u64 << $digits) as f64;
            const SMALLEST: f64 = f64::from_bits((1023 - $smallest) << 52);

            fn from_f32(value: f32) -> Self {
                $from(value)
            }
            fn to_f64(self) -> f64 {
                $to(self)
            }
            #[inline(always)]
            fn widen<I: Instructions, const N: usize>(list: &[Self; N]) -> [f32; N] {
                $widen(list)
            }
            #[inline(always)]
            fn narrow<I: Instructions, const N: usize>(list: &[f32; N]) -> [Self; N] {
                $narrow(list)
            }
            fn param(values: &mut [Self]) -> ParamMut<'_> {
                values.into()
            }
            fn grad(values: &[Self]) -> GradRef<'_> {
                values.into()
            }
            fn encode(values: &[Self]) -> Vec<u8> {
                values.iter().flat_map(|value| value.to_ne_bytes()).collect()
            }
            fn decode(bytes: &[u8], values: &mut [Self]) {
                let chunks = bytes.chunks_exact(size_of::<Self>());
                for (value, chunk) in values.iter_mut().zip(chunks) {
                    *value = Self::from_ne_bytes(std::array::from_fn(|byte| chunk[byte]));
                }
            }
        }
    };
}

element!(f32, DType::F32, 24, 149, |value| value, f64::from, |list: &[_; N]| *list, |list: &[_; N]| *list);
element!(f16, DType::F16, 11, 24, f16::from_f32, f16::to_f64, widen_f16::<I, N>, narrow_f16::<I, N>);
element!(
    bf16,
    DType::BF16,
    8,
    133,
    bf16::from_f32,
    bf16::to_f64,
    |list: &[_; N]| list.map(widen_bf16),
    |list: &[_; N]| list.map(narrow_bf16)
);

#[inline(always)]
fn widen_bf16(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

#[inline(always)]
fn narrow_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    bf16::from_bits((bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16) as u16)
}

/// What is timed.
pub struct Case {
    /// Lengths of the tensors, which lie one behind the other in one buffer.
    pub lengths: Vec<usize>,
    /// How many parameters that is.
    pub total: usize,
    /// A model whose steps are of the usual size for so many parameters.
    pub model: Model,
}

/// What came out of steps on a device.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Steps that were timed, of each kind.
    pub steps: u64,
    /// Wall time of one step of the fitted method, in seconds.
    pub step: f64,
    /// The same of the adaptive method.
    pub adaptive_step: f64,
    /// Largest error of a parameter after the first step.
    pub largest_error: f64,
    /// The kernels that steps of each method took.
    pub kernels: [String; 2],
}

impl Case {
    /// `total` parameters in `tensors` tensors of about the same length.
    pub fn new(total: usize, tensors: usize) -> Result<Self, CliError> {
        // The case study of the paper, but for the number of parameters.
        let moments = Moments {
            mean: 2.5,
            variance: 0.01,
            noise_variance: 0.9,
            grad_variance: 500.0,
            noise_grad_variance: 1e5,
            dims: total as u64,
        };
        let lengths = (0..tensors).map(|k| total / tensors + usize::from(k < total % tensors)).collect();
        Ok(Case { lengths, total, model: Model::new(Family::SquaredExponential, moments)? })
    }

    fn fitted(&self) -> Method {
        self.model.clone().into()
    }

    fn specs<E: Element>(&self) -> Vec<TensorSpec> {
        let spec = |(k, &len): (usize, &usize)| {
            TensorSpec::new(format!("tensor {k}"), &[len], E::DTYPE).with_row(row(len))
        };
        self.lengths.iter().enumerate().map(spec).collect()
    }

    /// Lengths of the rows of all tensors.
    fn rows(&self) -> Vec<usize> {
        let rows = |&len: &usize| (0..len).step_by(row(len)).map(move |start| row(len).min(len - start));
        self.lengths.iter().flat_map(rows).collect()
    }

    fn params<E: Element>(&self) -> Result<Vec<E>, CliError> {
        values(self.total, 1)
    }

    /// Of absolute values between 1/4 and 3/4: a row of zeros would have no variance.
    fn grads<E: Element>(&self) -> Result<Vec<E>, CliError> {
        let mut grads = values::<E>(self.total, 2)?;
        grads.par_iter_mut().for_each(|g| {
            let value = g.to_f64() as f32;
            *g = E::from_f32(value + 0.25_f32.copysign(value));
        });
        Ok(grads)
    }

    /// Compares a first step of the method with plain f64: its size, and every parameter. Returns the largest
    /// error of a parameter.
    fn check<E: Element>(
        &self,
        method: &Method,
        before: &[E],
        grads: &[E],
        after: &[E],
        report: &StepReport,
    ) -> Result<f64, CliError> {
        applied(report)?;
        // What has one rate.
        let lengths = if method.model().is_some() { self.lengths.clone() } else { self.rows() };
        let squares = squares(grads, &lengths);
        let rates = match method.model() {
            Some(model) => vec![fitted_rate(model, squares.iter().sum::<f64>(), report)?; squares.len()],
            None => self.adaptive_rates(before, &squares, report)?,
        };
        let starts = lengths.iter().scan(0, |end, len| {
            *end += len;
            Some(*end - len)
        });
        let cut = |list| cut::<E>(list, &lengths);
        let parts = rates.into_iter().zip(starts).zip(cut(before)).zip(cut(grads)).zip(cut(after));
        let parts: Vec<_> = parts.collect();
        parts
            .into_par_iter()
            .map(|((((rate, start), before), grads), after)| {
                largest_error(rate, before, grads, after).map_err(|(index, error)| (start + index, error))
            })
            .try_reduce(|| 0.0, |a, b| Ok(f64::max(a, b)))
            .map_err(|(index, error)| wrong(format!("parameter {index} is off by {error:e}")))
    }

    /// What the gradient of each row is multiplied with in a first step of the adaptive method, from the
    /// report's learning rate, whose norm is checked: the tensor's length scale over the root of the row's
    /// mean square (`docs/adaptive.md`).
    fn adaptive_rates<E: Element>(
        &self,
        before: &[E],
        squares: &[f64],
        report: &StepReport,
    ) -> Result<Vec<f64>, CliError> {
        let sizes = self::squares(before, &self.lengths);
        let rows = self.lengths.iter().zip(sizes).flat_map(|(&len, square)| {
            let length = (0.1 * (square / len as f64).sqrt().max(0.01)).sqrt();
            std::iter::repeat_n(length, len.div_ceil(row(len)))
        });
        let scales: Vec<f64> = (rows.zip(self.rows()).zip(squares))
            .map(|((length, len), square)| length / (square / len as f64).sqrt())
            .collect();
        let norm = squares.iter().zip(&scales).map(|(square, scale)| square * scale).sum::<f64>().sqrt();
        let step_size = report.learning_rate * norm;
        compare_step_sizes(report, step_size)?;
        Ok(scales.iter().map(|scale| report.learning_rate * scale).collect())
    }
}

/// Elements of a row of a tensor with so many.
fn row(len: usize) -> usize {
    ROW.min(len)
}

/// Sums of squares of parts of these lengths.
fn squares<E: Element>(list: &[E], lengths: &[usize]) -> Vec<f64> {
    cut(list, lengths).into_par_iter().map(|part| part.par_iter().map(|x| x.to_f64().powi(2)).sum()).collect()
}

/// What gradients are multiplied with in a step of the fitted method.
fn fitted_rate(model: &Model, squares: f64, report: &StepReport) -> Result<f64, CliError> {
    let grad_norm = squares.sqrt();
    let observation = Observation { loss: LOSS, grad_norm, inv_batch_size: 0.0 };
    let step = model
        .step(&observation, &StepRule::default())
        .map_err(|reason| CliError::Data(format!("no step to compare with: {reason}")))?;
    compare_step_sizes(report, step.step_size)?;
    Ok(step.learning_rate(grad_norm))
}

fn compare_step_sizes(report: &StepReport, expected: f64) -> Result<(), CliError> {
    // A NaN is near nothing.
    if (report.step_size / expected - 1.0).abs() <= SUMS {
        return Ok(());
    }
    Err(wrong(format!("its step size is {:e}, not {expected:e}", report.step_size)))
}

/// Of parameters after a step in which they had one rate; or the first that is beyond roundings.
fn largest_error<E: Element>(rate: f64, before: &[E], grads: &[E], after: &[E]) -> Result<f64, (usize, f64)> {
    let errors = (before.par_iter().zip(grads).zip(after)).enumerate().map(|(index, ((&b, &g), &a))| {
        let (before, change) = (b.to_f64(), rate * g.to_f64());
        let error = (a.to_f64() - (before - change)).abs();
        // Coefficient, product and result are rounded once each, the last to a number of at most this size.
        let bound = 4.0 * E::ROUNDING * (before.abs() + change.abs()) + E::SMALLEST;
        // A NaN is within no bound.
        if error <= bound { Ok(error) } else { Err((index, error)) }
    });
    errors.try_reduce(|| 0.0, |a, b| Ok(f64::max(a, b)))
}

fn applied(report: &StepReport) -> Result<(), CliError> {
    match report.outcome {
        Outcome::Applied => Ok(()),
        Outcome::Skipped(reason) => Err(wrong(format!("it was skipped ({reason})"))),
    }
}

fn wrong(how: String) -> CliError {
    CliError::Data(format!(
        "the step is wrong: {how}; no times are given, please report this with `rfdescent doctor`"
    ))
}

/// Numbers between -1/2 and 1/2 without any order.
fn values<E: Element>(len: usize, seed: u32) -> Result<Vec<E>, CliError> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| {
        CliError::Data(format!("not enough memory for {len} parameters; give fewer with --parameters"))
    })?;
    let hash = |i: usize| (i as u32).wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8;
    values.par_extend((0..len).into_par_iter().map(|i| E::from_f32(hash(i) as f32 / 16_777_216.0 - 0.5)));
    Ok(values)
}

/// Cuts a buffer into tensors.
fn cut<'a, E>(mut buffer: &'a [E], lengths: &[usize]) -> Vec<&'a [E]> {
    let mut next = |&len: &usize| buffer.split_off(..len).unwrap_or_default();
    lengths.iter().map(&mut next).collect()
}

/// The same to change.
fn cut_mut<'a, E>(mut buffer: &'a mut [E], lengths: &[usize]) -> Vec<&'a mut [E]> {
    let mut next = |&len: &usize| buffer.split_off_mut(..len).unwrap_or_default();
    lengths.iter().map(&mut next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rfdescent::optimizer::{Adaptive, Optimizer, Options, StepInput};

    fn first_step<E: Element>(case: &Case, method: &Method, after: &mut [E], grads: &[E]) -> StepReport {
        let mut optimizer = Optimizer::new(method.clone(), Options::default(), case.specs::<E>()).unwrap();
        let mut params: Vec<_> = cut_mut(after, &case.lengths).into_iter().map(E::param).collect();
        let grads: Vec<_> = cut(grads, &case.lengths).into_iter().map(E::grad).collect();
        optimizer.step(&mut params, &grads, &StepInput::new(LOSS)).unwrap()
    }

    fn a_wrong_parameter_is_found<E: Element>(relative: f32) {
        let case = Case::new(6003, 4).unwrap();
        assert_eq!(case.lengths, [1501, 1501, 1501, 1500]);
        assert_eq!(case.rows(), [1024, 477, 1024, 477, 1024, 477, 1024, 476]);
        for method in [case.fitted(), Adaptive::default().into()] {
            a_wrong_parameter_of_is_found::<E>(&case, &method, relative);
        }
    }

    fn a_wrong_parameter_of_is_found<E: Element>(case: &Case, method: &Method, relative: f32) {
        let (mut before, mut grads) = (case.params::<E>().unwrap(), case.grads::<E>().unwrap());
        // Rows have variances, and tensors length scales, of their own.
        grads[1024..2525].iter_mut().for_each(|g| *g = E::from_f32(g.to_f64() as f32 / 2.0));
        before[1501..3002].iter_mut().for_each(|p| *p = E::from_f32(p.to_f64() as f32 / 2.0));
        let mut after = before.clone();
        let report = first_step(case, method, &mut after, &grads);
        let error = case.check(method, &before, &grads, &after, &report).unwrap();
        assert!(error > 0.0 && error <= 4.0 * E::ROUNDING);
        for (index, factor) in [(0, 1.0 + relative), (6002, 1.0 - relative), (2000, f32::NAN)] {
            let mut damaged = after.clone();
            damaged[index] = E::from_f32(damaged[index].to_f64() as f32 * factor);
            let text = case.check(method, &before, &grads, &damaged, &report).unwrap_err().to_string();
            assert!(text.contains(&format!("parameter {index}")), "{text}");
        }
        let other = StepReport { step_size: report.step_size * (1.0 + 1e-8), ..report };
        let text = case.check(method, &before, &grads, &after, &other).unwrap_err().to_string();
        assert!(text.contains("step size"), "{text}");
    }

    #[test]
    fn a_step_is_checked_parameter_by_parameter() {
        // Twice the bound for a change that is small against the parameter.
        a_wrong_parameter_is_found::<f32>(8.0 / 16_777_216.0);
        a_wrong_parameter_is_found::<f16>(8.0 / 2048.0);
        a_wrong_parameter_is_found::<bf16>(8.0 / 256.0);
    }
}
