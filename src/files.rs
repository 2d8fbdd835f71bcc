//! Writing files so that a crash or a full disk leaves either the old file or the new one; reading only what
//! has an end.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// Writes to a temporary file in the same folder, then renames it. A symbolic link stays one: its target is
/// replaced. What is no regular file, a pipe or a device, is written to as it is.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    write(path, bytes).map_err(|source| Error::Io { path: path.into(), source })
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let target = match fs::canonicalize(path) {
        Ok(target) => target,
        Err(error) if error.kind() == ErrorKind::NotFound => path.into(),
        Err(error) => return Err(error),
    };
    if target.exists() && !target.is_file() {
        return fs::OpenOptions::new().write(true).open(&target)?.write_all(bytes);
    }
    let (temporary, mut file) = create_beside(&target)?;
    let written =
        file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&temporary, &target));
    if written.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// A new file in the folder of `target`. Process numbers repeat across containers and threads share them, so
/// a name is tried until it is one that nobody else has.
fn create_beside(target: &Path) -> io::Result<(PathBuf, File)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        let mut name = target.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{}-{}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        let temporary = target.with_file_name(name);
        match File::create_new(&temporary) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            created => return created.map(|file| (temporary, file)),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_see_whole_files_whoever_writes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shared");
        write_atomically(&path, &[b'0'; 10]).unwrap();
        std::thread::scope(|scope| {
            for writer in 1..=4_u8 {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..50 {
                        write_atomically(path, &vec![b'0' + writer; 10 * usize::from(writer)]).unwrap();
                        let read = fs::read(path).unwrap();
                        assert!(read.iter().all(|&byte| byte == read[0]), "two writers in one file");
                        assert_eq!(read.len(), 10 * usize::from(read[0] - b'0').max(1), "half a file");
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "temporary files are left");
    }

    #[cfg(unix)]
    #[test]
    fn links_and_devices_stay_what_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_atomically(&link, b"new").unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"new");
        write_atomically(Path::new("/dev/null"), b"gone").unwrap();
        assert!(!Path::new("/dev/null").is_file());
    }
}
