//! What a run shows: tables for people, one JSON document for programs.

use std::cell::OnceCell;

use serde::Serialize;

use super::fit::FittedModel;
use super::{EpochRow, Run};
use crate::error::CliError;
use crate::numbers::fixed;
use crate::terminal::print;

/// One method's training, as in `run.json`.
#[derive(Clone, Debug, Serialize)]
pub struct MethodReport {
    /// `fitted`, `adaptive`, `SGD` or `Adam`.
    pub method: &'static str,
    /// The learning rate it was given; none for the first two.
    pub learning_rate: Option<f64>,
    /// Complete epochs.
    pub epochs: Vec<EpochRow>,
    /// Steps that changed nothing.
    pub skipped_steps: usize,
    /// Whether Ctrl-C ended it.
    pub interrupted: bool,
}

impl MethodReport {
    /// From the record of a run.
    pub fn new(method: &'static str, learning_rate: Option<f64>, run: &Run) -> Self {
        MethodReport {
            method,
            learning_rate,
            epochs: run.epochs.clone(),
            skipped_steps: run.skipped_steps(),
            interrupted: run.interrupted,
        }
    }
}

/// Everything done with one seed.
#[derive(Clone, Debug, Serialize)]
pub struct SeedReport {
    /// The seed of initialisation, batch order and samples.
    pub seed: u64,
    /// The fitted model; null with the adaptive method.
    pub fit: Option<FittedModel>,
    /// The method that is asked for first, then the baselines.
    pub methods: Vec<MethodReport>,
    /// Whether all of them ran to their end.
    pub complete: bool,
}

/// A method with one setting, averaged over the seeds.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// `fitted`, `adaptive`, `SGD` or `Adam`.
    pub method: &'static str,
    /// The learning rate it was given; none for the first two.
    pub learning_rate: Option<f64>,
    /// Mean validation loss after each epoch; null where a run diverged.
    pub validation_loss: Vec<f64>,
    /// Mean accuracy after each epoch.
    pub accuracy: Vec<f64>,
}

/// Averages methods over seeds. Those that Ctrl-C or an error cut short are left out.
pub fn summarise(seeds: &[SeedReport]) -> Vec<Summary> {
    let complete: Vec<&SeedReport> = seeds.iter().filter(|seed| seed.complete).collect();
    let Some(first) = complete.first() else { return Vec::new() };
    first
        .methods
        .iter()
        .enumerate()
        .map(|(index, method)| {
            let runs: Vec<&MethodReport> = complete.iter().filter_map(|s| s.methods.get(index)).collect();
            let mean = |epoch: usize, value: fn(&EpochRow) -> f64| {
                runs.iter().map(|r| value(&r.epochs[epoch])).sum::<f64>() / runs.len() as f64
            };
            Summary {
                method: method.method,
                learning_rate: method.learning_rate,
                validation_loss: (0..method.epochs.len())
                    .map(|e| mean(e, |row| row.validation_loss))
                    .collect(),
                accuracy: (0..method.epochs.len()).map(|e| mean(e, |row| row.accuracy)).collect(),
            }
        })
        .collect()
}

/// The setting of a method with the smallest validation loss at the end.
pub fn best<'a>(summaries: &'a [Summary], method: &str) -> Option<&'a Summary> {
    let last = |s: &Summary| s.validation_loss.last().copied().filter(|loss| loss.is_finite());
    summaries
        .iter()
        .filter(|s| s.method == method && last(s).is_some())
        .min_by(|a, b| last(a).unwrap_or(f64::INFINITY).total_cmp(&last(b).unwrap_or(f64::INFINITY)))
}

/// Writes tables to standard output, or nothing when JSON was asked for.
#[derive(Debug)]
pub struct Printer {
    quiet: bool,
    lost: OnceCell<CliError>,
}

impl Printer {
    /// `quiet` switches it off.
    pub fn new(quiet: bool) -> Self {
        Printer { quiet, lost: OnceCell::new() }
    }

    /// One line. A line that is lost is no reason to stop training: [`Printer::outcome`] tells of it.
    pub fn line(&self, text: impl std::fmt::Display) {
        if self.quiet {
            return;
        }
        if let Err(error) = print(&format!("{text}\n")) {
            // The first says it all.
            let _ = self.lost.set(error);
        }
    }

    /// An error when a line was lost.
    pub fn outcome(self) -> Result<(), CliError> {
        self.lost.into_inner().map_or(Ok(()), Err)
    }

    /// What auto-fit found.
    pub fn fit(&self, fit: &FittedModel) {
        self.line(format!(
            "Auto-fit of the {} covariance: {} mini-batches, {} images ({:.2} epochs of data), {:.1} s",
            fit.covariance, fit.batches, fit.examples, fit.epochs_of_examples, fit.seconds
        ));
        self.line(format!(
            "  mean {}  variance {:.3e}  noise variance {:.3e}  relative deviation {:.2}",
            fixed(fit.mean, 4),
            fit.variance,
            fit.noise_variance,
            fit.relative_std
        ));
        self.line(format!(
            "  gradient variance {:.4e}  noise {:.4e}  length scale {}  largest step {}",
            fit.grad_variance,
            fit.noise_grad_variance,
            fixed(fit.length_scale, 3),
            fixed(fit.plateau_step_size, 3)
        ));
        let time = fit.halving_seconds.map_or(String::new(), |seconds| format!(", about {seconds:.0} s"));
        self.line(format!(
            "  half the relative deviation would take {} more images{time}",
            fit.halving_examples
        ));
        if !fit.tensors.is_empty() {
            self.line(format!(
                "  {:<24} {:>10} {:>18} {:>11} {:>20}",
                "tensor", "elements", "gradient variance", "noise", "length-scale factor"
            ));
        }
        for tensor in &fit.tensors {
            self.line(format!(
                "  {:<24} {:>10} {:>18.3e} {:>11.3e} {:>20}",
                tensor.name,
                tensor.dims,
                tensor.grad_variance,
                tensor.noise_grad_variance,
                fixed(tensor.length_scale_factor, 3) + if tensor.raised { " *" } else { "  " }
            ));
        }
        if fit.tensors.iter().any(|tensor| tensor.raised) {
            self.line("  * the variance of an element is below 3 % of the mean and counts as 3 %");
        }
        for warning in &fit.warnings {
            self.line(format!("  warning: {warning}"));
        }
    }

    /// Names of the columns of [`Printer::epoch`].
    pub fn epoch_header(&self) {
        self.line(format!(
            "{:>5} {:>11} {:>16} {:>9} {:>10} {:>14} {:>6} {:>8} {:>7}",
            "epoch",
            "train loss",
            "validation loss",
            "accuracy",
            "step size",
            "learning rate",
            "trust",
            "skipped",
            "time"
        ));
    }

    /// One epoch.
    pub fn epoch(&self, row: &EpochRow) {
        let decimals = |value: Option<f64>, digits| value.map_or("-".into(), |v| fixed(v, digits));
        let number = |value| decimals(value, 4);
        self.line(format!(
            "{:>5} {:>11} {:>16} {:>7.2} % {:>10} {:>14} {:>6} {:>8} {:>5.1} s",
            row.epoch,
            fixed(row.train_loss, 4),
            fixed(row.validation_loss, 4),
            100.0 * row.accuracy,
            number(row.step_size),
            number(row.learning_rate),
            decimals(row.trust, 3),
            row.skipped,
            row.seconds
        ));
    }

    /// The means over seeds, and all methods side by side where there are several.
    pub fn comparison(&self, summaries: &[Summary], seeds: &[SeedReport]) {
        let Some(first) = summaries.first() else { return };
        let epochs = first.validation_loss.len();
        let seeds: Vec<&SeedReport> = seeds.iter().filter(|seed| seed.complete).collect();
        let fits: Vec<&FittedModel> = seeds.iter().filter_map(|seed| seed.fit.as_ref()).collect();
        let over = if seeds.len() > 1 { format!(", mean of {} seeds", seeds.len()) } else { String::new() };
        let compares = summaries.len() > 1;
        let title = if compares { "Comparison: validation" } else { "Validation" };
        self.line(format!("\n{title} loss (accuracy) after each epoch{over}"));
        let mut header = format!("{:<8} {:>13}", "method", "learning rate");
        (1..=epochs).for_each(|epoch| header += &format!(" {:>18}", format!("epoch {epoch}")));
        self.line(header);
        for summary in summaries {
            let rate = summary.learning_rate.map_or("-".into(), |rate| rate.to_string());
            let mut line = format!("{:<8} {rate:>13}", summary.method);
            for (loss, accuracy) in summary.validation_loss.iter().zip(&summary.accuracy) {
                line += &format!(" {:>18}", format!("{} ({:.2} %)", fixed(*loss, 4), 100.0 * accuracy));
            }
            self.line(line);
        }
        for method in ["SGD", "Adam"] {
            if let Some(best) = best(summaries, method) {
                self.line(format!(
                    "Best {method}: learning rate {}, validation loss {:.4}; {}: {:.4}",
                    best.learning_rate.unwrap_or_default(),
                    best.validation_loss.last().copied().unwrap_or_default(),
                    first.method,
                    first.validation_loss.last().copied().unwrap_or_default()
                ));
            }
        }
        if !compares {
            return;
        }
        let untuned = if fits.is_empty() {
            "Nothing was tuned for the adaptive method, nor fitted.".into()
        } else {
            let cost = fits.iter().map(|fit| fit.epochs_of_examples).sum::<f64>() / fits.len() as f64;
            format!(
                "Nothing was tuned for the fitted method; its auto-fit looked at {cost:.2} epochs worth of images."
            )
        };
        self.line(format!(
            "{untuned} SGD and Adam each show a grid of learning rates, of which the best is known only after training \
             with all of them."
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(method: &'static str, rate: f64, loss: f64) -> Summary {
        Summary {
            method,
            learning_rate: Some(rate),
            validation_loss: vec![1.0, loss],
            accuracy: vec![0.5, 0.5],
        }
    }

    #[test]
    fn the_best_setting_is_that_of_the_last_epoch_and_never_a_diverged_one() {
        let all = [
            summary("SGD", 1.0, f64::NAN),
            summary("SGD", 0.3, 0.2),
            summary("SGD", 0.1, 0.3),
            summary("Adam", 0.1, 0.1),
        ];
        assert_eq!(best(&all, "SGD").unwrap().learning_rate, Some(0.3));
        assert!(best(&all[..1], "SGD").is_none());
    }
}
