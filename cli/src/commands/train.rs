//! `rfdescent train`: trains a network with RFD, after a fit of the covariance on the network itself, or with
//! the adaptive method.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::RangedU64ValueParser;
use rfdescent::covariance::{Family, Model};
use rfdescent::optimizer::Options;
use rfdescent_candle::{Adaptive, Config, Rfd};
use serde::Serialize;

use crate::data::{Dataset, idx, synthetic};
use crate::error::{CliError, both};
use crate::files;
use crate::interrupt;
use crate::network::{Network, NetworkKind};
use crate::output::OutputFolder;
use crate::progress::Progress;
use crate::terminal::print;
use crate::training::baseline::{Baseline, GRID};
use crate::training::fit::{Anisotropy, FitOptions, Fitted, fit};
use crate::training::report::{MethodReport, Printer, SeedReport, Summary, summarise};
use crate::training::rfd::MethodKind;
use crate::training::{DTYPE, Method, Run, Schedule, train};

/// Train a network with Random Function Descent, nothing tuned: after a fit of the covariance on the network
/// itself, or with the adaptive method, which needs none
#[derive(Args, Debug)]
pub struct TrainArgs {
    /// Folder with the four IDX files of MNIST or Fashion-MNIST, gzipped or not [default: generated images]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// The network
    #[arg(long, value_enum, default_value_t = NetworkKind::Mlp)]
    model: NetworkKind,
    /// How steps are chosen
    #[arg(long, value_enum, default_value_t = MethodKind::Adaptive)]
    method: MethodKind,
    /// Passes over the training images
    #[arg(long, value_name = "N", default_value_t = 3, allow_hyphen_values = true, value_parser = RangedU64ValueParser::<usize>::new().range(1..=1_000_000))]
    epochs: usize,
    /// Images of a step, at least 2; the incomplete batch at the end of an epoch is left out
    #[arg(long, value_name = "B", default_value_t = 1024, allow_hyphen_values = true, value_parser = RangedU64ValueParser::<usize>::new().range(2..=1_000_000))]
    batch_size: usize,
    /// With --method fitted: squared_exponential, rational_quadratic:BETA, matern:1.5 or matern:2.5
    /// [default: squared_exponential]
    #[arg(long, value_name = "NAME")]
    covariance: Option<Family>,
    /// With --method fitted: one length scale for all parameters, or one for each tensor, fitted to the same
    /// samples [default: none]
    #[arg(long, value_enum)]
    anisotropy: Option<Anisotropy>,
    /// With --method fitted: S-RFD, correct each step for the noise of its mini-batch
    #[arg(long)]
    stochastic: bool,
    /// Seed of everything random; a machine repeats a run exactly
    #[arg(long, value_name = "S", default_value_t = 0, allow_hyphen_values = true)]
    seed: u64,
    /// Repeat with this many seeds, from --seed on, and report the means
    #[arg(long, value_name = "N", default_value_t = 1, allow_hyphen_values = true, value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,
    /// Also train the same network with SGD and Adam over a grid of learning rates
    #[arg(long)]
    compare: bool,
    /// Folder for run.json, run.csv, epochs.csv, the trained parameters and, where there is a fit, its model
    /// and samples. After an interruption the same command takes the samples from it, and trains anew; a
    /// finished run in it is not touched
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Replace the finished run in the output folder, all but its samples
    #[arg(long, requires = "output")]
    overwrite: bool,
    /// With --method fitted: file that keeps the samples of auto-fit; samples in it are used
    /// [default: samples.csv in the output folder]
    #[arg(long, value_name = "FILE")]
    samples: Option<PathBuf>,
    /// With --method fitted: relative standard deviation of the fitted variance at which auto-fit stops
    /// [default: 0.3]
    #[arg(long, value_name = "T", value_parser = positive, allow_hyphen_values = true)]
    tolerance: Option<f64>,
    /// With --method fitted: images that auto-fit draws at most [default: 1000000]
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = clap::value_parser!(u64).range(100..=1_000_000_000))]
    max_samples: Option<u64>,
    /// Use only this many training images
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = RangedU64ValueParser::<usize>::new().range(MIN_IMAGES as u64..=10_000_000))]
    train_images: Option<usize>,
    /// Use only this many validation images
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = RangedU64ValueParser::<usize>::new().range(1..=10_000_000))]
    validation_images: Option<usize>,
    /// Print one JSON document instead of tables
    #[arg(long)]
    json: bool,
}

/// Fewer cannot show how the loss varies with the batch size, which auto-fit starts at 20.
const MIN_IMAGES: usize = 100;

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value.is_finite() => Ok(value),
        _ => Err("a finite number above 0 is needed".into()),
    }
}

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
const REPORT: &str = "run.json";

impl TrainArgs {
    /// The first option that was given and that only the fitted method has. Hence these have no defaults of
    /// clap's.
    fn option_of_fit(&self) -> Option<&'static str> {
        [
            ("--covariance", self.covariance.is_some()),
            ("--anisotropy", self.anisotropy.is_some()),
            ("--stochastic", self.stochastic),
            ("--samples", self.samples.is_some()),
            ("--tolerance", self.tolerance.is_some()),
            ("--max-samples", self.max_samples.is_some()),
        ]
        .into_iter()
        .find_map(|(option, given)| given.then_some(option))
    }

    fn anisotropy(&self) -> Anisotropy {
        self.anisotropy.unwrap_or(Anisotropy::Isotropic)
    }
}

/// Runs the subcommand.
pub fn run(args: &TrainArgs) -> Result<(), CliError> {
    if let (MethodKind::Adaptive, Some(option)) = (args.method, args.option_of_fit()) {
        return Err(CliError::Usage(format!(
            "{option}: only the fitted method has it: give --method fitted as well, or leave it out"
        )));
    }
    interrupt::install()?;
    // The folder first: a run must not find out at its end that it cannot be written.
    let output = args.output.as_deref().map(OutputFolder::create).transpose()?;
    if let Some(folder) = output.as_ref().filter(|_| !args.overwrite) {
        refuse_finished(&folder.join(REPORT))?;
    }
    let data = load(args)?;
    let command = Command {
        args,
        data: &data,
        output,
        printer: Printer::new(args.json),
        progress: Progress::new(args.json),
    };
    command.describe()?;
    let mut seeds = Vec::new();
    let outcome = (0..args.seeds)
        .map(|offset| args.seed.wrapping_add(offset))
        .try_for_each(|seed| command.run_seed(seed, &mut seeds));
    command.finish(&seeds, outcome)
}

/// An error when there is a report that does not say that its run was cut short.
fn refuse_finished(report: &Path) -> Result<(), CliError> {
    if !report.exists() {
        return Ok(());
    }
    let content: serde_json::Value = serde_json::from_slice(&files::read(report)?).unwrap_or_default();
    if content["complete"] == false {
        return Ok(());
    }
    Err(CliError::file(
        report,
        "a finished run; name another folder with --output, or replace the run with --overwrite",
    ))
}

fn load(args: &TrainArgs) -> Result<Dataset, CliError> {
    let limit = |wanted: Option<usize>, all: usize| wanted.unwrap_or(all).min(all);
    let data = match &args.data {
        Some(folder) => {
            let data = idx::load(folder)?;
            let train = limit(args.train_images, data.train.len());
            let validation = limit(args.validation_images, data.validation.len());
            data.truncate(train, validation)
        }
        None => synthetic::generate(
            args.seed,
            args.train_images.unwrap_or(synthetic::TRAIN_IMAGES),
            args.validation_images.unwrap_or(synthetic::VALIDATION_IMAGES),
        ),
    };
    if args.method == MethodKind::Fitted && data.train.len() < MIN_IMAGES {
        return Err(CliError::Data(format!(
            "{}: {} training images; auto-fit needs at least {MIN_IMAGES}",
            data.source,
            data.train.len()
        )));
    }
    if data.train.len() < args.batch_size {
        let images = data.train.len();
        return Err(CliError::Usage(format!(
            "--batch-size {} is more than the {images} training images; give at most {images}",
            args.batch_size
        )));
    }
    Ok(data)
}

/// What stays the same over all seeds.
struct Command<'a> {
    args: &'a TrainArgs,
    data: &'a Dataset,
    output: Option<OutputFolder>,
    printer: Printer,
    progress: Progress,
}

impl Command<'_> {
    fn describe(&self) -> Result<(), CliError> {
        let (data, args) = (self.data, self.args);
        let dims = Network::new(args.model, DTYPE, args.seed)?.dims();
        self.printer.line(format!(
            "Data: {}, {} training and {} validation images",
            data.source,
            data.train.len(),
            data.validation.len()
        ));
        self.printer.line(format!(
            "Network: {}, {} parameters; {} epochs of {} steps with {} images ({} left out each epoch)",
            args.model,
            dims,
            args.epochs,
            data.train.len() / args.batch_size,
            args.batch_size,
            data.train.len() % args.batch_size
        ));
        Ok(())
    }

    /// Fits if need be, trains, compares. What there is of it by the time of an error is in `seeds` too.
    fn run_seed(&self, seed: u64, seeds: &mut Vec<SeedReport>) -> Result<(), CliError> {
        let args = self.args;
        let own_folder = match &self.output {
            Some(folder) if args.seeds > 1 => {
                Some(OutputFolder::create(&folder.join(&format!("seed-{seed}")))?)
            }
            _ => None,
        };
        let output = own_folder.as_ref().or(self.output.as_ref());
        if args.seeds > 1 {
            self.printer.line(format!("\nSeed {seed}"));
        }
        let fit = match args.method {
            MethodKind::Fitted => Some(self.fit(output, seed)?),
            MethodKind::Adaptive => None,
        };
        let method = fit.as_ref().map_or(Adaptive::default().into(), |fit| fit.model.clone().into());
        seeds.push(SeedReport { seed, fit, methods: Vec::new(), complete: false });
        let Some(report) = seeds.last_mut() else { return Ok(()) };

        let name = args.method.name();
        self.printer.line(format!("\nTraining with {}", args.method));
        self.printer.epoch_header();
        let network = Network::new(args.model, DTYPE, seed)?;
        let config = Config { method, options: self.optimizer_options() };
        let (config, parameters) = config.per_tensor(network.parameters())?;
        let mut rfd = Rfd::for_parameters(parameters, config)?;
        let run = self.train(name, &network, &mut rfd, seed, true)?;
        report.methods.push(MethodReport::new(name, None, &run));
        if let Some(folder) = output {
            self.write_run(folder, &network, rfd.model(), &run)?;
        }
        stopped(&run)?;
        for setting in GRID.into_iter().filter(|_| args.compare) {
            let network = Network::new(args.model, DTYPE, seed)?;
            let mut baseline = Baseline::new(setting, &network)?;
            let label = format!("{} {}", setting.method, setting.learning_rate);
            let run = self.train(&label, &network, &mut baseline, seed, false)?;
            report.methods.push(MethodReport::new(setting.method, Some(setting.learning_rate), &run));
            stopped(&run)?;
        }
        report.complete = true;
        Ok(())
    }

    fn fit(&self, output: Option<&OutputFolder>, seed: u64) -> Result<Fitted, CliError> {
        let args = self.args;
        let options = FitOptions {
            family: args.covariance.unwrap_or(Family::SquaredExponential),
            anisotropy: args.anisotropy(),
            tolerance: args.tolerance.unwrap_or(0.3),
            max_samples: args.max_samples.unwrap_or(1_000_000),
            cache: args.samples.clone().or_else(|| output.map(|folder| folder.join("samples.csv"))),
        };
        let fit = fit(args.model, self.data, &options, seed, self.progress)?;
        self.printer.fit(&fit);
        Ok(fit)
    }

    fn optimizer_options(&self) -> Options {
        let inv_batch_size = if self.args.stochastic { 1.0 / self.args.batch_size as f64 } else { 0.0 };
        Options { inv_batch_size, ..Options::default() }
    }

    fn train(
        &self,
        label: &str,
        network: &Network,
        method: &mut dyn Method,
        seed: u64,
        show: bool,
    ) -> Result<Run, CliError> {
        let schedule = Schedule { epochs: self.args.epochs, batch_size: self.args.batch_size, seed };
        let bar = self.progress.bar(0, label);
        let run = train(network, self.data, method, schedule, &bar, &mut |row| {
            if show {
                bar.suspend(|| self.printer.epoch(row));
            }
        });
        bar.finish_and_clear();
        run
    }

    fn write_run(
        &self,
        folder: &OutputFolder,
        network: &Network,
        model: Option<&Model>,
        run: &Run,
    ) -> Result<(), CliError> {
        if let Some(folder) = &self.output {
            folder.remove(REPORT)?;
        }
        folder.write_csv("run.csv", &run.steps)?;
        folder.write_csv("epochs.csv", &run.epochs)?;
        match model {
            Some(model) => folder.write("model.json", model.to_json()?.as_bytes())?,
            None => folder.remove("model.json")?,
        }
        let parameters = "parameters.safetensors";
        let bytes = safetensors::serialize(network.tensors(), None)
            .map_err(|e| CliError::file(&folder.join(parameters), e))?;
        folder.write(parameters, &bytes)
    }

    /// Writes and prints what there is, however the run ended. The first error is the one that the user gets.
    fn finish(self, seeds: &[SeedReport], mut outcome: Result<(), CliError>) -> Result<(), CliError> {
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
            let lost = "nothing was kept, as no --output was given";
            outcome = outcome.map_err(|error| error.with(lost));
        }
        if args.compare || args.seeds > 1 {
            self.printer.comparison(&summary, seeds);
        }
        if args.json && anything {
            let text = serde_json::to_string_pretty(&report).map_err(|e| CliError::Data(e.to_string()))?;
            outcome = both(outcome, print(&(text + "\n")));
        }
        if let Some(path) = args.output.as_ref().filter(|_| outcome.is_ok()) {
            self.printer.line(format!("\nWritten to {}", path.display()));
        }
        both(outcome, self.printer.outcome())
    }
}

fn stopped(run: &Run) -> Result<(), CliError> {
    if run.interrupted { Err(CliError::Interrupted("training stopped by Ctrl-C".into())) } else { Ok(()) }
}
