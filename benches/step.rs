//! One optimizer step on the CPU against the machine's own ceiling: a plain pass that reads the gradients, then one that
//! reads gradients and parameters and writes parameters. Both move 16 bytes a parameter in f32.
//!
//! Each result is checked against a plain f64 computation. Buffers above the last-level cache make the run cold by
//! themselves; smaller ones are warm. `cargo bench --bench step -- 1e6` runs a part.
#![allow(missing_docs)] // criterion's macros write public functions

mod support {
    pub mod lists;
}

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;
use rfdescent::covariance::{Family, Model};
use rfdescent::optimizer::{Optimizer, Options, Outcome, StepInput, TensorSpec};
use rfdescent::{DType, GradRef, Moments, ParamMut};

const LOSS: f64 = 2.0;

fn model() -> Model {
    let moments = Moments {
        mean: 2.5,
        variance: 0.01,
        noise_variance: 0.9,
        grad_variance: 500.0,
        noise_grad_variance: 1e5,
        dims: 2_291_972,
    };
    Model::new(Family::SquaredExponential, moments).unwrap()
}

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

fn optimizer(lengths: &[usize], dtype: DType, options: Options) -> Optimizer {
    let specs = lengths.iter().enumerate().map(|(k, &len)| TensorSpec::new(format!("t{k}"), &[len], dtype));
    Optimizer::new(model(), options, specs.collect()).unwrap()
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

/// The first step from known values, in plain f64; an error would make every timing below worthless.
fn check(lengths: &[usize], p: &mut [f32], g: &[f32]) {
    let before = p.to_vec();
    let report = optimizer(lengths, DType::F32, Options::default())
        .step(&mut cut(p, lengths), &cut_grads(g, lengths), &StepInput::new(LOSS))
        .unwrap();
    assert_eq!(report.outcome, Outcome::Applied);
    let norm = g.par_iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>().sqrt();
    assert!((report.grad_norm / norm - 1.0).abs() < 1e-10, "norm {} instead of {norm}", report.grad_norm);
    let worst = (p.par_iter().zip(&before).zip(g))
        .map(|((&p, &b), &g)| (f64::from(p) - (f64::from(b) - report.learning_rate * f64::from(g))).abs())
        .reduce(|| 0.0, f64::max);
    // parameters are below 1: half an ulp, and as much for coefficient and product
    assert!(worst < 2f64.powi(-23), "parameters off by {worst:e}");
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
        check(&lengths, &mut p, &g);
        let mut group = c.benchmark_group(format!("f32/{name}"));
        group.throughput(Throughput::Bytes(16 * total as u64)).sample_size(20);
        group.bench_function("plain loop", |b| b.iter(|| black_box(plain(&mut p, &g))));
        let mut optimizer = optimizer(&lengths, DType::F32, Options::default());
        group.bench_function("rfdescent", |b| {
            b.iter(|| {
                optimizer
                    .step(&mut cut(&mut p, &lengths), &cut_grads(&g, &lengths), &StepInput::new(LOSS))
                    .unwrap()
            })
        });
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
        let mut optimizer = optimizer(&[total], DType::BF16, options);
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
