//! What ends a command early, by exit status: one line on standard error each.

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::Path;

use crate::numbers::shortened;

/// Why a command ended without doing what it was asked to do.
#[derive(Debug)]
pub enum CliError {
    /// The command line itself is wrong: exit status 2.
    Usage(String),
    /// The data, a file or the run is at fault: exit status 1.
    Data(String),
    /// The user pressed Ctrl-C; the text says what was kept: exit status 130, as shells report it.
    Interrupted(String),
}

impl CliError {
    /// A file that cannot be read, written or understood.
    pub fn file(path: &Path, problem: impl fmt::Display) -> Self {
        CliError::Data(format!("{}: {problem}", path.display()))
    }

    /// What the system says about a file, and what to do about a full disk.
    pub fn io(path: &Path, error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                Self::file(path, format!("{error}; free some space, or write to another place"))
            }
            _ => Self::file(path, error),
        }
    }

    /// The same with something added that the user should know.
    pub fn with(mut self, more: impl fmt::Display) -> Self {
        let (CliError::Usage(text) | CliError::Data(text) | CliError::Interrupted(text)) = &mut self;
        *text += &format!("; {more}");
        self
    }

    /// The process's exit status.
    pub fn exit_code(&self) -> u8 {
        match self {
            CliError::Data(_) => 1,
            CliError::Usage(_) => 2,
            CliError::Interrupted(_) => 130,
        }
    }
}

/// Both outcomes; of two errors, the first with the second added.
pub fn both(first: Result<(), CliError>, second: Result<(), CliError>) -> Result<(), CliError> {
    match (first, second) {
        (Err(first), Err(second)) => Err(first.with(second)),
        (first, second) => first.and(second),
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CliError::Usage(text) | CliError::Data(text) | CliError::Interrupted(text) => f.write_str(text),
        }
    }
}

impl From<rfdescent::Error> for CliError {
    fn from(error: rfdescent::Error) -> Self {
        match error {
            rfdescent::Error::InvalidArgument { name, value, expected } => {
                CliError::Usage(format!("{name} = {}: {expected}", shortened(value)))
            }
            rfdescent::Error::Io { path, source } => CliError::io(&path, source),
            _ => CliError::Data(error.to_string()),
        }
    }
}

impl From<candle_core::Error> for CliError {
    fn from(error: candle_core::Error) -> Self {
        // candle appends a backtrace to some of its messages; the first line holds the reason.
        let text = error.to_string();
        CliError::Data(format!("network arithmetic: {}", text.lines().next().unwrap_or_default()))
    }
}
