//! The optimizer as a user of candle meets it: errors that name the tensor, variables left alone, schedulers,
//! states.

mod common;

use candle_core::{DType, Device, Storage, Tensor, Var};
use candle_nn::{Init, Optimizer, VarBuilder, VarMap};
use common::library::{model, moving};
use common::{scalar, store};
use rfdescent_candle::rfdescent::covariance::{Family, Observation, StepRule};
use rfdescent_candle::rfdescent::optimizer::{Group, Limit, Method, Options, Outcome, SkipReason};
use rfdescent_candle::{Adaptive, Config, Fitted, Parameter, Rfd, parameters};

fn config() -> Config {
    Config::new(model(Family::SquaredExponential))
}

fn var(values: &[f32]) -> Var {
    Var::new(values, &Device::Cpu).unwrap()
}

fn values(var: &Var) -> Vec<f32> {
    var.to_vec1().unwrap()
}

fn ones(var: &Var) -> Tensor {
    var.ones_like().unwrap()
}

/// The text of an error, which must say all of `parts`.
fn refused<T>(result: candle_core::Result<T>, parts: &[&str]) {
    let text = result.err().expect("an error").to_string();
    parts.iter().for_each(|part| assert!(text.contains(part), "`{text}` should say `{part}`"));
}

#[test]
fn a_step_without_loss_is_an_error_that_says_what_to_call() {
    let weight = var(&[1.0, 2.0]);
    let mut rfd = Rfd::new(vec![weight.clone()], config()).unwrap();
    let grads = store([(&weight, ones(&weight))]);
    refused(rfd.step(&grads), &["backward_step(&loss)", "step_with_loss(&grads, &loss)"]);
    assert_eq!(values(&weight), [1.0, 2.0]);
    assert!(rfd.report().unwrap().is_none());
}

#[test]
fn the_update_is_in_place() {
    let weight = var(&[1.0, 2.0, 3.0]);
    let place = || match &*weight.storage_and_layout().0 {
        Storage::Cpu(storage) => storage.as_slice::<f32>().unwrap().as_ptr(),
        _ => unreachable!(),
    };
    let before = place();
    let view = weight.narrow(0, 1, 2).unwrap();
    let mut rfd = Rfd::new(vec![weight.clone()], config()).unwrap();
    rfd.step_with_loss(&store([(&weight, ones(&weight))]), &scalar(2.0)).unwrap();
    assert_eq!(place(), before);
    // Views made before, as layers hold them, see the new values.
    assert_eq!(view.to_vec1::<f32>().unwrap(), values(&weight)[1..]);
    assert!(values(&weight)[0] < 1.0);
}

#[test]
fn variables_without_gradient_are_left_alone_and_count_in_no_norm() {
    let (used, unused) = (var(&[1.0, 2.0]), var(&[5.0]));
    let group = Group { weight_decay: 0.1, ..Group::default() };
    let options = Options { groups: vec![group], ..Options::default() };
    let config = Config { options, ..Config::new(moving(0.9)) };
    let mut rfd = Rfd::new(vec![used.clone(), unused.clone()], config).unwrap();
    rfd.step_with_loss(&store([(&used, ones(&used))]), &scalar(2.0)).unwrap();
    assert_eq!(values(&unused), [5.0]);
    assert_ne!(values(&used), [1.0, 2.0]);
    // √(1 + 1), exact to the rounding of the root.
    assert_eq!(rfd.report().unwrap().unwrap().grad_norm, 2_f64.sqrt());
}

#[test]
fn integers_are_left_out_and_other_floats_refused() {
    let counts = Var::new(&[1_u32, 2], &Device::Cpu).unwrap();
    let rfd = Rfd::new(vec![counts, var(&[1.0])], config()).unwrap();
    let names: Vec<&str> = rfd.parameters().iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["var 1"]);
    let eight = Var::from_tensor(&var(&[1.0]).to_dtype(DType::F8E4M3).unwrap()).unwrap();
    refused(Rfd::new(vec![var(&[1.0]), eight], config()), &["`var 1`", "f8e4m3", "bf16"]);
}

#[test]
fn a_variable_twice_and_a_missing_group_are_named() {
    let weight = var(&[1.0]);
    refused(
        Rfd::new(vec![weight.clone(), var(&[2.0]), weight.clone()], config()),
        &["`var 2`", "`var 0`", "shares its memory"],
    );
    let twice = vec![Parameter::new("w", weight.clone()), Parameter::new("w", var(&[2.0]))];
    refused(Rfd::for_parameters(twice, config()), &["`w`", "twice"]);
    let elsewhere = vec![Parameter::new("w", weight).in_group(3)];
    refused(Rfd::for_parameters(elsewhere, config()), &["`w`", "group 3", "1 groups"]);
}

#[test]
fn gradients_and_losses_that_do_not_fit_are_named_and_change_nothing() {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    vb.pp("layer").get_with_hints((2, 3), "weight", Init::Const(0.5)).unwrap();
    let mut rfd = Rfd::for_varmap(&map, config()).unwrap();
    let weight = rfd.parameters()[0].var.clone();
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let loss = scalar(2.0);
    let with = |gradient: Tensor| store([(&weight, gradient)]);

    let turned = with(zeros(&[3, 2], DType::F32));
    refused(rfd.step_with_loss(&turned, &loss), &["`layer.weight`", "[2, 3]", "[3, 2]"]);
    let integers = with(zeros(&[2, 3], DType::U32));
    refused(rfd.step_with_loss(&integers, &loss), &["`layer.weight`", "u32", "bf16"]);
    let good = with(zeros(&[2, 3], DType::F32).affine(0.0, 1.0).unwrap());
    refused(rfd.step_with_loss(&good, &zeros(&[4], DType::F32)), &["loss", "[4]", "mean_all"]);
    refused(rfd.step_with_loss(&good, &zeros(&[], DType::U32)), &["loss", "f32"]);
    assert_eq!(weight.flatten_all().unwrap().to_vec1::<f32>().unwrap(), [0.5; 6]);
    assert!(rfd.report().unwrap().is_none());
    // One number in another shape will do.
    rfd.step_with_loss(&good, &zeros(&[1, 1], DType::BF16)).unwrap();
    assert_eq!(rfd.report().unwrap().unwrap().applied_steps, 1);
}

#[test]
fn the_learning_rate_is_the_multiplier_and_a_wrong_one_stops_the_next_step() {
    let step = |prepare: &dyn Fn(&mut Rfd)| {
        let weight = var(&[1.0, 2.0]);
        let mut rfd = Rfd::new(vec![weight.clone()], config()).unwrap();
        prepare(&mut rfd);
        let outcome = rfd.step_with_loss(&store([(&weight, ones(&weight))]), &scalar(2.0));
        outcome.map(|()| rfd.report().unwrap().unwrap().step_size)
    };
    let whole = step(&|rfd| assert_eq!(rfd.learning_rate(), 1.0)).unwrap();
    assert_eq!(step(&|rfd| rfd.set_learning_rate(0.5)).unwrap(), 0.5 * whole);
    assert_eq!(step(&|rfd| rfd.set_multiplier(0.5).unwrap()).unwrap(), 0.5 * whole);
    refused(step(&|rfd| rfd.set_learning_rate(-1.0)), &["multiplier", "-1"]);
    refused(step(&|rfd| rfd.set_learning_rate(f64::NAN)), &["multiplier", "NaN"]);
    let recovered = step(&|rfd| {
        rfd.set_learning_rate(-1.0);
        rfd.set_learning_rate(0.25);
        assert_eq!(rfd.learning_rate(), 0.25);
    });
    assert_eq!(recovered.unwrap(), 0.25 * whole);
}

#[test]
fn a_step_that_is_skipped_changes_nothing_and_says_why() {
    let weight = var(&[1.0, 2.0]);
    let mut rfd = Rfd::new(vec![weight.clone()], config()).unwrap();
    let bad = (ones(&weight) * f64::INFINITY).unwrap();
    rfd.step_with_loss(&store([(&weight, bad)]), &scalar(2.0)).unwrap();
    let report = rfd.report().unwrap().unwrap();
    assert_eq!(report.outcome, Outcome::Skipped(SkipReason::NonFiniteGradient));
    assert_eq!(values(&weight), [1.0, 2.0]);
    // No variables at all: a gradient of zero.
    let mut empty = Rfd::empty(config()).unwrap();
    empty.backward_step(&scalar(1.0)).unwrap();
    assert_eq!(empty.report().unwrap().unwrap().outcome, Outcome::Skipped(SkipReason::ZeroGradient));
}

#[test]
fn the_loss_may_be_a_variable_itself() {
    let weight = Var::new(2.0_f32, &Device::Cpu).unwrap();
    let mut rfd = Rfd::new(vec![weight.clone()], config()).unwrap();
    rfd.backward_step(&weight).unwrap();
    assert_eq!(rfd.report().unwrap().unwrap().loss, 2.0);
    assert!(weight.to_scalar::<f32>().unwrap() < 2.0);
}

#[test]
fn thousands_of_variables_take_a_step() {
    let vars: Vec<Var> = (0..5000).map(|k| var(&[k as f32])).collect();
    let mut rfd = Rfd::from_slice(&vars.iter().collect::<Vec<_>>(), config()).unwrap();
    let grads = store(vars.iter().map(|var| (var, ones(var))));
    rfd.step_with_loss(&grads, &scalar(2.0)).unwrap();
    assert!(vars.iter().enumerate().all(|(k, var)| values(var)[0] < k as f32));
}

#[test]
fn groups_have_their_own_settings_and_names_come_from_the_map() {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    for name in ["b.weight", "a.bias", "a.weight"] {
        vb.get_with_hints(2, name, Init::Const(1.0)).unwrap();
    }
    let all = parameters(&map);
    let names: Vec<&str> = all.iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["a.bias", "a.weight", "b.weight"]);
    let frozen = Group { multiplier: 0.0, ..Group::default() };
    let options = Options { groups: vec![Group::default(), frozen], ..Options::default() };
    let grouped = all.iter().cloned().map(|p| if p.name.ends_with("bias") { p.in_group(1) } else { p });
    let mut rfd = Rfd::for_parameters(grouped.collect(), Config { options, ..config() }).unwrap();
    let grads = || store(all.iter().map(|p| (&p.var, ones(&p.var))));
    rfd.step_with_loss(&grads(), &scalar(2.0)).unwrap();
    assert_eq!(values(&all[0].var), [1.0, 1.0]);
    assert!(values(&all[1].var)[0] < 1.0);
    rfd.set_group(1, Group::default()).unwrap();
    rfd.step_with_loss(&grads(), &scalar(2.0)).unwrap();
    assert!(values(&all[0].var)[0] < 1.0);
    refused(rfd.set_group(2, Group::default()), &["group", "2"]);
}

#[test]
fn settings_of_the_method_may_change_where_they_can() {
    let weight = var(&[1.0, 2.0]);
    let grads = store([(&weight, ones(&weight))]);
    let mut rfd = Rfd::new(vec![weight.clone()], config()).unwrap();

    let noisy = Fitted { inv_batch_size: 0.5, ..rfd.model().unwrap().clone().into() };
    rfd.set_method(noisy.clone()).unwrap();
    rfd.step_with_loss(&grads, &scalar(2.0)).unwrap();
    let report = rfd.wait_report().unwrap().unwrap();
    let seen = Observation { loss: 2.0, grad_norm: report.grad_norm, inv_batch_size: 0.5 };
    let expected = noisy.model.step(&seen, &StepRule::default()).unwrap();
    assert_eq!(report.step_size, expected.step_size);

    refused(rfd.set_method(Fitted { inv_batch_size: -1.0, ..noisy.clone() }), &["inv_batch_size"]);
    refused(rfd.set_method(model(Family::Matern52)), &["model"]);
    refused(rfd.set_method(Adaptive::default()), &["method", "adaptive", "fitted"]);
    assert!(matches!(rfd.method(), Method::Fitted(fitted) if fitted.inv_batch_size == 0.5));
}

#[test]
fn a_saved_state_goes_on_with_the_same_bits() {
    let config = || Config::new(moving(0.9));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    let weight = var(&[1.0, -2.0, 0.5]);
    let mut rfd = Rfd::new(vec![weight.clone()], config()).unwrap();
    let step = |rfd: &mut Rfd, weight: &Var| {
        let loss = weight.sqr().unwrap().mean_all().unwrap();
        rfd.backward_step(&loss).unwrap();
    };
    (0..3).for_each(|_| step(&mut rfd, &weight));
    rfd.save_state(&path).unwrap();
    let copy = Var::from_tensor(&weight.copy().unwrap()).unwrap();
    (0..3).for_each(|_| step(&mut rfd, &weight));

    let mut resumed = Rfd::new(vec![copy.clone()], config()).unwrap();
    resumed.load_state(&path).unwrap();
    (0..3).for_each(|_| step(&mut resumed, &copy));
    assert_eq!(values(&copy), values(&weight));
    assert_eq!(resumed.report().unwrap(), rfd.report().unwrap());

    let mut other = Rfd::for_parameters(vec![Parameter::new("other", var(&[1.0; 3]))], config()).unwrap();
    refused(other.load_state(&path), &["`var 0`", "`other`"]);
    refused(other.load_state(folder.path().join("nowhere")), &["nowhere"]);
}

#[test]
fn the_adaptive_method_needs_no_model_and_names_what_is_wrong() {
    let adaptive = Adaptive { averaging: 0.8, ..Adaptive::default() };
    let mut rfd = Rfd::new(vec![var(&[1.0, 2.0])], Config::new(adaptive)).unwrap();
    assert!(rfd.model().is_none());
    assert!(matches!(rfd.method(), Method::Adaptive(own) if *own == adaptive));
    refused(rfd.set_method(Adaptive::default()), &["averaging", "0.85"]);

    let outside = Adaptive { averaging: 1.0, ..adaptive };
    refused(Rfd::new(vec![var(&[1.0])], Config::new(outside)), &["averaging", "[0, 1)"]);
}

#[test]
fn a_loss_below_the_bound_of_the_adaptive_method_skips_the_step() {
    let weight = var(&[1.0, 2.0]);
    let bounded = Adaptive { loss_bound: Some(0.0), ..Adaptive::default() };
    let mut rfd = Rfd::new(vec![weight.clone()], Config::new(bounded)).unwrap();
    let grads = store([(&weight, ones(&weight))]);
    rfd.step_with_loss(&grads, &scalar(-0.5)).unwrap();
    let report = rfd.report().unwrap().unwrap();
    assert_eq!(report.outcome, Outcome::Skipped(SkipReason::LossBelowBound));
    assert_eq!((report.trust, report.limit), (0.0, Limit::None));
    assert_eq!(values(&weight), [1.0, 2.0]);
    rfd.step_with_loss(&grads, &scalar(0.5)).unwrap();
    assert!(values(&weight)[0] < 1.0);

    // Unless one is given, losses may be negative.
    let before = values(&weight)[0];
    let mut rfd = Rfd::new(vec![weight.clone()], Config::new(Adaptive::default())).unwrap();
    rfd.step_with_loss(&grads, &scalar(-0.5)).unwrap();
    let report = rfd.report().unwrap().unwrap();
    assert_eq!((report.outcome, report.trust, report.limit), (Outcome::Applied, 1.0, Limit::Rate));
    assert!(values(&weight)[0] < before);
}
