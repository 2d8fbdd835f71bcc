//! Training one network with one method, and what is recorded on the way.

pub mod baseline;
pub mod evaluate;
pub mod fit;
mod origin;
pub mod report;
pub mod rfd;

use std::time::Instant;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use indicatif::ProgressBar;
use rfdescent::optimizer::Limit;
use serde::Serialize;

use crate::data::{Batches, Dataset};
use crate::error::CliError;
use crate::interrupt;
use crate::network::Network;
use crate::plot::training::Curves;

/// Number format of parameters, gradients and activations.
pub const DTYPE: DType = DType::F32;

/// An optimizer, as the training loop sees it.
pub trait Method {
    /// Moves the parameters.
    fn step(&mut self, loss: &Tensor, gradients: &GradStore) -> Result<MethodStep, CliError>;

    /// What a user can do when it skips every step.
    fn remedy(&self) -> &'static str {
        "check the data"
    }
}

/// What a method tells about a step; all fields are empty for the baselines.
#[derive(Clone, Debug, Default)]
pub struct MethodStep {
    /// ‖g‖.
    pub grad_norm: Option<f64>,
    /// The gradient cost quotient Θ, of the fitted method.
    pub theta: Option<f64>,
    /// η.
    pub step_size: Option<f64>,
    /// η/‖g‖; with the adaptive method over the norm of the averaged gradient in its own geometry.
    pub learning_rate: Option<f64>,
    /// How far the adaptive method trusts its model.
    pub trust: Option<f64>,
    /// What limits its step.
    pub limit: Option<Limit>,
    /// Why nothing was changed, if so.
    pub skipped: Option<String>,
}

/// A row of `run.csv`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct StepRow {
    step: usize,
    epoch: usize,
    loss: f64,
    grad_norm: Option<f64>,
    theta: Option<f64>,
    step_size: Option<f64>,
    learning_rate: Option<f64>,
    trust: Option<f64>,
    limit: Option<Limit>,
    skipped: Option<String>,
}

/// A row of `epochs.csv`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct EpochRow {
    /// Counted from 1.
    pub epoch: usize,
    /// Mean over the epoch's steps.
    pub train_loss: f64,
    /// Mean over the validation images after the epoch.
    pub validation_loss: f64,
    /// Share of the validation images classified rightly.
    pub accuracy: f64,
    /// η, median over the epoch's steps.
    pub step_size: Option<f64>,
    /// The learning rate, likewise.
    pub learning_rate: Option<f64>,
    /// The adaptive method's trust, likewise.
    pub trust: Option<f64>,
    /// Steps that changed nothing.
    pub skipped: usize,
    /// Wall time of training and validation.
    pub seconds: f64,
}

/// How long, in which portions and in which order.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Passes over the training images.
    pub epochs: usize,
    /// Images of a step.
    pub batch_size: usize,
    /// Decides the order.
    pub seed: u64,
}

/// All that training left behind, besides the parameters.
#[derive(Debug, Default)]
pub struct Run {
    /// Every step.
    pub steps: Vec<StepRow>,
    /// Every complete epoch.
    pub epochs: Vec<EpochRow>,
    /// Whether Ctrl-C ended it.
    pub interrupted: bool,
}

impl Run {
    /// Steps that changed nothing.
    pub fn skipped_steps(&self) -> usize {
        self.steps.iter().filter(|row| row.skipped.is_some()).count()
    }

    /// For a plot.
    pub fn curves(&self, method: &'static str, learning_rate: Option<f64>) -> Curves {
        let by_step = |value: fn(&StepRow) -> Option<f64>| {
            self.steps.iter().filter_map(|row| Some((row.step as f64, value(row)?))).collect()
        };
        let last = |epoch: usize| self.steps.iter().rev().find(|row| row.epoch == epoch).map(|row| row.step);
        let validation = |row: &EpochRow| Some((last(row.epoch)? as f64, row.validation_loss));
        Curves {
            method,
            learning_rate,
            losses: by_step(|row| Some(row.loss)),
            validation_losses: self.epochs.iter().filter_map(validation).collect(),
            step_sizes: by_step(|row| row.step_size),
            learning_rates: by_step(|row| row.learning_rate),
        }
    }
}

/// Trains `network`, as it stands, with `method`; after each epoch calls `on_epoch` with its row.
pub fn train(
    network: &Network,
    data: &Dataset,
    method: &mut dyn Method,
    schedule: Schedule,
    bar: &ProgressBar,
    on_epoch: &mut dyn FnMut(&EpochRow),
) -> Result<Run, CliError> {
    let mut batches = Batches::new(data.train.len(), schedule.batch_size, schedule.seed);
    let per_epoch = batches.per_epoch();
    bar.set_length((schedule.epochs * per_epoch) as u64);
    let mut run = Run::default();
    let mut skipped_in_a_row = 0;
    for epoch in 1..=schedule.epochs {
        let started = Instant::now();
        let first = run.steps.len();
        for indices in batches.epoch() {
            let batch = data.batch(&data.train, indices, DTYPE)?;
            let loss = network.training_loss(&batch)?;
            let gradients = loss.backward()?;
            let taken = method.step(&loss, &gradients)?;
            let loss = f64::from(loss.to_scalar::<f32>()?);
            skipped_in_a_row = if taken.skipped.is_some() { skipped_in_a_row + 1 } else { 0 };
            run.steps.push(StepRow {
                step: run.steps.len() + 1,
                epoch,
                loss,
                grad_norm: taken.grad_norm,
                theta: taken.theta,
                step_size: taken.step_size,
                learning_rate: taken.learning_rate,
                trust: taken.trust,
                limit: taken.limit,
                skipped: taken.skipped,
            });
            bar.inc(1);
            bar.set_message(format!("loss {loss:.4}"));
            if interrupt::requested() {
                run.interrupted = true;
                return Ok(run);
            }
            // Skipped steps change nothing, so once every batch has been skipped the rest will be too.
            if skipped_in_a_row >= per_epoch {
                let reason = run.steps.last().and_then(|row| row.skipped.as_deref()).unwrap_or_default();
                return Err(CliError::Data(format!(
                    "training stopped at step {} of epoch {epoch}: the last {skipped_in_a_row} steps were all skipped \
                     ({reason}); {}",
                    run.steps.len(),
                    method.remedy()
                )));
            }
        }
        let validation = evaluate::evaluate(network, data)?;
        let row = summarise(&run.steps[first..], epoch, validation, started.elapsed().as_secs_f64());
        on_epoch(&row);
        run.epochs.push(row);
    }
    Ok(run)
}

fn summarise(steps: &[StepRow], epoch: usize, validation: evaluate::Validation, seconds: f64) -> EpochRow {
    EpochRow {
        epoch,
        train_loss: steps.iter().map(|row| row.loss).sum::<f64>() / steps.len() as f64,
        validation_loss: validation.loss,
        accuracy: validation.accuracy,
        step_size: median(steps.iter().filter_map(|row| row.step_size)),
        learning_rate: median(steps.iter().filter_map(|row| row.learning_rate)),
        trust: median(steps.iter().filter_map(|row| row.trust)),
        skipped: steps.iter().filter(|row| row.skipped.is_some()).count(),
        seconds,
    }
}

/// The upper median.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

#[cfg(test)]
mod tests;
