//! Fits from the samples themselves, each of which can be judged by the others.

use super::EstimationError;
use super::diagnostics::Diagnostics;
use super::findings::Findings;
use super::fit::{Fit, try_fit};
use super::samples::SampleTable;
use super::statistics::SampleStatistics;
use crate::Result;

/// How [`SampleTable::fit`] fits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FitOptions {
    /// Leave foreign samples out. Where there are none, the fit is bitwise that of all samples.
    pub robust: bool,
}

/// A fit with what was found among its samples.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleFit {
    /// The fit; of a robust one, to the samples that are not foreign.
    pub fit: Fit,
    /// Statistics of the samples that the fit was made from.
    pub statistics: SampleStatistics,
    /// What looks unlike draws of one random function among all samples, those left out included.
    pub findings: Findings,
    /// The fit without the foreign samples, where there are any and the fit is not without them already.
    pub without_foreign: Option<Fit>,
}

impl SampleFit {
    /// What the user should know, one line each: what was found among the samples, with what it does to the
    /// fit and what to do; else heavy tails, in which foreign samples and two populations would show as well.
    /// Foreign samples decide over a fit if they change a variance by more than the share `tolerance`.
    pub fn warnings(&self, tolerance: f64) -> Vec<String> {
        if !self.findings.is_empty() {
            return vec![format!("{}; {}", self.findings, self.consequence(tolerance))];
        }
        let (fit, diagnostics) = (&self.fit, Diagnostics::new(&self.statistics, &self.fit, None));
        let heavy = diagnostics.heavy_tails().then(|| {
            format!(
                "the losses have heavy tails (excess kurtosis {:.1}): the relative standard deviation of the variance \
                 is rather {:.3} than {:.3}; draw more samples, or check that all losses are of the same network and \
                 data",
                diagnostics.excess_kurtosis,
                diagnostics.relative_std(fit),
                fit.relative_std
            )
        });
        heavy.into_iter().collect()
    }

    fn consequence(&self, tolerance: f64) -> String {
        let (fit, findings) = (&self.fit, &self.findings);
        if let Some(without) = &self.without_foreign {
            let change = |with: f64, without: f64| (with / without - 1.0).abs();
            let most =
                change(fit.variance, without.variance).max(change(fit.grad_variance, without.grad_variance));
            let effect = match most > tolerance {
                true => "they decide over the fit",
                false => "they hardly change the fit",
            };
            return format!(
                "{effect}: without them variance = {:.6e} and grad_variance = {:.6e}; look at these samples, then delete \
                 them, or leave them out with a robust fit",
                without.variance, without.grad_variance
            );
        }
        let left_out = self.statistics.batches() < findings.samples as u64;
        match (left_out, findings.is_separable()) {
            (true, _) => "left out of the fit".into(),
            (_, true) => {
                "check that these are draws of the same network and data as the others, or leave them out"
                    .into()
            }
            _ => "fit the samples of each network and data set from a file of their own".into(),
        }
    }
}

impl SampleTable {
    /// Looks for foreign samples and fits mean and variances: to all samples, or without foreign ones.
    ///
    /// Foreign is what a set of Gaussian losses as large would contain once in a thousand times, given mean
    /// and variances that no minority of the samples can decide over, and likewise for the norms, whose
    /// logarithms and cube roots are looked at. Fewer than 10 samples are not judged. [`fit`](super::fit())
    /// sees statistics only, from which no sample can be told.
    ///
    /// # Errors
    /// Those of [`fit`](super::fit()); [`EstimationError::Foreign`] where foreign samples are the reason of
    /// one; [`EstimationError::Inseparable`] for a robust fit of two populations, or where more than a tenth
    /// of the samples is foreign.
    pub fn fit(&self, options: &FitOptions) -> Result<SampleFit> {
        let findings = self.findings();
        if options.robust {
            if !findings.is_separable() {
                return Err(EstimationError::Inseparable { findings: Box::new(findings) }.into());
            }
            let statistics = self.without(&findings)?;
            let fit = try_fit(&statistics)?;
            return Ok(SampleFit { fit, statistics, findings, without_foreign: None });
        }
        let statistics = self.statistics()?;
        let without_foreign = match findings.foreign.is_empty() || !findings.is_separable() {
            true => None,
            false => try_fit(&self.without(&findings)?).ok(),
        };
        match try_fit(&statistics) {
            Ok(fit) => Ok(SampleFit { fit, statistics, findings, without_foreign }),
            Err(failure) => Err(blame(failure, findings).into()),
        }
    }

    /// What looks unlike draws of one random function.
    pub fn findings(&self) -> Findings {
        Findings::of(&self.samples, &self.rows)
    }

    /// Statistics of the samples that are not foreign.
    pub(super) fn without(&self, findings: &Findings) -> Result<SampleStatistics> {
        let foreign = findings.is_foreign();
        self.statistics_of(|index| !foreign[index])
    }
}

/// Why there is no fit, where foreign samples or two populations can be the reason.
pub(super) fn blame(failure: EstimationError, findings: Findings) -> EstimationError {
    let by_values = matches!(
        failure,
        EstimationError::NonPositiveIntercept { .. }
            | EstimationError::NegativeSlope { .. }
            | EstimationError::NotConverged { .. }
    );
    let found = !findings.foreign.is_empty() || findings.populations.is_some();
    match by_values && found {
        false => failure,
        true if findings.is_separable() => {
            let consequence = match failure {
                EstimationError::NonPositiveIntercept { quantity, value }
                | EstimationError::NegativeSlope { quantity, value } => {
                    format!("with them {quantity} = {value:e}, which no fit can use")
                }
                _ => "with them it does not converge".into(),
            };
            EstimationError::Foreign { findings: Box::new(findings), consequence }
        }
        true => EstimationError::Inseparable { findings: Box::new(findings) },
    }
}
