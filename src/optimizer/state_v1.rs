//! Saved states of version 1, read only: several keys of metadata, what the adaptive method remembers in two
//! levels.

use std::collections::HashMap;

use serde::Deserialize;

use super::adaptive::{History, TensorHistory, Trust};
use super::state_file::{Entry, Header, MethodName, STRANGE};
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

#[derive(Deserialize)]
struct OldHistory {
    loss: f64,
    loss_rest: f64,
    trust: Trust,
    /// In the order of `tensors`.
    tensors: Vec<TensorHistory>,
}

/// The metadata in the form of today; `None` for a file that is not of version 1.
pub(super) fn header(metadata: &HashMap<String, String>) -> Option<Result<Header>> {
    metadata.get("format").map(|format| read(format, metadata))
}

fn read(format: &str, metadata: &HashMap<String, String>) -> Result<Header> {
    let value =
        |key: &str| metadata.get(key).ok_or_else(|| Error::State(format!("has no `{key}` {STRANGE}")));
    if format != FORMAT {
        return Err(Error::State(format!("has format `{format}`, not `{FORMAT}`")));
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
            .map_err(|_| Error::State(format!("`{key}` in its metadata is not a count")))
    };
    let damaged = |key: &str, problem: String| {
        Error::State(format!("`{key}` in its metadata is damaged: {problem}; save it again"))
    };
    let entries: Vec<OldEntry> =
        serde_json::from_str(value("tensors")?).map_err(|e| damaged("tensors", e.to_string()))?;
    let mut header = Header {
        version: 1,
        method: MethodName::Fitted,
        settings: serde_json::Map::new(),
        applied_steps: count("applied_steps")?,
        skipped_steps: count("skipped_steps")?,
        history: None,
        tensors: entries.into_iter().map(Entry::from).collect(),
    };
    if let Some(text) = metadata.get("adaptive") {
        let OldHistory { loss, loss_rest, trust, tensors } =
            serde_json::from_str(text).map_err(|e| damaged("adaptive", e.to_string()))?;
        if tensors.len() != header.tensors.len() {
            let problem = format!("it is of {} tensors, not {}", tensors.len(), header.tensors.len());
            return Err(damaged("adaptive", problem));
        }
        header.method = MethodName::Adaptive;
        header.history = Some(History { loss, loss_rest, trust, tensors: Vec::new() });
        for (entry, history) in header.tensors.iter_mut().zip(tensors) {
            entry.history = Some(history);
        }
        if let Some(text) = metadata.get("averaging") {
            let averaging = serde_json::from_str(text).map_err(|e| damaged("averaging", e.to_string()))?;
            header.settings.insert("averaging".into(), averaging);
        }
    }
    Ok(header)
}

impl From<OldEntry> for Entry {
    fn from(old: OldEntry) -> Self {
        let OldEntry { name, shape, dtype, momentum, master } = old;
        Self { name, shape, dtype, velocity: momentum, master, history: None }
    }
}
