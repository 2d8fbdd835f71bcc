//! What can go wrong on the way from samples to a fit.

use super::Findings;
use std::path::PathBuf;

/// Why samples do not determine a covariance, or why no more of them could be drawn.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EstimationError {
    /// A sample is outside its domain.
    #[error("sample with {quantity} = {value:?}: {expected}")]
    InvalidSample {
        /// `loss`, `sq_grad_norm`, `grad_norm` or `batchsize`.
        quantity: &'static str,
        /// The value that was given.
        value: f64,
        /// What it has to be.
        expected: &'static str,
    },
    /// The squared gradient norm of a tensor is outside its domain, or is given twice.
    #[error("sample with the squared gradient norm {value:?} of tensor `{tensor}`: {expected}")]
    InvalidTensor {
        /// The tensor's name.
        tensor: String,
        /// The value that was given.
        value: f64,
        /// What it has to be.
        expected: &'static str,
    },
    /// Samples with the gradient norms of different tensors, or some with and some without, do not mix.
    #[error(
        "some samples have the squared gradient norm of tensor `{tensor}` and others have not: give all samples those \
         of the same tensors, or leave them out everywhere"
    )]
    OtherTensors {
        /// A tensor that is not in all samples.
        tensor: String,
    },
    /// There is nothing to fit for each tensor.
    #[error(
        "the samples have no squared gradient norms of tensors (columns `sq_grad_norm:<tensor>`), or not all those of \
         the same tensors: draw them anew, into a new file, with a sampler that gives them"
    )]
    NoTensors,
    /// A line in 1/b needs two different batch sizes.
    #[error(
        "{found} distinct batch size(s): the variance and its noise share can only be told apart from at least 2; \
         draw samples at another batch size as well, best one several times larger"
    )]
    TooFewBatchSizes {
        /// The number of distinct batch sizes among the samples.
        found: usize,
    },
    /// The batch sizes differ by too little for a line in 1/b.
    #[error(
        "batch sizes from {smallest} to {largest} are too close to each other to tell the variance and its noise share \
         apart; draw samples at another batch size as well, best one several times larger or smaller"
    )]
    BatchSizesTooClose {
        /// The smallest batch size among the samples.
        smallest: u64,
        /// The largest one.
        largest: u64,
    },
    /// Squared deviations of the losses, or squared gradient norms, are so small that products of them
    /// underflow.
    #[error(
        "{quantity} is about {value:e}, below 1e-150, where f64 loses digits; multiply the loss by a constant, so \
         that it is of order 1, and draw the samples again"
    )]
    TooSmall {
        /// `variance` or `grad_variance`.
        quantity: &'static str,
        /// The size that was found.
        value: f64,
    },
    /// C(0) or −d·C'(0), the intercept of the regression on 1/b, came out non-positive.
    #[error(
        "fitted {quantity} = {value:e} is not positive: at these batch sizes the mini-batch noise hides it; draw more \
         samples, and at larger batch sizes"
    )]
    NonPositiveIntercept {
        /// `variance` or `grad_variance`.
        quantity: &'static str,
        /// The fitted value.
        value: f64,
    },
    /// C_ε(0) or −d·C'_ε(0), the slope of the regression on 1/b, came out negative.
    #[error(
        "fitted {quantity} = {value:e} is negative: mini-batches of the sampled sizes show no measurable noise, or the \
         large batches come from another distribution than the small ones; draw more samples, and at smaller batch sizes"
    )]
    NegativeSlope {
        /// `noise_variance` or `noise_grad_variance`.
        quantity: &'static str,
        /// The fitted value.
        value: f64,
    },
    /// The iterated weighted least squares did not settle.
    #[error(
        "the fit of {quantity} still changed by {change:e} (relative) after {iterations} iterations: the samples do not \
         determine it; draw more samples, and at larger batch sizes"
    )]
    NotConverged {
        /// `variance` or `grad_variance`.
        quantity: &'static str,
        /// Number of reweightings done.
        iterations: u32,
        /// Largest relative change of a coefficient in the last one.
        change: f64,
    },
    /// All losses, or all gradient norms, are the same number: no draws of a random function.
    #[error(
        "all {count} samples have the {quantity} {value}: the column holds a constant, or each evaluation is of the same \
         parameters and examples; initialise and draw anew for each sample, and take the norm before any clipping"
    )]
    AllEqual {
        /// `loss` or `grad_norm`.
        quantity: &'static str,
        /// The number.
        value: f64,
        /// How many samples there are.
        count: u64,
    },
    /// Foreign samples decide over the fit, or prevent it.
    #[error(
        "{findings}; they decide over the fit ({consequence}): look at these samples, then delete them, or leave them \
         out with a robust fit"
    )]
    Foreign {
        /// Which samples.
        findings: Box<Findings>,
        /// What they do to the fit.
        consequence: String,
    },
    /// So many samples are foreign that none can be left out as an exception.
    #[error(
        "{findings}; these are too many to be exceptions that a robust fit leaves out: fit the samples of each network \
         and data set from a file of their own"
    )]
    Inseparable {
        /// What was found.
        findings: Box<Findings>,
    },
    /// Serialised statistics cannot be used.
    #[error("sample statistics: {0}")]
    Statistics(String),
    /// The user's sampler reported an error; samples drawn before are in the cache, if there is one.
    #[error("drawing sample {index} (batch size {batch_size}) failed: {source}{}", kept(.cache))]
    Sampler {
        /// Number of the sample, from 0.
        index: u64,
        /// The batch size that was asked for.
        batch_size: u64,
        /// Where the samples drawn before are kept.
        cache: Option<PathBuf>,
        /// The sampler's error, or what is wrong with the sample it returned.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The progress callback asked to stop.
    #[error("stopped after {batches} batches ({examples} examples){}", kept(.cache))]
    Interrupted {
        /// Mini-batches drawn so far.
        batches: u64,
        /// Examples drawn so far.
        examples: u64,
        /// Where they are kept.
        cache: Option<PathBuf>,
    },
    /// The budget ended before any fit was possible.
    #[error(
        "no fit within max_budget = {max_budget} examples ({examples} drawn): {source}; or raise max_budget"
    )]
    BudgetExhausted {
        /// The budget, in examples.
        max_budget: u64,
        /// Examples drawn.
        examples: u64,
        /// Why the samples drawn determine no fit.
        source: Box<EstimationError>,
    },
}

fn kept(cache: &Option<PathBuf>) -> String {
    match cache {
        Some(path) => {
            format!("; {} keeps every sample drawn, run again with it to go on from there", path.display())
        }
        None => "; give a cache file to keep samples across runs".to_string(),
    }
}
