//! Random Function Descent on a network, through the adapter for candle.

use std::fmt;

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use rfdescent::optimizer::Outcome;
use rfdescent_candle::Rfd;

use super::{Method, MethodStep};
use crate::error::CliError;

/// Which of the library's methods trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MethodKind {
    /// RFD as published, from a covariance that is fitted to samples at random initialisations first
    #[value(alias = "rfd")]
    Fitted,
    /// Without a fit, from what training itself shows
    Adaptive,
}

impl MethodKind {
    /// Its name in the columns of tables and in reports.
    pub fn name(self) -> &'static str {
        match self {
            MethodKind::Fitted => "fitted",
            MethodKind::Adaptive => "adaptive",
        }
    }
}

/// As it stands in a sentence.
impl fmt::Display for MethodKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MethodKind::Fitted => "the fitted method",
            MethodKind::Adaptive => "the adaptive method",
        })
    }
}

impl Method for Rfd {
    fn step(&mut self, loss: &Tensor, gradients: &GradStore) -> Result<MethodStep, CliError> {
        self.step_with_loss(gradients, loss)?;
        Ok(match self.report()? {
            None => MethodStep::default(),
            Some(report) => match report.outcome {
                Outcome::Skipped(reason) => {
                    MethodStep { skipped: Some(reason.to_string()), ..MethodStep::default() }
                }
                Outcome::Applied => {
                    let adaptive = self.model().is_none();
                    MethodStep {
                        grad_norm: Some(report.grad_norm),
                        theta: (!adaptive).then_some(report.theta),
                        step_size: Some(report.step_size),
                        learning_rate: Some(report.learning_rate),
                        trust: adaptive.then_some(report.trust),
                        limit: adaptive.then_some(report.limit),
                        skipped: None,
                    }
                }
            },
        })
    }

    fn remedy(&self) -> &'static str {
        match self.model() {
            Some(_) => "check the data, or fit the covariance anew without --samples",
            None => "check the data",
        }
    }
}
