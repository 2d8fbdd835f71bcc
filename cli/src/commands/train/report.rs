//! The report of a run, and what there is of it when the run ends early.

use std::path::Path;

use rfdescent::files;
use serde::Serialize;

use super::command::Command;
use crate::error::{CliError, both};
use crate::network::NetworkKind;
use crate::numbers::count;
use crate::plot::{self, training::Curves};
use crate::terminal::print;
use crate::training::fit::Anisotropy;
use crate::training::report::{SeedReport, Summary, summarise};
use crate::training::rfd::MethodKind;

/// The document of `--json` and `run.json`.
#[derive(Serialize)]
struct Report<'a> {
    version: &'static str,
    network: NetworkKind,
    method: MethodKind,
    data: &'a str,
    training_images: usize,
    validation_images: usize,
    epochs: usize,
    batch_size: usize,
    /// Of the fitted method; null with the adaptive method.
    anisotropy: Option<Anisotropy>,
    stochastic: Option<bool>,
    threads: usize,
    /// Whether every seed ran to its end.
    complete: bool,
    seeds: &'a [SeedReport],
    summary: &'a [Summary],
}

/// The report's file in the output folder. It is written last and removed first: where it is, all else
/// belongs to it.
pub(super) const REPORT: &str = "run.json";

/// An error when there is a report that does not say that its run was cut short.
pub(super) fn refuse_finished(report: &Path) -> Result<(), CliError> {
    if !report.exists() {
        return Ok(());
    }
    let content: serde_json::Value =
        serde_json::from_slice(&files::read_regular(report)?).unwrap_or_default();
    if content["complete"] == false {
        return Ok(());
    }
    Err(CliError::file(
        report,
        "a finished run; name another folder with --output, or replace the run with --overwrite",
    ))
}

impl Command<'_> {
    /// Writes and prints what there is, however the run ended. The first error is the one that the user gets.
    pub(super) fn finish(
        self,
        seeds: &[SeedReport],
        curves: &[Curves],
        mut outcome: Result<(), CliError>,
    ) -> Result<(), CliError> {
        let args = self.args;
        let summary = summarise(seeds);
        let complete = outcome.is_ok();
        let fitted = args.method == MethodKind::Fitted;
        let report = Report {
            version: env!("CARGO_PKG_VERSION"),
            network: args.model,
            method: args.method,
            data: &self.data.source,
            training_images: self.data.train.len(),
            validation_images: self.data.validation.len(),
            epochs: args.epochs,
            batch_size: args.batch_size,
            anisotropy: fitted.then_some(args.anisotropy()),
            stochastic: fitted.then_some(args.stochastic),
            threads: candle_core::utils::get_num_threads(),
            complete,
            seeds,
            summary: &summary,
        };
        let anything = !seeds.is_empty();
        if let Some(folder) = self.output.as_ref().filter(|_| anything) {
            let written = folder.write_json(REPORT, &report);
            if written.is_ok() {
                outcome =
                    outcome.map_err(|error| error.with("what there is was written to the output folder"));
            }
            outcome = both(outcome, written);
        } else if anything && !args.json {
            let lost = match &args.plot {
                Some(_) => "only the plot was kept, as no --output was given",
                None => "nothing was kept, as no --output was given",
            };
            outcome = outcome.map_err(|error| error.with(lost));
        }
        if let Some(path) = args.plot.as_ref().filter(|_| !curves.is_empty()) {
            let drawn = plot::training::svg(&self.title(), curves)
                .and_then(|text| Ok(files::write_atomically(path, text.as_bytes())?));
            outcome = both(outcome, drawn);
        }
        if args.compare || args.seeds > 1 {
            self.printer.comparison(&summary, seeds);
        }
        if args.json && anything {
            let text = serde_json::to_string_pretty(&report).map_err(|e| CliError::Data(e.to_string()))?;
            outcome = both(outcome, print(&(text + "\n")));
        }
        for path in [&args.output, &args.plot].into_iter().flatten().filter(|_| outcome.is_ok()) {
            self.printer.line(format!("\nWritten to {}", path.display()));
        }
        both(outcome, self.printer.outcome())
    }

    /// Of the plot.
    fn title(&self) -> String {
        let args = self.args;
        let seeds = match args.seeds {
            1 => String::new(),
            seeds => format!(", {seeds} seeds"),
        };
        format!(
            "{} on {}: {}, {} a step{seeds}",
            args.model,
            self.data.source,
            count(args.epochs, "epoch"),
            count(args.batch_size, "image")
        )
    }
}
