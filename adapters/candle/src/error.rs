//! The library's errors as candle's.

use std::fmt::Display;

/// Wraps an error of the library; the text stays as it is.
pub(crate) fn wrap(error: rfdescent::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

/// An error about one tensor.
pub(crate) fn tensor(name: &str, problem: impl Display) -> candle_core::Error {
    wrap(rfdescent::Error::Tensor { tensor: name.into(), problem: problem.to_string() })
}

/// An error about an argument.
pub(crate) fn invalid(name: &str, value: impl Display, expected: &str) -> candle_core::Error {
    wrap(rfdescent::Error::InvalidArgument {
        name: name.into(),
        value: value.to_string(),
        expected: expected.into(),
    })
}
