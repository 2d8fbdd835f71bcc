//! `rfdescent fit`: a covariance model from a file of samples.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use rfdescent::Error;
use rfdescent::covariance::{Family, Model};
use rfdescent::estimation::{
    Diagnostics, EstimationError, Findings, FitOptions, Sample, SampleFit, SampleTable, TensorVariance,
    tensor_variances,
};
use rfdescent::files::Prepared;
use serde::Serialize;

use crate::error::CliError;
use crate::input;
use crate::numbers::{fixed, short, whole};
use crate::plot;
use crate::terminal::{print, say};

/// Fit mean and variances, and the covariance model they determine, to samples at random initialisations.
#[derive(Debug, clap::Args)]
pub struct FitArgs {
    /// CSV file with the columns loss, grad_norm (or sq_grad_norm) and batchsize, one row a mini-batch; of
    /// columns sq_grad_norm:TENSOR the variances of each tensor are fitted, others are ignored. Semicolons
    /// or tabs may separate the columns, lines that start with # are comments, the file may be gzipped, and -
    /// is standard input.
    #[arg(value_name = "SAMPLES.csv")]
    samples: PathBuf,

    /// The covariance: squared_exponential, rational_quadratic:BETA, matern:1.5 or matern:2.5.
    #[arg(long, value_name = "NAME", default_value = "squared_exponential")]
    model: String,

    /// Number of parameters of the cost; without it there is no length scale and no step size.
    #[arg(long, value_name = "D", allow_hyphen_values = true, value_parser = whole::<u64>(0..=u64::MAX))]
    dims: Option<u64>,

    /// Relative standard deviation of the variance above which to warn.
    #[arg(long, value_name = "T", default_value_t = 0.3, allow_hyphen_values = true)]
    tolerance: f64,

    /// Leave out samples that look foreign to the others, as those of initialisations that blow up; the fit
    /// is the same where there are none.
    #[arg(long)]
    robust: bool,

    /// Write the fitted model to this file; needs --dims.
    #[arg(long, value_name = "MODEL.json")]
    output: Option<PathBuf>,

    /// Draw how well the fit describes the samples, on one page: losses, squared losses and squared gradient
    /// norms against the batch size with 95 % bands, their QQ plots and, with --dims, the step sizes of the
    /// model.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What the command prints; the field names are those of the JSON.
#[derive(Serialize)]
struct Report {
    batches: u64,
    examples: u64,
    mean: f64,
    variance: f64,
    noise_variance: f64,
    grad_variance: f64,
    noise_grad_variance: f64,
    relative_std: f64,
    tolerance: f64,
    /// Examples still to be drawn to reach the tolerance; 0 when it is reached.
    further_examples: u64,
    iterations_loss: u32,
    iterations_grad: u32,
    model: String,
    dims: Option<u64>,
    length_scale: Option<f64>,
    /// For a limiting loss of 0 and full batches.
    asymptotic_learning_rate: Option<f64>,
    plateau_step_size: Option<f64>,
    diagnostics: Diagnostics,
    robust: bool,
    /// Samples that a robust fit left out.
    left_out: usize,
    findings: Findings,
    /// In the order of the columns; empty without such columns.
    tensors: Vec<TensorVariance>,
}

/// Runs the command; prints and writes nothing unless all of it succeeds.
pub fn run(args: &FitArgs) -> Result<(), CliError> {
    let family: Family = args.model.parse().map_err(|error| CliError::Usage(format!("--model: {error}")))?;
    if args.dims == Some(0) {
        return Err(CliError::Usage("--dims 0: must be at least 1".into()));
    }
    if !(args.tolerance.is_finite() && args.tolerance > 0.0) {
        return Err(CliError::Usage(format!(
            "--tolerance {}: must be finite and above 0",
            short(args.tolerance)
        )));
    }
    if args.output.is_some() && args.dims.is_none() {
        let text = "--output: a model needs the number of parameters: add --dims D";
        return Err(CliError::Usage(text.into()));
    }
    check_files(args)?;

    let Estimates { samples, fitted, tensors } = fitted(args)?;
    let mut warnings = fitted.warnings(args.tolerance);
    if fitted.without_foreign.is_some() {
        warnings.iter_mut().for_each(|warning| *warning += " (--robust)");
    }
    let SampleFit { fit, statistics, findings, .. } = fitted;
    let model = match args.dims {
        Some(dims) => Some(Model::new(family, fit.moments(dims)).map_err(|error| data(args, error))?),
        None => None,
    };
    let unreliable = fit.reliability(args.tolerance);
    warnings.extend(unreliable.iter().map(ToString::to_string));
    let diagnostics = Diagnostics::new(&statistics, &fit, args.dims);
    let asymptotic_learning_rate = model.as_ref().and_then(|model| {
        let rate = model.asymptotic_learning_rate(0.0, 0.0);
        rate.map_err(|error| {
            warnings.push(format!("no asymptotic learning rate for a limiting loss of 0: {error}"))
        })
        .ok()
    });
    let plot = match &args.plot {
        Some(_) => Some(plot::svg(&samples, &fit, &diagnostics, model.as_ref())?),
        None => None,
    };
    let report = Report {
        batches: fit.batches,
        examples: fit.examples,
        mean: fit.mean,
        variance: fit.variance,
        noise_variance: fit.noise_variance,
        grad_variance: fit.grad_variance,
        noise_grad_variance: fit.noise_grad_variance,
        relative_std: fit.relative_std,
        tolerance: args.tolerance,
        further_examples: unreliable.map_or(0, |unreliable| unreliable.further_examples),
        iterations_loss: fit.iterations_loss,
        iterations_grad: fit.iterations_grad,
        model: family.to_string(),
        dims: args.dims,
        length_scale: model.as_ref().map(Model::length_scale),
        asymptotic_learning_rate,
        plateau_step_size: model.as_ref().map(Model::plateau_step_size),
        diagnostics,
        robust: args.robust,
        left_out: if args.robust { findings.left_out() } else { 0 },
        findings,
        tensors,
    };
    let text = if args.json {
        serde_json::to_string_pretty(&report).map_err(|error| data(args, error))? + "\n"
    } else {
        report.to_text()
    };
    let json = model.as_ref().map(Model::to_json).transpose()?;
    let files = [(&args.output, &json), (&args.plot, &plot)];
    let files = files.into_iter().filter_map(|(path, content)| path.as_ref().zip(content.as_ref()));
    let files: Vec<Prepared> =
        files.map(|(path, content)| Prepared::new(path, content.as_bytes())).collect::<Result<_, _>>()?;
    for warning in warnings {
        say(format_args!("warning: {}: {warning}", input::name(&args.samples).display()));
    }
    print(&text)?;
    Ok(files.into_iter().try_for_each(Prepared::commit)?)
}

fn check_files(args: &FitArgs) -> Result<(), CliError> {
    let refuse = |option: &str, path: &Path, problem: &str| {
        Err(CliError::Usage(format!("{option} {}: {problem}", path.display())))
    };
    let same = |one: &Path, other: &Path| match (one.canonicalize(), other.canonicalize()) {
        (Ok(one), Ok(other)) => one == other,
        _ => one == other,
    };
    for (option, path) in [("--output", &args.output), ("--plot", &args.plot)] {
        if let Some(path) = path
            && !input::is_standard(&args.samples)
            && same(path, &args.samples)
        {
            return refuse(option, path, "is the file of the samples, which it would replace; name another");
        }
    }
    let Some(plot) = &args.plot else { return Ok(()) };
    plot::check_name(plot)?;
    if args.output.as_ref().is_some_and(|output| same(plot, output)) {
        return refuse("--plot", plot, "is the file of --output too; name another");
    }
    Ok(())
}

struct Estimates {
    /// Those that were fitted.
    samples: Vec<Sample>,
    fitted: SampleFit,
    tensors: Vec<TensorVariance>,
}

fn fitted(args: &FitArgs) -> Result<Estimates, CliError> {
    let table = SampleTable::from_csv(&input::read(&args.samples)?, input::name(&args.samples))?;
    let options = FitOptions { robust: args.robust };
    let fitted = table.fit(&options).map_err(|error| unfit(args, error))?;
    let mut tensors = Vec::new();
    if !table.tensors.is_empty() {
        tensors = tensor_variances(&fitted.statistics).map_err(|error| data(args, error))?;
        tensors.sort_by_key(|fitted| table.tensors.iter().position(|name| *name == fitted.name));
    }
    let mut samples = table.samples;
    if args.robust {
        let left_out: HashSet<usize> = fitted.findings.foreign.iter().map(|foreign| foreign.index).collect();
        let mut index = 0..;
        samples.retain(|_| index.next().is_none_or(|index| !left_out.contains(&index)));
    }
    Ok(Estimates { samples, fitted, tensors })
}

/// Says what a user of the command can do, where the library speaks to a caller of its functions.
fn unfit(args: &FitArgs, error: Error) -> CliError {
    match error {
        Error::Estimation(EstimationError::Foreign { findings, consequence }) => data(
            args,
            format_args!("{findings}; {consequence}: look at these rows, then delete them or use --robust"),
        ),
        Error::Estimation(EstimationError::Inseparable { findings }) => data(
            args,
            format_args!(
                "{findings}; too many to leave out: fit the samples of each network and data set from a file of their own"
            ),
        ),
        error => data(args, error),
    }
}

fn data(args: &FitArgs, problem: impl std::fmt::Display) -> CliError {
    CliError::file(input::name(&args.samples), problem)
}

impl Report {
    fn to_text(&self) -> String {
        let optional = |value: Option<f64>, otherwise: &str| {
            value.map_or_else(|| format!("-  ({otherwise})"), |value| fixed(value, 6))
        };
        let small = |value: f64| format!("{value:.6e}");
        let needs_dims = |value: Option<f64>| match value {
            Some(value) => small(value),
            None if self.dims.is_none() => "-  (needs --dims)".into(),
            None => "-".into(),
        };
        let d = &self.diagnostics;
        let rows = [
            ("batches", self.batches.to_string()),
            ("examples", self.examples.to_string()),
            ("mean", fixed(self.mean, 6)),
            ("variance", small(self.variance)),
            ("noise_variance", small(self.noise_variance)),
            ("grad_variance", small(self.grad_variance)),
            ("noise_grad_variance", small(self.noise_grad_variance)),
            ("relative_std", fixed(self.relative_std, 6)),
            ("foreign_samples", self.foreign()),
            ("model", self.model.clone()),
            ("length_scale", needs_dims(self.length_scale)),
            ("asymptotic_learning_rate", needs_dims(self.asymptotic_learning_rate)),
            ("plateau_step_size", needs_dims(self.plateau_step_size)),
            ("skewness", fixed(d.skewness, 6)),
            ("excess_kurtosis", fixed(d.excess_kurtosis, 6)),
            ("normality_p_value", optional(d.normality_p_value, "needs 20 batches")),
            ("grad_relative_variance", d.grad_relative_variance.map_or("-".into(), small)),
            ("grad_effective_dims", d.grad_effective_dims.map_or("-".into(), |dims| fixed(dims, 1))),
            ("grad_spread_ratio", needs_dims(d.grad_spread_ratio)),
        ];
        let rows = rows.iter().map(|(name, value)| format!("{name:<25} {value}\n"));
        rows.chain(self.tensor_lines()).collect()
    }

    fn foreign(&self) -> String {
        match (self.findings.left_out(), self.robust) {
            (0, _) => "0".into(),
            (found, true) => format!("{found}  (left out)"),
            (found, false) => format!("{found}  (part of the fit)"),
        }
    }

    /// The table of the tensors; shares are those in the sum over all tensors.
    fn tensor_lines(&self) -> impl Iterator<Item = String> {
        let sum: f64 = self.tensors.iter().map(|tensor| tensor.grad_variance).sum();
        let width = self.tensors.iter().map(|tensor| tensor.name.chars().count()).max().unwrap_or(0).max(25);
        let head = format!(
            "\n{:<width$} {:>13} {:>7} {:>19}\n",
            "tensor", "grad_variance", "share", "noise_grad_variance"
        );
        let line = move |tensor: &TensorVariance| {
            let TensorVariance { name, grad_variance, noise_grad_variance } = tensor;
            let share = if sum > 0.0 { 100.0 * grad_variance / sum } else { 0.0 };
            format!("{name:<width$} {grad_variance:>13.6e} {share:>5.1} % {noise_grad_variance:>19.6e}\n")
        };
        let head = (!self.tensors.is_empty()).then_some(head);
        head.into_iter().chain(self.tensors.iter().map(line))
    }
}
