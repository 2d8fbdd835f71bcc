//! Saved states of version 1, read only: several keys of metadata. What the adaptive method of that time
//! remembered is of no use any more.

use std::collections::HashMap;

use serde::Deserialize;

use super::{Entry, Header, Named, STRANGE};
use crate::error::{Error, Result};
use crate::tensor::DType;

/// The value of `format`, the key by which such a file is known.
const FORMAT: &str = "rfdescent-optimizer-state";
/// Where velocities are stored, before the tensor's name.
pub(super) const VELOCITY: &str = "momentum";

#[derive(Deserialize)]
struct OldEntry {
    name: String,
    shape: Vec<usize>,
    dtype: DType,
    momentum: bool,
    master: bool,
}

/// The metadata in the form of today; `None` for a file that is not of version 1.
pub(super) fn header(metadata: &HashMap<String, String>) -> Option<Result<Header>> {
    metadata.get("format").map(|format| read(format, metadata))
}

fn read(format: &str, metadata: &HashMap<String, String>) -> Result<Header> {
    let value =
        |key: &str| metadata.get(key).ok_or_else(|| Error::State(format!("has no `{key}` {STRANGE}")));
    if format != FORMAT {
        return Err(Error::State(format!("has format `{format}`, not `{FORMAT}`, {STRANGE}")));
    }
    let version = value("version")?;
    if version != "1" {
        let problem =
            format!("has version {version} in the keys of version 1; load it with the release that saved it");
        return Err(Error::State(problem));
    }
    let count = |key: &str| {
        value(key)?
            .parse::<u64>()
            .map_err(|_| Error::State(format!("`{key}` in its metadata is not a count; save it again")))
    };
    let damaged = |key: &str, problem: String| {
        Error::State(format!("`{key}` in its metadata is damaged: {problem}; save it again"))
    };
    let entries: Vec<OldEntry> =
        serde_json::from_str(value("tensors")?).map_err(|e| damaged("tensors", e.to_string()))?;
    let mut header = Header {
        version: 1,
        method: "fitted".into(),
        settings: Named::new(),
        applied_steps: count("applied_steps")?,
        skipped_steps: count("skipped_steps")?,
        history: Named::new(),
        tensors: entries.into_iter().map(Entry::from).collect(),
    };
    if metadata.contains_key("adaptive") {
        header.method = "adaptive".into();
    }
    Ok(header)
}

impl From<OldEntry> for Entry {
    fn from(old: OldEntry) -> Self {
        let OldEntry { name, shape, dtype, momentum, master } = old;
        Self { name, shape, dtype, velocity: momentum, master, rows: None, history: Named::new() }
    }
}
