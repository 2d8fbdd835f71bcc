//! Borrowed tensors in the number formats that a step accepts.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// A number format.
// Each stands in this file and in `backend::cpu` (element.rs), on the device in `kernels/abi.h` and
// `kernels/formats.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary64.
    F64,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    BF16,
}

impl DType {
    /// The names of all formats, in the order in which they are declared.
    pub(crate) const NAMES: &[&str] = &["f32", "f64", "f16", "bf16"];

    /// Its number in the structs that are shared with the kernels.
    pub(crate) const fn number(self) -> u32 {
        self as u32
    }

    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            DType::F16 | DType::BF16 => 2,
            DType::F32 => 4,
            DType::F64 => 8,
        }
    }

    /// Whether it is a half-precision format, whose parameters may have master weights.
    pub const fn is_half(self) -> bool {
        matches!(self, DType::F16 | DType::BF16)
    }

    /// The format of the velocities of parameters of this one: f64 for f64, else f32.
    pub const fn state(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            DType::F32 | DType::F16 | DType::BF16 => DType::F32,
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(Self::NAMES[*self as usize])
    }
}

/// The elements of one parameter tensor, to be changed in place. Make one with `ParamMut::from(&mut
/// values[..])`.
#[derive(Debug)]
pub enum ParamMut<'a> {
    /// f32 elements.
    F32(&'a mut [f32]),
    /// f64 elements.
    F64(&'a mut [f64]),
    /// f16 elements.
    F16(&'a mut [f16]),
    /// bf16 elements.
    BF16(&'a mut [bf16]),
}

/// The elements of one gradient, in any format whatever that of the parameter. Make one with
/// `GradRef::from(&values[..])`.
#[derive(Clone, Copy, Debug)]
pub enum GradRef<'a> {
    /// f32 elements.
    F32(&'a [f32]),
    /// f64 elements.
    F64(&'a [f64]),
    /// f16 elements.
    F16(&'a [f16]),
    /// bf16 elements.
    BF16(&'a [bf16]),
    /// No gradient in this step: the tensor stays as it is and counts in no norm.
    Missing,
}

/// Runs `$body` with `$t` for the type of a format's elements.
macro_rules! each_dtype {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            $crate::tensor::DType::F32 => {
                type $t = f32;
                $body
            }
            $crate::tensor::DType::F64 => {
                type $t = f64;
                $body
            }
            $crate::tensor::DType::F16 => {
                type $t = half::f16;
                $body
            }
            $crate::tensor::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
        }
    };
}

/// Runs `$body` with `$p` bound to the elements of a parameter, `$double` where they are f64.
macro_rules! each_param {
    ($param:expr, $p:ident => $body:expr) => {
        $crate::tensor::each_param!($param, $p => $body, f64 => $body)
    };
    ($param:expr, $p:ident => $body:expr, f64 => $double:expr) => {
        match $param {
            $crate::tensor::ParamMut::F64($p) => $double,
            $crate::tensor::ParamMut::F32($p) => $body,
            $crate::tensor::ParamMut::F16($p) => $body,
            $crate::tensor::ParamMut::BF16($p) => $body,
        }
    };
}

/// Runs `$body` with `$g` bound to the elements of a gradient, `$double` where they are f64, `$missing` where
/// there are none.
macro_rules! each_grad {
    ($grad:expr, $g:ident => $body:expr, missing => $missing:expr) => {
        $crate::tensor::each_grad!($grad, $g => $body, f64 => $body, missing => $missing)
    };
    ($grad:expr, $g:ident => $body:expr, f64 => $double:expr, missing => $missing:expr) => {
        match $grad {
            $crate::tensor::GradRef::F64($g) => $double,
            $crate::tensor::GradRef::F32($g) => $body,
            $crate::tensor::GradRef::F16($g) => $body,
            $crate::tensor::GradRef::BF16($g) => $body,
            $crate::tensor::GradRef::Missing => $missing,
        }
    };
}

pub(crate) use {each_dtype, each_grad, each_param};

impl<'a> ParamMut<'a> {
    /// The number format.
    pub fn dtype(&self) -> DType {
        match self {
            ParamMut::F32(_) => DType::F32,
            ParamMut::F64(_) => DType::F64,
            ParamMut::F16(_) => DType::F16,
            ParamMut::BF16(_) => DType::BF16,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        each_param!(self, p => p.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same elements, borrowed for a shorter time.
    pub fn reborrow(&mut self) -> ParamMut<'_> {
        each_param!(self, p => (&mut **p).into())
    }

    /// Its values, to be read.
    pub(crate) fn as_values(&self) -> GradRef<'_> {
        each_param!(self, p => GradRef::from(&p[..]))
    }

    /// Takes the elements from one on off, of which there must be as many before.
    pub(crate) fn split_off(&mut self, first: usize) -> ParamMut<'a> {
        each_param!(self, p => p.split_off_mut(first..).unwrap_or_default().into())
    }
}

impl<'a> GradRef<'a> {
    /// Number of elements, `None` for a missing gradient.
    pub fn len(&self) -> Option<usize> {
        each_grad!(self, g => Some(g.len()), missing => None)
    }

    /// Whether there are no elements; a missing gradient has none.
    pub fn is_empty(&self) -> bool {
        self.len().unwrap_or(0) == 0
    }

    /// Elements `start..start + count`; a missing gradient stays missing.
    #[inline]
    pub(crate) fn slice(self, start: usize, count: usize) -> GradRef<'a> {
        let range = start..start + count;
        each_grad!(self, g => (&g[range]).into(), missing => GradRef::Missing)
    }
}

macro_rules! conversions {
    ($($t:ty => $variant:ident),*) => {$(
        impl<'a> From<&'a mut [$t]> for ParamMut<'a> {
            fn from(values: &'a mut [$t]) -> Self {
                ParamMut::$variant(values)
            }
        }
        impl<'a> From<&'a [$t]> for GradRef<'a> {
            fn from(values: &'a [$t]) -> Self {
                GradRef::$variant(values)
            }
        }
    )*};
}
conversions!(f32 => F32, f64 => F64, f16 => F16, bf16 => BF16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_at_the_numbers_of_their_formats() {
        for (number, name) in DType::NAMES.iter().enumerate() {
            let dtype: DType = serde_json::from_str(&format!("\"{name}\"")).unwrap();
            assert_eq!((dtype.number() as usize, dtype.to_string().as_str()), (number, *name));
        }
    }
}
