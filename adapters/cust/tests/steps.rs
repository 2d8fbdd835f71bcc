//! Steps on buffers of cust, bit for bit against the library's CPU optimizer, and what is refused. On a GPU
//! or on the fake driver of scripts/check-cust, whose GPU is the CPU.

mod support;

use cust::context::Context;
use cust::memory::{CopyDestination, DeviceBox, DeviceBuffer};
use cust::stream::{Stream, StreamFlags};
use proptest::prelude::*;
use rfdescent::optimizer::{self, Fitted, Group, Options, Outcome, SkipReason, StepInput, TensorSpec};
use rfdescent::{DType, GradRef, ParamMut};
use rfdescent_cust::{Element, Input, Optimizer, Tensor, stream};

use support::model;

/// A current context; or a message, where there is no device and none is required.
fn context() -> Option<Context> {
    match cust::quick_init() {
        Ok(context) => Some(context),
        Err(error) if std::env::var_os("RFDESCENT_REQUIRE_GPU").is_none() => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("RFDESCENT_REQUIRE_GPU is set, but {error}"),
    }
}

fn new_stream() -> Stream {
    Stream::new(StreamFlags::DEFAULT, None).unwrap()
}

fn optimizer(specs: &[TensorSpec]) -> Optimizer {
    Optimizer::new(model(), Options::default(), specs.to_vec()).unwrap()
}

/// Numbers of one format, on the host for the library and on the device for the adapter.
enum Pair {
    F32(Vec<f32>, DeviceBuffer<f32>),
    F64(Vec<f64>, DeviceBuffer<f64>),
    F16(Vec<half2::f16>, DeviceBuffer<half::f16>),
    BF16(Vec<half2::bf16>, DeviceBuffer<half::bf16>),
}

/// Runs `$body` with `$host` and `$device` bound to both sides, whatever the format.
macro_rules! each_format {
    ($pair:expr, $host:ident, $device:ident => $body:expr) => {
        match $pair {
            Pair::F32($host, $device) => $body,
            Pair::F64($host, $device) => $body,
            Pair::F16($host, $device) => $body,
            Pair::BF16($host, $device) => $body,
        }
    };
}

impl Pair {
    fn new(dtype: DType, values: &[f64]) -> Self {
        match dtype {
            DType::F32 => {
                let host: Vec<f32> = values.iter().map(|&x| x as f32).collect();
                let device = DeviceBuffer::from_slice(&host).unwrap();
                Pair::F32(host, device)
            }
            DType::F64 => Pair::F64(values.to_vec(), DeviceBuffer::from_slice(values).unwrap()),
            DType::F16 => {
                let host: Vec<_> = values.iter().map(|&x| half2::f16::from_f64(x)).collect();
                let old: Vec<_> = host.iter().map(|x| half::f16::from_bits(x.to_bits())).collect();
                Pair::F16(host, DeviceBuffer::from_slice(&old).unwrap())
            }
            DType::BF16 => {
                let host: Vec<_> = values.iter().map(|&x| half2::bf16::from_f64(x)).collect();
                let old: Vec<_> = host.iter().map(|x| half::bf16::from_bits(x.to_bits())).collect();
                Pair::BF16(host, DeviceBuffer::from_slice(&old).unwrap())
            }
        }
    }

    fn param(&mut self) -> ParamMut<'_> {
        each_format!(self, host, _device => (&mut host[..]).into())
    }

    fn grad(&self) -> GradRef<'_> {
        each_format!(self, host, _device => (&host[..]).into())
    }

    fn with_grad<'a>(&'a mut self, grad: &'a Self) -> Tensor<'a> {
        fn tensor<'a, P: Element>(param: &'a mut DeviceBuffer<P>, grad: &'a Pair) -> Tensor<'a> {
            each_format!(grad, _host, device => Tensor::new(param, device))
        }
        each_format!(self, _host, device => tensor(device, grad))
    }

    fn without_grad(&mut self) -> Tensor<'_> {
        each_format!(self, _host, device => Tensor::without_grad(device))
    }

    /// The bits on the host and on the device.
    fn bits(&self) -> [Vec<u64>; 2] {
        match self {
            Pair::F32(host, device) => [host.clone(), device.as_host_vec().unwrap()]
                .map(|v| v.iter().map(|x| x.to_bits().into()).collect()),
            Pair::F64(host, device) => {
                [host.clone(), device.as_host_vec().unwrap()].map(|v| v.iter().map(|x| x.to_bits()).collect())
            }
            Pair::F16(host, device) => [
                host.iter().map(|x| x.to_bits().into()).collect(),
                device.as_host_vec().unwrap().iter().map(|x| x.to_bits().into()).collect(),
            ],
            Pair::BF16(host, device) => [
                host.iter().map(|x| x.to_bits().into()).collect(),
                device.as_host_vec().unwrap().iter().map(|x| x.to_bits().into()).collect(),
            ],
        }
    }
}

#[derive(Clone, Debug)]
struct Case {
    len: usize,
    dtype: DType,
    grad_dtype: Option<DType>,
    group: usize,
}

fn dtype() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::F64), Just(DType::F16), Just(DType::BF16)]
}

fn case() -> impl Strategy<Value = Case> {
    // Around a chunk of the fixed order of summation, 4096 elements, too.
    let len = prop_oneof![4 => 0_usize..50, 1 => 4090_usize..4100];
    (len, dtype(), prop::option::weighted(0.8, dtype()), 0_usize..2)
        .prop_map(|(len, dtype, grad_dtype, group)| Case { len, dtype, grad_dtype, group })
}

fn options() -> impl Strategy<Value = Options> {
    let group = || {
        (0.5_f64..2.0, prop_oneof![Just(0.0), Just(1e-3)], any::<bool>()).prop_map(
            |(length_scale_factor, weight_decay, norm_lock)| Group {
                length_scale_factor,
                weight_decay,
                norm_lock,
                ..Group::default()
            },
        )
    };
    ([group(), group()], any::<bool>(), prop::option::of(any::<u64>()), prop::option::of(0.1_f64..1.0))
        .prop_map(|(groups, master_weights, stochastic_rounding, max_step_size)| Options {
            groups: groups.to_vec(),
            master_weights,
            stochastic_rounding,
            max_step_size,
            ..Options::default()
        })
}

/// Some numbers of order 1, never 0, that depend on all of the arguments.
fn values(len: usize, salt: usize) -> Vec<f64> {
    (0..len).map(|i| ((i * 7919 + salt * 104_729) % 2003) as f64 / 1000.0 - 1.0005).collect()
}

fn fitted() -> impl Strategy<Value = Fitted> {
    let momentum = || prop_oneof![Just(0.0), Just(0.9)];
    [momentum(), momentum()]
        .prop_map(|momentum| Fitted { momentum: momentum.to_vec(), ..Fitted::new(model()) })
}

fn compare(cases: &[Case], method: &Fitted, options: &Options, losses: [f32; 3]) {
    let stream = new_stream();
    let specs: Vec<TensorSpec> = (cases.iter().enumerate())
        .map(|(k, case)| TensorSpec::new(k.to_string(), &[case.len], case.dtype).in_group(case.group))
        .collect();
    let mut ours = Optimizer::new(method.clone(), options.clone(), specs.clone()).unwrap();
    let mut theirs = optimizer::Optimizer::new(method.clone(), options.clone(), specs).unwrap();
    let mut params: Vec<Pair> =
        cases.iter().enumerate().map(|(k, case)| Pair::new(case.dtype, &values(case.len, k))).collect();
    for (step, loss) in losses.into_iter().enumerate() {
        let grads: Vec<Option<Pair>> = (cases.iter().enumerate())
            .map(|(k, case)| {
                case.grad_dtype.map(|dtype| Pair::new(dtype, &values(case.len, 17 + k + 31 * step)))
            })
            .collect();
        let grad_refs: Vec<GradRef<'_>> =
            grads.iter().map(|g| g.as_ref().map_or(GradRef::Missing, Pair::grad)).collect();
        let mut hosts: Vec<ParamMut<'_>> = params.iter_mut().map(Pair::param).collect();
        let report = theirs.step(&mut hosts, &grad_refs, &StepInput::new(loss.into())).unwrap();
        let tensors: Vec<Tensor<'_>> = (params.iter_mut().zip(&grads))
            .map(|(param, grad)| match grad {
                Some(grad) => param.with_grad(grad),
                None => param.without_grad(),
            })
            .collect();
        let loss = DeviceBox::new(&loss).unwrap();
        // SAFETY: this thread alone uses the buffers, which are of the current context.
        let ours = unsafe { ours.step_and_wait(&tensors, &Input::new(&loss), &stream) }.unwrap();
        assert_eq!(ours, report);
        let moving = cases.iter().any(|case| case.len > 0 && case.grad_dtype.is_some());
        assert_eq!(report.outcome == Outcome::Applied, moving);
        for (case, param) in cases.iter().zip(&params) {
            let [host, device] = param.bits();
            assert_eq!(host, device, "{case:?} after step {step}");
        }
    }
    // The states are the same too: the library goes on with the device's.
    let bytes = ours.inner().state_to_bytes(rfdescent_cust::stream(&stream)).unwrap();
    theirs.load_state_from_bytes(&bytes).unwrap();
    assert_eq!(theirs.applied_steps(), ours.inner().report().unwrap().unwrap().applied_steps);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn steps_have_the_bits_of_the_cpu(
        method in fitted(),
        options in options(),
        cases in prop::collection::vec(case(), 1..6),
        losses in [1.0_f32..4.0, 1.0..4.0, 1.0..4.0],
    ) {
        if let Some(_context) = context() {
            compare(&cases, &method, &options, losses);
        }
    }
}

#[test]
fn scalars_may_lie_on_the_device() {
    let Some(_context) = context() else { return };
    let stream = new_stream();
    let specs = [TensorSpec::new("w", &[2], DType::F32)];
    let run = |input: &Input<'_>| {
        let mut weight = DeviceBuffer::from_slice(&[1.0_f32, 2.0]).unwrap();
        let gradient = DeviceBuffer::from_slice(&[4.0_f32, 8.0]).unwrap();
        let tensors = [Tensor::new(&mut weight, &gradient)];
        // SAFETY: this thread alone uses the buffers, which are of the current context.
        let report = unsafe { optimizer(&specs).step_and_wait(&tensors, input, &stream) }.unwrap();
        (report, weight.as_host_vec().unwrap())
    };
    let host = run(&Input::new(2.25));
    let (single, double) = (DeviceBox::new(&2.25_f32).unwrap(), DeviceBox::new(&2.25_f64).unwrap());
    let half = DeviceBox::new(&half::bf16::from_f32(2.25)).unwrap();
    for input in [Input::new(&single), Input::new(&double), Input::new(&half)] {
        assert_eq!(run(&input), host);
    }
    let scale = DeviceBox::new(&4.0_f32).unwrap();
    let scaled = run(&Input { grad_scale: Some(&scale), ..Input::new(2.25) }).0;
    assert_eq!(scaled.grad_norm, host.0.grad_norm / 4.0);
    let (report, weight) = run(&Input { found_inf: Some(&scale), ..Input::new(2.25) });
    assert_eq!((report.outcome, weight), (Outcome::Skipped(SkipReason::FoundInf), vec![1.0, 2.0]));
}

#[test]
fn settings_take_the_stream() {
    let Some(_context) = context() else { return };
    let own = new_stream();
    let specs = [TensorSpec::new("w", &[1], DType::F32)];
    let mut optimizer = optimizer(&specs);
    let mut weight = DeviceBuffer::from_slice(&[1.0_f32]).unwrap();
    let gradient = DeviceBuffer::from_slice(&[1.0_f32]).unwrap();
    let tensors = [Tensor::new(&mut weight, &gradient)];
    let step = |optimizer: &mut Optimizer| {
        // SAFETY: this thread alone uses the buffers, which are of the current context.
        unsafe { optimizer.step_and_wait(&tensors, &Input::new(2.0), &own) }.unwrap().step_size
    };
    let full = step(&mut optimizer);
    optimizer.inner_mut().set_multiplier(0.5, stream(&own)).unwrap();
    assert_eq!(step(&mut optimizer), 0.5 * full);
    // The context of cust is current as before.
    DeviceBuffer::from_slice(&[1_u8]).unwrap();
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let Some(_context) = context() else { return };
    let stream = new_stream();
    let specs = [TensorSpec::new("a", &[2], DType::F32), TensorSpec::new("b", &[0, 3], DType::F32)];
    let mut a = DeviceBuffer::from_slice(&[1.0_f32, 2.0]).unwrap();
    let mut other = DeviceBuffer::from_slice(&[1.0_f64, 2.0]).unwrap();
    let (mut empty, mut short) =
        (DeviceBuffer::<f32>::from_slice(&[]).unwrap(), DeviceBuffer::from_slice(&[1.0_f32]).unwrap());
    let gradient = DeviceBuffer::from_slice(&[1.0_f32, 1.0]).unwrap();
    let refused = |tensors: &[Tensor<'_>]| {
        // SAFETY: nothing is queued for what is refused.
        unsafe { optimizer(&specs).step(tensors, &Input::new(2.0), &stream) }.unwrap_err().to_string()
    };
    let message = refused(&[Tensor::new(&mut other, &gradient), Tensor::without_grad(&mut empty)]);
    assert!(message.contains("`a`") && message.contains("f32 but is f64"), "{message}");
    let message = refused(&[Tensor::new(&mut short, &gradient), Tensor::without_grad(&mut empty)]);
    assert!(message.contains("`a`") && message.contains("2 elements but has 1"), "{message}");
    let message = refused(&[Tensor::new(&mut a, &short), Tensor::without_grad(&mut empty)]);
    assert!(message.contains("`a`") && message.contains("its gradient has 1"), "{message}");
    let message = refused(&[Tensor::new(&mut a, &gradient), Tensor::new(&mut short, &gradient)]);
    assert!(message.contains("`b`") && message.contains("0 elements but has 1"), "{message}");
    let message = refused(&[Tensor::new(&mut a, &gradient)]);
    assert!(message.contains("number of tensors = 1"), "{message}");
    assert_eq!(a.as_host_vec().unwrap(), [1.0, 2.0]);
    // A part of a buffer is a tensor too, and an empty one may have a gradient.
    let mut weights = DeviceBuffer::from_slice(&[7.0_f32, 1.0, 2.0, 7.0]).unwrap();
    let mut part = weights.index(1..3);
    let nothing = DeviceBuffer::<f32>::from_slice(&[]).unwrap();
    let tensors = [Tensor::new(&mut part, &gradient), Tensor::new(&mut empty, &nothing)];
    // SAFETY: this thread alone uses the buffers, which are of the current context.
    let report = unsafe { optimizer(&specs).step_and_wait(&tensors, &Input::new(2.0), &stream) }.unwrap();
    assert_eq!(report.outcome, Outcome::Applied);
    let mut after = [0.0_f32; 4];
    weights.copy_to(&mut after).unwrap();
    assert!(after[0] == 7.0 && after[1] < 1.0 && after[2] < 2.0 && after[3] == 7.0, "{after:?}");
    weights.copy_from(&[0.0; 4]).unwrap();
}

#[test]
fn contexts_that_the_library_does_not_use_are_refused() {
    let message = || rfdescent_cust::device().unwrap_err().to_string();
    // A thread has no current context at first.
    assert!(message().contains("no CUDA context is current"), "{}", message());
    let Some(context) = context() else { return };
    rfdescent_cust::device().unwrap();
    let device = cust::device::Device::get_device(0).unwrap();
    let own = cust::context::legacy::Context::create_and_push(
        cust::context::legacy::ContextFlags::SCHED_AUTO,
        device,
    )
    .unwrap();
    assert!(message().contains("not the device's primary one"), "{}", message());
    drop(own);
    cust::context::CurrentContext::set_current(&context).unwrap();
    rfdescent_cust::device().unwrap();
}
