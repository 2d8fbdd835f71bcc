//! The samples of an auto-fit on disk, so that an interruption loses none.

use super::samples::{Columns, CutOff, Parsed, parse};
use super::statistics::Sample;
use crate::files::check_regular;
use crate::{Error, Result};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

const HEADER: &str = "loss,grad_norm,batchsize,time\n";

/// A CSV file that grows by whole rows, each handed to the operating system before the next sample is drawn.
#[derive(Debug)]
pub(super) struct SampleCache {
    path: PathBuf,
    file: File,
    columns: Columns,
    length: u64,
}

/// What a cache held when it was opened.
pub(super) struct Opened {
    pub cache: SampleCache,
    pub samples: Vec<Sample>,
    /// Says that a cut-off last line was dropped.
    pub warning: Option<String>,
}

impl SampleCache {
    /// Opens or creates a cache and makes sure that it can be written.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot; [`Error::File`] when the file is no sample file, or another process is filling it.
    /// A last line that an interruption has cut off is completed or, where a value that a fit uses is hit, dropped.
    pub fn open(path: &Path) -> Result<Opened> {
        let io = |source| Error::Io { path: path.into(), source };
        // Opening a pipe, or reading a device such as /dev/zero, would never end. What is not there is created.
        if path.exists() {
            check_regular(path)?;
        }
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(io)?;
        // File systems without locks report another error: no protection there, but no reason to refuse.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            let problem =
                "another process is adding samples: wait until it has ended or give another cache file";
            return Err(Error::File { path: path.into(), problem: problem.into() });
        }
        let mut content = Vec::new();
        file.read_to_end(&mut content).map_err(io)?;
        if content.len() < HEADER.len() && HEADER.as_bytes().starts_with(&content) {
            file.set_len(0).and_then(|()| file.write_all(HEADER.as_bytes())).map_err(io)?;
            content = HEADER.into();
        }
        let Parsed { samples, columns, length, completion } = parse(path, &content, CutOff::Mend)?;
        let warning = (length < content.len()).then(|| {
            let row = String::from_utf8_lossy(&content[length..]);
            format!("{}: dropped the last row, which is cut off: `{}`", path.display(), row.trim())
        });
        if warning.is_some() {
            file.set_len(length as u64).map_err(io)?;
        }
        file.write_all(completion.as_bytes()).map_err(io)?;
        let length = (length + completion.len()) as u64;
        let cache = SampleCache { path: path.into(), file, columns, length };
        Ok(Opened { cache, samples, warning })
    }

    /// Appends one row.
    ///
    /// # Errors
    /// [`Error::Io`] when it can't be written; the file then still ends with the row before.
    pub fn append(&mut self, loss: f64, grad_norm: f64, batch_size: u64) -> Result<()> {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |t| t.as_secs_f64());
        let row = self.columns.row(loss, grad_norm, batch_size, time);
        if let Err(source) = self.file.write_all(row.as_bytes()) {
            // A full disk may have taken half of the row. Should this fail too, the next opening drops that half.
            let _ = self.file.set_len(self.length);
            return Err(Error::Io { path: self.path.clone(), source });
        }
        self.length += row.len() as u64;
        Ok(())
    }
}
