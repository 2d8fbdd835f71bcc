//! The adaptive method: against a reference in f64, and what users rely on.

mod common;

use common::*;
use proptest::prelude::*;
use rfdescent::optimizer::{
    Adaptive, Anisotropy, Group, Method, Optimizer, Options, Outcome, SkipReason, StepInput, StepReport,
    TensorSpec,
};
use rfdescent::{DType, GradRef};

fn specs(tensors: &[Owned]) -> Vec<TensorSpec> {
    let spec = |(k, t): (usize, &Owned)| {
        TensorSpec::new(format!("t{k}"), &[t.to_f64().len()], t.dtype()).in_group(k % 2)
    };
    tensors.iter().enumerate().map(spec).collect()
}

fn options(groups: [Group; 2]) -> Options {
    Options { groups: groups.to_vec(), ..Options::default() }
}

fn optimizer(adaptive: Adaptive, tensors: &[Owned]) -> Optimizer {
    Optimizer::new(adaptive, options([Group::default(); 2]), specs(tensors)).unwrap()
}

fn step(optimizer: &mut Optimizer, values: &mut [Owned], gradient: &[Owned], loss: f64) -> StepReport {
    optimizer.step(&mut params(values), &grads(gradient), &StepInput::new(loss)).unwrap()
}

/// docs/adaptive.md, rule by rule, from all losses and gradients so far.
struct Reference {
    adaptive: Adaptive,
    groups: [Group; 2],
    losses: Vec<f64>,
    /// Of each step: what it was to lower the loss by.
    promised: Vec<f64>,
    /// By step and tensor.
    gradients: Vec<Vec<Vec<f64>>>,
}

impl Reference {
    /// An average with decay β of a value of each step, corrected for its start.
    fn average(&self, beta: f64, value: impl Fn(usize) -> f64) -> f64 {
        let n = self.losses.len();
        let weight = |i: usize| beta.powi((n - 1 - i) as i32);
        (0..n).map(|i| weight(i) * value(i)).sum::<f64>() / (0..n).map(weight).sum::<f64>()
    }

    fn trust(&self) -> f64 {
        let window = |w: usize| {
            let steps = 16 * w..16 * (w + 1);
            let sum: f64 = self.losses[steps.clone()].iter().sum();
            let difference = |i: usize| if i == 0 { 0.0 } else { self.losses[i] - self.losses[i - 1] };
            // A step's promise is about the loss after it.
            let promised: f64 = steps.clone().filter(|&i| i > 0).map(|i| self.promised[i - 1]).sum();
            (sum, steps.map(|i| difference(i).powi(2)).sum::<f64>(), promised)
        };
        (1..self.losses.len() / 16).fold(1.0, |trust: f64, w| {
            let ((before, noise_before, promised_before), (now, noise, promised)) =
                (window(w - 1), window(w));
            let (fall, promise) = (before - now, 0.1 * 16.0 * (promised_before + promised) / 2.0);
            let noise = ((noise_before + noise) / 2.0).sqrt();
            let factor = match fall {
                _ if fall < promise - noise => 0.5,
                _ if fall > promise => 1.5,
                _ => 1.0,
            };
            (trust * factor).clamp(1e-3, 1.0)
        })
    }

    /// The change of each parameter.
    fn step(&mut self, loss: f64, gradients: Vec<Vec<f64>>, cap: f64) -> Vec<Vec<f64>> {
        self.losses.push(loss);
        self.gradients.push(gradients);
        let (n, beta) = (self.losses.len(), self.adaptive.averaging);
        let sizes: Vec<f64> = self.gradients[0].iter().map(|g| g.len() as f64).collect();
        let square = |g: &[f64]| g.iter().map(|x| x * x).sum::<f64>();
        let squares: Vec<f64> =
            (0..sizes.len()).map(|k| self.average(0.9, |i| square(&self.gradients[i][k]))).collect();
        let averages: Vec<Vec<f64>> = (0..sizes.len())
            .map(|k| {
                (0..sizes[k] as usize).map(|e| self.average(beta, |i| self.gradients[i][k][e])).collect()
            })
            .collect();
        let mean = squares.iter().sum::<f64>() / sizes.iter().sum::<f64>();
        let weights: Vec<f64> = (0..sizes.len())
            .map(|k| {
                let own = match self.adaptive.anisotropy {
                    Anisotropy::Isotropic => 1.0,
                    Anisotropy::Tensorwise => {
                        (mean / (squares[k] / sizes[k]).clamp(0.03 * mean, 4.0 * mean)).sqrt()
                    }
                };
                own * self.groups[k % 2].length_scale_factor.powi(2)
            })
            .collect();
        let averaged: f64 = weights.iter().zip(&averages).map(|(w, g)| w * square(g)).sum();
        let single: f64 = weights.iter().zip(&squares).map(|(w, s)| w * s).sum();
        let ramp = 2f64.powi(n as i32 - 8).min(1.0);
        let loss = self.average(beta, |i| self.losses[i]) - self.adaptive.loss_bound;
        let rate = self.trust() * (ramp * 0.1 / averaged).min(3.0 / single) * loss;
        let rate = rate.min(cap / averaged.sqrt());
        self.promised.push(rate * averaged);
        averages
            .iter()
            .zip(&weights)
            .enumerate()
            .map(|(k, (g, w))| {
                let factor = -rate * w * self.groups[k % 2].multiplier;
                g.iter().map(|x| factor * x).collect()
            })
            .collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// f64 tensors, so that nothing but rounding of f64 differs: sums of up to 5000 terms and 72 steps of
    /// averages, each relative to its own size as all terms are positive; averages of gradients cancel by at
    /// most √(their number), and the velocity's rounding is relative to its terms.
    #[test]
    fn steps_follow_the_reference(
        seed in any::<u64>(),
        sizes in prop::collection::vec(prop::sample::select(vec![1_usize, 2, 33, 1025, 4097]), 1..5),
        anisotropy in prop::sample::select(vec![Anisotropy::Isotropic, Anisotropy::Tensorwise]),
        averaging in prop::sample::select(vec![0.0, 0.5, 0.9]),
        loss_bound in prop::sample::select(vec![0.0, -1.5]),
        factor in prop::sample::select(vec![1.0, 0.5, 2.0]),
        multiplier in prop::sample::select(vec![1.0, 0.3]),
        cap in prop::sample::select(vec![f64::MAX, 1e-2]),
        trend in prop::sample::select(vec![0.9, 1.0, 1.05]),
    ) {
        let adaptive = Adaptive { anisotropy, averaging, loss_bound };
        let groups = [Group::default(), Group { length_scale_factor: factor, multiplier, ..Group::default() }];
        let mut reference = Reference { adaptive, groups, losses: Vec::new(), promised: Vec::new(), gradients: Vec::new() };
        let mut values: Vec<Owned> = sizes.iter().map(|&n| Owned::F64(vec![0.0; n])).collect();
        let max_step_size = (cap < f64::MAX).then_some(cap);
        let options = Options { max_step_size, ..options(groups) };
        let mut optimizer = Optimizer::new(adaptive, options, specs(&values)).unwrap();
        for n in 0..72_u64 {
            // Sizes of gradients differ by tensor, so that variances do.
            let gradients: Vec<Vec<f64>> = (sizes.iter().enumerate())
                .map(|(k, &len)| {
                    let scale = 10f64.powi(k as i32 - 2);
                    uniform(seed ^ (n * 10 + k as u64), len).iter().map(|x| scale * (x + 0.3)).collect()
                })
                .collect();
            let loss = 2.0 * f64::powi(trend, n as i32) * (1.0 + 0.1 * uniform(seed ^ n, 1)[0]);
            let given: Vec<Owned> = gradients.iter().map(|g| Owned::F64(g.clone())).collect();
            let before: Vec<Vec<f64>> = values.iter().map(Owned::to_f64).collect();
            let report = step(&mut optimizer, &mut values, &given, loss);
            prop_assert_eq!(report.outcome, Outcome::Applied);
            prop_assert!(report.step_size <= cap);
            prop_assert!((report.learning_rate * report.sigma_norm / report.step_size - 1.0).abs() < 1e-15);
            let expected = reference.step(loss, gradients.clone(), cap);
            for k in 0..sizes.len() {
                let largest = expected[k].iter().fold(0.0, |m: f64, x| m.max(x.abs()));
                for (i, (&value, &change)) in values[k].to_f64().iter().zip(&expected[k]).enumerate() {
                    let error = (value - (before[k][i] + change)).abs();
                    prop_assert!(error <= 1e-11 * largest + 1e-15 * value.abs(), "step {n}, tensor {k}: {error:e}");
                }
            }
        }
    }
}

/// One tensor of each format with gradients of each format.
fn mixture(seed: u64) -> Vec<Owned> {
    let sizes = [0, 1, 33, 4097, 70_000, 8192, 0, 1025];
    let format = |k: usize| DTYPES[(k + (seed as usize) * (k / 4)) % 4];
    (0..8).map(|k| Owned::from_f64(format(k), &uniform(seed + 20 * k as u64, sizes[k]))).collect()
}

/// Steps with gradients of different sizes, so that some variances are at their bounds, and losses whose
/// trend changes, so that trust does.
fn run(optimizer: &mut Optimizer, values: &mut [Owned], steps: std::ops::Range<u64>) {
    for n in steps {
        let gradient: Vec<Owned> = (mixture(n).iter().enumerate())
            .map(|(k, g)| {
                let scale = [1.0, 0.03, 4.0, 0.25][k % 4];
                Owned::from_f64(g.dtype(), &g.to_f64().iter().map(|x| scale * x).collect::<Vec<_>>())
            })
            .collect();
        let trend = if n < 40 { -0.02 } else { 0.01 } * n as f64;
        let report = step(optimizer, values, &gradient, 2.0 + trend + 0.1 * uniform(n, 1)[0]);
        assert_eq!(report.outcome, Outcome::Applied);
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let run_on = |threads| {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
            let mut values = mixture(0);
            let options = Options { stochastic_rounding: Some(3), ..options([Group::default(); 2]) };
            let mut optimizer = Optimizer::new(Adaptive::default(), options, specs(&values)).unwrap();
            run(&mut optimizer, &mut values, 0..20);
            bits(&values)
        })
    };
    let one = run_on(1);
    assert!(run_on(2) == one && run_on(5) == one);
}

/// The logarithm of a cost changes by a constant when the cost is scaled, so nothing else may. Powers of two
/// change no bit.
#[test]
fn scaled_losses_and_scaled_gradients_change_no_bit() {
    let sizes = [5000, 33, 1];
    let run = |loss_factor: f64, grad_scale: f64| {
        let mut values: Vec<Owned> = sizes.iter().map(|&n| Owned::F32(vec![0.5; n])).collect();
        let mut optimizer = optimizer(Adaptive::default(), &values);
        for n in 0..40 {
            let gradient: Vec<Owned> = (0..3)
                .map(|k| {
                    let g = uniform(n * 3 + k, sizes[k as usize]);
                    Owned::from_f64(
                        DType::F32,
                        &g.iter()
                            .map(|x| f64::from(*x as f32) * loss_factor * grad_scale)
                            .collect::<Vec<_>>(),
                    )
                })
                .collect();
            let loss = loss_factor * (2.0 + uniform(n, 1)[0]);
            let input = StepInput { grad_scale, ..StepInput::new(loss) };
            let report = optimizer.step(&mut params(&mut values), &grads(&gradient), &input).unwrap();
            assert_eq!(report.outcome, Outcome::Applied);
        }
        bits(&values)
    };
    let plain = run(1.0, 1.0);
    assert!(run(4.0, 1.0) == plain);
    assert!(run(2f64.powi(-20), 1.0) == plain);
    assert!(run(1.0, 65536.0) == plain);
}

#[test]
fn every_reason_to_skip_leaves_everything_as_it_was() {
    let mut values = mixture(0);
    let mut optimizer = optimizer(Adaptive::default(), &values);
    run(&mut optimizer, &mut values, 0..17);
    let (before, state) = (bits(&values), optimizer.state_to_bytes().unwrap());
    let good = mixture(1);
    let with = |value: f64| {
        let mut gradient = mixture(1);
        gradient[2] = Owned::F64(vec![value; 33]);
        gradient
    };
    let zero: Vec<Owned> =
        good.iter().map(|g| Owned::from_f64(g.dtype(), &vec![0.0; g.to_f64().len()])).collect();
    let cases = [
        (good.clone(), f64::NAN, 0.0, SkipReason::NonFiniteLoss),
        (good.clone(), f64::INFINITY, 0.0, SkipReason::NonFiniteLoss),
        (good.clone(), -1e-9, 0.0, SkipReason::LossBelowBound),
        (good.clone(), 1.0, 1.0, SkipReason::FoundInf),
        (with(f64::NAN), 1.0, 0.0, SkipReason::NonFiniteGradient),
        (with(f64::INFINITY), 1.0, 0.0, SkipReason::NonFiniteGradient),
        (zero, 1.0, 0.0, SkipReason::ZeroGradient),
        // beyond f32, in which velocities are kept; beyond the range of squares
        (with(1e39), 1.0, 0.0, SkipReason::OutOfRange),
        (with(1e200), 1.0, 0.0, SkipReason::OutOfRange),
        // a loss whose square the trust factor could not add up
        (good.clone(), 1e200, 0.0, SkipReason::OutOfRange),
    ];
    for (skipped, (gradient, loss, found_inf, reason)) in cases.into_iter().enumerate() {
        let input = StepInput { found_inf, ..StepInput::new(loss) };
        let report = optimizer.step(&mut params(&mut values), &grads(&gradient), &input).unwrap();
        assert_eq!(report.outcome, Outcome::Skipped(reason));
        assert_eq!((report.applied_steps, report.skipped_steps), (17, skipped as u64 + 1));
        assert_eq!((report.step_size, report.learning_rate), (0.0, 0.0));
        assert!(bits(&values) == before, "{reason:?}");
    }
    // But for the count of skipped steps the state is what it was: loaded, it goes on to the same bits.
    let mut other = self::optimizer(Adaptive::default(), &values);
    other.load_state_from_bytes(&state).unwrap();
    let mut copy = values.clone();
    run(&mut optimizer, &mut values, 17..40);
    run(&mut other, &mut copy, 17..40);
    assert!(bits(&values) == bits(&copy));
}

/// What is remembered stays finite, or a saved state could not be read: also where a loss ends a window, and
/// where a tensor's variance overflows that does not count in the norm.
#[test]
fn what_is_remembered_stays_finite() {
    let mut values = vec![Owned::F32(vec![1.0; 3]), Owned::F64(vec![1.0; 3])];
    let mut specs = specs(&values);
    specs[1].counts_in_norm = false;
    let mut optimizer = Optimizer::new(Adaptive::default(), options([Group::default(); 2]), specs).unwrap();
    let gradient = |x: f64| [Owned::F32(vec![1.0; 3]), Owned::F64(vec![x; 3])];
    // one less than two windows
    for _ in 0..15 {
        step(&mut optimizer, &mut values, &gradient(1.0), 1.0);
    }
    let report = step(&mut optimizer, &mut values, &gradient(1.0), 1e200);
    assert_eq!(report.outcome, Outcome::Skipped(SkipReason::OutOfRange));
    let input = StepInput { grad_scale: 1e-30, ..StepInput::new(1.0) };
    let report = optimizer.step(&mut params(&mut values), &grads(&gradient(1e130)), &input).unwrap();
    assert_eq!(report.outcome, Outcome::Skipped(SkipReason::OutOfRange));
    assert_eq!(report.applied_steps, 15);
    let state = optimizer.state_to_bytes().unwrap();
    optimizer.load_state_from_bytes(&state).unwrap();
}

#[test]
fn tiny_f64_gradients_are_refused_rather_than_lost() {
    let mut values = vec![Owned::F64(vec![1.0; 10])];
    let mut optimizer = optimizer(Adaptive::default(), &values);
    let report = step(&mut optimizer, &mut values, &[Owned::F64(vec![1e-200; 10])], 1.0);
    assert_eq!(report.outcome, Outcome::Skipped(SkipReason::OutOfRange));
}

#[test]
fn a_saved_state_continues_to_the_same_bits() {
    for (master_weights, averaging) in [(false, 0.9), (true, 0.9), (true, 0.0)] {
        let adaptive = Adaptive { averaging, ..Adaptive::default() };
        let options = Options { master_weights, ..options([Group::default(); 2]) };
        let mut values = mixture(0);
        let mut whole = Optimizer::new(adaptive, options.clone(), specs(&values)).unwrap();
        // stops within a window, after some
        run(&mut whole, &mut values, 0..43);
        let mut copy = values.clone();
        let mut second = Optimizer::new(adaptive, options, specs(&values)).unwrap();
        second.load_state_from_bytes(&whole.state_to_bytes().unwrap()).unwrap();
        run(&mut whole, &mut values, 43..60);
        run(&mut second, &mut copy, 43..60);
        assert!(bits(&values) == bits(&copy));
    }
}

#[test]
fn a_state_of_the_other_method_is_refused() {
    let values = mixture(0);
    let mut fitted = Optimizer::new(moving(0.9), options([Group::default(); 2]), specs(&values)).unwrap();
    let mut adaptive = optimizer(Adaptive::default(), &values);
    let message = |error: rfdescent::Result<()>| error.unwrap_err().to_string();
    let (of_fitted, of_adaptive) = (fitted.state_to_bytes().unwrap(), adaptive.state_to_bytes().unwrap());
    assert!(message(adaptive.load_state_from_bytes(&of_fitted)).contains("by the fitted method"));
    assert!(message(fitted.load_state_from_bytes(&of_adaptive)).contains("by the adaptive method"));
}

/// The velocity holds an average with another decay: its size would be taken wrongly.
#[test]
fn a_state_of_another_averaging_or_with_impossible_values_is_refused() {
    let mut values = mixture(0);
    let mut saved = optimizer(Adaptive::default(), &values);
    run(&mut saved, &mut values, 0..5);
    let state = saved.state_to_bytes().unwrap();
    let mut other = optimizer(Adaptive { averaging: 0.5, ..Adaptive::default() }, &values);
    let text = other.load_state_from_bytes(&state).unwrap_err().to_string();
    assert!(text.contains("averaging 0.9") && text.contains("0.5"), "{text}");

    // Edited in place, to a text of the same length.
    let edited = |from: &str, to: &str| {
        let at = state.windows(from.len()).position(|bytes| bytes == from.as_bytes()).unwrap();
        let mut bytes = state.clone();
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        bytes
    };
    for (from, to) in [
        (r#"\"factor\":1.0"#, r#"\"factor\":-10"#),
        (r#"\"factor\":1.0"#, r#"\"factor\":2.0"#),
        (r#"\"steps\":5.0"#, r#"\"steps\":-10"#),
        (r#"\"steps\":5.0"#, r#"\"steps\":1e9"#),
        (r#"\"windows\":0.0"#, r#"\"windows\":-10"#),
    ] {
        let text = saved.load_state_from_bytes(&edited(from, to)).unwrap_err().to_string();
        assert!(text.contains("`history`") && text.contains("domain"), "{text}");
    }
    saved.load_state_from_bytes(&state).unwrap();
}

/// A tensor that gets no gradient for a while takes no part: its average and its variance go on where they
/// were.
#[test]
fn missing_gradients_leave_their_tensor_out() {
    let mut values = vec![Owned::F64(vec![0.0; 3]), Owned::F64(vec![0.0; 2])];
    let mut alone = vec![values[0].clone()];
    let mut both = optimizer(Adaptive::default(), &values);
    let mut single = optimizer(Adaptive::default(), &alone);
    for n in 0..20 {
        let gradient = Owned::F64(uniform(n, 3));
        let grads = [gradient.grad(), GradRef::Missing];
        both.step(&mut params(&mut values), &grads, &StepInput::new(1.0)).unwrap();
        step(&mut single, &mut alone, std::slice::from_ref(&gradient), 1.0);
    }
    assert!(values[0].bits() == alone[0].bits());
    assert_eq!(values[1].to_f64(), [0.0; 2]);
    // Its first gradient counts in full, as its averages have only that one.
    let report = step(&mut both, &mut values, &[Owned::F64(vec![0.0; 3]), Owned::F64(vec![2.0; 2])], 1.0);
    let moved = values[1].to_f64()[0];
    // Σ_k of that tensor, from v of both
    let own = 4.0;
    let first = {
        let weight = |i: u64| 0.9_f64.powi(20 - i as i32);
        let squares = |i: u64| if i < 20 { uniform(i, 3).iter().map(|x| x * x).sum::<f64>() } else { 0.0 };
        (0..=20).map(|i| weight(i) * squares(i)).sum::<f64>() / (0..=20).map(weight).sum::<f64>()
    };
    let mean = (first + 2.0 * own) / 5.0;
    let expected = -report.learning_rate * (mean / own).sqrt() * 2.0;
    assert!((moved / expected - 1.0).abs() < 1e-12, "{moved} {expected}");
}

#[test]
fn norm_lock_and_weight_decay_work_along_the_average() {
    let groups =
        [Group { norm_lock: true, ..Group::default() }, Group { weight_decay: 0.5, ..Group::default() }];
    let mut values = vec![Owned::F64(uniform(1, 50)), Owned::F64(vec![3.0; 4])];
    let mut optimizer = Optimizer::new(Adaptive::default(), options(groups), specs(&values)).unwrap();
    let norm = |t: &Owned| t.to_f64().iter().map(|x| x * x).sum::<f64>().sqrt();
    let locked = norm(&values[0]);
    let mut expected = 3.0;
    for n in 0..20 {
        let report =
            step(&mut optimizer, &mut values, &[Owned::F64(uniform(n, 50)), Owned::F64(vec![0.0; 4])], 1.0);
        assert!((norm(&values[0]) / locked - 1.0).abs() < 1e-14);
        expected *= 1.0 - 0.5 * report.learning_rate;
        assert!((values[1].to_f64()[0] / expected - 1.0).abs() < 1e-14);
    }
}

#[test]
fn settings_outside_their_domain_or_of_another_method_are_refused_by_name() {
    let new = |adaptive: Adaptive, options: Options| {
        let specs = vec![TensorSpec::new("w", &[2], DType::F32)];
        Optimizer::new(adaptive, options, specs).map(|_| ()).map_err(|e| e.to_string())
    };
    for averaging in [-0.1, 1.0, f64::NAN] {
        let adaptive = Adaptive { averaging, ..Adaptive::default() };
        assert!(new(adaptive, Options::default()).unwrap_err().contains("averaging"));
    }
    for loss_bound in [f64::NAN, f64::NEG_INFINITY] {
        let adaptive = Adaptive { loss_bound, ..Adaptive::default() };
        assert!(new(adaptive, Options::default()).unwrap_err().contains("loss_bound"));
    }
    let mut optimizer = optimizer(Adaptive::default(), &[Owned::F32(vec![0.0; 2])]);
    for (name, method) in [
        ("adaptive method", moving(0.0).into()),
        ("averaging", Method::from(Adaptive { averaging: 0.5, ..Adaptive::default() })),
        ("loss_bound", Adaptive { loss_bound: -1.0, ..Adaptive::default() }.into()),
        ("anisotropy", Adaptive { anisotropy: Anisotropy::Isotropic, ..Adaptive::default() }.into()),
    ] {
        let message = optimizer.set_method(method).unwrap_err().to_string();
        assert!(message.contains(name), "{message}");
    }
    optimizer.set_method(Adaptive::default()).unwrap();
    let norm = optimizer.local_squared_norm(&[GradRef::Missing]).unwrap_err();
    assert!(norm.to_string().contains("adaptive"), "{norm}");
}

/// No value was computed by hand: recorded, so that another machine, another backend and a later release give
/// the same bits.
#[test]
fn bits_of_a_run_are_fixed() {
    let mut values = mixture(0);
    let mut optimizer = optimizer(Adaptive::default(), &values);
    run(&mut optimizer, &mut values, 0..80);
    let hash = bits(&values)
        .concat()
        .iter()
        .fold(0xCBF2_9CE4_8422_2325_u64, |hash, &word| (hash ^ word).wrapping_mul(0x0100_0000_01B3));
    assert_eq!(format!("{hash:016x}"), "e030a7dced21abc6");
}
