//! Files to read, standard input in the place of one, and gzip, which shows in the first bytes whatever the
//! name is.

use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use rfdescent::files;

use crate::error::CliError;

const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Most bytes that are taken from what has no known end: a pipe, or what is packed.
const MOST: u64 = 1 << 30;

/// Whether the name stands for standard input.
pub fn is_standard(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// What messages call it.
pub fn name(path: &Path) -> &Path {
    if is_standard(path) { Path::new("standard input") } else { path }
}

/// The whole content of a file, or of standard input for `-`, unpacked.
pub fn read(path: &Path) -> Result<Vec<u8>, CliError> {
    let bytes =
        if is_standard(path) { limited(path, io::stdin().lock())? } else { files::read_regular(path)? };
    if bytes.starts_with(&GZIP) { limited(path, MultiGzDecoder::new(&bytes[..])) } else { Ok(bytes) }
}

fn limited(path: &Path, reader: impl Read) -> Result<Vec<u8>, CliError> {
    let mut bytes = Vec::new();
    reader.take(MOST + 1).read_to_end(&mut bytes).map_err(|error| unreadable(path, error))?;
    if bytes.len() as u64 > MOST {
        let problem = format!("more than {MOST} bytes: unpack it to a file, and name that");
        return Err(CliError::file(name(path), problem));
    }
    Ok(bytes)
}

/// A file that is unpacked as it is read. What is packed may have no end.
pub fn open(path: &Path) -> Result<Box<dyn Read>, CliError> {
    let mut file = BufReader::new(files::open(path)?);
    let start = file.fill_buf().map_err(|error| CliError::io(path, error))?;
    Ok(if start.starts_with(&GZIP) { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) })
}

/// What a failure to read means.
pub fn unreadable(path: &Path, error: io::Error) -> CliError {
    let path = name(path);
    match error.kind() {
        ErrorKind::UnexpectedEof => {
            CliError::file(path, "the gzip data ends too early; get the file again, or pack it again")
        }
        ErrorKind::InvalidInput | ErrorKind::InvalidData => {
            CliError::file(path, format!("not a valid gzip file ({error}); get it again, or pack it again"))
        }
        _ => CliError::io(path, error),
    }
}
