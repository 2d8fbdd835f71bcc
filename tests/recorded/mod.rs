//! Short runs of the optimizer, all from seeds, and the bits that they leave. Nothing here takes an
//! exponential or a logarithm, so that the inputs are the same on every machine.
#![allow(dead_code)] // each suite uses a part

use half::{bf16, f16};
use rfdescent::covariance::{Family, Model, StepMode, StepRule};
use rfdescent::optimizer::{
    Adaptive, Fitted, Group, Limit, Method, Optimizer, Options, Outcome, SkipReason, StepInput, StepReport,
    TensorSpec,
};
use rfdescent::{DType, GradRef, Moments};

use crate::common::{Owned, params, uniform};

/// How steps are chosen, in words of this test alone.
#[derive(Clone, Debug)]
pub enum Kind {
    Fitted {
        family: Family,
        mode: StepMode,
        conservatism: f64,
        inv_batch_size: f64,
        /// One number for each group.
        momentum: Vec<f64>,
    },
    Adaptive {
        averaging: f64,
        loss_bound: Option<f64>,
    },
}

/// All that an optimizer is made from, beside its tensors.
#[derive(Clone, Debug)]
pub struct Setup {
    pub kind: Kind,
    pub moments: Moments,
    pub groups: Vec<GroupSetup>,
    pub multiplier: f64,
    pub max_step_size: Option<f64>,
    pub stochastic_rounding: Option<u64>,
    pub master_weights: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct GroupSetup {
    pub length_scale_factor: f64,
    pub multiplier: f64,
    pub weight_decay: f64,
    pub norm_lock: bool,
}

impl Default for GroupSetup {
    fn default() -> Self {
        Self { length_scale_factor: 1.0, multiplier: 1.0, weight_decay: 0.0, norm_lock: false }
    }
}

/// The optimizer of a setup: all that these tests know of how one is made.
///
/// With `changed`, an optimizer that exists takes over what may differ in a setup of the same kind: the
/// multiplier, the inverse batch size, momentum and groups.
pub fn optimizer(
    setup: &Setup,
    specs: Vec<TensorSpec>,
    changed: Option<&mut Optimizer>,
) -> Option<Optimizer> {
    let options = Options {
        multiplier: setup.multiplier,
        max_step_size: setup.max_step_size,
        stochastic_rounding: setup.stochastic_rounding,
        master_weights: setup.master_weights,
        groups: (setup.groups.iter())
            .map(|group| Group {
                length_scale_factor: group.length_scale_factor,
                multiplier: group.multiplier,
                weight_decay: group.weight_decay,
                norm_lock: group.norm_lock,
            })
            .collect(),
    };
    let method: Method = match setup.kind {
        Kind::Fitted { family, mode, conservatism, inv_batch_size, ref momentum } => Fitted {
            model: Model::new(family, setup.moments).unwrap(),
            rule: StepRule { mode, conservatism },
            inv_batch_size,
            momentum: momentum.clone(),
        }
        .into(),
        Kind::Adaptive { averaging, loss_bound } => Adaptive { averaging, loss_bound }.into(),
    };
    if let Some(optimizer) = changed {
        optimizer.set_multiplier(options.multiplier).unwrap();
        optimizer.set_method(method).unwrap();
        for (index, group) in options.groups.into_iter().enumerate() {
            optimizer.set_group(index, group).unwrap();
        }
        return None;
    }
    Some(Optimizer::new(method, options, specs).unwrap())
}

#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    pub dtype: DType,
    pub grad: DType,
    pub len: usize,
    pub group: usize,
    pub counts_in_norm: bool,
    pub offset: u64,
    /// Its gradient is this many times as large as those of the others.
    pub size: f64,
    /// Elements of a row; only the adaptive method has rows.
    pub row: Option<usize>,
}

/// What is out of the ordinary in one step.
#[derive(Clone, Debug)]
pub enum Event {
    FoundInf,
    Loss(f64),
    /// All gradients are 0.
    ZeroGradient,
    /// The last element of this tensor's gradient is NaN.
    Poisoned(usize),
    /// This tensor has no gradient.
    Missing(usize),
    /// The setup from this step on.
    Change(Setup),
    /// The state is saved and goes on in an optimizer made anew.
    Reload,
    /// Gradients are this many times the real ones.
    GradScale(f64),
}

#[derive(Clone, Debug)]
pub struct Run {
    pub name: String,
    pub seed: u64,
    pub setup: Setup,
    pub tensors: Vec<Tensor>,
    pub steps: usize,
    /// Gradients are about this large.
    pub size: f64,
    /// How much of the parameters is in their gradients: with 0 steps do not depend on the ones before.
    pub coupling: f64,
    /// Whether steps are taken in two halves, as in sharded training.
    pub split: bool,
    pub events: Vec<(usize, Event)>,
}

/// What a run leaves.
pub struct Record {
    pub values: Vec<Owned>,
    pub reports: Vec<StepReport>,
    /// After each step: a fingerprint of report and parameters.
    pub steps: Vec<u16>,
    pub reports_hash: Hash,
    pub optimizer: Optimizer,
}

impl Run {
    pub fn specs(&self) -> Vec<TensorSpec> {
        let spec = |(k, t): (usize, &Tensor)| TensorSpec {
            counts_in_norm: t.counts_in_norm,
            offset: t.offset,
            row: t.row,
            ..TensorSpec::new(format!("t{k}"), &[t.len], t.dtype).in_group(t.group)
        };
        self.tensors.iter().enumerate().map(spec).collect()
    }

    pub fn start(&self) -> Vec<Owned> {
        (self.tensors.iter().enumerate())
            .map(|(k, t)| Owned::from_f64(t.dtype, &uniform(self.seed ^ (k as u64) << 32, t.len)))
            .collect()
    }

    /// The gradients of one step, for the parameters' present values.
    pub fn gradients(&self, values: &[Owned], step: usize, scale: f64) -> Vec<Owned> {
        let size = self.size * scale;
        (self.tensors.iter().zip(values).enumerate())
            .map(|(k, (tensor, value))| {
                let noise = uniform(self.seed ^ (k as u64) << 32 ^ (step as u64 + 1) << 48, tensor.len);
                let size = size * tensor.size;
                let gradient: Vec<f64> = (value.to_f64().into_iter().zip(noise))
                    .map(|(p, noise)| (noise + self.coupling * p) * size)
                    .collect();
                Owned::from_f64(tensor.grad, &gradient)
            })
            .collect()
    }

    pub fn loss(&self, step: usize) -> f64 {
        2.55 - 0.04 * step as f64 + 0.03 * uniform(self.seed ^ 77 ^ (step as u64) << 40, 1)[0]
    }

    pub fn play(&self) -> Record {
        let mut optimizer_now = optimizer(&self.setup, self.specs(), None).unwrap();
        let mut setup = self.setup.clone();
        let mut values = self.start();
        let (mut reports, mut steps, mut all) = (Vec::new(), Vec::new(), Hash::default());
        for step in 0..self.steps {
            let mut input = StepInput::new(self.loss(step));
            let events = || self.events.iter().filter(|(at, _)| *at == step).map(|(_, event)| event);
            for event in events() {
                match event {
                    Event::FoundInf => input.found_inf = 1.0,
                    Event::Loss(loss) => input.loss = *loss,
                    Event::GradScale(scale) => input.grad_scale = *scale,
                    Event::Change(to) => {
                        setup = to.clone();
                        optimizer(&setup, Vec::new(), Some(&mut optimizer_now));
                    }
                    Event::Reload => {
                        let bytes = optimizer_now.state_to_bytes().unwrap();
                        optimizer_now = optimizer(&setup, self.specs(), None).unwrap();
                        optimizer_now.load_state_from_bytes(&bytes).unwrap();
                    }
                    _ => {}
                }
            }
            let mut gradients = self.gradients(&values, step, input.grad_scale);
            let mut missing = vec![false; gradients.len()];
            for event in events() {
                match *event {
                    Event::ZeroGradient => {
                        for (gradient, tensor) in gradients.iter_mut().zip(&self.tensors) {
                            *gradient = Owned::from_f64(tensor.grad, &vec![0.0; tensor.len]);
                        }
                    }
                    Event::Poisoned(k) => {
                        let mut poisoned = gradients[k].to_f64();
                        if let Some(last) = poisoned.last_mut() {
                            *last = f64::NAN;
                        }
                        gradients[k] = Owned::from_f64(self.tensors[k].grad, &poisoned);
                    }
                    Event::Missing(k) => missing[k] = true,
                    _ => {}
                }
            }
            let gradients: Vec<GradRef<'_>> = (gradients.iter().zip(&missing))
                .map(|(gradient, &missing)| if missing { GradRef::Missing } else { gradient.grad() })
                .collect();
            let mut hash = Hash::default();
            let report = if self.split {
                let scale = input.grad_scale;
                let sums = optimizer_now.local_sums(&params(&mut values), &gradients, scale).unwrap();
                sums.values().iter().for_each(|&sum| hash.number(sum));
                optimizer_now.step_with_sums(&mut params(&mut values), &gradients, sums, &input).unwrap()
            } else {
                optimizer_now.step(&mut params(&mut values), &gradients, &input).unwrap()
            };
            hash.report(&report);
            all.word(hash.0);
            hash.tensors(&values);
            steps.push((hash.0 ^ hash.0 >> 16 ^ hash.0 >> 32 ^ hash.0 >> 48) as u16);
            reports.push(report);
        }
        Record { values, reports, steps, reports_hash: all, optimizer: optimizer_now }
    }
}

impl Record {
    /// Everything in one line, with some numbers to find a difference by.
    pub fn line(&self, name: &str) -> String {
        let mut parameters = Hash::default();
        parameters.tensors(&self.values);
        let [velocities, masters, variances] = buffers(&self.optimizer).map(Hash::text);
        let applied = self.reports.iter().rev().find(|r| r.outcome == Outcome::Applied);
        let [grad_norm, step_size] = applied.map_or([0.0; 2], |r| [r.grad_norm, r.step_size]);
        let first = self.values.iter().find_map(|t| t.to_f64().first().copied()).unwrap_or(0.0);
        // Of long runs some.
        let steps = self.steps.iter().step_by(self.steps.len().div_ceil(50).max(1));
        let steps: Vec<String> = steps.map(|hash| format!("{hash:04x}")).collect();
        // Only methods with rows have them.
        let variances = if variances == "-" { String::new() } else { format!(" variances={variances}") };
        format!(
            "{name} parameters={} velocities={velocities} masters={masters}{variances} reports={} applied={} skipped={} \
             grad_norm={grad_norm:?} step_size={step_size:?} first={first:?} steps={}",
            parameters.text(),
            self.reports_hash.text(),
            self.optimizer.applied_steps(),
            self.optimizer.skipped_steps(),
            steps.join(",")
        )
    }
}

/// Hashes of all velocities, master weights and variances of an optimizer: of names, lengths and values
/// alone, whatever else the file that they come from holds and whatever it calls them.
pub fn buffers(optimizer: &Optimizer) -> [Hash; 3] {
    let bytes = optimizer.state_to_bytes().unwrap();
    let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut found: Vec<(&str, &str, safetensors::tensor::TensorView<'_>)> = (stored.iter())
        .map(|(key, view)| {
            let (kind, name) = key.split_once('.').unwrap();
            let kind = if kind == "momentum" { "velocity" } else { kind };
            (kind, name, view)
        })
        .collect();
    found.sort_by_key(|(kind, name, _)| (kind.to_string(), name.to_string()));
    let [mut velocities, mut masters, mut variances] = [Hash::default(); 3];
    for (kind, name, view) in found {
        let hash = match kind {
            "velocity" => &mut velocities,
            "master" => &mut masters,
            "variances" => &mut variances,
            other => panic!("`{other}.{name}` is no buffer that these tests know"),
        };
        name.bytes().for_each(|byte| hash.byte(byte));
        hash.word(view.shape().iter().product::<usize>() as u64);
        match view.dtype() {
            safetensors::Dtype::F64 => {
                let values = view.data().as_chunks::<8>().0.iter();
                values.for_each(|bytes| hash.number(f64::from_le_bytes(*bytes)));
            }
            safetensors::Dtype::F32 => {
                let values = view.data().as_chunks::<4>().0.iter();
                values.for_each(|bytes| hash.single(f32::from_le_bytes(*bytes)));
            }
            other => panic!("{other:?} is no format of buffers"),
        }
    }
    [velocities, masters, variances]
}

/// FNV-1a with 64 bits. All NaN count as the same.
#[derive(Clone, Copy)]
pub struct Hash(pub u64);

impl Default for Hash {
    fn default() -> Self {
        Hash(0xcbf2_9ce4_8422_2325)
    }
}

impl Hash {
    /// In hexadecimal, or a dash where nothing went in.
    pub fn text(self) -> String {
        if self.0 == Hash::default().0 { "-".into() } else { format!("{:016x}", self.0) }
    }

    pub fn byte(&mut self, byte: u8) {
        self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }

    pub fn word(&mut self, word: u64) {
        word.to_le_bytes().into_iter().for_each(|byte| self.byte(byte));
    }

    pub fn number(&mut self, x: f64) {
        self.word(if x.is_nan() { f64::NAN.to_bits() } else { x.to_bits() });
    }

    pub fn single(&mut self, x: f32) {
        let bits = if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
        bits.to_le_bytes().into_iter().for_each(|byte| self.byte(byte));
    }

    fn half(&mut self, is_nan: bool, nan: u16, bits: u16) {
        let bits = if is_nan { nan } else { bits };
        bits.to_le_bytes().into_iter().for_each(|byte| self.byte(byte));
    }

    pub fn tensors(&mut self, tensors: &[Owned]) {
        for tensor in tensors {
            self.word(tensor.grad().len().unwrap() as u64);
            match tensor {
                Owned::F32(values) => values.iter().for_each(|&x| self.single(x)),
                Owned::F64(values) => values.iter().for_each(|&x| self.number(x)),
                Owned::F16(values) => {
                    values.iter().for_each(|x| self.half(x.is_nan(), f16::NAN.to_bits(), x.to_bits()));
                }
                Owned::BF16(values) => {
                    values.iter().for_each(|x| self.half(x.is_nan(), bf16::NAN.to_bits(), x.to_bits()));
                }
            }
        }
    }

    /// All fields of a report.
    pub fn report(&mut self, report: &StepReport) {
        let &StepReport { outcome, loss, grad_norm, sigma_norm, theta, step_size, .. } = report;
        let &StepReport { learning_rate, trust, limit, applied_steps, skipped_steps, .. } = report;
        // Numbers of this test, whatever the library's codes are.
        self.byte(match outcome {
            Outcome::Applied => 1,
            Outcome::Skipped(SkipReason::FoundInf) => 2,
            Outcome::Skipped(SkipReason::NonFiniteLoss) => 3,
            Outcome::Skipped(SkipReason::NonFiniteGradient) => 4,
            Outcome::Skipped(SkipReason::ZeroGradient) => 5,
            Outcome::Skipped(SkipReason::InvalidOption) => 6,
            Outcome::Skipped(SkipReason::OutOfRange) => 7,
            Outcome::Skipped(SkipReason::LossBelowBound) => 8,
        });
        let numbers = [loss, grad_norm, sigma_norm, theta, step_size, learning_rate];
        numbers.into_iter().for_each(|x| self.number(x));
        // Of a step of the adaptive method; again numbers of this test.
        match limit {
            Limit::None => {}
            Limit::Rate => self.byte(1),
            Limit::Loss => self.byte(2),
            Limit::Size => self.byte(3),
        }
        if limit != Limit::None {
            self.number(trust);
        }
        self.word(applied_steps);
        self.word(skipped_steps);
    }
}

/// The moments of a small network of `dims` parameters.
pub fn moments(dims: usize) -> Moments {
    Moments {
        mean: 2.5,
        variance: 0.01,
        noise_variance: 0.9,
        grad_variance: 5.0,
        noise_grad_variance: 300.0,
        dims: dims.max(1) as u64,
    }
}
