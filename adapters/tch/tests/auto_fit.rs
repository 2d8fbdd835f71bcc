//! The sampler: what it draws, and that auto-fit works with it.

mod support;

use std::ops::ControlFlow;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rfdescent::covariance::{Family, Model};
use rfdescent::estimation::{AutoFit, Sampler as _};
use rfdescent_tch::NetworkSampler;
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

/// libtorch has one generator for all threads: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    GENERATOR.lock().unwrap_or_else(PoisonError::into_inner)
}

fn build(root: nn::Path<'_>) -> nn::Linear {
    nn::linear(root / "layer", 6, 2, Default::default())
}

fn batch(size: i64) -> Result<(Tensor, Tensor), Box<dyn std::error::Error + Send + Sync>> {
    let inputs = Tensor::randn([size, 6], (Kind::Float, Device::Cpu));
    let targets = inputs.narrow(1, 0, 2) * 0.7;
    Ok((inputs, targets))
}

fn loss(net: &nn::Linear, inputs: &Tensor, targets: &Tensor) -> Tensor {
    (net.forward(inputs) - targets).square().mean(Kind::Float)
}

#[test]
fn a_sample_is_loss_and_squared_norm_of_a_fresh_network_and_depends_on_the_seed_alone() {
    let _alone = alone();
    let mut sampler =
        NetworkSampler::new(Device::Cpu, build, batch, |net: &_, (x, y)| Ok(loss(net, &x, &y))).unwrap();
    assert_eq!(sampler.dims(), 6 * 2 + 2);
    let first = sampler.sample(32, u64::MAX).unwrap();
    assert_ne!(sampler.sample(32, 3).unwrap(), first);
    assert_ne!(sampler.sample(33, u64::MAX).unwrap(), first);
    assert_eq!(sampler.sample(32, u64::MAX).unwrap(), first);

    tch::manual_seed(-1);
    let store = support::store();
    let net = build(store.root());
    let (x, y) = batch(32).unwrap();
    let loss = loss(&net, &x, &y);
    loss.backward();
    let mut sum = 0.0;
    for variable in store.trainable_variables() {
        sum += support::floats(&variable.grad()).iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>();
    }
    assert_eq!(first.loss, loss.double_value(&[]));
    // 14 exact squares, added in another order: at most 14 roundings each way.
    assert!((first.sq_grad_norm - sum).abs() <= 28.0 * f64::EPSILON * sum, "{first:?} {sum}");
}

#[test]
fn auto_fit_finds_a_model() {
    let _alone = alone();
    let mut sampler =
        NetworkSampler::new(Device::Cpu, build, batch, |net: &_, (x, y)| Ok(loss(net, &x, &y))).unwrap();
    let options = AutoFit { max_budget: 60_000, ..AutoFit::default() };
    let fitted = options.run(&mut sampler, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(fitted.dims, 14);
    let model = Model::new(Family::SquaredExponential, fitted.moments()).unwrap();
    assert!(model.plateau_step_size() > 0.0);
}

#[test]
fn what_the_network_fails_with_ends_the_run() {
    let _alone = alone();
    let failing = |_: i64| Err::<(Tensor, Tensor), _>("the disk is gone".into());
    let mut sampler =
        NetworkSampler::new(Device::Cpu, build, failing, |net: &_, (x, y)| Ok(loss(net, &x, &y))).unwrap();
    let error = AutoFit::default().run(&mut sampler, &mut |_| ControlFlow::Continue(())).unwrap_err();
    assert!(error.to_string().contains("the disk is gone"), "{error}");
    let mut no_graph =
        NetworkSampler::new(Device::Cpu, build, batch, |_: &nn::Linear, _| Ok(Tensor::from(1.0))).unwrap();
    let error = no_graph.sample(20, 0).unwrap_err().to_string();
    assert!(error.contains("grad"), "{error}");
    let empty = NetworkSampler::new(Device::Cpu, |_| (), batch, |(): &(), _| Ok(Tensor::from(1.0)));
    assert!(empty.unwrap_err().to_string().contains("no trainable variables"));
}
