//! How well the samples fit the assumptions of the method, as numbers.

use super::fit::Fit;
use super::statistics::SampleStatistics;
use serde::Serialize;

/// Checks of the two assumptions behind a fit: Gaussian losses, isotropic gradients.
///
/// Neither is needed for the moments to be right (means and variances are what they are); normality justifies
/// the weights and `relative_std`, isotropy the covariance model. See the paper's sections on input
/// invariance and "Beyond the Gaussian assumption".
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Diagnostics {
    /// Skewness m₃/m₂^(3/2) of the standardised losses u = (L − μ)/√(C(0) + C_ε(0)/b); 0 for a Gaussian.
    pub skewness: f64,
    /// Excess kurtosis m₄/m₂² − 3 of the standardised losses; 0 for a Gaussian.
    pub excess_kurtosis: f64,
    /// K² of D'Agostino and Pearson: the sum of the squares of skewness and kurtosis, each transformed to a
    /// standard normal variable (D'Agostino 1970; Anscombe & Glynn 1983). χ² with 2 degrees of freedom for
    /// Gaussian losses. `None` below 20 samples, where the transformations do not hold.
    pub normality_statistic: Option<f64>,
    /// exp(−K²/2), the probability that Gaussian losses look at least as far from Gaussian as these.
    pub normality_p_value: Option<f64>,
    /// Variance of ‖g‖²/e_b about 1, e_b = −d·(C'(0) + C'_ε(0)/b) its fitted expectation: Σ(‖g‖²/e_b − 1)²/(n
    /// − 2), two degrees of freedom being spent on the fit. `None` for fewer than three samples.
    pub grad_relative_variance: Option<f64>,
    /// 2/`grad_relative_variance`: the number of independent, equally distributed partial derivatives whose
    /// sum of squares (a scaled χ²) would spread as much. `None` as well where nothing spreads.
    pub grad_effective_dims: Option<f64>,
    /// `grad_relative_variance` over 2/d, the relative variance of a scaled χ² with d degrees of freedom that
    /// isotropy predicts. 1 where isotropy holds; the larger, the fewer directions share the gradient. `None`
    /// without d.
    pub grad_spread_ratio: Option<f64>,
}

impl Diagnostics {
    /// Diagnostics of a fit and the statistics it was made from; `dims` is d, the number of parameters, if
    /// known.
    pub fn new(statistics: &SampleStatistics, fit: &Fit, dims: Option<u64>) -> Self {
        let n = statistics.batches() as f64;
        let (mut powers, mut grad) = ([0.0; 4], 0.0);
        for (b, group) in statistics.groups() {
            let std = (fit.variance + fit.noise_variance / b as f64).sqrt();
            let [second, third, fourth] = group.loss_powers_about(fit.mean);
            powers[0] += group.count() * (group.mean_loss() - fit.mean) / std;
            powers[1] += second / (std * std);
            powers[2] += third / (std * std * std);
            powers[3] += fourth / (std * std * std * std);
            let expected = fit.grad_variance + fit.noise_grad_variance / b as f64;
            grad += group.sq_grad_norm_squares_about(expected) / (expected * expected);
        }
        // u has mean 0 and variance 1 up to sampling error, so moving to its own mean cancels nothing.
        let [mean, second, third, fourth] = powers.map(|sum| sum / n);
        let m2 = second - mean * mean;
        let m3 = third - mean * (3.0 * second - 2.0 * mean * mean);
        let m4 = fourth - mean * (4.0 * third - mean * (6.0 * second - 3.0 * mean * mean));
        let (skewness, kurtosis) = (m3 / (m2 * m2.sqrt()), m4 / (m2 * m2));
        let normality_statistic =
            (n >= 20.0).then(|| skewness_score(skewness, n).powi(2) + kurtosis_score(kurtosis, n).powi(2));
        let grad_relative_variance = (n > 2.0).then(|| grad / (n - 2.0));
        Diagnostics {
            skewness,
            excess_kurtosis: kurtosis - 3.0,
            normality_statistic,
            // The survival function of χ² with two degrees of freedom.
            normality_p_value: normality_statistic.map(|statistic| (-0.5 * statistic).exp()),
            grad_relative_variance,
            grad_effective_dims: grad_relative_variance.filter(|&v| v > 0.0).map(|variance| 2.0 / variance),
            grad_spread_ratio: grad_relative_variance
                .zip(dims)
                .map(|(variance, d)| variance * d as f64 / 2.0),
        }
    }

    /// Whether the losses have heavier tails than Gaussian ones, beyond doubt: a positive excess kurtosis
    /// where `normality_p_value` is below 1e-6.
    pub fn heavy_tails(&self) -> bool {
        self.excess_kurtosis > 0.0 && self.normality_p_value.is_some_and(|p| p < 1e-6)
    }

    /// The relative standard deviation of the fitted C(0) with [`heavy_tails`](Self::heavy_tails) allowed
    /// for: a squared residual has the variance (2 + κ)·v² at an excess kurtosis of κ, in place of the 2·v²
    /// that [`Fit::relative_std`] takes, so it is √(1 + κ/2) times that. Without heavy tails that of the fit.
    pub fn relative_std(&self, fit: &Fit) -> f64 {
        match self.heavy_tails() {
            true => fit.relative_std * (1.0 + 0.5 * self.excess_kurtosis).sqrt(),
            false => fit.relative_std,
        }
    }
}

/// D'Agostino (1970): skewness of n Gaussian samples as a standard normal variable.
fn skewness_score(skewness: f64, n: f64) -> f64 {
    let y = skewness * ((n + 1.0) * (n + 3.0) / (6.0 * (n - 2.0))).sqrt();
    let kurtosis = 3.0 * (n * n + 27.0 * n - 70.0) * (n + 1.0) * (n + 3.0)
        / ((n - 2.0) * (n + 5.0) * (n + 7.0) * (n + 9.0));
    let w2 = (2.0 * (kurtosis - 1.0)).sqrt() - 1.0;
    let alpha = (2.0 / (w2 - 1.0)).sqrt();
    (y / alpha).asinh() / (0.5 * w2.ln()).sqrt()
}

/// Anscombe & Glynn (1983): kurtosis of n Gaussian samples as a standard normal variable.
fn kurtosis_score(kurtosis: f64, n: f64) -> f64 {
    let mean = 3.0 * (n - 1.0) / (n + 1.0);
    let variance = 24.0 * n * (n - 2.0) * (n - 3.0) / ((n + 1.0).powi(2) * (n + 3.0) * (n + 5.0));
    let x = (kurtosis - mean) / variance.sqrt();
    let skewness = 6.0 * (n * n - 5.0 * n + 2.0) / ((n + 7.0) * (n + 9.0))
        * (6.0 * (n + 3.0) * (n + 5.0) / (n * (n - 2.0) * (n - 3.0))).sqrt();
    let a = 6.0 + 8.0 / skewness * (2.0 / skewness + (1.0 + 4.0 / (skewness * skewness)).sqrt());
    let term = 2.0 / (9.0 * a);
    (1.0 - term - ((1.0 - 2.0 / a) / (1.0 + x * (2.0 / (a - 4.0)).sqrt())).cbrt()) / term.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(values: &[f64]) -> (f64, f64) {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let m = |k| values.iter().map(|v| (v - mean).powi(k)).sum::<f64>() / n;
        (m(3) / m(2).powf(1.5), m(4) / m(2).powi(2))
    }

    /// Examples from the documentation of SciPy's `skewtest` and `kurtosistest`, to all digits but rounding.
    #[test]
    fn scores_agree_with_scipy() {
        let (skewness, _) = moments(&[2.0, 8.0, 0.0, 4.0, 1.0, 9.0, 9.0, 0.0]);
        assert!((skewness_score(skewness, 8.0) - 0.44626385374196975).abs() < 1e-13);
        let (skewness, _) = moments(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8000.0]);
        assert!((skewness_score(skewness, 8.0) - 3.571773510360407).abs() < 1e-13);
        let (_, kurtosis) = moments(&(0..20).map(f64::from).collect::<Vec<_>>());
        assert!((kurtosis_score(kurtosis, 20.0) + 1.7058104152122062).abs() < 1e-13);
    }
}
