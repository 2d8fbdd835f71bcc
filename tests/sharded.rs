//! Steps of the adaptive method in two halves, on simulated ranks beside the whole step.

mod common;
mod parts;

use common::*;
use parts::Tensor;
use rfdescent::optimizer::{
    Adaptive, Group, LocalSums, Optimizer, Options, Outcome, SkipReason, StepInput, StepReport, TensorSpec,
    Whole,
};
use rfdescent::{DType, GradRef};

/// Cut along the first dimension as FSDP2 does it, by another dimension, in blocks by both, not at all.
/// All chunks of all tensors tell of columns in each step, so that the order of sums alone differs.
fn tensors(ranks: usize) -> Vec<Tensor> {
    // As torch.chunk: the last ranks have less, or nothing.
    let even = |size: usize, ranks: usize| -> Vec<_> {
        let part = size.div_ceil(ranks);
        (0..ranks).map(|rank| (rank * part).min(size)..((rank + 1) * part).min(size)).collect()
    };
    let uneven = |size: usize| -> Vec<_> {
        let cuts: Vec<usize> = (0..=ranks).map(|rank| size * rank * rank / (ranks * ranks)).collect();
        cuts.windows(2).map(|cut| cut[0]..cut[1]).collect()
    };
    let mut list = vec![
        Tensor::cut(&[37, 24], 0, &even(37, ranks)),
        Tensor::cut(&[3], 0, &even(3, ranks)),
        Tensor::cut(&[29, 40], 1, &uneven(40)),
        Tensor::cut(&[3, 4, 2, 2], 0, &even(3, ranks)),
        Tensor::cut(&[8, 5, 3], 1, &even(5, ranks)),
        Tensor::replicated(&[50], ranks),
        Tensor::cut(&[90], 0, &uneven(90)),
        Tensor::cut(&[1], 0, &even(1, ranks)),
        Tensor::cut(&[20, 1], 1, &even(1, ranks)),
        Tensor::replicated(&[12, 33], ranks),
        Tensor { row: Some(6), ..Tensor::cut(&[60], 0, &even(10, ranks)) },
    ];
    // Between rows of six.
    for block in &mut list.last_mut().unwrap().blocks {
        block.ranges[0] = 6 * block.ranges[0].start..6 * block.ranges[0].end;
    }
    if ranks == 4 {
        let (rows, columns) = (even(13, 2), even(11, 2));
        let mut blocks = Tensor::cut(&[13, 11], 0, &even(13, 4));
        for (rank, block) in blocks.blocks.iter_mut().enumerate() {
            block.ranges = vec![rows[rank / 2].clone(), columns[rank % 2].clone()];
        }
        list.push(blocks);
        // In halves, each on two ranks, as FSDP2 does it with replicas.
        let mut hybrid = Tensor::cut(&[10, 7], 0, &[0..5, 5..10, 0..5, 5..10]);
        hybrid.blocks[2].counts = false;
        hybrid.blocks[3].counts = false;
        list.push(hybrid);
    }
    list
}

fn options() -> Options {
    let second = Group { multiplier: 0.3, length_scale_factor: 1.5, weight_decay: 0.1, ..Group::default() };
    Options { groups: vec![Group::default(), second], multiplier: 0.8, ..Options::default() }
}

/// One rank, with what it holds.
struct Rank {
    optimizer: Optimizer,
    values: Vec<Owned>,
}

/// The same training on ranks and in one piece.
struct Run {
    tensors: Vec<Tensor>,
    whole: Rank,
    ranks: Vec<Rank>,
    /// By tensor, how far each element has come.
    way: Vec<Vec<f64>>,
}

const SCALE: f64 = 1024.0;

impl Run {
    fn new(adaptive: Adaptive, options: Options, tensors: Vec<Tensor>) -> Self {
        let values: Vec<Owned> = (tensors.iter().enumerate())
            .map(|(k, tensor)| {
                let draws = uniform(77 + k as u64, tensor.len());
                Owned::from_f64(tensor.dtype, &draws.iter().map(|x| 0.3 * x).collect::<Vec<_>>())
            })
            .collect();
        let ranks = (0..tensors[0].blocks.len())
            .map(|rank| Rank {
                optimizer: {
                    let specs = tensors.iter().enumerate().map(|(k, t)| t.spec_of(k, rank)).collect();
                    Optimizer::new(adaptive, options.clone(), specs).unwrap()
                },
                values: tensors.iter().zip(&values).map(|(t, v)| t.blocks[rank].of(&t.shape, v)).collect(),
            })
            .collect();
        let specs = tensors.iter().enumerate().map(|(k, tensor)| tensor.spec(k)).collect();
        let optimizer = Optimizer::new(adaptive, options, specs).unwrap();
        let way = tensors.iter().map(|tensor| vec![0.0; tensor.len()]).collect();
        Self { tensors, whole: Rank { optimizer, values }, ranks, way }
    }

    /// Gradients of whole tensors, times the scale; `None` for a tensor that takes no part.
    fn gradients(&self, n: u64) -> Vec<Option<Owned>> {
        (self.tensors.iter().enumerate())
            .map(|(k, tensor)| {
                let columns = *tensor.shape.last().unwrap();
                let draws = uniform(n << 20 ^ (k as u64) << 8 ^ 5, tensor.len());
                let size = |i: usize| (1.0 + (i / columns % 3) as f64) * (0.1 + (i % columns % 4) as f64);
                let values: Vec<f64> =
                    (0..tensor.len()).map(|i| SCALE * size(i) * (draws[i] + 0.3)).collect();
                let dtype = if tensor.dtype == DType::F64 { DType::F64 } else { DType::F32 };
                ((n + k as u64) % 7 != 3 || k < 3).then(|| Owned::from_f64(dtype, &values))
            })
            .collect()
    }

    fn blocks(&self, rank: usize, gradients: &[Option<Owned>]) -> Vec<Option<Owned>> {
        let of = |(tensor, gradient): (&Tensor, &Option<Owned>)| {
            gradient.as_ref().map(|gradient| tensor.blocks[rank].of(&tensor.shape, gradient))
        };
        self.tensors.iter().zip(gradients).map(of).collect()
    }

    /// Sums of each rank with its gradients.
    fn sums(&mut self, gradients: &[Vec<Option<Owned>>]) -> Vec<LocalSums> {
        (self.ranks.iter_mut().zip(gradients))
            .map(|(Rank { optimizer, values }, g)| {
                optimizer.local_sums(&params(values), &some(g), SCALE).unwrap()
            })
            .collect()
    }

    /// A step of the ranks with their gradients; the report of all.
    fn step_ranks(&mut self, gradients: &[Vec<Option<Owned>>], input: StepInput) -> StepReport {
        let mut sums = self.sums(gradients);
        add_up(&mut sums);
        let reports: Vec<StepReport> = (self.ranks.iter_mut().zip(sums).zip(gradients))
            .map(|((Rank { optimizer, values }, sums), g)| {
                optimizer.step_with_sums(&mut params(values), &some(g), sums, &input).unwrap()
            })
            .collect();
        let bits = |report: &StepReport| format!("{report:?}");
        assert!(reports.iter().all(|report| bits(report) == bits(&reports[0])), "{reports:?}");
        reports[0]
    }

    /// One step of all.
    fn step(&mut self, n: u64) -> [StepReport; 2] {
        let gradients = self.gradients(n);
        let input = StepInput { grad_scale: SCALE, ..StepInput::new(2.0 / (1.0 + 0.1 * n as f64)) };
        let own: Vec<_> = (0..self.ranks.len()).map(|rank| self.blocks(rank, &gradients)).collect();
        let before: Vec<Vec<f64>> = self.whole.values.iter().map(Owned::to_f64).collect();
        let Rank { optimizer, values } = &mut self.whole;
        let whole = optimizer.step(&mut params(values), &some(&gradients), &input).unwrap();
        for ((way, before), after) in self.way.iter_mut().zip(before).zip(&self.whole.values) {
            for ((way, before), after) in way.iter_mut().zip(before).zip(after.to_f64()) {
                *way += (after - before).abs();
            }
        }
        [whole, self.step_ranks(&own, input)]
    }

    /// Calls with what each rank holds of each tensor, the same of the whole run, and its way.
    fn each(&self, mut check: impl FnMut(usize, &Owned, &Owned, &[f64])) {
        for (rank, Rank { values, .. }) in self.ranks.iter().enumerate() {
            for (k, (tensor, value)) in self.tensors.iter().zip(values).enumerate() {
                let block = &tensor.blocks[rank];
                let whole = block.of(&tensor.shape, &self.whole.values[k]);
                let way = block.of(&tensor.shape, &Owned::F64(self.way[k].clone())).to_f64();
                check(k, value, &whole, &way);
            }
        }
    }
}

fn some(gradients: &[Option<Owned>]) -> Vec<GradRef<'_>> {
    gradients.iter().map(|g| g.as_ref().map_or(GradRef::Missing, Owned::grad)).collect()
}

/// On one rank the two halves are the step, to the bit, with every report and state.
#[test]
fn one_rank_takes_the_bits_of_the_step() {
    for averaging in [0.9, 0.0] {
        let mut run = Run::new(Adaptive { averaging, loss_bound: None }, options(), tensors(1));
        for n in 0..40 {
            let [whole, halves] = run.step(n);
            assert_eq!(format!("{whole:?}"), format!("{halves:?}"), "step {n}");
        }
        run.each(|k, value, whole, _| assert_eq!(value.bits(), whole.bits(), "t{k}"));
        let state = |rank: &Rank| rank.optimizer.state_to_bytes().unwrap();
        assert_eq!(state(&run.whole), state(&run.ranks[0]));
    }
}

/// Only the order of sums differs, and what columns weigh is rounded to f32: each step by no more than a few
/// units of its last place.
#[test]
fn ranks_follow_the_whole_run() {
    const UNIT: f64 = f64::from_bits((1023 - 23) << 52);
    for ranks in [2, 4] {
        for averaging in [0.9, 0.0] {
            let mut run = Run::new(Adaptive { averaging, loss_bound: None }, options(), tensors(ranks));
            let empty =
                run.ranks.iter().flat_map(|rank| &rank.values).filter(|v| v.to_f64().is_empty()).count();
            assert!(ranks < 4 || empty > 0);
            for n in 0..60 {
                let [whole, halves] = run.step(n);
                assert_eq!(
                    (whole.outcome, whole.trust, whole.limit),
                    (halves.outcome, halves.trust, halves.limit)
                );
                for (a, b) in [
                    (whole.grad_norm, halves.grad_norm),
                    (whole.sigma_norm, halves.sigma_norm),
                    (whole.learning_rate, halves.learning_rate),
                ] {
                    assert!((a / b - 1.0).abs() <= UNIT, "{ranks} ranks, step {n}: {a} {b}");
                }
            }
            run.each(|k, value, whole, way| {
                for ((a, b), way) in value.to_f64().iter().zip(whole.to_f64()).zip(way) {
                    // Weight decay counts as way, too.
                    assert!((a - b).abs() <= 4.0 * UNIT * way + 1e-13, "{ranks} ranks, t{k}: {a} {b}");
                }
            });
        }
    }
}

/// The same in halves of one format with master weights, where every rounding of a master counts.
#[test]
fn masters_and_velocities_in_single_precision_follow_too() {
    let half = |tensor| Tensor { dtype: DType::BF16, ..tensor };
    let options = Options { master_weights: true, ..options() };
    let mut run = Run::new(Adaptive::default(), options, tensors(4).into_iter().map(half).collect());
    for n in 0..40 {
        run.step(n);
    }
    let (mut all, mut differing) = (0, 0);
    run.each(|k, value, whole, _| {
        for (a, b) in value.to_f64().into_iter().zip(whole.to_f64()) {
            assert!((a - b).abs() <= 2f64.powi(-7) * a.abs().max(2f64.powi(-20)), "t{k}: {a} {b}");
            all += 1;
            differing += usize::from(a != b);
        }
    });
    // Where masters lie on different sides of a tie of bf16.
    assert!(differing * 1000 < all, "{differing} of {all}");
}

/// Large tensors, rows that are cut, and vectors longer than a chunk: each rank samples columns for itself,
/// so that runs are alike in the mean only.
#[test]
fn ranks_stay_alike_where_columns_are_sampled() {
    let ranges = |cuts: &[usize]| cuts.windows(2).map(|cut| cut[0]..cut[1]).collect::<Vec<_>>();
    let list = vec![
        Tensor::cut(&[400, 300], 0, &ranges(&[0, 130, 400])),
        Tensor::cut(&[300, 400], 1, &ranges(&[0, 250, 400])),
        Tensor::cut(&[9, 9000], 1, &ranges(&[0, 4500, 9000])),
        Tensor::cut(&[9001], 0, &ranges(&[0, 4501, 9001])),
    ];
    let single = |tensor| Tensor { dtype: DType::F32, ..tensor };
    let mut run = Run::new(Adaptive::default(), options(), list.into_iter().map(single).collect());
    for n in 0..60 {
        let [whole, halves] = run.step(n);
        assert_eq!(halves.outcome, Outcome::Applied);
        assert!((whole.learning_rate / halves.learning_rate - 1.0).abs() < 0.02, "step {n}");
    }
    let (mut error, mut way) = (0.0, 0.0);
    run.each(|_, value, whole, of| {
        error += value.to_f64().iter().zip(whole.to_f64()).map(|(a, b)| (a - b).abs()).sum::<f64>();
        way += of.iter().sum::<f64>();
    });
    assert!(error < 0.02 * way, "{error} {way}");
}

/// A gradient that is not finite on one rank makes all skip, also of a tensor that counts on another.
#[test]
fn one_rank_makes_all_skip() {
    let mut run = Run::new(Adaptive::default(), options(), tensors(2));
    for n in 0..6 {
        run.step(n);
    }
    let gradients = run.gradients(6);
    let input = StepInput { grad_scale: SCALE, ..StepInput::new(1.0) };
    let states = |run: &Run| -> Vec<_> {
        let state = |rank: &Rank| (format!("{:?}", rank.values), rank.optimizer.applied_steps());
        run.ranks.iter().map(state).collect()
    };
    let before = states(&run);
    for (rank, tensor) in [(0, 0), (1, 2), (0, 5), (1, 6)] {
        for wrong in [f64::NAN, f64::INFINITY] {
            let mut own = [run.blocks(0, &gradients), run.blocks(1, &gradients)];
            let mut values = own[rank][tensor].as_ref().unwrap().to_f64();
            values[0] = wrong;
            own[rank][tensor] = Some(Owned::F64(values));
            let report = run.step_ranks(&own, input);
            assert_eq!(report.outcome, Outcome::Skipped(SkipReason::NonFiniteGradient));
        }
    }
    let own = [run.blocks(0, &gradients), run.blocks(1, &gradients)];
    for (input, reason) in [
        (StepInput { found_inf: 1.0, ..input }, SkipReason::FoundInf),
        (StepInput { loss: f64::NAN, ..input }, SkipReason::NonFiniteLoss),
    ] {
        assert_eq!(run.step_ranks(&own, input).outcome, Outcome::Skipped(reason));
    }
    assert_eq!(states(&run), before);
}

/// Each rank's state goes on where it was, after the first step as later.
#[test]
fn states_of_ranks_go_on() {
    let mut run = Run::new(Adaptive::default(), options(), tensors(4));
    let mut other = Run::new(Adaptive::default(), options(), tensors(4));
    for n in 0..6 {
        run.step(n);
        for (rank, from) in other.ranks.iter_mut().zip(&run.ranks) {
            rank.optimizer.load_state_from_bytes(&from.optimizer.state_to_bytes().unwrap()).unwrap();
            rank.values = from.values.clone();
        }
        let gradients = run.gradients(n + 1);
        let own: Vec<_> = (0..4).map(|rank| run.blocks(rank, &gradients)).collect();
        let input = StepInput { grad_scale: SCALE, ..StepInput::new(1.0) };
        let report = other.step_ranks(&own, input);
        assert_eq!(format!("{report:?}"), format!("{:?}", run.step_ranks(&own, input)));
        for (a, b) in run.ranks.iter().zip(&other.ranks) {
            assert_eq!(a.values, b.values);
        }
    }
}

/// What happens to the sums of all ranks, and to the gradients of the first, between the halves.
type Change = dyn Fn(&mut [LocalSums], &mut Vec<Option<Owned>>);

#[test]
fn errors_say_what_ranks_do_wrong() {
    let list = || vec![Tensor::cut(&[6, 4], 0, &[0..4, 4..6]), Tensor::replicated(&[5], 2)];
    let run = || Run::new(Adaptive::default(), options(), list());
    let input = StepInput { grad_scale: SCALE, ..StepInput::new(1.0) };
    let finish = |run: &mut Run, change: &Change, input| {
        let gradients = run.gradients(0);
        let mut own = [run.blocks(0, &gradients), run.blocks(1, &gradients)];
        let mut sums = run.sums(&own);
        change(&mut sums, &mut own[0]);
        let Rank { optimizer, values } = &mut run.ranks[0];
        let before = values.clone();
        let sums = sums.into_iter().next().unwrap();
        let result = optimizer.step_with_sums(&mut params(values), &some(&own[0]), sums, &input);
        assert!(result.is_ok() || *values == before);
        result.map_err(|error| error.to_string())
    };
    finish(&mut run(), &|sums, _| add_up(sums), input).unwrap();
    let message = finish(&mut run(), &|_, _| (), input).unwrap_err();
    assert!(
        message.contains("`t0`") && message.contains("of 16") && message.contains("all ranks"),
        "{message}"
    );
    let missing = |sums: &mut [LocalSums], own: &mut Vec<Option<Owned>>| {
        add_up(sums);
        own[1] = None;
    };
    let message = finish(&mut run(), &missing, input).unwrap_err();
    assert!(message.contains("`t1`") && message.contains("first half"), "{message}");
    // Missing on one rank, whether it counts there or not: an error on both.
    for rank in 0..2 {
        let mut run = run();
        let gradients = run.gradients(0);
        let mut own = [run.blocks(0, &gradients), run.blocks(1, &gradients)];
        own[rank][1] = None;
        let mut sums = run.sums(&own);
        add_up(&mut sums);
        for ((Rank { optimizer, values }, sums), own) in run.ranks.iter_mut().zip(sums).zip(&own) {
            let before = values.clone();
            let result = optimizer.step_with_sums(&mut params(values), &some(own), sums, &input);
            let message = result.unwrap_err().to_string();
            assert!(message.contains("`t1`") && message.contains("on 1 of the ranks"), "{message}");
            assert!(*values == before);
            assert_eq!(optimizer.skipped_steps(), 1);
        }
    }
    let message = finish(&mut run(), &|sums, _| add_up(sums), StepInput::new(1.0)).unwrap_err();
    assert!(message.contains("grad_scale") && message.contains("1024"), "{message}");
    // Sums of an earlier step.
    let mut late = run();
    let gradients = late.gradients(0);
    let own = [late.blocks(0, &gradients), late.blocks(1, &gradients)];
    let mut sums = late.sums(&own);
    add_up(&mut sums);
    late.step_ranks(&own, input);
    let Rank { optimizer, values } = &mut late.ranks[0];
    let message = optimizer
        .step_with_sums(&mut params(values), &some(&own[0]), sums.remove(0), &input)
        .unwrap_err()
        .to_string();
    assert!(message.contains("sums") && message.contains("anew"), "{message}");
    // A whole step of a part.
    let message = optimizer.step(&mut params(values), &some(&own[0]), &input).unwrap_err().to_string();
    assert!(message.contains("`t0`") && message.contains("two halves"), "{message}");
    // Counting nowhere.
    let mut list = list();
    list[1].blocks[1].counts = false;
    let mut run = Run::new(Adaptive::default(), options(), list);
    let message = finish(&mut run, &|sums, _| add_up(sums), input).unwrap_err();
    assert!(message.contains("`t1`") && message.contains("no rank"), "{message}");
    // No part of the whole.
    for (whole, start) in [(vec![6], vec![0]), (vec![6, 4], vec![3, 0]), (vec![6, 4], vec![0, usize::MAX])] {
        let spec = TensorSpec::new("w", &[4, 4], DType::F32).part_of(Whole::new(&whole, &start));
        let message = Optimizer::new(Adaptive::default(), options(), vec![spec]).unwrap_err().to_string();
        assert!(message.contains("`w`") && message.contains("is no part"), "{message}");
    }
    let locked =
        Options { groups: vec![Group { norm_lock: true, ..Group::default() }], ..Options::default() };
    let specs = vec![TensorSpec::new("w", &[2], DType::F32)];
    let optimizer = Optimizer::new(Adaptive::default(), locked, specs).unwrap();
    let mut values = [Owned::F32(vec![1.0; 2])];
    let error = optimizer.local_sums(&params(&mut values), &[GradRef::Missing], 1.0).unwrap_err();
    assert!(error.to_string().contains("norm_lock"), "{error}");
}

/// A function of the list alone: ranks know it without asking each other.
#[test]
fn ranks_add_up_equally_many_numbers() {
    let run = Run::new(Adaptive::default(), options(), tensors(4));
    let lens: Vec<usize> = run.ranks.iter().map(|rank| rank.optimizer.sums_len()).collect();
    assert!(lens.iter().all(|&len| len == lens[0]));
    let fitted =
        Optimizer::new(model(rfdescent::covariance::Family::SquaredExponential), options(), Vec::new());
    assert_eq!(fitted.unwrap().sums_len(), 2);
}
