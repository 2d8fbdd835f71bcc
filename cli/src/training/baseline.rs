//! The optimizers RFD is compared with, each over its grid of learning rates.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::optim::{AdamW, Optimizer, ParamsAdamW, SGD};

use super::{Method, MethodStep};
use crate::error::CliError;
use crate::network::Network;

/// One entry of the grid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// `SGD` or `Adam`.
    pub method: &'static str,
    /// Its learning rate.
    pub learning_rate: f64,
}

const fn setting(method: &'static str, learning_rate: f64) -> Setting {
    Setting { method, learning_rate }
}

/// Everything that is tried.
pub const GRID: [Setting; 6] = [
    setting("SGD", 1.0),
    setting("SGD", 0.3),
    setting("SGD", 0.1),
    setting("Adam", 1e-1),
    setting("Adam", 1e-2),
    setting("Adam", 1e-3),
];

/// A baseline at work.
pub enum Baseline {
    /// Plain stochastic gradient descent.
    Sgd(SGD),
    /// Adam with the usual β and ε: AdamW without weight decay.
    Adam(AdamW),
}

impl Baseline {
    /// The method of `setting` on the parameters of `network`.
    pub fn new(setting: Setting, network: &Network) -> Result<Self, CliError> {
        let vars: Vec<Var> = network.parameters().into_iter().map(|p| p.var).collect();
        let lr = setting.learning_rate;
        Ok(if setting.method == "SGD" {
            Baseline::Sgd(SGD::new(vars, lr)?)
        } else {
            let params = ParamsAdamW { lr, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
            Baseline::Adam(AdamW::new(vars, params)?)
        })
    }
}

impl Method for Baseline {
    fn step(&mut self, _loss: &Tensor, gradients: &GradStore) -> Result<MethodStep, CliError> {
        match self {
            Baseline::Sgd(sgd) => sgd.step(gradients)?,
            Baseline::Adam(adam) => adam.step(gradients)?,
        }
        Ok(MethodStep::default())
    }
}
