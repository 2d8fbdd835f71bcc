//! The share of each tensor of parameters in the gradient's variance: length scales by tensor.

use super::EstimationError;
use super::fit::{Fit, abscissae};
use super::least_squares::{Abscissa, Line, Sum, iterate};
use super::statistics::SampleStatistics;
use crate::covariance::{TensorFactor, check_sizes};
use crate::{Error, Moments, Result};
use serde::Serialize;
use std::collections::BTreeMap;

/// A tensor of parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorDims {
    /// Its name: not empty, without line breaks and white space at its ends.
    pub name: String,
    /// d_k, the number of its elements; ≥ 1.
    pub dims: u64,
}

/// Gradient variances of one tensor, estimated from samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorVariance {
    /// The tensor.
    pub name: String,
    /// The expected squared norm of the tensor's part of the cost's gradient, its share of −d·C'(0); ≥ 0.
    pub grad_variance: f64,
    /// The expected squared norm of its part of one example's gradient noise, its share of −d·C'_ε(0); ≥ 0.
    pub noise_grad_variance: f64,
}

/// A tensor's gradient variances and the length scale that follows from them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorFit {
    /// The tensor.
    pub name: String,
    /// d_k, the number of its elements.
    pub dims: u64,
    /// As in [`TensorVariance`].
    pub grad_variance: f64,
    /// As in [`TensorVariance`].
    pub noise_grad_variance: f64,
    /// f_k, which multiplies the length scale of this tensor.
    pub length_scale_factor: f64,
    /// Whether the variance of an element was below 3 % of the mean and f_k follows from 3 %.
    pub raised: bool,
}

/// One length scale for each tensor: a geometric anisotropy (paper, section "Geometric anisotropy/Adaptive
/// step sizes").
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorFits {
    /// The tensors, in the order in which they were asked for.
    pub tensors: Vec<TensorFit>,
    /// Σ f_k²·`grad_variance` of tensor k: the expected squared norm of the cost's gradient in the norm of
    /// the anisotropy, [`sigma_norm`](crate::covariance::sigma_norm).
    pub grad_variance: f64,
    /// The same sum of `noise_grad_variance`.
    pub noise_grad_variance: f64,
}

impl TensorFits {
    /// The moments of a model in the anisotropy's norm; mean and variances of the loss are those of `fit`.
    pub fn moments(&self, fit: &Fit) -> Moments {
        Moments {
            grad_variance: self.grad_variance,
            noise_grad_variance: self.noise_grad_variance,
            ..fit.moments(self.tensors.iter().map(|tensor| tensor.dims).sum())
        }
    }

    /// What a [`Model`](crate::covariance::Model::with_tensors) keeps of the tensors.
    pub fn factors(&self) -> Vec<TensorFactor> {
        self.tensors
            .iter()
            .map(|&TensorFit { ref name, dims, length_scale_factor, .. }| TensorFactor {
                name: name.clone(),
                dims,
                length_scale_factor,
            })
            .collect()
    }
}

/// Fits the gradient variances of each tensor that the samples have squared gradient norms of, in
/// alphabetical order.
///
/// E‖g_k‖² = β₀ + β₁/b, as for the whole gradient, by the same reweighted least squares as in
/// [`fit`](super::fit()), for each tensor by itself. Neither coefficient can be negative. Where the line has
/// a negative one or the reweighting does not converge, the coefficient in question (without convergence β₀,
/// which is then close to 0) is 0 and the other one that of the weighted least squares with this constraint:
/// β₁ the mean of b·‖g_k‖², β₀ that of ‖g_k‖².
///
/// # Errors
/// [`EstimationError::NoTensors`] when the samples have no such norms; as [`fit`](super::fit()) for too few
/// batch sizes or too close ones.
pub fn tensor_variances(statistics: &SampleStatistics) -> Result<Vec<TensorVariance>> {
    if statistics.tensors().next().is_none() && statistics.batches() > 0 {
        return Err(EstimationError::NoTensors.into());
    }
    let abscissae = abscissae(statistics)?;
    let variance = |name: &str| {
        let means = statistics.groups().map(|(_, group)| group.mean_of_tensor(name).unwrap_or_default());
        let line = admissible_line(&abscissae, &means.collect::<Vec<_>>());
        TensorVariance { name: name.into(), grad_variance: line.intercept, noise_grad_variance: line.slope }
    };
    Ok(statistics.tensors().map(variance).collect())
}

/// Below this share of the mean, what samples say about the variance of a tensor's elements is mostly noise.
/// A tensor of which they cannot tell that it is not 0 must not get an endless length scale, along which it
/// would move without limit; this is one of 5.8 times the mean's.
const SMALLEST_SHARE: f64 = 0.03;

/// Fits one length scale to each tensor; `tensors` are those of the samples, in any order, with their sizes.
///
/// With v_k = `grad_variance`/d_k, the variance of an element of tensor k from [`tensor_variances`], and v =
/// Σ `grad_variance`/Σ d_k, their mean over all elements, the factor of the length scale is f_k =
/// √(v/max(v_k, 0.03·v)). So Σ⁻¹ is f_k² = v/v_k on tensor k: E\[∇J∇Jᵀ\] = −C'(0)·Σ, taken literally (paper,
/// section "Geometric anisotropy/Adaptive step sizes"). Variances below 3 % of the mean are raised to it, for
/// samples cannot tell them from 0. The overall scale of the factors has no effect on steps, as the moments
/// measure in the same norm.
///
/// # Errors
/// Those of [`tensor_variances`]; [`Error::Tensor`] names a tensor that only the samples or only `tensors`
/// have, that is listed twice or has no elements; [`EstimationError::NonPositiveIntercept`] when all
/// variances are 0.
pub fn fit_tensors(statistics: &SampleStatistics, tensors: &[TensorDims]) -> Result<TensorFits> {
    let dims = tensors.iter().fold(0, |sum: u64, tensor| sum.saturating_add(tensor.dims));
    check_sizes(tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.dims)), dims)?;
    let mut variances: BTreeMap<String, TensorVariance> =
        tensor_variances(statistics)?.into_iter().map(|v| (v.name.clone(), v)).collect();
    let mut take = |TensorDims { name, .. }: &TensorDims| {
        let problem = "is not among the tensors whose gradient norms were sampled: leave it out, or draw the samples anew";
        variances.remove(name).ok_or_else(|| Error::tensor(name, problem))
    };
    let taken = tensors.iter().map(&mut take).collect::<Result<Vec<_>>>()?;
    if let Some(name) = variances.keys().next() {
        return Err(Error::tensor(
            name,
            "was sampled, but its number of elements is not given: list it, too",
        ));
    }
    let sum = taken.iter().map(|variance| variance.grad_variance).collect::<Sum>().value();
    let mean = sum / dims as f64;
    if mean <= 0.0 {
        return Err(EstimationError::NonPositiveIntercept { quantity: "grad_variance", value: mean }.into());
    }
    let fits: Vec<TensorFit> = taken
        .into_iter()
        .zip(tensors)
        .map(|(TensorVariance { name, grad_variance, noise_grad_variance }, &TensorDims { dims, .. })| {
            let share = grad_variance / dims as f64 / mean;
            let length_scale_factor = share.max(SMALLEST_SHARE).sqrt().recip();
            let raised = share < SMALLEST_SHARE;
            TensorFit { name, dims, grad_variance, noise_grad_variance, length_scale_factor, raised }
        })
        .collect();
    let in_norm = |variance: fn(&TensorFit) -> f64| {
        fits.iter().map(|fit| fit.length_scale_factor.powi(2) * variance(fit)).collect::<Sum>().value()
    };
    let (grad_variance, noise_grad_variance) =
        (in_norm(|fit| fit.grad_variance), in_norm(|fit| fit.noise_grad_variance));
    Ok(TensorFits { tensors: fits, grad_variance, noise_grad_variance })
}

/// The line through the means with no coefficient below 0.
fn admissible_line(abscissae: &[Abscissa], means: &[f64]) -> Line {
    let mean = |value: &dyn Fn(&Abscissa, f64) -> f64| {
        let sum: Sum = abscissae.iter().zip(means).map(|(a, &y)| a.count * value(a, y)).collect();
        sum.value() / abscissae.iter().map(|a| a.count).sum::<f64>()
    };
    match iterate(abscissae, |_| means) {
        Ok(found) if found.line.intercept >= 0.0 && found.line.slope >= 0.0 => found.line,
        Ok(found) if found.line.intercept >= 0.0 => Line { intercept: mean(&|_, y| y), slope: 0.0 },
        _ => Line { intercept: 0.0, slope: mean(&|a, y| y / a.x) },
    }
}
