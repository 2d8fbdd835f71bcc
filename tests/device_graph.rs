//! Captured steps on CUDA: replays follow what lies on the device, and the bits are the CPU's. Skipped
//! without a device.
#![cfg(feature = "cuda")]

mod common;
mod device_support;

use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::*;
use cudarc::driver::sys;
use device_support::*;
use rfdescent::covariance::{Family, Model};
use rfdescent::device::{DeviceBuffer, Stream};
use rfdescent::optimizer::{
    Adaptive, DeviceOptimizer, Fitted, Method, Optimizer, Options, RawInput, RawNumber, RawTensor, StepInput,
    TensorSpec,
};
use rfdescent::{DType, GradRef};

/// While one test captures in the strictest mode, no other thread may allocate.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

fn check(status: sys::CUresult) {
    assert_eq!(status, sys::CUresult::CUDA_SUCCESS);
}

/// A stream of the primary context, which stays current on this thread.
fn stream() -> sys::CUstream {
    let (mut device, mut context, mut stream) = (0, ptr::null_mut(), ptr::null_mut());
    // SAFETY: the driver is initialised, as a device was opened; every call writes one handle.
    unsafe {
        check(sys::cuDeviceGet(&mut device, 0));
        check(sys::cuDevicePrimaryCtxRetain(&mut context, device));
        check(sys::cuCtxSetCurrent(context));
        check(sys::cuStreamCreate(&mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32));
    }
    stream
}

/// Records what `work` queues on the stream, in the strictest mode: whatever a capture forbids fails.
fn capture(stream: sys::CUstream, work: impl FnOnce()) -> sys::CUgraphExec {
    let (mut graph, mut executable) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the stream is live; handles are written by the calls.
    unsafe {
        check(sys::cuStreamBeginCapture_v2(stream, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL));
        work();
        check(sys::cuStreamEndCapture(stream, &mut graph));
        check(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    }
    executable
}

/// How a step is launched.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Once,
    Apart,
    Halves,
}

fn replays_match_the_cpu(method: impl Into<Method>, lengths: &[usize], form: Form) {
    let _alone = alone();
    let Some(executor) = cuda() else { return };
    let raw = stream();
    let stream = Stream::from_raw(raw as u64);
    let mut random = Random(5);
    let tensors = |seed: u64| -> Vec<Owned> {
        let tensors = lengths.iter().enumerate();
        tensors.map(|(k, &len)| Owned::from_f64(DType::BF16, &uniform(seed + k as u64, len))).collect()
    };
    let (mut values, mut gradients) = (tensors(1), tensors(100_000));
    let mut placed = Placed::new(&executor.device, &values, &mut random, stream);
    let mut placed_grads = Placed::new(&executor.device, &gradients, &mut random, stream);
    let method = method.into();
    let options = Options { master_weights: true, ..Options::default() };
    let specs: Vec<TensorSpec> = lengths
        .iter()
        .enumerate()
        .map(|(k, &len)| TensorSpec::new(format!("t{k}"), &[len], DType::BF16))
        .collect();
    let mut on_cpu = Optimizer::new(method.clone(), options.clone(), specs.clone()).unwrap();
    let mut on_device = DeviceOptimizer::new(method, options, specs, &executor.device).unwrap();
    on_device.set_cooperative(form == Form::Once);
    let mut loss = scalar(&executor.device, DType::F32, 2.0, stream);
    let mut found_inf = scalar(&executor.device, DType::F32, 0.0, stream);
    let addresses = step_tensors(&placed, &placed_grads, &vec![Some(DType::BF16); lengths.len()]);
    let number = |buffer: &DeviceBuffer| RawNumber::Address { address: buffer.address(), dtype: DType::F32 };
    let input = RawInput { found_inf: number(&found_inf), ..RawInput::new(number(&loss)) };
    // SAFETY: all buffers live until the last replay is done.
    unsafe { on_device.init_master_weights(&addresses, stream).unwrap() };
    executor.device.synchronize(stream).unwrap();
    let graph = capture(raw, || {
        // SAFETY: all buffers live until the work on them is done.
        unsafe {
            if form == Form::Halves {
                let sums = on_device.local_sums(&addresses, input.grad_scale, stream).unwrap();
                on_device.step_with_sums(&addresses, sums, &input, stream).unwrap();
            } else {
                on_device.step(&addresses, &input, stream).unwrap();
            }
        }
    });
    // Some windows of the adaptive method.
    const REPLAYS: u32 = 40;
    let loss_of = |i: u32| 2.0 - f64::from(i) / 64.0;
    for i in 0..REPLAYS {
        let value = loss_of(i);
        let found = if i == 3 { 2.0 } else { 0.0 };
        loss.upload(0, &(value as f32).to_le_bytes(), stream).unwrap();
        found_inf.upload(0, &(found as f32).to_le_bytes(), stream).unwrap();
        let multiplier = 1.0 / f64::from(i % 8 + 1);
        on_cpu.set_multiplier(multiplier).unwrap();
        on_device.set_multiplier(multiplier, stream).unwrap();
        gradients = tensors(u64::from(i) * 1000);
        placed_grads.write(&gradients, stream);
        // SAFETY: the graph is whole, the stream live.
        check(unsafe { sys::cuGraphLaunch(graph, raw) });
        let grads: Vec<GradRef<'_>> = grads(&gradients);
        let input = StepInput { found_inf: found, ..StepInput::new(value) };
        let report = on_cpu.step(&mut params(&mut values), &grads, &input).unwrap();
        let own = on_device.wait_report(stream).unwrap().unwrap();
        assert_eq!(report_bits(&own), report_bits(&report), "replay {i}");
        assert!(bits(&placed.read(stream)) == bits(&values), "replay {i}");
    }
    // An eager step between, with other gradients' addresses; the next replay still uses its own.
    let other = Placed::new(&executor.device, &gradients, &mut random, stream);
    let eager = step_tensors(&placed, &other, &vec![Some(DType::BF16); lengths.len()]);
    // SAFETY: all buffers live until the work on them is done.
    unsafe { on_device.step(&eager, &input, stream).unwrap() };
    // SAFETY: all buffers live until the work on them is done.
    check(unsafe { sys::cuGraphLaunch(graph, raw) });
    for _ in 0..2 {
        let input = StepInput::new(loss_of(REPLAYS - 1));
        on_cpu.step(&mut params(&mut values), &grads(&gradients), &input).unwrap();
    }
    assert!(bits(&placed.read(stream)) == bits(&values), "an eager step between replays");
}

fn published() -> Model {
    model(Family::SquaredExponential)
}

#[test]
fn replays_of_one_launch() {
    replays_match_the_cpu(published(), &[5000, 3, 0, 70_000], Form::Once);
    replays_match_the_cpu(Adaptive::default(), &[5000, 3, 0, 70_000], Form::Once);
}

#[test]
fn replays_of_separate_launches() {
    replays_match_the_cpu(published(), &[5000, 3, 0, 70_000], Form::Apart);
    replays_match_the_cpu(Adaptive::default(), &[5000, 3, 0, 70_000], Form::Apart);
}

#[test]
fn replays_of_both_halves() {
    for lengths in [&[5000, 3, 0, 70_000][..], &[70; 1000]] {
        replays_match_the_cpu(published(), lengths, Form::Halves);
        replays_match_the_cpu(Adaptive::default(), lengths, Form::Halves);
    }
}

#[test]
fn replays_with_a_table_on_the_device() {
    replays_match_the_cpu(published(), &[70; 1000], Form::Once);
    replays_match_the_cpu(Adaptive::default(), &[70; 1000], Form::Once);
}

/// Freeing memory, or waiting for the device, would break the capture of another stream.
#[test]
fn an_optimizer_may_be_dropped_while_another_stream_is_captured() {
    let _alone = alone();
    let Some(executor) = cuda() else { return };
    let raw = stream();
    let make = || {
        let spec = vec![TensorSpec::new("t", &[10], DType::F32)];
        DeviceOptimizer::new(
            Fitted::new(published()).with_momentum(0.5),
            Options::default(),
            spec,
            &executor.device,
        )
        .unwrap()
    };
    let (first, second) = (make(), make());
    let graph = capture(raw, || {
        drop(first);
        std::thread::spawn(|| drop(second)).join().unwrap();
    });
    // SAFETY: the graph is whole, the stream live.
    check(unsafe { sys::cuGraphLaunch(graph, raw) });
    executor.device.synchronize(Stream::from_raw(raw as u64)).unwrap();
    drop(make());
}

/// Of what kind a list is shows in its first step, which may be a captured one.
#[test]
fn kernels_may_be_loaded_in_a_capture() {
    let _alone = alone();
    // A device of its own, that has loaded nothing yet.
    let Some(_) = cuda() else { return };
    let device = rfdescent::cuda::device(0).unwrap();
    let raw = stream();
    let stream = Stream::from_raw(raw as u64);
    let (params, grads) = (device.allocate(4 * 5000).unwrap(), device.allocate(8 * 5000).unwrap());
    let spec = vec![TensorSpec::new("t", &[5000], DType::F32)];
    let mut optimizer = DeviceOptimizer::new(published(), Options::default(), spec, &device).unwrap();
    assert_eq!(optimizer.kernels(), "f32");
    let tensors = [RawTensor::new(params.address(), grads.address(), DType::F64)];
    let graph = capture(raw, || {
        // SAFETY: both buffers live until the work on them is done.
        unsafe { optimizer.step(&tensors, &RawInput::new(2.0), stream).unwrap() };
    });
    assert_eq!(optimizer.kernels(), "generic");
    // SAFETY: the graph is whole, the stream live.
    check(unsafe { sys::cuGraphLaunch(graph, raw) });
    assert!(optimizer.wait_report(stream).unwrap().is_some());
}

/// A thread without a current context has none after a call, and one with another context has that one.
#[test]
fn calls_leave_the_current_context_as_it_was() {
    let _alone = alone();
    let Some(executor) = cuda() else { return };
    std::thread::spawn(move || {
        let mut current = ptr::null_mut();
        let buffer = executor.device.allocate(64).unwrap();
        let again = rfdescent::cuda::device_of(buffer.address()).unwrap();
        assert_eq!(again.name(), executor.device.name());
        // SAFETY: one handle is written.
        check(unsafe { sys::cuCtxGetCurrent(&mut current) });
        assert!(current.is_null());
    })
    .join()
    .unwrap();
    assert!(rfdescent::cuda::device_of(0x10).is_err());
    assert!(rfdescent::cuda::device(10_000).unwrap_err().to_string().contains("10000"));
}
