//! Ctrl-C: the first asks the command to stop at the next safe point, the second ends the process at once.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::CliError;

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Installs the handler. Called once, by commands that run long enough to be interrupted.
pub fn install() -> Result<(), CliError> {
    ctrlc::set_handler(|| {
        if REQUESTED.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
    })
    .map_err(|e| CliError::Data(format!("cannot watch for Ctrl-C: {e}")))
}

/// Whether the user has asked to stop.
pub fn requested() -> bool {
    REQUESTED.load(Ordering::SeqCst)
}
