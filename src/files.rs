//! Writing files so that a crash or a full disk leaves either the old file or the new one; reading only what has an end.

use std::fs;
use std::io::Write;
use std::path::Path;

use crate::error::{Error, Result};

/// Writes to a temporary file in the same folder, then renames it.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    let write = || {
        let mut file = fs::File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().map_err(|source| {
        // It may not exist; the first error is the one to report.
        let _ = fs::remove_file(&temporary);
        Error::Io { path: path.into(), source }
    })
}

/// The bytes of a regular file, symbolic links followed. A pipe or a device may never end, so it is refused.
pub(crate) fn read_regular(path: &Path) -> Result<Vec<u8>> {
    check_regular(path)?;
    fs::read(path).map_err(|source| Error::Io { path: path.into(), source })
}

/// An error unless there is a regular file at the path; asked before opening, which alone may block for ever.
pub(crate) fn check_regular(path: &Path) -> Result<()> {
    let metadata = fs::metadata(path).map_err(|source| Error::Io { path: path.into(), source })?;
    if metadata.is_file() {
        Ok(())
    } else {
        let problem =
            "not a regular file (a folder, pipe or device): copy what it holds to a file and give that";
        Err(Error::File { path: path.into(), problem: problem.into() })
    }
}
