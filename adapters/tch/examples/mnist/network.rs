//! The network of `rfdescent train`, initialised like its.

use tch::nn::{self, Init, ModuleT};
use tch::{Kind, Tensor};

const WIDTHS: [i64; 4] = [784, 512, 256, 10];

pub struct Network {
    layers: nn::SequentialT,
}

impl Network {
    pub fn new(root: nn::Path<'_>) -> Self {
        let mut layers = nn::seq_t();
        for (number, ends) in (1..).zip(WIDTHS.windows(2)) {
            if number > 1 {
                layers = layers.add_fn(Tensor::relu);
            }
            // PyTorch's default.
            let bound = 1.0 / (ends[0] as f64).sqrt();
            let uniform = Init::Uniform { lo: -bound, up: bound };
            let linear = nn::LinearConfig { ws_init: uniform, bs_init: Some(uniform), bias: true };
            let norm = nn::BatchNormConfig { ws_init: Init::Const(1.0), ..Default::default() };
            layers = layers
                .add(nn::linear(&root / format!("linear{number}"), ends[0], ends[1], linear))
                .add(nn::batch_norm1d(&root / format!("norm{number}"), ends[1], norm));
        }
        Self { layers }
    }

    /// Mean cross-entropy of a batch in training mode.
    pub fn loss(&self, images: &Tensor, labels: &Tensor) -> Tensor {
        self.layers.forward_t(images, true).cross_entropy_for_logits(labels)
    }

    /// Mean cross-entropy and share of right answers.
    pub fn evaluate(&self, images: &Tensor, labels: &Tensor) -> (f64, f64) {
        tch::no_grad(|| {
            let logits = self.layers.forward_t(images, false);
            let right = logits.argmax(1, false).eq_tensor(labels).to_kind(Kind::Double).mean(Kind::Double);
            (logits.cross_entropy_for_logits(labels).double_value(&[]), right.double_value(&[]))
        })
    }
}
