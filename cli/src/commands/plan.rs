//! `rfdescent plan`: which batch sizes to sample, and how many examples that takes.

use rfdescent::Error;
use rfdescent::estimation::{Design, DesignKind, DesignProblem};
use serde_json::json;

use crate::error::CliError;
use crate::numbers::{fixed, short, shortened, whole};
use crate::terminal::print;

/// Plan the batch sizes of samples from which the variance is to be fitted.
#[derive(Debug, clap::Args)]
pub struct PlanArgs {
    /// C(0), the variance of the cost, as far as known.
    #[arg(long, value_name = "V", allow_hyphen_values = true)]
    variance: f64,

    /// The variance of one example's loss around the cost, as far as known.
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    noise_variance: f64,

    /// Smallest batch size.
    #[arg(long, value_name = "B", default_value_t = 20, allow_hyphen_values = true, value_parser = whole::<u64>(0..=u64::MAX))]
    min_batch: u64,

    /// Largest batch size, e.g. the size of the data set.
    #[arg(long, value_name = "B", allow_hyphen_values = true, value_parser = whole::<u64>(0..=u64::MAX))]
    max_batch: Option<u64>,

    /// gibbs spreads the batch sizes out; c-optimal names the two that need the fewest examples.
    #[arg(long, value_name = "NAME", default_value = "gibbs")]
    design: String,

    /// Relative standard deviation of the fitted variance to reach.
    #[arg(long, value_name = "T", default_value_t = 0.3, allow_hyphen_values = true)]
    tolerance: f64,

    /// Examples whose loss and gradient are evaluated in a second, for the time that sampling takes.
    #[arg(long, value_name = "R", allow_hyphen_values = true)]
    examples_per_second: Option<f64>,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &PlanArgs) -> Result<(), CliError> {
    if !(args.tolerance.is_finite() && args.tolerance > 0.0) {
        return Err(CliError::Usage(format!(
            "--tolerance {}: must be finite and above 0",
            short(args.tolerance)
        )));
    }
    if let Some(rate) = args.examples_per_second.filter(|rate| !(rate.is_finite() && *rate > 0.0)) {
        let text = format!("--examples-per-second {}: must be finite and above 0", short(rate));
        return Err(CliError::Usage(text));
    }
    let kind: DesignKind = args.design.parse().map_err(usage)?;
    let problem = DesignProblem {
        variance: args.variance,
        noise_variance: args.noise_variance,
        min_batch_size: args.min_batch,
        max_batch_size: args.max_batch,
    };
    let design = problem.design(kind).map_err(usage)?;
    let text = if args.json { to_json(&design, args) } else { to_text(&design, args) };
    print(&text)
}

/// The library's names of arguments as this command's options.
fn usage(error: Error) -> CliError {
    let Error::InvalidArgument { name, value, expected } = error else {
        return CliError::Usage(error.to_string());
    };
    let names = [
        ("min_batch_size", "--min-batch"),
        ("max_batch_size", "--max-batch"),
        ("noise_variance", "--noise-variance"),
    ];
    let option = match names.iter().find(|(argument, _)| *argument == name) {
        Some((_, option)) => (*option).to_string(),
        None => format!("--{}", name.replace('_', "-")),
    };
    let expected = names.iter().fold(expected, |text, (argument, option)| text.replace(argument, option));
    CliError::Usage(match value.as_str() {
        // An option that was not given.
        "none" => format!("{option} is {expected}"),
        _ => format!("{option} {}: {expected}", shortened(value)),
    })
}

fn to_json(design: &Design, args: &PlanArgs) -> String {
    let tolerance = args.tolerance;
    let points: Vec<_> =
        design.points().iter().map(|(b, weight)| json!({ "batch_size": b, "weight": weight })).collect();
    let value = json!({
        "design": design.kind().to_string(),
        "objective": design.objective(),
        "tolerance": tolerance,
        "examples_needed": design.examples_needed(tolerance).ceil(),
        "batches_needed": batches(design, tolerance),
        "examples_to_halve": halving(design, tolerance),
        "seconds_needed": args.examples_per_second.map(|rate| design.examples_needed(tolerance) / rate),
        "seconds_to_halve": args.examples_per_second.map(|rate| halving(design, tolerance) / rate),
        "expected_batch_size": design.expected_batch_size(),
        "lambda": design.lambda(),
        "points": points,
    });
    format!("{value:#}\n")
}

fn batches(design: &Design, tolerance: f64) -> f64 {
    (design.examples_needed(tolerance) / design.expected_batch_size()).ceil()
}

/// Further examples for half the tolerance: variances of estimates fall with 1/n.
fn halving(design: &Design, tolerance: f64) -> f64 {
    (3.0 * design.examples_needed(tolerance)).ceil()
}

fn to_text(design: &Design, args: &PlanArgs) -> String {
    let tolerance = args.tolerance;
    let mut rows = vec![
        ("design".to_string(), design.kind().to_string()),
        ("objective".into(), format!("{:.6e}", design.objective())),
        (
            "examples_needed".into(),
            format!("{}  (tolerance {})", short(design.examples_needed(tolerance).ceil()), short(tolerance)),
        ),
        ("batches_needed".into(), short(batches(design, tolerance))),
        ("expected_batch_size".into(), fixed(design.expected_batch_size(), 2)),
        (
            "examples_to_halve".into(),
            format!(
                "{}  (more, for tolerance {})",
                short(halving(design, tolerance)),
                short(0.5 * tolerance)
            ),
        ),
    ];
    if let Some(rate) = args.examples_per_second {
        rows.push(("seconds_needed".into(), fixed(design.examples_needed(tolerance) / rate, 1)));
        rows.push(("seconds_to_halve".into(), fixed(halving(design, tolerance) / rate, 1)));
    }
    match design.lambda() {
        Some([lambda1, lambda2]) => {
            rows.push(("lambda_1".into(), format!("{lambda1:.6e}")));
            rows.push(("lambda_2".into(), format!("{lambda2:.6e}")));
            for percent in [0, 10, 25, 50, 75, 90, 99] {
                let batch_size = design.quantile(f64::from(percent) / 100.0);
                rows.push((format!("batch_size_at_{percent}%"), batch_size.to_string()));
            }
        }
        None => rows.extend(
            design
                .points()
                .iter()
                .map(|(b, weight)| (format!("weight_of_batch_size_{b}"), format!("{weight:.6}"))),
        ),
    }
    rows.iter().map(|(name, value)| format!("{name:<28} {value}\n")).collect()
}
