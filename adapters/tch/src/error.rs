//! The error type: the library's own, or libtorch's.

use tch::TchError;

/// What can go wrong. Every message names the tensor or option at fault and says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor, an option, a device or a file does not fit.
    #[error(transparent)]
    Rfd(#[from] rfdescent::Error),
    /// libtorch refused, for example to go backward from a loss without a graph. As text its first line; the
    /// source has libtorch's stack trace too.
    #[error("libtorch: {}", first_line(.0))]
    Torch(#[from] TchError),
}

/// `Result` with the crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A tensor does not fit.
    pub(crate) fn tensor(name: &str, problem: impl Into<String>) -> Self {
        rfdescent::Error::Tensor { tensor: name.into(), problem: problem.into() }.into()
    }

    /// An argument lies outside its domain.
    pub(crate) fn invalid(name: &str, value: impl ToString, expected: impl Into<String>) -> Self {
        let (name, value, expected) = (name.into(), value.to_string(), expected.into());
        rfdescent::Error::InvalidArgument { name, value, expected }.into()
    }
}

fn first_line(error: &TchError) -> String {
    error.to_string().lines().next().unwrap_or_default().into()
}
