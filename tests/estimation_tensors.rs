//! Length scales by tensor: from per-tensor squared gradient norms to factors, and what does not fit.

use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rfdescent::Error;
use rfdescent::covariance::sigma_norm;
use rfdescent::estimation::*;

const BATCH_SIZES: [u64; 5] = [20, 50, 225, 1000, 4000];

/// A tensor with the variances of the cost's gradient and of one example's noise, per element.
#[derive(Clone, Debug)]
struct Truth {
    dims: u64,
    variance: f64,
    noise: f64,
}

fn dims(truths: &[Truth]) -> Vec<TensorDims> {
    truths.iter().enumerate().map(|(k, t)| TensorDims { name: format!("t{k}"), dims: t.dims }).collect()
}

/// Samples whose ‖g_k‖² are d_k·(variance + noise/b)·`factor()`.
fn statistics(truths: &[Truth], per_size: usize, mut factor: impl FnMut(&Truth) -> f64) -> SampleStatistics {
    let (mut statistics, tensors) = (SampleStatistics::new(), dims(truths));
    for b in BATCH_SIZES {
        for i in 0..per_size {
            let squares: Vec<f64> = truths
                .iter()
                .map(|t| t.dims as f64 * (t.variance + t.noise / b as f64) * factor(t))
                .collect();
            let sign = if i % 2 == 0 { 1.0 } else { -1.0 };
            let loss = 2.0 + sign * (0.01 + 0.8 / b as f64).sqrt();
            let sample = Sample { loss, sq_grad_norm: squares.iter().sum(), batch_size: b };
            let names = tensors.iter().map(|tensor| tensor.name.as_str());
            statistics.push_tensors(&sample, names.zip(squares)).unwrap();
        }
    }
    statistics
}

/// χ² with d degrees of freedom over d, by a sum of squared normal variables.
fn chi_square(rng: &mut ChaCha8Rng, d: u64) -> f64 {
    let mut uniform = || ((rng.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64;
    let square = |_| -2.0 * uniform().ln() * (std::f64::consts::TAU * uniform()).cos().powi(2);
    (0..d).map(square).sum::<f64>() / d as f64
}

fn truth() -> impl Strategy<Value = Truth> {
    // Variances within a factor of 10 of each other are all above 3 % of any mean of them.
    (1u64..100_000, 1.0f64..10.0, 0.0f64..1e4).prop_map(|(dims, variance, noise)| Truth {
        dims,
        variance,
        noise,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    /// ‖g_k‖² exactly on the line. The means are rounded to a few ε of at most variance + noise/20 ≤
    /// 500·variance; the weights favour the largest batch, where that is variance + noise/4000 ≤
    /// 3.5·variance. So the intercept is known to a few hundred ε, and the iteration ends within 1e-12 of its
    /// limit or at the rounding it allows for (64 ε carried to the axis): 1e-11 leaves a margin. The slope is
    /// known to the same rounding of the means, over 1/20.
    #[test]
    fn exact_data_gives_the_exact_factors(truths in prop::collection::vec(truth(), 1..6)) {
        let statistics = statistics(&truths, 2, |_| 1.0);
        let fits = fit_tensors(&statistics, &dims(&truths)).unwrap();
        let total = |f: fn(&Truth) -> f64| truths.iter().map(|t| t.dims as f64 * f(t)).sum::<f64>();
        let elements = total(|_| 1.0);
        let mean = total(|t| t.variance) / elements;
        for (fit, truth) in fits.tensors.iter().zip(&truths) {
            let d = truth.dims as f64;
            prop_assert!((fit.grad_variance / (d * truth.variance) - 1.0).abs() < 1e-11, "{fit:?} {truth:?}");
            let slope_error = (fit.noise_grad_variance / d - truth.noise).abs();
            prop_assert!(slope_error < 1e-11 * (truth.noise + 4000.0 * truth.variance), "{fit:?} {truth:?}");
            prop_assert!((fit.length_scale_factor / (mean / truth.variance).sqrt() - 1.0).abs() < 1e-11);
            prop_assert!(!fit.raised);
        }
        // Σ f_k²·d_k·v_k = Σ d_k·v, so with nothing raised the norm's variance is that of the whole gradient.
        prop_assert!((fits.grad_variance / (elements * mean) - 1.0).abs() < 1e-10);
        let whole = fit(&statistics).unwrap();
        let moments = fits.moments(&whole);
        prop_assert_eq!((moments.mean, moments.variance, moments.noise_variance), (whole.mean, whole.variance, whole.noise_variance));
        prop_assert_eq!((moments.grad_variance, moments.dims as f64), (fits.grad_variance, elements));
        let noise = sigma_norm(&fits.tensors.iter().map(|t| (t.length_scale_factor, t.noise_grad_variance)).collect::<Vec<_>>());
        prop_assert!((moments.noise_grad_variance - noise * noise).abs() <= 1e-14 * noise * noise);
    }
}

/// Standard deviation of an intercept for Gaussian gradients with the right weights, of χ²_d/d times a line
/// of these coefficients: that of the paper's lemma "Variance of β̂₀", with the variance 2·v_b²/d of an
/// observation in place of 2·v_b².
fn intercept_std(truth: &Truth, per_size: usize) -> f64 {
    let mut s = [0.0; 3];
    for b in BATCH_SIZES.map(|b| b as f64) {
        let v = truth.variance + truth.noise / b;
        let weight = per_size as f64 / (2.0 * v * v / truth.dims as f64);
        (s[0], s[1], s[2]) = (s[0] + weight, s[1] + weight / b, s[2] + weight / (b * b));
    }
    (s[2] / (s[0] * s[2] - s[1] * s[1])).sqrt()
}

#[test]
fn equal_variances_give_factors_of_1() {
    let truths: Vec<Truth> =
        [40, 100, 300].map(|dims| Truth { dims, variance: 2e-3, noise: 0.5 }).into_iter().collect();
    let (mut rng, per_size) = (ChaCha8Rng::seed_from_u64(5), 100);
    let statistics = statistics(&truths, per_size, |truth| chi_square(&mut rng, truth.dims));
    let fits = fit_tensors(&statistics, &dims(&truths)).unwrap();
    // f = √(v/v_k): to first order half of the relative errors of v_k and of the mean v, of which the worst
    // tensor bounds both.
    let relative = |truth: &Truth| intercept_std(truth, per_size) / truth.variance;
    let worst = relative(&truths[0]);
    for (fit, truth) in fits.tensors.iter().zip(&truths) {
        let bound = 5.0 * 0.5 * (relative(truth) + worst);
        assert!(bound < 0.5, "says nothing: {bound}");
        println!("factor {} within {bound} of 1", fit.length_scale_factor);
        assert!((fit.length_scale_factor - 1.0).abs() < bound, "{fit:?}, bound {bound}");
        assert_ne!(fit.length_scale_factor, 1.0, "nothing random");
    }
}

#[test]
fn different_variances_are_found_in_noise() {
    let truths: Vec<Truth> = [(40, 8e-3, 0.5), (100, 1e-3, 0.1), (300, 4e-3, 1.0)]
        .map(|(dims, variance, noise)| Truth { dims, variance, noise })
        .into_iter()
        .collect();
    let (mut rng, per_size) = (ChaCha8Rng::seed_from_u64(6), 200);
    let statistics = statistics(&truths, per_size, |truth| chi_square(&mut rng, truth.dims));
    for (fit, truth) in fit_tensors(&statistics, &dims(&truths)).unwrap().tensors.iter().zip(&truths) {
        let (d, std) = (truth.dims as f64, intercept_std(truth, per_size));
        assert!((fit.grad_variance / d - truth.variance).abs() < 5.0 * std, "{fit:?} {truth:?} ± {std}");
        assert!(5.0 * std < 0.7 * truth.variance, "says nothing");
    }
}

/// Four tensors of equal size: one with all the variance, and three of which the samples say less than 3 % of
/// the mean.
#[test]
fn what_cannot_be_told_from_0_is_raised() {
    let truths = [
        Truth { dims: 100, variance: 4.0, noise: 10.0 },
        Truth { dims: 100, variance: 0.01, noise: 10.0 },
        Truth { dims: 100, variance: -1e-4, noise: 10.0 },
        Truth { dims: 100, variance: 0.0, noise: 0.0 },
    ];
    let fits = fit_tensors(&statistics(&truths, 2, |_| 1.0), &dims(&truths)).unwrap();
    let mean = 4.01 / 4.0;
    let largest = (1.0f64 / 0.03).sqrt();
    let got: Vec<(f64, bool)> = fits.tensors.iter().map(|t| (t.length_scale_factor, t.raised)).collect();
    let want = [((mean / 4.0f64).sqrt(), false), (largest, true), (largest, true), (largest, true)];
    for ((got, raised), (want, wanted)) in got.into_iter().zip(want) {
        assert!((got / want - 1.0).abs() < 1e-11 && raised == wanted, "{got} {raised}");
    }
    // A negative line is the one through the origin: β₁ the mean of b·‖g‖².
    let b = BATCH_SIZES.map(|b| 100.0 * (10.0 - 1e-4 * b as f64)).iter().sum::<f64>() / 5.0;
    assert_eq!(fits.tensors[2].grad_variance, 0.0);
    assert!((fits.tensors[2].noise_grad_variance / b - 1.0).abs() < 1e-13);
    assert_eq!((fits.tensors[3].grad_variance, fits.tensors[3].noise_grad_variance), (0.0, 0.0));
    // The norm's variance is what was measured, not what it was raised to: f²·400 + 1/0.03·1.
    let variance = mean / 4.0 * 400.0 + 1.0 / 0.03;
    assert!((fits.grad_variance / variance - 1.0).abs() < 1e-11, "{}", fits.grad_variance);

    // A norm that falls with the batch size more slowly than its variance allows: no noise.
    let rising = [Truth { dims: 10, variance: 1.0, noise: -0.5 }];
    let fits = fit_tensors(&statistics(&rising, 2, |_| 1.0), &dims(&rising)).unwrap();
    let level = BATCH_SIZES.map(|b| 10.0 * (1.0 - 0.5 / b as f64)).iter().sum::<f64>() / 5.0;
    assert_eq!(fits.tensors[0].noise_grad_variance, 0.0);
    assert!((fits.tensors[0].grad_variance / level - 1.0).abs() < 1e-13);

    let nothing = [Truth { dims: 10, variance: 0.0, noise: 0.0 }];
    let error = fit_tensors(&statistics(&nothing, 2, |_| 1.0), &dims(&nothing)).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Estimation(EstimationError::NonPositiveIntercept { quantity: "grad_variance", .. })
        ),
        "{error}"
    );
}

#[test]
fn tensors_that_do_not_match_are_named() {
    let truths =
        [Truth { dims: 10, variance: 1.0, noise: 1.0 }, Truth { dims: 5, variance: 1.0, noise: 1.0 }];
    let statistics = statistics(&truths, 2, |_| 1.0);
    let list = |names: &[(&str, u64)]| -> Vec<TensorDims> {
        names.iter().map(|&(name, dims)| TensorDims { name: name.into(), dims }).collect()
    };
    for (tensors, name, words) in [
        (list(&[("t0", 10)]), "t1", "is not given"),
        (list(&[("t0", 10), ("t1", 5), ("t2", 5)]), "t2", "not among"),
        (list(&[("t0", 10), ("t0", 10), ("t1", 5)]), "t0", "twice"),
        (list(&[("t0", 10), ("t1", 0)]), "t1", "no elements"),
    ] {
        match fit_tensors(&statistics, &tensors) {
            Err(Error::Tensor { tensor, problem }) => {
                assert!(tensor == name && problem.contains(words), "{tensor}: {problem}")
            }
            other => panic!("{other:?}"),
        }
    }
    // In the order asked for.
    let fits = fit_tensors(&statistics, &list(&[("t1", 5), ("t0", 10)])).unwrap();
    assert_eq!(
        fits.factors().iter().map(|t| (t.name.as_str(), t.dims)).collect::<Vec<_>>(),
        [("t1", 5), ("t0", 10)]
    );

    let mut without = SampleStatistics::new();
    without.push(&Sample { loss: 1.0, sq_grad_norm: 1.0, batch_size: 20 }).unwrap();
    without.push(&Sample { loss: 1.0, sq_grad_norm: 1.0, batch_size: 50 }).unwrap();
    let is_no_tensors = |result: rfdescent::Result<TensorFits>| {
        matches!(result, Err(Error::Estimation(EstimationError::NoTensors)))
    };
    assert!(is_no_tensors(fit_tensors(&without, &dims(&truths))));
    // Merged with samples of other tensors, only the whole gradient is left.
    let mut mixed = statistics.clone();
    mixed.merge(&without);
    assert!(is_no_tensors(fit_tensors(&mixed, &dims(&truths))));
    assert_eq!(mixed.batches(), statistics.batches() + 2);
    assert!(matches!(
        tensor_variances(&SampleStatistics::new()),
        Err(Error::Estimation(EstimationError::TooFewBatchSizes { found: 0 }))
    ));
}

#[test]
fn the_fit_of_the_whole_gradient_does_not_see_the_tensors() {
    let truths =
        [Truth { dims: 40, variance: 8e-3, noise: 0.5 }, Truth { dims: 7, variance: 1e-3, noise: 0.1 }];
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let with = statistics(&truths, 20, |truth| chi_square(&mut rng, truth.dims));
    let (mut rng, mut without) = (ChaCha8Rng::seed_from_u64(7), SampleStatistics::new());
    for b in BATCH_SIZES {
        for i in 0..20 {
            let squares: Vec<f64> = truths
                .iter()
                .map(|t| t.dims as f64 * (t.variance + t.noise / b as f64) * chi_square(&mut rng, t.dims))
                .collect();
            let sign = if i % 2 == 0 { 1.0 } else { -1.0 };
            let loss = 2.0 + sign * (0.01 + 0.8 / b as f64).sqrt();
            without.push(&Sample { loss, sq_grad_norm: squares.iter().sum(), batch_size: b }).unwrap();
        }
    }
    assert_eq!(fit(&with).unwrap(), fit(&without).unwrap());
}
