//! The paper's bootstrapped weighted least squares for mean and variances.

use super::EstimationError;
use super::least_squares::{Abscissa, Converged, Failure, Line, Sum, WeightedDesign, iterate};
use super::statistics::{Group, SampleStatistics};
use crate::{Moments, Result};
use serde::Serialize;

/// Mean and variances of the cost and of its mini-batch noise, estimated from samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fit {
    /// μ, the mean of the cost.
    pub mean: f64,
    /// C(0), the variance of the cost; > 0.
    pub variance: f64,
    /// C_ε(0), the variance of one example's loss around the cost; ≥ 0.
    pub noise_variance: f64,
    /// −d·C'(0), the expected squared norm of the cost's gradient; > 0.
    pub grad_variance: f64,
    /// −d·C'_ε(0), the expected squared norm of one example's gradient noise; ≥ 0.
    pub noise_grad_variance: f64,
    /// Estimated standard deviation of `variance` divided by it (paper, Eq. "relative std").
    pub relative_std: f64,
    /// Mini-batches used: as many as samples.
    pub batches: u64,
    /// Examples used: the sum of the batch sizes.
    pub examples: u64,
    /// Reweightings until mean, variance and noise variance settled.
    pub iterations_loss: u32,
    /// Reweightings until the gradient's variances settled.
    pub iterations_grad: u32,
}

impl Fit {
    /// The moments a covariance model is made of, for a cost of `dims` parameters.
    pub fn moments(&self, dims: u64) -> Moments {
        Moments {
            mean: self.mean,
            variance: self.variance,
            noise_variance: self.noise_variance,
            grad_variance: self.grad_variance,
            noise_grad_variance: self.noise_grad_variance,
            dims,
        }
    }

    /// `None` when `relative_std` is at most `tolerance`, else a warning that says how many more examples are
    /// needed.
    pub fn reliability(&self, tolerance: f64) -> Option<Unreliable> {
        (self.relative_std > tolerance).then(|| {
            // Var(β̂₀) falls with 1/n as long as batch sizes keep their proportions.
            let needed = self.examples as f64 * (self.relative_std / tolerance).powi(2);
            Unreliable {
                relative_std: self.relative_std,
                tolerance,
                examples: self.examples,
                // Saturates where a tolerance is out of reach.
                further_examples: (needed.ceil() as u64).saturating_sub(self.examples),
            }
        })
    }
}

/// Warning: the fit is there, but C(0) is not known as precisely as asked.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Unreliable {
    /// Relative standard deviation of the fitted C(0).
    pub relative_std: f64,
    /// What it should be below.
    pub tolerance: f64,
    /// Examples used so far.
    pub examples: u64,
    /// Examples still to be drawn, at batch sizes in the same proportions; above 10¹⁵ an indication only.
    pub further_examples: u64,
}

impl std::fmt::Display for Unreliable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A number of which nobody could draw half.
        const OUT_OF_REACH: u64 = 1_000_000_000_000_000;
        let Unreliable { relative_std, tolerance, examples, further_examples } = self;
        write!(
            f,
            "the fitted variance is uncertain: relative standard deviation {relative_std:.3} exceeds the tolerance \
             {tolerance} after {examples} examples; "
        )?;
        if *further_examples > OUT_OF_REACH {
            write!(f, "more than {OUT_OF_REACH:e} more would be needed, so raise the tolerance")
        } else {
            write!(f, "about {further_examples} more are needed at batch sizes in the same proportions")
        }
    }
}

/// Fits mean and variances to the samples (paper, sections "Variance estimation" and "Variance estimation in
/// detail").
///
/// With v_b = β₀ + β₁/b, starting at (β₀, β₁) = (0, 1), repeat until neither coefficient changes by more than
/// 1e-12 relative: μ is the mean of the losses with weights 1/v_b; (β₀, β₁) = (C(0), C_ε(0)) is the
/// regression of (L − μ)² on 1/b with weights 1/v_b², because Var (L − μ)² = 2·v_b². The gradient's variances
/// are the same regression of ‖g‖². One iteration costs O(number of distinct batch sizes).
///
/// Statistics do not say which sample is foreign to the others, and a single one may decide over the fit:
/// where the samples themselves are at hand, [`SampleTable::fit`](super::SampleTable::fit) does.
///
/// # Errors
/// Each an [`EstimationError`]: fewer than two distinct batch sizes, or all within a factor 1 + 1e-9; losses
/// or norms that are all the same number; losses that spread by less than 1e-75, or gradients that are
/// smaller, without being 0; an intercept (C(0), −d·C'(0)) that is not positive; a negative slope (C_ε(0),
/// −d·C'_ε(0)); no convergence within 10,000 iterations.
pub fn fit(statistics: &SampleStatistics) -> Result<Fit> {
    Ok(try_fit(statistics)?)
}

pub(super) fn try_fit(statistics: &SampleStatistics) -> std::result::Result<Fit, EstimationError> {
    let abscissae = abscissae(statistics)?;
    check_spread(statistics)?;
    let squares_about = |line| {
        let mean = weighted_mean(statistics, line);
        statistics.groups().map(|(_, g)| g.loss_powers_about(mean)[0] / g.count()).collect::<Vec<_>>()
    };
    check_size("variance", &squares_about(Line::START))?;
    let loss = iterate(&abscissae, squares_about);
    let Converged { line, iterations: iterations_loss } = checked(loss, "variance", "noise_variance")?;
    // The fourth powers that diagnostics take have to stay representable at each batch size.
    let smallest = abscissae.iter().map(|a| line.at(a.x)).fold(f64::INFINITY, f64::min);
    check_size("variance", &[smallest])?;

    let sq_grad_norms: Vec<f64> = statistics.groups().map(|(_, group)| group.mean_sq_grad_norm()).collect();
    check_size("grad_variance", &sq_grad_norms)?;
    let grad = iterate(&abscissae, |_| &sq_grad_norms);
    let Converged { line: grad_line, iterations: iterations_grad } =
        checked(grad, "grad_variance", "noise_grad_variance")?;
    let smallest = abscissae.iter().map(|a| grad_line.at(a.x)).fold(f64::INFINITY, f64::min);
    check_size("grad_variance", &[smallest])?;

    Ok(Fit {
        mean: weighted_mean(statistics, line),
        variance: line.intercept,
        noise_variance: line.slope,
        grad_variance: grad_line.intercept,
        noise_grad_variance: grad_line.slope,
        relative_std: WeightedDesign::new(line, &abscissae).intercept_std() / line.intercept,
        batches: statistics.batches(),
        examples: statistics.examples(),
        iterations_loss,
        iterations_grad,
    })
}

/// Batch sizes this close to each other (relative) leave nothing of a line in 1/b but rounding.
const TOO_CLOSE: f64 = 1e-9;

/// Where there are samples on the axis of 1/b; an error where they determine no line.
pub(super) fn abscissae(
    statistics: &SampleStatistics,
) -> std::result::Result<Vec<Abscissa>, EstimationError> {
    let found = statistics.distinct_batch_sizes();
    if found < 2 {
        return Err(EstimationError::TooFewBatchSizes { found });
    }
    let sizes = || statistics.groups().map(|(b, _)| b);
    let (smallest, largest) = (sizes().next().unwrap_or(1), sizes().last().unwrap_or(1));
    if (largest - smallest) as f64 <= TOO_CLOSE * largest as f64 {
        return Err(EstimationError::BatchSizesTooClose { smallest, largest });
    }
    Ok(statistics.groups().map(|(b, group)| Abscissa { x: 1.0 / b as f64, count: group.count() }).collect())
}

/// Squares below are close to losing digits when multiplied with each other.
const SMALLEST_SQUARE: f64 = 1e-150;

/// Refuses mean squares that are too small, but not all of them 0: the fit has something better to say of
/// those.
fn check_size(quantity: &'static str, squares: &[f64]) -> std::result::Result<(), EstimationError> {
    let value = squares.iter().copied().fold(0.0, f64::max);
    if value > 0.0 && value < SMALLEST_SQUARE {
        return Err(EstimationError::TooSmall { quantity, value });
    }
    Ok(())
}

/// Refuses losses or norms that are one and the same number, of which the fit would only say that a variance
/// is 0 or that there is no noise.
fn check_spread(statistics: &SampleStatistics) -> std::result::Result<(), EstimationError> {
    let count = statistics.batches();
    // The value that all batch sizes have, if there is one.
    let shared = |constant: fn(&Group) -> Option<f64>| {
        let mut values = statistics.groups().map(|(_, group)| constant(group));
        let first = values.next()??;
        values.all(|other| other == Some(first)).then_some(first)
    };
    if let Some(value) = shared(Group::constant_loss) {
        return Err(EstimationError::AllEqual { quantity: "loss", value, count });
    }
    if let Some(square) = shared(Group::constant_sq_grad_norm) {
        return Err(EstimationError::AllEqual { quantity: "grad_norm", value: square.sqrt(), count });
    }
    Ok(())
}

/// Mean of the losses with weights 1/v_b, the inverse of their variances.
fn weighted_mean(statistics: &SampleStatistics, line: Line) -> f64 {
    // Relative to the smallest variance, found at the largest batch size: no overflow; and relative to some
    // loss: no cancellation where the spread is far below the mean.
    let reference = statistics.groups().map(|(b, _)| line.at(1.0 / b as f64)).fold(f64::INFINITY, f64::min);
    let origin = statistics.groups().next().map_or(0.0, |(_, group)| group.mean_loss());
    let (mut total, mut weighted) = (Sum::default(), Sum::default());
    for (b, group) in statistics.groups() {
        let weight = group.count() * (reference / line.at(1.0 / b as f64));
        total += weight;
        weighted += weight * (group.mean_loss() - origin);
    }
    origin + weighted.value() / total.value()
}

fn checked(
    outcome: std::result::Result<Converged, Failure>,
    intercept: &'static str,
    slope: &'static str,
) -> std::result::Result<Converged, EstimationError> {
    let converged = outcome.map_err(|failure| match failure {
        Failure::Vanished(line) => {
            EstimationError::NonPositiveIntercept { quantity: intercept, value: line.intercept }
        }
        Failure::NotConverged { iterations, change } => {
            EstimationError::NotConverged { quantity: intercept, iterations, change }
        }
    })?;
    let Line { intercept: value, slope: slope_value } = converged.line;
    if value <= 0.0 {
        return Err(EstimationError::NonPositiveIntercept { quantity: intercept, value });
    }
    if slope_value < 0.0 {
        return Err(EstimationError::NegativeSlope { quantity: slope, value: slope_value });
    }
    Ok(converged)
}
