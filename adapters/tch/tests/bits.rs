//! Steps through tensors against the library's optimizer on the same numbers, bit for bit: formats, layouts,
//! options.

mod support;

use half::{bf16, f16};
use proptest::prelude::*;
use rfdescent::optimizer::{self, Group, Method, Options, Outcome, StepInput, TensorSpec};
use rfdescent::{DType, GradRef, ParamMut};
use rfdescent_tch::{Adaptive, Fitted, Rfd, StepTensors};
use tch::{Kind, Tensor};

use support::{model, plant_gradient, store};

/// Numbers in memory order, in some format.
#[derive(Clone, Debug)]
enum Numbers {
    F32(Vec<f32>),
    F64(Vec<f64>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

impl Numbers {
    fn new(dtype: DType, values: &[f64]) -> Self {
        match dtype {
            DType::F32 => Numbers::F32(values.iter().map(|&x| x as f32).collect()),
            DType::F64 => Numbers::F64(values.to_vec()),
            DType::F16 => Numbers::F16(values.iter().map(|&x| f16::from_f64(x)).collect()),
            DType::BF16 => Numbers::BF16(values.iter().map(|&x| bf16::from_f64(x)).collect()),
        }
    }

    fn tensor(&self) -> Tensor {
        match self {
            Numbers::F32(v) => Tensor::from_slice(v),
            Numbers::F64(v) => Tensor::from_slice(v),
            Numbers::F16(v) => Tensor::from_slice(v),
            // tch takes bf16 numbers for f16; by way of f32, which holds them all.
            Numbers::BF16(v) => {
                let wide: Vec<f32> = v.iter().map(|x| x.to_f32()).collect();
                Tensor::from_slice(&wide).to_kind(Kind::BFloat16)
            }
        }
    }

    fn param(&mut self) -> ParamMut<'_> {
        match self {
            Numbers::F32(v) => (&mut v[..]).into(),
            Numbers::F64(v) => (&mut v[..]).into(),
            Numbers::F16(v) => (&mut v[..]).into(),
            Numbers::BF16(v) => (&mut v[..]).into(),
        }
    }

    fn grad(&self) -> GradRef<'_> {
        match self {
            Numbers::F32(v) => (&v[..]).into(),
            Numbers::F64(v) => (&v[..]).into(),
            Numbers::F16(v) => (&v[..]).into(),
            Numbers::BF16(v) => (&v[..]).into(),
        }
    }

    fn bits(&self) -> Vec<u64> {
        match self {
            Numbers::F32(v) => v.iter().map(|x| x.to_bits().into()).collect(),
            Numbers::F64(v) => v.iter().map(|x| x.to_bits()).collect(),
            Numbers::F16(v) => v.iter().map(|x| x.to_bits().into()).collect(),
            Numbers::BF16(v) => v.iter().map(|x| x.to_bits().into()).collect(),
        }
    }

    /// Those of a tensor of one axis.
    fn read(tensor: &Tensor) -> Self {
        fn values<T: tch::kind::Element + Copy>(tensor: &Tensor) -> Vec<T> {
            let mut values = vec![T::ZERO; tensor.numel()];
            tensor.copy_data(&mut values, tensor.numel());
            values
        }
        match tensor.kind() {
            Kind::Float => Numbers::F32(values(tensor)),
            Kind::Double => Numbers::F64(values(tensor)),
            Kind::Half => Numbers::F16(values(tensor)),
            Kind::BFloat16 => {
                let wide: Vec<f32> = values(&tensor.to_kind(Kind::Float));
                Numbers::BF16(wide.into_iter().map(bf16::from_f32).collect())
            }
            kind => panic!("{kind:?}"),
        }
    }
}

/// How the elements of a gradient lie.
#[derive(Clone, Copy, Debug)]
enum GradLayout {
    /// As the parameter's.
    Same,
    /// Row by row, whatever the parameter's.
    Rows,
    /// Row by row with a gap after each element.
    Gaps,
    /// One number for all elements.
    Expanded,
}

#[derive(Clone, Debug)]
struct Case {
    shape: Vec<usize>,
    /// Axes from the slowest to the fastest.
    order: Vec<usize>,
    /// Elements before the first in the parameter's memory.
    offset: usize,
    dtype: DType,
    grad_dtype: DType,
    /// None: no gradient.
    grad: Option<GradLayout>,
    group: usize,
}

impl Case {
    fn len(&self) -> usize {
        self.shape.iter().product()
    }

    fn size(&self) -> Vec<i64> {
        self.shape.iter().map(|&n| n as i64).collect()
    }

    /// Strides that fill memory in the given order of axes.
    fn stride(&self, order: &[usize]) -> Vec<i64> {
        let mut stride = vec![0; self.shape.len()];
        let mut next = 1;
        for &axis in order.iter().rev() {
            stride[axis] = next;
            next *= self.shape[axis].max(1) as i64;
        }
        stride
    }

    /// A gradient whose elements are `memory`, in the order of the parameter's memory.
    fn gradient(&self, layout: GradLayout, memory: &Numbers) -> Tensor {
        let in_order = memory.tensor().as_strided(self.size(), self.stride(&self.order), None);
        match layout {
            GradLayout::Same => in_order,
            GradLayout::Rows => in_order.contiguous(),
            GradLayout::Gaps => {
                let twice: Vec<i64> = [self.size(), vec![2]].concat();
                let wide = Tensor::zeros(twice, (in_order.kind(), in_order.device()));
                let mut even = wide.select(-1, 0);
                even.copy_(&in_order);
                even
            }
            GradLayout::Expanded => memory.tensor().narrow(0, 0, 1).squeeze().expand(self.size(), false),
        }
    }
}

fn dtype() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::F64), Just(DType::F16), Just(DType::BF16)]
}

fn case(groups: usize) -> impl Strategy<Value = Case> {
    let shape = prop_oneof![
        6 => prop::collection::vec(1_usize..6, 0..5),
        1 => prop::collection::vec(0_usize..3, 1..4),
        // Beyond a chunk of the fixed order of summation, 4096 elements.
        1 => prop::collection::vec(50_usize..90, 2..3),
    ];
    let grad = prop_oneof![
        Just(None),
        Just(Some(GradLayout::Same)),
        Just(Some(GradLayout::Rows)),
        Just(Some(GradLayout::Gaps)),
        Just(Some(GradLayout::Expanded)),
    ];
    shape.prop_flat_map(move |shape| {
        let axes: Vec<usize> = (0..shape.len()).collect();
        (Just(shape), Just(axes).prop_shuffle(), 0_usize..3, dtype(), dtype(), grad.clone(), 0..groups)
            .prop_map(|(shape, order, offset, dtype, grad_dtype, grad, group)| {
                let grad = if shape.contains(&0) { grad.map(|_| GradLayout::Same) } else { grad };
                Case { shape, order, offset, dtype, grad_dtype, grad, group }
            })
    })
}

fn group() -> impl Strategy<Value = Group> {
    (0.5_f64..2.0, 0.0_f64..2.0, prop_oneof![Just(0.0), Just(1e-3)], any::<bool>()).prop_map(
        |(length_scale_factor, multiplier, weight_decay, norm_lock)| Group {
            length_scale_factor,
            multiplier,
            weight_decay,
            norm_lock,
        },
    )
}

fn options() -> impl Strategy<Value = Options> {
    (
        prop::collection::vec(group(), 1..3),
        any::<bool>(),
        prop::option::of(any::<u64>()),
        prop::option::of(0.1_f64..1.0),
        0.1_f64..2.0,
    )
        .prop_map(|(groups, master_weights, stochastic_rounding, max_step_size, multiplier)| Options {
            multiplier,
            max_step_size,
            stochastic_rounding,
            master_weights,
            groups,
        })
}

/// A method with options.
fn method() -> impl Strategy<Value = (Method, Options)> {
    let momentum = || prop_oneof![Just(0.0), Just(0.9)];
    let fitted = (options(), [momentum(), momentum()], prop_oneof![Just(0.0), Just(1.0 / 64.0)]).prop_map(
        |(options, momentum, inv_batch_size)| {
            let momentum = momentum[..options.groups.len()].to_vec();
            (Fitted { momentum, inv_batch_size, ..Fitted::new(model()) }.into(), options)
        },
    );
    let loss_bound = prop_oneof![Just(None), Just(Some(0.0))];
    let adaptive = (options(), momentum(), loss_bound)
        .prop_map(|(options, averaging, loss_bound)| (Adaptive { averaging, loss_bound }.into(), options));
    prop_oneof![fitted, adaptive]
}

/// Some numbers of order 1 that depend on all of the arguments.
fn values(len: usize, salt: usize) -> Vec<f64> {
    (0..len).map(|i| ((i * 7919 + salt * 104_729) % 2003) as f64 / 1000.0 - 1.0).collect()
}

/// Three steps of both, each followed by a comparison; after the second they exchange their states.
fn compare(cases: &[Case], method: &Method, options: &Options, losses: [f64; 3], scale: Option<f64>) {
    let store = store();
    let specs: Vec<TensorSpec> = (cases.iter().enumerate())
        .map(|(k, case)| TensorSpec::new(format!("layer.{k}"), &case.shape, case.dtype).in_group(case.group))
        .collect();
    // Each parameter, its whole memory and what lies before it there; and what the library's optimizer works
    // on.
    let mut memories = Vec::new();
    let mut expected = Vec::new();
    for (k, case) in cases.iter().enumerate() {
        let memory = Numbers::new(case.dtype, &values(case.offset + case.len(), k)).tensor();
        expected.push(Numbers::read(&memory.narrow(0, case.offset as i64, case.len() as i64)));
        let view = memory.as_strided(case.size(), case.stride(&case.order), case.offset as i64);
        let path = store.root().set_group(case.group) / "layer";
        // A variable of tch is not to be a view for autograd.
        let prefix = Numbers::read(&memory.narrow(0, 0, case.offset as i64));
        memories.push((path.add(&k.to_string(), view.detach(), true), memory, prefix));
    }
    let mut ours = Rfd::new(method.clone()).options(options.clone()).build(&store).unwrap();
    let mut theirs = optimizer::Optimizer::new(method.clone(), options.clone(), specs).unwrap();
    let grad_scale = scale.map(Tensor::from);
    for (step, loss) in losses.into_iter().enumerate() {
        ours.zero_grad().unwrap();
        let mut gradients = Vec::new();
        for (k, case) in cases.iter().enumerate() {
            let numbers = case.grad.map(|layout| {
                let mut values = values(case.len(), 17 + k + 31 * step);
                if matches!(layout, GradLayout::Expanded) {
                    let first = values[0];
                    values.fill(first);
                }
                let numbers = Numbers::new(case.grad_dtype, &values);
                plant_gradient(&memories[k].0, &case.gradient(layout, &numbers));
                numbers
            });
            gradients.push(numbers);
        }
        let mut params: Vec<ParamMut<'_>> = expected.iter_mut().map(Numbers::param).collect();
        let grads: Vec<GradRef<'_>> =
            gradients.iter().map(|g| g.as_ref().map_or(GradRef::Missing, Numbers::grad)).collect();
        let input = StepInput { grad_scale: scale.unwrap_or(1.0), ..StepInput::new(loss) };
        let report = theirs.step(&mut params, &grads, &input).unwrap();
        let loss = Tensor::from(loss);
        let input = StepTensors { grad_scale: grad_scale.as_ref(), ..StepTensors::new(&loss) };
        ours.step_with(&input).unwrap();
        assert_eq!(ours.report().unwrap(), Some(report));
        // A zero gradient alone is skipped.
        let moving = gradients.iter().flatten().any(|g| g.bits().iter().any(|&bits| bits != 0));
        assert_eq!(report.outcome == Outcome::Applied, moving);
        for ((case, (variable, memory, prefix)), expected) in cases.iter().zip(&memories).zip(&expected) {
            let own = memory.narrow(0, case.offset as i64, case.len() as i64);
            assert_eq!(Numbers::read(&own).bits(), expected.bits(), "{case:?} after step {step}");
            assert_eq!(variable.stride(), case.stride(&case.order));
            // What lies before it in its memory is not touched.
            let before = Numbers::read(&memory.narrow(0, 0, case.offset as i64));
            assert_eq!(before.bits(), prefix.bits());
        }
        if step == 1 {
            let (a, b) = (ours.state_to_bytes().unwrap(), theirs.state_to_bytes().unwrap());
            ours.load_state_from_bytes(&b).unwrap();
            theirs.load_state_from_bytes(&a).unwrap();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn steps_have_the_bits_of_the_library(
        (method, options) in method(),
        cases in prop::collection::vec(case(2), 1..6),
        losses in [1.0_f64..4.0, 1.0..4.0, 1.0..4.0],
        scale in prop::option::of(Just(1024.0)),
    ) {
        let groups = options.groups.len();
        let cases: Vec<Case> =
            cases.into_iter().map(|case| Case { group: case.group % groups, ..case }).collect();
        compare(&cases, &method, &options, losses, scale);
    }
}
