//! Trains the network of `rfdescent train`, an MLP 784-512-256-10 with batch normalisation after every linear
//! layer, with Random Function Descent; nothing is tuned. With `--method adaptive` there is no fit either.
//!
//!     cargo run --release --example mnist -- --data DIR
//!
//! DIR holds the four IDX files of MNIST or Fashion-MNIST, gzipped or not. Without it images are generated.

mod data;
mod network;

use std::error::Error;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use rfdescent::covariance::{Family, Model};
use rfdescent::estimation::AutoFit;
use rfdescent_tch::{Adaptive, NetworkSampler, Rfd};
use tch::{Device, Kind, Tensor, nn};

use data::Data;
use network::Network;

#[derive(Parser)]
struct Args {
    /// Folder with the IDX files [default: generated images]
    #[arg(long)]
    data: Option<PathBuf>,
    /// How steps are chosen
    #[arg(long, value_enum, default_value_t = MethodKind::Fitted)]
    method: MethodKind,
    /// Passes over the training images
    #[arg(long, default_value_t = 3)]
    epochs: usize,
    /// Images of a step; an incomplete batch at the end of an epoch is left out
    #[arg(long, default_value_t = 1024)]
    batch_size: i64,
    /// Use only this many training images
    #[arg(long)]
    train_images: Option<i64>,
    /// Seed of everything random
    #[arg(long, default_value_t = 0)]
    seed: i64,
}

#[derive(Clone, Copy, ValueEnum)]
enum MethodKind {
    /// RFD as published: the covariance is fitted first
    Fitted,
    /// Without a fit
    Adaptive,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let device = Device::cuda_if_available();
    tch::manual_seed(args.seed);
    let data = match &args.data {
        Some(folder) => Data::load(folder)?,
        None => Data::generate(),
    };
    let data = data.prepare(args.train_images, device);
    if data.train.len() < args.batch_size || args.batch_size < 2 {
        return Err(
            format!("--batch-size {} of {} training images", args.batch_size, data.train.len()).into()
        );
    }

    let method = match args.method {
        MethodKind::Fitted => Rfd::new(fit(&data, args.seed, device)?),
        MethodKind::Adaptive => Rfd::new(Adaptive::default()),
    };

    tch::manual_seed(args.seed);
    let vs = nn::VarStore::new(device);
    let network = Network::new(vs.root());
    let mut optimizer = method.build(&vs)?;
    for epoch in 1..=args.epochs {
        let started = Instant::now();
        // Added up on the device: nothing waits for a step.
        let mut sum = Tensor::zeros([], (Kind::Double, device));
        let batches = data.train.batches(args.batch_size);
        let count = batches.len() as f64;
        for (images, labels) in batches {
            let loss = network.loss(&images, &labels);
            optimizer.backward_step(&loss)?;
            sum += loss.detach();
        }
        let (loss, accuracy) = network.evaluate(&data.validation.images, &data.validation.labels);
        let step_size = optimizer.report()?.map_or(0.0, |report| report.step_size);
        println!(
            "epoch {epoch}: train loss {:.4}, validation loss {loss:.4}, accuracy {:.2} %, last step size {step_size:.3}, \
             {:.1} s",
            sum.double_value(&[]) / count,
            100.0 * accuracy,
            started.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

/// The covariance model of the network on the data.
fn fit(data: &Data, seed: i64, device: Device) -> Result<Model, Box<dyn Error>> {
    let started = Instant::now();
    let mut sampler = NetworkSampler::new(
        device,
        Network::new,
        |size| Ok(data.train.draw(size)),
        |network: &Network, (images, labels): (Tensor, Tensor)| Ok(network.loss(&images, &labels)),
    )?;
    let auto_fit = AutoFit {
        max_batch_size: Some(4096.min(data.train.len() as u64)),
        seed: seed.cast_unsigned(),
        ..AutoFit::default()
    };
    let fitted = auto_fit.run(&mut sampler, &mut |_| ControlFlow::Continue(()))?;
    let model = Model::new(Family::SquaredExponential, fitted.moments())?;
    println!(
        "auto-fit: {} mini-batches, {} images, {:.1} s; mean {:.4}, variance {:.3e}, length scale {:.3}",
        fitted.fit.batches,
        fitted.fit.examples,
        started.elapsed().as_secs_f64(),
        fitted.fit.mean,
        fitted.fit.variance,
        model.length_scale()
    );
    Ok(model)
}
