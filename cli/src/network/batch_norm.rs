//! Batch normalisation as one operation with a hand-written gradient.
//!
//! candle's own is for inference; composed from tensor operations its gradient needs some thirty passes over
//! the activations. All sums are taken in f64 over fixed ranges of rows, so they do not depend on the number
//! of threads.

use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor, Var, WithDType};
use rayon::prelude::*;

use super::Mode;

/// PyTorch's defaults.
const EPSILON: f64 = 1e-5;
const MOMENTUM: f64 = 0.1;

/// Rows added up by one task; fixed, as it decides the order of the sums.
const ROWS_PER_TASK: usize = 128;

/// Whether the variable of this name is followed, not trained.
pub fn is_running_average(name: &str) -> bool {
    name.ends_with(".running_mean") || name.ends_with(".running_var")
}

/// Normalises each column of a rows × features input over the rows, then scales and shifts it.
pub struct BatchNorm {
    pub weight: Var,
    pub bias: Var,
    pub running_mean: Var,
    pub running_var: Var,
}

impl BatchNorm {
    pub fn forward(&self, x: &Tensor, mode: Mode) -> Result<Tensor> {
        match mode {
            Mode::Train => self.forward_train(&x.contiguous()?),
            Mode::Evaluate => self.forward_evaluate(x),
        }
    }

    fn forward_train(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, features) = x.dims2()?;
        let (mean, variance) = match x.dtype() {
            DType::F64 => statistics(&values::<f64>(x)?, features),
            _ => statistics(&values::<f32>(x)?, features),
        };
        // As PyTorch: the running variance is the unbiased one, the batch is normalised by the biased one.
        let unbiased = rows as f64 / (rows as f64 - 1.0).max(1.0);
        follow(&self.running_mean, &mean, 1.0)?;
        follow(&self.running_var, &variance, unbiased)?;
        let inverse_deviation = variance.iter().map(|v| 1.0 / (v + EPSILON).sqrt()).collect();
        x.apply_op3(&self.weight, &self.bias, Normalise { mean, inverse_deviation })
    }

    fn forward_evaluate(&self, x: &Tensor) -> Result<Tensor> {
        let scale = (self.weight.as_tensor() / (self.running_var.as_tensor() + EPSILON)?.sqrt()?)?;
        let shift = (self.bias.as_tensor() - (&scale * self.running_mean.as_tensor())?)?;
        x.broadcast_mul(&scale)?.broadcast_add(&shift)
    }
}

/// running ← 0.9·running + 0.1·factor·observed.
fn follow(running: &Var, observed: &[f64], factor: f64) -> Result<()> {
    let observed = Tensor::new(observed, &Device::Cpu)?.to_dtype(running.dtype())?;
    running.set(&((running.as_detached_tensor() * (1.0 - MOMENTUM))? + (observed * (MOMENTUM * factor))?)?)
}

/// The numbers of this file's two element types.
trait Real: WithDType + Into<f64> {
    fn of(value: f64) -> Self;
}

impl Real for f32 {
    fn of(value: f64) -> Self {
        value as f32
    }
}

impl Real for f64 {
    fn of(value: f64) -> Self {
        value
    }
}

/// Σ over all rows of `term(feature, index)` for each feature; the values form rows of `features` each.
fn sums<const N: usize>(
    count: usize,
    features: usize,
    term: impl Fn(usize, usize) -> [f64; N] + Sync,
) -> [Vec<f64>; N] {
    let rows = count / features;
    let partial: Vec<Vec<[f64; N]>> = (0..rows.div_ceil(ROWS_PER_TASK))
        .into_par_iter()
        .map(|task| {
            let mut sums = vec![[0.0; N]; features];
            for row in task * ROWS_PER_TASK..rows.min((task + 1) * ROWS_PER_TASK) {
                for (feature, sum) in sums.iter_mut().enumerate() {
                    let values = term(feature, row * features + feature);
                    sum.iter_mut().zip(values).for_each(|(s, v)| *s += v);
                }
            }
            sums
        })
        .collect();
    std::array::from_fn(|n| {
        (0..features).map(|feature| partial.iter().map(|sums| sums[feature][n]).sum()).collect()
    })
}

/// The list of all `value(feature, index)`.
fn map<T: Real>(count: usize, features: usize, value: impl Fn(usize, usize) -> T + Sync) -> Vec<T> {
    let mut out = vec![T::zero(); count];
    out.par_chunks_mut(features * ROWS_PER_TASK).enumerate().for_each(|(task, rows)| {
        let base = task * ROWS_PER_TASK * features;
        for (row, values) in rows.chunks_exact_mut(features).enumerate() {
            for (feature, out) in values.iter_mut().enumerate() {
                *out = value(feature, base + row * features + feature);
            }
        }
    });
    out
}

/// Mean and biased variance of each feature, in two passes.
fn statistics<T: Real>(x: &[T], features: usize) -> (Vec<f64>, Vec<f64>) {
    let scale = features as f64 / x.len() as f64;
    let [mut mean] = sums(x.len(), features, |_, i| [x[i].into()]);
    mean.iter_mut().for_each(|m| *m *= scale);
    let [mut variance] = sums(x.len(), features, |feature, i| {
        let deviation = x[i].into() - mean[feature];
        [deviation * deviation]
    });
    variance.iter_mut().for_each(|v| *v *= scale);
    (mean, variance)
}

/// The values of a tensor, in order.
pub fn values<T: WithDType>(x: &Tensor) -> Result<Vec<T>> {
    x.flatten_all()?.to_vec1()
}

/// y = weight·(x − mean)/deviation + bias, with mean and deviation functions of x.
struct Normalise {
    mean: Vec<f64>,
    inverse_deviation: Vec<f64>,
}

impl Normalise {
    fn forward<T: Real>(&self, x: &[T], weight: &[T], bias: &[T]) -> Vec<T> {
        // One multiplication and one addition an element.
        let scale: Vec<f64> =
            weight.iter().zip(&self.inverse_deviation).map(|(&w, inverse)| w.into() * inverse).collect();
        let shift: Vec<f64> =
            bias.iter().zip(scale.iter().zip(&self.mean)).map(|(&b, (s, m))| b.into() - s * m).collect();
        map(x.len(), weight.len(), |feature, i| T::of(x[i].into() * scale[feature] + shift[feature]))
    }

    /// Gradients of x, weight and bias. With x̂ the normalised input and means over the feature's values:
    /// ∂x = weight/deviation · (∂y − mean(∂y) − x̂·mean(∂y·x̂)), ∂weight = Σ ∂y·x̂, ∂bias = Σ ∂y.
    fn backward<T: Real>(&self, x: &[T], weight: &[T], grad: &[T]) -> (Vec<T>, Vec<T>, Vec<T>) {
        let normalised = |feature: usize, i: usize| -> f64 {
            (x[i].into() - self.mean[feature]) * self.inverse_deviation[feature]
        };
        let [grad_bias, grad_weight] = sums(x.len(), weight.len(), |feature, i| {
            let g: f64 = grad[i].into();
            [g, g * normalised(feature, i)]
        });
        let scale = weight.len() as f64 / x.len() as f64;
        let grad_x = map(x.len(), weight.len(), |feature, i| {
            let centred =
                grad[i].into() - scale * (grad_bias[feature] + normalised(feature, i) * grad_weight[feature]);
            T::of(weight[feature].into() * self.inverse_deviation[feature] * centred)
        });
        let narrow = |v: Vec<f64>| v.into_iter().map(T::of).collect();
        (grad_x, narrow(grad_weight), narrow(grad_bias))
    }

    fn backward_tensors<T: Real>(&self, x: &Tensor, weight: &Tensor, grad: &Tensor) -> Result<[Tensor; 3]> {
        let (x_grad, weight_grad, bias_grad) =
            self.backward(&values::<T>(x)?, &values::<T>(weight)?, &values::<T>(grad)?);
        Ok([
            Tensor::from_vec(x_grad, x.shape(), &Device::Cpu)?,
            Tensor::from_vec(weight_grad, weight.shape(), &Device::Cpu)?,
            Tensor::from_vec(bias_grad, weight.shape(), &Device::Cpu)?,
        ])
    }
}

/// The part of the storage that a contiguous layout covers.
pub fn slice<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    let all = storage.as_slice::<T>()?;
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&all[start..end]),
        None => candle_core::bail!("contiguous input needed"),
    }
}

impl CustomOp3 for Normalise {
    fn name(&self) -> &'static str {
        "batch-normalisation"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let shape = x_layout.shape().clone();
        let storage = match x {
            CpuStorage::F64(_) => CpuStorage::F64(self.forward(
                slice(x, x_layout)?,
                slice(weight, weight_layout)?,
                slice(bias, bias_layout)?,
            )),
            _ => CpuStorage::F32(self.forward(
                slice(x, x_layout)?,
                slice(weight, weight_layout)?,
                slice(bias, bias_layout)?,
            )),
        };
        Ok((storage, shape))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _bias: &Tensor,
        _result: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [x, weight, bias] = match x.dtype() {
            DType::F64 => self.backward_tensors::<f64>(x, weight, grad)?,
            _ => self.backward_tensors::<f32>(x, weight, grad)?,
        };
        Ok((Some(x), Some(weight), Some(bias)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(features: usize, weight: &[f64], bias: &[f64]) -> BatchNorm {
        let var = |v: &[f64]| Var::new(v, &Device::Cpu).unwrap();
        BatchNorm {
            weight: var(weight),
            bias: var(bias),
            running_mean: var(&vec![0.0; features]),
            running_var: var(&vec![1.0; features]),
        }
    }

    /// 150 rows: more than one task's share.
    fn input(features: usize) -> Tensor {
        let values: Vec<f64> =
            (0..150 * features).map(|i| ((i * 7919 % 1009) as f64 / 100.0).sin() + i as f64 * 1e-4).collect();
        Tensor::from_vec(values, (150, features), &Device::Cpu).unwrap()
    }

    /// The definition in tensor operations, differentiable by candle.
    fn naive(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Tensor {
        let mean = x.mean_keepdim(0).unwrap();
        let centred = x.broadcast_sub(&mean).unwrap();
        let variance = centred.sqr().unwrap().mean_keepdim(0).unwrap();
        let deviation = (variance + EPSILON).unwrap().sqrt().unwrap();
        let normalised = centred.broadcast_div(&deviation).unwrap();
        let scaled = normalised.broadcast_mul(weight).unwrap();
        scaled.broadcast_add(bias).unwrap()
    }

    fn assert_close(a: &Tensor, b: &Tensor) {
        let (a, b) = (values::<f64>(a).unwrap(), values::<f64>(b).unwrap());
        assert_eq!(a.len(), b.len());
        // f64 sums of at most 210 terms of order one: far below 1e-11.
        a.iter().zip(&b).for_each(|(x, y)| assert!((x - y).abs() < 1e-11, "{x} {y}"));
    }

    #[test]
    fn output_and_gradients_match_the_definition() {
        let (weight, bias) = ([0.5, -2.0, 1.5], [0.1, 0.2, -0.3]);
        let norm = layer(3, &weight, &bias);
        let x = Var::from_tensor(&input(3)).unwrap();
        let factors = input(3).sqr().unwrap();
        let ours = norm.forward(&x, Mode::Train).unwrap();
        let reference = naive(&x, &norm.weight, &norm.bias);
        assert_close(&ours, &reference);
        let ours = (ours.sqr().unwrap() * &factors).unwrap().sum_all().unwrap().backward().unwrap();
        let reference = (reference.sqr().unwrap() * &factors).unwrap().sum_all().unwrap().backward().unwrap();
        for var in [&x, &norm.weight, &norm.bias] {
            let (a, b) = (ours.get(var).unwrap(), reference.get(var).unwrap());
            let size = values::<f64>(b).unwrap().iter().fold(1f64, |m, v| m.max(v.abs()));
            assert_close(&(a / size).unwrap(), &(b / size).unwrap());
        }
    }

    #[test]
    fn running_averages_follow_mean_and_unbiased_variance() {
        let norm = layer(2, &[1.0, 1.0], &[0.0, 0.0]);
        let x = input(2);
        norm.forward(&x, Mode::Train).unwrap();
        let column: Vec<f64> = values::<f64>(&x).unwrap().into_iter().step_by(2).collect();
        let mean = column.iter().sum::<f64>() / 150.0;
        let variance = column.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / 149.0;
        let running = |v: &Var| v.to_vec1::<f64>().unwrap()[0];
        assert!((running(&norm.running_mean) - 0.1 * mean).abs() < 1e-13);
        assert!((running(&norm.running_var) - (0.9 + 0.1 * variance)).abs() < 1e-13);
    }

    #[test]
    fn evaluation_uses_the_running_averages() {
        let norm = layer(2, &[2.0, 3.0], &[0.5, -0.5]);
        norm.running_mean.set(&Tensor::new(&[1.0, -1.0], &Device::Cpu).unwrap()).unwrap();
        norm.running_var.set(&Tensor::new(&[4.0, 9.0], &Device::Cpu).unwrap()).unwrap();
        let x = Tensor::new(&[[3.0, 2.0]], &Device::Cpu).unwrap();
        let y = values::<f64>(&norm.forward(&x, Mode::Evaluate).unwrap()).unwrap();
        let expected = [2.0 * 2.0 / (4.0f64 + 1e-5).sqrt() + 0.5, 3.0 * 3.0 / (9.0f64 + 1e-5).sqrt() - 0.5];
        assert!((y[0] - expected[0]).abs() < 1e-12 && (y[1] - expected[1]).abs() < 1e-12, "{y:?}");
    }
}
