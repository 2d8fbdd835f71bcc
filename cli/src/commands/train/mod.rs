//! `rfdescent train`: trains a network with RFD, after a fit of the covariance on the network itself, or with
//! the adaptive method.

mod command;
mod report;

use std::path::PathBuf;

use clap::Args;
use rfdescent::covariance::Family;
use rfdescent::files::Prepared;

use self::command::Command;
use self::report::{REPORT, refuse_finished};
use crate::data::{Dataset, idx, synthetic};
use crate::error::CliError;
use crate::input;
use crate::interrupt;
use crate::network::NetworkKind;
use crate::numbers::whole;
use crate::output::OutputFolder;
use crate::plot;
use crate::progress::Progress;
use crate::training::fit::Anisotropy;
use crate::training::report::Printer;
use crate::training::rfd::MethodKind;

/// Train a network with Random Function Descent, nothing tuned: by the adaptive method, or with --method
/// fitted after a fit of the covariance on the network itself
///
/// Of each epoch it prints the mean training loss over the steps, loss and accuracy on the validation images
/// after it, the medians over the steps of step size, learning rate and trust, and how many were skipped.
/// Trust is the adaptive method's: how far it relies on its model, from 0.001 to 4.
#[derive(Args, Debug)]
pub struct TrainArgs {
    /// Folder with the four IDX files of MNIST or Fashion-MNIST, gzipped or not, in it or where torchvision
    /// lays them out below it (MNIST/raw) [default: generated images]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// The network
    #[arg(long, value_enum, default_value_t = NetworkKind::Mlp)]
    model: NetworkKind,
    /// How steps are chosen
    #[arg(long, value_enum, default_value_t = MethodKind::Adaptive)]
    method: MethodKind,
    /// Passes over the training images
    #[arg(long, value_name = "N", default_value_t = 3, allow_hyphen_values = true, value_parser = whole::<usize>(1..=1_000_000))]
    epochs: usize,
    /// Images of a step, at least 2; the incomplete batch at the end of an epoch is left out
    #[arg(long, value_name = "B", default_value_t = 1024, allow_hyphen_values = true, value_parser = whole::<usize>(2..=1_000_000))]
    batch_size: usize,
    /// With --method fitted: squared_exponential, rational_quadratic:BETA, matern:1.5 or matern:2.5
    /// [default: squared_exponential]
    #[arg(long, value_name = "NAME")]
    covariance: Option<Family>,
    /// With --method fitted: one length scale for all parameters, or one for each tensor, fitted to the same
    /// samples [default: isotropic]
    #[arg(long, value_enum)]
    anisotropy: Option<Anisotropy>,
    /// With --method fitted: S-RFD, correct each step for the noise of its mini-batch
    #[arg(long)]
    stochastic: bool,
    /// Seed of everything random; a machine repeats a run exactly
    #[arg(long, value_name = "S", default_value_t = 0, allow_hyphen_values = true, value_parser = whole::<u64>(0..=u64::MAX))]
    seed: u64,
    /// Repeat with this many seeds, from --seed on, and report the means
    #[arg(long, value_name = "N", default_value_t = 1, allow_hyphen_values = true, value_parser = whole::<u64>(1..=1000))]
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
    #[arg(long, alias = "max-samples", value_name = "N", allow_hyphen_values = true, value_parser = whole::<u64>(100..=1_000_000_000))]
    max_images: Option<u64>,
    /// With --method fitted: leave out samples of auto-fit that look foreign to the others, as those of
    /// initialisations that blow up; without it auto-fit stops where these decide over the fit
    #[arg(long)]
    robust: bool,
    /// Use only this many training images
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = whole::<usize>(MIN_IMAGES as u64..=10_000_000))]
    train_images: Option<usize>,
    /// Use only this many validation images
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = whole::<usize>(1..=10_000_000))]
    validation_images: Option<usize>,
    /// Draw losses, step sizes and learning rates by step, those of --compare as well, in one picture
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
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
            ("--max-images", self.max_images.is_some()),
            ("--robust", self.robust),
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
            "{option}: is about the fit: give --method fitted as well, or leave it out"
        )));
    }
    args.plot.as_deref().map_or(Ok(()), plot::check_name)?;
    if args.samples.as_deref().is_some_and(input::is_standard) {
        return Err(CliError::Usage("--samples -: auto-fit adds samples to this file; name one".into()));
    }
    interrupt::install()?;
    // The folder first: a run must not find out at its end that it cannot be written.
    let output = args.output.as_deref().map(OutputFolder::create).transpose()?;
    if let Some(folder) = output.as_ref().filter(|_| !args.overwrite) {
        refuse_finished(&folder.join(REPORT))?;
    }
    if let Some(plot) = &args.plot {
        // Likewise; nothing is replaced until the end.
        Prepared::new(plot, b"")?;
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
    let (mut seeds, mut curves) = (Vec::new(), Vec::new());
    let outcome = (0..args.seeds)
        .map(|offset| args.seed.wrapping_add(offset))
        .try_for_each(|seed| command.run_seed(seed, &mut seeds, &mut curves));
    command.finish(&seeds, &curves, outcome)
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
