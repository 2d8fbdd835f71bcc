//! Writing files so that a crash or a full disk leaves either the old file or the new one.

use std::fs;
use std::path::Path;

use crate::error::{Error, Result};

/// Writes to a temporary file in the same folder, then renames it.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let fail = |source| Error::Io { path: path.into(), source };
    let name = path.file_name().ok_or_else(|| fail(std::io::ErrorKind::IsADirectory.into()))?;
    let mut temporary = name.to_os_string();
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(temporary);
    let written = fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // Nothing is lost if this fails too: the error below is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    written.map_err(fail)
}
