//! Borrowed tensors in the number formats that a step accepts.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// A number format.
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
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
        })
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

/// Runs `$body` with `$slice` bound to the elements, whatever their format.
macro_rules! each_format {
    ($value:expr, $slice:ident => $body:expr) => {
        match $value {
            ParamMut::F32($slice) => $body,
            ParamMut::F64($slice) => $body,
            ParamMut::F16($slice) => $body,
            ParamMut::BF16($slice) => $body,
        }
    };
}

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
        each_format!(self, p => p.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same elements, borrowed for a shorter time.
    pub fn reborrow(&mut self) -> ParamMut<'_> {
        match self {
            ParamMut::F32(p) => ParamMut::F32(p),
            ParamMut::F64(p) => ParamMut::F64(p),
            ParamMut::F16(p) => ParamMut::F16(p),
            ParamMut::BF16(p) => ParamMut::BF16(p),
        }
    }

    /// The first `at` elements and the rest.
    pub(crate) fn split_at(self, at: usize) -> (ParamMut<'a>, ParamMut<'a>) {
        each_format!(self, p => {
            let (head, tail) = p.split_at_mut(at);
            (head.into(), tail.into())
        })
    }
}

impl<'a> GradRef<'a> {
    /// Number of elements, `None` for a missing gradient.
    pub fn len(&self) -> Option<usize> {
        match self {
            GradRef::F32(g) => Some(g.len()),
            GradRef::F64(g) => Some(g.len()),
            GradRef::F16(g) => Some(g.len()),
            GradRef::BF16(g) => Some(g.len()),
            GradRef::Missing => None,
        }
    }

    /// Whether there are no elements; a missing gradient has none.
    pub fn is_empty(&self) -> bool {
        self.len().unwrap_or(0) == 0
    }

    /// Elements `start..start + count`; a missing gradient stays missing.
    pub(crate) fn slice(self, start: usize, count: usize) -> GradRef<'a> {
        let range = start..start + count;
        match self {
            GradRef::F32(g) => GradRef::F32(&g[range]),
            GradRef::F64(g) => GradRef::F64(&g[range]),
            GradRef::F16(g) => GradRef::F16(&g[range]),
            GradRef::BF16(g) => GradRef::BF16(&g[range]),
            GradRef::Missing => GradRef::Missing,
        }
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
