//! What a step through libtorch's tensors costs beside the bare one on slices: for tensors of one element,
//! where there is little else, and for the tensors of two networks. Both are checked to give the same bits
//! before they are timed.

#[path = "../tests/support/mod.rs"]
mod support;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rfdescent::optimizer::{self, Options, Outcome, StepInput, TensorSpec};
use rfdescent::{DType, GradRef, ParamMut};
use rfdescent_tch::{Optimizer, Rfd};
use tch::{Device, Kind, Tensor};

use support::{model, store};

/// The same numbers as slices and as variables of a store.
struct Pair {
    values: Vec<Vec<f32>>,
    gradients: Vec<Vec<f32>>,
    bare: optimizer::Optimizer,
    variables: Vec<Tensor>,
    adapter: Optimizer,
    loss: Tensor,
}

impl Pair {
    fn new(lengths: &[usize]) -> Self {
        let store = store();
        let gradients: Vec<Vec<f32>> =
            lengths.iter().map(|&len| (0..len).map(|i| (i % 97) as f32 / 50.0 - 0.9).collect()).collect();
        let variables: Vec<Tensor> = (lengths.iter().enumerate())
            .map(|(k, &len)| {
                store.root().add(
                    &k.to_string(),
                    Tensor::zeros([len as i64], (Kind::Float, Device::Cpu)),
                    true,
                )
            })
            .collect();
        for (variable, gradient) in variables.iter().zip(&gradients) {
            (variable * Tensor::from_slice(gradient)).sum(Kind::Float).backward();
        }
        let specs = (lengths.iter().enumerate())
            .map(|(k, &len)| TensorSpec::new(k.to_string(), &[len], DType::F32))
            .collect();
        Self {
            values: lengths.iter().map(|&len| vec![0.0; len]).collect(),
            gradients,
            bare: optimizer::Optimizer::new(model(), Options::default(), specs).unwrap(),
            variables,
            adapter: Rfd::new(model()).build(&store).unwrap(),
            loss: Tensor::from(2.0),
        }
    }

    fn bare(&mut self) {
        let mut params: Vec<ParamMut<'_>> = self.values.iter_mut().map(|v| (&mut v[..]).into()).collect();
        let grads: Vec<GradRef<'_>> = self.gradients.iter().map(|g| (&g[..]).into()).collect();
        let report = self.bare.step(&mut params, &grads, &StepInput::new(2.0)).unwrap();
        assert_eq!(report.outcome, Outcome::Applied);
    }

    fn adapter(&mut self) {
        self.adapter.step(&self.loss).unwrap();
    }

    fn check(&mut self) {
        for _ in 0..3 {
            self.bare();
            self.adapter();
        }
        for (variable, values) in self.variables.iter().zip(&self.values) {
            assert_eq!(&Vec::<f32>::try_from(variable.detach()).unwrap(), values);
            assert!(values.iter().any(|&x| x != 0.0));
        }
    }
}

/// ResNet-50 in numbers: 161 tensors of 25,557,032 elements, most of them in few tensors.
fn resnet50() -> Vec<usize> {
    let mut lengths = vec![64 * 3 * 49, 64, 64];
    let mut inputs = 64;
    for (blocks, width) in [(3, 64), (4, 128), (6, 256), (3, 512)] {
        for block in 0..blocks {
            let outputs = 4 * width;
            let mut layers =
                vec![(inputs * width, width), (9 * width * width, width), (width * outputs, outputs)];
            if block == 0 {
                layers.push((inputs * outputs, outputs));
            }
            lengths.extend(layers.into_iter().flat_map(|(weights, channels)| [weights, channels, channels]));
            inputs = outputs;
        }
    }
    lengths.extend([2048 * 1000, 1000]);
    assert_eq!((lengths.len(), lengths.iter().sum::<usize>()), (161, 25_557_032));
    lengths
}

fn step(criterion: &mut Criterion) {
    let mlp = vec![784 * 512, 512, 512, 512, 512 * 256, 256, 256, 256, 2560, 10, 10, 10];
    for (name, lengths) in [
        ("1 tensor of 1 element", vec![1]),
        ("200 tensors of 1 element", vec![1; 200]),
        ("MLP of 537,374 parameters", mlp),
        ("ResNet-50", resnet50()),
    ] {
        let mut pair = Pair::new(&lengths);
        pair.check();
        let mut group = criterion.benchmark_group(name);
        // A step reads gradients twice and parameters once, and writes parameters.
        group.throughput(Throughput::Bytes(16 * lengths.iter().sum::<usize>() as u64));
        group.bench_function("bare", |bencher| bencher.iter(|| pair.bare()));
        group.bench_function("adapter", |bencher| bencher.iter(|| pair.adapter()));
        group.finish();
    }
}

criterion_group!(benches, step);
criterion_main!(benches);
