//! Lists of numbers as candle tensors, for the suites and the benchmark.
#![allow(dead_code)] // each suite uses a part

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};

/// The library's, by a link, so that packages hold it too.
pub mod library;

use library::Owned;

/// The numbers in this shape.
pub fn tensor(values: &Owned, shape: &[usize]) -> Tensor {
    let tensor = match values {
        Owned::F32(v) => Tensor::from_slice(v, shape, &Device::Cpu),
        Owned::F64(v) => Tensor::from_slice(v, shape, &Device::Cpu),
        Owned::F16(v) => Tensor::from_slice(v, shape, &Device::Cpu),
        Owned::BF16(v) => Tensor::from_slice(v, shape, &Device::Cpu),
    };
    tensor.unwrap()
}

/// A variable that starts with these numbers.
pub fn var(values: &Owned, shape: &[usize]) -> Var {
    Var::from_tensor(&tensor(values, shape)).unwrap()
}

/// The numbers of a tensor, in order.
pub fn owned(tensor: &Tensor) -> Owned {
    let flat = tensor.flatten_all().unwrap();
    match tensor.dtype() {
        DType::F32 => Owned::F32(flat.to_vec1().unwrap()),
        DType::F64 => Owned::F64(flat.to_vec1().unwrap()),
        DType::F16 => Owned::F16(flat.to_vec1().unwrap()),
        DType::BF16 => Owned::BF16(flat.to_vec1().unwrap()),
        other => panic!("no format of a step: {other:?}"),
    }
}

/// The loss as a number of one element.
pub fn scalar(value: f64) -> Tensor {
    Tensor::new(value, &Device::Cpu).unwrap()
}

/// A store of these gradients.
pub fn store<'a>(gradients: impl IntoIterator<Item = (&'a Var, Tensor)>) -> GradStore {
    // candle makes one by going backwards only; this one's own entry is that of a constant.
    let mut store = scalar(0.0).backward().unwrap();
    for (var, gradient) in gradients {
        store.insert(var, gradient);
    }
    store
}
