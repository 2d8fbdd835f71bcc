//! Which batch sizes to draw next, by what is known so far.

use super::AutoFit;
use crate::estimation::design::check_batch_sizes;
use crate::estimation::{Design, DesignKind, DesignProblem, EstimationError, Fit};
use crate::{Error, Result};

/// The published method's guess of (C(0), C_ε(0)) before there are samples; only the ratio matters.
const PRIOR: (f64, f64) = (0.05, 1.0);

/// The Gibbs form lists every batch size it may draw. 2²⁰ is beyond the mini-batches that anyone draws at
/// once.
const LARGEST_BATCH: u64 = 1 << 20;

/// The best knowledge of (C(0), C_ε(0)) so far, which batch sizes are designed for.
pub(super) struct Guess {
    problem: DesignProblem,
    kind: DesignKind,
    /// The last design and what it was made for: a guess often stays as it is.
    designed: Option<(DesignProblem, Design)>,
}

impl Guess {
    pub(super) fn new(options: &AutoFit, dims: u64) -> Result<Self> {
        let AutoFit { tolerance, initial_budget, max_budget, min_batch_size, max_batch_size, .. } = *options;
        if dims == 0 {
            return Err(Error::invalid("dims", dims, "must be at least 1: the sampler has no parameters"));
        }
        if !(tolerance.is_finite() && tolerance > 0.0) {
            return Err(Error::invalid("tolerance", tolerance, "must be finite and above 0"));
        }
        if initial_budget == 0 {
            return Err(Error::invalid("initial_budget", initial_budget, "must be at least 1 example"));
        }
        check_batch_sizes(min_batch_size, max_batch_size)?;
        if min_batch_size >= LARGEST_BATCH {
            let expected =
                format!("must be below {LARGEST_BATCH}, the largest batch size that auto-fit draws");
            return Err(Error::invalid("min_batch_size", min_batch_size, expected));
        }
        let largest = max_batch_size.unwrap_or(u64::MAX).min(max_budget).min(LARGEST_BATCH);
        if largest <= min_batch_size {
            let expected =
                format!("must pay for batches of more than min_batch_size = {min_batch_size} examples");
            return Err(Error::invalid("max_budget", max_budget, expected));
        }
        let (variance, noise_variance) = PRIOR;
        let max_batch_size = Some(largest);
        let problem = DesignProblem { variance, noise_variance, min_batch_size, max_batch_size };
        Ok(Guess { problem, kind: options.design, designed: None })
    }

    /// The best design for the guess.
    pub(super) fn design(&mut self) -> Result<&Design> {
        let design = match self.designed.take() {
            Some((problem, design)) if problem == self.problem => design,
            _ => self.problem.design(self.kind)?,
        };
        Ok(&self.designed.insert((self.problem, design)).1)
    }

    pub(super) fn adopt(&mut self, fit: &Fit) {
        self.problem.variance = fit.variance.max(self.smallest_variance(fit.noise_variance));
        self.problem.noise_variance = fit.noise_variance;
    }

    /// Below it the noise is larger than the signal at every batch size allowed, so that nothing more can be
    /// learnt about the best batch sizes.
    fn smallest_variance(&self, noise_variance: f64) -> f64 {
        noise_variance / self.problem.max_batch_size.map_or(f64::INFINITY, |b| b as f64)
    }

    /// Without a fit the guess stays, but what hid one of the variances says that it is smaller than guessed:
    /// move to the batch sizes that show it rather than go on where nothing is seen.
    pub(super) fn learn_from(&mut self, failure: &EstimationError) {
        match failure {
            EstimationError::NonPositiveIntercept { .. } | EstimationError::NotConverged { .. } => {
                let smallest = self.smallest_variance(self.problem.noise_variance);
                self.problem.variance = (0.5 * self.problem.variance).max(smallest);
            }
            EstimationError::NegativeSlope { .. } => self.problem.noise_variance *= 0.5,
            _ => {}
        }
    }
}
