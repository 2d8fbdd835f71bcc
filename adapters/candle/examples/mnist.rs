//! Trains a network on MNIST with nothing tuned:
//! `cargo run --release -p rfdescent-candle --example mnist -- --data DIR`, DIR with the four IDX files,
//! gzipped or not. Without `--data` it generates images; `--epochs N` trains longer than 3;
//! `--method adaptive` takes the method that needs no fit.

use std::error::Error;
use std::fs::File;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::init::Init;
use candle_nn::{BatchNorm, Linear, Module, ModuleT, Optimizer, VarBuilder};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rfdescent_candle::rfdescent::covariance::{Family, Model};
use rfdescent_candle::rfdescent::estimation::AutoFit;
use rfdescent_candle::rfdescent::optimizer::Options;
use rfdescent_candle::{Adaptive, Config, NetworkSampler, Rfd, SeededVars};

const SIDE: usize = 28;
const PIXELS: usize = SIDE * SIDE;
const CLASSES: usize = 10;
const WIDTHS: [usize; 4] = [PIXELS, 512, 256, CLASSES];
const BATCH: usize = 1024;
/// Largest batch of a sample.
const MAX_SAMPLE: u64 = 4096;

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse()?;
    let (train, test) = match &arguments.data {
        Some(folder) => (Images::load(folder, "train")?, Images::load(folder, "t10k")?),
        None => (Images::generate(20_000, 1), Images::generate(4_000, 2)),
    };
    println!("{} training and {} test images", train.len(), test.len());

    let method = if arguments.adaptive { Adaptive::default().into() } else { fit(&train)?.into() };

    // Train.
    let vars = SeededVars::new(ChaCha8Rng::seed_from_u64(0));
    let network = Network::new(vars.builder(DType::F32, &Device::Cpu))?;
    let config = Config { method, options: Options::default() };
    let mut optimizer = Rfd::for_parameters(vars.parameters(), config)?;
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut order: Vec<u32> = (0..train.len() as u32).collect();
    for epoch in 1..=arguments.epochs {
        order.shuffle(&mut rng);
        for chosen in order.chunks_exact(BATCH) {
            let loss = network.training_loss(&train.batch(chosen)?)?;
            optimizer.backward_step(&loss)?;
        }
        let (loss, accuracy) = network.evaluate(&test)?;
        println!("epoch {epoch}: test loss {loss:.4}, accuracy {:.2} %", 100.0 * accuracy);
    }
    Ok(())
}

/// Estimates the covariance from losses and gradients at random initialisations: this replaces tuning.
fn fit(train: &Images) -> std::result::Result<Model, Box<dyn Error>> {
    let auto_fit = AutoFit { max_batch_size: Some(MAX_SAMPLE.min(train.len() as u64)), ..AutoFit::default() };
    let batch = |size: usize, rng: &mut ChaCha8Rng| {
        let chosen: Vec<u32> = (0..size).map(|_| rng.random_range(0..train.len() as u32)).collect();
        train.batch(&chosen)
    };
    let mut sampler = NetworkSampler::new(
        DType::F32,
        &Device::Cpu,
        Network::new,
        batch,
        Network::training_loss,
        &auto_fit,
    )?;
    let fitted = auto_fit.run(&mut sampler, &mut |_| ControlFlow::Continue(()))?;
    let model = Model::new(Family::SquaredExponential, fitted.moments())?;
    println!("fitted from {} images: largest step {:.3}", fitted.fit.examples, model.plateau_step_size());
    Ok(model)
}

/// Linear layers, each with batch normalisation, the output's included: the fitted method needs that.
struct Network {
    layers: Vec<(Linear, BatchNorm)>,
}

impl Network {
    fn new(vb: VarBuilder) -> Result<Self> {
        let layer = |(number, ends): (usize, &[usize])| {
            let vb = vb.pp(number.to_string());
            // As PyTorch initialises: candle's own weights are some times as wide, and RFD then begins too
            // far away.
            let reach = 1.0 / (ends[0] as f64).sqrt();
            let init = Init::Uniform { lo: -reach, up: reach };
            let weight = vb.get_with_hints((ends[1], ends[0]), "linear.weight", init)?;
            let bias = vb.get_with_hints(ends[1], "linear.bias", init)?;
            Ok((Linear::new(weight, Some(bias)), candle_nn::batch_norm(ends[1], 1e-5, vb.pp("norm"))?))
        };
        Ok(Network { layers: WIDTHS.windows(2).enumerate().map(layer).collect::<Result<_>>()? })
    }

    fn forward(&self, images: &Tensor, train: bool) -> Result<Tensor> {
        let mut x = images.clone();
        for (number, (linear, norm)) in self.layers.iter().enumerate() {
            let input = if number == 0 { x } else { x.relu()? };
            x = norm.forward_t(&linear.forward(&input)?, train)?;
        }
        Ok(x)
    }

    fn training_loss(&self, (images, labels): &(Tensor, Tensor)) -> Result<Tensor> {
        candle_nn::loss::cross_entropy(&self.forward(images, true)?, labels)
    }

    /// Mean loss and share of images that are classified rightly.
    fn evaluate(&self, test: &Images) -> Result<(f32, f32)> {
        let (images, labels) = test.batch(&(0..test.len() as u32).collect::<Vec<_>>())?;
        let logits = self.forward(&images, false)?;
        let loss = candle_nn::loss::cross_entropy(&logits, &labels)?.to_scalar::<f32>()?;
        let right = logits.argmax(D::Minus1)?.eq(&labels)?.to_dtype(DType::F32)?.mean_all()?;
        Ok((loss, right.to_scalar::<f32>()?))
    }
}

struct Images {
    pixels: Vec<u8>,
    labels: Vec<u8>,
}

impl Images {
    fn len(&self) -> usize {
        self.labels.len()
    }

    /// Images and classes of a mini-batch, pixels in [−1, 1].
    fn batch(&self, chosen: &[u32]) -> Result<(Tensor, Tensor)> {
        let image = |&index: &u32| &self.pixels[index as usize * PIXELS..][..PIXELS];
        let pixels: Vec<f32> =
            chosen.iter().flat_map(image).map(|&byte| f32::from(byte) / 127.5 - 1.0).collect();
        let labels: Vec<u32> = chosen.iter().map(|&index| u32::from(self.labels[index as usize])).collect();
        Ok((
            Tensor::from_vec(pixels, (chosen.len(), PIXELS), &Device::Cpu)?,
            Tensor::from_vec(labels, chosen.len(), &Device::Cpu)?,
        ))
    }

    fn load(folder: &Path, part: &str) -> std::result::Result<Self, Box<dyn Error>> {
        let pixels = idx(folder, &format!("{part}-images-idx3-ubyte"), 16)?;
        let labels = idx(folder, &format!("{part}-labels-idx1-ubyte"), 8)?;
        if labels.is_empty() || pixels.len() != labels.len() * PIXELS || labels.iter().any(|&l| l > 9) {
            return Err(format!("{}: not MNIST's {part} images and labels", folder.display()).into());
        }
        Ok(Images { pixels, labels })
    }

    /// Bars at ten angles, moved at random, under noise.
    fn generate(count: usize, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let labels: Vec<u8> = (0..count).map(|k| (k % CLASSES) as u8).collect();
        let mut pixels = Vec::with_capacity(count * PIXELS);
        for &label in &labels {
            let (sin, cos) = (f32::from(label) * std::f32::consts::PI / CLASSES as f32).sin_cos();
            let centre: [f32; 2] = std::array::from_fn(|_| 13.5 + rng.random_range(-4.0..4.0));
            for at in 0..PIXELS {
                let (x, y) = ((at % SIDE) as f32 - centre[0], (at / SIDE) as f32 - centre[1]);
                let on_bar = (x * sin - y * cos).abs() < 1.5 && (x * cos + y * sin).abs() < 9.0;
                let light = if on_bar { 160.0 } else { 0.0 };
                pixels.push((light + rng.random_range(0.0..90.0_f32)) as u8);
            }
        }
        Images { pixels, labels }
    }
}

/// What follows the header of an IDX file, which is unpacked if its name ends in .gz.
fn idx(folder: &Path, name: &str, header: usize) -> std::result::Result<Vec<u8>, Box<dyn Error>> {
    let plain = folder.join(name);
    let path = if plain.exists() { plain } else { folder.join(format!("{name}.gz")) };
    let file = File::open(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut bytes = Vec::new();
    let packed = path.extension().is_some_and(|ending| ending == "gz");
    let mut reader: Box<dyn Read> =
        if packed { Box::new(flate2::read::MultiGzDecoder::new(file)) } else { Box::new(file) };
    reader.read_to_end(&mut bytes).map_err(|error| format!("{}: {error}", path.display()))?;
    if bytes.len() < header {
        return Err(format!("{}: ends in its header", path.display()).into());
    }
    Ok(bytes.split_off(header))
}

struct Arguments {
    data: Option<PathBuf>,
    epochs: usize,
    adaptive: bool,
}

impl Arguments {
    fn parse() -> std::result::Result<Self, Box<dyn Error>> {
        let mut parsed = Arguments { data: None, epochs: 3, adaptive: false };
        let mut arguments = std::env::args().skip(1);
        while let Some(name) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
            match name.as_str() {
                "--data" => parsed.data = Some(value.into()),
                "--epochs" => {
                    parsed.epochs = value.parse().map_err(|error| format!("--epochs {value}: {error}"))?
                }
                "--method" => {
                    parsed.adaptive = match value.as_str() {
                        "adaptive" => true,
                        "fitted" => false,
                        _ => return Err(format!("--method {value}: there are fitted and adaptive").into()),
                    }
                }
                _ => {
                    let known = "--data DIR, --epochs N and --method fitted|adaptive";
                    return Err(format!("unknown option {name}; there are {known}").into());
                }
            }
        }
        Ok(parsed)
    }
}
