//! The samples of a run: from the cache and from the sampler, in an order that an interruption does not
//! change.

use std::ops::ControlFlow;
use std::time::Instant;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::sampler::{BatchRequest, BatchSample, Sampler, SamplerError};
use super::{AutoFit, AutoFitted, Cost, OnForeign, Progress};
use crate::estimation::cache::{Opened, SampleCache};
use crate::estimation::fit::try_fit;
use crate::estimation::sample_fit::blame;
use crate::estimation::{
    Design, Diagnostics, EstimationError, Findings, Fit, Sample, SampleStatistics, SampleTable, TensorDims,
};
use crate::{Error, Result};

/// How a stretch of a run ended.
#[derive(PartialEq)]
pub(super) enum Advance {
    Done,
    OutOfBudget,
}

/// What the samples so far say.
pub(super) struct Now {
    pub fit: Fit,
    /// By how much heavy tails widen the fit's own relative standard deviation; 1 without.
    pub widening: f64,
    /// The relative standard deviation with heavy tails allowed for.
    pub relative_std: f64,
    findings: Findings,
    /// Those of the samples that were fitted, where not all were.
    statistics: Option<SampleStatistics>,
    /// The fit without foreign samples, where there are any that were not left out.
    without_foreign: Option<Fit>,
}

/// New samples and since when they are drawn.
struct Drawn {
    started: Instant,
    batches: u64,
    examples: u64,
}

impl Drawn {
    fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// How long so many further examples take, judged by those drawn.
    fn seconds_for(&self, further: u64) -> Option<f64> {
        (self.examples > 0).then(|| further as f64 * self.seconds() / self.examples as f64)
    }
}

/// The samples of a run: first the cached ones in their order, then new ones.
pub(super) struct Run<'a> {
    options: &'a AutoFit,
    sampler: &'a mut dyn Sampler,
    progress: &'a mut dyn FnMut(&Progress) -> ControlFlow<()>,
    cache: Option<SampleCache>,
    cached: std::vec::IntoIter<(Sample, Vec<f64>)>,
    /// The sampler's tensors; empty where the cache has no columns for them.
    tensors: Vec<TensorDims>,
    /// Of all samples.
    pub(super) statistics: SampleStatistics,
    /// All samples: which are foreign shows in no statistics.
    table: SampleTable,
    pub(super) relative_std: Option<f64>,
    pub(super) needed: Option<u64>,
    /// Whether `progress` has been called.
    reported: bool,
    /// What the prior guess of the variances would need, before there is a fit.
    expected: u64,
    /// What was drawn in this run, the cache apart.
    drawn: Drawn,
    warnings: Vec<String>,
}

impl<'a> Run<'a> {
    pub(super) fn open(
        options: &'a AutoFit,
        sampler: &'a mut dyn Sampler,
        progress: &'a mut dyn FnMut(&Progress) -> ControlFlow<()>,
        expected: u64,
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
            table: SampleTable {
                tensors: tensors.iter().map(|tensor| tensor.name.clone()).collect(),
                ..Default::default()
            },
            tensors,
            statistics: SampleStatistics::new(),
            relative_std: None,
            needed: None,
            reported: false,
            expected,
            drawn: Drawn { started: Instant::now(), batches: 0, examples: 0 },
            warnings: warning.into_iter().collect(),
        })
    }

    /// Adds all cached samples that are left; whether there were any.
    pub(super) fn take_all_cached(&mut self) -> Result<bool> {
        let any = self.cached.len() > 0;
        while let Some((sample, sq_grad_norms)) = self.cached.next() {
            self.push(&sample, &sq_grad_norms)?;
        }
        Ok(any)
    }

    fn push(&mut self, sample: &Sample, sq_grad_norms: &[f64]) -> Result<()> {
        let names = self.tensors.iter().map(|tensor| tensor.name.as_str());
        self.statistics.push_tensors(sample, names.zip(sq_grad_norms.iter().copied()))?;
        self.table.samples.push(*sample);
        self.table.sq_grad_norms.push(sq_grad_norms.to_vec());
        Ok(())
    }

    /// Fits what there is, and judges it.
    pub(super) fn fit(&self) -> std::result::Result<Now, EstimationError> {
        let options = self.options;
        let findings = self.table.findings();
        let left_out = (!findings.foreign.is_empty() && findings.is_separable())
            .then(|| self.table.without(&findings).ok())
            .flatten();
        let (statistics, without_foreign) = match (options.on_foreign, left_out) {
            (OnForeign::LeaveOut, Some(statistics)) => (Some(statistics), None),
            (_, left_out) => (None, left_out.and_then(|statistics| try_fit(&statistics).ok())),
        };
        let gross = findings.foreign.iter().any(|foreign| foreign.deviations.abs() > GROSS);
        let fitted = statistics.as_ref().unwrap_or(&self.statistics);
        let fit = match try_fit(fitted) {
            Ok(fit) => fit,
            // What is foreign among others stays so, and no further sample helps: the others have a fit. Two
            // populations may come about by chance where there are few samples.
            Err(failure) if options.on_foreign == OnForeign::Refuse && gross && without_foreign.is_some() => {
                return Err(blame(failure, findings));
            }
            Err(failure) => return Err(failure),
        };
        if let (OnForeign::Refuse, true, Some(without)) = (options.on_foreign, gross, &without_foreign) {
            let quantities = [
                ("variance", fit.variance, without.variance),
                ("grad_variance", fit.grad_variance, without.grad_variance),
            ];
            for (quantity, with, without) in quantities {
                if with > DECISIVE * without || without > DECISIVE * with {
                    let consequence = format!("with them {quantity} = {with:.3e}, without {without:.3e}");
                    return Err(EstimationError::Foreign { findings: Box::new(findings), consequence });
                }
            }
        }
        let relative_std = Diagnostics::new(fitted, &fit, None).relative_std(&fit);
        let widening = relative_std / fit.relative_std;
        Ok(Now { fit, widening, relative_std, findings, statistics, without_foreign })
    }

    /// Adds samples until there are `end` examples.
    pub(super) fn advance(&mut self, design: &Design, end: u64) -> Result<Advance> {
        while self.statistics.examples() < end {
            if let Some((sample, sq_grad_norms)) = self.cached.next() {
                self.push(&sample, &sq_grad_norms)?;
                continue;
            }
            if !self.reported {
                self.report()?;
                self.drawn.started = Instant::now();
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
        let (mut index, mut examples) = (self.statistics.batches(), self.statistics.examples());
        let most = if self.tensors.is_empty() { self.sampler.most_at_once().max(1) } else { 1 };
        let mut requests = Vec::new();
        while examples < end && requests.len() < most {
            let batch_size = design.quantile(quantile(seed, index));
            examples = examples.saturating_add(batch_size);
            if examples > max_budget {
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
        self.drawn.batches += 1;
        self.drawn.examples = self.drawn.examples.saturating_add(batch_size);
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
        let (batches, examples) = (self.statistics.batches(), self.statistics.examples());
        let Run { needed, relative_std, .. } = *self;
        let expected = needed.unwrap_or(self.expected).min(self.options.max_budget).max(examples);
        let now = Progress {
            batches,
            examples,
            needed,
            relative_std,
            tolerance: self.options.tolerance,
            expected,
            remaining_seconds: self.drawn.seconds_for(expected - examples),
        };
        match (self.progress)(&now) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => {
                let cache = self.options.cache.clone();
                Err(EstimationError::Interrupted { batches, examples, cache }.into())
            }
        }
    }

    pub(super) fn finish(self, now: Now, dims: u64) -> AutoFitted {
        let Now { fit, widening, relative_std, findings, statistics, without_foreign } = now;
        let (mut warnings, tolerance) = (self.warnings, self.options.tolerance);
        if let Some(unreliable) = fit.reliability(tolerance) {
            warnings.push(format!("max_budget = {} is used up: {unreliable}", self.options.max_budget));
        } else if relative_std > tolerance {
            warnings.push(format!(
                "max_budget = {} is used up: the losses have heavy tails, so the relative standard deviation of the \
                 variance is {relative_std:.3} rather than {:.3}, which exceeds the tolerance {tolerance}",
                self.options.max_budget,
                relative_std / widening
            ));
        }
        if !findings.is_empty() {
            let done = match (self.options.on_foreign, &statistics, &without_foreign) {
                (_, Some(_), _) => "; these are left out of the fit".to_string(),
                (_, None, Some(without)) => {
                    format!("; they are part of the fit: without them variance = {:.3e}", without.variance)
                }
                _ => String::new(),
            };
            warnings.push(format!("{findings}{done}"));
        }
        let tensors = self.sampler.tensors().to_vec();
        let Drawn { batches, examples, .. } = self.drawn;
        // Variances of estimates fall with 1/n: half the error takes four times the samples.
        let halving_examples = fit.examples.saturating_mul(3);
        let cost = Cost {
            batches,
            examples,
            seconds: if batches > 0 { self.drawn.seconds() } else { 0.0 },
            halving_examples,
            halving_seconds: self.drawn.seconds_for(halving_examples),
        };
        AutoFitted {
            cost,
            converged: relative_std < tolerance && findings.populations.is_none(),
            fit,
            findings,
            dims,
            tensors,
            statistics: statistics.unwrap_or(self.statistics),
            warnings,
        }
    }
}

/// By this factor foreign samples have to change a variance to be refused. What heavy tails do to it is less
/// as a rule, and further samples make up for that.
const DECISIVE: f64 = 2.0;

/// So many standard deviations from the others one of them has to be. Heavy tails such as Laplace's reach
/// beyond what is foreign to Gaussian losses, but not as far as this.
const GROSS: f64 = 20.0;

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
