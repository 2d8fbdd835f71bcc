//! The file format of saved states, the same for every backend: safetensors. The metadata holds format, version, counts
//! and the list of tensors; velocities are stored as `momentum.NAME`, master weights as `master.NAME`, little-endian.

use std::collections::HashMap;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};

use super::adaptive::History;
use super::{Method, Options, TensorSpec};
use crate::error::{Error, Result};
use crate::tensor::DType;

const FORMAT: &str = "rfdescent-optimizer-state";
const VERSION: &str = "1";

/// What identifies a tensor in a saved state, and which buffers are stored of it.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    name: String,
    shape: Vec<usize>,
    dtype: DType,
    momentum: bool,
    master: bool,
}

impl Entry {
    fn is_of(&self, spec: &TensorSpec) -> bool {
        (&self.name, &self.shape, self.dtype) == (&spec.name, &spec.shape, spec.dtype)
    }
}

/// The buffers of one tensor, little-endian; `None` for one that does not exist.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffers<B> {
    /// f64 for f64 parameters, else f32.
    pub momentum: Option<B>,
    /// f32.
    pub master: Option<B>,
}

/// What a state holds.
#[derive(Clone, Debug)]
pub(crate) struct State<B> {
    pub applied_steps: u64,
    pub skipped_steps: u64,
    /// Of the adaptive method.
    pub history: Option<History>,
    /// In the order of the optimizer's tensors.
    pub tensors: Vec<Buffers<B>>,
}

/// The format of a tensor's velocity.
fn momentum_format(spec: &TensorSpec) -> Dtype {
    if spec.dtype == DType::F64 { Dtype::F64 } else { Dtype::F32 }
}

/// The bytes of the file.
pub(crate) fn write(state: &State<Vec<u8>>, specs: &[&TensorSpec], method: &Method) -> Result<Vec<u8>> {
    let mut views = Vec::new();
    for (spec, buffers) in specs.iter().zip(&state.tensors) {
        let stored =
            [("momentum", &buffers.momentum, momentum_format(spec)), ("master", &buffers.master, Dtype::F32)];
        for (kind, bytes, dtype) in stored {
            if let Some(bytes) = bytes {
                let view = TensorView::new(dtype, vec![spec.len()?], bytes)
                    .map_err(|e| Error::State(e.to_string()))?;
                views.push((format!("{kind}.{}", spec.name), view));
            }
        }
    }
    let entries: Vec<Entry> = (specs.iter().zip(&state.tensors))
        .map(|(spec, buffers)| Entry {
            name: spec.name.clone(),
            shape: spec.shape.clone(),
            dtype: spec.dtype,
            momentum: buffers.momentum.is_some(),
            master: buffers.master.is_some(),
        })
        .collect();
    let mut metadata = HashMap::from([
        ("format".to_string(), FORMAT.to_string()),
        ("version".to_string(), VERSION.to_string()),
        ("applied_steps".to_string(), state.applied_steps.to_string()),
        ("skipped_steps".to_string(), state.skipped_steps.to_string()),
        ("tensors".to_string(), serde_json::to_string(&entries).map_err(|e| Error::State(e.to_string()))?),
    ]);
    if let (Some(history), Method::Adaptive(rule)) = (&state.history, method) {
        let history = serde_json::to_string(history).map_err(|e| Error::State(e.to_string()))?;
        metadata.insert("adaptive".to_string(), history);
        metadata.insert("averaging".to_string(), rule.averaging.to_string());
    }
    safetensors::serialize(views, Some(metadata)).map_err(|e| Error::State(e.to_string()))
}

/// Reads a file that [`write`] made for the same tensors, with the same method and options that keep the same buffers.
pub(crate) fn read<'a>(
    bytes: &'a [u8],
    specs: &[&TensorSpec],
    method: &Method,
    options: &Options,
) -> Result<State<&'a [u8]>> {
    let damaged = |e: safetensors::SafeTensorError| {
        Error::State(format!("is not a whole safetensors file ({e}); save it again"))
    };
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(damaged)?;
    let stored = SafeTensors::deserialize(bytes).map_err(damaged)?;
    let metadata = metadata.metadata().clone().unwrap_or_default();
    let entry = |key: &str| {
        metadata.get(key).ok_or_else(|| {
            Error::State(format!("has no `{key}` in its metadata; it was not saved by this library"))
        })
    };
    if entry("format")? != FORMAT {
        return Err(Error::State(format!("has format `{}`, not `{FORMAT}`", entry("format")?)));
    }
    if entry("version")? != VERSION {
        let found = entry("version")?;
        return Err(Error::State(format!(
            "has version {found}; this release reads version {VERSION}: load it with the release that saved it"
        )));
    }
    let count = |key: &str| {
        entry(key)?
            .parse::<u64>()
            .map_err(|_| Error::State(format!("`{key}` in its metadata is not a count")))
    };
    let (applied_steps, skipped_steps) = (count("applied_steps")?, count("skipped_steps")?);
    let entries: Vec<Entry> = serde_json::from_str(entry("tensors")?)
        .map_err(|e| Error::State(format!("`tensors` in its metadata is damaged: {e}")))?;
    let history = history(metadata.get("adaptive"), method, specs.len())?;
    if let (Some(saved), Method::Adaptive(rule)) = (metadata.get("averaging"), method)
        && saved.parse() != Ok(rule.averaging)
    {
        return Err(Error::State(format!(
            "was saved with averaging {saved}, but the optimizer has {}; make one with the same",
            rule.averaging
        )));
    }
    compare(&entries, specs, options)?;
    let promised = entries.iter().map(|e| usize::from(e.momentum) + usize::from(e.master)).sum::<usize>();
    if stored.len() != promised {
        return Err(Error::State(format!(
            "holds {} buffers, but its metadata promises {promised}; it is damaged: save it again",
            stored.len()
        )));
    }
    let tensors = (specs.iter().zip(&entries))
        .map(|(spec, entry)| {
            let values = |kind: &str, present: bool, dtype| {
                present.then(|| values(&stored, &format!("{kind}.{}", spec.name), dtype, spec)).transpose()
            };
            Ok(Buffers {
                momentum: values("momentum", entry.momentum, momentum_format(spec))?,
                master: values("master", entry.master, Dtype::F32)?,
            })
        })
        .collect::<Result<_>>()?;
    Ok(State { applied_steps, skipped_steps, history, tensors })
}

/// What the adaptive method remembered, if the state is of the method that the optimizer has.
fn history(stored: Option<&String>, method: &Method, tensors: usize) -> Result<Option<History>> {
    let Some(stored) = stored else {
        if method.is_adaptive() {
            return Err(Error::State(
                "was saved by RFD as published, but the optimizer is adaptive; make one with the fitted model".into(),
            ));
        }
        return Ok(None);
    };
    if !method.is_adaptive() {
        return Err(Error::State(
            "was saved by the adaptive method, but the optimizer is RFD as published; make an adaptive one"
                .into(),
        ));
    }
    let damaged = |problem: String| {
        Error::State(format!("`adaptive` in its metadata is damaged: {problem}; save it again"))
    };
    let history: History = serde_json::from_str(stored).map_err(|e| damaged(e.to_string()))?;
    if history.tensors.len() != tensors {
        return Err(damaged(format!("it is of {} tensors, not {tensors}", history.tensors.len())));
    }
    if !history.is_sound() {
        return Err(damaged("a value is outside its domain".into()));
    }
    Ok(Some(history))
}

/// Says which tensor of a saved state is not the optimizer's, or has a buffer that the options have no use for.
fn compare(saved: &[Entry], specs: &[&TensorSpec], options: &Options) -> Result<()> {
    if saved.len() != specs.len() {
        return Err(Error::State(format!(
            "is for {} tensors, the optimizer has {}; make the optimizer for the same list",
            saved.len(),
            specs.len()
        )));
    }
    for (index, (saved, spec)) in saved.iter().zip(specs).enumerate() {
        let name = &spec.name;
        if !saved.is_of(spec) {
            return Err(Error::State(format!(
                "tensor {index} is `{}` {:?} {} in the state but `{name}` {:?} {} in the optimizer",
                saved.name, saved.shape, saved.dtype, spec.shape, spec.dtype
            )));
        }
        if saved.master && !options.master_weights {
            return Err(Error::State(format!(
                "holds master weights of `{name}`, but the option `master_weights` is off; make the optimizer with it on"
            )));
        }
        if saved.momentum && options.groups[spec.group].momentum == 0.0 {
            return Err(Error::State(format!(
                "holds a velocity of `{name}`, but the momentum of its group is 0; set it before loading"
            )));
        }
    }
    Ok(())
}

/// The bytes of a stored list of numbers.
fn values<'a>(stored: &SafeTensors<'a>, name: &str, dtype: Dtype, spec: &TensorSpec) -> Result<&'a [u8]> {
    let view = stored
        .tensor(name)
        .map_err(|e| Error::State(format!("lacks `{name}` ({e}); it is damaged: save it again")))?;
    let len = spec.len()?;
    if view.dtype() != dtype || view.shape() != [len] {
        return Err(Error::State(format!(
            "`{name}` is {:?} {:?}, expected {dtype:?} [{len}]",
            view.dtype(),
            view.shape()
        )));
    }
    Ok(view.data())
}
