//! The covariance model of a network on its data: auto-fit, with its progress, its cache and what it cost.

use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_core::Device;
use rfdescent::Error;
use rfdescent::covariance::{Family, Model};
use rfdescent::estimation::{AutoFit, AutoFitted, EstimationError, OnForeign, TensorFit};
use rfdescent_candle::NetworkSampler;
use serde::Serialize;

use super::DTYPE;
use super::origin::Origin;
use super::report::Printer;
use crate::data::{Batch, Dataset, draw_batch};
use crate::error::CliError;
use crate::interrupt;
use crate::network::{Layers, NetworkKind};
use crate::progress::Progress;

/// Largest batch of a sample: the convolutional network takes 0.3 MB an image.
const MAX_BATCH: u64 = 4096;

/// Which parameters share a length scale.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Anisotropy {
    /// All, as published
    #[value(alias = "none")]
    Isotropic,
    /// Those of a tensor
    #[value(alias = "tensor")]
    Tensorwise,
}

/// What the user may choose.
#[derive(Clone, Debug)]
pub struct FitOptions {
    /// The covariance.
    pub family: Family,
    /// Whether each tensor gets a length scale.
    pub anisotropy: Anisotropy,
    /// Relative standard deviation of C(0) that ends the sampling.
    pub tolerance: f64,
    /// Most images to draw.
    pub max_images: u64,
    /// What to do about samples that look foreign to the others.
    pub on_foreign: OnForeign,
    /// File that keeps the samples.
    pub cache: Option<PathBuf>,
}

/// A fitted model and how it came about, as in `run.json`.
#[derive(Clone, Debug, Serialize)]
pub struct FittedModel {
    /// The model.
    #[serde(skip)]
    pub model: Model,
    /// Name of the covariance.
    pub covariance: String,
    /// μ.
    pub mean: f64,
    /// C(0).
    pub variance: f64,
    /// C_ε(0).
    pub noise_variance: f64,
    /// −d·C'(0), in the norm of the length scales.
    pub grad_variance: f64,
    /// −d·C'_ε(0), likewise.
    pub noise_grad_variance: f64,
    /// The tensors, where each has a length scale.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<TensorFit>,
    /// d.
    pub dims: u64,
    /// Relative standard deviation of the variance.
    pub relative_std: f64,
    /// Length scale of the covariance.
    pub length_scale: f64,
    /// Largest step size.
    pub plateau_step_size: f64,
    /// Mini-batches drawn.
    pub batches: u64,
    /// Images in them.
    pub examples: u64,
    /// The same in passes over the training images: what the fit cost in epochs of training.
    pub epochs_of_examples: f64,
    /// Wall time; short when the cache held the samples already.
    pub seconds: f64,
    /// Images that would have to be drawn in addition for half the relative standard deviation.
    pub halving_examples: u64,
    /// How long that would take; `None` where the cache held all samples.
    pub halving_seconds: Option<f64>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// Draws samples of networks of this kind, and fits the model.
pub fn fit(
    kind: NetworkKind,
    data: &Dataset,
    options: &FitOptions,
    seed: u64,
    printer: &Printer,
    progress: Progress,
) -> Result<FittedModel, CliError> {
    let started = Instant::now();
    let mut warnings = Vec::new();
    if let Some(cache) = &options.cache {
        warnings.extend(Origin::of(kind, data).claim(cache)?);
    }
    let defaults = AutoFit::default();
    let auto_fit = AutoFit {
        tolerance: options.tolerance,
        initial_budget: defaults.initial_budget.min(options.max_images),
        max_budget: options.max_images,
        max_batch_size: Some(MAX_BATCH.min(data.train.len() as u64)),
        seed,
        cache: options.cache.clone(),
        on_foreign: options.on_foreign,
        ..defaults
    };
    let bar = progress.bar(auto_fit.initial_budget, "auto-fit (images)");
    let mut sampler = NetworkSampler::new(
        DTYPE,
        &Device::Cpu,
        |vb| Layers::new(kind, vb),
        |batch_size, rng| data.batch(&data.train, &draw_batch(data.train.len(), batch_size, rng), DTYPE),
        |layers: &Layers, batch: &Batch| layers.training_loss(batch),
        &auto_fit,
    )?;
    let mut first = true;
    let fitted = auto_fit.run(&mut sampler, &mut |at| {
        if std::mem::take(&mut first) {
            // Before anything is drawn; how long it takes follows from the first samples.
            let [expected, most] =
                [at.expected, auto_fit.max_budget].map(|images| images.saturating_sub(at.examples));
            let cost = format!("Auto-fit will draw about {expected} images, {most} at most");
            bar.suspend(|| printer.line(cost));
        }
        bar.set_length(at.expected);
        bar.set_position(at.examples);
        let left = at.remaining_seconds.map_or(String::new(), |seconds| format!("about {seconds:.0} s left"));
        bar.set_message(match at.relative_std {
            Some(std) => format!("{left}; relative deviation {std:.2}, to reach {}", at.tolerance),
            None => left,
        });
        if interrupt::requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    bar.finish_and_clear();
    let fitted = fitted.map_err(|error| explain(error, options.cache.as_deref()))?;
    let (model, tensors) = model(options, &fitted)?;
    let moments = model.moments();
    warnings.extend(fitted.warnings);
    Ok(FittedModel {
        covariance: options.family.to_string(),
        mean: moments.mean,
        variance: moments.variance,
        noise_variance: moments.noise_variance,
        grad_variance: moments.grad_variance,
        noise_grad_variance: moments.noise_grad_variance,
        tensors,
        dims: fitted.dims,
        relative_std: fitted.fit.relative_std,
        length_scale: model.length_scale(),
        plateau_step_size: model.plateau_step_size(),
        batches: fitted.fit.batches,
        examples: fitted.fit.examples,
        epochs_of_examples: fitted.fit.examples as f64 / data.train.len() as f64,
        seconds: started.elapsed().as_secs_f64(),
        halving_examples: fitted.cost.halving_examples,
        halving_seconds: fitted.cost.halving_seconds,
        warnings,
        model,
    })
}

/// The model and, if wanted, the fits of the tensors in whose geometry it is.
fn model(options: &FitOptions, fitted: &AutoFitted) -> Result<(Model, Vec<TensorFit>), CliError> {
    let unfit = |error: Error| CliError::Data(format!("no covariance fits the samples: {error}"));
    if options.anisotropy == Anisotropy::Isotropic {
        return Ok((Model::new(options.family, fitted.moments()).map_err(unfit)?, Vec::new()));
    }
    let tensors = fitted.fit_tensors().map_err(|error| match (error, &options.cache) {
        (Error::Estimation(EstimationError::NoTensors), Some(cache)) => CliError::file(
            cache,
            "holds samples without gradient norms by tensor, which --anisotropy tensorwise needs; name another file with \
             --samples",
        ),
        (error, _) => unfit(error),
    })?;
    let model = Model::new(options.family, tensors.moments(&fitted.fit))
        .and_then(|model| model.with_tensors(tensors.factors()))
        .map_err(unfit)?;
    Ok((model, tensors.tensors))
}

/// Says what a user of the command can do, where the library speaks to a caller of its functions.
fn explain(error: Error, cache: Option<&Path>) -> CliError {
    match (error, cache) {
        (Error::Estimation(EstimationError::Interrupted { .. }), Some(cache)) => {
            let cache = cache.display();
            CliError::Interrupted(format!(
                "auto-fit stopped by Ctrl-C; every sample drawn is in {cache}: the same command, or --samples {cache}, \
                 goes on from there"
            ))
        }
        (Error::Estimation(EstimationError::Interrupted { .. }), None) => CliError::Interrupted(
            "auto-fit stopped by Ctrl-C; its samples are lost (--samples FILE or --output DIR keeps them)"
                .into(),
        ),
        (Error::Estimation(EstimationError::BudgetExhausted { examples, source, .. }), _) => CliError::Data(
            format!("auto-fit found no covariance in {examples} images: {source}; or raise --max-images"),
        ),
        (Error::Estimation(EstimationError::Foreign { findings, consequence }), cache) => {
            let rows = cache.map_or(String::new(), |cache| {
                let cache = cache.display();
                format!("; or delete their rows, which `rfdescent fit {cache}` names, and run the same command again")
            });
            CliError::Data(format!(
                "{findings}; they decide over the fit ({consequence}): leave them out with --robust{rows}"
            ))
        }
        (Error::Io { path, source }, Some(cache))
            if path == cache
                && matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) =>
        {
            CliError::file(
                cache,
                format!(
                    "{source}; the samples drawn so far are kept: free some space, and the same command goes on from \
                     there"
                ),
            )
        }
        (error, _) => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_named_with_what_is_kept() {
        let full = |path: &str| {
            let source = std::io::Error::from(ErrorKind::StorageFull);
            explain(Error::Io { path: path.into(), source }, Some(Path::new("samples.csv"))).to_string()
        };
        let text = full("samples.csv");
        assert!(
            text.contains("samples.csv") && text.contains("are kept") && text.contains("goes on"),
            "{text}"
        );
        let text = full("other");
        assert!(
            text.contains("other") && text.contains("free some space") && !text.contains("kept"),
            "{text}"
        );
    }
}
