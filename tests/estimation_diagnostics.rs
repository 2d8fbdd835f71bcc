//! Diagnostics on simulated data that does, and data that does not, meet the assumptions.

mod estimation_support;

use estimation_support::Random;
use rfdescent::estimation::{Diagnostics, Sample, SampleStatistics, fit};

/// `n` samples at four batch sizes; losses from standardised `noise`, ‖g‖² a scaled χ² with `dims` degrees of
/// freedom.
fn simulated(seed: u64, n: usize, dims: usize, noise: impl Fn(&mut Random) -> f64) -> Vec<Sample> {
    let mut random = Random::new(seed);
    (0..n)
        .map(|i| {
            let batch_size = [20, 60, 225, 900][i % 4];
            let inverse = 1.0 / batch_size as f64;
            let loss = 2.7 + noise(&mut random) * (0.01 + 0.85 * inverse).sqrt();
            let chi2: f64 = (0..dims).map(|_| random.normal().powi(2)).sum();
            let sq_grad_norm = (500.0 + 9e4 * inverse) * chi2 / dims as f64;
            Sample { loss, sq_grad_norm, batch_size }
        })
        .collect()
}

fn diagnostics(samples: &[Sample], dims: Option<u64>) -> Diagnostics {
    let mut shards = [SampleStatistics::new(), SampleStatistics::new()];
    for (i, sample) in samples.iter().enumerate() {
        shards[i % 3 % 2].push(sample).unwrap();
    }
    let [mut statistics, other] = shards;
    statistics.merge(&other);
    Diagnostics::new(&statistics, &fit(&statistics).unwrap(), dims)
}

const N: usize = 4000;

#[test]
fn gaussian_and_isotropic() {
    let d = diagnostics(&simulated(1, N, 50, Random::normal), Some(50));
    // Standard deviations of skewness, kurtosis: √(6/n) = 0.039, √(24/n) = 0.077; bounds at four of them.
    assert!(d.skewness.abs() < 0.155 && d.excess_kurtosis.abs() < 0.31, "{d:?}");
    assert!(d.normality_p_value.unwrap() > 1e-4, "{d:?}");
    // The relative variance of n values with excess kurtosis 12/d has a relative standard deviation of
    // √((2 + 12/d)/n) = 0.0237; bound at four.
    assert!((d.grad_spread_ratio.unwrap() - 1.0).abs() < 0.095, "{d:?}");
    assert!((d.grad_effective_dims.unwrap() / 50.0 - 1.0).abs() < 0.105, "{d:?}");
}

#[test]
fn normality_p_values_are_uniform_for_gaussian_losses() {
    let rejected = (0..1000).filter(|&seed| {
        let samples = simulated(seed, 200, 1, Random::normal);
        diagnostics(&samples, None).normality_p_value.unwrap() < 0.05
    });
    // Binomial(1000, 0.05): standard deviation 6.9. The transformations are good to a percent or so at n =
    // 200: 50 ± 35.
    let rejected = rejected.count();
    assert!((15..=85).contains(&rejected), "{rejected}");
}

#[test]
fn skewed_losses_are_found() {
    // Exponential: skewness 2, excess kurtosis 6; the latter's estimate has a standard deviation of about
    // √(μ₈/n) = √(14833/4000) = 1.9.
    let d = diagnostics(&simulated(2, N, 50, |r| -r.uniform().ln() - 1.0), Some(50));
    assert!((d.skewness - 2.0).abs() < 0.5, "{d:?}");
    assert!((d.excess_kurtosis - 6.0).abs() < 4.0, "{d:?}");
    assert!(d.normality_p_value.unwrap() < 1e-10, "{d:?}");
}

#[test]
fn flat_losses_are_found() {
    // Uniform on ±√3: skewness 0, excess kurtosis −1.2, whose estimate has a standard deviation below
    // √(24/n).
    let d = diagnostics(&simulated(3, N, 50, |r| 3f64.sqrt() * (2.0 * r.uniform() - 1.0)), None);
    assert!(d.skewness.abs() < 0.155 && (d.excess_kurtosis + 1.2).abs() < 0.2, "{d:?}");
    assert!(d.normality_p_value.unwrap() < 1e-10, "{d:?}");
    assert_eq!(d.grad_spread_ratio, None);
}

#[test]
fn gradients_confined_to_few_directions_are_found() {
    // 5 directions where the network has 5000 parameters: a ratio of 1000, relative std √((2 + 12/5)/n) =
    // 0.033; four.
    let d = diagnostics(&simulated(4, N, 5, Random::normal), Some(5000));
    assert!((d.grad_spread_ratio.unwrap() / 1000.0 - 1.0).abs() < 0.133, "{d:?}");
}

#[test]
fn the_normality_test_needs_twenty_samples() {
    let d = diagnostics(&simulated(7, 16, 5, Random::normal), None);
    assert_eq!((d.normality_statistic, d.normality_p_value), (None, None));
}

/// A power of two scales everything exactly, at the smallest scale that a fit accepts as at any other.
#[test]
fn the_scale_of_the_loss_does_not_matter() {
    let samples = simulated(5, 400, 5, Random::normal);
    // 0.1 is the smallest standard deviation: 0.1·2⁻²⁴⁵ = 1.8e-75.
    let scale = 2f64.powi(-245);
    let scaled: Vec<Sample> = samples
        .iter()
        .map(|s| Sample { loss: s.loss * scale, sq_grad_norm: s.sq_grad_norm * scale * scale, ..*s })
        .collect();
    assert_eq!(diagnostics(&scaled, Some(5)), diagnostics(&samples, Some(5)));
}
