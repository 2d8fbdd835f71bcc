//! Number formats: how blocks of f32, f64, f16 and bf16 become the format that is computed in, and back.

use std::ops::{Add, Mul, Sub};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::rounding::StochasticBits;
use crate::tensor::{ParamMut, each_param};

/// Elements converted at a time: three buffers of this many f64 fit in the first-level cache.
pub(super) const BLOCK: usize = 1024;

/// A format that is computed in: f64 where parameter or gradient is f64, f32 everywhere else.
pub(super) trait Compute:
    Copy + Send + Sync + Default + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self>
{
    /// Rounded to nearest; a value beyond the largest finite one becomes that one, so that 0·coefficient
    /// stays 0.
    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
    fn from_f32(x: f32) -> Self;
}

impl Compute for f32 {
    #[inline(always)]
    fn from_f64(x: f64) -> Self {
        (x as f32).clamp(-f32::MAX, f32::MAX)
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Compute for f64 {
    #[inline(always)]
    fn from_f64(x: f64) -> Self {
        x.clamp(-f64::MAX, f64::MAX)
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        f64::from(x)
    }
}

/// A format that can be read as `T`, exactly.
pub(super) trait Load<T>: Copy + Send + Sync {
    /// The values as `T`: the slice itself where the formats agree, else converted into `buffer`.
    fn load<'a>(values: &'a [Self], buffer: &'a mut [T]) -> &'a [T];
}

/// A format that `G` can be read as, exactly.
pub(super) trait Read<G>: Sized {
    /// As [`Load::load`].
    fn read<'a>(values: &'a [G], buffer: &'a mut [Self]) -> &'a [Self];
}

impl<T, G: Load<T>> Read<G> for T {
    #[inline(always)]
    fn read<'a>(values: &'a [G], buffer: &'a mut [T]) -> &'a [T] {
        G::load(values, buffer)
    }
}

/// A format that results in `T` can be written to.
pub(super) trait Store<T>: Load<T> {
    /// Lets `change` work on the values as `T`, in place where the formats agree, and writes them back
    /// rounded to nearest, or stochastically where `bits` are given and the format is a half-precision one.
    fn modify(
        values: &mut [Self],
        buffer: &mut [T],
        bits: Option<&StochasticBits>,
        change: impl FnOnce(&mut [T]),
    );
}

/// A format of velocities. Gradients of any format but f64 can be read as it.
pub(super) trait State:
    Compute + Store<Self> + Store<f64> + Read<f32> + Read<f16> + Read<bf16>
{
}
impl State for f32 {}
impl State for f64 {}

/// A format of parameters.
pub(super) trait Parameter: Store<Self::State> + Store<f64> {
    /// The format of the velocity: f64 for f64 parameters, f32 for all others.
    type State: State;

    /// The values as f32, rounded to nearest where they are f64.
    fn to_f32(values: &[Self]) -> Vec<f32>;

    /// Writes f32, rounded to nearest.
    fn set_f32(values: &mut [Self], from: &[f32]);
}

macro_rules! same_format {
    ($t:ty) => {
        impl Load<$t> for $t {
            #[inline(always)]
            fn load<'a>(values: &'a [$t], _: &'a mut [$t]) -> &'a [$t] {
                values
            }
        }
        impl Store<$t> for $t {
            #[inline(always)]
            fn modify(
                values: &mut [$t],
                _: &mut [$t],
                _: Option<&StochasticBits>,
                change: impl FnOnce(&mut [$t]),
            ) {
                change(values);
            }
        }
    };
}
same_format!(f32);
same_format!(f64);

impl Load<f64> for f32 {
    #[inline(always)]
    fn load<'a>(values: &'a [f32], buffer: &'a mut [f64]) -> &'a [f64] {
        let buffer = &mut buffer[..values.len()];
        for (wide, &value) in buffer.iter_mut().zip(values) {
            *wide = f64::from(value);
        }
        buffer
    }
}

impl Store<f64> for f32 {
    #[inline(always)]
    fn modify(
        values: &mut [f32],
        buffer: &mut [f64],
        _: Option<&StochasticBits>,
        change: impl FnOnce(&mut [f64]),
    ) {
        let buffer = &mut buffer[..values.len()];
        f32::load(values, buffer);
        change(buffer);
        for (value, &wide) in values.iter_mut().zip(buffer.iter()) {
            *value = wide as f32;
        }
    }
}

macro_rules! half_format {
    ($t:ty, $widen:ident, $narrow:ident, $stochastic:ident) => {
        impl Load<f32> for $t {
            #[inline(always)]
            fn load<'a>(values: &'a [$t], buffer: &'a mut [f32]) -> &'a [f32] {
                let buffer = &mut buffer[..values.len()];
                $widen(values, buffer);
                buffer
            }
        }
        impl Load<f64> for $t {
            #[inline(always)]
            fn load<'a>(values: &'a [$t], buffer: &'a mut [f64]) -> &'a [f64] {
                let buffer = &mut buffer[..values.len()];
                for (wide, &value) in buffer.iter_mut().zip(values) {
                    *wide = f64::from(value);
                }
                buffer
            }
        }
        impl Store<f32> for $t {
            #[inline(always)]
            fn modify(
                values: &mut [$t],
                buffer: &mut [f32],
                bits: Option<&StochasticBits>,
                change: impl FnOnce(&mut [f32]),
            ) {
                let buffer = &mut buffer[..values.len()];
                <$t as Load<f32>>::load(values, buffer);
                change(buffer);
                match bits {
                    None => $narrow(buffer, values),
                    Some(bits) => bits.$stochastic(buffer, values),
                }
            }
        }
        impl Store<f64> for $t {
            // Through f32, as on a GPU, where only f32 converts to half formats in hardware.
            #[inline(always)]
            fn modify(
                values: &mut [$t],
                buffer: &mut [f64],
                bits: Option<&StochasticBits>,
                change: impl FnOnce(&mut [f64]),
            ) {
                let buffer = &mut buffer[..values.len()];
                <$t as Load<f64>>::load(values, buffer);
                change(buffer);
                let mut single = [0.0_f32; BLOCK];
                let single = &mut single[..values.len()];
                for (narrow, &wide) in single.iter_mut().zip(buffer.iter()) {
                    *narrow = wide as f32;
                }
                match bits {
                    None => $narrow(single, values),
                    Some(bits) => bits.$stochastic(single, values),
                }
            }
        }
        impl Parameter for $t {
            type State = f32;
            fn to_f32(values: &[$t]) -> Vec<f32> {
                values.to_f32_vec()
            }
            #[inline(always)]
            fn set_f32(values: &mut [$t], from: &[f32]) {
                $narrow(from, values);
            }
        }
    };
}
half_format!(f16, widen_f16, narrow_f16, round_f16);
half_format!(bf16, widen_bf16, narrow_bf16, round_bf16);

impl Parameter for f32 {
    type State = f32;
    fn to_f32(values: &[f32]) -> Vec<f32> {
        values.to_vec()
    }
    #[inline(always)]
    fn set_f32(values: &mut [f32], from: &[f32]) {
        values.copy_from_slice(from);
    }
}

impl Parameter for f64 {
    type State = f64;
    fn to_f32(values: &[f64]) -> Vec<f32> {
        values.iter().map(|&x| x as f32).collect()
    }
    #[inline(always)]
    fn set_f32(values: &mut [f64], from: &[f32]) {
        for (value, &single) in values.iter_mut().zip(from) {
            *value = f64::from(single);
        }
    }
}

/// `half` converts f16 by the processor's own instructions where it has them.
#[inline(always)]
fn widen_f16(from: &[f16], to: &mut [f32]) {
    from.convert_to_f32_slice(to);
}

/// Rounds f32 to f16, to nearest.
#[inline(always)]
fn narrow_f16(from: &[f32], to: &mut [f16]) {
    to.convert_from_f32_slice(from);
}

/// bf16 is the upper half of an f32. Written out, because the compiler turns this into vector code, which
/// `half`'s conversion of one element is not.
#[inline(always)]
fn widen_bf16(from: &[bf16], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}

/// Rounds f32 to bf16, to nearest, ties to even; a NaN becomes a quiet one.
#[inline(always)]
fn narrow_bf16(from: &[f32], to: &mut [bf16]) {
    for (to, from) in to.iter_mut().zip(from) {
        let bits = from.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        *to = bf16::from_bits(if from.is_nan() { quiet } else { rounded } as u16);
    }
}

/// The elements as f32, rounded to nearest where they are f64.
pub(crate) fn to_f32(param: &ParamMut<'_>) -> Vec<f32> {
    each_param!(param, p => Parameter::to_f32(p))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_converts_as_the_half_crate_does() {
        let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let mut wide = vec![0.0; all.len()];
        widen_bf16(&all, &mut wide);
        for (wide, narrow) in wide.iter().zip(&all) {
            assert!(wide.to_bits() == narrow.to_f32().to_bits() || narrow.is_nan() && wide.is_nan());
        }
        // every bf16 and the f32 around it: ties, just below and above them, ends of the range
        let near = (0..=u16::MAX).flat_map(|b| {
            [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF].map(|low| f32::from_bits(u32::from(b) << 16 | low))
        });
        let from: Vec<f32> = near.collect();
        let mut to = vec![bf16::ZERO; from.len()];
        narrow_bf16(&from, &mut to);
        for (from, to) in from.iter().zip(to) {
            assert_eq!(to.to_bits(), bf16::from_f32(*from).to_bits(), "{from:e}");
        }
    }
}
