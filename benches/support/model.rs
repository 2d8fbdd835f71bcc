//! The covariance that fitted steps are timed with.

use rfdescent::Moments;
use rfdescent::covariance::{Family, Model};

/// As of the paper's case study.
pub fn model() -> Model {
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
