//! Single files: what is written appears whole or not at all, and only what has an end is read. Public for
//! the command line alone, and no part of the interface.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// As many as the system itself follows.
const MOST_LINKS: usize = 40;

/// Writes a file, or leaves the one that is there as it is.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    Prepared::new(path, bytes)?.commit()
}

/// A file's new content, on the disk beside it but not yet in its place; dropped, it leaves nothing behind.
///
/// A link stays, and what it leads to is replaced, or created where it leads to nothing yet. A device or a
/// pipe cannot be replaced: it gets the bytes at the end.
#[derive(Debug)]
pub struct Prepared<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    target: PathBuf,
    temporary: Option<Temporary>,
}

impl<'a> Prepared<'a> {
    /// Does all that can fail for lack of space or permission.
    pub fn new(path: &'a Path, bytes: &'a [u8]) -> Result<Self> {
        let prepare = || {
            let target = follow(path)?;
            let temporary = match fs::metadata(&target) {
                Ok(there) if there.is_dir() => {
                    return Err(io::Error::new(ErrorKind::IsADirectory, "is a folder; name a file"));
                }
                Ok(there) if !there.is_file() => None,
                _ => Some(Temporary::beside(&target, bytes).map_err(|error| match error.kind() {
                    ErrorKind::NotFound => {
                        let folder = target.parent().unwrap_or(Path::new("")).display();
                        let problem = format!("there is no folder {folder}; create it first");
                        io::Error::new(ErrorKind::NotFound, problem)
                    }
                    _ => error,
                })?),
            };
            Ok((target, temporary))
        };
        let (target, temporary) = prepare().map_err(|source| Error::Io { path: path.into(), source })?;
        Ok(Prepared { path, bytes, target, temporary })
    }

    /// Puts it into its place.
    pub fn commit(self) -> Result<()> {
        match self.temporary {
            Some(temporary) => temporary.rename(&self.target),
            None => {
                OpenOptions::new().write(true).open(&self.target).and_then(|mut f| f.write_all(self.bytes))
            }
        }
        .map_err(|source| Error::Io { path: self.path.into(), source })
    }
}

/// Where a chain of links ends, whether there is a file or not.
fn follow(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_path_buf();
    for _ in 0..MOST_LINKS {
        match fs::read_link(&path) {
            // A relative target counts from the link's folder; an absolute one replaces the whole path.
            Ok(target) => path = path.parent().unwrap_or(Path::new("")).join(target),
            // No link, or nothing there yet.
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::other("too many links, one after the other"))
}

/// A complete file under a name of its own, removed unless renamed.
#[derive(Debug)]
pub struct Temporary {
    path: Option<PathBuf>,
}

impl Temporary {
    /// Writes the bytes and waits until the system has taken them, so that a full disk shows here.
    pub fn beside(target: &Path, bytes: &[u8]) -> io::Result<Self> {
        // Process numbers repeat in containers that share a folder: the number alone is no name of its own.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let folder = target.parent().unwrap_or(Path::new(""));
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!(".rfdescent-{}-{number}.tmp", std::process::id()));
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(mut file) => {
                    let temporary = Temporary { path: Some(path) };
                    file.write_all(bytes)?;
                    file.sync_all()?;
                    return Ok(temporary);
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn rename(mut self, target: &Path) -> io::Result<()> {
        if let Some(path) = &self.path {
            fs::rename(path, target)?;
        }
        // From here on the name may be another's.
        self.path = None;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
    }
}

/// Removes what killed processes left in a folder. Only for those who know that no other is writing there.
pub fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(".rfdescent-") && name.ends_with(".tmp") {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Opens a file to read, symbolic links followed. A device may have no end and a pipe no writer, so both are
/// refused.
pub fn open(path: &Path) -> Result<File> {
    check_regular(path)?;
    File::open(path).map_err(|source| Error::Io { path: path.into(), source })
}

/// The whole content of a file, of the kind that [`open`] takes.
pub fn read_regular(path: &Path) -> Result<Vec<u8>> {
    check_regular(path)?;
    fs::read(path).map_err(|source| Error::Io { path: path.into(), source })
}

/// An error unless there is a regular file at the path; asked before opening, which waits at a pipe.
pub(crate) fn check_regular(path: &Path) -> Result<()> {
    let there = fs::metadata(path).map_err(|source| Error::Io { path: path.into(), source })?;
    if there.is_file() {
        return Ok(());
    }
    let problem = if there.is_dir() {
        "is a folder, not a regular file: a file is needed"
    } else {
        "is a device or a pipe, not a regular file: write what it gives to a file and name that"
    };
    Err(Error::File { path: path.into(), problem: problem.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_at_the_end_and_otherwise_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.json");
        fs::write(&path, "old").unwrap();
        let prepared = Prepared::new(&path, b"new").unwrap();
        assert_eq!((fs::read_to_string(&path).unwrap(), names(folder.path()).len()), ("old".into(), 2));
        drop(prepared);
        assert_eq!(names(folder.path()), ["run.json"]);
        write_atomically(&path, b"new").unwrap();
        assert_eq!((fs::read_to_string(&path).unwrap(), names(folder.path()).len()), ("new".into(), 1));
        let error = write_atomically(folder.path(), b"new").unwrap_err().to_string();
        assert!(error.contains("is a folder"), "{error}");
    }

    #[test]
    fn a_name_that_is_taken_is_left_to_its_owner() {
        let folder = tempfile::tempdir().unwrap();
        // Another container's process of this number: these are the next names.
        let taken: Vec<PathBuf> = (0..1000)
            .map(|n| folder.path().join(format!(".rfdescent-{}-{n}.tmp", std::process::id())))
            .collect();
        taken.iter().for_each(|path| fs::write(path, "theirs").unwrap());
        write_atomically(&folder.path().join("run.json"), b"ours").unwrap();
        assert!(taken.iter().all(|path| fs::read(path).unwrap() == b"theirs"));
        sweep(folder.path());
        assert_eq!(names(folder.path()), ["run.json"]);
    }

    #[cfg(unix)]
    #[test]
    fn links_stay_and_what_they_lead_to_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let there = folder.path().join("elsewhere");
        fs::create_dir(&there).unwrap();
        for (link, target) in [("first", "second"), ("second", "elsewhere/file"), ("loop", "loop")] {
            std::os::unix::fs::symlink(target, folder.path().join(link)).unwrap();
        }
        for content in ["new", "newer"] {
            write_atomically(&folder.path().join("first"), content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(there.join("file")).unwrap(), content);
        }
        assert!(folder.path().join("first").is_symlink() && folder.path().join("second").is_symlink());
        let error = write_atomically(&folder.path().join("loop"), b"").unwrap_err().to_string();
        assert!(error.contains("loop") && error.contains("too many links"), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn devices_get_the_bytes_and_stay_devices() {
        use std::os::unix::fs::FileTypeExt;
        let folder = tempfile::tempdir().unwrap();
        let (null, full) = (folder.path().join("null"), folder.path().join("full"));
        std::os::unix::fs::symlink("/dev/null", &null).unwrap();
        std::os::unix::fs::symlink("/dev/full", &full).unwrap();
        write_atomically(&null, b"gone").unwrap();
        let error = write_atomically(&full, b"gone").unwrap_err().to_string();
        assert!(error.contains(full.to_str().unwrap()) && error.contains("No space left"), "{error}");
        assert!(fs::metadata(&full).unwrap().file_type().is_char_device());
        let error = read_regular(&null).unwrap_err().to_string();
        assert!(error.contains("device"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn all_files_get_the_usual_mode() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (ours, usual) = (folder.path().join("ours"), folder.path().join("usual"));
        write_atomically(&ours, b"").unwrap();
        fs::write(&usual, "").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&ours), mode(&usual));
    }

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
}
