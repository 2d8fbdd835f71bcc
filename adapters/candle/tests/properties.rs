//! Steps on candle variables against the library's on plain lists, bit for bit: any shapes, formats, options,
//! memory layouts.

mod common;

use candle_core::{Device, Tensor, Var};
use common::library::{DTYPES, Owned, bits, moments, moving, params, uniform};
use common::{owned, scalar, store, tensor, var};
use proptest::prelude::*;
use rfdescent_candle::rfdescent::covariance::Family;
use rfdescent_candle::rfdescent::optimizer::{Group, Method, Optimizer, Options, StepInput, TensorSpec};
use rfdescent_candle::rfdescent::{DType, GradRef};
use rfdescent_candle::{Adaptive, Config, Fitted, Parameter, Rfd};

/// How a gradient lies in memory.
#[derive(Clone, Copy, Debug)]
enum Lies {
    Missing,
    Contiguous,
    /// In the middle of a larger list.
    Offset,
    /// Axes in reverse.
    Transposed,
    /// One number for all elements.
    Broadcast,
    /// In the memory of the variable itself, which then must have its format.
    InVariable,
}

#[derive(Clone, Debug)]
struct Case {
    shape: Vec<usize>,
    dtype: DType,
    grad_dtype: DType,
    lies: Lies,
    group: usize,
    seed: u64,
}

impl Case {
    fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The gradient of a step as a list, and as a tensor that lies as it should.
    fn gradient(&self, var: &Var, step: u64) -> Option<(Owned, Tensor)> {
        let values = Owned::from_f64(self.grad_dtype, &uniform(self.seed ^ (step << 32), self.len()));
        let plain = tensor(&values, &self.shape);
        let gradient = match self.lies {
            Lies::Missing => return None,
            Lies::Contiguous => plain,
            Lies::Offset => {
                let flat = plain.flatten_all().unwrap();
                let all = Tensor::cat(&[&flat, &flat, &flat], 0).unwrap();
                all.narrow(0, self.len(), self.len()).unwrap().reshape(self.shape.clone()).unwrap()
            }
            Lies::Transposed => {
                let reversed: Vec<usize> = (0..self.shape.len()).rev().collect();
                let moved = plain.permute(reversed.clone()).unwrap().contiguous().unwrap();
                moved.permute(reversed).unwrap()
            }
            Lies::Broadcast => {
                let one = tensor(&Owned::from_f64(self.grad_dtype, &uniform(self.seed, 1)), &[]);
                one.broadcast_as(self.shape.clone()).unwrap()
            }
            Lies::InVariable => var.as_tensor().clone(),
        };
        Some((owned(&gradient), gradient))
    }
}

fn case() -> impl Strategy<Value = Case> {
    let format = proptest::sample::select(&DTYPES[..]);
    let lies = prop_oneof![
        1 => Just(Lies::Missing),
        3 => Just(Lies::Contiguous),
        1 => Just(Lies::Offset),
        2 => Just(Lies::Transposed),
        1 => Just(Lies::Broadcast),
        1 => Just(Lies::InVariable),
    ];
    // The largest have more elements than one block of a sum (4096).
    let shape = prop_oneof![
        4 => proptest::collection::vec(0_usize..7, 0..4),
        1 => proptest::collection::vec(60_usize..90, 2..3),
    ];
    (shape, format.clone(), format, lies, 0_usize..2, any::<u64>()).prop_map(
        |(shape, dtype, grad_dtype, lies, group, seed)| Case { shape, dtype, grad_dtype, lies, group, seed },
    )
}

fn group() -> impl Strategy<Value = Group> {
    let numbers = (0.3..3.0, 0.0..2.0, prop_oneof![Just(0.0), 0.0..0.1]);
    (numbers, any::<bool>()).prop_map(|((length_scale_factor, multiplier, weight_decay), norm_lock)| Group {
        length_scale_factor,
        multiplier,
        weight_decay,
        norm_lock,
    })
}

fn options() -> impl Strategy<Value = Options> {
    let rounding =
        prop_oneof![Just((None, false)), any::<u64>().prop_map(|s| (Some(s), false)), Just((None, true))];
    let scalars = (0.0..2.0, proptest::option::of(0.01..10.0));
    (scalars, rounding, proptest::collection::vec(group(), 2)).prop_map(
        |((multiplier, max_step_size), (stochastic_rounding, master_weights), groups)| Options {
            multiplier,
            max_step_size,
            stochastic_rounding,
            master_weights,
            groups,
        },
    )
}

fn fitted() -> impl Strategy<Value = Fitted> {
    let momentum = prop_oneof![Just(0.0), 0.1..0.95];
    let inv_batch_size = prop_oneof![Just(0.0), 0.001..1.0];
    (inv_batch_size, proptest::collection::vec(momentum, 2)).prop_map(|(inv_batch_size, momentum)| Fitted {
        inv_batch_size,
        momentum,
        ..moving(0.0)
    })
}

fn adaptive() -> impl Strategy<Value = Adaptive> {
    let averaging = prop_oneof![Just(0.0), 0.1..0.95];
    let loss_bound = prop_oneof![Just(None), Just(Some(0.0))];
    (averaging, loss_bound).prop_map(|(averaging, loss_bound)| Adaptive { averaging, loss_bound })
}

fn method() -> impl Strategy<Value = Method> {
    prop_oneof![fitted().prop_map(Method::from), adaptive().prop_map(Method::from)]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn steps_have_the_bits_of_the_library(
        cases in proptest::collection::vec(case(), 0..6),
        method in method(),
        options in options(),
        // Below and above the mean and the adaptive method's bound, and one that is not finite: that step is
        // skipped by both.
        losses in proptest::collection::vec(prop_oneof![6 => -1.0..4.0, 1 => Just(f64::NAN)], 1..4),
    ) {
        let mut values: Vec<Owned> =
            cases.iter().map(|case| Owned::from_f64(case.dtype, &uniform(case.seed, case.len()))).collect();
        let parameters: Vec<Parameter> = cases
            .iter()
            .zip(&values)
            .enumerate()
            .map(|(k, (case, values))| Parameter::new(k.to_string(), var(values, &case.shape)).in_group(case.group))
            .collect();
        let specs = cases.iter().enumerate().map(|(k, case)| {
            TensorSpec::new(k.to_string(), &case.shape, case.dtype).in_group(case.group)
        });
        let mut reference = Optimizer::new(method.clone(), options.clone(), specs.collect()).unwrap();
        let mut rfd = Rfd::for_parameters(parameters.clone(), Config { method, options }).unwrap();

        for (step, &loss) in losses.iter().enumerate() {
            let gradients: Vec<_> = cases
                .iter()
                .zip(&parameters)
                .map(|(case, parameter)| case.gradient(&parameter.var, step as u64))
                .collect();
            let lists: Vec<GradRef> = gradients
                .iter()
                .map(|gradient| gradient.as_ref().map_or(GradRef::Missing, |(list, _)| list.grad()))
                .collect();
            let expected = reference.step(&mut params(&mut values), &lists, &StepInput::new(loss)).unwrap();
            let grads = store(
                parameters
                    .iter()
                    .zip(&gradients)
                    .filter_map(|(parameter, gradient)| Some((&parameter.var, gradient.as_ref()?.1.clone()))),
            );
            rfd.step_with_loss(&grads, &scalar(loss)).unwrap();

            let ours: Vec<Owned> = parameters.iter().map(|parameter| owned(&parameter.var)).collect();
            prop_assert_eq!(bits(&ours), bits(&values));
            // As text, in which NaN is NaN.
            prop_assert_eq!(format!("{:?}", rfd.report().unwrap().unwrap()), format!("{expected:?}"));
        }
        let state = rfd.state_to_bytes().unwrap();
        prop_assert_eq!(&state, &reference.state_to_bytes().unwrap());
        // Each loads what the other saved, and saves it again as it was.
        reference.load_state_from_bytes(&state).unwrap();
        rfd.load_state_from_bytes(&reference.state_to_bytes().unwrap()).unwrap();
        prop_assert_eq!(state, rfd.state_to_bytes().unwrap());
    }
}

/// Gradients as candle makes them.
#[test]
fn a_network_is_trained_as_with_gradients_copied_by_hand() {
    let numbers = |seed: u64, len: usize| Owned::from_f64(DType::F32, &uniform(seed, len));
    let vars =
        [var(&numbers(1, 12 * 5), &[12, 5]), var(&numbers(2, 12), &[12]), var(&numbers(3, 12), &[1, 12])];
    let inputs = tensor(&numbers(4, 40 * 5), &[40, 5]);
    let loss = || {
        let [weight, bias, output] = &vars;
        let hidden =
            inputs.matmul(&weight.t().unwrap()).unwrap().broadcast_add(bias).unwrap().tanh().unwrap();
        hidden.matmul(&output.t().unwrap()).unwrap().sqr().unwrap().mean_all().unwrap()
    };
    let model = rfdescent_candle::rfdescent::covariance::Model::new(
        Family::SquaredExponential,
        rfdescent_candle::rfdescent::Moments { dims: 84, ..moments() },
    )
    .unwrap();
    let specs =
        vars.iter().enumerate().map(|(k, v)| TensorSpec::new(format!("var {k}"), v.dims(), DType::F32));
    let mut reference = Optimizer::new(model.clone(), Options::default(), specs.collect()).unwrap();
    let mut rfd = candle_nn::Optimizer::new(vars.to_vec(), Config::new(model)).unwrap();
    let first = loss().to_scalar::<f32>().unwrap();
    for _ in 0..30 {
        let now = loss();
        let grads = now.backward().unwrap();
        let gradients: Vec<Owned> = vars.iter().map(|v| owned(grads.get(v).unwrap())).collect();
        let mut values: Vec<Owned> = vars.iter().map(|v| owned(v)).collect();
        let lists: Vec<GradRef> = gradients.iter().map(Owned::grad).collect();
        let input = StepInput::new(f64::from(now.to_scalar::<f32>().unwrap()));
        reference.step(&mut params(&mut values), &lists, &input).unwrap();
        <Rfd as candle_nn::Optimizer>::backward_step(&mut rfd, &now).unwrap();
        let ours: Vec<Owned> = vars.iter().map(|v| owned(v)).collect();
        assert_eq!(bits(&ours), bits(&values));
    }
    assert!(loss().to_scalar::<f32>().unwrap() < first);
    assert!(vars.iter().all(|v| v.device().same_device(&Device::Cpu)));
}
