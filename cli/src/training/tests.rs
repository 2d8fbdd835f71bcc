//! The training loop, on data small enough for a test.

use candle_core::DType;
use indicatif::ProgressBar;
use rfdescent::Moments;
use rfdescent::covariance::{Family, Model};
use rfdescent_candle::{Adaptive, Config, Rfd};

use super::baseline::{Baseline, Setting};
use super::*;
use crate::data::{Images, PIXELS, synthetic};
use crate::network::NetworkKind;

fn schedule(epochs: usize, batch_size: usize) -> Schedule {
    Schedule { epochs, batch_size, seed: 1 }
}

fn run(
    network: &Network,
    data: &Dataset,
    method: &mut dyn Method,
    schedule: Schedule,
) -> Result<Run, CliError> {
    train(network, data, method, schedule, &ProgressBar::hidden(), &mut |_| ())
}

fn model(network: &Network) -> Model {
    // Near what auto-fit finds for this network on the generated data.
    let moments = Moments {
        mean: 2.72,
        variance: 4e-3,
        noise_variance: 0.87,
        grad_variance: 20.0,
        noise_grad_variance: 9e3,
        dims: network.dims(),
    };
    Model::new(Family::SquaredExponential, moments).unwrap()
}

fn rfd(network: &Network) -> Rfd {
    Rfd::for_parameters(network.parameters(), Config::new(model(network))).unwrap()
}

fn adaptive(network: &Network) -> Rfd {
    Rfd::for_parameters(network.parameters(), Config::new(Adaptive::default())).unwrap()
}

#[test]
fn the_mlp_learns_the_generated_classes_and_a_linear_classifier_much_less() {
    let data = synthetic::generate(0, 6000, 1000);
    let accuracy = |network: &Network| {
        let adam = Setting { method: "Adam", learning_rate: 1e-2 };
        let mut method = Baseline::new(adam, network).unwrap();
        run(network, &data, &mut method, schedule(4, 200)).unwrap().epochs[3].accuracy
    };
    let mlp = accuracy(&Network::new(NetworkKind::Mlp, DTYPE, 1).unwrap());
    let linear = accuracy(&Network::linear(DTYPE, 1).unwrap());
    // Seen: 0.86 and 0.48. Chance is 0.1 ± 0.01; the deviation of an accuracy over 1000 images is at most
    // 0.016.
    assert!(mlp > 0.8 && linear < 0.6 && linear > 0.3, "mlp {mlp}, linear {linear}");
}

#[test]
fn rfd_learns_and_one_seed_gives_one_result() {
    let data = synthetic::generate(0, 4000, 500);
    let network = || Network::new(NetworkKind::Mlp, DTYPE, 1).unwrap();
    let once = || {
        let network = network();
        run(&network, &data, &mut rfd(&network), schedule(3, 200)).unwrap()
    };
    let (first, second) = (once(), once());
    assert!(first.epochs[2].accuracy > 0.5, "{:?}", first.epochs);
    assert!(first.epochs[2].validation_loss < 0.7 * model(&network()).moments().mean);
    let losses = |run: &Run| run.steps.iter().map(|row| row.loss.to_bits()).collect::<Vec<_>>();
    assert_eq!(losses(&first), losses(&second));
    let row = &first.steps[7];
    let norm = row.step_size.unwrap() / row.learning_rate.unwrap();
    // Two roundings between the report's numbers.
    assert!((norm / row.grad_norm.unwrap() - 1.0).abs() < 1e-14);
}

#[test]
fn the_adaptive_method_learns_without_a_model() {
    let data = synthetic::generate(0, 4000, 500);
    let network = Network::new(NetworkKind::Mlp, DTYPE, 1).unwrap();
    let run = run(&network, &data, &mut adaptive(&network), schedule(3, 200)).unwrap();
    assert!(run.epochs[2].accuracy > 0.5, "{:?}", run.epochs);
    assert!(run.steps.iter().all(|row| row.theta.is_none() && row.step_size.is_some()));
}

#[test]
fn training_stops_when_every_step_is_skipped() {
    // One image only: batch normalisation takes all of it away, every gradient but that of the last bias is
    // zero, and with a NaN in the parameters the loss is not finite.
    let data = Dataset::new(
        "test".into(),
        Images::new(vec![7; 40 * PIXELS], vec![3; 40]),
        synthetic::generate(0, 1, 10).validation,
    );
    let network = Network::new(NetworkKind::Mlp, DTYPE, 1).unwrap();
    let poisoned = network.parameters()[0].var.clone();
    poisoned.set(&(poisoned.as_tensor() * f64::NAN).unwrap()).unwrap();
    let error = |method: &mut Rfd| run(&network, &data, method, schedule(2, 10)).unwrap_err().to_string();
    let (fitted, adaptive) = (error(&mut rfd(&network)), error(&mut adaptive(&network)));
    for error in [&fitted, &adaptive] {
        assert!(error.contains("step 4 of epoch 1") && error.contains("not finite"), "{error}");
    }
    assert!(fitted.contains("without --samples"), "{fitted}");
    assert!(!adaptive.contains("--samples") && adaptive.contains("check the data"), "{adaptive}");
}

#[test]
fn evaluation_weighs_an_incomplete_batch_by_its_size() {
    let data = synthetic::generate(0, 100, 1003);
    let network = Network::new(NetworkKind::Mlp, DTYPE, 1).unwrap();
    let whole = evaluate::evaluate(&network, &data).unwrap();
    let indices: Vec<u32> = (0..1003).collect();
    let batch = data.batch(&data.validation, &indices, DType::F32).unwrap();
    let logits = network.forward(&batch.images, crate::network::Mode::Evaluate).unwrap();
    let loss = candle_nn::loss::cross_entropy(&logits, &batch.labels).unwrap().to_scalar::<f32>().unwrap();
    // f32 means of about a thousand terms of size 2.
    assert!((whole.loss - f64::from(loss)).abs() < 1e-5, "{} {loss}", whole.loss);
}
