//! The one error type of the crate. Every message names the file, row, tensor or option at fault and says
//! what to do.

use std::path::PathBuf;

/// What can go wrong, by what the caller can do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument lies outside its domain.
    #[error("{name} = {value}: {expected}")]
    InvalidArgument {
        /// The argument's public name, e.g. `conservatism`.
        name: String,
        /// The value that was given.
        value: String,
        /// What it has to be.
        expected: String,
    },
    /// The operating system refused to read or write a file.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file was read but what it holds is not what it should be.
    #[error("{path}: {problem}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, where (row, column or key) and what to do.
        problem: String,
    },
    /// The samples do not determine the covariance.
    #[error("{0}")]
    Estimation(#[from] crate::estimation::EstimationError),
    /// A tensor does not fit the optimizer, or its descriptor is wrong.
    #[error("tensor `{tensor}`: {problem}")]
    Tensor {
        /// Name of the tensor, as given to the optimizer.
        tensor: String,
        /// What is wrong and what to do.
        problem: String,
    },
    /// A device or its driver is missing, unsuitable, or failed; the message says what to do.
    #[error("{0}")]
    Device(String),
    /// A saved optimizer state does not belong to this optimizer, or is damaged.
    #[error("optimizer state: {0}")]
    State(String),
}

impl Error {
    /// Shorthand for [`Error::InvalidArgument`].
    pub(crate) fn invalid(name: &str, value: impl ToString, expected: impl ToString) -> Self {
        Error::InvalidArgument { name: name.into(), value: value.to_string(), expected: expected.to_string() }
    }

    /// Shorthand for [`Error::Tensor`].
    pub(crate) fn tensor(tensor: &str, problem: impl ToString) -> Self {
        Error::Tensor { tensor: tensor.into(), problem: problem.to_string() }
    }
}

/// `Result` with the crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
