//! Samples that do not belong to the others, and losses of two populations.
//!
//! A fit is made of squares, so one sample that is off by a factor of 1e4 decides over all of it. What a
//! sample has to be compared with must therefore not depend on it: the line of the variances is found with
//! Winsorised residuals first (Huber's Proposal 2, P. J. Huber, "Robust Estimation of a Location Parameter",
//! 1964, with the variance a function of the batch size as in R. J. Carroll & D. Ruppert, "Robust Estimation
//! in Heteroscedastic Linear Models", 1982), started from medians of the small and the large batches. What is
//! far from it is foreign. A robust fit leaves foreign samples out and is the ordinary one otherwise: P. J.
//! Rousseeuw & A. M. Leroy, "Robust Regression and Outlier Detection", 1987, reweighted least squares.

use serde::Serialize;
use statrs::distribution::{ContinuousCDF, StudentsT};

use super::least_squares::{Abscissa, Line, Sum, WeightedDesign};
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

/// Residuals are Winsorised at so many standard deviations. Large enough for a Gaussian sample to lose little
/// and small enough for a sixth of the samples to be foreign.
const WINSOR: f64 = 2.0;

/// E min(Z², c²) of a standard normal variable Z, c = [`WINSOR`]: 2Φ(c) − 1 − 2cφ(c) + 2c²(1 − Φ(c)).
const WINSORISED_VARIANCE: f64 = 0.920_536_925_636_323;

/// From a normal variable's median absolute deviation to its standard deviation, 1/Φ⁻¹(3/4).
const MAD: f64 = 1.482_602_218_505_602;

/// More than enough; the line only has to be good enough to judge by.
const MAX_ITERATIONS: usize = 100;

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

/// The robust mean and line of the losses' variances.
struct Losses {
    mean: f64,
    line: Line,
    /// (L − μ)/√v_b; infinite where v_b is 0.
    residuals: Vec<f64>,
}

impl Losses {
    fn of(samples: &[Sample]) -> Losses {
        let places: Vec<Abscissa> = abscissae(samples);
        let losses: Vec<f64> = samples.iter().map(|sample| sample.loss).collect();
        let mut mean = median(&losses);
        let mut line = two_point_line(&places, |half| {
            let of_half: Vec<f64> = half.iter().map(|&i| losses[i]).collect();
            deviation(&of_half, median(&of_half)).powi(2)
        });
        for _ in 0..MAX_ITERATIONS {
            let variance = |i: usize| line.at(places[i].x);
            if (0..losses.len()).any(|i| variance(i) <= 0.0) {
                break;
            }
            let (mut total, mut weighted) = (Sum::default(), Sum::default());
            for (i, loss) in losses.iter().enumerate() {
                let far = (loss - mean).abs() / variance(i).sqrt();
                let weight = if far > WINSOR { WINSOR / far } else { 1.0 } / variance(i);
                total += weight;
                weighted += weight * (loss - mean);
            }
            mean += weighted.value() / total.value();
            let squares: Vec<f64> = (0..losses.len())
                .map(|i| (losses[i] - mean).powi(2).min(WINSOR * WINSOR * variance(i)) / WINSORISED_VARIANCE)
                .collect();
            let next = WeightedDesign::new(line, &places).solve(&squares).admissible();
            let settled = settled(line, next);
            if !usable(next) {
                break;
            }
            line = next;
            if settled {
                break;
            }
        }
        let residuals = losses
            .iter()
            .zip(&places)
            .map(|(loss, place)| match loss - mean {
                0.0 => 0.0,
                far => far / line.at(place.x).sqrt(),
            })
            .collect();
        Losses { mean, line, residuals }
    }

    fn foreign(&self, samples: &[Sample], limit: f64) -> Vec<ForeignSample> {
        let far = self.residuals.iter().zip(samples).enumerate();
        far.filter(|(_, (residual, _))| residual.abs() > limit)
            .map(|(index, (&deviations, sample))| ForeignSample {
                index,
                row: None,
                batch_size: sample.batch_size,
                quantity: Quantity::Loss,
                value: sample.loss,
                expected: self.mean,
                deviations,
            })
            .collect()
    }

    /// Two populations: too many foreign losses for an accident, or residuals that one cut explains (Otsu's
    /// threshold) better than any distribution with a single mode.
    fn populations(&self, samples: &[Sample], is_foreign: &[bool]) -> Option<TwoPopulations> {
        /// The best cut of a normal distribution explains 2/π = 0.64 of its variance, of a uniform one 0.75.
        const EXPLAINED: f64 = 0.85;
        const FEWEST_FOR_TWO: usize = 50;
        let many = is_foreign.iter().filter(|&&foreign| foreign).count() as f64
            > LARGEST_SHARE * samples.len() as f64;
        let mut order: Vec<usize> = (0..samples.len())
            .filter(|&i| (many || !is_foreign[i]) && self.residuals[i].is_finite())
            .collect();
        if order.len() < FEWEST_FOR_TWO {
            return None;
        }
        order.sort_by(|&a, &b| self.residuals[a].total_cmp(&self.residuals[b]));
        let n = order.len() as f64;
        let mean = order.iter().map(|&i| self.residuals[i]).collect::<Sum>().value() / n;
        let total = order.iter().map(|&i| (self.residuals[i] - mean).powi(2)).collect::<Sum>().value();
        let (mut below, mut best) = (0.0, (0.0, 0));
        for (k, &i) in order.iter().enumerate().take(order.len() - 1) {
            below += self.residuals[i] - mean;
            let count = (k + 1) as f64;
            let between = below * below * n / (count * (n - count));
            if between > best.0 {
                best = (between, k + 1);
            }
        }
        let (between, cut) = best;
        let smaller = cut.min(order.len() - cut) as f64;
        if between <= EXPLAINED * total || smaller <= LARGEST_SHARE * n {
            return None;
        }
        let group = |members: &[usize]| {
            let mean =
                members.iter().map(|&i| samples[i].loss).collect::<Sum>().value() / members.len() as f64;
            let mut members = members.to_vec();
            members.sort_unstable();
            members.truncate(LISTED);
            (mean, members)
        };
        let ((low, first), (high, second)) = (group(&order[..cut]), group(&order[cut..]));
        Some(TwoPopulations {
            counts: [cut, order.len() - cut],
            means: [low, high],
            first: [first, second],
            first_rows: Default::default(),
        })
    }

    fn shifted(&self, samples: &[Sample], rows: &[u64], is_foreign: &[bool]) -> Vec<ShiftedBatchSize> {
        let mut groups = std::collections::BTreeMap::<u64, Vec<usize>>::new();
        for (i, sample) in samples.iter().enumerate().filter(|&(i, _)| !is_foreign[i]) {
            groups.entry(sample.batch_size).or_default().push(i);
        }
        let limit = limit(samples.len(), groups.len());
        let mean = |members: &[usize], value: &dyn Fn(usize) -> f64| {
            members.iter().map(|&i| value(i)).collect::<Sum>().value() / members.len() as f64
        };
        groups
            .into_iter()
            .filter(|(b, members)| members.len() > 1 && self.line.at(1.0 / *b as f64) > 0.0)
            .map(|(batch_size, members)| ShiftedBatchSize {
                batch_size,
                count: members.len(),
                first_row: rows.get(members[0]).copied(),
                mean: mean(&members, &|i| samples[i].loss),
                expected: self.mean,
                deviations: mean(&members, &|i| self.residuals[i]) * (members.len() as f64).sqrt(),
            })
            .filter(|shifted| shifted.deviations.abs() > limit)
            .collect()
    }
}

/// Norms far from a robust line of ‖g‖², in the logarithm of the ratio as well as in its cube root: the
/// latter is near normal for a χ² variable (E. B. Wilson & M. M. Hilferty, "The Distribution of Chi-Square",
/// 1931), whose logarithm has a heavy lower tail; the norms of networks have a heavier upper one, which the
/// logarithm allows for.
fn foreign_norms(samples: &[Sample], limit: f64) -> Vec<ForeignSample> {
    /// Norms that agree to so many digits tell nothing by their spread.
    const SMALLEST_SPREAD: f64 = 1e-6;
    let places = abscissae(samples);
    let squares: Vec<f64> = samples.iter().map(|sample| sample.sq_grad_norm).collect();
    let mut line =
        two_point_line(&places, |half| median(&half.iter().map(|&i| squares[i]).collect::<Vec<_>>()));
    if !usable(line) {
        return Vec::new();
    }
    let ratios = |line: Line| -> Vec<f64> {
        squares.iter().zip(&places).map(|(square, place)| square / line.at(place.x)).collect()
    };
    for _ in 0..MAX_ITERATIONS {
        let ratios = ratios(line);
        let center = median(&ratios);
        let spread = WINSOR * deviation(&ratios, center);
        let winsorised: Vec<f64> = ratios
            .iter()
            .zip(&places)
            .map(|(ratio, place)| ratio.clamp(center - spread, center + spread) * line.at(place.x))
            .collect();
        let next = WeightedDesign::new(line, &places).solve(&winsorised).admissible();
        if !usable(next) {
            break;
        }
        let settled = settled(line, next);
        line = next;
        if settled {
            break;
        }
    }
    let ratios = ratios(line);
    let scaled = |scale: fn(f64) -> f64| -> Vec<f64> {
        let values: Vec<f64> = ratios.iter().map(|&ratio| scale(ratio)).collect();
        let center = median(&values);
        let spread = deviation(&values, center).max(SMALLEST_SPREAD);
        values.iter().map(|value| (value - center) / spread).collect()
    };
    let center = median(&ratios);
    let far = scaled(f64::ln).into_iter().zip(scaled(f64::cbrt));
    far.map(|(by_logarithm, by_root): (f64, f64)| match by_logarithm.abs() < by_root.abs() {
        true => by_logarithm,
        false => by_root,
    })
    .enumerate()
    .filter(|(_, deviations)| deviations.abs() > limit)
    .map(|(index, deviations)| ForeignSample {
        index,
        row: None,
        batch_size: samples[index].batch_size,
        quantity: Quantity::GradNorm,
        value: squares[index].sqrt(),
        expected: (line.at(places[index].x) * center).sqrt(),
        deviations,
    })
    .collect()
}

fn abscissae(samples: &[Sample]) -> Vec<Abscissa> {
    samples.iter().map(|sample| Abscissa { x: 1.0 / sample.batch_size as f64, count: 1.0 }).collect()
}

/// The line through a robust value of the small batches and one of the large ones, as Tukey's resistant line.
fn two_point_line(places: &[Abscissa], value: impl Fn(&[usize]) -> f64) -> Line {
    let mut order: Vec<usize> = (0..places.len()).collect();
    order.sort_by(|&a, &b| places[a].x.total_cmp(&places[b].x));
    let (large, small) = order.split_at(order.len() / 2);
    let center =
        |half: &[usize]| half.iter().map(|&i| places[i].x).collect::<Sum>().value() / half.len() as f64;
    let ((x, y), (x2, y2)) = ((center(large), value(large)), (center(small), value(small)));
    let slope = if x2 > x { ((y2 - y) / (x2 - x)).max(0.0) } else { 0.0 };
    // Halves that overlap in size or luck may give a line that vanishes: a constant is then as good.
    let intercept = (y - slope * x).max(0.0);
    Line { intercept, slope }
}

fn usable(line: Line) -> bool {
    (line.intercept > 0.0 || line.slope > 0.0) && line.intercept.is_finite() && line.slope.is_finite()
}

fn settled(line: Line, next: Line) -> bool {
    let close = |old: f64, new: f64| (new - old).abs() <= 1e-4 * new.abs();
    close(line.intercept, next.intercept) && close(line.slope, next.slope)
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    let middle = values.len() / 2;
    if values.is_empty() {
        return 0.0;
    }
    let (below, &mut upper, _) = values.select_nth_unstable_by(middle, f64::total_cmp);
    let lower = below.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if values.len() % 2 == 1 {
        return upper;
    }
    0.5 * lower + 0.5 * upper
}

/// A robust standard deviation.
fn deviation(values: &[f64], center: f64) -> f64 {
    MAD * median(&values.iter().map(|value| (value - center).abs()).collect::<Vec<_>>())
}
