//! Pages of SVG: the sanity checks of a fit, and the course of a training.

mod axis;
mod data;
mod page;
mod panel;
pub mod training;

use std::path::Path;

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

/// An error unless the name is that of an SVG file.
pub fn check_name(path: &Path) -> Result<(), CliError> {
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("svg")) {
        return Ok(());
    }
    let path = path.display();
    Err(CliError::Usage(format!("--plot {path}: plots are SVG files: give a name that ends in .svg")))
}
