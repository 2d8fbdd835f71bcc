//! One optimizer step on the CPU against the machine's own ceiling: a plain pass that reads the gradients,
//! then one that reads gradients and parameters and writes parameters. Both move 16 bytes a parameter in f32.
//! Beside them steps that keep velocities: with momentum, 24 bytes, and of the adaptive method, whose norms
//! are those of the new velocities, 28.
//!
//! Each result is checked against a plain f64 computation. Buffers above the last-level cache make the run
//! cold by themselves; smaller ones are warm. `cargo bench --bench step -- 1e6` runs a part.
#![allow(missing_docs)] // criterion's macros write public functions

mod support {
    pub mod lists;
    pub mod model;
}

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;
use rfdescent::optimizer::{Adaptive, Fitted, Method, Optimizer, Options, Outcome, StepInput, TensorSpec};
use rfdescent::{DType, GradRef, ParamMut};
use support::model::model;

const LOSS: f64 = 2.0;
const MOMENTUM: f64 = 0.9;

fn values(len: usize, seed: u32) -> Vec<f32> {
    (0..len as u32)
        .into_par_iter()
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / 16_777_216.0 - 0.5)
        .collect()
}

/// Cuts one buffer into tensors of the given lengths.
fn cut<'a>(mut buffer: &'a mut [f32], lengths: &[usize]) -> Vec<ParamMut<'a>> {
    lengths
        .iter()
        .map(|&len| {
            let (head, rest) = std::mem::take(&mut buffer).split_at_mut(len);
            buffer = rest;
            ParamMut::from(head)
        })
        .collect()
}

fn cut_grads<'a>(mut buffer: &'a [f32], lengths: &[usize]) -> Vec<GradRef<'a>> {
    lengths
        .iter()
        .map(|&len| {
            let (head, rest) = buffer.split_at(len);
            buffer = rest;
            GradRef::from(head)
        })
        .collect()
}

fn optimizer(method: impl Into<Method>, lengths: &[usize], dtype: DType, options: Options) -> Optimizer {
    let specs = lengths.iter().enumerate().map(|(k, &len)| TensorSpec::new(format!("t{k}"), &[len], dtype));
    Optimizer::new(method, options, specs.collect()).unwrap()
}

/// The steps that are timed in f32: name, bytes a parameter, and method.
fn kinds() -> [(&'static str, usize, Method); 3] {
    [
        ("rfdescent", 16, model().into()),
        ("momentum", 24, Fitted::new(model()).with_momentum(MOMENTUM).into()),
        ("adaptive", 28, Adaptive::default().into()),
    ]
}

/// The ceiling: what any step must at least do, without order, step size or formats.
fn plain(p: &mut [f32], g: &[f32]) -> f32 {
    const TASK: usize = 65_536;
    let square = g
        .par_chunks(TASK)
        .map(|g| {
            let mut lanes = [0.0_f32; 32];
            for g in g.chunks_exact(32) {
                for (lane, g) in lanes.iter_mut().zip(g) {
                    *lane += g * g;
                }
            }
            lanes.iter().sum::<f32>()
        })
        .sum::<f32>();
    let rate = 1e-6 / square.sqrt();
    p.par_chunks_mut(TASK).zip(g.par_chunks(TASK)).for_each(|(p, g)| {
        for (p, g) in p.iter_mut().zip(g) {
            *p -= rate * g;
        }
    });
    square
}

/// The first two steps from known values with the same gradients, in plain f64; an error would make every
/// timing below worthless.
fn check(lengths: &[usize], p: &mut [f32], g: &[f32], method: &Method) {
    let before = p.to_vec();
    // What has a rate of its own: tensors, or rows, which these vectors are cut into.
    let lengths_of_rates = match method {
        Method::Fitted(_) => lengths.to_vec(),
        _ => lengths.iter().flat_map(|&len| rows(len)).collect(),
    };
    let mut squares = Vec::new();
    let mut rest = g;
    for &len in &lengths_of_rates {
        let (head, tail) = rest.split_at(len);
        squares.push(head.par_iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>());
        rest = tail;
    }
    let total = squares.iter().sum::<f64>();
    // The length scale of vectors over the root of the row's variance, which equal gradients leave as it is.
    let scales: Vec<f64> = (squares.iter().zip(&lengths_of_rates))
        .map(|(square, &len)| match method {
            Method::Fitted(_) => 1.0,
            _ => 0.1 / (square / len as f64).sqrt(),
        })
        .collect();
    let sigma_square = squares.iter().zip(&scales).map(|(square, scale)| square * scale).sum::<f64>();

    let mut optimizer = optimizer(method.clone(), lengths, DType::F32, Options::default());
    let momentum = match method {
        Method::Fitted(fitted) => fitted.momentum.first().copied().unwrap_or(0.0),
        _ => 0.0,
    };
    let (mut rate, mut velocity) = (0.0, 0.0);
    for _ in 0..2 {
        let report =
            optimizer.step(&mut cut(p, lengths), &cut_grads(g, lengths), &StepInput::new(LOSS)).unwrap();
        assert_eq!(report.outcome, Outcome::Applied);
        // The adaptive method's second norm is that of velocities, which are f32.
        for (norm, square, bound) in
            [(report.grad_norm, total, 1e-10), (report.sigma_norm, sigma_square, 2f64.powi(-23))]
        {
            let expected = square.sqrt();
            assert!((norm / expected - 1.0).abs() < bound, "norm {norm} instead of {expected}");
        }
        velocity = momentum * velocity + 1.0;
        // The average of equal gradients is any of them.
        rate += report.learning_rate * if optimizer.model().is_some() { velocity } else { 1.0 };
    }
    let (mut worst, mut start) = (0.0, 0);
    for (&len, scale) in lengths_of_rates.iter().zip(&scales) {
        let tensor = start..start + len;
        start = tensor.end;
        let change = rate * scale;
        worst = (p[tensor.clone()].par_iter().zip(&before[tensor.clone()]).zip(&g[tensor]))
            .map(|((&p, &b), &g)| (f64::from(p) - (f64::from(b) - change * f64::from(g))).abs())
            .reduce(|| worst, f64::max);
    }
    // Parameters are below 1: in each step half an ulp, and as much for coefficient, velocity and product.
    assert!(worst < 2f64.powi(-22), "parameters off by {worst:e}");
}

/// The rows of a vector, by the rule of `docs/adaptive.md`.
fn rows(len: usize) -> Vec<usize> {
    let parts = (len.div_ceil(4096)..=len / 256).find(|parts| len.is_multiple_of(*parts));
    match parts {
        _ if len <= 4096 => vec![len],
        Some(parts) => vec![len / parts; parts],
        None => (0..len).step_by(4096).map(|start| 4096.min(len - start)).collect(),
    }
}

fn lists() -> Vec<(String, Vec<usize>)> {
    let mut lists: Vec<(String, Vec<usize>)> =
        (4..=8).map(|e| (format!("flat 1e{e}"), vec![10usize.pow(e)])).collect();
    lists.push(("M7, 15 tensors".into(), support::lists::m7()));
    lists.push(("ResNet-50, 161 tensors".into(), support::lists::resnet50()));
    lists.push(("GPT-2 124M, 148 tensors".into(), support::lists::gpt2()));
    lists
}

fn f32_steps(c: &mut Criterion) {
    for (name, lengths) in lists() {
        let total: usize = lengths.iter().sum();
        let (mut p, g) = (values(total, 1), values(total, 2));
        let mut group = c.benchmark_group(format!("f32/{name}"));
        group.throughput(Throughput::Bytes(16 * total as u64)).sample_size(20);
        group.bench_function("plain loop", |b| b.iter(|| black_box(plain(&mut p, &g))));
        for (name, bytes, method) in kinds() {
            check(&lengths, &mut p, &g, &method);
            let mut optimizer = optimizer(method, &lengths, DType::F32, Options::default());
            group.throughput(Throughput::Bytes((bytes * total) as u64));
            group.bench_function(name, |b| {
                b.iter(|| {
                    optimizer
                        .step(&mut cut(&mut p, &lengths), &cut_grads(&g, &lengths), &StepInput::new(LOSS))
                        .unwrap()
                })
            });
        }
        group.finish();
    }
}

fn half_steps(c: &mut Criterion) {
    let total = 10_000_000;
    let mut p: Vec<bf16> = vec![bf16::ZERO; total];
    p.convert_from_f32_slice(&values(total, 1));
    let mut g: Vec<bf16> = vec![bf16::ZERO; total];
    g.convert_from_f32_slice(&values(total, 2));
    let mut group = c.benchmark_group("bf16/flat 1e7");
    let cases = [
        ("nearest", 8, Options::default()),
        ("stochastic", 8, Options { stochastic_rounding: Some(1), ..Options::default() }),
        ("f32 masters", 14, Options { master_weights: true, ..Options::default() }),
    ];
    for (name, bytes, options) in cases {
        group.throughput(Throughput::Bytes(bytes * total as u64)).sample_size(20);
        let mut optimizer = optimizer(model(), &[total], DType::BF16, options);
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                let report = optimizer
                    .step(&mut [(&mut p[..]).into()], &[(&g[..]).into()], &StepInput::new(LOSS))
                    .unwrap();
                assert_eq!(report.outcome, Outcome::Applied);
            })
        });
    }
    group.finish();
}

criterion_group!(benches, f32_steps, half_steps);
criterion_main!(benches);
