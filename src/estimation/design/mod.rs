//! Which batch sizes to sample, so that the fitted C(0) is as precise as a number of examples allows.
//!
//! With σ_b² = 2(β₀ + β₁/b)², the variance of β̂₀ times the number of examples used is (paper, Eq. "the
//! optimization target", multiplied out with its lemma "Variance of β̂₀")
//!
//! E\[B\]·E\[1/(σ²B²)\] / (E\[1/σ²\]·E\[1/(σ²B²)\] − E\[1/(σ²B)\]²).
//!
//! It depends on the distribution of B alone. Everything here is computed in units of β₀, so only the ratio
//! β₁/β₀ matters.

mod c_optimal;
mod gibbs;

use crate::{Error, Result};
use gibbs::Gibbs;
use serde::Serialize;
use std::collections::BTreeMap;

/// The two families of batch-size distributions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DesignKind {
    /// ν(b) ∝ exp(λ₁/σ_b² − λ₂b) with the best λ₁, λ₂ ≥ 0 (paper, section "Batch size distribution"): spreads
    /// the batch sizes out, which is safe against a wrong first guess of β₀ and β₁.
    #[default]
    Gibbs,
    /// The two batch sizes that give the smallest variance per example of all distributions.
    COptimal,
}

impl std::str::FromStr for DesignKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "gibbs" => Ok(DesignKind::Gibbs),
            "c-optimal" => Ok(DesignKind::COptimal),
            _ => Err(Error::invalid("design", name, "must be gibbs or c-optimal")),
        }
    }
}

impl std::fmt::Display for DesignKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DesignKind::Gibbs => "gibbs",
            DesignKind::COptimal => "c-optimal",
        })
    }
}

/// What a batch-size design is chosen for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DesignProblem {
    /// β₀ = C(0), as far as known; > 0.
    pub variance: f64,
    /// β₁ = C_ε(0), as far as known; ≥ 0.
    pub noise_variance: f64,
    /// Smallest batch size allowed, e.g. 20 to keep batch normalisation stable; ≥ 1.
    pub min_batch_size: u64,
    /// Largest batch size allowed, at most the size of the data set.
    pub max_batch_size: Option<u64>,
}

/// A distribution of batch sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Design {
    problem: DesignProblem,
    gibbs: Option<Gibbs>,
    points: Vec<(u64, f64)>,
    cumulative: Vec<f64>,
    relative_objective: f64,
}

impl Design {
    /// The family it is from.
    pub fn kind(&self) -> DesignKind {
        if self.gibbs.is_some() { DesignKind::Gibbs } else { DesignKind::COptimal }
    }

    /// λ₁ and λ₂ of the Gibbs form.
    pub fn lambda(&self) -> Option<[f64; 2]> {
        self.gibbs.map(|gibbs| gibbs.lambda(&self.problem))
    }

    /// Batch sizes in increasing order, each with its share of the mini-batches to draw; the shares add up to
    /// 1.
    pub fn points(&self) -> &[(u64, f64)] {
        &self.points
    }

    /// Var(β̂₀) times the number of examples; for a design against earlier batches, of those and the new ones
    /// together.
    pub fn objective(&self) -> f64 {
        self.relative_objective * self.problem.variance * self.problem.variance
    }

    /// E\[B\], the examples that a mini-batch costs on average.
    pub fn expected_batch_size(&self) -> f64 {
        self.points.iter().map(|&(b, share)| b as f64 * share).sum()
    }

    /// Examples after which the relative standard deviation of β̂₀ is `tolerance`: objective/(tolerance·β₀)².
    pub fn examples_needed(&self, tolerance: f64) -> f64 {
        self.relative_objective / (tolerance * tolerance)
    }

    /// The batch size at the quantile `u` in [0, 1) of the distribution; with u uniform, a draw from it.
    pub fn quantile(&self, u: f64) -> u64 {
        let index = self.cumulative.partition_point(|&below| below <= u);
        self.points[index.min(self.points.len() - 1)].0
    }

    /// What to draw next: the design of the `further` examples, given mini-batches drawn already (count by
    /// batch size).
    ///
    /// The c-optimal one is the exact minimiser of Var(β̂₀) for old and new mini-batches together. For the
    /// Gibbs form, the counts that its distribution would have in total, less those there are, clipped at 0
    /// (as in the published method).
    pub fn after(&self, drawn: &BTreeMap<u64, u64>, further: u64) -> Design {
        let drawn: Vec<(u64, f64)> =
            drawn.iter().filter(|&(&b, _)| b > 0).map(|(&b, &count)| (b, count as f64)).collect();
        Self::of(self.problem, self.gibbs, &drawn, further.max(1) as f64)
    }

    fn of(problem: DesignProblem, gibbs: Option<Gibbs>, drawn: &[(u64, f64)], further: f64) -> Design {
        let counts = match &gibbs {
            Some(gibbs) => gibbs.further_counts(drawn, further),
            None => c_optimal::further_counts(&problem, drawn, further),
        };
        let total: f64 = counts.iter().map(|&(_, count)| count).sum();
        let points: Vec<(u64, f64)> = counts.iter().map(|&(b, count)| (b, count / total)).collect();
        let cumulative = points
            .iter()
            .scan(0.0, |sum, &(_, share)| {
                *sum += share;
                Some(*sum)
            })
            .collect();
        // Clipping leaves counts that cost another number of examples than there are.
        let scale = further / counts.iter().map(|&(b, count)| b as f64 * count).sum::<f64>();
        let new = counts.iter().map(|&(b, count)| (b, count * scale));
        let all: Vec<(f64, f64)> =
            drawn.iter().copied().chain(new).map(|(b, count)| (b as f64, count)).collect();
        let relative_objective = objective(problem.noise_ratio(), &all);
        Design { problem, gibbs, points, cumulative, relative_objective }
    }
}

impl DesignProblem {
    /// The best design of a family.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a number outside its domain, or when the Gibbs form spreads over more
    /// batch sizes than can be listed (β₁/β₀ above about 10⁴ and no maximum).
    pub fn design(&self, kind: DesignKind) -> Result<Design> {
        self.validate()?;
        let gibbs = match kind {
            DesignKind::Gibbs => Some(Gibbs::optimal(self)?),
            DesignKind::COptimal => None,
        };
        Ok(Design::of(*self, gibbs, &[], 1.0))
    }

    fn validate(&self) -> Result<()> {
        if !(self.variance.is_finite() && self.variance > 0.0) {
            return Err(Error::invalid("variance", self.variance, "must be finite and above 0"));
        }
        if !(self.noise_variance.is_finite() && self.noise_variance >= 0.0) {
            return Err(Error::invalid(
                "noise_variance",
                self.noise_variance,
                "must be finite and at least 0",
            ));
        }
        if self.noise_ratio() > 1e15 {
            let expected = "is so small against noise_variance that no batch size shows it";
            return Err(Error::invalid("variance", self.variance, expected));
        }
        check_batch_sizes(self.min_batch_size, self.max_batch_size)
    }

    /// β₁/β₀
    fn noise_ratio(&self) -> f64 {
        self.noise_variance / self.variance
    }

    fn max_batch(&self) -> f64 {
        self.max_batch_size.map_or(f64::INFINITY, |b| b as f64)
    }
}

pub(super) fn check_batch_sizes(min: u64, max: Option<u64>) -> Result<()> {
    if min == 0 {
        return Err(Error::invalid("min_batch_size", min, "must be at least 1"));
    }
    match max {
        Some(max) if max <= min => {
            let expected = format!("must be above min_batch_size = {min}: a fit needs two batch sizes");
            Err(Error::invalid("max_batch_size", max, expected))
        }
        _ => Ok(()),
    }
}

/// 1/σ_b² in units of 1/β₀².
fn weight(noise_ratio: f64, b: f64) -> f64 {
    0.5 / (1.0 + noise_ratio / b).powi(2)
}

/// Var(β̂₀)·Σb/β₀² for mini-batches (b, count); infinite for a single batch size.
///
/// The denominator is taken about the weighted mean of 1/b (as in the paper's form), where nothing cancels.
fn objective(noise_ratio: f64, batches: &[(f64, f64)]) -> f64 {
    let sum = |f: &dyn Fn(f64) -> f64| batches.iter().map(|&(b, count)| count * f(b)).sum::<f64>();
    let total = sum(&|b| weight(noise_ratio, b));
    let center = sum(&|b| weight(noise_ratio, b) / b) / total;
    let spread = sum(&|b| weight(noise_ratio, b) * (1.0 / b - center).powi(2));
    sum(&|b| b) * (1.0 / total + center * center / spread)
}
