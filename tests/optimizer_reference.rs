//! The optimizer against a plain f64 reference, over random lists of tensors, formats and options.

mod common;

use common::*;
use proptest::prelude::*;
use rfdescent::DType;
use rfdescent::covariance::{Family, Model, Observation};
use rfdescent::optimizer::{Fitted, Group, Optimizer, Options, Outcome, StepInput, TensorSpec};

#[derive(Clone, Debug)]
struct Case {
    tensors: Vec<(usize, DType, DType, usize)>,
    groups: Vec<(Group, f64)>,
    master: bool,
    stochastic: bool,
    grad_scale: f64,
    loss: f64,
    grad_size: f64,
    seed: u64,
    family: Family,
}

fn dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(DTYPES.to_vec())
}

fn length() -> impl Strategy<Value = usize> {
    prop::sample::select(vec![0, 1, 2, 31, 32, 33, 1000, 1024, 1025, 4095, 4096, 4097, 9000, 66_000, 140_000])
}

/// Options of a group, and its momentum.
fn group() -> impl Strategy<Value = (Group, f64)> {
    (
        prop::sample::select(vec![1.0, 0.5, 3.0]),
        prop::sample::select(vec![1.0, 0.1]),
        prop::sample::select(vec![0.0, 0.9]),
        prop::sample::select(vec![0.0, 0.3]),
        any::<bool>(),
    )
        .prop_map(|(length_scale_factor, multiplier, momentum, weight_decay, norm_lock)| {
            (Group { length_scale_factor, multiplier, weight_decay, norm_lock }, momentum)
        })
}

fn case() -> impl Strategy<Value = Case> {
    (
        prop::collection::vec((length(), dtype(), dtype(), 0usize..2), 1..6),
        prop::collection::vec(group(), 2),
        any::<(bool, bool)>(),
        prop::sample::select(vec![1.0, 1024.0, 3.0]),
        prop::sample::select(vec![2.6, 2.4, 1.0, 0.01]),
        prop::sample::select(vec![1e-4, 1.0]),
        any::<u64>(),
        prop::sample::select(vec![
            Family::SquaredExponential,
            Family::Matern32,
            Family::Matern52,
            Family::RationalQuadratic { beta: 2.0 },
        ]),
    )
        .prop_map(
            |(tensors, groups, (master, stochastic), grad_scale, loss, grad_size, seed, family)| Case {
                tensors,
                groups,
                master,
                stochastic,
                grad_scale,
                loss,
                grad_size,
                seed,
                family,
            },
        )
}

/// What the reference expects of one tensor, and how far f32 or f64 arithmetic may be away from it, element
/// by element.
struct Expected {
    value: Vec<f64>,
    velocity: Vec<f64>,
    slack: Vec<f64>,
}

/// One step in plain f64, from the values that the optimizer holds before it.
fn reference(
    model: &Model,
    case: &Case,
    before: &[Vec<f64>],
    velocity: &[Vec<f64>],
    grads: &[Vec<f64>],
) -> Vec<Expected> {
    let group = |k: usize| &case.groups[case.tensors[k].3].0;
    let momentum = |k: usize| case.groups[case.tensors[k].3].1;
    let square = |g: &[f64]| g.iter().map(|x| (x / case.grad_scale).powi(2)).sum::<f64>();
    let sigma: f64 = grads
        .iter()
        .enumerate()
        .map(|(k, g)| group(k).length_scale_factor.powi(2) * square(g))
        .sum::<f64>()
        .sqrt();
    let observation = Observation { loss: case.loss, grad_norm: sigma, inv_batch_size: 0.0 };
    let step = model.step(&observation, &Default::default()).unwrap().step_size;
    let rate = step / sigma;
    (0..before.len())
        .map(|k| {
            let g = group(k);
            let coefficient = rate * g.multiplier * g.length_scale_factor.powi(2);
            let decay = (1.0 - rate * g.multiplier * g.weight_decay).max(0.0);
            let grad: Vec<f64> = grads[k].iter().map(|x| x / case.grad_scale).collect();
            let new_velocity: Vec<f64> =
                velocity[k].iter().zip(&grad).map(|(v, g_)| momentum(k) * v - g_).collect();
            let mut value: Vec<f64> =
                before[k].iter().zip(&new_velocity).map(|(p, v)| decay * p + coefficient * v).collect();
            let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
            let (old, new) = (norm(&before[k]), norm(&value));
            let ratio =
                if g.norm_lock && value.len() > 1 && old > 0.0 && new > 0.0 { old / new } else { 1.0 };
            value.iter_mut().for_each(|x| *x *= ratio);

            let (_, param, grad_format, _) = case.tensors[k];
            // Computed in f64 only where an operand is f64; the velocity is stored as f32 unless the
            // parameter is f64.
            let u = match (param, grad_format) {
                (DType::F64, _) => 2f64.powi(-53),
                (_, DType::F64) if momentum(k) == 0.0 => 2f64.powi(-53),
                _ => 2f64.powi(-24),
            };
            let half = matches!(param, DType::F16 | DType::BF16);
            let (storage, ulps) = match (half && case.master, half && case.stochastic) {
                (true, _) => (roundoff(DType::F32), 1.0),
                // stochastic rounding: up to a whole ulp
                (false, true) => (roundoff(param), 2.0),
                (false, false) => (roundoff(param), 1.0),
            };
            let smallest = if half && case.master { smallest(DType::F32) } else { smallest(param) };
            let slack = (0..value.len())
                .map(|i| {
                    // p·decay: coefficient and product each round once. The gradient's term: unscale (or
                    // prescale), coefficient, their products and, with momentum, m, its product and the sum
                    // round: at most 8. 1e-9: the f64 sums behind norm and lock, n·2⁻⁵³ with n ≤ 5e5 times a
                    // cancellation ≤ 10.
                    let gradient_part =
                        ratio * coefficient * (momentum(k) * velocity[k][i].abs() + grad[i].abs());
                    let kept = ratio * decay * before[k][i].abs();
                    (2.0 * u + 1e-9) * kept
                        + (8.0 * u + 1e-9) * gradient_part
                        + u * value[i].abs()
                        + ulps * (storage * (value[i].abs() + u * (kept + gradient_part)) + smallest)
                        + 1e-40
                })
                .collect();
            Expected { value, velocity: new_velocity, slack }
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn steps_match_the_f64_reference(case in case()) {
        let model = model(case.family);
        let options = Options {
            groups: case.groups.iter().map(|(group, _)| *group).collect(),
            master_weights: case.master,
            stochastic_rounding: case.stochastic.then_some(11),
            ..Options::default()
        };
        let specs = case
            .tensors
            .iter()
            .enumerate()
            .map(|(k, &(len, dtype, _, group))| TensorSpec::new(format!("t{k}"), &[len], dtype).in_group(group))
            .collect();
        let momentum = case.groups.iter().map(|&(_, momentum)| momentum).collect();
        let fitted = Fitted { momentum, ..Fitted::new(model.clone()) };
        let mut optimizer = Optimizer::new(fitted, options, specs).unwrap();
        let mut values: Vec<Owned> = case
            .tensors
            .iter()
            .enumerate()
            .map(|(k, &(len, dtype, _, _))| Owned::from_f64(dtype, &uniform(case.seed ^ k as u64, len)))
            .collect();
        // what the reference starts from: master weights where there are any, else the parameters
        let mut held: Vec<Vec<f64>> = values.iter().map(Owned::to_f64).collect();
        let mut velocity: Vec<Vec<f64>> = held.iter().map(|p| vec![0.0; p.len()]).collect();
        let elements: usize = case.tensors.iter().map(|t| t.0).sum();

        for round in 0..3 {
            let gradient: Vec<Owned> = case
                .tensors
                .iter()
                .enumerate()
                .map(|(k, &(len, _, dtype, _))| {
                    let g: Vec<f64> = uniform(case.seed ^ (1000 * (round + 1) + k as u64), len)
                        .iter()
                        .map(|x| x * case.grad_size * case.grad_scale)
                        .collect();
                    Owned::from_f64(dtype, &g)
                })
                .collect();
            let gradient_f64: Vec<Vec<f64>> = gradient.iter().map(Owned::to_f64).collect();
            let before = bits(&values);
            let input = StepInput { grad_scale: case.grad_scale, ..StepInput::new(case.loss) };
            let report = optimizer.step(&mut params(&mut values), &grads(&gradient), &input).unwrap();
            if elements == 0 || gradient_f64.iter().flatten().all(|&g| g == 0.0) {
                prop_assert!(report.outcome != Outcome::Applied);
                prop_assert!(bits(&values) == before);
                continue;
            }
            prop_assert_eq!(report.outcome, Outcome::Applied);
            let expected = reference(&model, &case, &held, &velocity, &gradient_f64);
            let masters = stored(&optimizer, "master");
            let velocities = stored(&optimizer, "velocity");
            for (k, expected) in expected.into_iter().enumerate() {
                let after = values[k].to_f64();
                // where there are master weights they are compared, and the parameter is their rounding
                held[k] = masters[k].clone().unwrap_or_else(|| after.clone());
                if masters[k].is_some() {
                    let rounded = Owned::from_f64(values[k].dtype(), &held[k]);
                    prop_assert!(rounded.bits() == values[k].bits(), "tensor {k} is not its master weights rounded");
                }
                for (i, &value) in held[k].iter().enumerate() {
                    let error = (value - expected.value[i]).abs();
                    prop_assert!(
                        error <= expected.slack[i],
                        "tensor {k} element {i}: {} expected {} error {error:e} slack {:e}",
                        value, expected.value[i], expected.slack[i]
                    );
                }
                velocity[k] = velocities[k].clone().unwrap_or_else(|| vec![0.0; after.len()]);
                if velocities[k].is_some() {
                    for (v, e) in velocity[k].iter().zip(&expected.velocity) {
                        // unscale, its product, m, its product, sum and storage: each ≤ 1 roundoff of f32
                        prop_assert!((v - e).abs() <= 6.0 * 2f64.powi(-24) * (e.abs() + 2.0 * case.grad_size * 10.0));
                    }
                }
            }
        }
    }
}

/// Buffers of the saved state, by tensor.
fn stored(optimizer: &Optimizer, kind: &str) -> Vec<Option<Vec<f64>>> {
    let bytes = optimizer.state_to_bytes().unwrap();
    let state = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    optimizer
        .specs()
        .iter()
        .map(|spec| {
            let view = state.tensor(&format!("{kind}.{}", spec.name)).ok()?;
            Some(match view.dtype() {
                safetensors::Dtype::F64 => {
                    view.data().as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
                }
                _ => {
                    let f32s = view.data().as_chunks::<4>().0.iter();
                    f32s.map(|b| f64::from(f32::from_le_bytes(*b))).collect()
                }
            })
        })
        .collect()
}
