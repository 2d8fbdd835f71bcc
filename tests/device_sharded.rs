//! Sharded steps of the adaptive method on devices against those on the CPU, bit for bit: random tensors in
//! random parts, as `tests/device.rs` does it with whole ones and by the same variables.
#![cfg(any(feature = "cuda", feature = "shim"))]

mod common;
mod device_support;
mod parts;

use std::num::NonZeroU32;
use std::ops::Range;

use common::*;
use device_support::*;
use parts::{Block, Tensor};
#[cfg(feature = "shim")]
use rfdescent::device::ShimOptions;
use rfdescent::device::{Device, Stream};
use rfdescent::optimizer::{
    Adaptive, AnyOptimizer, DeviceOptimizer, Group, LocalSums, Optimizer, Options, RawInput, RawTensor,
    StepInput, TensorSpec, Whole,
};
use rfdescent::{DType, Error};

const STREAM: Stream = Stream::PER_THREAD;

/// Random places at which a size is cut into so many ranges, some of them empty.
fn cuts(random: &mut Random, size: usize, count: usize) -> Vec<Range<usize>> {
    let mut cuts: Vec<usize> = (1..count).map(|_| random.below(size + 1)).collect();
    cuts.extend([0, size]);
    cuts.sort_unstable();
    cuts.windows(2).map(|cut| cut[0]..cut[1]).collect()
}

/// A random tensor in parts on so many ranks: by rows or columns, in blocks, on each rank, or on some;
/// `small` ones for long lists.
fn tensor(random: &mut Random, ranks: usize, dtype: DType, small: bool) -> Tensor {
    const SHAPES: [&[usize]; 13] = [
        &[1],
        &[7],
        &[300],
        &[1, 1],
        &[5, 1],
        &[3, 40],
        &[4, 3, 2],
        &[0, 6],
        &[37, 24],
        &[130, 300],
        &[700, 64],
        &[3, 9000],
        &[9001],
    ];
    let shape = random.pick(if small { &SHAPES[..8] } else { &SHAPES });
    let by = |dim: usize, ranges: &[Range<usize>]| Tensor { dtype, ..Tensor::cut(shape, dim, ranges) };
    match random.below(6) {
        0 => Tensor { dtype, ..Tensor::replicated(shape, ranks) },
        1 if shape.len() > 1 && shape[1] <= 4096 => by(1, &cuts(random, shape[1], ranks)),
        2 if shape == [3, 9000] => {
            // Pieces of a row have to divide it into parts that fit.
            let half =
                |rank: usize| if ranks == 1 || rank > 1 { 0..9000 } else { rank * 4500..(rank + 1) * 4500 };
            let mut tensor = by(1, &(0..ranks).map(half).collect::<Vec<_>>());
            tensor.blocks.iter_mut().skip(2).for_each(|block| block.ranges[1] = 9000..9000);
            tensor
        }
        3 if shape.len() == 2 && ranks == 4 && shape[1] <= 4096 => {
            let (rows, columns) = (cuts(random, shape[0], 2), cuts(random, shape[1], 2));
            let block = |rank: usize| vec![rows[rank / 2].clone(), columns[rank % 2].clone()];
            let blocks = (0..4).map(|rank| Block { ranges: block(rank), counts: true }).collect();
            Tensor { blocks, ..by(0, &vec![0..0; 4]) }
        }
        4 if ranks == 4 => {
            // In two parts, each on two ranks.
            let halves = cuts(random, shape[0], 2);
            let mut tensor = by(0, &[&halves[..], &halves].concat());
            tensor.blocks.iter_mut().skip(2).for_each(|block| block.counts = false);
            tensor
        }
        5 if shape == [300] => {
            // Between rows of six.
            let rows = cuts(random, 50, ranks).into_iter();
            Tensor {
                row: Some(6),
                ..by(0, &rows.map(|rows| 6 * rows.start..6 * rows.end).collect::<Vec<_>>())
            }
        }
        _ => by(0, &cuts(random, shape[0], ranks)),
    }
}

/// What a rank has, on the CPU and on the device.
struct Rank {
    specs: Vec<TensorSpec>,
    options: Options,
    adaptive: Adaptive,
    values: Vec<Owned>,
    placed: Placed,
    on_cpu: Optimizer,
    on_device: DeviceOptimizer,
}

/// The gradients of a step on one rank; all of them live until the second half is done.
struct Gradients {
    values: Vec<Owned>,
    present: Vec<bool>,
    placed: Placed,
}

/// What goes into a step beside tensors, for both.
struct Input {
    on_cpu: StepInput,
    on_device: RawInput,
}

impl Rank {
    fn new(
        device: &Device,
        adaptive: Adaptive,
        options: &Options,
        specs: Vec<TensorSpec>,
        values: Vec<Owned>,
        random: &mut Random,
    ) -> Self {
        let placed = Placed::new(device, &values, random, STREAM);
        let on_cpu = Optimizer::new(adaptive, options.clone(), specs.clone()).unwrap();
        let on_device = DeviceOptimizer::new(adaptive, options.clone(), specs.clone(), device).unwrap();
        Self { specs, options: options.clone(), adaptive, values, placed, on_cpu, on_device }
    }

    fn list(&self, gradients: &Gradients) -> Vec<RawTensor> {
        let formats = gradients.values.iter().zip(&gradients.present);
        let formats: Vec<_> = formats.map(|(g, &has)| has.then(|| g.dtype())).collect();
        step_tensors(&self.placed, &gradients.placed, &formats)
    }

    /// The sums of both, which are the same.
    fn first_half(&mut self, gradients: &Gradients, input: &Input) -> LocalSums {
        let list = self.list(gradients);
        let refs = grad_refs(&gradients.values, &gradients.present);
        let sums = self.on_cpu.local_sums(&params(&mut self.values), &refs, input.on_cpu.grad_scale).unwrap();
        // SAFETY: all addresses are those of live buffers of the right sizes and formats.
        let address =
            unsafe { self.on_device.local_sums(&list, input.on_device.grad_scale, STREAM).unwrap() };
        assert!(address.is_multiple_of(8));
        assert_same_numbers(&self.on_device.read_sums(STREAM).unwrap(), sums.values());
        sums
    }

    /// The same step on both; false where the sums are an error.
    fn second_half(&mut self, gradients: &Gradients, sums: LocalSums, input: &Input) -> bool {
        let list = self.list(gradients);
        let refs = grad_refs(&gradients.values, &gradients.present);
        let bytes: Vec<u8> = sums.values().iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut buffer = self.on_device.device().allocate(bytes.len()).unwrap();
        buffer.upload(0, &bytes, STREAM).unwrap();
        // SAFETY: all addresses are those of live buffers of the right sizes and formats.
        unsafe { self.on_device.step_with_sums(&list, buffer.address(), &input.on_device, STREAM).unwrap() };
        let found = self.on_device.wait_report(STREAM);
        let expected = self.on_cpu.step_with_sums(&mut params(&mut self.values), &refs, sums, &input.on_cpu);
        let what = format!("{expected:?}");
        let fine = match (found, expected) {
            (Ok(found), Ok(expected)) => {
                assert_eq!(report_bits(&found.unwrap()), report_bits(&expected), "{what}");
                true
            }
            (Err(Error::Tensor { tensor: found, .. }), Err(Error::Tensor { tensor: expected, .. })) => {
                assert_eq!(found, expected, "{what}");
                false
            }
            (found, _) => panic!("{found:?} on the device, {what} on the CPU"),
        };
        assert_same_params(&self.placed.read(STREAM), &self.values, &what);
        fine
    }

    fn assert_same_state(&self) {
        let device = self.on_device.state_to_bytes(STREAM).unwrap();
        assert_same_state(&device, &self.on_cpu.state_to_bytes().unwrap(), &self.values);
    }

    /// Both go on from the other's state.
    fn exchange_states(&mut self) {
        self.assert_same_state();
        let device = self.on_device.device().clone();
        let (from_cpu, from_device) =
            (self.on_cpu.state_to_bytes().unwrap(), self.on_device.state_to_bytes(STREAM).unwrap());
        self.on_cpu.load_state_from_bytes(&from_device).unwrap();
        self.on_device =
            DeviceOptimizer::new(self.adaptive, self.options.clone(), self.specs.clone(), &device).unwrap();
        self.on_device.load_state_from_bytes(&from_cpu, STREAM).unwrap();
    }
}

/// What the ranks have of random gradients of a step.
fn gradients(
    device: &Device,
    random: &mut Random,
    tensors: &[Tensor],
    formats: &[DType],
    torn: bool,
) -> Vec<Gradients> {
    let ranks = tensors[0].blocks.len();
    let size = random.pick(&[1.0, 1.0, 0.1, 3.0]);
    let whole: Vec<Option<Owned>> = (tensors.iter().zip(formats).enumerate())
        .map(|(k, (tensor, &format))| {
            let size = size * [1.0, 0.05, 4.0][k % 3];
            let mut values: Vec<f64> =
                uniform(random.next(), tensor.len()).into_iter().map(|x| size * x).collect();
            if random.one_in(20 * tensors.len())
                && let Some(last) = values.last_mut()
            {
                *last = f64::INFINITY;
            }
            (!random.one_in(6)).then(|| Owned::from_f64(format, &values))
        })
        .collect();
    (0..ranks)
        .map(|rank| {
            let mut present: Vec<bool> = whole.iter().map(Option::is_some).collect();
            present[0] &= !torn || rank > 0;
            let part = |((tensor, whole), &format): ((&Tensor, &Option<Owned>), &DType)| {
                let zeros = || Owned::from_f64(format, &vec![0.0; tensor.len()]);
                tensor.blocks[rank].of(&tensor.shape, &whole.clone().unwrap_or_else(zeros))
            };
            let values: Vec<Owned> = tensors.iter().zip(&whole).zip(formats).map(part).collect();
            Gradients { placed: Placed::new(device, &values, random, STREAM), values, present }
        })
        .collect()
}

/// A random list of so many tensors on random ranks, in steps of both halves on the CPU and on the device.
fn compare(executor: &Executor, seed: u64, count: impl Fn(&mut Random) -> usize) {
    let device = &executor.device;
    let random = &mut Random(seed);
    let ranks = random.pick(&[1, 2, 4]);
    let single = Some((DType::F32, DType::F32));
    let kind = random.pick(&[single, single, Some((DType::BF16, DType::BF16)), None]);
    let count = count(random);
    let formats: Vec<(DType, DType)> =
        (0..count).map(|_| kind.unwrap_or_else(|| (random.pick(&DTYPES), random.pick(&DTYPES)))).collect();
    let tensors: Vec<Tensor> =
        formats.iter().map(|&(param, _)| tensor(random, ranks, param, count > 100)).collect();
    let formats: Vec<DType> = formats.into_iter().map(|(_, grad)| grad).collect();
    let adaptive = Adaptive {
        averaging: random.pick(&[0.9, 0.9, 0.5, 0.0]),
        loss_bound: random.pick(&[None, None, Some(0.1)]),
    };
    let second = Group { multiplier: 0.3, length_scale_factor: 1.5, weight_decay: 0.1, ..Group::default() };
    let options = Options {
        master_weights: random.one_in(2),
        stochastic_rounding: if random.one_in(2) { Some(random.next()) } else { None },
        max_step_size: random.pick(&[None, None, Some(0.05)]),
        groups: vec![Group::default(), second],
        ..Options::default()
    };
    let whole: Vec<Owned> = (tensors.iter())
        .map(|tensor| Owned::from_f64(tensor.dtype, &uniform(random.next(), tensor.len())))
        .collect();
    executor.set_schedule(random.next(), false);
    let mut all: Vec<Rank> = (0..ranks)
        .map(|rank| {
            let specs = tensors.iter().enumerate().map(|(k, t)| t.spec_of(k, rank)).collect();
            let values = tensors.iter().zip(&whole).map(|(t, v)| t.blocks[rank].of(&t.shape, v)).collect();
            Rank::new(device, adaptive, &options, specs, values, random)
        })
        .collect();
    for n in 0..10 {
        // A gradient that is missing on one rank.
        let torn = random.one_in(if n == 0 { 3 } else { 8 });
        let scale = random.pick(&[None, Some(1.0), Some(1024.0), Some(3.0)]);
        let found_inf = random.pick(&[None, None, None, Some(0.0), Some(2.0)]);
        let loss = random.pick(&[2.0, 1.9, 1.5, 2.2, 1.0, 1e3, f64::NAN, -0.5]);
        let scale_buffer = scale.map(|scale| scalar(device, DType::F32, scale, STREAM));
        let found_buffer = found_inf.map(|found| scalar(device, DType::F32, found, STREAM));
        let input = Input {
            on_cpu: StepInput { loss, grad_scale: scale.unwrap_or(1.0), found_inf: found_inf.unwrap_or(0.0) },
            on_device: RawInput {
                grad_scale: scale_buffer.as_ref().map_or(1.0.into(), number),
                found_inf: found_buffer.as_ref().map_or(0.0.into(), number),
                ..RawInput::new(loss)
            },
        };
        let gradients = gradients(device, random, &tensors, &formats, torn);
        let mut sums: Vec<LocalSums> = (all.iter_mut().zip(&gradients))
            .map(|(rank, gradients)| {
                rank.on_device.set_max_blocks(NonZeroU32::new(1 + random.below(8) as u32));
                rank.first_half(gradients, &input)
            })
            .collect();
        add_up(&mut sums);
        let fine: Vec<bool> = (all.iter_mut().zip(&gradients).zip(sums))
            .map(|((rank, gradients), sums)| rank.second_half(gradients, sums, &input))
            .collect();
        assert!(fine.iter().all(|&one| one == fine[0]) && (torn || fine[0]), "{fine:?}");
        if random.one_in(5) {
            all.iter_mut().for_each(Rank::exchange_states);
        }
    }
    all.iter().for_each(Rank::assert_same_state);
}

#[test]
fn random_parts_match_the_cpu() {
    for_seeds("random_parts", 60, |executor, seed| compare(executor, seed, |random| 1 + random.below(7)));
}

/// More tensors than are passed by value.
#[test]
fn long_lists_of_parts_match_the_cpu() {
    for_seeds("long_lists_of_parts", 1, |executor, seed| {
        compare(executor, seed, |random| 401 + random.below(7))
    });
}

/// One rank with a part of a matrix by each dimension.
fn one_rank(executor: &Executor, options: Options) -> (Rank, Vec<Gradients>, Input) {
    let random = &mut Random(3);
    let specs = vec![
        TensorSpec::new("rows", &[40, 30], DType::F32).part_of(Whole::new(&[40, 30], &[0, 0])),
        TensorSpec::new("pieces", &[20, 30], DType::F32)
            .part_of(Whole::new(&[20, 30], &[0, 0]).with_split_rows()),
    ];
    let values: Vec<Owned> = (specs.iter())
        .map(|spec| Owned::from_f64(DType::F32, &uniform(random.next(), spec.len().unwrap())))
        .collect();
    let rank = Rank::new(&executor.device, Adaptive::default(), &options, specs, values, random);
    let input = Input { on_cpu: StepInput::new(2.0), on_device: RawInput::new(2.0) };
    let gradients: Vec<Gradients> = (0..2)
        .map(|_| {
            let values: Vec<Owned> = (rank.specs.iter())
                .map(|spec| Owned::from_f64(DType::F32, &uniform(random.next(), spec.len().unwrap())))
                .collect();
            let placed = Placed::new(&executor.device, &values, random, STREAM);
            Gradients { placed, values, present: vec![true; 2] }
        })
        .collect();
    (rank, gradients, input)
}

/// The same after a first step.
fn first_step(executor: &Executor, options: Options) -> (Rank, Vec<Gradients>, Input) {
    let (mut rank, gradients, input) = one_rank(executor, options);
    let sums = rank.first_half(&gradients[0], &input);
    assert!(rank.second_half(&gradients[0], sums, &input));
    (rank, gradients, input)
}

/// Neither numbers that were added up twice nor those of no rank set length scales.
#[test]
fn a_torn_first_step_changes_only_its_count() {
    let spoils: [fn(&mut f64); 2] = [|number| *number *= 2.0, |number| *number = 0.0];
    for executor in executors() {
        let (mut rank, gradients, input) = one_rank(&executor, Options::default());
        for (spoil, skipped) in spoils.into_iter().zip(1..) {
            let mut sums = rank.first_half(&gradients[0], &input);
            sums.values_mut().iter_mut().for_each(spoil);
            assert!(!rank.second_half(&gradients[0], sums, &input));
            assert_eq!(rank.on_cpu.skipped_steps(), skipped);
            rank.assert_same_state();
        }
        for gradients in &gradients {
            let sums = rank.first_half(gradients, &input);
            assert!(rank.second_half(gradients, sums, &input));
            rank.assert_same_state();
        }
    }
}

#[test]
fn halves_leave_nothing_to_the_host() {
    #[cfg(feature = "shim")]
    for executor in executors() {
        let Some(shim) = &executor.shim else { continue };
        let (mut rank, gradients, input) = first_step(&executor, Options::default());
        let list = rank.list(&gradients[1]);
        shim.take_counts();
        // SAFETY: all addresses are those of live buffers of the right sizes and formats.
        unsafe {
            let sums = rank.on_device.local_sums(&list, input.on_device.grad_scale, STREAM).unwrap();
            rank.on_device.step_with_sums(&list, sums, &input.on_device, STREAM).unwrap();
        }
        let counts = shim.take_counts();
        let expected = ["norm_f32_averaged", "local_sums", "take_sums", "update_f32_averaged", "status"];
        assert_eq!(counts.launches, expected.map(|name| format!("rfd_{name}")));
        assert_eq!((counts.allocated, counts.copies, counts.waits), (0, 0, 0));
        assert_eq!(rank.on_device.wait_report(STREAM).unwrap().unwrap().applied_steps, 2);
    }
}

#[test]
fn errors_say_what_is_done_wrong() {
    for executor in executors() {
        let (mut rank, gradients, Input { on_device: input, .. }) = first_step(&executor, Options::default());
        let list = rank.list(&gradients[1]);
        let mut other = list.clone();
        other[1].grad = 0;
        let before = rank.placed.read(STREAM);
        // SAFETY: all addresses are those of live buffers of the right sizes and formats.
        unsafe {
            let device = &mut rank.on_device;
            let error = device.step(&list, &input, STREAM).unwrap_err().to_string();
            assert!(error.contains("`rows`") && error.contains("two halves"), "{error}");
            let sums = device.local_sums(&list, 1.0, STREAM).unwrap();
            let error = device.step_with_sums(&other, sums, &input, STREAM).unwrap_err().to_string();
            assert!(error.contains("`pieces`") && error.contains("first half"), "{error}");
            device.step_with_sums(&list, sums, &input, STREAM).unwrap();
            let error = device.step_with_sums(&list, sums, &input, STREAM).unwrap_err().to_string();
            assert!(error.contains("sums") && error.contains("no first half"), "{error}");
            let error = device.local_sums(&list, 2.0, STREAM).unwrap_err().to_string();
            assert!(error.contains("grad_scale") && error.contains("address"), "{error}");
        }
        assert_ne!(rank.placed.read(STREAM), before);
        let locked = Group { norm_lock: true, ..Group::default() };
        let options = Options { groups: vec![locked], ..Options::default() };
        let mut locked =
            DeviceOptimizer::new(Adaptive::default(), options, rank.specs.clone(), &executor.device).unwrap();
        // SAFETY: refused before anything is read.
        let error = unsafe { locked.local_sums(&list, 1.0, STREAM) }.unwrap_err().to_string();
        assert!(error.contains("norm_lock"), "{error}");
    }
}

/// Length scales are those of the whole tensors: of what ranks have added up, not of a part alone.
#[test]
fn a_first_half_is_not_captured() {
    #[cfg(feature = "shim")]
    for executor in executors() {
        let Some(shim) = &executor.shim else { continue };
        let (rank, gradients, _) = first_step(&executor, Options::default());
        let list = rank.list(&gradients[1]);
        let mut fresh = DeviceOptimizer::new(
            Adaptive::default(),
            Options::default(),
            rank.specs.clone(),
            &executor.device,
        )
        .unwrap();
        // SAFETY: all addresses are those of live buffers of the right sizes and formats.
        unsafe { fresh.init_master_weights(&list, STREAM).unwrap() };
        shim.set_options(ShimOptions { capturing: true, ..ShimOptions::default() });
        // SAFETY: all addresses are those of live buffers of the right sizes and formats.
        let error = unsafe { fresh.local_sums(&list, 1.0, STREAM) }.unwrap_err().to_string();
        assert!(error.contains("over and over") && error.contains("wait for its report"), "{error}");
        shim.set_options(ShimOptions::default());
    }
}

#[test]
fn any_optimizer_takes_both_halves() {
    for executor in executors() {
        let (mut rank, gradients, input) = first_step(&executor, Options::default());
        let list = rank.list(&gradients[1]);
        let sums = rank.first_half(&gradients[1], &input);
        let refs = grad_refs(&gradients[1].values, &gradients[1].present);
        let expected =
            rank.on_cpu.step_with_sums(&mut params(&mut rank.values), &refs, sums, &input.on_cpu).unwrap();
        let mut any = AnyOptimizer::from(rank.on_device);
        // SAFETY: all addresses are those of live buffers of the right sizes and formats.
        unsafe {
            let sums = any.local_sums(&list, input.on_device.grad_scale, STREAM).unwrap();
            assert!(any.step_with_sums(&list, sums, &input.on_device, STREAM).unwrap().is_none());
        }
        let found = any.wait_report(STREAM).unwrap().unwrap();
        assert_eq!(report_bits(&found), report_bits(&expected));
        assert_same_params(&rank.placed.read(STREAM), &rank.values, "both halves");
    }
}
