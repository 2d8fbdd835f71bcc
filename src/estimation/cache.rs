//! The samples of an auto-fit on disk, so that an interruption loses none.

use super::samples::{Columns, CutOff, Parsed, header, parse};
use super::statistics::Sample;
use super::tensors::TensorDims;
use crate::files::check_regular;
use crate::{Error, Result};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// A CSV file that grows by whole rows, each handed to the operating system before the next sample is drawn.
#[derive(Debug)]
pub(super) struct SampleCache {
    path: PathBuf,
    file: File,
    columns: Columns,
    /// For each tensor that has a column its place in the sampler's list; empty where the file has no such
    /// columns.
    places: Vec<usize>,
    length: u64,
}

/// What a cache held when it was opened.
pub(super) struct Opened {
    pub cache: SampleCache,
    /// The samples with ‖g_k‖² of each of the sampler's tensors, in its order; without, where the file has
    /// none.
    pub samples: Vec<(Sample, Vec<f64>)>,
    /// Says that a cut-off last line was dropped.
    pub warning: Option<String>,
}

impl SampleCache {
    /// Opens or creates a cache and makes sure that it can be written. A new one has a column for each of
    /// `tensors`; an older one without such columns stays without.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot; [`Error::File`] when the file is no sample file, has columns of other
    /// tensors than `tensors`, or another process is filling it. A last line that an interruption has cut off
    /// is completed or, where a value that a fit uses is hit, dropped.
    pub fn open(path: &Path, tensors: &[TensorDims]) -> Result<Opened> {
        let io = |source| Error::Io { path: path.into(), source };
        // Opening a pipe, or reading a device such as /dev/zero, would never end. What is not there is
        // created.
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
        let header = header(tensors.iter().map(|tensor| tensor.name.as_str()));
        if content.len() < header.len() && header.as_bytes().starts_with(&content) {
            file.set_len(0).and_then(|()| file.write_all(header.as_bytes())).map_err(io)?;
            content = header.into();
        }
        let Parsed { samples, sq_grad_norms, columns, length, completion, .. } =
            parse(path, &content, CutOff::Mend)?;
        let places =
            places(&columns, tensors).map_err(|problem| Error::File { path: path.into(), problem })?;
        let warning = (length < content.len()).then(|| {
            let row = String::from_utf8_lossy(&content[length..]);
            format!("{}: dropped the last row, which is cut off: `{}`", path.display(), row.trim())
        });
        if warning.is_some() {
            file.set_len(length as u64).map_err(io)?;
        }
        file.write_all(completion.as_bytes()).map_err(io)?;
        let length = (length + completion.len()) as u64;
        let in_order = |row: Vec<f64>| {
            let mut ordered = vec![0.0; row.len()];
            places.iter().zip(row).for_each(|(&place, square)| ordered[place] = square);
            ordered
        };
        let samples = samples.into_iter().zip(sq_grad_norms.into_iter().map(in_order)).collect();
        let cache = SampleCache { path: path.into(), file, columns, places, length };
        Ok(Opened { cache, samples, warning })
    }

    /// Whether the file has columns for the sampler's tensors.
    pub fn has_tensors(&self) -> bool {
        !self.places.is_empty()
    }

    /// Appends one row; `sq_grad_norms` are those of the sampler's tensors where the file has columns for
    /// them.
    ///
    /// # Errors
    /// [`Error::Io`] when it can't be written; the file then still ends with the row before.
    pub fn append(
        &mut self,
        loss: f64,
        grad_norm: f64,
        batch_size: u64,
        sq_grad_norms: &[f64],
    ) -> Result<()> {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |t| t.as_secs_f64());
        let row = self.columns.row(
            loss,
            grad_norm,
            batch_size,
            time,
            self.places.iter().map(|&place| sq_grad_norms[place]),
        );
        if let Err(source) = self.file.write_all(row.as_bytes()) {
            // A full disk may have taken half of the row. Should this fail too, the next opening drops that
            // half.
            let _ = self.file.set_len(self.length);
            return Err(Error::Io { path: self.path.clone(), source });
        }
        self.length += row.len() as u64;
        Ok(())
    }
}

/// For each tensor that has a column its place in the sampler's list.
fn places(columns: &Columns, tensors: &[TensorDims]) -> std::result::Result<Vec<usize>, String> {
    if columns.tensors().len() == 0 {
        return Ok(Vec::new());
    }
    let places = columns.tensors().map(|name| {
        tensors.iter().position(|tensor| tensor.name == name).ok_or_else(|| {
            format!(
                "column `sq_grad_norm:{name}` is of a tensor that is not sampled now: give another cache file"
            )
        })
    });
    let places = places.collect::<std::result::Result<Vec<usize>, _>>()?;
    match (0..tensors.len()).find(|place| !places.contains(place)) {
        None => Ok(places),
        Some(place) => {
            let name = &tensors[place].name;
            Err(format!(
                "has no column `sq_grad_norm:{name}`, but those of other tensors: give another cache file"
            ))
        }
    }
}
