//! What the adapter costs the host beside the library's own call, for 200 tensors. On the fake driver of
//! scripts/check-cust the launch runs the step before it returns; what the adapter adds, making and checking
//! tensors, is there alone in `refused`, whose last tensor does not fit. Bare steps and the adapter's are
//! checked to give the same bits.

#[path = "../tests/support/mod.rs"]
mod support;

use criterion::{Criterion, criterion_group, criterion_main};
use cust::memory::DeviceBuffer;
use cust::stream::{Stream, StreamFlags};
use rfdescent::DType;
use rfdescent::optimizer::{DeviceOptimizer, Options, RawInput, RawTensor, TensorSpec};
use rfdescent_cust::{Input, Optimizer, Tensor, device, stream};

use support::model;

const COUNT: usize = 200;

fn buffers(value: f32) -> Vec<DeviceBuffer<f32>> {
    (0..COUNT).map(|_| DeviceBuffer::from_slice(&[value]).unwrap()).collect()
}

fn values(buffers: &[DeviceBuffer<f32>]) -> Vec<f32> {
    buffers.iter().map(|buffer| buffer.as_host_vec().unwrap()[0]).collect()
}

/// The same numbers for the library and for the adapter.
struct Pair {
    bare: DeviceOptimizer,
    bare_params: Vec<DeviceBuffer<f32>>,
    adapter: Optimizer,
    params: Vec<DeviceBuffer<f32>>,
    grads: Vec<DeviceBuffer<f32>>,
    stream: Stream,
}

impl Pair {
    fn new() -> Self {
        let specs: Vec<TensorSpec> =
            (0..COUNT).map(|k| TensorSpec::new(k.to_string(), &[1], DType::F32)).collect();
        let device = device().unwrap();
        Self {
            bare: DeviceOptimizer::new(model(), Options::default(), specs.clone(), &device).unwrap(),
            bare_params: buffers(0.0),
            adapter: Optimizer::new(model(), Options::default(), specs).unwrap(),
            params: buffers(0.0),
            grads: buffers(1.0),
            stream: Stream::new(StreamFlags::DEFAULT, None).unwrap(),
        }
    }

    fn bare(&mut self) {
        let address = |buffer: &DeviceBuffer<f32>| buffer.as_device_ptr().as_raw();
        let tensors: Vec<RawTensor> = (self.bare_params.iter().zip(&self.grads))
            .map(|(param, grad)| RawTensor::new(address(param), address(grad), DType::F32))
            .collect();
        let input = RawInput::new(2.0);
        // SAFETY: the buffers are of this context, no other stream uses them, and they live until after the
        // benchmark.
        unsafe { self.bare.step(&tensors, &input, stream(&self.stream)) }.unwrap();
    }

    fn adapter(&mut self) {
        let tensors: Vec<Tensor<'_>> =
            self.params.iter_mut().zip(&self.grads).map(|(param, grad)| Tensor::new(param, grad)).collect();
        // SAFETY: the buffers are of this context, no other stream uses them, and they live until after the
        // benchmark.
        unsafe { self.adapter.step(&tensors, &Input::new(2.0), &self.stream) }.unwrap();
    }

    fn refused(&mut self, wrong: &mut DeviceBuffer<f64>) -> rfdescent::Error {
        let mut tensors: Vec<Tensor<'_>> = (self.params[..COUNT - 1].iter_mut().zip(&self.grads))
            .map(|(param, grad)| Tensor::new(param, grad))
            .collect();
        tensors.push(Tensor::without_grad(wrong));
        // SAFETY: nothing is queued for what is refused.
        unsafe { self.adapter.step(&tensors, &Input::new(2.0), &self.stream) }.unwrap_err()
    }
}

fn step(criterion: &mut Criterion) {
    let _context = match cust::quick_init() {
        Ok(context) => context,
        Err(error) => return println!("skipped: {error}"),
    };
    let mut pair = Pair::new();
    for _ in 0..3 {
        pair.bare();
        pair.adapter();
    }
    pair.stream.synchronize().unwrap();
    let params = values(&pair.params);
    assert_eq!(params, values(&pair.bare_params));
    assert!(params.iter().all(|&x| x < 0.0));
    let mut wrong = DeviceBuffer::from_slice(&[0.0_f64]).unwrap();
    let mut group = criterion.benchmark_group("200 tensors of 1 element");
    group.bench_function("bare", |bencher| bencher.iter(|| pair.bare()));
    group.bench_function("adapter", |bencher| bencher.iter(|| pair.adapter()));
    group.bench_function("refused", |bencher| bencher.iter(|| pair.refused(&mut wrong)));
    group.finish();
    pair.stream.synchronize().unwrap();
}

criterion_group!(benches, step);
criterion_main!(benches);
