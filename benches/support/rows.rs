//! The lists that steps are timed on: formats, methods, and whether the steps are right.

use half::bf16;
use rfdescent::DType;
use rfdescent::device::{Device, DeviceBuffer, Stream};
use rfdescent::optimizer::{
    Adaptive, DeviceOptimizer, Fitted, Group, Method, Options, Outcome, RawInput, RawTensor, TensorSpec,
};
use serde::Serialize;

use super::clock::Clock;
use super::model::model;
use super::values::Pattern;

/// Lists that take turns in cold steps.
const SETS: usize = 4;

fn size(dtype: DType) -> usize {
    if dtype == DType::F32 { 4 } else { 2 }
}

/// What decides, and what it remembers of each parameter.
#[derive(Clone, Copy, PartialEq)]
enum Rule {
    Published,
    Momentum,
    Adaptive,
}

/// A kind of list.
#[derive(Clone, Copy)]
pub struct Kind {
    pub name: &'static str,
    param: DType,
    grad: DType,
    /// Whether every second tensor is f32 nevertheless.
    pub mixed: bool,
    masters: bool,
    norm_lock: bool,
    rule: Rule,
    /// Elements that gradients begin behind a multiple of 16 bytes.
    shift: usize,
}

impl Kind {
    const fn new(name: &'static str, param: DType, grad: DType) -> Self {
        let rule = Rule::Published;
        Self { name, param, grad, mixed: false, masters: false, norm_lock: false, rule, shift: 0 }
    }

    pub const fn all() -> [Self; 11] {
        let (f32, bf16) = (DType::F32, DType::BF16);
        let plain = Self::new("f32", f32, f32);
        let halves = Self::new("bf16", bf16, bf16);
        let masters = Self { name: "bf16, masters", masters: true, ..halves };
        [
            plain,
            Self { name: "f32, momentum", rule: Rule::Momentum, ..plain },
            Self { name: "f32, adaptive", rule: Rule::Adaptive, ..plain },
            Self { name: "f32, misaligned gradients", shift: 1, ..plain },
            halves,
            masters,
            Self { name: "bf16, masters, momentum", rule: Rule::Momentum, ..masters },
            Self { name: "bf16, masters, adaptive", rule: Rule::Adaptive, ..masters },
            Self::new("f32, bf16 gradients", f32, bf16),
            Self { name: "bf16 and f32 in turn", mixed: true, ..halves },
            Self { name: "f32, norm lock", norm_lock: true, ..plain },
        ]
    }

    /// Formats of a tensor and its gradient.
    fn formats(&self, tensor: usize) -> (DType, DType) {
        if self.mixed && tensor % 2 == 1 { (DType::F32, DType::F32) } else { (self.param, self.grad) }
    }

    /// What moves through memory for a parameter: gradients twice, parameters and master weights read and
    /// written, velocities too, with averages once more.
    fn bytes(&self, tensor: usize) -> usize {
        let (param, grad) = self.formats(tensor);
        // with master weights the half-precision parameter is written only
        let own = if self.masters { size(param) + 8 } else { 2 * size(param) };
        let state = match self.rule {
            Rule::Published => 0,
            Rule::Momentum => 8,
            Rule::Adaptive => 12,
        };
        2 * size(grad) + own + state
    }

    fn method(&self) -> Method {
        match self.rule {
            Rule::Published => model().into(),
            Rule::Momentum => Fitted::new(model()).with_momentum(0.9).into(),
            Rule::Adaptive => Adaptive::default().into(),
        }
    }
}

/// Patterns of parameters and gradients by format.
pub struct Patterns {
    params: [Pattern; 2],
    grads: [Pattern; 2],
}

impl Patterns {
    pub fn new() -> Self {
        let both = |seed| [DType::F32, DType::BF16].map(|dtype| Pattern::new(dtype, seed));
        Self { params: both(1), grads: both(2) }
    }

    fn of(both: &[Pattern; 2], dtype: DType) -> &Pattern {
        &both[usize::from(dtype != DType::F32)]
    }
}

/// A tensor of a list: its length, formats, and where it begins, in elements of the list and in bytes.
pub struct Place {
    len: usize,
    formats: (DType, DType),
    first: usize,
    bytes: (usize, usize),
}

/// Tensors in memory.
pub struct List {
    params: DeviceBuffer,
    _grads: DeviceBuffer,
    tensors: Vec<RawTensor>,
}

impl List {
    pub fn step(&self, optimizer: &mut DeviceOptimizer, stream: Stream) {
        // SAFETY: both buffers are live, and whoever drops them waits before.
        unsafe { optimizer.step(&self.tensors, &RawInput::new(2.0), stream).unwrap() };
    }
}

#[derive(Serialize)]
pub struct Figures<'a> {
    pub list: &'a str,
    pub kind: &'static str,
    pub kernels: &'static str,
    pub tensors: usize,
    pub parameters: usize,
    pub bytes: usize,
    pub warm_us: f64,
    pub cold_us: f64,
    pub floor_us: f64,
    pub host_us: f64,
}

pub struct Row<'a> {
    pub list: &'a str,
    pub kind: Kind,
    pub places: Vec<Place>,
}

impl<'a> Row<'a> {
    pub fn new(list: &'a str, lengths: &[usize], kind: Kind) -> Self {
        let (mut first, mut bytes) = (0, (0, 0));
        let mut places = Vec::new();
        for (k, &len) in lengths.iter().enumerate() {
            let formats = kind.formats(k);
            places.push(Place { len, formats, first, bytes });
            first += len;
            bytes.0 += (len * size(formats.0)).next_multiple_of(16);
            bytes.1 += (len * size(formats.1)).next_multiple_of(16);
        }
        Self { list, kind, places }
    }

    pub fn parameters(&self) -> usize {
        self.places.iter().map(|place| place.len).sum()
    }

    pub fn name(&self) -> String {
        format!("{} {}", self.list, self.kind.name)
    }

    /// A list with the patterns' values; none where the device's memory does not hold it.
    pub fn list(&self, device: &Device, patterns: &Patterns, stream: Stream) -> Option<List> {
        let end = |last: &Place| {
            let (param, grad) = last.formats;
            (last.bytes.0 + last.len * size(param), last.bytes.1 + (last.len + self.kind.shift) * size(grad))
        };
        let (params, grads) = self.places.last().map_or((0, 0), end);
        let (mut params, mut grads) = (device.allocate(params).ok()?, device.allocate(grads).ok()?);
        let mut tensors = Vec::new();
        for &Place { len, formats: (param, grad), first, bytes: (at, grad_at) } in &self.places {
            let grad_at = grad_at + self.kind.shift * size(grad);
            Patterns::of(&patterns.params, param).upload(first, len, &mut params, at, stream);
            Patterns::of(&patterns.grads, grad).upload(first, len, &mut grads, grad_at, stream);
            let (at, grad_at) = (params.address() + at as u64, grads.address() + grad_at as u64);
            tensors.push(RawTensor::new(at, grad_at, grad));
        }
        Some(List { params, _grads: grads, tensors })
    }

    /// For such a list; none where the device's memory does not hold what it remembers.
    pub fn optimizer(&self, device: &Device) -> Option<DeviceOptimizer> {
        let spec =
            |(k, place): (usize, &Place)| TensorSpec::new(format!("t{k}"), &[place.len], place.formats.0);
        let specs = self.places.iter().enumerate().map(spec).collect();
        let Kind { masters, norm_lock, .. } = self.kind;
        let groups = vec![Group { norm_lock, ..Group::default() }];
        let options = Options { master_weights: masters, groups, ..Options::default() };
        DeviceOptimizer::new(self.kind.method(), options, specs, device).ok()
    }

    pub fn run(
        &self,
        device: &Device,
        clock: &Clock,
        patterns: &Patterns,
        ceiling: f64,
    ) -> Option<Figures<'a>> {
        let stream = clock.stream();
        let bytes = self.places.iter().enumerate().map(|(k, place)| place.len * self.kind.bytes(k)).sum();
        // What is longer than the cache leaves nothing of itself in it.
        let count = if bytes > clock.amount.flush { 1 } else { SETS };
        let mut sets = Vec::new();
        for _ in 0..count {
            sets.push((self.list(device, patterns, stream)?, self.optimizer(device)?));
        }
        let step = |(list, optimizer): &mut (List, DeviceOptimizer)| list.step(optimizer, stream);
        sets.iter_mut().for_each(step);
        device.synchronize(stream).unwrap();
        self.check_first_step(&sets[0], patterns, stream);
        let (warm, host) = clock.time(false, |_| step(&mut sets[0]));
        let (cold, _) = clock.time(true, |run| step(&mut sets[run % count]));
        let runs = clock.amount.runs();
        self.check_last_step(&sets[0].1, patterns, 1 + runs + runs.div_ceil(count), stream);
        Some(Figures {
            list: self.list,
            kind: self.kind.name,
            kernels: sets[0].1.kernels(),
            tensors: self.places.len(),
            parameters: self.parameters(),
            bytes,
            warm_us: warm,
            cold_us: cold,
            floor_us: bytes as f64 / ceiling * 1e6,
            host_us: host,
        })
    }

    /// A sample of the parameters.
    fn check_first_step(
        &self,
        (list, optimizer): &(List, DeviceOptimizer),
        patterns: &Patterns,
        stream: Stream,
    ) {
        if self.kind.rule != Rule::Published || self.kind.norm_lock {
            return;
        }
        let report = optimizer.report().unwrap().unwrap();
        let every = 1 + self.parameters() / 1000;
        for &Place { len, formats: (param, grad), first, bytes: (at, _) } in &self.places {
            // 2⁻⁸ for bf16, 2⁻²³ for f32: coefficient, product and result round once each
            let slack = if param == DType::BF16 { 2f64.powi(-8) } else { 2f64.powi(-22) };
            for i in (0..len).filter(|i| (first + i).is_multiple_of(every)) {
                let mut bytes = [0; 4];
                list.params.download(at + i * size(param), &mut bytes[..size(param)], stream).unwrap();
                let after = match param {
                    DType::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).into(),
                    _ => f64::from(f32::from_le_bytes(bytes)),
                };
                let before = Patterns::of(&patterns.params, param).at(first + i);
                let step = report.learning_rate * Patterns::of(&patterns.grads, grad).at(first + i);
                assert!(
                    (after - (before - step)).abs() <= slack,
                    "{}: element {i} is {after}, expected {}",
                    self.name(),
                    before - step
                );
            }
        }
    }

    /// Outcome, number of steps, and the norm against f64 sums.
    fn check_last_step(
        &self,
        optimizer: &DeviceOptimizer,
        patterns: &Patterns,
        steps: usize,
        stream: Stream,
    ) {
        let name = self.name();
        let report = optimizer.wait_report(stream).unwrap().unwrap();
        assert_eq!(report.outcome, Outcome::Applied, "{name}");
        assert_eq!(report.applied_steps as usize, steps, "{name}");
        let squares = self
            .places
            .iter()
            .map(|place| Patterns::of(&patterns.grads, place.formats.1).square_sum(place.first, place.len));
        let norm = squares.sum::<f64>().sqrt();
        assert!(
            (report.grad_norm / norm - 1.0).abs() < 1e-9,
            "{name}: norm {}, not {norm}",
            report.grad_norm
        );
    }
}
