//! The output folder: checked before the work starts, and every file in it appears complete or not at all.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::CliError;

/// A folder that exists and can be written to.
#[derive(Debug)]
pub struct OutputFolder {
    path: PathBuf,
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
        let probe = path.join(format!(".rfdescent-probe-{}", std::process::id()));
        let written = fs::write(&probe, [0u8; 4096]);
        let _ = fs::remove_file(&probe);
        written.map_err(refuse)?;
        Ok(OutputFolder { path: path.to_path_buf() })
    }

    /// Where a file of that name lies.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes a file through `write`, which gets a temporary path beside it; renamed only when complete.
    pub fn write_with(
        &self,
        name: &str,
        write: impl FnOnce(&Path) -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        replace_file(&self.join(name), write)
    }

    /// Writes `value` as indented JSON.
    pub fn write_json(&self, name: &str, value: &impl Serialize) -> Result<(), CliError> {
        self.write_with(name, |path| {
            let text = serde_json::to_string_pretty(value).map_err(|e| CliError::file(path, e))?;
            write_bytes(path, text.as_bytes())
        })
    }

    /// Writes one CSV row a record, under the names of the record's fields.
    pub fn write_csv<R: Serialize>(&self, name: &str, records: &[R]) -> Result<(), CliError> {
        self.write_with(name, |path| {
            let mut writer = csv::Writer::from_writer(Vec::new());
            for record in records {
                writer.serialize(record).map_err(|e| CliError::file(path, e))?;
            }
            let bytes = writer.into_inner().map_err(|e| CliError::file(path, e))?;
            write_bytes(path, &bytes)
        })
    }
}

/// Lets `write` fill a temporary file beside `path` and renames it; on an error nothing is left behind.
pub fn replace_file(path: &Path, write: impl FnOnce(&Path) -> Result<(), CliError>) -> Result<(), CliError> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".tmp-{}", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let result =
        write(&temporary).and_then(|()| fs::rename(&temporary, path).map_err(|e| CliError::file(path, e)));
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result
}

/// Writes the bytes and waits until the system has taken them, so that a full disk shows here.
pub fn write_bytes(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    fs::File::create(path)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .map_err(|e| CliError::file(path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_neither_file_nor_temporary() {
        let folder = tempfile::tempdir().unwrap();
        let output = OutputFolder::create(folder.path()).unwrap();
        let failed = output.write_with("run.json", |path| {
            fs::write(path, b"half").unwrap();
            Err(CliError::Data("disk full".into()))
        });
        assert!(failed.is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_below_a_file_is_refused_by_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = OutputFolder::create(&file.path().join("run")).unwrap_err();
        assert!(error.to_string().contains("run") && error.to_string().contains("--output"), "{error}");
        assert_eq!(error.exit_code(), 1);
    }
}
