//! Steps on devices against those on the CPU, bit for bit: the kernels compiled for the CPU (feature `shim`)
//! and CUDA where a device is present. `RFDESCENT_DEVICE_CASES` sets the number of random cases of each test,
//! `RFDESCENT_DEVICE_SEED` runs the one case whose seed a failure printed, `RFDESCENT_REQUIRE_GPU=1` fails
//! without a CUDA device.
#![cfg(any(feature = "cuda", feature = "shim"))]

mod common;
mod device_support;

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use common::*;
use device_support::*;
use half::{bf16, f16};
use rfdescent::DType;
use rfdescent::covariance::{Family, Model, StepMode, StepRule};
#[cfg(feature = "shim")]
use rfdescent::device::ShimOptions;
use rfdescent::device::Stream;
use rfdescent::optimizer::{
    Adaptive, DeviceOptimizer, Fitted, Group, Method, Optimizer, Options, Outcome, RawInput, RawNumber,
    RawTensor, SkipReason, StepInput, StepReport, TensorSpec,
};

const SIZES: [usize; 15] = [0, 1, 2, 31, 32, 33, 255, 1023, 1024, 1025, 4095, 4096, 4097, 8192, 12_301];

/// A random list of tensors and options, and the optimizers of both kinds for it.
struct Case {
    random: Random,
    method: Method,
    options: Options,
    specs: Vec<TensorSpec>,
    grad_formats: Vec<DType>,
    stream: Stream,
    /// Of a step, by its number.
    loss: fn(&mut Random, usize) -> f64,
}

/// Losses of every kind, in no order.
fn any_loss(random: &mut Random, _: usize) -> f64 {
    random.pick(&[2.0, 2.4, 2.5, 2.6, 0.1, -3.0, 1e30, f64::NAN, 2.3, 1.9])
}

/// Losses of a run: a noisy fall, then a rise, then noise alone; some steps are skipped.
fn loss_of_a_run(random: &mut Random, step: usize) -> f64 {
    let trend = [2.0 - 0.02 * step as f64, 1.0 + 0.03 * step as f64, 1.5][step / 45 % 3];
    match random.below(20) {
        0 => random.pick(&[f64::NAN, -5.0, f64::INFINITY, 1e200]),
        _ => trend * (1.0 + 0.1 * uniform(random.next(), 1)[0]),
    }
}

impl Case {
    fn new(seed: u64, sizes: &[usize], tensors: usize) -> Self {
        let mut random = Random(seed);
        let families = [
            Family::SquaredExponential,
            Family::RationalQuadratic { beta: 0.7 },
            Family::RationalQuadratic { beta: 3.0 },
            Family::Matern32,
            Family::Matern52,
        ];
        let model = model(random.pick(&families));
        let kinds = [
            Some((DType::F32, DType::F32)),
            Some((DType::BF16, DType::BF16)),
            Some((DType::F16, DType::F16)),
            None,
            None,
        ];
        let kind = random.pick(&kinds);
        let groups = if random.one_in(2) { 1 } else { 3 };
        let alike = random.one_in(2);
        let momentum = random.pick(&[0.0, 0.9]);
        let group = |random: &mut Random| Group {
            length_scale_factor: random.pick(&[1.0, 0.5, 3.0]),
            multiplier: random.pick(&[1.0, 0.1]),
            weight_decay: random.pick(&[0.0, 0.0, 0.3, 1e9]),
            norm_lock: random.one_in(5),
        };
        let fitted = Fitted {
            model,
            rule: StepRule {
                mode: random.pick(&[StepMode::Rfd, StepMode::Rfd, StepMode::ARfd, StepMode::ClippedARfd]),
                conservatism: 0.0,
            },
            inv_batch_size: random.pick(&[0.0, 1.0, 1.0 / 128.0]),
            momentum: if alike {
                vec![momentum]
            } else {
                (0..groups).map(|_| random.pick(&[0.0, 0.5, 0.95])).collect()
            },
        };
        let options = Options {
            multiplier: random.pick(&[1.0, 0.3]),
            max_step_size: random.pick(&[None, None, Some(1e-3), Some(f64::INFINITY)]),
            stochastic_rounding: if random.one_in(2) { Some(random.next()) } else { None },
            master_weights: random.one_in(2),
            groups: (0..groups).map(|_| group(&mut random)).collect(),
        };
        let specs: Vec<TensorSpec> = (0..tensors)
            .map(|k| {
                let param = kind.map_or_else(|| random.pick(&DTYPES), |kind| kind.0);
                let mut spec = TensorSpec::new(format!("t{k}"), &[random.pick(sizes)], param);
                spec.group = random.below(groups);
                spec.counts_in_norm = !random.one_in(6);
                spec.offset = random.pick(&[0, 0, 3, 8, (1 << 33) + 5]);
                spec
            })
            .collect();
        let grad_formats =
            (0..tensors).map(|_| kind.map_or_else(|| random.pick(&DTYPES), |kind| kind.1)).collect();
        let stream = random.pick(&[Stream::DEFAULT, Stream::LEGACY, Stream::PER_THREAD]);
        Self { random, method: fitted.into(), options, specs, grad_formats, stream, loss: any_loss }
    }

    /// The same for the adaptive method.
    fn adaptive(seed: u64, sizes: &[usize], tensors: usize) -> Self {
        let mut case = Self::new(seed, sizes, tensors);
        let adaptive = Adaptive {
            averaging: case.random.pick(&[0.9, 0.9, 0.5, 0.0]),
            loss_bound: case.random.pick(&[None, None, Some(0.0), Some(0.1), Some(-4.0)]),
        };
        case.method = adaptive.into();
        for spec in &mut case.specs {
            let len = spec.shape[0];
            match case.random.below(4) {
                // Rows that divide the tensor, or rows the last of which is shorter.
                0 | 1 => {
                    let heights = [1, 2, 3, 4, 5, 7, 16, 31, 64, 100, 1025, 4096];
                    let height = case.random.pick(&heights);
                    if len > 0 && len.is_multiple_of(height) {
                        spec.shape = vec![height, len / height];
                    }
                }
                2 => spec.row = Some(1 + case.random.below(len.max(1))),
                _ => {}
            }
        }
        case
    }

    fn is_adaptive(&self) -> bool {
        matches!(self.method, Method::Adaptive(_))
    }

    fn lengths(&self) -> Vec<usize> {
        self.specs.iter().map(|spec| spec.len().unwrap()).collect()
    }

    fn params(&mut self) -> Vec<Owned> {
        let lengths = self.lengths();
        let seed = self.random.next();
        let tensors = self.specs.iter().zip(lengths).enumerate();
        tensors.map(|(k, (spec, len))| Owned::from_f64(spec.dtype, &uniform(seed ^ k as u64, len))).collect()
    }

    /// Gradients of a random size, `None` where missing; sometimes with a bad element.
    fn grads(&mut self) -> (Vec<Owned>, Vec<bool>) {
        let adaptive = self.is_adaptive();
        let seed = self.random.next();
        let scale = self.random.pick(&[1.0, 1.0, 1.0, 1.0, 1e-4, 1e3, 1e25, 1e-30, 1e-40]);
        let extreme = self.random.pick(&[1.0, 1.0, 1.0, 1e160, 1e-170, 1e306, 1e-308, 0.0, 1e38]);
        let mut grads: Vec<Owned> = self
            .lengths()
            .into_iter()
            .enumerate()
            .map(|(k, len)| {
                let dtype = self.grad_formats[k];
                let scale = if dtype == DType::F64 { scale * extreme } else { scale };
                // Variances differ by tensor, for the adaptive method beyond its bounds.
                let scale = if adaptive { scale * [1.0, 0.03, 4.0, 0.25][k % 4] } else { scale };
                let values: Vec<f64> = uniform(seed ^ k as u64, len).iter().map(|x| x * scale).collect();
                Owned::from_f64(dtype, &values)
            })
            .collect();
        let any = self.random.one_in(3);
        let present = grads.iter().map(|_| !(any && self.random.one_in(3))).collect();
        if self.random.one_in(12) {
            for grad in &mut grads {
                *grad = Owned::from_f64(grad.dtype(), &vec![0.0; grad.bits().len()]);
            }
        }
        if self.random.one_in(6) && !grads.is_empty() {
            let k = self.random.below(grads.len());
            let len = grads[k].bits().len();
            if len > 0 {
                let at = [0, len / 2, len - 1, self.random.below(len)][self.random.below(4)];
                let mut values = grads[k].to_f64();
                values[at] = self.random.pick(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]);
                grads[k] = Owned::from_f64(grads[k].dtype(), &values);
            }
        }
        (grads, present)
    }

    fn cpu(&self) -> Optimizer {
        Optimizer::new(self.method.clone(), self.options.clone(), self.specs.clone()).unwrap()
    }

    fn device(&self, executor: &Executor) -> DeviceOptimizer {
        DeviceOptimizer::new(self.method.clone(), self.options.clone(), self.specs.clone(), &executor.device)
            .unwrap()
    }
}

fn formats(grads: &[Owned], present: &[bool]) -> Vec<Option<DType>> {
    grads.iter().zip(present).map(|(g, &present)| present.then(|| g.dtype())).collect()
}

/// Steps of one random case on a device and the CPU, by every form of launch; how many were applied.
fn compare(executor: &Executor, case: &mut Case, steps: usize) -> u64 {
    let stream = case.stream;
    let device = &executor.device;
    let mut values = case.params();
    let mut placed = Placed::new(device, &values, &mut case.random, stream);
    let (mut on_cpu, mut on_device) = (case.cpu(), case.device(executor));
    executor.set_schedule(case.random.next(), case.random.one_in(8));
    let locked = case.options.groups.iter().any(|group| group.norm_lock);
    for i in 0..steps {
        let blocks = 1 + case.random.below(8) as u32;
        on_device.set_max_blocks(NonZeroU32::new(blocks));
        on_device.set_cooperative(!case.random.one_in(3));
        let (grads, present) = case.grads();
        let placed_grads = Placed::new(device, &grads, &mut case.random, stream);
        let loss_dtype = case.random.pick(&DTYPES);
        let loss = (case.loss)(&mut case.random, i);
        let loss = Owned::from_f64(loss_dtype, &[loss]).to_f64()[0];
        let loss_buffer = scalar(device, loss_dtype, loss, stream);
        let scale = case.random.pick(&[None, Some(1.0), Some(1024.0), Some(3.0), Some(2f64.powi(-100))]);
        let found_inf =
            case.random.pick(&[None, None, Some(0.0), Some(0.0), Some(-0.0), Some(2.0), Some(f64::NAN)]);
        let scale_buffer = scale.map(|scale| scalar(device, DType::F32, scale, stream));
        let found_buffer = found_inf.map(|found| scalar(device, DType::F32, found, stream));
        let input = RawInput {
            loss: if case.random.one_in(2) {
                RawNumber::Host(loss)
            } else {
                RawNumber::Address { address: loss_buffer.address(), dtype: loss_dtype }
            },
            grad_scale: scale_buffer.as_ref().map_or(1.0.into(), number),
            found_inf: found_buffer.as_ref().map_or(0.0.into(), number),
        };
        let cpu_input =
            StepInput { loss, grad_scale: scale.unwrap_or(1.0), found_inf: found_inf.unwrap_or(0.0) };
        let tensors = step_tensors(&placed, &placed_grads, &formats(&grads, &present));
        let refs = grad_refs(&grads, &present);
        let split = !locked && !case.is_adaptive() && case.random.one_in(5);
        let report = if split {
            let sums = on_cpu.local_sums(&params(&mut values), &refs, cpu_input.grad_scale).unwrap();
            // SAFETY: all addresses are those of live buffers of the right sizes and formats.
            let address = unsafe { on_device.local_sums(&tensors, input.grad_scale, stream).unwrap() };
            assert_same_numbers(&on_device.read_sums(stream).unwrap(), sums.values());
            // SAFETY: all addresses are those of live buffers of the right sizes and formats.
            unsafe { on_device.step_with_sums(&tensors, address, &input, stream).unwrap() };
            on_cpu.step_with_sums(&mut params(&mut values), &refs, sums, &cpu_input).unwrap()
        } else {
            // SAFETY: all addresses are those of live buffers of the right sizes and formats.
            unsafe { on_device.step(&tensors, &input, stream).unwrap() };
            on_cpu.step(&mut params(&mut values), &refs, &cpu_input).unwrap()
        };
        let what = format!("step {i}, {blocks} blocks, split {split}, {report:?}");
        let own = on_device.wait_report(stream).unwrap().unwrap();
        assert_eq!(report_bits(&own), report_bits(&report), "{what}");
        assert_same_params(&placed.read(stream), &values, &what);
        change_settings(case, &mut on_cpu, &mut on_device);
        if case.random.one_in(4) {
            let (from_cpu, from_device) =
                (on_cpu.state_to_bytes().unwrap(), on_device.state_to_bytes(stream).unwrap());
            assert_same_state(&from_device, &from_cpu, &values);
            let options = on_cpu.options().clone();
            on_cpu.load_state_from_bytes(&from_device).unwrap();
            case.options = options;
            on_device = case.device(executor);
            on_device.load_state_from_bytes(&from_cpu, stream).unwrap();
            assert!(on_device.report().unwrap().is_none());
        }
    }
    let (from_cpu, from_device) =
        (on_cpu.state_to_bytes().unwrap(), on_device.state_to_bytes(stream).unwrap());
    assert_same_state(&from_device, &from_cpu, &values);
    on_cpu.applied_steps()
}

/// Sometimes changes what may change between steps, on both.
fn change_settings(case: &mut Case, on_cpu: &mut Optimizer, on_device: &mut DeviceOptimizer) {
    let stream = case.stream;
    match case.random.below(8) {
        0 => {
            let multiplier = case.random.pick(&[0.0, 0.5, 2.0]);
            on_cpu.set_multiplier(multiplier).unwrap();
            on_device.set_multiplier(multiplier, stream).unwrap();
        }
        1 => {
            if let Method::Fitted(fitted) = &mut case.method {
                fitted.inv_batch_size = case.random.pick(&[0.0, 0.25]);
                // momentum goes on and off too
                let groups = case.options.groups.len();
                fitted.momentum = (0..groups).map(|_| case.random.pick(&[0.0, 0.9])).collect();
            }
            on_cpu.set_method(case.method.clone()).unwrap();
            on_device.set_method(case.method.clone(), stream).unwrap();
        }
        2 => {
            let index = case.random.below(case.options.groups.len());
            // norm lock goes on and off too; the split form may not have it
            let group = Group {
                length_scale_factor: case.random.pick(&[1.0, 2.0]),
                multiplier: case.random.pick(&[1.0, 0.7]),
                weight_decay: case.random.pick(&[0.0, 0.01]),
                norm_lock: if case.is_adaptive() {
                    case.random.one_in(3)
                } else {
                    on_cpu.options().groups[index].norm_lock
                },
            };
            on_cpu.set_group(index, group).unwrap();
            on_device.set_group(index, group, stream).unwrap();
        }
        3 => {
            let cap = case.random.pick(&[None, Some(1e-3)]);
            on_cpu.set_max_step_size(cap).unwrap();
            on_device.set_max_step_size(cap, stream).unwrap();
        }
        _ => {}
    }
}

#[test]
fn random_lists_match_the_cpu() {
    for_seeds("random_lists_match_the_cpu", 1500, |executor, seed| {
        let tensors = 1 + Random(seed ^ 1).below(6);
        compare(executor, &mut Case::new(seed, &SIZES, tensors), 3);
    });
}

#[test]
fn small_tensors_and_empty_lists_match_the_cpu() {
    for_seeds("small_tensors_and_empty_lists_match_the_cpu", 3000, |executor, seed| {
        let tensors = Random(seed ^ 1).below(8);
        compare(executor, &mut Case::new(seed, &[0, 1, 2, 31, 32, 33, 100, 0], tensors), 4);
    });
}

#[test]
fn several_segments_match_the_cpu() {
    for_seeds("several_segments_match_the_cpu", 12, |executor, seed| {
        let sizes = [1_048_576, 1_048_577, 1_060_000, 2_200_000, 5, 300_001];
        compare(executor, &mut Case::new(seed, &sizes, 2), 1);
    });
}

#[test]
fn more_tensors_than_fit_in_a_launch_match_the_cpu() {
    for_seeds("more_tensors_than_fit_in_a_launch_match_the_cpu", 40, |executor, seed| {
        let tensors = [447, 448, 449, 896, 897, 1500][Random(seed).below(6)];
        compare(executor, &mut Case::new(seed, &[0, 1, 7, 33, 300, 4097], tensors), 3);
    });
}

#[test]
fn adaptive_steps_match_the_cpu() {
    for_seeds("adaptive_steps_match_the_cpu", 1500, |executor, seed| {
        let tensors = Random(seed ^ 1).below(7);
        compare(executor, &mut Case::adaptive(seed, &SIZES, tensors), 4);
    });
}

/// Many steps: through the ramp and through windows of the trust factor, with every verdict on them.
#[test]
fn adaptive_runs_match_the_cpu() {
    for_seeds("adaptive_runs_match_the_cpu", 30, |executor, seed| {
        let mut case = Case::adaptive(seed, &[1, 2, 31, 33, 1025, 4097], 1 + Random(seed ^ 1).below(4));
        case.loss = loss_of_a_run;
        let applied = compare(executor, &mut case, 160);
        println!("{applied} of 160 steps applied");
    });
}

#[test]
fn adaptive_steps_of_long_lists_match_the_cpu() {
    for_seeds("adaptive_steps_of_long_lists_match_the_cpu", 15, |executor, seed| {
        let tensors = [255, 256, 257, 449, 600][Random(seed).below(5)];
        compare(executor, &mut Case::adaptive(seed, &[0, 1, 7, 33, 300, 4097], tensors), 4);
    });
    for_seeds("adaptive steps of several segments", 4, |executor, seed| {
        compare(executor, &mut Case::adaptive(seed, &[1_048_577, 2_200_000, 5, 300_001], 2), 2);
    });
}

/// Exponentials and the quantile have other roundings on a device: the step size agrees within 1e-9, and with
/// it the parameters but for rounding to their format.
#[test]
fn conservative_steps_match_within_1e_9() {
    for_seeds("conservative_steps_match_within_1e_9", 600, |executor, seed| {
        let mut case = Case::new(seed, &[1, 33, 1025, 4097], 3);
        let conservatism = case.random.pick(&[1e-6, 0.1, 0.5, 0.9, 0.999]);
        if let Method::Fitted(fitted) = &mut case.method {
            fitted.rule = StepRule { mode: StepMode::Rfd, conservatism };
            fitted.momentum = Vec::new();
        }
        for group in &mut case.options.groups {
            group.norm_lock = false;
        }
        let stream = case.stream;
        let before = case.params();
        let mut values = before.clone();
        let mut placed = Placed::new(&executor.device, &values, &mut case.random, stream);
        let grads: Vec<Owned> = {
            let seed = case.random.next();
            let scale = case.random.pick(&[1e-6, 1e-3, 1.0, 1e3]);
            let tensors = case.lengths().into_iter().zip(&case.grad_formats).enumerate();
            tensors
                .map(|(k, (len, &dtype))| {
                    let values: Vec<f64> = uniform(seed ^ k as u64, len).iter().map(|x| x * scale).collect();
                    Owned::from_f64(dtype, &values)
                })
                .collect()
        };
        let present = vec![true; grads.len()];
        let placed_grads = Placed::new(&executor.device, &grads, &mut case.random, stream);
        let loss = case.random.pick(&[2.0, 2.49, 2.5, 2.6, 0.0]);
        let (mut on_cpu, mut on_device) = (case.cpu(), case.device(executor));
        executor.set_schedule(case.random.next(), false);
        on_device.set_cooperative(case.random.one_in(2));
        let tensors = step_tensors(&placed, &placed_grads, &formats(&grads, &present));
        // SAFETY: all addresses are those of live buffers of the right sizes and formats.
        unsafe { on_device.step(&tensors, &RawInput::new(loss), stream).unwrap() };
        let report = on_cpu
            .step(&mut params(&mut values), &grad_refs(&grads, &present), &StepInput::new(loss))
            .unwrap();
        let own = on_device.wait_report(stream).unwrap().unwrap();
        assert_eq!(own.outcome, report.outcome);
        if report.outcome != Outcome::Applied {
            return;
        }
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * a.abs().max(b.abs());
        assert!(close(own.step_size, report.step_size), "{own:?}, on the CPU {report:?}");
        assert!(close(own.learning_rate, report.learning_rate), "{own:?}, on the CPU {report:?}");
        assert_eq!(own.grad_norm.to_bits(), report.grad_norm.to_bits());
        if case.options.stochastic_rounding.is_some() {
            return;
        }
        for (k, device) in placed.read(stream).iter().enumerate() {
            let spec = &case.specs[k];
            let group = &case.options.groups[spec.group];
            let rate = report.learning_rate
                * group.multiplier
                * group.length_scale_factor
                * group.length_scale_factor;
            let (device, cpu) = (device.to_f64(), values[k].to_f64());
            let (before, grad) = (before[k].to_f64(), grads[k].to_f64());
            for i in 0..cpu.len() {
                // what moved differs by 1e-9; that can move scalars and result to the neighbouring number of
                // their formats: twice for the scalars (f32 or wider), once for the result
                let decayed = rate * group.weight_decay / group.length_scale_factor.powi(2) * before[i].abs();
                let moved = decayed.min(before[i].abs()) + rate * grad[i].abs();
                let tolerance = 2e-9 * moved
                    + 4.0 * roundoff(DType::F32) * (moved + before[i].abs())
                    + 2.0 * roundoff(spec.dtype) * cpu[i].abs()
                    + smallest(spec.dtype);
                let error = (device[i] - cpu[i]).abs();
                assert!(error <= tolerance, "tensor {k} element {i}: {} {}", device[i], cpu[i]);
            }
        }
    });
}

/// One list of f32 tensors, its gradients and an optimizer on an executor.
struct Fixture {
    placed: Placed,
    grads: Placed,
    tensors: Vec<RawTensor>,
    values: Vec<Owned>,
    gradients: Vec<Owned>,
    on_cpu: Optimizer,
    on_device: DeviceOptimizer,
}

const STREAM: Stream = Stream::PER_THREAD;

impl Fixture {
    fn new(executor: &Executor, lengths: &[usize], dtype: DType, options: Options) -> Self {
        Self::with(model(Family::Matern52), executor, lengths, dtype, options)
    }

    fn with(
        method: impl Into<Method>,
        executor: &Executor,
        lengths: &[usize],
        dtype: DType,
        options: Options,
    ) -> Self {
        let mut random = Random(1);
        let tensor = |seed: u64| {
            let of = |(k, &len): (usize, &usize)| Owned::from_f64(dtype, &uniform(seed + k as u64, len));
            lengths.iter().enumerate().map(of).collect::<Vec<_>>()
        };
        let (values, gradients) = (tensor(1), tensor(1000));
        let placed = Placed::new(&executor.device, &values, &mut random, STREAM);
        let grads = Placed::new(&executor.device, &gradients, &mut random, STREAM);
        let tensors = step_tensors(&placed, &grads, &vec![Some(dtype); lengths.len()]);
        let specs: Vec<TensorSpec> = lengths
            .iter()
            .enumerate()
            .map(|(k, &len)| TensorSpec::new(format!("t{k}"), &[len], dtype))
            .collect();
        let method = method.into();
        let on_cpu = Optimizer::new(method.clone(), options.clone(), specs.clone()).unwrap();
        let on_device = DeviceOptimizer::new(method, options, specs, &executor.device).unwrap();
        Self { placed, grads, tensors, values, gradients, on_cpu, on_device }
    }

    fn step_device(&mut self, loss: f64) -> rfdescent::Result<()> {
        // SAFETY: the fixture's buffers live longer than the work: every test waits before it drops them.
        unsafe { self.on_device.step(&self.tensors, &RawInput::new(loss), STREAM) }
    }

    fn step_cpu(&mut self, loss: f64) -> StepReport {
        self.on_cpu
            .step(&mut params(&mut self.values), &grads(&self.gradients), &StepInput::new(loss))
            .unwrap()
    }

    fn assert_same(&mut self) {
        assert_same_params(&self.placed.read(STREAM), &self.values, "fixture");
    }
}

fn plain() -> Options {
    Options::default()
}

#[cfg(feature = "shim")]
fn masters() -> Options {
    Options { master_weights: true, ..Options::default() }
}

#[test]
fn steps_with_the_same_addresses_count_on() {
    for executor in executors() {
        let mut fixture = Fixture::new(&executor, &[5000, 0, 70], DType::F32, plain());
        assert!(fixture.on_device.report().unwrap().is_none());
        for i in 1..=50 {
            fixture.step_device(2.0).unwrap();
            fixture.step_cpu(2.0);
            if i % 10 == 0 {
                let report = fixture.on_device.wait_report(STREAM).unwrap().unwrap();
                assert_eq!((report.applied_steps, report.skipped_steps), (i, 0));
                fixture.assert_same();
            }
        }
        fixture.step_device(f64::NAN).unwrap();
        let report = fixture.on_device.wait_report(STREAM).unwrap().unwrap();
        assert_eq!(report.outcome, Outcome::Skipped(SkipReason::NonFiniteLoss));
        assert_eq!((report.applied_steps, report.skipped_steps), (50, 1));
        fixture.assert_same();
        drop(fixture.grads);
    }
}

#[test]
fn a_step_leaves_nothing_to_the_host_and_launches_once() {
    #[cfg(feature = "shim")]
    for executor in executors() {
        let Some(shim) = &executor.shim else { continue };
        let cases = [
            (DType::F32, 0.0, plain(), "rfd_step_f32"),
            (DType::BF16, 0.9, masters(), "rfd_step_bf16_master_momentum"),
            (DType::F64, 0.0, plain(), "rfd_step_generic"),
        ];
        for (dtype, momentum, options, kernel) in cases {
            let mut fixture = Fixture::with(moving(momentum), &executor, &[300, 5000], dtype, options);
            fixture.step_device(2.0).unwrap();
            shim.take_counts();
            // the gradients of the two tensors change places: other addresses, same work
            for _ in 0..3 {
                fixture.step_device(2.0).unwrap();
                let counts = shim.take_counts();
                assert_eq!(counts.launches, [kernel]);
                assert_eq!((counts.allocated, counts.copies, counts.waits), (0, 0, 0));
                for tensor in &mut fixture.tensors {
                    tensor.grad += size_of(dtype) as u64;
                }
                fixture.tensors[1].grad = 0;
            }
        }
        let alone = Adaptive { averaging: 0.0, ..Adaptive::default() };
        let cases = [
            (Adaptive::default(), DType::F32, plain(), "rfd_step_f32_averaged"),
            (Adaptive::default(), DType::BF16, masters(), "rfd_step_bf16_master_averaged"),
            (Adaptive::default(), DType::F16, plain(), "rfd_step_generic"),
            (alone, DType::F32, plain(), "rfd_step_generic"),
        ];
        for (adaptive, dtype, options, kernel) in cases {
            let mut fixture = Fixture::with(adaptive, &executor, &[300, 5000], dtype, options);
            fixture.step_device(2.0).unwrap();
            shim.take_counts();
            fixture.step_device(2.0).unwrap();
            let counts = shim.take_counts();
            assert_eq!(counts.launches, [kernel]);
            assert_eq!((counts.allocated, counts.copies, counts.waits), (0, 0, 0));
        }
        // separate launches, rescaling only where f64 gradients are
        let mut fixture = Fixture::new(&executor, &[300], DType::F64, plain());
        fixture.on_device.set_cooperative(false);
        shim.take_counts();
        fixture.step_device(2.0).unwrap();
        let expected =
            ["rfd_norm_generic", "rfd_rescale_max", "rfd_rescale_norm", "rfd_update_generic", "rfd_status"];
        assert_eq!(shim.take_counts().launches, expected);
        // what is refused is tried again after a while; one block needs nobody's leave
        let mut fixture = Fixture::new(&executor, &[300, 20_000], DType::F32, plain());
        let mut alone = Fixture::new(&executor, &[300], DType::F32, plain());
        shim.set_options(ShimOptions { refuses: true, ..ShimOptions::default() });
        shim.take_counts();
        fixture.step_device(2.0).unwrap();
        assert_eq!(shim.take_counts().launches, ["rfd_norm_f32", "rfd_update_f32", "rfd_status"]);
        assert!(!fixture.on_device.is_cooperative());
        alone.step_device(2.0).unwrap();
        assert_eq!(shim.take_counts().launches, ["rfd_step_f32"]);
        shim.set_options(ShimOptions::default());
        let apart = (0..200).take_while(|_| {
            fixture.step_device(2.0).unwrap();
            shim.take_counts().launches != ["rfd_step_f32"]
        });
        assert_eq!(apart.count(), 99);
        // settings are written in one launch
        fixture.on_device.set_multiplier(0.5, Stream::DEFAULT).unwrap();
        assert_eq!(shim.take_counts().launches, ["rfd_store"]);
        shim.set_options(ShimOptions { cooperative: false, ..ShimOptions::default() });
        assert!(!Fixture::new(&executor, &[3], DType::F32, plain()).on_device.is_cooperative());
        shim.set_options(ShimOptions { blocks: 0, ..ShimOptions::default() });
        let mut fixture = Fixture::new(&executor, &[300], DType::F32, plain());
        shim.take_counts();
        fixture.step_device(2.0).unwrap();
        fixture.step_cpu(2.0);
        fixture.assert_same();
        assert_eq!(shim.take_counts().launches, ["rfd_norm_f32", "rfd_update_f32", "rfd_status"]);
        shim.set_options(ShimOptions::default());
    }
}

/// A captured step brings its own table along: neither eager steps nor other captures may change what it
/// reads.
#[test]
fn long_lists_are_stored_once_for_eager_steps_and_by_every_captured_one() {
    #[cfg(feature = "shim")]
    for executor in executors() {
        let Some(shim) = &executor.shim else { continue };
        let mut fixture = Fixture::new(&executor, &[3; 1000], DType::F32, plain());
        let capture = |capturing| shim.set_options(ShimOptions { capturing, ..ShimOptions::default() });
        let launches = |fixture: &mut Fixture| {
            shim.take_counts();
            fixture.step_device(2.0).unwrap();
            shim.take_counts().launches.iter().filter(|name| *name == "rfd_store").count()
        };
        assert_eq!([launches(&mut fixture), launches(&mut fixture)], [3, 0]);
        capture(true);
        assert_eq!([launches(&mut fixture), launches(&mut fixture)], [3, 3]);
        capture(false);
        assert_eq!(launches(&mut fixture), 0);
        fixture.tensors[999].grad = 0;
        assert_eq!([launches(&mut fixture), launches(&mut fixture)], [3, 0]);
        let before = shim.take_counts().allocations;
        drop(fixture);
        assert!(shim.take_counts().allocations < before);
    }
}

#[test]
fn a_captured_first_step_with_master_weights_is_refused() {
    #[cfg(feature = "shim")]
    for executor in executors() {
        let Some(shim) = &executor.shim else { continue };
        let mut fixture = Fixture::with(moving(0.9), &executor, &[300], DType::BF16, masters());
        shim.set_options(ShimOptions { capturing: true, ..ShimOptions::default() });
        let message = fixture.step_device(2.0).unwrap_err().to_string();
        assert!(message.contains("init_master_weights"), "{message}");
        shim.set_options(ShimOptions::default());
        // SAFETY: the fixture's buffers live longer than the work.
        unsafe { fixture.on_device.init_master_weights(&fixture.tensors, STREAM).unwrap() };
        shim.set_options(ShimOptions { capturing: true, ..ShimOptions::default() });
        fixture.step_device(2.0).unwrap();
        fixture.step_cpu(2.0);
        fixture.assert_same();
        shim.set_options(ShimOptions::default());
    }
}

/// A reader never sees a mixture of two steps, however often it looks: the loss says which step a block is
/// of.
#[test]
fn a_report_read_meanwhile_is_of_one_step() {
    for executor in executors() {
        let mut fixture = Fixture::new(&executor, &[100], DType::F32, plain());
        let reader = fixture.on_device.report_reader();
        let (done, seen) = (AtomicBool::new(false), AtomicU32::new(0));
        std::thread::scope(|scope| {
            let (done, seen) = (&done, &seen);
            scope.spawn(move || {
                let mut last = 0;
                while !done.load(Ordering::Acquire) {
                    if let Some(report) = reader.read().unwrap() {
                        let count = report.applied_steps + report.skipped_steps;
                        assert_eq!(report.loss, -(count as f64));
                        assert!(count >= last, "{count} after {last}");
                        seen.fetch_add(u32::from(count > last), Ordering::Relaxed);
                        last = count;
                    }
                }
            });
            // As many more steps as a busy machine needs until the reader has had its turns.
            let enough = |step| step > 3000 && seen.load(Ordering::Relaxed) > 1 || step > 300_000;
            for i in (1..).take_while(|&i| !enough(i)) {
                fixture.step_device(-f64::from(i)).unwrap();
            }
            fixture.on_device.wait_report(STREAM).unwrap();
            done.store(true, Ordering::Release);
        });
        let reads = seen.into_inner();
        assert!(reads > 1, "the reader saw {reads} steps");
    }
}

#[test]
fn errors_name_the_tensor_or_the_argument_and_change_nothing() {
    for executor in executors() {
        let mut fixture = Fixture::new(&executor, &[8, 8], DType::F32, plain());
        let good = fixture.tensors.clone();
        let input = RawInput::new(2.0);
        let mut error = |tensors: &[RawTensor], input: &RawInput| {
            // SAFETY: refused before anything is read.
            unsafe { fixture.on_device.step(tensors, input, STREAM) }.unwrap_err().to_string()
        };
        let mut shared = good.clone();
        shared[1].param = shared[0].param;
        let message = error(&shared, &input);
        assert!(message.contains("`t1`") && message.contains("`t0`"), "{message}");
        let mut null = good.clone();
        null[0].param = 0;
        assert!(error(&null, &input).contains("`t0`"));
        assert!(error(&good[..1], &input).contains("2 tensors"));
        let loss = RawNumber::Address { address: 0, dtype: DType::F32 };
        assert!(error(&good, &RawInput::new(loss)).contains("loss"));
        let odd = |address| RawNumber::Address { address, dtype: DType::F32 };
        assert!(
            error(&good, &RawInput { grad_scale: odd(good[0].param + 2), ..input }).contains("grad_scale")
        );
        assert!(error(&good, &RawInput { found_inf: odd(1), ..input }).contains("found_inf"));
        // numbers of the host, where a device reads its own memory
        assert!(error(&good, &RawInput { grad_scale: 2.0.into(), ..input }).contains("grad_scale"));
        let double = RawNumber::Address { address: good[0].param, dtype: DType::F64 };
        assert!(error(&good, &RawInput { found_inf: double, ..input }).contains("f32"));
        assert!(fixture.on_device.wait_report(STREAM).unwrap().is_none());
        fixture.assert_same();

        let own = std::sync::Arc::new(Own);
        let model = Model::with_covariance(own, moments()).unwrap();
        let message = DeviceOptimizer::new(model, plain(), vec![], &executor.device).unwrap_err().to_string();
        assert!(message.contains("`Optimizer`"), "{message}");
        let mut on_device = fixture.on_device;
        assert!(on_device.set_multiplier(-1.0, STREAM).is_err());
        assert!(on_device.set_group(1, Group::default(), STREAM).is_err());
        assert_eq!(on_device.options(), &plain());
    }
}

/// No file could hold a history that isn't finite: not where a variance overflows of a tensor that does not
/// count in the norm.
#[test]
fn what_the_adaptive_method_remembers_stays_finite() {
    for executor in executors() {
        let mut values = vec![Owned::F32(vec![1.0; 300]), Owned::F64(vec![1.0; 300])];
        let gradients = [Owned::F32(vec![1.0; 300]), Owned::F64(vec![1e130; 300])];
        let mut random = Random(1);
        let mut placed = Placed::new(&executor.device, &values, &mut random, STREAM);
        let placed_grads = Placed::new(&executor.device, &gradients, &mut random, STREAM);
        let tensors = step_tensors(&placed, &placed_grads, &[Some(DType::F32), Some(DType::F64)]);
        let mut specs = vec![
            TensorSpec::new("counts", &[300], DType::F32),
            TensorSpec::new("does not", &[300], DType::F64),
        ];
        specs[1].counts_in_norm = false;
        let mut on_cpu = Optimizer::new(Adaptive::default(), plain(), specs.clone()).unwrap();
        let mut on_device =
            DeviceOptimizer::new(Adaptive::default(), plain(), specs, &executor.device).unwrap();
        let refused = Outcome::Skipped(SkipReason::OutOfRange);
        let mut steps = vec![(0, 1.0, Outcome::Applied); 15];
        steps.extend([(-100, 1.0, refused), (0, 1.0, Outcome::Applied)]);
        for (exponent, loss, outcome) in steps {
            let grad_scale = 2f64.powi(exponent);
            let scale = scalar(&executor.device, DType::F32, grad_scale, STREAM);
            let input = RawInput { grad_scale: number(&scale), ..RawInput::new(loss) };
            // SAFETY: all addresses are those of live buffers of the right sizes and formats.
            unsafe { on_device.step(&tensors, &input, STREAM).unwrap() };
            let input = StepInput { grad_scale, ..StepInput::new(loss) };
            let report = on_cpu.step(&mut params(&mut values), &grads(&gradients), &input).unwrap();
            assert_eq!(report.outcome, outcome);
            let own = on_device.wait_report(STREAM).unwrap().unwrap();
            assert_eq!(report_bits(&own), report_bits(&report));
        }
        assert_same_params(&placed.read(STREAM), &values, "finite");
        let state = on_device.state_to_bytes(STREAM).unwrap();
        assert_same_state(&state, &on_cpu.state_to_bytes().unwrap(), &values);
        on_cpu.load_state_from_bytes(&state).unwrap();
    }
}

#[test]
fn the_adaptive_method_has_no_other_settings() {
    for executor in executors() {
        let mut fixture = Fixture::with(Adaptive::default(), &executor, &[8, 300], DType::F32, plain());
        fixture.step_device(2.0).unwrap();
        fixture.step_cpu(2.0);
        let error = fixture.on_device.set_method(moving(0.5), STREAM).unwrap_err();
        assert!(error.to_string().contains("adaptive method"), "{error}");
        let other = Adaptive { averaging: 0.5, ..Adaptive::default() };
        let error = fixture.on_device.set_method(other, STREAM).unwrap_err();
        assert!(error.to_string().contains("averaging"), "{error}");
        let report = fixture.on_device.wait_report(STREAM).unwrap().unwrap();
        assert_eq!((report.applied_steps, report.skipped_steps), (1, 0));
        fixture.assert_same();
    }
}

/// A covariance that no kernel knows.
#[derive(Debug)]
struct Own;

impl rfdescent::covariance::Covariance for Own {
    fn name(&self) -> String {
        "own".into()
    }
    fn c(&self, h: f64) -> f64 {
        (-h).exp()
    }
    fn dc(&self, h: f64) -> f64 {
        -(-h).exp()
    }
    fn ddc(&self, h: f64) -> f64 {
        (-h).exp()
    }
}

/// Master weights are the parameters, exactly, for every bit pattern; and can be filled anew.
#[test]
fn master_weights_start_as_the_parameters() {
    for executor in executors() {
        for dtype in [DType::F16, DType::BF16] {
            let all: Vec<u16> = (0..=u16::MAX).collect();
            let values = match dtype {
                DType::F16 => Owned::F16(all.iter().map(|&b| f16::from_bits(b)).collect()),
                _ => Owned::BF16(all.iter().map(|&b| bf16::from_bits(b)).collect()),
            };
            let mut random = Random(3);
            let placed = Placed::new(&executor.device, std::slice::from_ref(&values), &mut random, STREAM);
            let options = Options { master_weights: true, ..plain() };
            let specs = vec![TensorSpec::new("t0", &[all.len()], dtype)];
            let mut optimizer =
                DeviceOptimizer::new(model(Family::Matern32), options, specs, &executor.device).unwrap();
            assert!(buffers(&optimizer.state_to_bytes(STREAM).unwrap()).is_empty());
            let tensors = [RawTensor::without_grad(placed.address(0))];
            // SAFETY: `placed` lives until the state has been read.
            unsafe { optimizer.init_master_weights(&tensors, STREAM).unwrap() };
            let state = buffers(&optimizer.state_to_bytes(STREAM).unwrap());
            let master = state["master.t0"].to_f64();
            for (master, value) in master.iter().zip(values.to_f64()) {
                assert!(master.to_bits() == value.to_bits() || master.is_nan() && value.is_nan());
            }
        }
    }
}

#[test]
fn the_choice_of_a_target_says_why() {
    let choice = rfdescent::device::Target::auto();
    let text = choice.to_string();
    match choice.target {
        rfdescent::device::Target::Cpu => assert!(text.starts_with("CPU: "), "{text}"),
        rfdescent::device::Target::Device(device) => assert!(text.contains(&device.name()), "{text}"),
    }
    println!("{text}");
    #[cfg(feature = "cuda")]
    println!("{}", rfdescent::cuda::report());
}
