//! What a step through candle costs beside the bare step on the same numbers, whose bits it must have.
//!
//! One iteration is one step of all tensors. The line printed first for each list is the one to quote from a
//! machine that others use too: both steps in turn, each with its best time, as what disturbs a step only
//! ever adds to it.

use std::hint::black_box;
use std::time::{Duration, Instant};

use candle_core::Var;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rfdescent_candle::rfdescent::covariance::Family;
use rfdescent_candle::rfdescent::optimizer::{Optimizer, Options, StepInput, TensorSpec};
use rfdescent_candle::rfdescent::{DType, GradRef};
use rfdescent_candle::{Config, Rfd};

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "support/lists.rs"]
#[allow(dead_code)] // only two of the lists
mod lists;

use common::library::{Owned, bits, model, params, uniform};
use common::{owned, scalar, store, tensor, var};

/// The multiplier is small, so that parameters stay where they are, however many steps are taken.
fn options() -> Options {
    Options { multiplier: 1e-9, ..Options::default() }
}

fn overhead(criterion: &mut Criterion) {
    let all = [
        ("1 of 1", vec![1]),
        ("1000 of 1", vec![1; 1000]),
        ("1000 of 1000", vec![1000; 1000]),
        ("M7", lists::m7()),
        ("ResNet-50", lists::resnet50()),
    ];
    for (name, lengths) in all {
        let numbers = |seed: u64| -> Vec<Owned> {
            let list = lengths.iter().enumerate();
            list.map(|(k, &len)| Owned::from_f64(DType::F32, &uniform(seed + k as u64, len))).collect()
        };
        let (mut values, gradients) = (numbers(0), numbers(1 << 32));
        let vars: Vec<Var> = values.iter().zip(&lengths).map(|(list, &len)| var(list, &[len])).collect();
        let specs =
            lengths.iter().enumerate().map(|(k, &len)| TensorSpec::new(k.to_string(), &[len], DType::F32));
        let model = model(Family::SquaredExponential);
        let mut bare = Optimizer::new(model.clone(), options(), specs.collect()).unwrap();
        let mut rfd: Rfd =
            candle_nn::Optimizer::new(vars.clone(), Config { method: model.into(), options: options() })
                .unwrap();
        let grads = store(vars.iter().zip(&gradients).map(|(var, list)| (var, tensor(list, var.dims()))));
        let loss = scalar(2.0);

        // Both have the same bits after the same number of steps, before anything is measured.
        let bare_step = |bare: &mut Optimizer, values: &mut [Owned]| {
            let gradients: Vec<GradRef> = gradients.iter().map(Owned::grad).collect();
            bare.step(&mut params(values), &gradients, &StepInput::new(2.0)).unwrap()
        };
        for _ in 0..2 {
            bare_step(&mut bare, &mut values);
            rfd.step_with_loss(&grads, &loss).unwrap();
        }
        let ours: Vec<Owned> = vars.iter().map(|var| owned(var)).collect();
        assert_eq!(bits(&ours), bits(&values), "{name}");

        let tensors = lengths.len();
        let (mut best_bare, mut best_candle) = (Duration::MAX, Duration::MAX);
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(4) {
            let start = Instant::now();
            bare_step(&mut bare, &mut values);
            let between = Instant::now();
            rfd.step_with_loss(&grads, &loss).unwrap();
            best_candle = best_candle.min(between.elapsed());
            best_bare = best_bare.min(between - start);
        }
        let more = best_candle.as_secs_f64() - best_bare.as_secs_f64();
        println!(
            "{name}: bare {best_bare:?}, candle {best_candle:?}: {:+.1} %, {:+.3} µs a tensor",
            100.0 * more / best_bare.as_secs_f64(),
            1e6 * more / tensors as f64
        );

        let mut group = criterion.benchmark_group("overhead");
        group.throughput(Throughput::Elements(lengths.iter().sum::<usize>() as u64));
        group.bench_function(BenchmarkId::new("bare", name), |bencher| {
            bencher.iter(|| black_box(bare_step(&mut bare, &mut values)));
        });
        group.bench_function(BenchmarkId::new("candle", name), |bencher| {
            bencher.iter(|| rfd.step_with_loss(black_box(&grads), &loss).unwrap());
        });
        group.finish();
    }
}

criterion_group!(benches, overhead);
criterion_main!(benches);
