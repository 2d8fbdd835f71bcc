//! `rfdescent bench`: how long an optimizer step takes on this machine.

use clap::ValueEnum;
use half::{bf16, f16};
use serde::Serialize;

use super::bench_cpu;
use crate::bench::{Case, Element, Measured, device};
use crate::error::CliError;
use crate::numbers::{count, whole};
use crate::progress::Progress;
use crate::terminal::print;

/// Time a step of each method and check its result against f64; on the processor steps of all formats and
/// options, beside plain loops that move as many bytes.
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    /// Where to take the steps
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,
    /// Number of parameters [default: 1e5, 1e6 and 1e7 on the processor, 1e7 on a device]
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = whole::<usize>(1..=4_000_000_000))]
    parameters: Option<usize>,
    /// Number of tensors, all about as long [default: 1 on the processor, 16 on a device]
    #[arg(long, value_name = "K", allow_hyphen_values = true, value_parser = whole::<usize>(1..=1_000_000))]
    tensors: Option<usize>,
    /// Format of parameters and gradients [default: all on the processor, f32 on a device]
    #[arg(long, value_enum)]
    dtype: Option<Format>,
    /// Print a table in Markdown; of the processor only
    #[arg(long, conflicts_with = "json")]
    table: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Where steps run.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Place {
    /// The processor
    Cpu,
    /// The first CUDA device
    Cuda,
}

/// A number format that can be timed.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub enum Format {
    /// 32 bits
    F32,
    /// 16 bits, rounded to nearest
    F16,
    /// bfloat16, rounded to nearest
    Bf16,
}

/// What the command prints of a device; the field names are those of the JSON.
#[derive(Serialize)]
struct Report {
    device: String,
    parameters: usize,
    tensors: usize,
    dtype: String,
    /// Steps that were timed, of each method.
    steps: u64,
    /// Wall time of a step of the fitted method.
    fitted_step_us: f64,
    /// What it reads and writes.
    fitted_bytes_per_parameter: usize,
    fitted_gb_per_second: f64,
    /// The same of the adaptive method.
    adaptive_step_us: f64,
    adaptive_bytes_per_parameter: usize,
    adaptive_gb_per_second: f64,
    adaptive_over_fitted: f64,
    /// Of a parameter after the first step, against f64.
    largest_error: f64,
    /// The kernels of each method, and why where they are the generic ones.
    fitted_kernels: String,
    adaptive_kernels: String,
}

/// Runs the command; prints nothing unless every step was right.
pub fn run(args: &BenchArgs) -> Result<(), CliError> {
    let on_device = args.device == Place::Cuda;
    let tensors = args.tensors.unwrap_or(if on_device { 16 } else { 1 });
    let parameters = args.parameters.or(on_device.then_some(10_000_000));
    let fewest = parameters.unwrap_or(bench_cpu::SIZES[0]);
    if tensors > fewest {
        return Err(CliError::Usage(format!(
            "--tensors {tensors} is more than the {}; give at most as many",
            count(fewest, "parameter")
        )));
    }
    if on_device && args.table {
        return Err(CliError::Usage("--table is of the processor; leave out --device cuda".into()));
    }
    let Some(parameters) = parameters.filter(|_| on_device) else {
        let report = bench_cpu::Report::new(args.dtype, parameters, tensors, Progress::new(args.json))?;
        return show(args, &report, |report| if args.table { report.to_table() } else { report.to_text() });
    };
    let report = match args.dtype.unwrap_or(Format::F32) {
        Format::F32 => measure::<f32>(parameters, tensors)?,
        Format::F16 => measure::<f16>(parameters, tensors)?,
        Format::Bf16 => measure::<bf16>(parameters, tensors)?,
    };
    show(args, &report, Report::to_text)
}

fn show<R: Serialize>(args: &BenchArgs, report: &R, text: impl Fn(&R) -> String) -> Result<(), CliError> {
    print(&if args.json {
        serde_json::to_string_pretty(report).map_err(|e| CliError::Data(e.to_string()))? + "\n"
    } else {
        text(report)
    })
}

fn measure<E: Element>(parameters: usize, tensors: usize) -> Result<Report, CliError> {
    let case = Case::new(parameters, tensors)?;
    let device = rfdescent::cuda::device(0)?;
    let measured = device::measure::<E>(&case, &device)?;
    Ok(Report::new::<E>(device.name(), &case, measured))
}

impl Report {
    fn new<E: Element>(device: String, case: &Case, measured: Measured) -> Self {
        // The gradients are read twice, the parameters read and written.
        let fitted_bytes_per_parameter = 4 * size_of::<E>();
        // Both passes read the average of the gradients, which is f32 here, and the second writes it.
        let adaptive_bytes_per_parameter = fitted_bytes_per_parameter + 3 * size_of::<f32>();
        let rate_of = |bytes: usize, seconds: f64| (bytes * case.total) as f64 / seconds * 1e-9;
        let rate = |seconds| rate_of(fitted_bytes_per_parameter, seconds);
        let [fitted_kernels, adaptive_kernels] = measured.kernels;
        Report {
            device,
            parameters: case.total,
            tensors: case.lengths.len(),
            dtype: E::DTYPE.to_string(),
            steps: measured.steps,
            fitted_step_us: measured.step * 1e6,
            fitted_bytes_per_parameter,
            fitted_gb_per_second: rate(measured.step),
            adaptive_step_us: measured.adaptive_step * 1e6,
            adaptive_bytes_per_parameter,
            adaptive_gb_per_second: rate_of(adaptive_bytes_per_parameter, measured.adaptive_step),
            adaptive_over_fitted: measured.adaptive_step / measured.step,
            largest_error: measured.largest_error,
            fitted_kernels,
            adaptive_kernels,
        }
    }

    fn to_text(&self) -> String {
        let rate = |us: f64, gb: f64| format!("{us:.1} µs, {gb:.1} GB/s");
        let bytes = |bytes: usize| format!("{bytes} a parameter");
        let mut rows = vec![
            ("device", self.device.clone()),
            (
                "tensors",
                format!("{} with {}, {}", self.tensors, count(self.parameters, "parameter"), self.dtype),
            ),
            ("fitted step", rate(self.fitted_step_us, self.fitted_gb_per_second)),
            ("fitted bytes", bytes(self.fitted_bytes_per_parameter)),
            ("adaptive step", rate(self.adaptive_step_us, self.adaptive_gb_per_second)),
            ("adaptive bytes", bytes(self.adaptive_bytes_per_parameter)),
            ("adaptive / fitted", format!("{:.2}", self.adaptive_over_fitted)),
        ];
        rows.push(("fitted kernels", self.fitted_kernels.clone()));
        rows.push(("adaptive kernels", self.adaptive_kernels.clone()));
        rows.push(("check", format!("first step against f64, largest error {:.1e}", self.largest_error)));
        rows.iter().map(|(name, value)| format!("{name:<18} {value}\n")).collect()
    }
}
