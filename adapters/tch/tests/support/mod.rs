//! What the tests have in common.
#![allow(dead_code, reason = "each test file uses its part")]

use rfdescent::Moments;
use rfdescent::covariance::{Family, Model};
use tch::nn::VarStore;
use tch::{Device, Tensor};

/// A model like those that auto-fit finds.
pub fn model() -> Model {
    let moments = Moments {
        mean: 2.5,
        variance: 0.01,
        noise_variance: 0.9,
        grad_variance: 5.0,
        noise_grad_variance: 300.0,
        dims: 1000,
    };
    Model::new(Family::SquaredExponential, moments).unwrap()
}

pub fn store() -> VarStore {
    VarStore::new(Device::Cpu)
}

/// A variable with the given values.
pub fn variable(store: &VarStore, name: &str, values: &[f32]) -> Tensor {
    store.root().add(name, Tensor::from_slice(values), true)
}

/// Gives the variable a gradient of any kind and layout; tch has no call for that. The gradient must have the
/// variable's size.
pub fn plant_gradient(variable: &Tensor, gradient: &Tensor) {
    (variable * 1.0).sum(variable.kind()).backward();
    variable.grad().set_data(gradient);
}

pub fn floats(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.detach().contiguous().flatten(0, -1)).unwrap()
}

pub fn loss(value: f64) -> Tensor {
    Tensor::from(value)
}
