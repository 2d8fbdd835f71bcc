//! The number formats that buffers of cust may have.

use cust::memory::DeviceCopy;
use rfdescent::DType;

mod sealed {
    pub trait Sealed {}
}

/// A number that steps know: f32, f64, and cust's own f16 and bf16, those of half 1.8.
pub trait Element: DeviceCopy + sealed::Sealed {
    /// The library's name for it.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($t:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
elements!(f32 => F32, f64 => F64, half::f16 => F16, half::bf16 => BF16);
