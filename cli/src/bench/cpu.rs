//! Steps on the processor in turn with plain loops that move as many bytes in as many passes, and what
//! tensors cost that are too small to count.

use std::hint::black_box;
use std::time::Instant;

use rayon::ThreadPool;
use rfdescent::optimizer::{Adaptive, Fitted, Method, Optimizer, Options, StepInput, TensorSpec};
use rfdescent::{DType, GradRef, ParamMut};

use super::plain::Loop;
use super::{Case, Element, LOSS, applied, cut, cut_mut, values};
use crate::error::CliError;

/// Rounds: as many as fit in this time, within these limits.
const SECONDS: f64 = 0.4;
const ROUNDS: std::ops::RangeInclusive<usize> = 5..=400;
/// Repeats of each of the two in a round, the fastest of which counts: the first finds what the other left in
/// the caches.
const REPEATS: usize = 3;
/// Where steps begin to use several threads; below, a loop on one thread is what to compare with.
pub const PARALLEL: usize = 131_072;

/// How steps are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    Fitted,
    Momentum,
    Adaptive,
}

/// How parameters are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kept {
    /// In the format of the list, rounded to nearest.
    Nearest,
    /// The same, rounded stochastically.
    Stochastic,
    /// As f32 master weights beside.
    Masters,
}

/// A kind of step.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub rule: Rule,
    pub kept: Kept,
}

impl Kind {
    /// All that there are of a format.
    pub fn all(dtype: DType) -> Vec<Kind> {
        let kept = [Kept::Nearest, Kept::Masters, Kept::Stochastic];
        let kept = if dtype.is_half() { &kept[..] } else { &kept[..1] };
        let rules = [Rule::Fitted, Rule::Momentum, Rule::Adaptive];
        kept.iter().flat_map(|&kept| rules.map(|rule| Kind { rule, kept })).collect()
    }

    /// In words.
    pub fn name(&self) -> String {
        let rule = match self.rule {
            Rule::Fitted => "fitted",
            Rule::Momentum => "momentum",
            Rule::Adaptive => "adaptive",
        };
        let kept = match self.kept {
            Kept::Nearest => "",
            Kept::Stochastic => ", stochastic rounding",
            Kept::Masters => ", master weights",
        };
        format!("{rule}{kept}")
    }

    /// What a step reads and writes, with parameters and gradients of so many bytes.
    pub fn bytes_per_parameter(&self, size: usize) -> usize {
        // The gradients are read twice, the parameters read and written; beside master weights only written.
        let parameter = if self.kept == Kept::Masters { size + 2 * size_of::<f32>() } else { 2 * size };
        // Velocities are read and written, with the adaptive method read once more.
        let velocity = match self.rule {
            Rule::Fitted => 0,
            Rule::Momentum => 2 * size_of::<f32>(),
            Rule::Adaptive => 3 * size_of::<f32>(),
        };
        2 * size + parameter + velocity
    }

    fn method(&self, case: &Case) -> Method {
        match self.rule {
            Rule::Fitted => case.fitted(),
            Rule::Momentum => Fitted::new(case.model.clone()).with_momentum(0.9).into(),
            Rule::Adaptive => Adaptive::default().into(),
        }
    }

    fn options(&self) -> Options {
        Options {
            master_weights: self.kept == Kept::Masters,
            stochastic_rounding: (self.kept == Kept::Stochastic).then_some(1),
            ..Options::default()
        }
    }
}

/// What came out of one kind of step on so many threads.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// Medians over the rounds, in seconds.
    pub step: f64,
    pub plain_loop: f64,
    /// Of the step to the loop in the same round: the median and what a quarter of the rounds stay below and
    /// above.
    pub ratio: f64,
    pub quartiles: [f64; 2],
    /// Of a parameter after the first step.
    pub largest_error: f64,
}

/// Times a kind of step, whose first is checked, on as many threads as steps use.
pub fn measure<E: Element>(case: &Case, kind: Kind) -> Result<Times, CliError> {
    let before = case.params::<E>()?;
    let grads = case.grads::<E>()?;
    let mut params = case.params::<E>()?;
    let grad_list: Vec<_> = cut(&grads, &case.lengths).into_iter().map(E::grad).collect();
    let mut optimizer = Optimizer::new(kind.method(case), kind.options(), case.specs::<E>())?;
    let mut step = |params: &mut [E]| {
        let mut list: Vec<_> = cut_mut(params, &case.lengths).into_iter().map(E::param).collect();
        let started = Instant::now();
        let report = optimizer.step(&mut list, &grad_list, &StepInput::new(LOSS))?;
        let seconds = started.elapsed().as_secs_f64();
        applied(&report)?;
        Ok::<_, CliError>((report, seconds))
    };
    let (report, _) = step(&mut params)?;
    let largest_error = case.check(&kind.method(case), &before, &grads, &params, &report)?;
    let zeros = |is: bool| values::<f32>(if is { case.total } else { 0 }, 3);
    let mut plain = Loop {
        params: before,
        master: zeros(kind.kept == Kept::Masters)?,
        velocity: zeros(kind.rule != Rule::Fitted)?,
        averages: kind.rule == Rule::Adaptive,
        rate: 1e-6,
    };
    let pool = pool(case.total)?;
    let (mut steps, mut loops, mut ratios) = (vec![], vec![], vec![]);
    let started = Instant::now();
    for round in 1..=*ROUNDS.end() {
        let own = fastest(|| Ok(step(&mut params)?.1))?;
        let other = fastest(|| Ok(seconds(|| plain.run(&grads, pool.as_ref()))))?;
        steps.push(own);
        loops.push(other);
        ratios.push(own / other);
        if round >= *ROUNDS.start() && started.elapsed().as_secs_f64() >= SECONDS {
            break;
        }
    }
    black_box(&plain.params);
    Ok(Times {
        step: quantile(&mut steps, 0.5),
        plain_loop: quantile(&mut loops, 0.5),
        ratio: quantile(&mut ratios, 0.5),
        quartiles: [quantile(&mut ratios, 0.25), quantile(&mut ratios, 0.75)],
        largest_error,
    })
}

/// Threads for a loop beside steps over so many parameters; `None` where steps use one.
fn pool(total: usize) -> Result<Option<ThreadPool>, CliError> {
    let threads = if total < PARALLEL { 1 } else { rfdescent::threads() };
    if threads == 1 {
        return Ok(None);
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.map(Some).map_err(|error| CliError::Data(format!("no threads for the plain loop: {error}")))
}

/// Tensors of so many elements.
const SMALL: usize = 64;
/// As many of them are compared with one.
const MANY: usize = 1000;
/// Tensors that are timed together, step after step: in so short a time other programs seldom interrupt.
const TOGETHER: usize = 5000;

/// What small tensors cost, in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Overhead {
    /// One more vector of 64 elements.
    pub tensor: f64,
    /// A step over a single element.
    pub element: f64,
}

/// That of steps in f32.
pub fn overhead(rule: Rule) -> Result<Overhead, CliError> {
    let one = small_step(rule, 1, SMALL)?;
    let many = small_step(rule, MANY, SMALL)?;
    Ok(Overhead { tensor: (many - one) / (MANY - 1) as f64, element: small_step(rule, 1, 1)? })
}

/// The time that a tenth of steps over so many vectors of so many elements stay below.
fn small_step(rule: Rule, tensors: usize, len: usize) -> Result<f64, CliError> {
    let case = Case::new(tensors * len, tensors)?;
    let kind = Kind { rule, kept: Kept::Nearest };
    let (mut params, grads) = (case.params::<f32>()?, case.grads::<f32>()?);
    let specs = (0..tensors).map(|k| TensorSpec::new(format!("tensor {k}"), &[len], DType::F32)).collect();
    let mut optimizer = Optimizer::new(kind.method(&case), kind.options(), specs)?;
    let mut params: Vec<ParamMut<'_>> =
        cut_mut(&mut params, &case.lengths).into_iter().map(f32::param).collect();
    let grads: Vec<GradRef<'_>> = cut(&grads, &case.lengths).into_iter().map(f32::grad).collect();
    let steps = TOGETHER / tensors;
    let mut times = Vec::new();
    let started = Instant::now();
    while times.len() < *ROUNDS.start() || started.elapsed().as_secs_f64() < SECONDS {
        let mut skipped = false;
        let all = seconds(|| {
            for _ in 0..steps {
                let report = optimizer.step(&mut params, &grads, &StepInput::new(LOSS));
                skipped |= !report.is_ok_and(|report| applied(&report).is_ok());
            }
        });
        if skipped {
            return Err(super::wrong("one over small tensors was skipped".into()));
        }
        times.push(all / steps as f64);
    }
    Ok(quantile(&mut times, 0.1))
}

fn fastest(mut once: impl FnMut() -> Result<f64, CliError>) -> Result<f64, CliError> {
    (0..REPEATS).try_fold(f64::INFINITY, |least, _| Ok(once()?.min(least)))
}

fn seconds(work: impl FnOnce()) -> f64 {
    let started = Instant::now();
    work();
    started.elapsed().as_secs_f64()
}

/// What so large a share of the numbers stays below.
fn quantile(numbers: &mut [f64], share: f64) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[((numbers.len() - 1) as f64 * share).round() as usize]
}
