//! What users rely on: skipped steps change nothing, results do not depend on threads, extreme gradients,
//! saved states, sharded steps, scale invariance, clear errors.

mod common;

use common::*;
use half::{bf16, f16};
use proptest::prelude::*;
use rfdescent::covariance::{Family, Model, StepMode, StepRule, TensorFactor};
use rfdescent::device::Stream;
use rfdescent::optimizer::{
    Adaptive, AnyOptimizer, Fitted, Group, Method, Optimizer, Options, Outcome, RawInput, RawTensor,
    SkipReason, StepInput, StepReport, TensorSpec,
};
use rfdescent::{DType, Error, GradRef, Moments, ParamMut};

fn optimizer(tensors: &[Owned], options: Options) -> Optimizer {
    optimizer_of(model(Family::SquaredExponential), tensors, options)
}

fn optimizer_of(method: impl Into<Method>, tensors: &[Owned], options: Options) -> Optimizer {
    let specs = tensors.iter().enumerate().map(|(k, t)| spec(k, t)).collect();
    Optimizer::new(method, options, specs).unwrap()
}

fn spec(k: usize, tensor: &Owned) -> TensorSpec {
    TensorSpec::new(format!("t{k}"), &[tensor.to_f64().len()], tensor.dtype())
}

fn step(optimizer: &mut Optimizer, values: &mut [Owned], gradient: &[Owned], loss: f64) -> StepReport {
    optimizer.step(&mut params(values), &grads(gradient), &StepInput::new(loss)).unwrap()
}

/// One tensor of each format with gradients of each format, in sizes around the chunk's.
fn mixture() -> (Vec<Owned>, Vec<Owned>) {
    let sizes = [0, 1, 31, 33, 4095, 4097, 70_000, 8192, 0, 150_001];
    let tensor = |k: usize, shift: usize, seed: u64| {
        Owned::from_f64(DTYPES[(k + shift * (k / 4)) % 4], &uniform(seed + k as u64, sizes[k]))
    };
    ((0..10).map(|k| tensor(k, 0, 1)).collect(), (0..10).map(|k| tensor(k, 1, 100)).collect())
}

fn everything() -> Options {
    Options {
        stochastic_rounding: Some(5),
        groups: vec![Group { weight_decay: 0.1, norm_lock: true, ..Group::default() }],
        ..Options::default()
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let run = |threads: usize| {
        rfdescent::set_threads(threads);
        let (mut values, gradient) = mixture();
        let mut optimizer = optimizer_of(moving(0.9), &values, everything());
        let reports: Vec<StepReport> =
            (0..3).map(|i| step(&mut optimizer, &mut values, &gradient, 2.0 - f64::from(i) / 10.0)).collect();
        (bits(&values), reports, optimizer.state_to_bytes().unwrap())
    };
    let one = run(1);
    for threads in [2, 3, 8] {
        let many = run(threads);
        assert!(one.0 == many.0, "parameters differ with {threads} threads");
        assert_eq!(one.1, many.1);
        assert!(one.2 == many.2, "states differ with {threads} threads");
    }
}

/// The order of summation and of every operation after it is part of the contract: these bits came from the
/// first release on x86-64 and must come out of every backend and every machine.
#[test]
fn bits_of_a_step_are_fixed() {
    let (mut values, gradient) = mixture();
    let mut optimizer = optimizer_of(moving(0.9), &values, everything());
    let report = step(&mut optimizer, &mut values, &gradient, 2.0);
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for word in bits(&values).into_iter().flatten() {
        for byte in word.to_le_bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    assert_eq!((report.grad_norm.to_bits(), report.step_size.to_bits(), hash), GOLDEN);
}

/// ‖g‖, η and the FNV-1a hash of all parameter bits.
const GOLDEN: (u64, u64, u64) = (0x4071_8608_1fe0_7d18, 0x4019_4b6e_8101_b251, 0xa4d3_bd7a_3950_25c8);

#[test]
fn every_reason_to_skip_leaves_everything_as_it_was() {
    let (start, gradient) = mixture();
    let poisoned = |at: fn(usize) -> usize, bad: f64| {
        // each tensor in turn, one element
        (0..gradient.len())
            .filter(|&k| !gradient[k].to_f64().is_empty())
            .map(move |k| (k, at, bad))
            .collect::<Vec<_>>()
    };
    let mut cases: Vec<(Vec<Owned>, StepInput, SkipReason)> = Vec::new();
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for at in [(|_| 0) as fn(usize) -> usize, |n| n / 2, |n| n - 1] {
            for (k, at, bad) in poisoned(at, bad) {
                let mut gradient = gradient.clone();
                let mut values = gradient[k].to_f64();
                let n = values.len();
                values[at(n)] = bad;
                gradient[k] = Owned::from_f64(gradient[k].dtype(), &values);
                cases.push((gradient, StepInput::new(2.0), SkipReason::NonFiniteGradient));
            }
        }
        cases.push((gradient.clone(), StepInput::new(bad), SkipReason::NonFiniteLoss));
    }
    for found_inf in [1.0, 2.0, -1.0, f64::NAN, f64::INFINITY] {
        let input = StepInput { found_inf, ..StepInput::new(2.0) };
        cases.push((gradient.clone(), input, SkipReason::FoundInf));
    }
    let zero: Vec<Owned> =
        gradient.iter().map(|g| Owned::from_f64(g.dtype(), &vec![0.0; g.to_f64().len()])).collect();
    cases.push((zero, StepInput::new(2.0), SkipReason::ZeroGradient));

    let mut clean = start.clone();
    let mut untouched = optimizer_of(moving(0.9), &clean, everything());
    step(&mut untouched, &mut clean, &gradient, 2.1);
    let before = bits(&clean);
    let mut skipping = untouched.clone();
    let mut values = clean.clone();
    for (i, (gradient, input, reason)) in cases.iter().enumerate() {
        let report = skipping.step(&mut params(&mut values), &grads(gradient), input).unwrap();
        assert_eq!(report.outcome, Outcome::Skipped(*reason), "case {i}");
        assert!(bits(&values) == before, "case {i} changed parameters");
        assert_eq!((report.applied_steps, report.skipped_steps), (1, i as u64 + 1));
        assert_eq!((report.step_size, report.learning_rate), (0.0, 0.0));
    }
    // The next real step is the one that an optimizer without the bad ones takes: velocity and counters are
    // intact.
    step(&mut untouched, &mut clean, &gradient, 2.0);
    step(&mut skipping, &mut values, &gradient, 2.0);
    assert!(bits(&values) == bits(&clean));
}

#[test]
fn a_tensor_that_does_not_count_must_be_finite_too() {
    let mut values = vec![Owned::F32(vec![1.0; 3]), Owned::F32(vec![1.0; 3])];
    let mut specs: Vec<TensorSpec> = values.iter().enumerate().map(|(k, v)| spec(k, v)).collect();
    specs[1].counts_in_norm = false;
    let mut optimizer = Optimizer::new(model(Family::SquaredExponential), Options::default(), specs).unwrap();
    let gradient = [Owned::F32(vec![1.0; 3]), Owned::F32(vec![1.0, f32::NAN, 1.0])];
    let report = step(&mut optimizer, &mut values, &gradient, 2.0);
    assert_eq!(report.outcome, Outcome::Skipped(SkipReason::NonFiniteGradient));
    let gradient = [Owned::F32(vec![3.0, 0.0, 4.0]), Owned::F32(vec![7.0; 3])];
    let report = step(&mut optimizer, &mut values, &gradient, 2.0);
    assert_eq!(report.grad_norm, 5.0);
    assert!(values[1].to_f64()[0] < 1.0, "it is updated all the same");
}

#[test]
fn empty_lists_and_missing_gradients_are_no_ops() {
    let mut none = optimizer(&[], Options::default());
    let report = none.step(&mut [], &[], &StepInput::new(1.0)).unwrap();
    assert_eq!(report.outcome, Outcome::Skipped(SkipReason::ZeroGradient));

    let mut values = vec![Owned::F32(vec![1.0, 2.0]), Owned::F32(vec![3.0])];
    let mut optimizer = optimizer_of(moving(0.9), &values, everything());
    let missing = [GradRef::Missing, GradRef::Missing];
    let report = optimizer.step(&mut params(&mut values), &missing, &StepInput::new(1.0)).unwrap();
    assert_eq!(report.outcome, Outcome::Skipped(SkipReason::ZeroGradient));

    let g = [2.0_f32];
    let one = [GradRef::Missing, GradRef::from(&g[..])];
    let report = optimizer.step(&mut params(&mut values), &one, &StepInput::new(1.0)).unwrap();
    assert_eq!((report.outcome, report.grad_norm), (Outcome::Applied, 2.0));
    assert_eq!(values[0], Owned::F32(vec![1.0, 2.0]), "without a gradient not even weight decay applies");
    assert!(values[1].to_f64()[0] < 3.0);
}

/// Gradients near both ends of each format: the step has the length it reports. The loss lies above the mean,
/// where that length is the plateau whatever the norm.
#[test]
fn extreme_gradients_give_steps_of_the_reported_length() {
    let cases = [
        (DType::F32, 3e38),
        (DType::F32, 1e20),
        (DType::F32, 1e-20),
        (DType::F32, 1e-38),
        (DType::F32, 3e-44),
        (DType::F16, 65_504.0),
        (DType::F16, 6e-8),
        (DType::BF16, 3e38),
        (DType::BF16, 1e-38),
        (DType::F64, 1e306),
        (DType::F64, 1e160),
        (DType::F64, 1e-170),
        (DType::F64, 1e-308),
    ];
    for (dtype, size) in cases {
        for momentum in [0.0, 0.5] {
            let n = 5000;
            let gradient = vec![Owned::from_f64(
                dtype,
                &(0..n).map(|i| if i % 2 == 0 { size } else { -size }).collect::<Vec<_>>(),
            )];
            let mut values = vec![Owned::F32(vec![0.0; n])];
            let mut optimizer = optimizer_of(moving(momentum), &values, Options::default());
            let report = step(&mut optimizer, &mut values, &gradient, 2.6);
            if momentum > 0.0 && !(3e-40..2e36).contains(&size) {
                // f32 velocities can't follow: no step rather than a wrong one
                assert_eq!(report.outcome, Outcome::Skipped(SkipReason::OutOfRange), "{dtype} {size:e}");
                assert_eq!(values, [Owned::F32(vec![0.0; n])]);
                continue;
            }
            assert_eq!(report.outcome, Outcome::Applied, "{dtype} {size:e}");
            let norm = gradient[0].to_f64()[0] * (n as f64).sqrt();
            // 5000 exact terms added in some order: n·2⁻⁵³; overflowing only where ‖g‖ does
            assert!(
                (report.grad_norm / norm - 1.0).abs() < 1e-12,
                "{dtype} {size:e}: norm {}",
                report.grad_norm
            );
            let length = values[0].to_f64().iter().map(|x| x * x).sum::<f64>().sqrt();
            // from 0, each element is one product of a rounded coefficient, at most 4 roundings of 2⁻²⁴
            assert!(
                (length / report.step_size - 1.0).abs() < 4.0 * 2f64.powi(-24),
                "{dtype} {size:e} momentum {momentum}: moved {length}, reported {}",
                report.step_size
            );
        }
    }
}

#[test]
fn an_overflowing_f64_norm_skips() {
    let mut values = vec![Owned::F64(vec![1.0; 9])];
    let mut optimizer = optimizer(&values, Options::default());
    let report = step(&mut optimizer, &mut values, &[Owned::F64(vec![f64::MAX; 9])], 2.0);
    assert_eq!(report.outcome, Outcome::Skipped(SkipReason::NonFiniteGradient));
    assert_eq!(values, [Owned::F64(vec![1.0; 9])]);
}

#[test]
fn huge_f64_and_ordinary_f32_gradients_mix() {
    let mut values = vec![Owned::F64(vec![0.0; 2]), Owned::F32(vec![0.0; 2])];
    let mut optimizer = optimizer(&values, Options::default());
    let gradient = [Owned::F64(vec![3e200, 4e200]), Owned::F32(vec![1.0, 2.0])];
    let report = step(&mut optimizer, &mut values, &gradient, 2.0);
    assert!((report.grad_norm / 5e200 - 1.0).abs() < 1e-15);
    let tiny = [Owned::F64(vec![3e-200, 4e-200]), Owned::F32(vec![0.0, 0.0])];
    let mut fresh = vec![Owned::F64(vec![0.0; 2]), Owned::F32(vec![0.0; 2])];
    let report = step(&mut optimizer, &mut fresh, &tiny, 2.0);
    assert!((report.grad_norm / 5e-200 - 1.0).abs() < 1e-15);
    let moved = fresh[0].to_f64();
    assert!((moved[0].hypot(moved[1]) / report.step_size - 1.0).abs() < 1e-14);
    assert_eq!(fresh[1], Owned::F32(vec![0.0; 2]));
}

/// 2³¹ and more would need gigabytes; what can be had cheaply is that f32 sums do not saturate.
#[test]
fn a_long_sum_of_equal_terms_is_exact() {
    let n = 40_000_000;
    let gradient = vec![Owned::BF16(vec![bf16::from_f32(1.0); n])];
    let mut values = vec![Owned::BF16(vec![bf16::from_f32(0.5); n])];
    let mut optimizer = optimizer(&values, Options::default());
    let report = step(&mut optimizer, &mut values, &gradient, 2.0);
    assert_eq!(report.grad_norm, (n as f64).sqrt());
}

#[test]
fn a_power_of_two_gradient_scale_changes_no_bit() {
    let (start, gradient) = mixture();
    let run = |scale: f64| {
        let mut values = start.clone();
        let mut optimizer = optimizer_of(moving(0.9), &values, Options::default());
        let scaled: Vec<Owned> = gradient
            .iter()
            .map(|g| Owned::from_f64(g.dtype(), &g.to_f64().iter().map(|x| x * scale).collect::<Vec<_>>()))
            .collect();
        let input = StepInput { grad_scale: scale, ..StepInput::new(2.0) };
        let report = optimizer.step(&mut params(&mut values), &grads(&scaled), &input).unwrap();
        (bits(&values), report)
    };
    let plain = run(1.0);
    let scaled = run(256.0);
    assert!(plain.0 == scaled.0);
    assert_eq!(plain.1, scaled.1, "the report holds unscaled norms");
}

#[test]
fn cap_multiplier_and_weight_decay() {
    let gradient = [Owned::F64(vec![3.0, 4.0])];
    let run = |options: Options| {
        let mut values = vec![Owned::F64(vec![1.0, 1.0])];
        let mut optimizer = optimizer(&values, options);
        let report = step(&mut optimizer, &mut values, &gradient, 1.0);
        (report, values[0].to_f64())
    };
    let (plain, _) = run(Options::default());
    let (half, moved) = run(Options { multiplier: 0.5, ..Options::default() });
    assert_eq!(half.step_size, plain.step_size * 0.5);
    assert_eq!(half.learning_rate, half.step_size / 5.0);
    assert!((moved[0] - (1.0 - 3.0 * half.learning_rate)).abs() < 1e-15);
    // the cap is on the product, so a multiplier cannot lift a step over it
    let cap = plain.step_size * 0.25;
    for multiplier in [1.0, 2.0] {
        let (capped, _) = run(Options { multiplier, max_step_size: Some(cap), ..Options::default() });
        assert_eq!(capped.step_size, cap);
    }
    let decayed = |weight_decay: f64| {
        run(Options { groups: vec![Group { weight_decay, ..Group::default() }], ..Options::default() }).1
    };
    let rate = plain.learning_rate;
    assert!((decayed(0.1)[1] - (1.0 - rate * 0.1 - 4.0 * rate)).abs() < 1e-15);
    // a decay so strong that its factor would be negative stops at 0
    assert!((decayed(1e9)[1] - -4.0 * rate).abs() < 1e-15);
}

#[test]
fn modes_and_noise_reach_the_model() {
    let gradient = [Owned::F64(vec![3.0, 4.0])];
    let length = |fitted: Fitted| {
        let mut values = vec![Owned::F64(vec![1.0, 1.0])];
        step(&mut optimizer_of(fitted, &values, Options::default()), &mut values, &gradient, 1.0).step_size
    };
    let fitted = || Fitted::new(model(Family::SquaredExponential));
    let plain = length(fitted());
    let noisy = length(Fitted { inv_batch_size: 1.0 / 32.0, ..fitted() });
    let rule = |mode, conservatism| Fitted { rule: StepRule { mode, conservatism }, ..fitted() };
    let asymptotic = length(rule(StepMode::ARfd, 0.0));
    let clipped = length(rule(StepMode::ClippedARfd, 0.0));
    let careful = length(rule(StepMode::Rfd, 0.9));
    let plateau = model(Family::SquaredExponential).plateau_step_size();
    assert!(noisy != plain && asymptotic > plain && careful < plain);
    assert_eq!(clipped, asymptotic.min(plateau));
}

/// Groups share norm and step size; the factor changes direction and Θ as Σ = f⁻² says.
#[test]
fn length_scale_factors_follow_the_anisotropic_model() {
    let mut values = vec![Owned::F64(vec![0.0; 2]), Owned::F64(vec![0.0; 2])];
    let specs = vec![spec(0, &values[0]), spec(1, &values[1]).in_group(1)];
    let groups = vec![Group::default(), Group { length_scale_factor: 2.0, ..Group::default() }];
    let mut optimizer =
        Optimizer::new(model(Family::SquaredExponential), Options { groups, ..Options::default() }, specs)
            .unwrap();
    let report =
        step(&mut optimizer, &mut values, &[Owned::F64(vec![3.0, 0.0]), Owned::F64(vec![0.0, 2.0])], 1.0);
    assert_eq!(report.grad_norm, 13f64.sqrt());
    assert_eq!(report.sigma_norm, 5.0); // √(3² + 2²·2²)
    assert_eq!(report.learning_rate, report.step_size / 5.0);
    assert!((values[0].to_f64()[0] + 3.0 * report.learning_rate).abs() < 1e-15);
    assert!((values[1].to_f64()[1] + 8.0 * report.learning_rate).abs() < 1e-15);
    // the step has length η in the norm of Σ
    let length = (values[0].to_f64()[0].powi(2) + (values[1].to_f64()[1] / 2.0).powi(2)).sqrt();
    assert!((length / report.step_size - 1.0).abs() < 1e-14);
}

/// Steps of a model with length scales by tensor would be in the wrong norm without the groups that have
/// them.
#[test]
fn a_model_with_length_scales_by_tensor_needs_its_groups() {
    let factor = |name: &str, length_scale_factor| TensorFactor {
        name: name.into(),
        dims: 10_000,
        length_scale_factor,
    };
    let tensors = vec![factor("t0", 0.5), factor("t1", 2.0)];
    let model = model(Family::SquaredExponential).with_tensors(tensors).unwrap();
    let specs = || -> Vec<_> { (0..2).map(|k| TensorSpec::new(format!("t{k}"), &[2], DType::F32)).collect() };
    let error = Optimizer::new(model.clone(), Options::default(), specs()).unwrap_err().to_string();
    assert!(error.contains("`t1`") && error.contains("per_tensor"), "{error}");
    let others = vec![TensorSpec::new("other", &[2], DType::F32)];
    let error = Optimizer::new(model.clone(), Options::default(), others).unwrap_err().to_string();
    assert!(error.contains("`t0`"), "{error}");
    let (fitted, options, specs) = Fitted::new(model).per_tensor(Options::default(), specs()).unwrap();
    Optimizer::new(fitted, options, specs).unwrap();
}

#[test]
fn norm_lock_keeps_norms_and_leaves_zero_and_single_tensors_alone() {
    for momentum in [0.0, 0.9] {
        for dtype in [DType::F32, DType::F64] {
            let mut values = vec![
                Owned::from_f64(dtype, &uniform(3, 10_000)),
                Owned::from_f64(dtype, &[0.0; 4]),
                Owned::from_f64(dtype, &[2.0]),
            ];
            let group = Group { norm_lock: true, weight_decay: 0.5, ..Group::default() };
            let options = Options { groups: vec![group], ..Options::default() };
            let mut optimizer = optimizer_of(moving(momentum), &values, options);
            let norm = |v: &Owned| v.to_f64().iter().map(|x| x * x).sum::<f64>().sqrt();
            let before = norm(&values[0]);
            for i in 0..20 {
                let gradient = [
                    Owned::from_f64(dtype, &uniform(50 + i, 10_000)),
                    Owned::from_f64(dtype, &[1.0; 4]),
                    Owned::from_f64(dtype, &[1.0]),
                ];
                step(&mut optimizer, &mut values, &gradient, 1.0);
                if i == 0 {
                    assert!(norm(&values[1]) > 0.0, "a zero tensor can leave zero");
                }
            }
            // decay and coefficient round once each per step, the elements' roundings average out: 20·2·2⁻²⁴
            let tolerance = 40.0 * roundoff(dtype) + 1e-12;
            assert!((norm(&values[0]) / before - 1.0).abs() < tolerance, "{dtype} {momentum}");
            assert!(values[2].to_f64()[0] != 2.0, "a single element is not frozen");
        }
    }
}

#[test]
fn a_saved_state_continues_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    for master_weights in [false, true] {
        let options = Options { master_weights, ..everything() };
        let (mut values, gradient) = mixture();
        let mut whole = optimizer(&values, options.clone());
        for i in 0..2 {
            step(&mut whole, &mut values, &gradient, 2.0 - f64::from(i) / 4.0);
        }
        whole.save_state(&path).unwrap();
        let mut resumed_values = values.clone();
        let mut resumed = optimizer(&values, options);
        resumed.load_state(&path).unwrap();
        assert_eq!(resumed.applied_steps(), 2);
        for _ in 0..2 {
            let a = step(&mut whole, &mut values, &gradient, 1.5);
            let b = step(&mut resumed, &mut resumed_values, &gradient, 1.5);
            assert_eq!(a, b);
        }
        assert!(bits(&values) == bits(&resumed_values));
    }
}

#[test]
fn a_state_for_other_tensors_is_refused_by_name() {
    let tensors = vec![Owned::F32(vec![1.0; 6]), Owned::F16(vec![f16::ONE; 2])];
    let mut values = tensors.clone();
    let mut saved = optimizer_of(moving(0.9), &tensors, everything());
    step(&mut saved, &mut values, &[Owned::F32(vec![1.0; 6]), Owned::F16(vec![f16::ONE; 2])], 2.0);
    let bytes = saved.state_to_bytes().unwrap();

    let other = |change: fn(&mut Vec<TensorSpec>)| {
        let mut specs: Vec<TensorSpec> = tensors.iter().enumerate().map(|(k, t)| spec(k, t)).collect();
        change(&mut specs);
        let mut optimizer = Optimizer::new(moving(0.9), everything(), specs).unwrap();
        let message = optimizer.load_state_from_bytes(&bytes).unwrap_err().to_string();
        assert_eq!(optimizer.applied_steps(), 0, "a refused state changes nothing");
        message
    };
    let renamed = other(|specs| specs[1].name = "bias".into());
    assert!(renamed.contains("`t1`") && renamed.contains("`bias`"), "{renamed}");
    let reshaped = other(|specs| specs[0].shape = vec![2, 3]);
    assert!(reshaped.contains("`t0`") && reshaped.contains("[2, 3]"), "{reshaped}");
    let retyped = other(|specs| specs[1].dtype = DType::BF16);
    assert!(retyped.contains("f16") && retyped.contains("bf16"), "{retyped}");
    let fewer = other(|specs| specs.truncate(1));
    assert!(fewer.contains("2 tensors"), "{fewer}");

    let mut same = optimizer_of(moving(0.9), &tensors, everything());
    for cut in [0, 4, 20, bytes.len() - 1] {
        let message = same.load_state_from_bytes(&bytes[..cut]).unwrap_err().to_string();
        assert!(message.contains("optimizer state"), "{message}");
    }
    same.load_state_from_bytes(&bytes).unwrap();

    // what is missing from the state, and what it holds that the options have no use for
    let edit = |from: &[u8], to: &[u8]| {
        let at = bytes.windows(from.len()).position(|w| w == from).unwrap();
        let mut edited = bytes.clone();
        edited[at..at + to.len()].copy_from_slice(to);
        edited
    };
    let message =
        same.load_state_from_bytes(&edit(b"\"velocity.t0", b"\"velocity.t9")).unwrap_err().to_string();
    assert!(message.contains("velocity.t0"), "{message}");
    let mut without = optimizer(&tensors, Options::default());
    let message = without.load_state_from_bytes(&bytes).unwrap_err().to_string();
    assert!(message.contains("momentum") && message.contains("`t0`"), "{message}");
    let masters = Options { master_weights: true, ..Options::default() };
    let mut with = optimizer(&tensors, masters);
    step(&mut with, &mut values, &[Owned::F32(vec![1.0; 6]), Owned::F16(vec![f16::ONE; 2])], 2.0);
    let message = without.load_state_from_bytes(&with.state_to_bytes().unwrap()).unwrap_err().to_string();
    assert!(message.contains("`master_weights`") && message.contains("`t1`"), "{message}");
}

#[test]
fn momentum_that_is_switched_on_again_starts_at_rest() {
    let forward = [Owned::F64(vec![1.0])];
    let back = [Owned::F64(vec![-1.0])];
    let mut values = vec![Owned::F64(vec![0.0])];
    let mut used = optimizer_of(moving(0.9), &values, Options::default());
    for _ in 0..3 {
        step(&mut used, &mut values, &forward, 2.0);
    }
    used.set_method(moving(0.0)).unwrap();
    used.set_method(moving(0.9)).unwrap();
    let before = values[0].to_f64()[0];
    let report = step(&mut used, &mut values, &back, 2.0);
    assert_eq!(values[0].to_f64()[0], before + report.learning_rate);
}

/// Shards on two ranks: the norms are added, the loss shared; both take the same step, and stochastic
/// rounding draws the bits of the whole tensor.
#[test]
fn sharded_steps_equal_the_whole_one() {
    let n = 10_000;
    let cut = 3_001;
    let value = Owned::from_f64(DType::BF16, &uniform(1, n));
    let gradient = Owned::from_f64(DType::F32, &uniform(2, n));
    let options = Options { stochastic_rounding: Some(9), ..Options::default() };
    let part = |t: &Owned, range: std::ops::Range<usize>| Owned::from_f64(t.dtype(), &t.to_f64()[range]);

    let mut whole = vec![value.clone()];
    let mut unsharded = optimizer(&whole, options.clone());
    let reference = step(&mut unsharded, &mut whole, std::slice::from_ref(&gradient), 2.0);

    let mut ranks: Vec<(Optimizer, Vec<Owned>, Vec<Owned>)> = [0..cut, cut..n]
        .into_iter()
        .map(|range| {
            let shard = vec![part(&value, range.clone())];
            let mut spec = spec(0, &shard[0]);
            spec.offset = range.start as u64;
            let optimizer =
                Optimizer::new(model(Family::SquaredExponential), options.clone(), vec![spec]).unwrap();
            (optimizer, shard, vec![part(&gradient, range)])
        })
        .collect();
    let mut sums: Vec<_> = (ranks.iter_mut())
        .map(|(o, values, g)| o.local_sums(&params(values), &grads(g), 1.0).unwrap())
        .collect();
    add_up(&mut sums);
    let mut joined = Vec::new();
    let mut rates = Vec::new();
    for ((optimizer, values, gradient), sums) in ranks.iter_mut().zip(sums) {
        let report = optimizer
            .step_with_sums(&mut params(values), &grads(gradient), sums, &StepInput::new(2.0))
            .unwrap();
        rates.push(report.learning_rate);
        joined.extend(values[0].bits());
    }
    assert_eq!(rates[0].to_bits(), rates[1].to_bits());
    // the sums differ in order alone
    assert!((rates[0] / reference.learning_rate - 1.0).abs() < 1e-13);
    let differing = joined.iter().zip(whole[0].bits()).filter(|(a, b)| **a != *b).count();
    assert_eq!(differing, 0, "elements that round otherwise");

    let locked =
        Options { groups: vec![Group { norm_lock: true, ..Group::default() }], ..Options::default() };
    let mut values = vec![value];
    let optimizer = optimizer(&values, locked);
    let error = optimizer.local_sums(&params(&mut values), &[gradient.grad()], 1.0).unwrap_err();
    assert!(error.to_string().contains("norm_lock"), "{error}");
}

#[test]
fn errors_name_the_tensor_or_the_option() {
    let specs = |shape: &[usize]| vec![TensorSpec::new("layer.weight", shape, DType::F32)];
    let new = |options, specs| {
        Optimizer::new(model(Family::SquaredExponential), options, specs).unwrap_err().to_string()
    };
    let twice = new(Options::default(), [specs(&[2]), specs(&[2])].concat());
    assert!(twice.contains("`layer.weight`") && twice.contains("twice"), "{twice}");
    let group = new(Options::default(), vec![specs(&[2])[0].clone().in_group(3)]);
    assert!(group.contains("group 3"), "{group}");
    let large = new(Options::default(), specs(&[usize::MAX, 2]));
    assert!(large.contains("`layer.weight`"), "{large}");
    assert!(TensorSpec::new("e", &[usize::MAX, 2, 0], DType::F32).len().unwrap() == 0);

    let mut far = specs(&[2]);
    far[0].offset = u64::MAX;
    let far = new(Options::default(), far);
    assert!(far.contains("`layer.weight`") && far.contains("offset"), "{far}");

    let bad: [(&str, Options); 6] = [
        (
            "groups[0].length_scale_factor",
            Options {
                groups: vec![Group { length_scale_factor: 1e160, ..Group::default() }],
                ..Options::default()
            },
        ),
        ("multiplier", Options { multiplier: -1.0, ..Options::default() }),
        ("multiplier", Options { multiplier: f64::NAN, ..Options::default() }),
        ("max_step_size", Options { max_step_size: Some(0.0), ..Options::default() }),
        ("groups", Options { groups: vec![], ..Options::default() }),
        (
            "groups[0].length_scale_factor",
            Options {
                groups: vec![Group { length_scale_factor: 0.0, ..Group::default() }],
                ..Options::default()
            },
        ),
    ];
    for (name, options) in bad {
        let message = new(options, specs(&[2]));
        assert!(message.contains(name), "{message} does not name {name}");
    }
    let fitted = || Fitted::new(model(Family::SquaredExponential));
    for (name, fitted) in [
        ("inv_batch_size", Fitted { inv_batch_size: f64::INFINITY, ..fitted() }),
        ("conservatism", Fitted { rule: StepRule { conservatism: 1.0, ..Default::default() }, ..fitted() }),
        ("momentum[1]", Fitted { momentum: vec![0.0, 1.0], ..fitted() }),
        ("length of momentum", Fitted { momentum: vec![0.5; 3], ..fitted() }),
    ] {
        let options = Options { groups: vec![Group::default(); 2], ..Options::default() };
        let message = Optimizer::new(fitted, options, specs(&[2])).unwrap_err().to_string();
        assert!(message.contains(name), "{message} does not name {name}");
    }

    let mut optimizer =
        Optimizer::new(model(Family::SquaredExponential), Options::default(), specs(&[2])).unwrap();
    let mut p = [1.0_f32, 2.0];
    let mut short = [1.0_f32];
    let mut double = [1.0_f64, 2.0];
    let g = [1.0_f32, 1.0];
    let input = StepInput::new(1.0);
    let mut message = |p: ParamMut<'_>, g: &[f32], input: &StepInput| {
        optimizer.step(&mut [p], &[GradRef::from(g)], input).unwrap_err()
    };
    assert!(
        matches!(message((&mut short[..]).into(), &g, &input), Error::Tensor { tensor, .. } if tensor == "layer.weight")
    );
    assert!(matches!(message((&mut double[..]).into(), &g, &input), Error::Tensor { .. }));
    assert!(matches!(message((&mut p[..]).into(), &g[..1], &input), Error::Tensor { .. }));
    for grad_scale in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = message((&mut p[..]).into(), &g, &StepInput { grad_scale, ..input }).to_string();
        assert!(error.contains("grad_scale"), "{error}");
    }
    assert_eq!(p, [1.0, 2.0]);
    let error = optimizer.step(&mut [], &[], &input).unwrap_err().to_string();
    assert!(error.contains("number of params"), "{error}");
    assert!(optimizer.set_multiplier(-1.0).is_err() && optimizer.set_group(1, Group::default()).is_err());
    assert_eq!(optimizer.options(), &Options::default(), "a refused setting changes nothing");
    for (name, method) in [
        ("model", Fitted::new(model(Family::Matern32)).into()),
        ("rule", Fitted { rule: StepRule { conservatism: 0.1, ..Default::default() }, ..fitted() }.into()),
        ("inv_batch_size", Fitted { inv_batch_size: 2.0, ..fitted() }.into()),
        ("fitted method", Method::from(Adaptive::default())),
    ] {
        let message = optimizer.set_method(method).unwrap_err().to_string();
        assert!(message.contains(name), "{message} does not name {name}");
    }
    // the same model, made again, and what may change
    optimizer.set_method(Fitted { inv_batch_size: 0.5, ..fitted() }.with_momentum(0.5)).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Section 2 of the paper: shifting and scaling the cost, and scaling the parameters, changes no point of
    /// the trajectory. Powers of two scale without rounding, so the trajectories agree bit for bit there.
    #[test]
    fn trajectories_are_scale_invariant(
        cost_exponent in -20i32..20,
        param_exponent in -10i32..10,
        shift in -100.0f64..100.0,
        seed in any::<u64>(),
        family in prop::sample::select(vec![
            Family::SquaredExponential, Family::Matern32, Family::Matern52, Family::RationalQuadratic { beta: 0.7 },
        ]),
    ) {
        // J(x) = Σ w_i (x_i − c_i)²/2, a cost with gradients everywhere
        let n = 40;
        let (center, weight) = (uniform(seed, n), uniform(seed ^ 1, n));
        let run = |cost: f64, param: f64, shift: f64| {
            let m = moments();
            let moments = Moments {
                mean: cost * m.mean + shift,
                variance: cost * cost * m.variance,
                noise_variance: cost * cost * m.noise_variance,
                grad_variance: (cost / param).powi(2) * m.grad_variance,
                noise_grad_variance: (cost / param).powi(2) * m.noise_grad_variance,
                ..m
            };
            let mut x = vec![0.0_f64; n];
            let model = Model::new(family, moments).unwrap();
            let fitted = Fitted { inv_batch_size: 1.0 / 64.0, ..Fitted::new(model) };
            let specs = vec![TensorSpec::new("x", &[n], DType::F64)];
            let mut optimizer = Optimizer::new(fitted, Options::default(), specs).unwrap();
            let mut points = Vec::new();
            for _ in 0..10 {
                let y: Vec<f64> = x.iter().map(|x| x / param).collect();
                let w = |i: usize| weight[i].abs() * 0.1;
                let loss: f64 = (0..n).map(|i| w(i) * (y[i] - center[i]).powi(2) / 2.0).sum();
                let g: Vec<f64> = (0..n).map(|i| cost * w(i) * (y[i] - center[i]) / param).collect();
                optimizer
                    .step(&mut [(&mut x[..]).into()], &[(&g[..]).into()], &StepInput::new(cost * loss + shift))
                    .unwrap();
                points.push(x.iter().map(|x| x / param).collect::<Vec<f64>>());
            }
            points
        };
        let plain = run(1.0, 1.0, 0.0);
        let (cost, param) = (2f64.powi(cost_exponent), 2f64.powi(param_exponent));
        prop_assert!(run(cost, param, 0.0) == plain);
        // A shift rounds loss and mean: relative 2⁻⁵³·|shift|/gap per step, gap ≥ 1, and each of 10 steps may
        // pass on ten times the last one's error.
        for (a, b) in run(1.0, 1.0, shift).iter().zip(&plain) {
            for (a, b) in a.iter().zip(b) {
                prop_assert!((a - b).abs() < 1e-9, "{a} {b}");
            }
        }
    }
}

fn factor(name: &str, dims: u64, length_scale_factor: f64) -> TensorFactor {
    TensorFactor { name: name.into(), dims, length_scale_factor }
}

/// The method of a model with length scales by tensor.
fn of_tensors(tensors: Vec<TensorFactor>) -> Fitted {
    Fitted::new(of_dims(tensors.iter().map(|tensor| tensor.dims).sum()).with_tensors(tensors).unwrap())
}

fn of_dims(dims: u64) -> Model {
    Model::new(Family::SquaredExponential, Moments { dims, ..moments() }).unwrap()
}

/// Steps with length scales by tensor are the isotropic ones in coordinates y_k = x_k/f_k, where the gradient
/// is f_k·g_k; with powers of two to the last bit.
#[test]
fn length_scales_by_tensor_are_a_change_of_coordinates() {
    let sizes = [1, 31, 4097];
    let factors = [4.0, 0.5, 2.0];
    let tensors = |seed: u64, scale: &dyn Fn(usize) -> f64| -> Vec<Owned> {
        let values = |k: usize| -> Vec<f64> {
            uniform(seed + k as u64, sizes[k]).into_iter().map(|x| x * scale(k)).collect()
        };
        (0..3).map(|k| Owned::from_f64(DType::F64, &values(k))).collect()
    };
    let (mut x, g) = (tensors(1, &|_| 1.0), tensors(9, &|_| 1.0));
    let (mut y, in_y) = (tensors(1, &|k| 1.0 / factors[k]), tensors(9, &|k| factors[k]));
    let specs: Vec<TensorSpec> = x.iter().enumerate().map(|(k, t)| spec(k, t)).collect();
    let list: Vec<TensorFactor> =
        [2, 0, 1].map(|k| factor(&format!("t{k}"), sizes[k] as u64, factors[k])).into();
    let fitted = of_tensors(list).with_momentum(0.5);
    let (fitted, per_tensor, specs) = fitted.per_tensor(Options::default(), specs).unwrap();
    assert_eq!(specs.iter().map(|spec| spec.group).collect::<Vec<_>>(), [0, 1, 2]);
    let mut anisotropic = Optimizer::new(fitted, per_tensor, specs).unwrap();
    let fitted = Fitted::new(of_dims(sizes.iter().sum::<usize>() as u64)).with_momentum(0.5);
    let mut isotropic = optimizer_of(fitted, &y, Options::default());
    for loss in [2.4, 2.0, 1.5] {
        let report = step(&mut anisotropic, &mut x, &g, loss);
        let same = step(&mut isotropic, &mut y, &in_y, loss);
        assert_eq!((report.step_size, report.learning_rate), (same.step_size, same.learning_rate));
    }
    for (k, (x, y)) in x.iter().zip(&y).enumerate() {
        let moved: Vec<f64> = y.to_f64().into_iter().map(|y| y * factors[k]).collect();
        assert_eq!(x.to_f64(), moved);
    }
}

#[test]
fn groups_by_tensor_keep_the_settings_of_their_groups() {
    let specs = || -> Vec<TensorSpec> {
        [("weight", 1), ("running mean", 0), ("bias", 1)]
            .map(|(name, group)| TensorSpec::new(name, &[4], DType::F32).in_group(group))
            .into()
    };
    let decayed = Group { weight_decay: 0.1, length_scale_factor: 3.0, ..Group::default() };
    let options = Options { groups: vec![Group::default(), decayed], ..Options::default() };
    let tensors = vec![factor("bias", 4, 0.5), factor("weight", 4, 2.0)];
    let fitted = Fitted { momentum: vec![0.9, 0.1], ..of_tensors(tensors) };
    let (fitted, got, placed) = fitted.per_tensor(options.clone(), specs()).unwrap();
    assert_eq!(fitted.momentum, [0.1, 0.9, 0.1]);
    let scaled = |factor: f64| Group { length_scale_factor: factor, ..decayed };
    assert_eq!(got, Options { groups: vec![scaled(6.0), options.groups[0], scaled(1.5)], ..options.clone() });
    assert_eq!(
        placed.iter().map(|spec| (spec.name.as_str(), spec.group)).collect::<Vec<_>>(),
        [("weight", 0), ("running mean", 1), ("bias", 2)]
    );
    let (_, same, as_they_were) = moving(0.5).per_tensor(options.clone(), specs()).unwrap();
    assert_eq!((same, as_they_were), (options.clone(), specs()));

    let wrong_group: Vec<TensorSpec> = specs().into_iter().map(|spec| spec.in_group(2)).collect();
    for (specs, tensors, name, words) in [
        (specs(), vec![factor("other", 4, 1.0)], "other", "not among the optimizer's tensors"),
        (specs(), vec![factor("bias", 3, 1.0)], "bias", "3 elements in the model"),
        (wrong_group, vec![factor("bias", 4, 1.0)], "weight", "group 2, but there are 2"),
    ] {
        match of_tensors(tensors).per_tensor(options.clone(), specs) {
            Err(Error::Tensor { tensor, problem }) => {
                assert!(tensor == name && problem.contains(words), "{tensor}: {problem}")
            }
            other => panic!("{other:?}"),
        }
    }
    // Momentum of two groups, where there are three.
    let three = Options { groups: vec![Group::default(); 3], ..Options::default() };
    let fitted = Fitted { momentum: vec![0.9, 0.1], ..of_tensors(vec![factor("bias", 4, 1.0)]) };
    let in_third = vec![TensorSpec::new("bias", &[4], DType::F32).in_group(2)];
    let error = fitted.per_tensor(three, in_third).unwrap_err().to_string();
    assert!(error.contains("momentum = 2: there are 3 groups"), "{error}");
    // A group is named by the number that the caller gave it, and checked whether it has tensors or not.
    let with =
        |group: Group| Options { groups: vec![Group::default(), decayed, group], ..Options::default() };
    for (group, name) in [
        (Group { weight_decay: -1.0, ..Group::default() }, "groups[2].weight_decay = -1"),
        (Group { length_scale_factor: f64::NAN, ..Group::default() }, "groups[2].length_scale_factor = NaN"),
    ] {
        let fitted = of_tensors(vec![factor("bias", 4, 1.0)]);
        let error = fitted.per_tensor(with(group), specs()).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    // A shard has fewer elements, as long as it lies within the tensor.
    let shard = |offset| vec![TensorSpec { offset, ..TensorSpec::new("bias", &[4], DType::F32) }];
    let placed = |offset| {
        of_tensors(vec![factor("bias", 10, 2.0)]).per_tensor(Options::default(), shard(offset)).is_ok()
    };
    assert!(placed(6) && !placed(7));
}

#[test]
fn addresses_on_the_host_are_checked_whoever_asks() {
    let specs = vec![TensorSpec::new("w", &[2], DType::BF16)];
    let options = Options { master_weights: true, ..Options::default() };
    let mut optimizer = AnyOptimizer::from(Optimizer::new(moving(0.9), options, specs).unwrap());
    let null = [RawTensor::without_grad(0)];
    // SAFETY: null is refused, and so are too few tensors and null sums; nothing is read.
    let [one, none, sums] = unsafe {
        [
            optimizer.init_master_weights(&null, Stream::DEFAULT),
            optimizer.init_master_weights(&[], Stream::DEFAULT),
            optimizer.step_with_sums(&null, 0, &RawInput::new(1.0), Stream::DEFAULT).map(drop),
        ]
    }
    .map(|result| result.unwrap_err().to_string());
    assert!(one.contains("`w`") && one.contains("null"), "{one}");
    assert!(none.contains("number of tensors = 0"), "{none}");
    assert!(sums.contains("sums") && !sums.contains("device"), "{sums}");
}
