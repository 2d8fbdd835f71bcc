//! Initialisation, gradients and layers of whole networks.

use candle_core::{DType, Device, Tensor};

use super::*;
use crate::data::{Batch, PIXELS};

fn batch(examples: usize, pixels: usize, dtype: DType) -> Batch {
    let values: Vec<f64> = (0..examples * pixels).map(|i| ((i * 7919 % 1013) as f64 * 0.37).sin()).collect();
    let labels: Vec<u32> = (0..examples as u32).map(|i| i % 10).collect();
    Batch {
        images: Tensor::from_vec(values, (examples, pixels), &Device::Cpu).unwrap().to_dtype(dtype).unwrap(),
        labels: Tensor::from_vec(labels, examples, &Device::Cpu).unwrap(),
    }
}

fn small_mlp() -> Network {
    Network::mlp(&[12, 7, 5, 10], DType::F64, 1).unwrap()
}

/// Compares candle's gradient with central differences at a few entries of every parameter.
fn check_gradients(network: &Network, batch: &Batch) {
    let gradients = network.training_loss(batch).unwrap().backward().unwrap();
    let loss = || network.training_loss(batch).unwrap().to_scalar::<f64>().unwrap();
    for parameter in network.parameters() {
        let gradient =
            gradients.get(&parameter.var).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let values = parameter.var.flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let set = |values: &[f64]| {
            let tensor = Tensor::from_slice(values, parameter.var.shape(), &Device::Cpu).unwrap();
            parameter.var.set(&tensor).unwrap();
        };
        for entry in [0, values.len() / 2, values.len() - 1] {
            let mut moved = values.clone();
            let step = 1e-6;
            moved[entry] += step;
            set(&moved);
            let above = loss();
            moved[entry] -= 2.0 * step;
            set(&moved);
            let below = loss();
            set(&values);
            // Rounding 1e-16/1e-6, truncation of order 1e-12 times the third derivative.
            let difference = (above - below) / (2.0 * step);
            assert!(
                (difference - gradient[entry]).abs() < 1e-7,
                "{}: {difference} {}",
                parameter.name,
                gradient[entry]
            );
        }
    }
}

#[test]
fn mlp_gradients_match_finite_differences() {
    check_gradients(&small_mlp(), &batch(9, 12, DType::F64));
}

#[test]
fn cnn_gradients_match_finite_differences() {
    let network = Network::new(NetworkKind::Cnn, DType::F64, 1).unwrap();
    check_gradients(&network, &batch(4, PIXELS, DType::F64));
}

#[test]
fn parameters_have_the_documented_order_and_number() {
    let mlp = Network::new(NetworkKind::Mlp, DType::F32, 0).unwrap();
    let names: Vec<String> = mlp.parameters().into_iter().map(|p| p.name).collect();
    let expected = [
        "linear1.weight",
        "linear1.bias",
        "norm1.weight",
        "norm1.bias",
        "linear2.weight",
        "linear2.bias",
        "norm2.weight",
        "norm2.bias",
        "linear3.weight",
        "linear3.bias",
        "norm3.weight",
        "norm3.bias",
    ];
    assert_eq!(names, expected);
    assert_eq!(mlp.dims(), 784 * 512 + 512 * 256 + 256 * 10 + 3 * (512 + 256 + 10));
    let cnn = Network::new(NetworkKind::Cnn, DType::F32, 0).unwrap();
    assert_eq!(cnn.dims(), (25 + 3) * 16 + (16 * 25 + 3) * 32 + (512 + 3) * 10);
    assert_eq!(cnn.tensors().len(), cnn.parameters().len() + 6);
}

#[test]
fn initial_weights_are_uniform_on_the_bound_of_pytorch() {
    let network = Network::new(NetworkKind::Mlp, DType::F32, 5).unwrap();
    let weights = network.parameters()[0].var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let bound = 1.0 / 784f64.sqrt();
    let count = weights.len() as f64;
    let mean = weights.iter().map(|&w| f64::from(w)).sum::<f64>() / count;
    let variance = weights.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>() / count;
    let largest = weights.iter().fold(0f64, |m, &w| m.max(f64::from(w).abs()));
    // Variance bound²/3. Five standard errors: of the mean bound/√(3n), of the variance bound²·√(4/45)/√n.
    assert!(mean.abs() < 5.0 * bound / (3.0 * count).sqrt(), "{mean}");
    assert!((variance - bound * bound / 3.0).abs() < 5.0 * bound * bound * (4f64 / 45.0 / count).sqrt());
    assert!(largest <= bound * (1.0 + 1e-6) && largest > 0.999 * bound);
}

#[test]
fn the_seed_decides_all_variables_and_training_mode_moves_the_running_averages() {
    let snapshot = |n: &Network| {
        let mut all: Vec<(String, Vec<f32>)> =
            n.tensors().into_iter().map(|(k, t)| (k, t.flatten_all().unwrap().to_vec1().unwrap())).collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    };
    let network = |seed: u64| Network::new(NetworkKind::Mlp, DType::F32, seed).unwrap();
    let first = network(5);
    let before = snapshot(&first);
    assert_eq!(before, snapshot(&network(5)));
    assert_ne!(before, snapshot(&network(6)));
    first.training_loss(&batch(16, PIXELS, DType::F32)).unwrap();
    assert_ne!(before, snapshot(&first));
}
