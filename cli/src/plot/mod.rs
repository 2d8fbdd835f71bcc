//! The sanity checks of a fit as one page of SVG.

mod axis;
mod data;
mod page;

use rfdescent::covariance::Model;
use rfdescent::estimation::{Diagnostics, Fit, Sample};

use crate::error::CliError;
use data::PlotData;

/// Losses, squared losses and squared gradient norms against the batch size and against the quantiles of
/// their distributions under the model; with `model`, its step sizes.
pub fn svg(
    samples: &[Sample],
    fit: &Fit,
    diagnostics: &Diagnostics,
    model: Option<&Model>,
) -> Result<String, CliError> {
    let data = PlotData::new(samples, fit, model, diagnostics.grad_effective_dims);
    page::draw(&data, fit)
}
