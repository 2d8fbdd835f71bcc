//! What the optimizer does beside the arithmetic: gradients, groups, settings, states, refusals.

mod support;

use rfdescent::DType;
use rfdescent::optimizer::{self, Group, Limit, Options, Outcome, SkipReason, StepInput, TensorSpec};
use rfdescent::{GradRef, ParamMut};
use rfdescent_tch::{Adaptive, Fitted, Optimizer, Rfd, StepTensors};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use support::{floats, loss, model, plant_gradient, store, variable};

fn moving() -> Fitted {
    Fitted::new(model()).with_momentum(0.5)
}

fn decay() -> Options {
    let group = Group { weight_decay: 0.1, ..Group::default() };
    Options { groups: vec![group], ..Options::default() }
}

#[test]
fn backward_step_is_the_librarys_step_with_the_networks_gradients() {
    let store = store();
    tch::manual_seed(1);
    let net = nn::seq()
        .add(nn::linear(store.root() / "a", 5, 7, Default::default()))
        .add_fn(Tensor::relu)
        .add(nn::linear(store.root() / "b", 7, 3, Default::default()));
    let mut ours = Rfd::new(moving()).options(decay()).build(&store).unwrap();
    let shapes: [(&str, &[usize]); 4] =
        [("a.weight", &[7, 5]), ("a.bias", &[7]), ("b.weight", &[3, 7]), ("b.bias", &[3])];
    // tch's linear layers make the bias first.
    let order = [1, 0, 3, 2];
    let specs = order.map(|k| TensorSpec::new(shapes[k].0, shapes[k].1, DType::F32)).to_vec();
    let mut theirs = optimizer::Optimizer::new(moving(), decay(), specs.clone()).unwrap();
    let variables = ours.trainable_variables();
    let inputs = Tensor::randn([16, 5], (Kind::Float, Device::Cpu));
    let targets = Tensor::from_slice(&[0_i64, 1, 2, 1].repeat(4));
    for _ in 0..5 {
        let mut expected: Vec<Vec<f32>> = variables.iter().map(floats).collect();
        let loss = net.forward(&inputs).cross_entropy_for_logits(&targets);
        ours.backward_step(&loss).unwrap();
        let gradients: Vec<Vec<f32>> = variables.iter().map(|v| floats(&v.grad())).collect();
        let mut params: Vec<ParamMut<'_>> = expected.iter_mut().map(|v| (&mut v[..]).into()).collect();
        let grads: Vec<GradRef<'_>> = gradients.iter().map(|g| (&g[..]).into()).collect();
        let report = theirs.step(&mut params, &grads, &StepInput::new(loss.double_value(&[]))).unwrap();
        assert_eq!(ours.report().unwrap(), Some(report));
        assert_eq!(report.outcome, Outcome::Applied);
        assert_eq!(variables.iter().map(floats).collect::<Vec<_>>(), expected);
    }
    assert_eq!(ours.wait_report().unwrap().unwrap().applied_steps, 5);
    // The library loads the state: names, shapes and order are those above.
    let mut fresh = optimizer::Optimizer::new(moving(), decay(), specs).unwrap();
    fresh.load_state_from_bytes(&ours.state_to_bytes().unwrap()).unwrap();
    assert_eq!(fresh.applied_steps(), 5);
}

#[test]
fn a_variable_without_gradient_is_left_alone() {
    let store = store();
    let (a, b) = (variable(&store, "a", &[1.0, 2.0]), variable(&store, "b", &[3.0]));
    let mut optimizer = Rfd::new(moving()).options(decay()).build(&store).unwrap();
    // Both have a part in the first loss, one in the second; decay and momentum would move the other.
    optimizer.backward_step(&(&a * &b).sum(Kind::Float)).unwrap();
    assert!(floats(&a)[0] != 1.0 && floats(&b)[0] != 3.0);
    let before = floats(&b);
    optimizer.backward_step(&a.square().sum(Kind::Float)).unwrap();
    assert!(!b.grad().defined());
    assert_eq!(floats(&b), before);
    assert_eq!(optimizer.report().unwrap().unwrap().applied_steps, 2);
}

#[test]
fn gradients_accumulate_until_they_are_unset() {
    let store = store();
    let a = variable(&store, "a", &[1.0, 2.0]);
    let mut optimizer = Rfd::new(model()).build(&store).unwrap();
    for _ in 0..2 {
        (&a * 0.5).sum(Kind::Float).backward();
    }
    optimizer.step(&loss(2.0)).unwrap();
    assert_eq!(optimizer.report().unwrap().unwrap().grad_norm, 2.0_f64.sqrt());
    optimizer.zero_grad().unwrap();
    assert!(!a.grad().defined());
}

#[test]
fn steps_that_can_not_be_taken_change_nothing_and_say_why() {
    let store = store();
    let a = variable(&store, "a", &[1.0, 2.0]);
    let mut optimizer = Rfd::new(moving()).options(decay()).build(&store).unwrap();
    assert_eq!(optimizer.report().unwrap(), None);
    let mut skipped = |gradient: f32, input: &StepTensors<'_>| {
        plant_gradient(&a, &Tensor::from_slice(&[gradient, 1.0]));
        optimizer.step_with(input).unwrap();
        let report = optimizer.report().unwrap().unwrap();
        assert_eq!((floats(&a), report.applied_steps), (vec![1.0, 2.0], 0));
        report.outcome
    };
    let (one, two, nan) = (loss(1.0), loss(2.0), loss(f64::NAN));
    let finite = StepTensors::new(&one);
    assert_eq!(skipped(f32::NAN, &finite), Outcome::Skipped(SkipReason::NonFiniteGradient));
    assert_eq!(skipped(1.0, &StepTensors::new(&nan)), Outcome::Skipped(SkipReason::NonFiniteLoss));
    let found = StepTensors { found_inf: Some(&two), ..finite };
    assert_eq!(skipped(1.0, &found), Outcome::Skipped(SkipReason::FoundInf));
}

#[test]
fn groups_come_from_the_store_and_from_names() {
    let store = store();
    let root = store.root();
    let _ = root.set_group(1).add("a", Tensor::from_slice(&[1.0_f32]), true);
    for path in ["head", "header"] {
        let _ = (root.set_group(1) / path).add("weight", Tensor::from_slice(&[1.0_f32]), true);
    }
    let _ = (&root / "head" / "deep").add("bias", Tensor::from_slice(&[1.0_f32]), true);
    let _ = root.add("b", Tensor::from_slice(&[1.0_f32]), true);
    let group = |multiplier| Group { multiplier, ..Group::default() };
    let options = Options { groups: vec![group(1.0), group(2.0)], ..Options::default() };
    let mut optimizer = Rfd::new(model())
        .options(options)
        .group("head", group(3.0))
        .group("head.deep.bias", group(0.0))
        .build(&store)
        .unwrap();
    assert_eq!(optimizer.options().groups, [1.0, 2.0, 3.0, 0.0].map(group));
    let variables = optimizer.trainable_variables();
    let sum: Tensor = variables.iter().map(|v| v.sum(Kind::Float)).sum();
    optimizer.zero_grad().unwrap();
    sum.backward();
    optimizer.step(&loss(2.0)).unwrap();
    // All gradients are 1: each moves by its group's multiplier times the learning rate.
    let rate = optimizer.report().unwrap().unwrap().learning_rate;
    let moved: Vec<f32> = variables.iter().map(|v| floats(v)[0]).collect();
    // In f64 and rounded once, as the step does.
    let expected = [2.0, 3.0, 2.0, 0.0, 1.0].map(|m: f64| (1.0 - m * rate) as f32);
    // The rate itself may be rounded to f32 before: one unit in the last place of 1.
    for (moved, expected) in moved.into_iter().zip(expected) {
        assert!((moved - expected).abs() <= f32::EPSILON * rate as f32 * 3.0, "{moved} {expected}");
    }
}

#[test]
fn settings_reach_the_step() {
    let run = |change: &dyn Fn(&mut Optimizer)| {
        let store = store();
        let a = variable(&store, "a", &[1.0, 2.0]);
        let mut optimizer = Rfd::new(model()).build(&store).unwrap();
        change(&mut optimizer);
        for _ in 0..2 {
            optimizer.zero_grad().unwrap();
            a.sum(Kind::Float).backward();
            optimizer.step(&loss(2.0)).unwrap();
        }
        (floats(&a), optimizer.report().unwrap().unwrap().step_size)
    };
    let (plain, step_size) = run(&|_| {});
    assert_eq!(run(&|o| o.set_lr(0.5).unwrap()).1, 0.5 * step_size);
    for change in [
        &(|o: &mut Optimizer| o.set_lr_group(0, 0.5).unwrap()) as &dyn Fn(&mut Optimizer),
        &|o| o.set_momentum(0.9).unwrap(),
        &|o| o.set_weight_decay(0.1).unwrap(),
        &|o| o.set_method(Fitted { inv_batch_size: 1.0 / 32.0, ..Fitted::new(model()) }).unwrap(),
        &|o| o.set_group(0, Group { norm_lock: true, ..Group::default() }).unwrap(),
    ] {
        assert_ne!(run(change).0, plain);
    }
    assert_eq!(run(&|o| o.set_momentum_group(0, 0.9).unwrap()).0, run(&|o| o.set_momentum(0.9).unwrap()).0);
    assert_eq!(
        run(&|o| o.set_weight_decay_group(0, 0.1).unwrap()).0,
        run(&|o| o.set_weight_decay(0.1).unwrap()).0
    );
    run(&|o| {
        for refused in [o.set_lr(-1.0), o.set_momentum(1.0), o.set_weight_decay_group(1, 0.0)] {
            refused.unwrap_err();
        }
        for refused in [o.set_lr_group(7, 1.0), o.set_momentum_group(7, 0.5)] {
            assert!(refused.unwrap_err().to_string().contains("there are 1 groups"));
        }
    });
}

#[test]
fn momentum_goes_by_group() {
    let run = |build: &dyn Fn(&nn::VarStore) -> Optimizer| {
        let store = store();
        let (a, b) = (variable(&store, "a", &[1.0]), variable(&store, "b", &[1.0]));
        let mut optimizer = build(&store);
        for _ in 0..2 {
            optimizer.zero_grad().unwrap();
            (&a + &b).sum(Kind::Float).backward();
            optimizer.step(&loss(2.0)).unwrap();
        }
        (floats(&a), floats(&b))
    };
    // Group 0 is that of the options, which `a` is in; `b` has one by its name.
    let rfd = |momentum: &[f64]| {
        let method = Fitted { momentum: momentum.to_vec(), ..Fitted::new(model()) };
        Rfd::new(method).group("b", Group::default())
    };
    let from_the_start = run(&|store| rfd(&[0.0, 0.5]).build(store).unwrap());
    assert_ne!(from_the_start.0, from_the_start.1);
    let set = run(&|store| {
        let mut optimizer = rfd(&[]).build(store).unwrap();
        optimizer.set_momentum_group(1, 0.5).unwrap();
        optimizer
    });
    assert_eq!(set, from_the_start);
    let shared = run(&|store| rfd(&[0.5]).build(store).unwrap());
    assert_eq!((&shared.0, &shared.0), (&shared.1, &from_the_start.1));
    let message = rfd(&[0.0, 0.5, 0.5]).build(&{
        let store = store();
        let _ = variable(&store, "b", &[1.0]);
        store
    });
    let message = message.unwrap_err().to_string();
    assert!(message.contains("length of momentum = 3") && message.contains("2 groups"), "{message}");
}

#[test]
fn a_saved_state_goes_on_as_if_there_had_been_no_break() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    let steps = |optimizer: &mut Optimizer, a: &Tensor, count: usize| {
        for k in 0..count {
            plant_gradient(a, &Tensor::from_slice(&[k as f32 - 0.5, 1.0]));
            optimizer.step(&loss(2.0)).unwrap();
        }
    };
    let first = store();
    let a = variable(&first, "a", &[1.0, 2.0]);
    let mut optimizer = Rfd::new(moving()).options(decay()).build(&first).unwrap();
    steps(&mut optimizer, &a, 2);
    optimizer.save_state(&path).unwrap();
    let second = store();
    let b = variable(&second, "a", &floats(&a));
    let mut resumed = Rfd::new(moving()).options(decay()).build(&second).unwrap();
    resumed.load_state(&path).unwrap();
    steps(&mut optimizer, &a, 3);
    steps(&mut resumed, &b, 3);
    assert_eq!(floats(&a), floats(&b));
    assert_eq!(optimizer.report().unwrap(), resumed.report().unwrap());

    let other = store();
    let _ = variable(&other, "other", &[1.0, 2.0]);
    let mut wrong = Rfd::new(moving()).options(decay()).build(&other).unwrap();
    let message = wrong.load_state(&path).unwrap_err().to_string();
    assert!(message.contains("`a`") && message.contains("`other`"), "{message}");
    assert!(wrong.load_state(folder.path().join("none")).unwrap_err().to_string().contains("none"));
}

/// The message of building an optimizer for one variable.
fn refusal(tensor: Tensor) -> String {
    let store = store();
    let _ = (store.root() / "layer").add("w", tensor, true);
    Rfd::new(model()).build(&store).unwrap_err().to_string()
}

#[test]
fn variables_that_steps_can_not_change_are_refused_by_name() {
    let grid = || Tensor::ones([4, 6], (Kind::Float, Device::Cpu));
    let sparse = |to: fn(&Tensor) -> Tensor| to(&grid()).detach();
    for (tensor, word) in [
        (grid().select(1, 0), "contiguous"),
        (grid().narrow(1, 0, 3), "contiguous"),
        (Tensor::ones([1], (Kind::Float, Device::Cpu)).expand([4], false), "contiguous"),
        (grid().to_kind(Kind::ComplexFloat), "ComplexFloat"),
        (sparse(|t| t.to_sparse(None, None::<i64>, None)), "sparse"),
        (sparse(|t| t.to_sparse_csr(None)), "sparse"),
        (sparse(|t| t.to_mkldnn()), "oneDNN"),
        (grid().set_requires_grad(true) * 2.0, "computed from other"),
    ] {
        let message = refusal(tensor);
        assert!(message.contains("`layer.w`") && message.contains(word), "{message}");
    }
    // An address that is no multiple of the size.
    let bytes = [0_u8; 17];
    let odd = bytes.as_ptr().addr().wrapping_neg() % 4 + 1;
    // SAFETY: the bytes outlive the tensor, and hold two elements from there on.
    let tensor = unsafe { Tensor::from_blob(bytes[odd..].as_ptr(), &[2], &[1], Kind::Float, Device::Cpu) };
    let message = refusal(tensor);
    assert!(message.contains("`layer.w`") && message.contains("aligned"), "{message}");
}

#[test]
fn stores_that_do_not_fit_are_refused() {
    let message = |store: &nn::VarStore, rfd: Rfd| rfd.build(store).unwrap_err().to_string();
    let empty = store();
    let _ = empty.root().add("mean", Tensor::from_slice(&[1.0_f32]), false);
    assert!(message(&empty, Rfd::new(model())).contains("no trainable variables"));

    let tied = store();
    let a = variable(&tied, "a", &[1.0, 2.0]);
    let _ = tied.root().add("b", a.shallow_clone(), true);
    assert!(message(&tied, Rfd::new(model())).contains("`a`: is added twice"));

    let overlapping = store();
    let memory = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0]);
    let _ = overlapping.root().add("a", memory.narrow(0, 0, 3).detach(), true);
    let _ = overlapping.root().add("b", memory.narrow(0, 2, 2).detach(), true);
    let text = message(&overlapping, Rfd::new(model()));
    assert!(text.contains("`b`: its parameter shares memory with the parameter of `a`"), "{text}");

    let store = store();
    let path = store.root().set_group(3) / "layer";
    let _ = path.add("w", Tensor::from_slice(&[1.0_f32]), true);
    let text = message(&store, Rfd::new(model()));
    assert!(text.contains("`layer.w`") && text.contains("group 3"), "{text}");
    let text =
        message(&store, Rfd::new(model()).group("laye", Group::default()).group("layer", Group::default()));
    assert!(text.contains("group = laye") && text.contains("takes no trainable variable"), "{text}");
    let negative = Group { weight_decay: -1.0, ..Group::default() };
    let text = message(&store, Rfd::new(model()).group("layer", negative));
    assert!(text.contains("groups[1].weight_decay"), "{text}");
}

#[test]
fn gradients_that_do_not_fit_are_refused_by_name() {
    let store = store();
    let config = nn::EmbeddingConfig { sparse: true, ..Default::default() };
    let embedding = nn::embedding(store.root() / "words", 5, 3, config);
    let mut optimizer = Rfd::new(model()).build(&store).unwrap();
    let before = floats(&embedding.ws);
    let sum = embedding.forward(&Tensor::from_slice(&[1_i64, 2])).sum(Kind::Float);
    let message = optimizer.backward_step(&sum).unwrap_err().to_string();
    assert!(message.contains("`words.weight`") && message.contains("sparse: false"), "{message}");

    optimizer.zero_grad().unwrap();
    // The gradient's memory is the parameter's own.
    plant_gradient(&embedding.ws, &embedding.ws.detach());
    let message = optimizer.step(&loss(1.0)).unwrap_err().to_string();
    assert!(message.contains("its gradient shares memory with the parameter of `words.weight`"), "{message}");
    optimizer.zero_grad().unwrap();
    plant_gradient(&embedding.ws, &Tensor::ones([2, 3], (Kind::Float, Device::Cpu)));
    let message = optimizer.step(&loss(1.0)).unwrap_err().to_string();
    assert!(message.contains("`words.weight`") && message.contains("[2, 3]"), "{message}");
    assert_eq!(floats(&embedding.ws), before);
    assert_eq!(optimizer.report().unwrap(), None);
}

#[test]
fn changes_of_the_store_are_noticed() {
    let mut store = store();
    let a = variable(&store, "a", &[1.0, 2.0]);
    let mut optimizer = Rfd::new(model()).build(&store).unwrap();
    plant_gradient(&a, &Tensor::from_slice(&[1.0_f32, 1.0]));
    store.double();
    let message = optimizer.step(&loss(2.0)).unwrap_err().to_string();
    assert!(message.contains("`a`") && message.contains("f32") && message.contains("Double"), "{message}");
    store.float();
    optimizer.step(&loss(2.0)).unwrap();
    let _ = variable(&store, "b", &[1.0]);
    let message = optimizer.step(&loss(2.0)).unwrap_err().to_string();
    assert!(message.contains("made for 1"), "{message}");
    assert!(optimizer.zero_grad().is_err() && optimizer.backward_step(&loss(2.0)).is_err());
}

#[test]
fn losses_that_are_none_are_refused() {
    let store = store();
    let a = variable(&store, "a", &[1.0, 2.0]);
    let mut optimizer = Rfd::new(model()).build(&store).unwrap();
    for (wrong, word) in [
        (Tensor::from_slice(&[1.0_f32, 2.0]), "[2] Float"),
        (Tensor::from(1_i64), "Int64"),
        (Tensor::new(), "undefined"),
        (Tensor::from(1.0).to_sparse(None, None::<i64>, None), "dense"),
    ] {
        a.square().sum(Kind::Float).backward();
        let message = optimizer.step(&wrong).unwrap_err().to_string();
        assert!(message.contains("loss") && message.contains(word), "{message}");
    }
    // No graph to go backward through: libtorch's own words, on one line.
    let message = optimizer.backward_step(&loss(1.0)).unwrap_err().to_string();
    assert!(message.starts_with("libtorch: ") && message.lines().count() == 1, "{message}");
    assert_eq!(floats(&a), [1.0, 2.0]);
    // One element in any shape and format is a loss.
    a.square().sum(Kind::Float).backward();
    optimizer.step(&Tensor::from_slice(&[2.0_f32]).to_kind(Kind::BFloat16).view([1, 1])).unwrap();
    assert_eq!(optimizer.report().unwrap().unwrap().loss, 2.0);
}

#[test]
fn empty_and_channels_last_variables_train() {
    let store = store();
    let empty = store.root().add("empty", Tensor::zeros([0, 3], (Kind::Float, Device::Cpu)), true);
    let also_empty = store.root().add("also_empty", Tensor::zeros([0, 3], (Kind::Float, Device::Cpu)), true);
    let weights = Tensor::randn([4, 3, 3, 3], (Kind::Float, Device::Cpu));
    // Channels last.
    let last = Tensor::empty_strided([4, 3, 3, 3], [27, 1, 9, 3], (Kind::Float, Device::Cpu));
    let mut last = store.root().add("conv", last, true);
    tch::no_grad(|| last.copy_(&weights));
    let mut optimizer = Rfd::new(model()).build(&store).unwrap();
    let images = Tensor::randn([2, 3, 8, 8], (Kind::Float, Device::Cpu));
    let convolved = images.conv2d(&last, None::<Tensor>, [1, 1], [0, 0], [1, 1], 1);
    let sum = convolved.square().mean(Kind::Float) + empty.sum(Kind::Float) + also_empty.sum(Kind::Float);
    optimizer.backward_step(&sum).unwrap();
    let report = optimizer.report().unwrap().unwrap();
    assert_eq!(report.outcome, Outcome::Applied);
    let rate = report.learning_rate;
    let expected = weights.to_kind(Kind::Double) - last.grad().to_kind(Kind::Double) * rate;
    let off = (last.detach().to_kind(Kind::Double) - &expected).abs().max().double_value(&[]);
    // The learning rate and the result are rounded to f32 once each, the product perhaps too.
    let bound = 2.0 * f64::from(f32::EPSILON) * expected.abs().max().double_value(&[]).max(1.0);
    assert!(off <= bound, "{off} > {bound}");
}

#[test]
fn the_adaptive_method_needs_no_model_and_takes_no_momentum() {
    let store = store();
    let a = variable(&store, "a", &[1.0, 2.0]);
    let adaptive = Adaptive { averaging: 0.8, ..Adaptive::default() };
    let mut optimizer = Rfd::new(adaptive).build(&store).unwrap();
    assert!(optimizer.model().is_none());
    optimizer.backward_step(&a.square().sum(Kind::Float)).unwrap();
    assert!(floats(&a)[0] < 1.0);
    optimizer.set_weight_decay(0.1).unwrap();
    for refused in [optimizer.set_momentum(0.5), optimizer.set_momentum_group(0, 0.5)] {
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("momentum = 0.5") && text.contains("`Adaptive::averaging`"), "{text}");
    }
    let text = optimizer.set_method(model()).unwrap_err().to_string();
    assert!(text.contains("method = fitted") && text.contains("adaptive"), "{text}");
    // Losses may be negative, unless a bound is given.
    optimizer.step(&loss(-0.5)).unwrap();
    let report = optimizer.report().unwrap().unwrap();
    assert_eq!((report.outcome, report.trust, report.limit), (Outcome::Applied, 1.0, Limit::Rate));
    let bounded = Adaptive { loss_bound: Some(0.0), ..adaptive };
    let mut optimizer = Rfd::new(bounded).build(&store).unwrap();
    a.square().sum(Kind::Float).backward();
    optimizer.step(&loss(-0.5)).unwrap();
    let outcome = optimizer.report().unwrap().unwrap().outcome;
    assert_eq!(outcome, Outcome::Skipped(SkipReason::LossBelowBound));
}
