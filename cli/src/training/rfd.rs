//! Random Function Descent on a network, through the adapter for candle.

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use rfdescent::optimizer::Outcome;
use rfdescent_candle::Rfd;

use super::{Method, MethodStep};
use crate::error::CliError;

impl Method for Rfd {
    fn step(&mut self, loss: &Tensor, gradients: &GradStore) -> Result<MethodStep, CliError> {
        self.step_with_loss(gradients, loss)?;
        Ok(match self.report()? {
            None => MethodStep::default(),
            Some(report) => match report.outcome {
                Outcome::Skipped(reason) => {
                    MethodStep { skipped: Some(reason.to_string()), ..MethodStep::default() }
                }
                Outcome::Applied => MethodStep {
                    grad_norm: Some(report.grad_norm),
                    theta: Some(report.theta),
                    step_size: Some(report.step_size),
                    learning_rate: Some(report.learning_rate),
                    skipped: None,
                },
            },
        })
    }
}
