//! The runs whose states `tests/data/states` holds, in words that every front end can follow: parameters,
//! gradients and losses are small multiples of powers of two, exact in every format.
#![allow(dead_code)] // each suite uses a part

use std::path::PathBuf;

use rfdescent::{DType, Moments};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Fitted,
    Adaptive,
}

pub struct Tensor {
    pub name: &'static str,
    pub shape: &'static [usize],
    pub dtype: DType,
    pub group: usize,
    /// Whether it has a gradient, in the parameter's format.
    pub used: bool,
}

const fn tensor(
    name: &'static str,
    shape: &'static [usize],
    dtype: DType,
    group: usize,
    used: bool,
) -> Tensor {
    Tensor { name, shape, dtype, group, used }
}

/// Matérn 5/2, 1/b = 1/128, master weights. Group 0 has momentum 0.9, group 1 momentum 0.5, weight decay 1/64
/// and the length-scale factor 1.25.
const FITTED: [Tensor; 6] = [
    tensor("layer.weight", &[3, 4], DType::F32, 0, true),
    tensor("layer.bias", &[4], DType::F32, 1, true),
    tensor("half.weight", &[2, 3], DType::BF16, 0, true),
    tensor("half.bias", &[3], DType::F16, 1, true),
    tensor("double", &[5], DType::F64, 1, true),
    tensor("unused", &[2], DType::F32, 0, false),
];

/// The defaults, and master weights.
const ADAPTIVE: [Tensor; 3] = [
    tensor("weight", &[3, 4], DType::F32, 0, true),
    tensor("bias", &[4], DType::BF16, 0, true),
    tensor("gain", &[1], DType::F32, 0, true),
];

pub fn moments() -> Moments {
    Moments {
        mean: 2.5,
        variance: 0.0625,
        noise_variance: 1.0,
        grad_variance: 8.0,
        noise_grad_variance: 256.0,
        dims: 32,
    }
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Fitted => "fitted",
            Kind::Adaptive => "adaptive",
        }
    }

    pub fn tensors(self) -> &'static [Tensor] {
        match self {
            Kind::Fitted => &FITTED,
            Kind::Adaptive => &ADAPTIVE,
        }
    }

    /// Steps before the state was saved, and all steps: of the adaptive method until two windows are
    /// complete.
    pub fn steps(self) -> (usize, usize) {
        match self {
            Kind::Fitted => (6, 11),
            Kind::Adaptive => (22, 35),
        }
    }

    /// Of the step with this number. That of step 3 skips it.
    pub fn loss(self, step: usize) -> f64 {
        let loss = 2.625 - step as f64 / 64.0 + (7 * step % 5) as f64 / 32.0;
        if step == 3 { f64::NAN } else { loss }
    }

    pub fn start(self, tensor: usize) -> Vec<f64> {
        let len: usize = self.tensors()[tensor].shape.iter().product();
        (0..len).map(|i| ((29 * i + 17 * tensor + 5) % 128) as f64 / 64.0 - 1.0).collect()
    }

    pub fn gradient(self, tensor: usize, step: usize) -> Vec<f64> {
        let len: usize = self.tensors()[tensor].shape.iter().product();
        let at = |i: usize| ((37 * i + 53 * tensor + 101 * step + i * step) % 64) as f64;
        (0..len).map(|i| at(i) / 64.0 - 0.5).collect()
    }

    /// What is recorded of the run, the same for all front ends.
    pub fn recorded(self) -> Recorded {
        let text = std::fs::read_to_string(folder().join(format!("{}.txt", self.name()))).unwrap();
        let mut recorded = Recorded { before: Vec::new(), after: Vec::new(), step_size: 0 };
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let mut words = line.split(' ');
            let what = words.next().unwrap();
            let bits = |words: std::str::Split<'_, char>| {
                words.map(|word| u64::from_str_radix(word, 16).unwrap()).collect::<Vec<u64>>()
            };
            match what {
                "step_size" => recorded.step_size = bits(words)[0],
                _ => {
                    let list = if what == "before" { &mut recorded.before } else { &mut recorded.after };
                    assert_eq!(words.next(), Some(self.tensors()[list.len()].name));
                    list.push(bits(words));
                }
            }
        }
        recorded
    }
}

/// Bits, by tensor in the order of the list.
#[derive(Debug, PartialEq)]
pub struct Recorded {
    /// Parameters when the state was saved.
    pub before: Vec<Vec<u64>>,
    /// Parameters after all steps.
    pub after: Vec<Vec<u64>>,
    /// The last step's.
    pub step_size: u64,
}

impl Recorded {
    pub fn text(&self, kind: Kind) -> String {
        let mut text =
            String::from("# Bits of all parameters when the states were saved and after the last step.\n");
        for (what, list) in [("before", &self.before), ("after", &self.after)] {
            for (tensor, bits) in kind.tensors().iter().zip(list) {
                let bits: Vec<String> = bits.iter().map(|bits| format!("{bits:x}")).collect();
                text += &format!("{what} {} {}\n", tensor.name, bits.join(" "));
            }
        }
        text + &format!("step_size {:x}\n", self.step_size)
    }
}

pub fn folder() -> PathBuf {
    // Also from a package of the workspace.
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let root = here.ancestors().find(|folder| folder.join("tests/data/states").is_dir()).unwrap();
    root.join("tests/data/states")
}
