//! The output folder: checked before the work starts, and one process's own until it ends.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use rfdescent::files::{self, Temporary};
use serde::Serialize;

use crate::error::CliError;

/// A folder that exists and can be written to.
#[derive(Debug)]
pub struct OutputFolder {
    path: PathBuf,
    /// Holds the lock; none where the system has no locks on folders.
    _lock: Option<File>,
}

impl OutputFolder {
    /// Creates the folder if need be and writes a probe file, so that a run does not find out at its end.
    pub fn create(path: &Path) -> Result<Self, CliError> {
        let refuse = |e: std::io::Error| {
            CliError::file(
                path,
                format!("cannot write to the output folder ({e}); name another with --output"),
            )
        };
        fs::create_dir_all(path).map_err(refuse)?;
        let lock = lock(path)?;
        if lock.is_some() {
            files::sweep(path);
        }
        Temporary::beside(&path.join("probe"), &[0; 4096]).map_err(refuse)?;
        Ok(OutputFolder { path: path.to_path_buf(), _lock: lock })
    }

    /// Where a file of that name lies.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes bytes.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), CliError> {
        Ok(files::write_atomically(&self.join(name), bytes)?)
    }

    /// Writes `value` as indented JSON.
    pub fn write_json(&self, name: &str, value: &impl Serialize) -> Result<(), CliError> {
        let path = self.join(name);
        let text = serde_json::to_string_pretty(value).map_err(|e| CliError::file(&path, e))?;
        Ok(files::write_atomically(&path, text.as_bytes())?)
    }

    /// Writes one CSV row a record, under the names of the record's fields, which are there without any
    /// record too.
    pub fn write_csv<R: Serialize + Default>(&self, name: &str, records: &[R]) -> Result<(), CliError> {
        let path = self.join(name);
        let fail = |e: csv::Error| CliError::file(&path, e);
        let mut writer = csv::Writer::from_writer(Vec::new());
        for record in records {
            writer.serialize(record).map_err(fail)?;
        }
        if records.is_empty() {
            writer.serialize(R::default()).map_err(fail)?;
        }
        let mut bytes = writer.into_inner().map_err(|e| CliError::file(&path, e))?;
        if records.is_empty() {
            // serde writes the names only with a record.
            let header = bytes.iter().position(|&byte| byte == b'\n').map_or(0, |end| end + 1);
            bytes.truncate(header);
        }
        Ok(files::write_atomically(&path, &bytes)?)
    }

    /// Removes a file, if there is one.
    pub fn remove(&self, name: &str) -> Result<(), CliError> {
        let path = self.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(CliError::io(&path, error)),
            _ => Ok(()),
        }
    }
}

/// Two runs in one folder would mix their files.
fn lock(path: &Path) -> Result<Option<File>, CliError> {
    // Not every system opens folders, and not every file system has locks: no protection there, but no reason
    // to refuse.
    let Ok(folder) = File::open(path) else { return Ok(None) };
    match folder.try_lock() {
        Ok(()) => Ok(Some(folder)),
        Err(TryLockError::WouldBlock) => Err(CliError::file(
            path,
            "another run is writing to this folder; wait until it has ended, or name another with --output",
        )),
        Err(TryLockError::Error(_)) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default, Serialize)]
    struct Row {
        step: usize,
        loss: Option<f64>,
    }

    #[test]
    fn a_csv_file_has_its_header_with_and_without_records() {
        let folder = tempfile::tempdir().unwrap();
        let output = OutputFolder::create(folder.path()).unwrap();
        for (records, content) in
            [(vec![], "step,loss\n"), (vec![Row { step: 1, loss: Some(0.5) }], "step,loss\n1,0.5\n")]
        {
            output.write_csv("run.csv", &records).unwrap();
            assert_eq!(fs::read_to_string(output.join("run.csv")).unwrap(), content);
        }
    }

    #[test]
    fn a_folder_below_a_file_is_refused_by_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = OutputFolder::create(&file.path().join("run")).unwrap_err();
        assert!(error.to_string().contains("run") && error.to_string().contains("--output"), "{error}");
        assert_eq!(error.exit_code(), 1);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_folder_belongs_to_one_run_which_clears_what_dead_ones_left() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(".rfdescent-1-0.tmp"), "half").unwrap();
        fs::write(folder.path().join("theirs.tmp"), "").unwrap();
        let output = OutputFolder::create(folder.path()).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let error = OutputFolder::create(folder.path()).unwrap_err().to_string();
        assert!(error.contains("another run") && error.contains("--output"), "{error}");
        drop(output);
        OutputFolder::create(folder.path()).unwrap();
    }
}
