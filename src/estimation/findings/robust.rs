//! What samples are compared with: means and lines that do not depend on those that are foreign.

use super::{ForeignSample, LARGEST_SHARE, LISTED, Quantity, ShiftedBatchSize, TwoPopulations, limit};
use crate::estimation::least_squares::{Abscissa, Line, Sum, WeightedDesign};
use crate::estimation::statistics::Sample;

/// Residuals are Winsorised at so many standard deviations. Large enough for a Gaussian sample to lose little
/// and small enough for a sixth of the samples to be foreign.
const WINSOR: f64 = 2.0;

/// E min(Z², c²) of a standard normal variable Z, c = [`WINSOR`]: 2Φ(c) − 1 − 2cφ(c) + 2c²(1 − Φ(c)).
const WINSORISED_VARIANCE: f64 = 0.920_536_925_636_323;

/// From a normal variable's median absolute deviation to its standard deviation, 1/Φ⁻¹(3/4).
const MAD: f64 = 1.482_602_218_505_602;

/// More than enough; the line only has to be good enough to judge by.
const MAX_ITERATIONS: usize = 100;

/// The robust mean and line of the losses' variances.
pub(super) struct Losses {
    mean: f64,
    line: Line,
    /// (L − μ)/√v_b; infinite where v_b is 0.
    residuals: Vec<f64>,
}

impl Losses {
    pub fn of(samples: &[Sample]) -> Losses {
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

    pub fn foreign(&self, samples: &[Sample], limit: f64) -> Vec<ForeignSample> {
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
    pub fn populations(&self, samples: &[Sample], is_foreign: &[bool]) -> Option<TwoPopulations> {
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

    pub fn shifted(&self, samples: &[Sample], rows: &[u64], is_foreign: &[bool]) -> Vec<ShiftedBatchSize> {
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
pub(super) fn foreign_norms(samples: &[Sample], limit: f64) -> Vec<ForeignSample> {
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
