//! Sufficient statistics: any way to gather them gives the same moments.

use proptest::prelude::*;
use rfdescent::Error;
use rfdescent::estimation::{EstimationError, Sample, SampleStatistics, fit};

fn gathered(samples: &[Sample]) -> SampleStatistics {
    let mut statistics = SampleStatistics::new();
    for sample in samples {
        statistics.push(sample).unwrap();
    }
    statistics
}

fn samples() -> impl Strategy<Value = Vec<Sample>> {
    let sample = (-5.0f64..5.0, 0.0f64..100.0, 1u64..6);
    prop::collection::vec(
        sample.prop_map(|(loss, sq_grad_norm, b)| Sample {
            loss: 1000.0 + loss,
            sq_grad_norm,
            batch_size: b * b,
        }),
        1..120,
    )
}

/// The numbers of the statistics' file, by batch size: count; mean, m2, m3, m4 of the loss; mean, m2 of ‖g‖².
fn numbers(statistics: &SampleStatistics) -> Vec<(u64, u64, [f64; 6])> {
    let json: serde_json::Value = serde_json::from_str(&statistics.to_json()).unwrap();
    let groups = json["batch_sizes"].as_object().unwrap().iter();
    let mut numbers: Vec<_> = groups
        .map(|(b, group)| {
            let (loss, grad) = (&group["loss"], &group["sq_grad_norm"]);
            let values = [&loss["mean"], &loss["m2"], &loss["m3"], &loss["m4"], &grad["mean"], &grad["m2"]];
            (b.parse().unwrap(), group["count"].as_u64().unwrap(), values.map(|v| v.as_f64().unwrap()))
        })
        .collect();
    numbers.sort_by_key(|n| n.0);
    numbers
}

/// The same by two passes over the samples.
fn two_pass(samples: &[Sample]) -> Vec<(u64, u64, [f64; 6])> {
    let mut sizes: Vec<u64> = samples.iter().map(|s| s.batch_size).collect();
    sizes.sort();
    sizes.dedup();
    sizes
        .into_iter()
        .map(|b| {
            let of = |f: fn(&Sample) -> f64| -> Vec<f64> {
                samples.iter().filter(|s| s.batch_size == b).map(f).collect()
            };
            let (loss, grad) = (of(|s| s.loss), of(|s| s.sq_grad_norm));
            let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
            let power = |values: &[f64], k| values.iter().map(|v| (v - mean(values)).powi(k)).sum::<f64>();
            let values = [
                mean(&loss),
                power(&loss, 2),
                power(&loss, 3),
                power(&loss, 4),
                mean(&grad),
                power(&grad, 2),
            ];
            (b, loss.len() as u64, values)
        })
        .collect()
}

/// Each update rounds a few times at the size of the sums. The losses deviate from their mean of about 1000
/// by at most D = 10 and the ‖g‖² by at most 100: n samples make sums of k-th powers of up to n·D^k, known to
/// n updates of a few roundings, and a mean off by n·2ε·1000 (from which the powers deviate by k·n·D^(k−1)
/// times that).
fn agree(got: &[(u64, u64, [f64; 6])], want: &[(u64, u64, [f64; 6])]) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        prop_assert_eq!((got.0, got.1), (want.0, want.1));
        let n = got.1 as f64;
        let mean = 2.0 * n * f64::EPSILON * 1000.0;
        let power = |k: i32, size: f64| {
            n * size.powi(k) * 10.0 * n * f64::EPSILON + f64::from(k) * n * size.powi(k - 1) * mean
        };
        let bounds = [mean, power(2, 10.0), power(3, 10.0), power(4, 10.0), mean, power(2, 100.0)];
        for (k, bound) in bounds.into_iter().enumerate() {
            prop_assert!((got.2[k] - want.2[k]).abs() <= bound, "{k}: {got:?} {want:?}");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn pushes_agree_with_two_passes(samples in samples()) {
        agree(&numbers(&gathered(&samples)), &two_pass(&samples))?;
    }

    /// Shards by an arbitrary assignment, merged pairwise in an arbitrary order.
    #[test]
    fn merges_in_any_order_agree_with_two_passes(samples in samples(), shards in prop::collection::vec(0usize..7, 120), order in any::<u64>()) {
        let mut parts: Vec<SampleStatistics> = (0..7)
            .map(|k| {
                let shard: Vec<Sample> =
                    samples.iter().zip(&shards).filter(|(_, shard)| **shard == k).map(|(s, _)| *s).collect();
                gathered(&shard)
            })
            .collect();
        let mut random = order;
        while parts.len() > 1 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let other = parts.swap_remove((random >> 33) as usize % parts.len());
            let into = (random >> 13) as usize % parts.len();
            parts[into].merge(&other);
        }
        prop_assert_eq!(parts[0].batches(), samples.len() as u64);
        prop_assert_eq!(parts[0].examples(), samples.iter().map(|s| s.batch_size).sum::<u64>());
        agree(&numbers(&parts[0]), &two_pass(&samples))?;
    }

    #[test]
    fn json_restores_every_bit(samples in samples()) {
        let statistics = gathered(&samples);
        prop_assert_eq!(SampleStatistics::from_json(&statistics.to_json()).unwrap(), statistics);
    }
}

const GOOD: Sample = Sample { loss: -1.5, sq_grad_norm: 2.0, batch_size: 20 };

#[test]
fn samples_outside_their_domain_are_refused_and_change_nothing() {
    let mut statistics = gathered(&[GOOD]);
    let bad = [
        (Sample { loss: f64::NAN, ..GOOD }, "loss"),
        (Sample { loss: f64::INFINITY, ..GOOD }, "loss"),
        (Sample { loss: 1e200, ..GOOD }, "loss"),
        (Sample { sq_grad_norm: -1.0, ..GOOD }, "sq_grad_norm"),
        (Sample { sq_grad_norm: f64::NAN, ..GOOD }, "sq_grad_norm"),
        (Sample { sq_grad_norm: f64::INFINITY, ..GOOD }, "sq_grad_norm"),
        (Sample { batch_size: 0, ..GOOD }, "batchsize"),
    ];
    for (sample, name) in bad {
        match statistics.push(&sample) {
            Err(Error::Estimation(EstimationError::InvalidSample { quantity, .. })) => {
                assert_eq!(quantity, name)
            }
            other => panic!("{sample:?}: {other:?}"),
        }
        assert_eq!(statistics, gathered(&[GOOD]));
    }
}

#[test]
fn other_json_is_refused_with_the_reason() {
    let json = gathered(&[GOOD]).to_json();
    for (from, to, reason) in [
        ("\"version\": 1", "\"version\": 2", "version 2"),
        ("rfdescent-sample-statistics", "something-else", "format"),
        ("\"count\": 1", "\"count\": 0", "batch size 20"),
        ("\"m2\": 0.0", "\"m2\": -1.0", "batch size 20"),
        ("\"20\"", "\"0\"", "batch size 0"),
    ] {
        assert!(json.contains(from), "{json}");
        let error = SampleStatistics::from_json(&json.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
    assert!(SampleStatistics::from_json("{").is_err());
}

#[test]
fn counts_come_in_order() {
    let statistics = gathered(&[Sample { batch_size: 50, ..GOOD }, GOOD, Sample { batch_size: 50, ..GOOD }]);
    assert_eq!(statistics.counts().into_iter().collect::<Vec<_>>(), [(20, 1), (50, 2)]);
    assert_eq!((statistics.batches(), statistics.examples(), statistics.distinct_batch_sizes()), (3, 120, 2));
    assert!(fit(&statistics).is_err(), "constant losses");
}

/// Samples with the norms of two tensors, of which the first is a third of ‖g‖².
fn with_tensors(samples: &[Sample]) -> SampleStatistics {
    let mut statistics = SampleStatistics::new();
    for sample in samples {
        let third = sample.sq_grad_norm / 3.0;
        statistics.push_tensors(sample, [("b", sample.sq_grad_norm - third), ("a", third)]).unwrap();
    }
    statistics
}

/// The means of the file by batch size and tensor.
fn tensor_means(statistics: &SampleStatistics) -> Vec<(String, String, f64)> {
    let json: serde_json::Value = serde_json::from_str(&statistics.to_json()).unwrap();
    let groups = json["batch_sizes"].as_object().unwrap().iter();
    groups
        .flat_map(|(b, group)| {
            let tensors = group["tensors"].as_object().unwrap().iter();
            tensors.map(|(name, mean)| (b.clone(), name.clone(), mean.as_f64().unwrap())).collect::<Vec<_>>()
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    /// Means of tensors, however gathered; each of n updates rounds a few times at values of at most 100. All
    /// else has the same bits as without tensors.
    #[test]
    fn means_of_tensors(samples in samples(), cut in 0usize..120) {
        let cut = cut.min(samples.len());
        let whole = with_tensors(&samples);
        let mut merged = with_tensors(&samples[cut..]);
        merged.merge(&with_tensors(&samples[..cut]));
        let mut want = Vec::new();
        for (b, n, _) in two_pass(&samples) {
            let squares = || samples.iter().filter(|s| s.batch_size == b).map(|s| s.sq_grad_norm);
            for name in ["a", "b"] {
                let of = |square: f64| if name == "a" { square / 3.0 } else { square - square / 3.0 };
                want.push((b.to_string(), name.to_string(), squares().map(of).sum::<f64>() / n as f64));
            }
        }
        let key = |(b, name, _): &(String, String, f64)| (b.clone(), name.clone());
        want.sort_by_key(key);
        for statistics in [&whole, &merged] {
            let mut got = tensor_means(statistics);
            got.sort_by_key(key);
            prop_assert_eq!(got.len(), want.len());
            for (got, want) in got.iter().zip(&want) {
                prop_assert_eq!(key(got), key(want));
                prop_assert!((got.2 - want.2).abs() <= 4.0 * 120.0 * f64::EPSILON * 100.0, "{got:?} {want:?}");
            }
        }
        prop_assert_eq!(numbers(&whole), numbers(&gathered(&samples)));
        prop_assert_eq!(whole.tensors().collect::<Vec<_>>(), ["a", "b"]);
        prop_assert_eq!(SampleStatistics::from_json(&whole.to_json()).unwrap(), whole);
    }
}

#[test]
fn samples_of_other_tensors_are_refused_and_change_nothing() {
    let statistics = with_tensors(&[GOOD]);
    type Norms = &'static [(&'static str, f64)];
    let cases: [(Norms, &str, &str); 7] = [
        (&[], "a", "others have not"),
        (&[("a", 1.0)], "b", "others have not"),
        (&[("a", 1.0), ("b", 1.0), ("c", 1.0)], "c", "others have not"),
        (&[("a", 1.0), ("b", -1.0)], "b", "at least 0"),
        (&[("a", f64::NAN), ("b", 1.0)], "a", "finite"),
        (&[("a", 1e121), ("b", 1.0)], "a", "1e120"),
        (&[("a", 1.0), ("a", 1.0)], "a", "twice"),
    ];
    for (norms, name, words) in cases {
        let mut changed = statistics.clone();
        let error = changed.push_tensors(&GOOD, norms.iter().copied()).unwrap_err();
        let (Error::Estimation(
            EstimationError::OtherTensors { tensor } | EstimationError::InvalidTensor { tensor, .. },
        ),) = (&error,)
        else {
            panic!("{error:?}");
        };
        assert!(tensor == name && error.to_string().contains(words), "{norms:?}: {error}");
        assert_eq!(changed, statistics);
    }
    let mut without = gathered(&[GOOD]);
    let error = without.push_tensors(&GOOD, [("a", 1.0)]).unwrap_err().to_string();
    assert!(error.contains("`a`"), "{error}");
    assert_eq!(without, gathered(&[GOOD]));

    // A merge keeps what both have.
    let mut merged = SampleStatistics::new();
    merged.merge(&statistics);
    merged.merge(&SampleStatistics::new());
    assert_eq!(merged, statistics);
    merged.merge(&without);
    assert_eq!(merged, gathered(&[GOOD, GOOD]));
}

#[test]
fn damaged_means_of_tensors_are_refused() {
    let json = with_tensors(&[GOOD, Sample { batch_size: 50, ..GOOD }]).to_json();
    let mean = GOOD.sq_grad_norm / 3.0;
    for (from, to, reason) in [
        (format!("\"a\": {mean:?}"), "\"a\": -1.0".to_string(), "batch size 20"),
        ("\"a\"".to_string(), "\"c\"".to_string(), "tensor `"),
    ] {
        assert!(json.contains(&from), "{json}");
        let error = SampleStatistics::from_json(&json.replacen(&from, &to, 1)).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}
