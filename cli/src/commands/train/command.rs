//! One seed after the other: fit, training, comparison.

use rfdescent::covariance::{Family, Model};
use rfdescent::estimation::OnForeign;
use rfdescent_candle::{Adaptive, Config, Fitted, Rfd};

use super::TrainArgs;
use super::report::REPORT;
use crate::data::Dataset;
use crate::error::CliError;
use crate::network::Network;
use crate::numbers::count;
use crate::output::OutputFolder;
use crate::plot::training::Curves;
use crate::progress::Progress;
use crate::training::baseline::{Baseline, GRID};
use crate::training::fit::{FitOptions, FittedModel, fit};
use crate::training::report::{MethodReport, Printer, SeedReport};
use crate::training::rfd::MethodKind;
use crate::training::{DTYPE, Method, Run, Schedule, train};

/// What stays the same over all seeds.
pub(super) struct Command<'a> {
    pub(super) args: &'a TrainArgs,
    pub(super) data: &'a Dataset,
    pub(super) output: Option<OutputFolder>,
    pub(super) printer: Printer,
    pub(super) progress: Progress,
}

impl Command<'_> {
    pub(super) fn describe(&self) -> Result<(), CliError> {
        let (data, args) = (self.data, self.args);
        let dims = Network::new(args.model, DTYPE, args.seed)?.dims();
        self.printer.line(format!(
            "Data: {}, {} training and {}",
            data.source,
            data.train.len(),
            count(data.validation.len(), "validation image")
        ));
        self.printer.line(format!(
            "Network: {}, {} parameters; {} of {} with {} images ({} left out each epoch)",
            args.model,
            dims,
            count(args.epochs, "epoch"),
            count(data.train.len() / args.batch_size, "step"),
            args.batch_size,
            data.train.len() % args.batch_size
        ));
        Ok(())
    }

    /// Fits if need be, trains, compares. What there is of it by the time of an error is in `seeds` and, for
    /// a plot, in `curves` too.
    pub(super) fn run_seed(
        &self,
        seed: u64,
        seeds: &mut Vec<SeedReport>,
        curves: &mut Vec<Curves>,
    ) -> Result<(), CliError> {
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
        let config = match &fit {
            Some(fit) => Config::new(self.method(&fit.model)),
            None => Config::new(Adaptive::default()),
        };
        seeds.push(SeedReport { seed, fit, methods: Vec::new(), complete: false });
        let Some(report) = seeds.last_mut() else { return Ok(()) };

        let name = args.method.name();
        self.printer.line(format!("\nTraining with {}", args.method));
        self.printer.epoch_header();
        let network = Network::new(args.model, DTYPE, seed)?;
        let (config, parameters) = config.per_tensor(network.parameters())?;
        let mut rfd = Rfd::for_parameters(parameters, config)?;
        let run = self.train(name, &network, &mut rfd, seed, true)?;
        report.methods.push(MethodReport::new(name, None, &run));
        curves.extend(args.plot.is_some().then(|| run.curves(name, None)));
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
            curves
                .extend(args.plot.is_some().then(|| run.curves(setting.method, Some(setting.learning_rate))));
            stopped(&run)?;
        }
        report.complete = true;
        Ok(())
    }

    fn fit(&self, output: Option<&OutputFolder>, seed: u64) -> Result<FittedModel, CliError> {
        let args = self.args;
        let options = FitOptions {
            family: args.covariance.unwrap_or(Family::SquaredExponential),
            anisotropy: args.anisotropy(),
            tolerance: args.tolerance.unwrap_or(0.3),
            max_images: args.max_images.unwrap_or(1_000_000),
            on_foreign: if args.robust { OnForeign::LeaveOut } else { OnForeign::Refuse },
            cache: args.samples.clone().or_else(|| output.map(|folder| folder.join("samples.csv"))),
        };
        let fit = fit(args.model, self.data, &options, seed, &self.printer, self.progress)?;
        self.printer.fit(&fit);
        Ok(fit)
    }

    fn method(&self, model: &Model) -> Fitted {
        let inv_batch_size = if self.args.stochastic { 1.0 / self.args.batch_size as f64 } else { 0.0 };
        Fitted { inv_batch_size, ..model.clone().into() }
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
}

fn stopped(run: &Run) -> Result<(), CliError> {
    if run.interrupted { Err(CliError::Interrupted("training stopped by Ctrl-C".into())) } else { Ok(()) }
}
