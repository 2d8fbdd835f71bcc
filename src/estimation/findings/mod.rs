//! Samples that do not belong to the others, and losses of two populations.
//!
//! A fit is made of squares, so one sample that is off by a factor of 1e4 decides over all of it. What a
//! sample has to be compared with must therefore not depend on it: the line of the variances is found with
//! Winsorised residuals first (Huber's Proposal 2, P. J. Huber, "Robust Estimation of a Location Parameter",
//! 1964, with the variance a function of the batch size as in R. J. Carroll & D. Ruppert, "Robust Estimation
//! in Heteroscedastic Linear Models", 1982), started from medians of the small and the large batches. What is
//! far from it is foreign. A robust fit leaves foreign samples out and is the ordinary one otherwise: P. J.
//! Rousseeuw & A. M. Leroy, "Robust Regression and Outlier Detection", 1987, reweighted least squares.

mod robust;

use serde::Serialize;
use statrs::distribution::{ContinuousCDF, StudentsT};

use self::robust::{Losses, foreign_norms};
use super::statistics::Sample;

/// Which number of a sample is foreign.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Quantity {
    /// The loss.
    Loss,
    /// The norm of the gradient.
    GradNorm,
}

impl std::fmt::Display for Quantity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Quantity::Loss => "loss",
            Quantity::GradNorm => "grad_norm",
        })
    }
}

/// A sample that is too far from the others to be one of them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ForeignSample {
    /// Its place among the samples, from 0.
    pub index: usize,
    /// Its row (line of the file, from 1), where the samples come from a file.
    pub row: Option<u64>,
    /// Its batch size.
    pub batch_size: u64,
    /// Which of its numbers is foreign.
    pub quantity: Quantity,
    /// That number.
    pub value: f64,
    /// What it is at this batch size for the other samples, about.
    pub expected: f64,
    /// How many standard deviations of the other samples lie between the two; for norms, the smaller number
    /// of those of the logarithm and of the cube root of the square. Infinite, in JSON null, where most of
    /// the losses are the same number.
    pub deviations: f64,
}

/// Samples at one batch size whose mean loss is another than that of all samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ShiftedBatchSize {
    /// The batch size.
    pub batch_size: u64,
    /// How many samples have it.
    pub count: usize,
    /// Row of the first of them, where the samples come from a file.
    pub first_row: Option<u64>,
    /// Their mean loss.
    pub mean: f64,
    /// The mean of all.
    pub expected: f64,
    /// How many standard deviations of such a mean lie between the two.
    pub deviations: f64,
}

/// Losses that fall into two groups with nothing between them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TwoPopulations {
    /// How many samples are in the lower and the upper group.
    pub counts: [usize; 2],
    /// Mean losses of the groups.
    pub means: [f64; 2],
    /// Places among the samples, from 0, of the first few of each group.
    pub first: [Vec<usize>; 2],
    /// Their rows, where the samples come from a file.
    pub first_rows: [Vec<u64>; 2],
}

/// What makes samples look unlike draws of one random function.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Findings {
    /// Number of samples looked at.
    pub samples: usize,
    /// Foreign samples in their order; one whose loss and norm are both foreign comes twice.
    pub foreign: Vec<ForeignSample>,
    /// Batch sizes whose mean loss is off, in increasing order.
    pub shifted: Vec<ShiftedBatchSize>,
    /// Set where the losses are of two populations.
    pub populations: Option<TwoPopulations>,
}

/// Below this number of samples none is called foreign: what is usual cannot be known from so few.
const FEWEST: usize = 10;

/// The probability that samples of one Gaussian random function have a foreign loss among them, about.
const FALSE_ALARM: f64 = 1e-3;

/// More foreign samples than this are no accident, but a population of their own.
const LARGEST_SHARE: f64 = 0.1;

impl Findings {
    /// Looks at samples; `rows` are their rows where they come from a file, or empty.
    pub(super) fn of(samples: &[Sample], rows: &[u64]) -> Findings {
        let mut findings = Findings { samples: samples.len(), ..Default::default() };
        if samples.len() < FEWEST {
            return findings;
        }
        let losses = Losses::of(samples);
        let limit = limit(samples.len(), samples.len());
        findings.foreign = losses.foreign(samples, limit);
        findings.foreign.extend(foreign_norms(samples, limit));
        findings.foreign.sort_by_key(|foreign| (foreign.index, foreign.quantity as u8));
        findings.foreign.iter_mut().for_each(|foreign| foreign.row = rows.get(foreign.index).copied());
        let is_foreign = findings.is_foreign();
        findings.populations = losses.populations(samples, &is_foreign).map(|mut found| {
            let of_group = |group: &Vec<usize>| group.iter().filter_map(|&i| rows.get(i).copied()).collect();
            found.first_rows = [of_group(&found.first[0]), of_group(&found.first[1])];
            found
        });
        if findings.populations.is_none() {
            findings.shifted = losses.shifted(samples, rows, &is_foreign);
        }
        findings
    }

    /// Whether nothing was found.
    pub fn is_empty(&self) -> bool {
        self.foreign.is_empty() && self.shifted.is_empty() && self.populations.is_none()
    }

    /// Whether foreign samples are few enough to leave them out.
    pub fn is_separable(&self) -> bool {
        self.populations.is_none() && self.left_out() as f64 <= LARGEST_SHARE * self.samples as f64
    }

    /// Number of foreign samples, each counted once.
    pub fn left_out(&self) -> usize {
        self.foreign.chunk_by(|a, b| a.index == b.index).count()
    }

    /// For each sample whether it is foreign.
    pub(super) fn is_foreign(&self) -> Vec<bool> {
        let mut is_foreign = vec![false; self.samples];
        self.foreign.iter().for_each(|foreign| is_foreign[foreign.index] = true);
        is_foreign
    }
}

/// Names rows or samples, and what is unusual about them; without a remedy, which depends on the caller.
impl std::fmt::Display for Findings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut separator = "";
        if let Some(TwoPopulations { counts, means, first, first_rows }) = &self.populations {
            let places = |group: usize| match first_rows[group].is_empty() {
                true => list("sample", first[group].iter().map(|&i| i as u64), counts[group]),
                false => list("row", first_rows[group].iter().copied(), counts[group]),
            };
            write!(
                f,
                "the losses are of two populations: {} with a mean of {}, {} with a mean of {}",
                places(0),
                number(means[0]),
                places(1),
                number(means[1])
            )?;
            separator = "; ";
        } else if !self.foreign.is_empty() {
            let (found, samples) = (self.left_out(), self.samples);
            write!(f, "{found} of {samples} samples look{} foreign: ", if found == 1 { "s" } else { "" })?;
            for quantity in [Quantity::Loss, Quantity::GradNorm] {
                let of: Vec<&ForeignSample> =
                    self.foreign.iter().filter(|foreign| foreign.quantity == quantity).collect();
                let Some(farthest) =
                    of.iter().max_by(|a, b| a.deviations.abs().total_cmp(&b.deviations.abs()))
                else {
                    continue;
                };
                let places = match farthest.row {
                    Some(_) => list("row", of.iter().filter_map(|foreign| foreign.row), of.len()),
                    None => list("sample", of.iter().map(|foreign| foreign.index as u64), of.len()),
                };
                let most = if of.len() > 1 { "up to " } else { "" };
                write!(
                    f,
                    "{separator}{places} ({quantity} {most}{} standard deviations from the others: {} where about {} is \
                     usual)",
                    number(farthest.deviations.abs()),
                    number(farthest.value),
                    number(farthest.expected)
                )?;
                separator = ", ";
            }
            separator = "; ";
        }
        for ShiftedBatchSize { batch_size, count, first_row, mean, expected, deviations } in &self.shifted {
            let from = first_row.map_or(String::new(), |row| format!(", from row {row} on,"));
            write!(
                f,
                "{separator}the {count} samples at batch size {batch_size}{from} have a mean loss of {}, {} standard \
                 deviations from that of all, {}",
                number(*mean),
                number(deviations.abs()),
                number(*expected)
            )?;
            separator = "; ";
        }
        Ok(())
    }
}

/// Four significant digits.
fn number(value: f64) -> String {
    if value != 0.0 && value.is_finite() && !(1e-3..1e6).contains(&value.abs()) {
        return format!("{value:.3e}");
    }
    let digits = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
    format!("{value:.*}", (3 - digits).clamp(0, 6) as usize)
}

/// Most places that a message lists.
const LISTED: usize = 10;

/// "row 3", "rows 3, 8 and 9", "rows 3, 8, 9, … (12 in all)".
fn list(unit: &str, places: impl Iterator<Item = u64>, count: usize) -> String {
    let places: Vec<String> = places.take(LISTED).map(|place| place.to_string()).collect();
    match places.as_slice() {
        [] => format!("{count} {unit}s"),
        [one] if count == 1 => format!("{unit} {one}"),
        [first @ .., last] if places.len() == count => format!("{unit}s {} and {last}", first.join(", ")),
        some => format!("{unit}s {}, … ({count} in all)", some.join(", ")),
    }
}

/// How far from the others, in standard deviations, one of `tests` values may be without being foreign.
///
/// A quantile of Student's t, whose few degrees of freedom allow for a line that is estimated from few
/// samples itself; for many samples that of the normal distribution.
fn limit(samples: usize, tests: usize) -> f64 {
    let freedom = (samples as f64 / 4.0).max(2.0);
    let tail = FALSE_ALARM / (2.0 * tests as f64);
    StudentsT::new(0.0, 1.0, freedom).map_or(f64::INFINITY, |t| -t.inverse_cdf(tail))
}
