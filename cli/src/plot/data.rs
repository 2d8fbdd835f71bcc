//! The numbers behind the plots: what the samples are, beside what the fit says they should be.

use rfdescent::covariance::{Model, Observation, StepMode, StepRule};
use rfdescent::estimation::{Fit, Sample};
use statrs::distribution::{ChiSquared, ContinuousCDF, Normal};

/// More points make the file large and the picture no clearer.
const MOST_POINTS: usize = 2000;
/// Points of a drawn curve.
const CURVE: usize = 200;
/// Batch sizes within this factor share a mean: a design spreads over so many sizes that most have few
/// samples.
const BIN: f64 = std::f64::consts::SQRT_2;

/// A quantity against the batch size.
pub struct Scatter {
    /// Batch size and value of single mini-batches.
    pub points: Vec<(f64, f64)>,
    /// Means over similar batch sizes, at the geometric mean of those.
    pub means: Vec<(f64, f64)>,
    /// The fitted expectation.
    pub expected: Vec<(f64, f64)>,
    /// Batch size, 2.5 % quantile and 97.5 % quantile.
    pub band: Vec<(f64, f64, f64)>,
}

/// Sorted values against the quantiles of the distribution that the model says they have.
pub struct Quantiles {
    /// Quantile and value.
    pub points: Vec<(f64, f64)>,
    /// Intercept and slope of the least-squares line through all values.
    pub line: (f64, f64),
}

/// The step size against the gradient cost quotient Θ, for exact losses and gradients.
pub struct StepSizes {
    /// η*(Θ).
    pub steps: Vec<(f64, f64)>,
    /// A-RFD, its asymptote for small Θ.
    pub asymptote: Vec<(f64, f64)>,
    /// η*(∞).
    pub plateau: f64,
}

/// All of them.
pub struct PlotData {
    /// L.
    pub losses: Scatter,
    /// (L − μ)².
    pub squared_losses: Scatter,
    /// ‖g‖².
    pub sq_grad_norms: Scatter,
    /// (L − μ)/√v_b against N(0, 1).
    pub loss_quantiles: Quantiles,
    /// (L − μ)²/v_b against χ²(1).
    pub squared_loss_quantiles: Quantiles,
    /// ‖g‖²/e_b against χ²(k)/k.
    pub sq_grad_norm_quantiles: Quantiles,
    /// k: the number of parameters or, where that is unknown, as many as the samples spread like.
    pub degrees: f64,
    /// None without the number of parameters.
    pub step_sizes: Option<StepSizes>,
}

impl PlotData {
    /// `effective_dims` stands in for the number of parameters where there is no `model`.
    pub fn new(samples: &[Sample], fit: &Fit, model: Option<&Model>, effective_dims: Option<f64>) -> Self {
        let degrees = match model {
            Some(model) => model.moments().dims as f64,
            None => effective_dims.unwrap_or(1.0),
        };
        let variance = |b: f64| fit.variance + fit.noise_variance / b;
        let sq_norm = |b: f64| fit.grad_variance + fit.noise_grad_variance / b;
        let about_mean = |s: &Sample| (s.loss - fit.mean).powi(2);
        let standardised = |f: &dyn Fn(&Sample, f64) -> f64| {
            samples.iter().map(|s| f(s, s.batch_size as f64)).collect::<Vec<_>>()
        };
        PlotData {
            losses: Scatter::new(
                samples,
                |s| s.loss,
                |_| fit.mean,
                |b, p| fit.mean + variance(b).sqrt() * normal(p),
            ),
            squared_losses: Scatter::new(samples, about_mean, variance, |b, p| {
                variance(b) * chi_squared(1.0, p)
            })
            .raised(),
            sq_grad_norms: Scatter::new(
                samples,
                |s| s.sq_grad_norm,
                sq_norm,
                |b, p| sq_norm(b) * chi_squared(degrees, p) / degrees,
            )
            .raised(),
            loss_quantiles: Quantiles::new(
                standardised(&|s, b| (s.loss - fit.mean) / variance(b).sqrt()),
                normal,
            ),
            squared_loss_quantiles: Quantiles::new(standardised(&|s, b| about_mean(s) / variance(b)), |p| {
                chi_squared(1.0, p)
            }),
            sq_grad_norm_quantiles: Quantiles::new(standardised(&|s, b| s.sq_grad_norm / sq_norm(b)), |p| {
                chi_squared(degrees, p) / degrees
            }),
            degrees,
            step_sizes: model.map(StepSizes::new),
        }
    }
}

impl Scatter {
    fn new(
        samples: &[Sample],
        value: impl Fn(&Sample) -> f64,
        expected: impl Fn(f64) -> f64,
        quantile: impl Fn(f64, f64) -> f64,
    ) -> Self {
        let mut all: Vec<(f64, f64)> = samples.iter().map(|s| (s.batch_size as f64, value(s))).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (smallest, largest) = ends(&all);
        let sizes = || geometric(smallest, largest);
        Scatter {
            means: all.chunk_by_bin().map(mean_of).collect(),
            expected: sizes().map(|b| (b, expected(b))).collect(),
            band: sizes().map(|b| (b, quantile(b, 0.025), quantile(b, 0.975))).collect(),
            points: thinned(&all),
        }
    }

    /// All that an axis has to show.
    pub fn values(&self) -> impl Iterator<Item = f64> {
        let points = self.points.iter().map(|point| point.1);
        points.chain(self.band.iter().flat_map(|band| [band.1, band.2]))
    }

    /// For a logarithmic axis: values far below the band are raised to a tenth of its lowest edge.
    fn raised(mut self) -> Self {
        let floor = 0.1 * self.band.iter().map(|band| band.1).fold(f64::INFINITY, f64::min);
        for (_, value) in self.points.iter_mut().chain(&mut self.means) {
            *value = value.max(floor);
        }
        self
    }
}

fn ends(sorted: &[(f64, f64)]) -> (f64, f64) {
    let at = |point: Option<&(f64, f64)>| point.map_or(1.0, |point| point.0);
    (at(sorted.first()), at(sorted.last()))
}

trait ChunkByBin {
    /// Runs of points whose first coordinate is within a factor [`BIN`] of the run's first.
    fn chunk_by_bin(&self) -> impl Iterator<Item = &[(f64, f64)]>;
}

impl ChunkByBin for Vec<(f64, f64)> {
    fn chunk_by_bin(&self) -> impl Iterator<Item = &[(f64, f64)]> {
        let mut rest = &self[..];
        std::iter::from_fn(move || {
            let start = rest.first()?.0;
            let (bin, after) = rest.split_at(rest.partition_point(|point| point.0 < start * BIN));
            rest = after;
            Some(bin)
        })
    }
}

fn mean_of(points: &[(f64, f64)]) -> (f64, f64) {
    let n = points.len() as f64;
    let log = points.iter().map(|point| point.0.ln()).sum::<f64>() / n;
    (log.exp(), points.iter().map(|point| point.1).sum::<f64>() / n)
}

impl Quantiles {
    fn new(mut values: Vec<f64>, quantile: impl Fn(f64) -> f64) -> Self {
        values.sort_by(f64::total_cmp);
        let n = values.len() as f64;
        let all: Vec<(f64, f64)> =
            values.iter().enumerate().map(|(i, &value)| (quantile((i as f64 + 0.5) / n), value)).collect();
        Quantiles { line: least_squares(&all), points: thinned(&all) }
    }

    /// All that an axis has to show.
    pub fn quantiles(&self) -> impl Iterator<Item = f64> {
        self.points.iter().map(|point| point.0)
    }
}

fn least_squares(points: &[(f64, f64)]) -> (f64, f64) {
    let n = points.len() as f64;
    let mean = |of: &dyn Fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(&|p| p.0), mean(&|p| p.1));
    let slope = mean(&|p| (p.0 - x) * (p.1 - y)) / mean(&|p| (p.0 - x).powi(2));
    (y - slope * x, slope)
}

impl StepSizes {
    fn new(model: &Model) -> Self {
        let moments = model.moments();
        // Any loss below the mean will do: for exact observations the step follows from Θ alone.
        let gap = moments.variance.sqrt();
        let curve = |mode| {
            let rule = StepRule { mode, ..StepRule::default() };
            geometric(0.01 / model.length_scale(), 100.0 / model.length_scale())
                .filter_map(|theta| {
                    let observation =
                        Observation { loss: moments.mean - gap, grad_norm: theta * gap, inv_batch_size: 0.0 };
                    Some((theta, model.step(&observation, &rule).ok()?.step_size))
                })
                .collect()
        };
        StepSizes {
            steps: curve(StepMode::Rfd),
            asymptote: curve(StepMode::ARfd),
            plateau: model.plateau_step_size(),
        }
    }
}

fn geometric(from: f64, to: f64) -> impl Iterator<Item = f64> {
    let ratio = (to / from).ln();
    (0..=CURVE).map(move |i| from * (ratio * i as f64 / CURVE as f64).exp())
}

/// At most [`MOST_POINTS`] of them, evenly spaced, the first and the last included.
fn thinned<T: Copy>(all: &[T]) -> Vec<T> {
    if all.len() <= MOST_POINTS {
        return all.to_vec();
    }
    (0..MOST_POINTS).map(|i| all[i * (all.len() - 1) / (MOST_POINTS - 1)]).collect()
}

/// The quantile of N(0, 1).
fn normal(p: f64) -> f64 {
    Normal::standard().inverse_cdf(p)
}

/// The quantile of χ² with k degrees of freedom, k > 0.
fn chi_squared(k: f64, p: f64) -> f64 {
    // The exact quantile takes √k terms a step; from here on Wilson and Hilferty's cube differs by less than
    // 1e-4 of it.
    const MANY: f64 = 1000.0;
    if k >= MANY {
        let spread = 2.0 / (9.0 * k);
        return k * (1.0 - spread + normal(p) * spread.sqrt()).powi(3);
    }
    ChiSquared::new(k).map_or(f64::NAN, |chi| chi.inverse_cdf(p))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rfdescent::covariance::Family;
    use rfdescent::estimation::{SampleStatistics, fit};

    /// Losses at 2 ± √(0.01 + 0.8/b), ‖g‖² = 500 + 9e4/b: the fit is exact.
    fn exact() -> (Vec<Sample>, Fit) {
        let sizes = [20u64, 50, 225, 1000];
        let samples: Vec<Sample> = sizes
            .iter()
            .flat_map(|&b| {
                let std = (0.01 + 0.8 / b as f64).sqrt();
                [2.0 - std, 2.0 + std].map(|loss| Sample {
                    loss,
                    sq_grad_norm: 500.0 + 9e4 / b as f64,
                    batch_size: b,
                })
            })
            .collect();
        let mut statistics = SampleStatistics::new();
        samples.iter().for_each(|s| statistics.push(s).unwrap());
        let fit = fit(&statistics).unwrap();
        (samples, fit)
    }

    fn close(a: f64, b: f64, tolerance: f64) {
        assert!((a - b).abs() <= tolerance * b.abs(), "{a} instead of {b}");
    }

    #[test]
    fn an_exact_fit_goes_through_the_means() {
        let (samples, fit) = exact();
        let data = PlotData::new(&samples, &fit, None, Some(7.0));
        for (scatter, want) in [
            (&data.losses, (|_| 2.0) as fn(f64) -> f64),
            (&data.squared_losses, |b| 0.01 + 0.8 / b),
            (&data.sq_grad_norms, |b| 500.0 + 9e4 / b),
        ] {
            assert_eq!(scatter.means.len(), 4);
            assert_eq!(scatter.points.len(), 8);
            for &(b, value) in scatter.means.iter().chain(&scatter.expected) {
                // The fit stops when its coefficients move by less than 1e-12 of themselves.
                close(value, want(b), 1e-10);
            }
        }
        let (b, low, high) = data.losses.band[0];
        close(b, 20.0, 1e-12);
        // Textbook quantiles, to their digits.
        close(high - 2.0, 1.959964 * 0.05f64.sqrt(), 1e-6);
        close(2.0 - low, 1.959964 * 0.05f64.sqrt(), 1e-6);
        let (_, low, high) = data.squared_losses.band[0];
        close(low / 0.05, 0.000982069, 1e-5);
        close(high / 0.05, 5.023886, 1e-6);
        assert_eq!(data.degrees, 7.0);
        let (_, _, high) = data.sq_grad_norms.band[0];
        close(high / 5000.0, 16.01276 / 7.0, 1e-6);
        for &(_, value) in &data.sq_grad_norm_quantiles.points {
            close(value, 1.0, 1e-10);
        }
    }

    #[test]
    fn steps_rise_from_the_asymptote_to_the_plateau() {
        let (samples, fit) = exact();
        for family in [
            Family::SquaredExponential,
            Family::RationalQuadratic { beta: 1.0 },
            Family::Matern32,
            Family::Matern52,
        ] {
            let model = Model::new(family, fit.moments(1000)).unwrap();
            let data = PlotData::new(&samples, &fit, Some(&model), None);
            assert_eq!(data.degrees, 1000.0);
            let steps = data.step_sizes.unwrap();
            assert_eq!((steps.steps.len(), steps.asymptote.len()), (CURVE + 1, CURVE + 1));
            assert!(steps.steps.windows(2).all(|pair| pair[0].1 < pair[1].1), "{family}");
            // The first term left out of η*(Θ) is of relative order sΘ = 0.01, with a factor below 2 for
            // these models.
            close(steps.steps[0].1, steps.asymptote[0].1, 0.02);
            assert!(steps.steps[CURVE].1 < steps.plateau);
            close(steps.steps[CURVE].1, steps.plateau, 0.02);
        }
    }

    #[test]
    fn samples_of_the_right_distribution_lie_on_the_diagonal() {
        let values: Vec<f64> = (0..5001).map(|i| chi_squared(3.0, (i as f64 + 0.5) / 5001.0)).collect();
        let quantiles = Quantiles::new(values, |p| chi_squared(3.0, p));
        assert_eq!(quantiles.points.len(), MOST_POINTS);
        assert!((quantiles.line.0).abs() < 1e-9 && (quantiles.line.1 - 1.0).abs() < 1e-9);
        let last = quantiles.points[MOST_POINTS - 1];
        close(last.0, chi_squared(3.0, 5000.5 / 5001.0), 1e-12);
    }

    #[test]
    fn the_cube_is_close_to_the_exact_quantile_where_it_takes_over() {
        for p in [1e-4, 0.025, 0.3, 0.5, 0.975, 0.9999] {
            close(chi_squared(1000.0, p), ChiSquared::new(1000.0).unwrap().inverse_cdf(p), 1e-4);
        }
    }
}
