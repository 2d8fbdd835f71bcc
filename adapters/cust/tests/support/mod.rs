//! What tests and benchmark have in common.

use rfdescent::Moments;
use rfdescent::covariance::{Family, Model};

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
