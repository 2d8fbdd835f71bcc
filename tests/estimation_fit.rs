//! The iterated weighted least squares against fits of real sample files in extended precision, and its
//! errors.

use rfdescent::Error;
use rfdescent::estimation::{EstimationError, Fit, Sample, SampleStatistics, fit, read_samples};
use std::path::PathBuf;

/// The folder of reference values, if this checkout has one.
fn shared(folder: &str) -> Option<PathBuf> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../shared")).join(folder);
    if !path.exists() {
        say_skipped(format_args!("skipped: {} not found", path.display()));
        return None;
    }
    Some(path)
}

struct Golden {
    file: String,
    batches: u64,
    examples: u64,
    /// mean, variance, noise_variance, grad_variance, noise_grad_variance, relative_std
    values: [f64; 6],
}

const COLUMNS: [&str; 6] =
    ["mean", "variance", "noise_variance", "grad_variance", "noise_grad_variance", "relative_std"];

fn golden() -> Option<Vec<Golden>> {
    let path = shared("golden")?.join("covariance_fits.csv");
    let mut reader = csv::Reader::from_path(path).unwrap();
    let header = reader.headers().unwrap().clone();
    let column = |name: &str| header.iter().position(|h| h == name).unwrap();
    let rows = reader.records().map(|record| {
        let record = record.unwrap();
        Golden {
            file: record[column("file")].into(),
            batches: record[column("batches")].parse().unwrap(),
            examples: record[column("samples")].parse().unwrap(),
            values: COLUMNS.map(|name| record[column(name)].parse().unwrap()),
        }
    });
    Some(rows.collect())
}

fn values(fit: &Fit) -> [f64; 6] {
    [fit.mean, fit.variance, fit.noise_variance, fit.grad_variance, fit.noise_grad_variance, fit.relative_std]
}

fn statistics<'a>(samples: impl IntoIterator<Item = &'a Sample>) -> SampleStatistics {
    let mut statistics = SampleStatistics::new();
    for sample in samples {
        statistics.push(sample).unwrap();
    }
    statistics
}

/// 1e-9 is required. The iteration stops at a relative change of 1e-12 and each step shrinks the change to
/// about a third (26 steps from order 1 to 1e-12 for the slowest file), so it ends within 1e-12 of its limit;
/// rounding adds 1e-15 times the condition of the intercept (v at the largest batch size over β₀, below 10):
/// 1e-11 leaves a margin of ten.
const TOLERANCE: f64 = 1e-11;

#[test]
fn golden_fits_from_samples_and_from_merged_shards() {
    let (Some(golden), Some(data)) = (golden(), shared("data/covariance")) else {
        return;
    };
    assert_eq!(golden.len(), 14);
    let (mut worst, mut worst_merged) = ([0.0f64; 6], [0.0f64; 6]);
    for row in &golden {
        let samples = read_samples(&data.join(&row.file)).unwrap();
        let whole = statistics(&samples);
        assert_eq!((whole.batches(), whole.examples()), (row.batches, row.examples), "{}", row.file);

        // Seven shards, of every seventh sample each, merged as ((4 + 1) + …) in a fixed shuffled order.
        let shard = |k: usize| statistics(samples.iter().skip(k).step_by(7));
        let mut merged = SampleStatistics::new();
        for k in [4, 1, 6, 0, 3, 5, 2] {
            merged.merge(&shard(k));
        }
        for (statistics, worst) in [(&whole, &mut worst), (&merged, &mut worst_merged)] {
            let fitted = fit(statistics).unwrap();
            for (k, (got, want)) in values(&fitted).into_iter().zip(row.values).enumerate() {
                let error = (got / want - 1.0).abs();
                assert!(error <= TOLERANCE, "{} {}: {got} instead of {want}", row.file, COLUMNS[k]);
                worst[k] = worst[k].max(error);
            }
        }
    }
    println!("largest relative errors of {COLUMNS:?}: samples {worst:?}, merged {worst_merged:?}");
}

#[test]
fn an_unreliable_fit_comes_with_a_warning_that_says_how_many_more() {
    let Some(data) = shared("data/covariance") else {
        return;
    };
    let samples = read_samples(&data.join("cifar100_resnet18_short.csv")).unwrap();
    let fitted = fit(&statistics(&samples)).unwrap();
    let warning = fitted.reliability(0.3).unwrap();
    // 17017 examples at 2.87444 → 17017·(2.87444/0.3)² = 1,562,255 in total.
    let total = (warning.examples + warning.further_examples) as f64;
    assert!((total - 17017.0 * (fitted.relative_std / 0.3).powi(2)).abs() <= 1.0);
    assert!(warning.to_string().contains("more are needed"), "{warning}");
    assert_eq!(fitted.reliability(3.0), None);
}

/// Samples whose loss and ‖g‖² are exactly as the model says: at each b two losses at μ ± √v_b.
fn exact(variance: f64, noise: f64, grad: f64, grad_noise: f64, batch_sizes: &[u64]) -> SampleStatistics {
    let sample = |b: u64, sign: f64| Sample {
        loss: 2.0 + sign * (variance + noise / b as f64).sqrt(),
        sq_grad_norm: grad + grad_noise / b as f64,
        batch_size: b,
    };
    statistics(&batch_sizes.iter().flat_map(|&b| [sample(b, 1.0), sample(b, -1.0)]).collect::<Vec<_>>())
}

#[test]
fn exact_data_gives_the_exact_line() {
    let fitted = fit(&exact(0.01, 0.8, 500.0, 9e4, &[20, 50, 225, 1000])).unwrap();
    // Rounding of a few units at values whose largest-to-intercept ratio is below 10 (variance) and 10
    // (gradient).
    for (got, want) in values(&fitted).into_iter().zip([2.0, 0.01, 0.8, 500.0, 9e4]) {
        assert!((got / want - 1.0).abs() < 1e-12, "{got} {want}");
    }
}

#[test]
fn scale_of_the_loss_does_not_matter() {
    // Powers of two are exact, so every number scales exactly: nothing over- or underflows on the way.
    let fitted = fit(&exact(0.01, 0.8, 500.0, 9e4, &[20, 50, 225, 1000])).unwrap();
    for exponent in [-190, 190] {
        let (s, mut scaled) = (2f64.powi(exponent), SampleStatistics::new());
        for b in [20u64, 50, 225, 1000] {
            for sign in [1.0, -1.0] {
                let loss = 2.0 + sign * (0.01f64 + 0.8 / b as f64).sqrt();
                let sq_grad_norm = (500.0 + 9e4 / b as f64) * s * s;
                scaled.push(&Sample { loss: loss * s, sq_grad_norm, batch_size: b }).unwrap();
            }
        }
        let got = fit(&scaled).unwrap();
        assert_eq!(
            (got.mean, got.variance, got.grad_variance),
            (fitted.mean * s, fitted.variance * s * s, fitted.grad_variance * s * s)
        );
        assert_eq!(got.relative_std, fitted.relative_std);
    }
}

fn error_of(statistics: &SampleStatistics) -> EstimationError {
    match fit(statistics) {
        Err(Error::Estimation(error)) => error,
        other => panic!("expected an estimation error, got {other:?}"),
    }
}

#[test]
fn relative_std_is_the_lemma() {
    let fitted = fit(&exact(0.01, 0.8, 500.0, 9e4, &[20, 50, 225, 1000])).unwrap();
    let mut s = [0.0; 3];
    for b in [20.0, 50.0, 225.0, 1000.0f64] {
        let weight = 2.0 / (2.0 * (0.01 + 0.8 / b).powi(2));
        (s[0], s[1], s[2]) = (s[0] + weight, s[1] + weight / b, s[2] + weight / (b * b));
    }
    let want = (s[2] / (s[0] * s[2] - s[1] * s[1])).sqrt() / 0.01;
    assert!((fitted.relative_std / want - 1.0).abs() < 1e-12, "{} {want}", fitted.relative_std);
}

#[test]
fn samples_that_determine_nothing_are_named_errors() {
    assert!(matches!(error_of(&SampleStatistics::new()), EstimationError::TooFewBatchSizes { found: 0 }));
    assert!(matches!(
        error_of(&exact(1.0, 1.0, 1.0, 1.0, &[20])),
        EstimationError::TooFewBatchSizes { found: 1 }
    ));

    // The spread of the losses falls faster than 1/b: the line cuts the axis below 0.
    let negative = error_of(&exact(-0.001, 0.8, 500.0, 9e4, &[20, 50, 225]));
    assert!(
        matches!(negative, EstimationError::NonPositiveIntercept { quantity: "variance", value } if value < 0.0)
    );
    assert!(negative.to_string().contains("larger batch sizes"), "{negative}");
    let negative = error_of(&exact(0.01, -0.1, 500.0, 9e4, &[20, 50, 225]));
    assert!(matches!(negative, EstimationError::NegativeSlope { quantity: "noise_variance", .. }));
    let negative = error_of(&exact(0.01, 0.8, -100.0, 9e4, &[20, 50, 225]));
    assert!(matches!(negative, EstimationError::NonPositiveIntercept { quantity: "grad_variance", .. }));
    let negative = error_of(&exact(0.01, 0.8, 500.0, -90.0, &[20, 50, 225]));
    assert!(matches!(negative, EstimationError::NegativeSlope { quantity: "noise_grad_variance", .. }));
    // Constant losses, zero gradients.
    let constant = error_of(&exact(0.0, 0.0, 500.0, 9e4, &[20, 50, 225]));
    assert!(matches!(constant, EstimationError::AllEqual { quantity: "loss", count: 6, .. }), "{constant}");
    let flat = error_of(&exact(0.01, 0.8, 0.0, 0.0, &[20, 50, 225]));
    assert!(matches!(flat, EstimationError::AllEqual { quantity: "grad_norm", value: 0.0, .. }));
}

#[test]
fn batch_sizes_that_rounding_cannot_tell_apart_are_named() {
    for (sizes, close) in [
        ([u64::MAX - 1, u64::MAX], true),
        ([1 << 40, (1 << 40) + 1], true),
        ([1_000_000, 1_000_001], false),
        ([1, u64::MAX], false),
    ] {
        let result = fit(&exact(0.01, 0.8, 500.0, 9e4, &sizes));
        let named = matches!(
            &result,
            Err(Error::Estimation(EstimationError::BatchSizesTooClose { smallest, largest }))
                if [*smallest, *largest] == sizes
        );
        assert_eq!(named, close, "{sizes:?}: {result:?}");
    }
}

/// Squares below 1e-150, whose own squares would lose digits.
#[test]
fn scales_at_which_squares_underflow_are_named() {
    for scale in [1e-77, 1e-154, 1e-160] {
        let mut small = SampleStatistics::new();
        for (b, sign) in [(20, 1.0), (20, -1.0), (1000, 0.9), (1000, -0.9)] {
            small
                .push(&Sample { loss: sign * scale, sq_grad_norm: 1.0 + 1.0 / b as f64, batch_size: b })
                .unwrap();
        }
        let error = error_of(&small);
        assert!(matches!(error, EstimationError::TooSmall { quantity: "variance", .. }), "{error}");
    }
    let error = error_of(&exact(0.01, 0.8, 1e-155, 1e-154, &[20, 50, 225]));
    assert!(matches!(error, EstimationError::TooSmall { quantity: "grad_variance", .. }), "{error}");
}

#[test]
fn a_tolerance_out_of_reach_is_said_to_be_so() {
    let fitted = fit(&exact(0.01, 0.8, 500.0, 9e4, &[20, 50, 225, 1000])).unwrap();
    for tolerance in [1e-200, 0.0] {
        let warning = fitted.reliability(tolerance).unwrap().to_string();
        assert!(warning.contains("more than 1e15 more would be needed, so raise the tolerance"), "{warning}");
    }
}

/// Straight to stderr: the test runner shows what passing tests print only when asked.
fn say_skipped(what: std::fmt::Arguments<'_>) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{what}");
}
