//! Networks sampled for auto-fit, and variables that a seed decides.

use std::ops::ControlFlow;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::init::{DEFAULT_KAIMING_NORMAL, DEFAULT_KAIMING_UNIFORM, Init};
use candle_nn::{BatchNorm, Linear, Module, ModuleT, VarBuilder};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rfdescent_candle::rfdescent::covariance::{Family, Model};
use rfdescent_candle::rfdescent::estimation::{AutoFit, Sampler};
use rfdescent_candle::{Config, NetworkSampler, Rfd, SeededVars};

const INPUTS: usize = 8;

struct Network {
    layers: [(Linear, BatchNorm); 2],
}

fn build(vb: VarBuilder) -> Result<Network> {
    let layer = |from: usize, to: usize, vb: VarBuilder| -> Result<_> {
        Ok((candle_nn::linear(from, to, vb.pp("linear"))?, candle_nn::batch_norm(to, 1e-5, vb.pp("norm"))?))
    };
    Ok(Network { layers: [layer(INPUTS, 16, vb.pp("hidden"))?, layer(16, 2, vb.pp("output"))?] })
}

/// Points whose class is on which side of a curved surface they lie.
fn batch(size: usize, rng: &mut ChaCha8Rng) -> Result<(Tensor, Tensor)> {
    let inputs: Vec<f32> = (0..size * INPUTS).map(|_| 2.0 * rng.random::<f32>() - 1.0).collect();
    let class = |point: &[f32]| u32::from(point[0] * point[1] + 0.5 * point[2] > 0.0);
    let classes: Vec<u32> = inputs.chunks(INPUTS).map(class).collect();
    Ok((
        Tensor::from_vec(inputs, (size, INPUTS), &Device::Cpu)?,
        Tensor::from_vec(classes, size, &Device::Cpu)?,
    ))
}

fn loss(network: &Network, (inputs, classes): &(Tensor, Tensor)) -> Result<Tensor> {
    let [(first, first_norm), (second, second_norm)] = &network.layers;
    let hidden = first_norm.forward_t(&first.forward(inputs)?, true)?.relu()?;
    let logits = second_norm.forward_t(&second.forward(&hidden)?, true)?;
    candle_nn::loss::cross_entropy(&logits, classes)
}

#[test]
fn a_sample_is_what_its_seed_says_and_counts_trained_variables_only() {
    let auto_fit = AutoFit::default();
    let mut sampler = NetworkSampler::new(DType::F32, &Device::Cpu, build, batch, loss, &auto_fit).unwrap();
    // Weights and biases of both layers and norms; not the running averages.
    assert_eq!(sampler.dims(), (8 * 16 + 3 * 16 + 16 * 2 + 3 * 2) as u64);
    let first = sampler.sample(50, 7).unwrap();
    assert_eq!(sampler.sample(50, 7).unwrap(), first);
    assert_ne!(sampler.sample(50, 8).unwrap(), first);

    // The same by hand, in f64 from the gradients on.
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    rng.set_stream(3);
    let vars = SeededVars::new(rng);
    let network = build(vars.builder(DType::F32, &Device::Cpu)).unwrap();
    let value = loss(&network, &batch(50, &mut vars.rng()).unwrap()).unwrap();
    let grads = value.backward().unwrap();
    let squares: f64 = vars
        .parameters()
        .iter()
        .filter_map(|parameter| grads.get(&parameter.var))
        .map(|grad| {
            grad.to_dtype(DType::F64).unwrap().sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap()
        })
        .sum();
    assert_eq!(first.loss, f64::from(value.to_scalar::<f32>().unwrap()));
    // Of each trained variable, in the order in which the network asks for them.
    let mut sq_grad_norms = Vec::new();
    assert_eq!(sampler.sample_tensors(50, 7, &mut sq_grad_norms).unwrap(), first);
    let names: Vec<&str> = sampler.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(
        names[..4],
        ["hidden.linear.weight", "hidden.linear.bias", "hidden.norm.weight", "hidden.norm.bias"]
    );
    assert_eq!((names.len(), sq_grad_norms.len(), sampler.tensors()[0].dims), (8, 8, 8 * 16));
    assert!((sq_grad_norms.iter().sum::<f64>() / squares - 1.0).abs() <= 2.0 * 214.0 * 2f64.powi(-53));
    // Two orders of a sum of 214 non-negative terms in f64: at most 214 · 2⁻⁵³ apart each.
    assert!((first.sq_grad_norm / squares - 1.0).abs() <= 2.0 * 214.0 * 2f64.powi(-53));
}

#[test]
fn a_network_is_fitted_and_trained_without_tuning() {
    let auto_fit = AutoFit { max_batch_size: Some(2000), ..AutoFit::default() };
    let mut sampler = NetworkSampler::new(DType::F32, &Device::Cpu, build, batch, loss, &auto_fit).unwrap();
    let fitted = auto_fit.run(&mut sampler, &mut |_| ControlFlow::Continue(())).unwrap();
    let model = Model::new(Family::SquaredExponential, fitted.moments()).unwrap();

    let vars = SeededVars::new(ChaCha8Rng::seed_from_u64(1));
    let network = build(vars.builder(DType::F32, &Device::Cpu)).unwrap();
    let mut rfd = Rfd::for_parameters(vars.parameters(), Config::new(model)).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let losses: Vec<f32> = (0..150)
        .map(|_| {
            let value = loss(&network, &batch(256, &mut rng).unwrap()).unwrap();
            candle_nn::Optimizer::backward_step(&mut rfd, &value).unwrap();
            value.to_scalar::<f32>().unwrap()
        })
        .collect();
    // Guessing costs log 2 = 0.69, the first network about 0.9; the last ten batches say little by chance.
    let last = losses[140..].iter().sum::<f32>() / 10.0;
    assert!(last < 0.45, "from {} to {last}", losses[0]);
    assert_eq!(rfd.report().unwrap().unwrap().skipped_steps, 0);
}

#[test]
fn variables_with_length_scales_of_their_own_move_along_the_preconditioned_gradient() {
    let auto_fit = AutoFit { max_batch_size: Some(2000), ..AutoFit::default() };
    let mut sampler = NetworkSampler::new(DType::F32, &Device::Cpu, build, batch, loss, &auto_fit).unwrap();
    let fitted = auto_fit.run(&mut sampler, &mut |_| ControlFlow::Continue(())).unwrap();
    let tensors = fitted.fit_tensors().unwrap();
    let model = Model::new(Family::SquaredExponential, tensors.moments(&fitted.fit)).unwrap();
    let model = model.with_tensors(tensors.factors()).unwrap();

    // The running averages, which the model does not know, are among the variables.
    let vars = SeededVars::new(ChaCha8Rng::seed_from_u64(1));
    let network = build(vars.builder(DType::F32, &Device::Cpu)).unwrap();
    let (config, parameters) = Config::new(model).per_tensor(vars.parameters()).unwrap();
    let mut rfd = Rfd::for_parameters(parameters.clone(), config).unwrap();
    let value = loss(&network, &batch(256, &mut ChaCha8Rng::seed_from_u64(2)).unwrap()).unwrap();
    let grads = value.backward().unwrap();
    let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let before: Vec<Vec<f32>> = parameters.iter().map(|parameter| values(&parameter.var)).collect();
    rfd.step_with_loss(&grads, &value).unwrap();
    let rate = rfd.report().unwrap().unwrap().learning_rate;
    let mut found = 0;
    for (parameter, before) in parameters.iter().zip(before) {
        let tensor = tensors.tensors.iter().find(|tensor| tensor.name == parameter.name);
        let (Some(tensor), Some(grad)) = (tensor, grads.get(&parameter.var)) else { continue };
        found += 1;
        let scale = rate * tensor.length_scale_factor.powi(2);
        for ((after, before), g) in values(&parameter.var).into_iter().zip(before).zip(values(grad)) {
            let (before, step) = (f64::from(before), scale * f64::from(g));
            // The update rounds to f32 at most three times: the factor, the product and the difference.
            let bound = 2f64.powi(-24) * (2.0 * step.abs() + (before - step).abs()) * 1.001;
            assert!((f64::from(after) - (before - step)).abs() <= bound, "{}", parameter.name);
        }
    }
    assert_eq!(found, 8);
}

#[test]
fn functions_that_fail_or_leave_no_gradient_are_errors() {
    let auto_fit = AutoFit::default();
    let detached = |network: &Network, examples: &(Tensor, Tensor)| Ok(loss(network, examples)?.detach());
    let sampler = NetworkSampler::new(DType::F32, &Device::Cpu, build, batch, detached, &auto_fit);
    assert!(sampler.err().unwrap().to_string().contains("`detach`"));
    let each = |network: &Network, (inputs, _): &(Tensor, Tensor)| network.layers[0].0.forward(inputs);
    let sampler = NetworkSampler::new(DType::F32, &Device::Cpu, build, batch, each, &auto_fit);
    assert!(sampler.err().unwrap().to_string().contains("mean_all"));
    let none = |_: usize, _: &mut ChaCha8Rng| candle_core::bail!("no data");
    let sampler = NetworkSampler::new(DType::F32, &Device::Cpu, build, none, loss, &auto_fit);
    assert!(sampler.err().unwrap().to_string().contains("no data"));
}

#[test]
fn variables_follow_candles_rules_of_initialisation() {
    let vars = SeededVars::new(ChaCha8Rng::seed_from_u64(3));
    let vb = vars.builder(DType::F64, &Device::Cpu);
    let count = 200 * 500;
    // Mean and deviation to expect; 500 inputs of a ReLU: √(2/500).
    let rules = [
        ("uniform", Init::Uniform { lo: 1.0, up: 4.0 }, 2.5, 3.0 / 12f64.sqrt()),
        ("normal", Init::Randn { mean: -1.0, stdev: 0.5 }, -1.0, 0.5),
        ("kaiming uniform", DEFAULT_KAIMING_UNIFORM, 0.0, (2.0_f64 / 500.0).sqrt()),
        ("kaiming normal", DEFAULT_KAIMING_NORMAL, 0.0, (2.0_f64 / 500.0).sqrt()),
        ("constant", Init::Const(0.25), 0.25, 0.0),
    ];
    for (name, init, mean, deviation) in rules {
        let drawn = vb.get_with_hints((200, 500), name, init).unwrap();
        assert_eq!(drawn.dtype(), DType::F64);
        let values = drawn.flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let found = values.iter().sum::<f64>() / count as f64;
        let squares = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count as f64;
        // Five standard errors: of the mean σ/√n, of the deviation at most σ/√(2n); and the rounding of f32.
        let error = 5.0 * deviation / (count as f64).sqrt() + 1e-6;
        assert!((found - mean).abs() <= error, "{name}: mean {found}");
        assert!((squares.sqrt() - deviation).abs() <= error, "{name}: deviation {}", squares.sqrt());
        assert!(
            matches!(init, Init::Randn { .. } | Init::Kaiming { .. })
                || values.iter().all(|x| (0.25..=4.0).contains(x))
        );
    }
    // A name again is the same variable; another shape an error that names it.
    let again = vb.get_with_hints((200, 500), "normal", Init::Const(0.0)).unwrap();
    assert_ne!(again.flatten_all().unwrap().to_vec1::<f64>().unwrap()[0], 0.0);
    assert_eq!(vars.parameters().len(), 5);
    assert!(vb.contains_tensor("normal") && !vb.contains_tensor("other"));
    let error = vb.get_with_hints(7, "normal", Init::Const(0.0)).unwrap_err().to_string();
    assert!(error.contains("`normal`") && error.contains("[200, 500]"), "{error}");
}
