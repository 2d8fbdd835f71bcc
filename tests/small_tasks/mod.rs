//! A small network with its gradients, and tasks for it, which take a second.

use rfdescent::DType;
use rfdescent::optimizer::{Adaptive, Optimizer, Options, StepInput, StepReport, TensorSpec};

use crate::common::{Owned, grads, params, uniform};

/// Of one example, by the network's outputs.
#[derive(Clone, Copy, Debug)]
pub enum Loss {
    CrossEntropy,
    Squared,
    /// Quadratic up to a distance of 1.
    Huber,
    Absolute,
    /// The negative logarithm of a normal density, by its mean and the logarithm of its standard deviation.
    Gaussian,
}

impl Loss {
    fn outputs(self) -> usize {
        match self {
            Loss::CrossEntropy => CLASSES,
            Loss::Gaussian => 2,
            _ => 1,
        }
    }

    /// The loss and its gradient.
    fn at(self, outputs: &[f64], label: f64) -> (f64, Vec<f64>) {
        let distance = outputs[0] - label;
        match self {
            Loss::CrossEntropy => {
                let largest = outputs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let powers: Vec<f64> = outputs.iter().map(|x| (x - largest).exp()).collect();
                let sum: f64 = powers.iter().sum();
                let own = label as usize;
                let gradient =
                    powers.iter().enumerate().map(|(k, p)| p / sum - f64::from(u8::from(k == own)));
                (sum.ln() + largest - outputs[own], gradient.collect())
            }
            Loss::Squared => (distance * distance / 2.0, vec![distance]),
            Loss::Huber if distance.abs() <= 1.0 => (distance * distance / 2.0, vec![distance]),
            Loss::Huber => (distance.abs() - 0.5, vec![distance.signum()]),
            Loss::Absolute => (distance.abs(), vec![distance.signum()]),
            Loss::Gaussian => {
                let scaled = distance * (-outputs[1]).exp();
                (
                    outputs[1] + scaled * scaled / 2.0,
                    vec![scaled * (-outputs[1]).exp(), 1.0 - scaled * scaled],
                )
            }
        }
    }
}

const INPUTS: usize = 8;
const CLASSES: usize = 4;
const HIDDEN: usize = 32;
/// Tensors of the network: weight and bias of each layer.
pub const TENSORS: usize = 6;

/// Examples, the last of which are for validation.
#[derive(Clone, Debug)]
pub struct Data {
    pub inputs: Vec<Vec<f64>>,
    pub labels: Vec<f64>,
}

const TRAINING: usize = 1024;
const VALIDATION: usize = 512;

impl Data {
    /// Classes or numbers that another network gives; numbers with noise.
    pub fn new(loss: Loss, seed: u64) -> Self {
        let teacher = Network { sizes: vec![INPUTS, 12, CLASSES] };
        let weights: Vec<Vec<f64>> = (teacher.shapes().iter().enumerate())
            .map(|(k, shape)| {
                uniform(seed + k as u64, shape.iter().product()).iter().map(|x| 2.0 * x).collect()
            })
            .collect();
        let example = |i: usize| {
            let input = uniform(seed ^ (i as u64 + 1) << 20, INPUTS + 1);
            let (noise, input) = (input[INPUTS], input[..INPUTS].to_vec());
            let outputs = teacher.outputs(&weights, &input).pop().unwrap();
            let best = (0..CLASSES).max_by(|&a, &b| outputs[a].total_cmp(&outputs[b])).unwrap();
            let number = outputs[0] / 2.0 + 0.1 * noise;
            (input, if matches!(loss, Loss::CrossEntropy) { best as f64 } else { number })
        };
        let (inputs, labels) = (0..TRAINING + VALIDATION).map(example).unzip();
        Self { inputs, labels }
    }
}

/// Full layers with the hyperbolic tangent between them.
struct Network {
    sizes: Vec<usize>,
}

impl Network {
    fn shapes(&self) -> Vec<Vec<usize>> {
        self.sizes.windows(2).flat_map(|pair| [vec![pair[1], pair[0]], vec![pair[1]]]).collect()
    }

    /// What each layer puts out, the input first.
    fn outputs(&self, weights: &[Vec<f64>], input: &[f64]) -> Vec<Vec<f64>> {
        let mut outputs = vec![input.to_vec()];
        let layers = self.sizes.len() - 1;
        for layer in 0..layers {
            let input = &outputs[layer];
            let (weight, bias) = (&weights[2 * layer], &weights[2 * layer + 1]);
            let sums = weight.chunks(input.len()).zip(bias);
            let sums = sums.map(|(row, bias)| row.iter().zip(input).map(|(w, x)| w * x).sum::<f64>() + bias);
            let next = if layer + 1 < layers { sums.map(f64::tanh).collect() } else { sums.collect() };
            outputs.push(next);
        }
        outputs
    }

    /// The mean loss of examples and its gradient.
    fn gradient(
        &self,
        weights: &[Vec<f64>],
        loss: Loss,
        data: &Data,
        examples: &[usize],
    ) -> (f64, Vec<Vec<f64>>) {
        let mut gradient: Vec<Vec<f64>> = weights.iter().map(|w| vec![0.0; w.len()]).collect();
        let mut sum = 0.0;
        let share = 1.0 / examples.len() as f64;
        for &i in examples {
            let outputs = self.outputs(weights, &data.inputs[i]);
            let (own, mut back) = loss.at(outputs.last().unwrap(), data.labels[i]);
            sum += share * own;
            for layer in (0..self.sizes.len() - 1).rev() {
                let input = &outputs[layer];
                let mut before = vec![0.0; input.len()];
                for (row, &back) in back.iter().enumerate() {
                    gradient[2 * layer + 1][row] += share * back;
                    for (k, x) in input.iter().enumerate() {
                        let at = row * input.len() + k;
                        gradient[2 * layer][at] += share * back * x;
                        before[k] += back * weights[2 * layer][at];
                    }
                }
                // Of the hyperbolic tangent; the input has none.
                back = before.iter().zip(input).map(|(b, x)| b * (1.0 - x * x)).collect();
            }
        }
        (sum, gradient)
    }
}

/// What a loop does to loss and gradients between network and optimizer.
pub type Meddling<'a> = &'a dyn Fn(&mut f64, &mut [Vec<f64>]);

/// How a network is trained.
#[derive(Clone)]
pub struct Training<'a> {
    pub loss: Loss,
    pub steps: usize,
    pub adaptive: Adaptive,
    pub options: Options,
    pub dtype: DType,
    pub meddling: Meddling<'a>,
    /// The one tensor of group 1; all others are of group 0.
    pub apart: Option<usize>,
    /// A tensor without gradient.
    pub frozen: Option<usize>,
}

impl Training<'_> {
    pub fn new(loss: Loss) -> Self {
        Self {
            loss,
            steps: 400,
            adaptive: Adaptive::default(),
            options: Options::default(),
            dtype: DType::F32,
            meddling: &|_, _| {},
            apart: None,
            frozen: None,
        }
    }

    fn network(&self) -> Network {
        Network { sizes: vec![INPUTS, HIDDEN, HIDDEN, self.loss.outputs()] }
    }

    pub fn optimizer(&self) -> Optimizer {
        let spec = |(k, shape): (usize, &Vec<usize>)| {
            let group = usize::from(self.apart == Some(k));
            TensorSpec::new(format!("t{k}"), shape, self.dtype).in_group(group)
        };
        let specs = self.network().shapes().iter().enumerate().map(spec).collect();
        Optimizer::new(self.adaptive, self.options.clone(), specs).unwrap()
    }

    /// Weights as layers are commonly begun with.
    pub fn start(&self, seed: u64) -> Vec<Owned> {
        let network = self.network();
        (network.shapes().iter().enumerate())
            .map(|(k, shape)| {
                let size = 1.0 / (network.sizes[k / 2] as f64).sqrt();
                let draws = uniform(seed ^ (k as u64 + 1) << 50, shape.iter().product());
                Owned::from_f64(self.dtype, &draws.iter().map(|x| size * x).collect::<Vec<_>>())
            })
            .collect()
    }

    /// Steps on batches of 32.
    pub fn go_on(
        &self,
        optimizer: &mut Optimizer,
        values: &mut [Owned],
        data: &Data,
        seed: u64,
    ) -> Vec<StepReport> {
        (0..self.steps)
            .map(|step| {
                let draws = uniform(seed ^ (step as u64 + 1) << 30, 32);
                let batch: Vec<usize> =
                    draws.iter().map(|x| ((x + 1.0) / 2.0 * TRAINING as f64) as usize).collect();
                let weights: Vec<Vec<f64>> = values.iter().map(Owned::to_f64).collect();
                let (mut loss, mut gradient) = self.network().gradient(&weights, self.loss, data, &batch);
                (self.meddling)(&mut loss, &mut gradient);
                let gradient: Vec<Owned> = gradient.iter().map(|g| Owned::from_f64(self.dtype, g)).collect();
                let mut gradient = grads(&gradient);
                if let Some(frozen) = self.frozen {
                    gradient[frozen] = rfdescent::GradRef::Missing;
                }
                optimizer.step(&mut params(values), &gradient, &StepInput::new(loss)).unwrap()
            })
            .collect()
    }

    /// The loss on examples for validation.
    pub fn validation(&self, values: &[Owned], data: &Data) -> f64 {
        let weights: Vec<Vec<f64>> = values.iter().map(Owned::to_f64).collect();
        let network = self.network();
        let one = |i: usize| {
            let outputs = network.outputs(&weights, &data.inputs[i]);
            self.loss.at(outputs.last().unwrap(), data.labels[i]).0
        };
        (TRAINING..TRAINING + VALIDATION).map(one).sum::<f64>() / VALIDATION as f64
    }

    /// A whole training; its loss in validation.
    pub fn run(&self, data: &Data, seed: u64) -> f64 {
        let (mut optimizer, mut values) = (self.optimizer(), self.start(seed));
        self.go_on(&mut optimizer, &mut values, data, seed);
        self.validation(&values, data)
    }
}
