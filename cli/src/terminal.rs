//! What goes to the terminal: no failure to write there is a panic, and none on standard output goes unseen.

use std::io::{self, ErrorKind, Write};

use crate::error::CliError;

/// One line on standard error. Where that cannot be written there is no one left to tell.
pub fn say(line: impl std::fmt::Display) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Writes to standard output. A reader that has gone away (`| head`) is no error.
pub fn print(text: &str) -> Result<(), CliError> {
    let mut stdout = io::stdout();
    printed(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()))
}

/// What a write to standard output means for the command.
pub fn printed(result: io::Result<()>) -> Result<(), CliError> {
    match result {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(CliError::Data(format!("standard output: {error}; what was printed is incomplete")))
        }
        _ => Ok(()),
    }
}
