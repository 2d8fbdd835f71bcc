//! Steps on a CUDA device against the same steps on the CPU, bit for bit, where there is one.
//! RFDESCENT_REQUIRE_GPU=1 makes its absence a failure.

mod support;

use rfdescent::optimizer::{Group, Options, StepReport};
use rfdescent_tch::{Fitted, Rfd, StepTensors};
use tch::nn::VarStore;
use tch::{Cuda, Device, Kind, Tensor};

use support::{model, plant_gradient};

fn device() -> Option<Device> {
    if Cuda::is_available() {
        return Some(Device::Cuda(0));
    }
    assert!(std::env::var_os("RFDESCENT_REQUIRE_GPU").is_none(), "libtorch finds no CUDA device");
    println!("skipped: libtorch finds no CUDA device");
    None
}

/// Numbers of order 1 that depend on both arguments.
fn numbers(size: &[i64], salt: i64) -> Tensor {
    let len: i64 = size.iter().product();
    let whole = (Tensor::arange(len, (Kind::Int64, Device::Cpu)) * 7919 + salt * 104_729).remainder(2003);
    (whole.to_kind(Kind::Double) / 1000.0 - 1.0005).reshape(size)
}

/// Some steps on the device; the parameters after them, in f64, and what each step did. In the middle the
/// state goes through bytes.
fn run(device: Device) -> (Vec<Tensor>, Vec<StepReport>) {
    let store = VarStore::new(device);
    let kinds = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];
    let size = [3_i64, 5, 400];
    for (k, kind) in kinds.into_iter().enumerate() {
        let values = numbers(&size, k as i64).to_kind(kind).to_device(device);
        let _ = store.root().set_group(k % 2).add(&k.to_string(), values.permute([2, 0, 1]), true);
    }
    let plain = store.root().add("unused", Tensor::ones([3], (Kind::Float, device)), true);
    let _ = store.root().add("empty", Tensor::ones([0], (Kind::Float, device)), true);
    let method = Fitted { momentum: vec![0.9, 0.0], ..Fitted::new(model()) };
    let groups = vec![Group { weight_decay: 1e-3, ..Group::default() }, Group::default()];
    let options = Options { groups, stochastic_rounding: Some(7), ..Options::default() };
    let mut optimizer = Rfd::new(method).options(options).build(&store).unwrap();
    let variables = optimizer.trainable_variables();
    let scale = Tensor::from(4.0_f32).to_device(device);
    let mut reports = Vec::new();
    for step in 0..4 {
        optimizer.zero_grad().unwrap();
        for (k, variable) in variables[..kinds.len()].iter().enumerate() {
            // Not in the parameter's order: it is copied into that.
            let gradient = numbers(&[400, 3, 5], 17 + k as i64 + 31 * step).to_kind(Kind::Float);
            plant_gradient(variable, &gradient.to_device(device));
        }
        let loss = Tensor::from(1.5_f32 + step as f32 / 4.0).to_device(device);
        let found_inf = Tensor::from(if step == 2 { 1.0_f32 } else { 0.0 });
        let input = StepTensors { grad_scale: Some(&scale), found_inf: Some(&found_inf), loss: &loss };
        optimizer.step_with(&input).unwrap();
        drop(loss);
        reports.push(optimizer.wait_report().unwrap().unwrap());
        if step == 1 {
            let state = optimizer.state_to_bytes().unwrap();
            optimizer.load_state_from_bytes(&state).unwrap();
        }
        optimizer.set_lr(0.5).unwrap();
    }
    assert!(plain.eq_tensor(&plain.ones_like()).all().int64_value(&[]) == 1);
    let values = variables.iter().map(|v| v.detach().to_device(Device::Cpu).to_kind(Kind::Double)).collect();
    (values, reports)
}

#[test]
fn steps_have_the_bits_of_the_cpu() {
    let (expected, expected_reports) = run(Device::Cpu);
    let applied: Vec<u64> = expected_reports.iter().map(|report| report.applied_steps).collect();
    assert_eq!(applied, [1, 2, 2, 3]);
    let Some(device) = device() else { return };
    let (values, reports) = run(device);
    assert_eq!(reports, expected_reports);
    for (value, expected) in values.iter().zip(&expected) {
        assert!(value.equal(expected));
    }
}

#[test]
fn scalars_and_gradients_of_another_device_are_refused() {
    let Some(device) = device() else { return };
    let store = VarStore::new(Device::Cpu);
    let a = support::variable(&store, "a", &[1.0, 2.0]);
    let mut optimizer = Rfd::new(model()).build(&store).unwrap();
    a.square().sum(Kind::Float).backward();
    let message = optimizer.step(&Tensor::from(1.0).to_device(device)).unwrap_err().to_string();
    assert!(message.contains("loss") && message.contains("parameters are on Cpu"), "{message}");
    let _ = store.root().add("b", Tensor::ones([2], (Kind::Float, device)), true);
    let message = Rfd::new(model()).build(&store).unwrap_err().to_string();
    assert!(message.contains("`b`") && message.contains("`a` is on Cpu"), "{message}");
}
