//! `rfdescent bench`: how long an optimizer step takes on this machine.

use clap::ValueEnum;
use half::bf16;
use serde::Serialize;

use crate::bench::{Case, Element, Measured, cpu, device};
use crate::error::CliError;
use crate::numbers::whole;
use crate::terminal::print;

/// Time a step of each method, beside what memory allows, and check its result against f64.
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    /// Where to take the steps
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,
    /// Number of parameters
    #[arg(long, value_name = "N", default_value_t = 10_000_000, allow_hyphen_values = true, value_parser = whole::<usize>(1..=4_000_000_000))]
    parameters: usize,
    /// Number of tensors, all about as long
    #[arg(long, value_name = "K", default_value_t = 16, allow_hyphen_values = true, value_parser = whole::<usize>(1..=1_000_000))]
    tensors: usize,
    /// Format of parameters and gradients
    #[arg(long, value_enum, default_value_t = Format::F32)]
    dtype: Format,
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
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// 32 bits
    F32,
    /// bfloat16, rounded to nearest
    Bf16,
}

/// What the command prints; the field names are those of the JSON.
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
    /// Of plain loops in the same formats that move as many bytes as a step of each method; on the CPU only.
    plain_loop_us: Option<f64>,
    plain_loop_gb_per_second: Option<f64>,
    fitted_over_plain_loop: Option<f64>,
    adaptive_plain_loop_us: Option<f64>,
    adaptive_over_plain_loop: Option<f64>,
    /// Of a parameter after the first step, against f64.
    largest_error: f64,
    /// The kernels of each method, and why where they are the generic ones; on a device only.
    fitted_kernels: Option<String>,
    adaptive_kernels: Option<String>,
}

/// Runs the command; prints nothing unless every step was right.
pub fn run(args: &BenchArgs) -> Result<(), CliError> {
    if args.tensors > args.parameters {
        return Err(CliError::Usage(format!(
            "--tensors {} is more than the {} parameters; give at most as many",
            args.tensors, args.parameters
        )));
    }
    let report = match args.dtype {
        Format::F32 => measure::<f32>(args)?,
        Format::Bf16 => measure::<bf16>(args)?,
    };
    let text = if args.json {
        serde_json::to_string_pretty(&report).map_err(|e| CliError::Data(e.to_string()))? + "\n"
    } else {
        report.to_text()
    };
    print(&text)
}

fn measure<E: Element>(args: &BenchArgs) -> Result<Report, CliError> {
    let case = Case::new(args.parameters, args.tensors)?;
    let (name, measured) = match args.device {
        Place::Cpu => {
            let name = format!("CPU, {} threads, {}", rfdescent::threads(), rfdescent::instructions());
            (name, cpu::measure::<E>(&case)?)
        }
        Place::Cuda => {
            let device = rfdescent::cuda::device(0)?;
            (device.name(), device::measure::<E>(&case, &device)?)
        }
    };
    Ok(Report::new::<E>(name, args, measured))
}

impl Report {
    fn new<E: Element>(device: String, args: &BenchArgs, measured: Measured) -> Self {
        // The gradients are read twice, the parameters read and written.
        let fitted_bytes_per_parameter = 4 * size_of::<E>();
        // Both passes read the average of the gradients, which is f32 here, and the second writes it.
        let adaptive_bytes_per_parameter = fitted_bytes_per_parameter + 3 * size_of::<f32>();
        let rate_of = |bytes: usize, seconds: f64| (bytes * args.parameters) as f64 / seconds * 1e-9;
        let rate = |seconds| rate_of(fitted_bytes_per_parameter, seconds);
        let [fitted_kernels, adaptive_kernels] = measured.kernels.map_or([None, None], |both| both.map(Some));
        Report {
            device,
            parameters: args.parameters,
            tensors: args.tensors,
            dtype: E::DTYPE.to_string(),
            steps: measured.steps,
            fitted_step_us: measured.step * 1e6,
            fitted_bytes_per_parameter,
            fitted_gb_per_second: rate(measured.step),
            adaptive_step_us: measured.adaptive_step * 1e6,
            adaptive_bytes_per_parameter,
            adaptive_gb_per_second: rate_of(adaptive_bytes_per_parameter, measured.adaptive_step),
            adaptive_over_fitted: measured.adaptive_step / measured.step,
            plain_loop_us: measured.plain_loops.map(|[seconds, _]| seconds * 1e6),
            plain_loop_gb_per_second: measured.plain_loops.map(|[seconds, _]| rate(seconds)),
            fitted_over_plain_loop: measured.plain_loops.map(|[seconds, _]| measured.step / seconds),
            adaptive_plain_loop_us: measured.plain_loops.map(|[_, seconds]| seconds * 1e6),
            adaptive_over_plain_loop: measured
                .plain_loops
                .map(|[_, seconds]| measured.adaptive_step / seconds),
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
            ("tensors", format!("{} with {} parameters, {}", self.tensors, self.parameters, self.dtype)),
            ("fitted step", rate(self.fitted_step_us, self.fitted_gb_per_second)),
            ("fitted bytes", bytes(self.fitted_bytes_per_parameter)),
            ("adaptive step", rate(self.adaptive_step_us, self.adaptive_gb_per_second)),
            ("adaptive bytes", bytes(self.adaptive_bytes_per_parameter)),
            ("adaptive / fitted", format!("{:.2}", self.adaptive_over_fitted)),
        ];
        if let (Some(us), Some(gb), Some(ratio)) =
            (self.plain_loop_us, self.plain_loop_gb_per_second, self.fitted_over_plain_loop)
        {
            rows.push(("plain loop", format!("{}, moves the bytes of a fitted step", rate(us, gb))));
            rows.push(("fitted / plain", format!("{ratio:.2}")));
        }
        if let (Some(us), Some(ratio)) = (self.adaptive_plain_loop_us, self.adaptive_over_plain_loop) {
            rows.push(("averaging loop", format!("{us:.1} µs, moves the bytes of an adaptive step")));
            rows.push(("adaptive / loop", format!("{ratio:.2}")));
        }
        for (name, kernels) in
            [("fitted kernels", &self.fitted_kernels), ("adaptive kernels", &self.adaptive_kernels)]
        {
            rows.extend(kernels.iter().map(|kernels| (name, kernels.clone())));
        }
        rows.push(("check", format!("first step against f64, largest error {:.1e}", self.largest_error)));
        rows.iter().map(|(name, value)| format!("{name:<18} {value}\n")).collect()
    }
}
