//! What `rfdescent bench` prints of the processor: steps of every kind against plain loops.

use half::{bf16, f16};
use indicatif::ProgressBar;
use serde::Serialize;

use super::bench::Format;
use crate::bench::cpu::{Kind, Overhead, PARALLEL, Rule, measure, overhead};
use crate::bench::{Case, Element};
use crate::error::CliError;
use crate::numbers::count;
use crate::progress::Progress;

/// Parameters where none are asked for: what lies in the second-level cache, in the third, and in neither.
pub const SIZES: [usize; 3] = [100_000, 1_000_000, 10_000_000];

/// What is printed; the field names are those of the JSON.
#[derive(Serialize)]
pub struct Report {
    device: String,
    tensors: usize,
    steps: Vec<Step>,
    /// What one more vector of 64 elements costs.
    fitted_tensor_ns: f64,
    adaptive_tensor_ns: f64,
    /// A step over one element.
    fitted_element_ns: f64,
    adaptive_element_ns: f64,
}

/// One kind of step.
#[derive(Serialize)]
struct Step {
    dtype: String,
    kind: String,
    parameters: usize,
    threads: usize,
    step_us: f64,
    bytes_per_parameter: usize,
    gb_per_second: f64,
    /// Of a plain loop that moves as many bytes in as many passes.
    plain_loop_us: f64,
    /// The median of the ratios of neighbouring measurements, and the two quartiles.
    over_plain_loop: f64,
    quartiles: [f64; 2],
    /// Of a parameter after the first step, against f64.
    largest_error: f64,
}

impl Report {
    /// Measures all kinds of steps of one format, or of all, over so many parameters, or several numbers of
    /// them; on one thread, and where steps use several on as many.
    pub fn new(
        format: Option<Format>,
        parameters: Option<usize>,
        tensors: usize,
        progress: Progress,
    ) -> Result<Self, CliError> {
        let mut threads = vec![1, rfdescent::threads()];
        threads.dedup();
        let own_sizes = parameters.map(|parameters| [parameters]);
        let sizes = own_sizes.as_ref().map_or(&SIZES[..], |own| own);
        let mut steps = Vec::new();
        let formats = [Format::F32, Format::F16, Format::Bf16];
        let bar = progress.bar(0, "Steps and loops");
        for of in formats.into_iter().filter(|&of| format.is_none_or(|format| format == of)) {
            let steps_of = match of {
                Format::F32 => steps_of::<f32>,
                Format::F16 => steps_of::<f16>,
                Format::Bf16 => steps_of::<bf16>,
            };
            steps.extend(steps_of(sizes, tensors, &threads, &bar)?);
        }
        bar.finish_and_clear();
        let Overhead { tensor: fitted_tensor, element: fitted_element } = overhead(Rule::Fitted)?;
        let Overhead { tensor: adaptive_tensor, element: adaptive_element } = overhead(Rule::Adaptive)?;
        Ok(Self {
            device: format!("CPU, {}", rfdescent::instructions()),
            tensors,
            steps,
            fitted_tensor_ns: fitted_tensor * 1e9,
            adaptive_tensor_ns: adaptive_tensor * 1e9,
            fitted_element_ns: fitted_element * 1e9,
            adaptive_element_ns: adaptive_element * 1e9,
        })
    }

    /// For people.
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "{}; parameters in {}. Plain loops move the bytes of a step in as many passes; the ratio is the \
             median over neighbouring measurements, behind it the quartiles. Steps over fewer than {PARALLEL} \
             parameters take one thread.\n\n",
            self.device,
            count(self.tensors, "tensor")
        );
        text += &format!(
            "{:<5} {:<29} {:>10} {:>7} {:>11} {:>7} {:>11} {:>6}\n",
            "", "step", "parameters", "threads", "step", "GB/s", "plain loop", "ratio"
        );
        for step in &self.steps {
            text += &format!(
                "{:<5} {:<29} {:>10} {:>7} {:>8.1} µs {:>7.1} {:>8.1} µs {:>6.2} {:.2}–{:.2}\n",
                step.dtype,
                step.kind,
                step.parameters,
                step.threads,
                step.step_us,
                step.gb_per_second,
                step.plain_loop_us,
                step.over_plain_loop,
                step.quartiles[0],
                step.quartiles[1],
            );
        }
        let largest = self.steps.iter().map(|step| step.largest_error).fold(0.0, f64::max);
        text + &format!(
            "\none more vector of 64 f32   {:.0} ns fitted, {:.0} ns adaptive\n\
             a step over one f32         {:.0} ns fitted, {:.0} ns adaptive\n\
             check                       first steps against f64, largest error {largest:.1e}\n",
            self.fitted_tensor_ns, self.adaptive_tensor_ns, self.fitted_element_ns, self.adaptive_element_ns,
        )
    }

    /// As a table in Markdown: a row for each kind of step, a column for each number of parameters and
    /// threads.
    pub fn to_table(&self) -> String {
        let columns = self.steps.iter().map(|step| (step.parameters, step.threads));
        let mut columns: Vec<_> = columns.collect();
        columns.sort_by_key(|&(parameters, threads)| (threads, parameters));
        columns.dedup();
        let head = columns.iter().map(|(parameters, threads)| {
            format!(" {:e}, {} |", *parameters as f64, count(*threads, "thread"))
        });
        let mut text =
            format!("| step |{}\n|---|{}\n", head.collect::<String>(), "---|".repeat(columns.len()));
        let mut rows: Vec<(&str, &str)> = Vec::new();
        for step in &self.steps {
            let row = (step.dtype.as_str(), step.kind.as_str());
            if !rows.contains(&row) {
                rows.push(row);
            }
        }
        for row in rows {
            text += &format!("| {}, {} |", row.0, row.1);
            for column in &columns {
                let step = self.steps.iter().find(|step| {
                    (step.dtype.as_str(), step.kind.as_str()) == row
                        && (step.parameters, step.threads) == *column
                });
                text += &step.map_or(" |".into(), |step| {
                    format!(" {:.2} ({}) |", step.over_plain_loop, short_time(step.step_us))
                });
            }
            text += "\n";
        }
        let mut spreads: Vec<f64> = (self.steps.iter())
            .map(|step| (step.quartiles[1] - step.quartiles[0]) / step.over_plain_loop)
            .collect();
        spreads.sort_by(f64::total_cmp);
        let spread = |share: f64| spreads[((spreads.len() - 1) as f64 * share).round() as usize] * 100.0;
        text + &format!(
            "\n{}. Between the quartiles of the rounds lie {:.0} % of a ratio in half of the entries, at most \
             {:.0} %. One more vector of 64 f32 costs {:.0} ns (fitted) or {:.0} ns (adaptive), a step over one \
             f32 {:.0} ns or {:.0} ns.\n",
            self.device,
            spread(0.5),
            spread(1.0),
            self.fitted_tensor_ns,
            self.adaptive_tensor_ns,
            self.fitted_element_ns,
            self.adaptive_element_ns,
        )
    }
}

/// Those of one format.
fn steps_of<E: Element>(
    sizes: &[usize],
    tensors: usize,
    threads: &[usize],
    bar: &ProgressBar,
) -> Result<Vec<Step>, CliError> {
    let mut steps = Vec::new();
    for &parameters in sizes {
        let case = Case::new(parameters, tensors)?;
        // Others would take the same steps on one.
        let threads = if parameters < PARALLEL { &threads[..1] } else { threads };
        bar.inc_length((Kind::all(E::DTYPE).len() * threads.len()) as u64);
        for kind in Kind::all(E::DTYPE) {
            for &threads in threads {
                bar.set_message(format!("{}, {}, {parameters} parameters", E::DTYPE, kind.name()));
                rfdescent::set_threads(threads);
                let times = measure::<E>(&case, kind)?;
                let bytes_per_parameter = kind.bytes_per_parameter(size_of::<E>());
                steps.push(Step {
                    dtype: E::DTYPE.to_string(),
                    kind: kind.name(),
                    parameters,
                    threads,
                    step_us: times.step * 1e6,
                    bytes_per_parameter,
                    gb_per_second: (bytes_per_parameter * parameters) as f64 / times.step * 1e-9,
                    plain_loop_us: times.plain_loop * 1e6,
                    over_plain_loop: times.ratio,
                    quartiles: times.quartiles,
                    largest_error: times.largest_error,
                });
                bar.inc(1);
            }
        }
    }
    Ok(steps)
}

/// Three digits.
fn short_time(us: f64) -> String {
    match us {
        ..100.0 => format!("{us:.1} µs"),
        ..1000.0 => format!("{us:.0} µs"),
        _ => format!("{:.2} ms", us / 1e3),
    }
}
