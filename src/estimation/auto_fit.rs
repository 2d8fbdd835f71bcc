//! Draws samples until the fit is precise enough.

use super::EstimationError;
use super::cache::{Opened, SampleCache};
use super::design::{Design, DesignKind, DesignProblem, check_batch_sizes};
use super::fit::{Fit, try_fit};
use super::statistics::{Sample, SampleStatistics};
use super::tensors::{TensorDims, TensorFits, fit_tensors};
use crate::covariance::check_sizes;
use crate::{Error, Moments, Result};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::ops::ControlFlow;
use std::path::PathBuf;

/// What a mini-batch at a random initialisation gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchSample {
    /// The mean loss over the mini-batch.
    pub loss: f64,
    /// The squared norm of the gradient of that mean.
    pub sq_grad_norm: f64,
}

/// A mini-batch to evaluate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchRequest {
    /// The number of examples.
    pub batch_size: u64,
    /// What all its randomness should come from.
    pub seed: u64,
}

/// What a [`Sampler`] may fail with.
pub type SamplerError = Box<dyn std::error::Error + Send + Sync>;

/// Evaluates the cost to be optimised; the only thing auto-fit needs from its user.
///
/// A pair of d and a closure is a sampler as well; so is a pair of the tensors and a closure that returns the
/// squared gradient norm of each.
pub trait Sampler {
    /// d, the number of parameters.
    fn dims(&self) -> u64;

    /// Initialises the parameters at random, draws `batch_size` examples at random and evaluates loss and
    /// gradient.
    ///
    /// All randomness should come from `seed`: then the same samples come back after an interruption.
    ///
    /// # Errors
    /// Whatever prevents that; it ends the run, samples drawn before stay in the cache.
    fn sample(&mut self, batch_size: u64, seed: u64) -> std::result::Result<BatchSample, SamplerError>;

    /// How many mini-batches [`sample_many`](Self::sample_many) takes at once, at least 1. More than 1 is for
    /// devices, whose results are costly to wait for one by one; an interruption loses that many at most.
    fn most_at_once(&self) -> usize {
        1
    }

    /// Evaluates mini-batches and adds their results to `drawn`, in this order.
    ///
    /// # Errors
    /// As [`sample`](Self::sample). The results added before count.
    fn sample_many(
        &mut self,
        requests: &[BatchRequest],
        drawn: &mut Vec<BatchSample>,
    ) -> std::result::Result<(), SamplerError> {
        for request in requests {
            drawn.push(self.sample(request.batch_size, request.seed)?);
        }
        Ok(())
    }

    /// The tensors of parameters whose gradient norms [`sample_tensors`](Self::sample_tensors) gives; d is
    /// the sum of their sizes. None by default.
    fn tensors(&self) -> &[TensorDims] {
        &[]
    }

    /// As [`sample`](Self::sample), and adds the squared norm ‖g_k‖² of each tensor's part of the gradient to
    /// `sq_grad_norms`, in the order of [`tensors`](Self::tensors). Where there are tensors, it is called in
    /// place of the others, unless a cache without columns for them is gone on with.
    ///
    /// # Errors
    /// As [`sample`](Self::sample).
    fn sample_tensors(
        &mut self,
        batch_size: u64,
        seed: u64,
        sq_grad_norms: &mut Vec<f64>,
    ) -> std::result::Result<BatchSample, SamplerError> {
        let _ = sq_grad_norms;
        self.sample(batch_size, seed)
    }
}

/// The closure returns the mean loss and ‖g_k‖² of each tensor, whose sum ‖g‖² is.
impl<F> Sampler for (Vec<TensorDims>, F)
where
    F: FnMut(u64, u64) -> std::result::Result<(f64, Vec<f64>), SamplerError>,
{
    fn dims(&self) -> u64 {
        self.0.iter().fold(0, |sum, tensor| sum.saturating_add(tensor.dims))
    }

    fn sample(&mut self, batch_size: u64, seed: u64) -> std::result::Result<BatchSample, SamplerError> {
        self.sample_tensors(batch_size, seed, &mut Vec::new())
    }

    fn tensors(&self) -> &[TensorDims] {
        &self.0
    }

    fn sample_tensors(
        &mut self,
        batch_size: u64,
        seed: u64,
        sq_grad_norms: &mut Vec<f64>,
    ) -> std::result::Result<BatchSample, SamplerError> {
        let (loss, squares) = self.1(batch_size, seed)?;
        let sq_grad_norm = squares.iter().sum();
        sq_grad_norms.extend(squares);
        Ok(BatchSample { loss, sq_grad_norm })
    }
}

impl<F> Sampler for (u64, F)
where
    F: FnMut(u64, u64) -> std::result::Result<BatchSample, SamplerError>,
{
    fn dims(&self) -> u64 {
        self.0
    }

    fn sample(&mut self, batch_size: u64, seed: u64) -> std::result::Result<BatchSample, SamplerError> {
        self.1(batch_size, seed)
    }
}

/// Draws samples at batch sizes of its choice until the relative standard deviation of the fitted C(0) is
/// below a tolerance (paper, section "Variance estimation in detail", Eq. "relative std").
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
        }
    }
}

/// How far a run has come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Mini-batches so far.
    pub batches: u64,
    /// Examples so far.
    pub samples: u64,
    /// Examples that will have been needed in the end, by the last fit; `None` before the first.
    pub needed: Option<u64>,
    /// Relative standard deviation of C(0) in the last fit.
    pub relative_std: Option<f64>,
    /// Where it has to come below.
    pub tolerance: f64,
}

/// A finished run.
#[derive(Clone, Debug)]
pub struct AutoFitted {
    /// The fit to all samples.
    pub fit: Fit,
    /// d, as the sampler said.
    pub dims: u64,
    /// The tensors, as the sampler said.
    pub tensors: Vec<TensorDims>,
    /// The samples' statistics, for diagnostics or another fit.
    pub statistics: SampleStatistics,
    /// What the user should know: a cut-off row dropped from the cache, a budget too small for the tolerance.
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

/// The published method's guess of (C(0), C_ε(0)) before there are samples; only the ratio matters.
const PRIOR: (f64, f64) = (0.05, 1.0);

/// Shares of the predicted total need that a chunk spans: at most a fifth, as published, so that a poor early
/// fit does not decide over everything; and not so few that the run stops at a lucky moment.
const CHUNK: (f64, f64) = (0.05, 0.2);

/// The Gibbs form lists every batch size it may draw. 2²⁰ is beyond the mini-batches that anyone draws at
/// once.
const LARGEST_BATCH: u64 = 1 << 20;

impl AutoFit {
    /// Draws and fits until the tolerance or the budget is reached.
    ///
    /// `progress` is called once before the first sample is drawn and after each one (of a sampler that draws
    /// many at once, after these); [`ControlFlow::Break`] stops the run. A run that ends at its budget
    /// returns its fit with a warning that says how many more examples are needed.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] for an option outside its domain; [`Error::Io`] and [`Error::File`] for a
    ///   cache that can't be used, before anything is drawn; [`Error::Tensor`] for a name that can't be a
    ///   column's; [`Error::Io`] when a row can't be written, e.g. to a full disk.
    /// - [`EstimationError::Sampler`] when the sampler fails or returns a loss or norm that is not finite.
    /// - [`EstimationError::Interrupted`] when `progress` stops the run.
    /// - [`EstimationError::TooSmall`] when losses or gradients are so small that no further sample can help.
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
        let mut run = Run::open(self, sampler, progress)?;
        loop {
            let have = run.statistics.samples() as f64;
            let (fresh, chunk) = match try_fit(&run.statistics) {
                Ok(fit) if fit.relative_std < self.tolerance => {
                    // A cache from elsewhere may hold more: use all of it.
                    if run.take_all_cached()? {
                        continue;
                    }
                    return Ok(run.finish(fit, dims));
                }
                Ok(fit) => {
                    guess.adopt(&fit);
                    let fresh = guess.design()?;
                    // 1/Var(β̂₀) of old and new samples together is at least the sum of both, so this many
                    // are enough however unfavourable the batch sizes of the old ones were.
                    let further =
                        fresh.samples_needed(self.tolerance) - fresh.samples_needed(fit.relative_std);
                    let need = have + further;
                    (run.relative_std, run.needed) = (Some(fit.relative_std), Some(need as u64));
                    // A poor early fit may predict far too much: at most as many again as there are.
                    (fresh, further.clamp(CHUNK.0 * need, CHUNK.1 * need).min(have) as u64)
                }
                Err(failure @ EstimationError::TooSmall { .. }) => return Err(failure.into()),
                Err(failure) => {
                    (run.relative_std, run.needed) = (None, None);
                    guess.learn_from(&failure);
                    // In proportion, so that even a run without end fits and designs a few hundred times at
                    // most.
                    (guess.design()?, self.initial_budget.max((CHUNK.1 * have) as u64))
                }
            };
            let design = fresh.after(&run.statistics.counts(), chunk);
            let end = run.statistics.samples().saturating_add(chunk.max(1));
            if run.advance(&design, end)? == Advance::OutOfBudget {
                return match try_fit(&run.statistics) {
                    Ok(fit) => Ok(run.finish(fit, dims)),
                    Err(source) => {
                        let (max_budget, samples) = (self.max_budget, run.statistics.samples());
                        let source = Box::new(source);
                        Err(EstimationError::BudgetExhausted { max_budget, samples, source }.into())
                    }
                };
            }
        }
    }
}

/// The best knowledge of (C(0), C_ε(0)) so far, which batch sizes are designed for.
struct Guess {
    problem: DesignProblem,
    kind: DesignKind,
    /// The last design and what it was made for: a guess often stays as it is.
    designed: Option<(DesignProblem, Design)>,
}

impl Guess {
    fn new(options: &AutoFit, dims: u64) -> Result<Self> {
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
    fn design(&mut self) -> Result<&Design> {
        let design = match self.designed.take() {
            Some((problem, design)) if problem == self.problem => design,
            _ => self.problem.design(self.kind)?,
        };
        Ok(&self.designed.insert((self.problem, design)).1)
    }

    fn adopt(&mut self, fit: &Fit) {
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
    fn learn_from(&mut self, failure: &EstimationError) {
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

#[derive(PartialEq)]
enum Advance {
    Done,
    OutOfBudget,
}

/// The samples of a run: first the cached ones in their order, then new ones.
struct Run<'a> {
    options: &'a AutoFit,
    sampler: &'a mut dyn Sampler,
    progress: &'a mut dyn FnMut(&Progress) -> ControlFlow<()>,
    cache: Option<SampleCache>,
    cached: std::vec::IntoIter<(Sample, Vec<f64>)>,
    /// The sampler's tensors; empty where the cache has no columns for them.
    tensors: Vec<TensorDims>,
    statistics: SampleStatistics,
    relative_std: Option<f64>,
    needed: Option<u64>,
    /// Whether `progress` has been called.
    reported: bool,
    warnings: Vec<String>,
}

impl<'a> Run<'a> {
    fn open(
        options: &'a AutoFit,
        sampler: &'a mut dyn Sampler,
        progress: &'a mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<Self> {
        let mut tensors = sampler.tensors().to_vec();
        let (cache, cached, warning) = match &options.cache {
            Some(path) => {
                let Opened { cache, samples, warning } = SampleCache::open(path, &tensors)?;
                if !cache.has_tensors() {
                    tensors.clear();
                }
                (Some(cache), samples, warning)
            }
            None => (None, Vec::new(), None),
        };
        Ok(Run {
            options,
            sampler,
            progress,
            cache,
            cached: cached.into_iter(),
            tensors,
            statistics: SampleStatistics::new(),
            relative_std: None,
            needed: None,
            reported: false,
            warnings: warning.into_iter().collect(),
        })
    }

    /// Adds all cached samples that are left; whether there were any.
    fn take_all_cached(&mut self) -> Result<bool> {
        let any = self.cached.len() > 0;
        while let Some((sample, sq_grad_norms)) = self.cached.next() {
            self.push(&sample, &sq_grad_norms)?;
        }
        Ok(any)
    }

    fn push(&mut self, sample: &Sample, sq_grad_norms: &[f64]) -> Result<()> {
        let names = self.tensors.iter().map(|tensor| tensor.name.as_str());
        self.statistics.push_tensors(sample, names.zip(sq_grad_norms.iter().copied()))
    }

    /// Adds samples until there are `end` examples.
    fn advance(&mut self, design: &Design, end: u64) -> Result<Advance> {
        while self.statistics.samples() < end {
            if let Some((sample, sq_grad_norms)) = self.cached.next() {
                self.push(&sample, &sq_grad_norms)?;
                continue;
            }
            if !self.reported {
                self.report()?;
            }
            let requests = self.requests(design, end);
            if requests.is_empty() {
                return Ok(Advance::OutOfBudget);
            }
            self.draw(&requests)?;
            self.report()?;
        }
        Ok(Advance::Done)
    }

    /// The next mini-batches: as many as the sampler takes, until there are `end` examples or the budget is
    /// used up.
    fn requests(&self, design: &Design, end: u64) -> Vec<BatchRequest> {
        let (seed, max_budget) = (self.options.seed, self.options.max_budget);
        let (mut index, mut samples) = (self.statistics.batches(), self.statistics.samples());
        let most = if self.tensors.is_empty() { self.sampler.most_at_once().max(1) } else { 1 };
        let mut requests = Vec::new();
        while samples < end && requests.len() < most {
            let batch_size = design.quantile(quantile(seed, index));
            samples = samples.saturating_add(batch_size);
            if samples > max_budget {
                break;
            }
            requests.push(BatchRequest { batch_size, seed: stream(seed, index) });
            index += 1;
        }
        requests
    }

    fn draw(&mut self, requests: &[BatchRequest]) -> Result<()> {
        if let ([request], false) = (requests, self.tensors.is_empty()) {
            return self.draw_tensors(request);
        }
        let mut drawn = Vec::with_capacity(requests.len());
        let outcome = self.sampler.sample_many(requests, &mut drawn);
        for (request, sample) in requests.iter().zip(&drawn) {
            self.keep(request.batch_size, sample, &[])?;
        }
        let missing = requests.get(drawn.len());
        let source = match outcome {
            Ok(()) if missing.is_none() => return Ok(()),
            Ok(()) => "the sampler gave fewer samples than asked for".into(),
            Err(source) => source,
        };
        let of = missing.or(requests.last()).map_or(0, |request| request.batch_size);
        Err(self.failed(of, source))
    }

    fn draw_tensors(&mut self, &BatchRequest { batch_size, seed }: &BatchRequest) -> Result<()> {
        let mut sq_grad_norms = Vec::with_capacity(self.tensors.len());
        let sample = self
            .sampler
            .sample_tensors(batch_size, seed, &mut sq_grad_norms)
            .map_err(|source| self.failed(batch_size, source))?;
        if sq_grad_norms.len() != self.tensors.len() {
            let (found, tensors) = (sq_grad_norms.len(), self.tensors.len());
            let problem = format!("the sampler gave {found} squared gradient norms for {tensors} tensors");
            return Err(self.failed(batch_size, problem.into()));
        }
        self.keep(batch_size, &sample, &sq_grad_norms)
    }

    fn keep(
        &mut self,
        batch_size: u64,
        &BatchSample { loss, sq_grad_norm }: &BatchSample,
        sq_grad_norms: &[f64],
    ) -> Result<()> {
        let checked = Sample { loss, sq_grad_norm, batch_size }.validate();
        checked.map_err(|e| self.failed(batch_size, e.into()))?;
        // The cache stores the norm: take what a resumed run will read.
        let grad_norm = sq_grad_norm.sqrt();
        let sample = Sample { loss, sq_grad_norm: grad_norm.powi(2), batch_size };
        self.push(&sample, sq_grad_norms).map_err(|e| self.failed(batch_size, e.into()))?;
        match &mut self.cache {
            Some(cache) => cache.append(loss, grad_norm, batch_size, sq_grad_norms),
            None => Ok(()),
        }
    }

    /// The error of the next sample.
    fn failed(&self, batch_size: u64, source: SamplerError) -> Error {
        let (index, cache) = (self.statistics.batches(), self.options.cache.clone());
        EstimationError::Sampler { index, batch_size, cache, source }.into()
    }

    fn report(&mut self) -> Result<()> {
        self.reported = true;
        let (batches, samples) = (self.statistics.batches(), self.statistics.samples());
        let Run { needed, relative_std, .. } = *self;
        let now = Progress { batches, samples, needed, relative_std, tolerance: self.options.tolerance };
        match (self.progress)(&now) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => {
                let cache = self.options.cache.clone();
                Err(EstimationError::Interrupted { batches, samples, cache }.into())
            }
        }
    }

    fn finish(self, fit: Fit, dims: u64) -> AutoFitted {
        let mut warnings = self.warnings;
        if let Some(unreliable) = fit.reliability(self.options.tolerance) {
            warnings.push(format!("max_budget = {} is used up: {unreliable}", self.options.max_budget));
        }
        let tensors = self.sampler.tensors().to_vec();
        AutoFitted { fit, dims, tensors, statistics: self.statistics, warnings }
    }
}

/// An error for names that would not come back from a file, and for sizes that do not add up to d.
fn check_tensors(tensors: &[TensorDims], dims: u64) -> Result<()> {
    for TensorDims { name, .. } in tensors {
        if name.is_empty() || name.trim() != name || name.contains(['\n', '\r']) {
            let problem = "is no name for a column: give one that is not empty, without line breaks and without white \
                           space at its ends";
            return Err(Error::tensor(name, problem));
        }
    }
    check_sizes(tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.dims)), dims)
}

/// A random number of its own for each sample, so that a resumed run goes on as if it had not been
/// interrupted.
fn stream(seed: u64, index: u64) -> u64 {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(index);
    rng.next_u64()
}

/// Where in the design's distribution the sample's batch size lies: Weyl's sequence of the golden ratio from
/// a random start. Any stretch of it fills [0, 1) evenly, so the counts of a chunk follow the design far more
/// closely than independent draws would, and no draw depends on where a chunk or a run began.
fn quantile(seed: u64, index: u64) -> f64 {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let position = stream(seed, u64::MAX).wrapping_add(index.wrapping_mul(GOLDEN));
    (position >> 11) as f64 / (1u64 << 53) as f64
}
