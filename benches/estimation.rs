//! One fit and one batch-size design, each with its result checked.
#![allow(missing_docs)] // criterion's macros write public functions

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use rfdescent::estimation::{DesignKind, DesignProblem, Sample, SampleStatistics, fit};

/// 10,000 mini-batches at 250 batch sizes, with the mean and variances of the paper's network M7.
fn statistics() -> SampleStatistics {
    let mut statistics = SampleStatistics::new();
    let mut state = 1_u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    };
    for i in 0..10_000_u64 {
        let batch_size = 20 + i % 250;
        let b = batch_size as f64;
        // Irwin–Hall: twelve uniforms make a nearly normal number
        let normal = (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
        let loss = 2.74 + normal * (0.009362 + 0.851 / b).sqrt();
        let sq_grad_norm = (551.0 + 95_800.0 / b) * (0.9 + 0.2 * uniform());
        statistics.push(&Sample { loss, sq_grad_norm, batch_size }).unwrap();
    }
    statistics
}

fn fits(c: &mut Criterion) {
    let statistics = statistics();
    let result = fit(&statistics).unwrap();
    // 10,000 batches: a few standard deviations of each estimate
    assert!((result.mean - 2.74).abs() < 0.01, "{result:?}");
    assert!((result.variance / 0.009362 - 1.0).abs() < 4.0 * result.relative_std, "{result:?}");
    c.bench_function("fit, 10,000 batches at 250 sizes", |b| b.iter(|| fit(black_box(&statistics)).unwrap()));
}

fn designs(c: &mut Criterion) {
    for (name, kind, objective) in
        [("c-optimal", DesignKind::COptimal, 0.114288), ("Gibbs", DesignKind::Gibbs, 0.19044)]
    {
        let problem = DesignProblem {
            variance: 0.009362,
            noise_variance: 0.851,
            min_batch_size: 20,
            max_batch_size: None,
        };
        let solve = || black_box(problem).design(kind).unwrap();
        let found = solve().objective();
        assert!((found / objective - 1.0).abs() < 1e-4, "{name}: {found}");
        c.bench_function(&format!("design, {name}"), |b| b.iter(|| black_box(solve())));
    }
}

criterion_group!(benches, fits, designs);
criterion_main!(benches);
