//! Tensors that own their elements, and pseudo-random numbers, for the suites of the optimizer.
#![allow(dead_code)] // each suite uses a part

use half::{bf16, f16};
use rfdescent::covariance::{Family, Model};
use rfdescent::optimizer::{Fitted, LocalSums, Optimizer};
use rfdescent::{DType, GradRef, Moments, ParamMut};

pub const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

#[derive(Clone, Debug, PartialEq)]
pub enum Owned {
    F32(Vec<f32>),
    F64(Vec<f64>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

impl Owned {
    /// Half formats by way of f32: `half` 2.7 truncates an f64 before it rounds, so that near ties come out
    /// wrong.
    pub fn from_f64(dtype: DType, values: &[f64]) -> Self {
        match dtype {
            DType::F32 => Owned::F32(values.iter().map(|&x| x as f32).collect()),
            DType::F64 => Owned::F64(values.to_vec()),
            DType::F16 => Owned::F16(values.iter().map(|&x| f16::from_f32(x as f32)).collect()),
            DType::BF16 => Owned::BF16(values.iter().map(|&x| bf16::from_f32(x as f32)).collect()),
        }
    }

    pub fn to_f64(&self) -> Vec<f64> {
        match self {
            Owned::F32(v) => v.iter().map(|&x| f64::from(x)).collect(),
            Owned::F64(v) => v.clone(),
            Owned::F16(v) => v.iter().map(|&x| f64::from(x)).collect(),
            Owned::BF16(v) => v.iter().map(|&x| f64::from(x)).collect(),
        }
    }

    pub fn dtype(&self) -> DType {
        match self {
            Owned::F32(_) => DType::F32,
            Owned::F64(_) => DType::F64,
            Owned::F16(_) => DType::F16,
            Owned::BF16(_) => DType::BF16,
        }
    }

    pub fn param(&mut self) -> ParamMut<'_> {
        match self {
            Owned::F32(v) => (&mut v[..]).into(),
            Owned::F64(v) => (&mut v[..]).into(),
            Owned::F16(v) => (&mut v[..]).into(),
            Owned::BF16(v) => (&mut v[..]).into(),
        }
    }

    pub fn grad(&self) -> GradRef<'_> {
        match self {
            Owned::F32(v) => v[..].into(),
            Owned::F64(v) => v[..].into(),
            Owned::F16(v) => v[..].into(),
            Owned::BF16(v) => v[..].into(),
        }
    }

    /// Bit patterns, so that NaN and −0 compare as they are.
    pub fn bits(&self) -> Vec<u64> {
        match self {
            Owned::F32(v) => v.iter().map(|x| u64::from(x.to_bits())).collect(),
            Owned::F64(v) => v.iter().map(|x| x.to_bits()).collect(),
            Owned::F16(v) => v.iter().map(|x| u64::from(x.to_bits())).collect(),
            Owned::BF16(v) => v.iter().map(|x| u64::from(x.to_bits())).collect(),
        }
    }
}

/// What an all-reduce does: each rank has the sums of all.
pub fn add_up(ranks: &mut [LocalSums]) {
    let mut total = vec![0.0; ranks[0].values().len()];
    for sums in &*ranks {
        total.iter_mut().zip(sums.values()).for_each(|(total, term)| *total += term);
    }
    ranks.iter_mut().for_each(|sums| sums.values_mut().copy_from_slice(&total));
}

pub fn params(owned: &mut [Owned]) -> Vec<ParamMut<'_>> {
    owned.iter_mut().map(Owned::param).collect()
}

pub fn grads(owned: &[Owned]) -> Vec<GradRef<'_>> {
    owned.iter().map(Owned::grad).collect()
}

pub fn bits(owned: &[Owned]) -> Vec<Vec<u64>> {
    owned.iter().map(Owned::bits).collect()
}

/// Unit roundoff: half the distance from 1 to the next number.
pub fn roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2f64.powi(-24),
        DType::F64 => 2f64.powi(-53),
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
    }
}

/// The smallest positive number.
pub fn smallest(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2f64.powi(-149),
        DType::F64 => 5e-324,
        DType::F16 => 2f64.powi(-24),
        DType::BF16 => 2f64.powi(-133),
    }
}

/// SplitMix64: `count` numbers, uniform in [−1, 1).
pub fn uniform(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (0..count)
        .map(|_| {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((z ^ (z >> 31)) >> 11) as f64 * 2f64.powi(-52) - 1.0
        })
        .collect()
}

/// A model as a small network has it.
pub fn moments() -> Moments {
    Moments {
        mean: 2.5,
        variance: 0.01,
        noise_variance: 0.9,
        grad_variance: 5.0,
        noise_grad_variance: 300.0,
        dims: 20_000,
    }
}

pub fn model(family: Family) -> Model {
    Model::new(family, moments()).unwrap()
}

/// Its method, with momentum.
pub fn moving(momentum: f64) -> Fitted {
    Fitted::new(model(Family::SquaredExponential)).with_momentum(momentum)
}

/// A state that can't be loaded, for a reason with all these parts.
pub fn refused(optimizer: &mut Optimizer, state: &[u8], parts: &[&str]) {
    let before = optimizer.state_to_bytes().unwrap();
    let message = optimizer.load_state_from_bytes(state).unwrap_err().to_string();
    assert!(message.starts_with("optimizer state: "), "{message}");
    for part in parts {
        assert!(message.contains(part), "{part} in {message}");
    }
    assert!(before == optimizer.state_to_bytes().unwrap(), "a refused state changes nothing");
}
