//! The training loop of the README: gradients from the host, steps on the device.
//!
//!     cargo run --release --example regression

use std::ops::ControlFlow;

use cust::memory::{CopyDestination, DeviceBox, DeviceBuffer};
use cust::stream::{Stream, StreamFlags};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rfdescent::DType;
use rfdescent::covariance::{Family, Model};
use rfdescent::estimation::{AutoFit, BatchSample};
use rfdescent::optimizer::{Options, TensorSpec};
use rfdescent_cust::{Input, Optimizer, Tensor};

const WEIGHTS: usize = 64;

/// Mean loss of a random batch and its gradient: a bounded regression, to find the weights whose products
/// with the inputs have the signs that the targets have. At the true weights the mean loss is 0.43.
fn evaluate(weights: &[f32], batch_size: u64, rng: &mut StdRng) -> (f32, Vec<f32>) {
    let norm = weights.iter().map(|w| w * w).sum::<f32>().sqrt();
    let (mut loss, mut gradient) = (0.0, vec![0.0; weights.len()]);
    for _ in 0..batch_size {
        let inputs: Vec<f32> = weights.iter().map(|_| rng.random_range(-1.0..1.0)).collect();
        // All true weights are alike.
        let target = inputs.iter().sum::<f32>().signum();
        let product = inputs.iter().zip(weights).map(|(x, w)| x * w).sum::<f32>() / norm;
        let off = product.tanh() - target;
        loss += off * off / batch_size as f32;
        let slope = 2.0 * off * (1.0 - product.tanh().powi(2)) / norm / batch_size as f32;
        for ((g, x), w) in gradient.iter_mut().zip(&inputs).zip(weights) {
            *g += slope * (x - product * w / norm);
        }
    }
    (loss, gradient)
}

fn initial(rng: &mut StdRng) -> Vec<f32> {
    (0..WEIGHTS).map(|_| rng.random_range(-1.0..1.0)).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Once per network and data set; keep the model in a file.
    let sample = |batch_size: u64, seed: u64| {
        let mut rng = StdRng::seed_from_u64(seed);
        let weights = initial(&mut rng);
        let (loss, gradient) = evaluate(&weights, batch_size, &mut rng);
        let sq_grad_norm = gradient.iter().map(|&g| f64::from(g) * f64::from(g)).sum();
        Ok(BatchSample { loss: loss.into(), sq_grad_norm })
    };
    let mut sampler = (WEIGHTS as u64, sample);
    let fitted = AutoFit::default().run(&mut sampler, &mut |_| ControlFlow::Continue(()))?;
    let model = Model::new(Family::SquaredExponential, fitted.moments())?;

    // Current on this thread for as long as it is kept: buffers, streams and the optimizer use it.
    let _context = cust::quick_init()?;
    let stream = Stream::new(StreamFlags::DEFAULT, None)?;
    let specs = vec![TensorSpec::new("weights", &[WEIGHTS], DType::F32)];
    let mut optimizer = Optimizer::new(model, Options::default(), specs)?;

    let mut rng = StdRng::seed_from_u64(7);
    let mut host = initial(&mut rng);
    let mut weights = DeviceBuffer::from_slice(&host)?;
    let mut gradient = DeviceBuffer::from_slice(&vec![0.0_f32; WEIGHTS])?;
    let mut loss = DeviceBox::new(&0.0_f32)?;
    let mut first = None;
    for step in 0..100 {
        weights.copy_to(&mut host)?;
        let (value, values) = evaluate(&host, 256, &mut rng);
        gradient.copy_from(&values)?;
        loss.copy_from(&value)?;
        let tensors = [Tensor::new(&mut weights, &gradient)];
        // SAFETY: the buffers are of the context above, no other stream uses them, and they are kept to the
        // end. With gradients from kernels of this stream, `step` would do the same without waiting.
        let report = unsafe { optimizer.step_and_wait(&tensors, &Input::new(&loss), &stream)? };
        first.get_or_insert(report.loss);
        if step % 20 == 0 {
            println!("step {step}: loss {:.4}, step size {:.3}", report.loss, report.step_size);
        }
    }
    let last = optimizer.inner().report()?.map_or(f64::NAN, |report| report.loss);
    println!("loss {last:.4}");
    assert!(last < 0.5 * first.unwrap_or(f64::NAN));
    Ok(())
}
