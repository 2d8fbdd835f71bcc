//! Draws samples until the fit is precise enough.

mod guess;
mod run;
mod sampler;

use std::ops::ControlFlow;
use std::path::PathBuf;

pub use sampler::{BatchRequest, BatchSample, Sampler, SamplerError};

use self::guess::Guess;
use self::run::{Advance, Run};
use self::sampler::check_tensors;
use super::design::DesignKind;
use super::fit::Fit;
use super::statistics::SampleStatistics;
use super::tensors::{TensorDims, TensorFits, fit_tensors};
use super::{EstimationError, Findings};
use crate::{Moments, Result};

/// Draws samples at batch sizes of its choice until the relative standard deviation of the fitted C(0) is
/// below a tolerance (paper, section "Variance estimation in detail", Eq. "relative std"). Where the losses
/// have heavy tails, [`Diagnostics::relative_std`](super::Diagnostics::relative_std) is what has to be below.
///
/// After `initial_budget` examples, then after each chunk of at most a fifth of the predicted need (without a
/// fit, a fifth of the samples so far, or `initial_budget` if that is more), the samples are fitted and the
/// batch sizes designed anew. Each decision follows from the samples before it, in their order, and the seed;
/// so a run that was interrupted anywhere and resumed from its cache ends with bitwise the same fit as one
/// that was not.
#[derive(Clone, Debug)]
pub struct AutoFit {
    /// Relative standard deviation of C(0) at which to stop; 0.3, as in the paper.
    pub tolerance: f64,
    /// Examples to draw before the first fit; 6000, as in the paper.
    pub initial_budget: u64,
    /// Examples to draw at most, those in the cache included; 1,000,000: twice the paper's worst run.
    pub max_budget: u64,
    /// Smallest batch size to draw, below 2²⁰; 20, as in the paper, where smaller ones upset batch
    /// normalisation.
    pub min_batch_size: u64,
    /// Largest batch size to draw: the size of the data set. Without it, the budget is the limit; with or
    /// without, 2²⁰ is.
    pub max_batch_size: Option<u64>,
    /// Everything random follows from it; 0.
    pub seed: u64,
    /// How batch sizes are chosen; the Gibbs form.
    pub design: DesignKind,
    /// CSV file that keeps the samples: created, or gone on from. A row is handed to the operating system as
    /// soon as it is drawn. Columns `loss,grad_norm,batchsize,time` and `sq_grad_norm:<tensor>` for each of
    /// the sampler's tensors; files with further columns, or without those of tensors, are kept as they are.
    /// One file for each network and data set: nothing in it says what it holds samples of.
    pub cache: Option<PathBuf>,
    /// What to do about samples that look foreign to the others; refuse to go on where they decide over the
    /// fit.
    pub on_foreign: OnForeign,
}

/// What auto-fit does about samples that are too far from the others to be of the same kind, as where one
/// initialisation in a hundred blows up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnForeign {
    /// Stop with [`EstimationError::Foreign`] where the fitted C(0) or −d·C'(0) differs by more than a factor
    /// of 2 from the one without them, or only the latter exists: no number of further samples that anyone
    /// draws would bring the two together. Warn where it does not.
    #[default]
    Refuse,
    /// Fit without them, as [`FitOptions::robust`](super::FitOptions::robust), and say so in a warning.
    LeaveOut,
    /// Fit with them: for losses that are known to have heavy tails.
    Keep,
}

impl Default for AutoFit {
    fn default() -> Self {
        AutoFit {
            tolerance: 0.3,
            initial_budget: 6000,
            max_budget: 1_000_000,
            min_batch_size: 20,
            max_batch_size: None,
            seed: 0,
            design: DesignKind::default(),
            cache: None,
            on_foreign: OnForeign::Refuse,
        }
    }
}

/// How far a run has come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Mini-batches so far.
    pub batches: u64,
    /// Examples so far.
    pub examples: u64,
    /// Examples that will have been needed in the end, by the last fit; `None` before the first.
    pub needed: Option<u64>,
    /// Relative standard deviation of C(0) in the last fit.
    pub relative_std: Option<f64>,
    /// Where it has to come below.
    pub tolerance: f64,
    /// Examples to expect in the end, `max_budget` at most: `needed` once there is a fit. Before, and so
    /// before the first sample is drawn, what the variances that batch sizes are designed for at the start
    /// would need, `initial_budget` at least.
    pub expected: u64,
    /// How long those still to be drawn will take, judged by the ones drawn so far; `None` before the first.
    pub remaining_seconds: Option<f64>,
}

/// What a run has cost, and what more precision would.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Mini-batches drawn in this run; those of the cache cost nothing.
    pub batches: u64,
    /// Examples in them.
    pub examples: u64,
    /// Time from the first of them to the fit.
    pub seconds: f64,
    /// Further examples, at batch sizes in the same proportions, after which the standard deviation of the
    /// fitted C(0) is half of what it is.
    pub halving_examples: u64,
    /// How long they would take, judged by those drawn; `None` where none were.
    pub halving_seconds: Option<f64>,
}

impl std::fmt::Display for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Cost { batches, examples, seconds, halving_examples, halving_seconds } = self;
        write!(
            f,
            "{examples} examples in {batches} batches drawn in {seconds:.1} s; half the error would take "
        )?;
        write!(f, "{halving_examples} more")?;
        halving_seconds.map_or(Ok(()), |seconds| write!(f, ", about {seconds:.1} s"))
    }
}

/// A finished run.
#[derive(Clone, Debug)]
pub struct AutoFitted {
    /// The fit to all samples; without the foreign ones where these are left out.
    pub fit: Fit,
    /// Whether the tolerance was reached and nothing about the samples contradicts it: no heavy tails that
    /// make the fit less precise than it says, no losses of two populations.
    pub converged: bool,
    /// What looks unlike draws of one random function among the samples.
    pub findings: Findings,
    /// What was drawn in this run, and what half the error would cost.
    pub cost: Cost,
    /// d, as the sampler said.
    pub dims: u64,
    /// The tensors, as the sampler said.
    pub tensors: Vec<TensorDims>,
    /// Statistics of the samples that were fitted, for diagnostics or another fit.
    pub statistics: SampleStatistics,
    /// What the user should know: a cut-off row dropped from the cache, a budget too small for the tolerance,
    /// foreign samples, two populations, heavy tails.
    pub warnings: Vec<String>,
}

impl AutoFitted {
    /// The moments a covariance model is made of.
    pub fn moments(&self) -> Moments {
        self.fit.moments(self.dims)
    }

    /// One length scale for each tensor, from the same samples.
    ///
    /// # Errors
    /// Those of [`fit_tensors`]: [`EstimationError::NoTensors`] where the sampler has no tensors, or the
    /// samples went on from a cache without them.
    pub fn fit_tensors(&self) -> Result<TensorFits> {
        fit_tensors(&self.statistics, &self.tensors)
    }
}

/// Shares of the predicted total need that a chunk spans: at most a fifth, as published, so that a poor early
/// fit does not decide over everything; and not so few that the run stops at a lucky moment.
const CHUNK: (f64, f64) = (0.05, 0.2);

impl AutoFit {
    /// Draws and fits until the tolerance or the budget is reached.
    ///
    /// `progress` is called once before the first sample is drawn and after each one (of a sampler that draws
    /// many at once, after these); [`ControlFlow::Break`] stops the run. A run that ends at its budget
    /// returns its fit with a warning that says how many more examples are needed.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`](crate::Error::InvalidArgument) for an option outside its domain;
    ///   [`Error::Io`](crate::Error::Io) and [`Error::File`](crate::Error::File) for a cache that can't be
    ///   used, before anything is drawn; [`Error::Tensor`](crate::Error::Tensor) for a name that can't be a
    ///   column's; [`Error::Io`](crate::Error::Io) when a row can't be written, e.g. to a full disk.
    /// - [`EstimationError::Sampler`] when the sampler fails or returns a loss or norm that is not finite.
    /// - [`EstimationError::Interrupted`] when `progress` stops the run.
    /// - [`EstimationError::TooSmall`] when losses or gradients are so small that no further sample can help.
    /// - [`EstimationError::AllEqual`] when ten samples or more have the same loss, or the same norm.
    /// - [`EstimationError::Foreign`] when foreign samples decide over the fit, or prevent it, and
    ///   [`on_foreign`](Self::on_foreign) refuses them; [`EstimationError::Inseparable`] when too many are
    ///   foreign to leave them out.
    /// - [`EstimationError::BudgetExhausted`] when the budget ends without any fit, with the reason.
    ///
    /// The cache keeps every sample drawn in each of these cases.
    pub fn run(
        &self,
        sampler: &mut dyn Sampler,
        progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<AutoFitted> {
        let dims = sampler.dims();
        let mut guess = Guess::new(self, dims)?;
        check_tensors(sampler.tensors(), dims)?;
        let expected = (guess.design()?.examples_needed(self.tolerance) as u64).max(self.initial_budget);
        let mut run = Run::open(self, sampler, progress, expected)?;
        loop {
            let have = run.statistics.examples() as f64;
            let (fresh, chunk) = match run.fit() {
                Ok(now) if now.relative_std < self.tolerance => {
                    // A cache from elsewhere may hold more: use all of it.
                    if run.take_all_cached()? {
                        continue;
                    }
                    return Ok(run.finish(now, dims));
                }
                Ok(now) => {
                    guess.adopt(&now.fit);
                    let fresh = guess.design()?;
                    // 1/Var(β̂₀) of old and new samples together is at least the sum of both, so this many
                    // are enough however unfavourable the batch sizes of the old ones were.
                    let further = fresh.examples_needed(self.tolerance / now.widening)
                        - fresh.examples_needed(now.fit.relative_std);
                    let need = have + further;
                    (run.relative_std, run.needed) = (Some(now.relative_std), Some(need as u64));
                    // A poor early fit may predict far too much: at most as many again as there are.
                    (fresh, further.clamp(CHUNK.0 * need, CHUNK.1 * need).min(have) as u64)
                }
                Err(
                    failure @ (EstimationError::TooSmall { .. }
                    | EstimationError::Foreign { .. }
                    | EstimationError::Inseparable { .. }),
                ) => return Err(failure.into()),
                // Two of a few may agree by chance; more of them do not start to differ later.
                Err(failure @ EstimationError::AllEqual { count: 10.., .. }) => return Err(failure.into()),
                Err(failure) => {
                    (run.relative_std, run.needed) = (None, None);
                    guess.learn_from(&failure);
                    // In proportion, so that even a run without end fits and designs a few hundred times at
                    // most.
                    (guess.design()?, self.initial_budget.max((CHUNK.1 * have) as u64))
                }
            };
            let design = fresh.after(&run.statistics.counts(), chunk);
            let end = run.statistics.examples().saturating_add(chunk.max(1));
            if run.advance(&design, end)? == Advance::OutOfBudget {
                return match run.fit() {
                    Ok(now) => Ok(run.finish(now, dims)),
                    Err(
                        failure @ (EstimationError::Foreign { .. } | EstimationError::Inseparable { .. }),
                    ) => Err(failure.into()),
                    Err(source) => {
                        let (max_budget, examples) = (self.max_budget, run.statistics.examples());
                        let source = Box::new(source);
                        Err(EstimationError::BudgetExhausted { max_budget, examples, source }.into())
                    }
                };
            }
        }
    }
}
