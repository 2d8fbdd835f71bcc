//! The file format of saved states, the same for every backend: safetensors. The metadata has one key, whose
//! value is JSON text: version, method, counts, what the method remembers, and the list of tensors
//! ([`Header`]). Velocities are stored as `velocity.NAME`, master weights as `master.NAME`, flat and
//! little-endian. Equal states have equal bytes.

use std::collections::{HashMap, HashSet};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};

use super::adaptive::{History, TensorHistory};
use super::{Method, Options, TensorSpec, state_v1};
use crate::error::{Error, Result};
use crate::tensor::DType;

/// The one key of the metadata: more would be written in a random order.
const KEY: &str = "rfdescent_optimizer_state";
const VERSION: u64 = 2;
/// The end of the message about a file that is not one of these.
pub(super) const STRANGE: &str = "in its metadata; it was not saved by this library";

/// The metadata. The order of the fields is that in the file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Header {
    pub version: u64,
    pub method: MethodName,
    /// Those of the method that what it remembers is only right with.
    pub settings: serde_json::Map<String, serde_json::Value>,
    pub applied_steps: u64,
    pub skipped_steps: u64,
    /// Of the adaptive method: what all tensors share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<History>,
    pub tensors: Vec<Entry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum MethodName {
    Fitted,
    Adaptive,
}

/// What identifies a tensor in a saved state, which buffers are stored of it, and what the adaptive method
/// remembers of it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Entry {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub velocity: bool,
    pub master: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<TensorHistory>,
}

/// The buffers of one tensor, little-endian; `None` for one that does not exist.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffers<B> {
    /// In the format that [`DType::state`] says.
    pub velocity: Option<B>,
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

impl MethodName {
    fn of(method: &Method) -> Self {
        if method.is_adaptive() { MethodName::Adaptive } else { MethodName::Fitted }
    }
}

/// The settings of a method that belong to what it remembers.
fn settings(method: &Method) -> serde_json::Map<String, serde_json::Value> {
    match method {
        Method::Published(_) => serde_json::Map::new(),
        Method::Adaptive(adaptive) => [("averaging".into(), adaptive.averaging.into())].into_iter().collect(),
    }
}

/// The format of a buffer of numbers of the given one.
fn stored_as(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
    }
}

/// The bytes of the file.
pub(crate) fn write(state: &State<Vec<u8>>, specs: &[&TensorSpec], method: &Method) -> Result<Vec<u8>> {
    let mut views = Vec::new();
    for (spec, buffers) in specs.iter().zip(&state.tensors) {
        let stored = [
            ("velocity", &buffers.velocity, stored_as(spec.dtype.state())),
            ("master", &buffers.master, Dtype::F32),
        ];
        for (kind, bytes, dtype) in stored {
            if let Some(bytes) = bytes {
                let view = TensorView::new(dtype, vec![spec.len()?], bytes)
                    .map_err(|e| Error::State(e.to_string()))?;
                views.push((format!("{kind}.{}", spec.name), view));
            }
        }
    }
    let tensors = (specs.iter().zip(&state.tensors).enumerate())
        .map(|(index, (spec, buffers))| Entry {
            name: spec.name.clone(),
            shape: spec.shape.clone(),
            dtype: spec.dtype,
            velocity: buffers.velocity.is_some(),
            master: buffers.master.is_some(),
            history: state.history.as_ref().map(|history| history.tensors[index]),
        })
        .collect();
    let header = Header {
        version: VERSION,
        method: MethodName::of(method),
        settings: settings(method),
        applied_steps: state.applied_steps,
        skipped_steps: state.skipped_steps,
        history: state.history.clone(),
        tensors,
    };
    let text = serde_json::to_string(&header).map_err(|e| Error::State(e.to_string()))?;
    let metadata = HashMap::from([(KEY.to_string(), text)]);
    safetensors::serialize(views, Some(metadata)).map_err(|e| Error::State(e.to_string()))
}

/// Reads a file that [`write`] made for the same tensors in any order, with the same method and options that
/// keep the same buffers; also one of version 1.
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
    let (header, velocity) = match metadata.get(KEY) {
        Some(text) => (parse(text)?, "velocity"),
        None => match state_v1::header(&metadata) {
            Some(header) => (header?, state_v1::VELOCITY),
            None => return Err(Error::State(format!("has no `{KEY}` {STRANGE}"))),
        },
    };
    compare_methods(&header, method)?;
    let entries = in_order_of(specs, &header.tensors)?;
    for (entry, spec) in entries.iter().zip(specs) {
        compare(entry, spec, options)?;
    }
    let history = header.history.map(|shared| with_tensors(shared, &entries)).transpose()?;
    let promised = entries.iter().map(|e| usize::from(e.velocity) + usize::from(e.master)).sum::<usize>();
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
                velocity: values(velocity, entry.velocity, stored_as(spec.dtype.state()))?,
                master: values("master", entry.master, Dtype::F32)?,
            })
        })
        .collect::<Result<_>>()?;
    let Header { applied_steps, skipped_steps, .. } = header;
    Ok(State { applied_steps, skipped_steps, history, tensors })
}

/// The header of version 2; only the version of a later one is looked at.
fn parse(text: &str) -> Result<Header> {
    #[derive(Deserialize)]
    struct OfAnyVersion {
        version: u64,
    }
    let damaged = |e: serde_json::Error| {
        Error::State(format!("`{KEY}` in its metadata is damaged: {e}; save it again"))
    };
    let OfAnyVersion { version } = serde_json::from_str(text).map_err(damaged)?;
    if version != VERSION {
        return Err(Error::State(format!(
            "has version {version}; this release reads versions 1 and {VERSION}: load it with the release that saved it"
        )));
    }
    serde_json::from_str(text).map_err(damaged)
}

/// An error if the state is of another method, or of another setting of it.
fn compare_methods(header: &Header, method: &Method) -> Result<()> {
    match (header.method, MethodName::of(method)) {
        (MethodName::Fitted, MethodName::Adaptive) => {
            return Err(Error::State(
                "was saved by the fitted method, but the optimizer is adaptive; make one with the fitted model".into(),
            ));
        }
        (MethodName::Adaptive, MethodName::Fitted) => {
            return Err(Error::State(
                "was saved by the adaptive method, but the optimizer is fitted; make an adaptive one".into(),
            ));
        }
        _ => {}
    }
    if (header.method == MethodName::Adaptive) != header.history.is_some() {
        return Err(damaged_history("only the adaptive method has one, and always"));
    }
    let own = settings(method);
    for (name, saved) in &header.settings {
        let Some(own) = own.get(name) else {
            return Err(Error::State(format!(
                "was saved with {name} {saved}, a setting that this release does not know: load it with the release that saved it"
            )));
        };
        if saved.as_f64() != own.as_f64() {
            return Err(Error::State(format!(
                "was saved with {name} {saved}, but the optimizer has {own}; make one with the same"
            )));
        }
    }
    Ok(())
}

/// Each tensor's entry. An error names the tensors that only the state or only the optimizer has.
fn in_order_of<'a>(specs: &[&TensorSpec], saved: &'a [Entry]) -> Result<Vec<&'a Entry>> {
    let mut by_name: HashMap<&str, &Entry> = HashMap::with_capacity(saved.len());
    for entry in saved {
        if by_name.insert(&entry.name, entry).is_some() {
            let problem = format!("lists tensor `{}` twice; it is damaged: save it again", entry.name);
            return Err(Error::State(problem));
        }
    }
    let own: HashSet<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    let lacking = specs.iter().map(|spec| spec.name.as_str()).filter(|name| !by_name.contains_key(name));
    let additional = saved.iter().map(|entry| entry.name.as_str()).filter(|name| !own.contains(name));
    let (lacking, additional): (Vec<_>, Vec<_>) = (lacking.collect(), additional.collect());
    if lacking.is_empty() && additional.is_empty() {
        return Ok(specs.iter().map(|spec| by_name[spec.name.as_str()]).collect());
    }
    let differences = [("lacks", lacking), ("additionally has", additional)];
    let differences: Vec<String> = (differences.iter().filter(|(_, names)| !names.is_empty()))
        .map(|(what, names)| format!("{what} {}", listed(names)))
        .collect();
    Err(Error::State(format!(
        "is for {} tensors, the optimizer has {}: the state {}; make the optimizer for the same tensors",
        saved.len(),
        specs.len(),
        differences.join(" and ")
    )))
}

/// The first few names.
fn listed(names: &[&str]) -> String {
    const SHOWN: usize = 5;
    let shown = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// An error if a tensor has another shape or format, or a buffer that the options have no use for.
fn compare(saved: &Entry, spec: &TensorSpec, options: &Options) -> Result<()> {
    let name = &spec.name;
    if (&saved.shape, saved.dtype) != (&spec.shape, spec.dtype) {
        return Err(Error::State(format!(
            "tensor `{name}` is {:?} {} in the state but {:?} {} in the optimizer",
            saved.shape, saved.dtype, spec.shape, spec.dtype
        )));
    }
    if saved.master && !options.master_weights {
        return Err(Error::State(format!(
            "holds master weights of `{name}`, but the option `master_weights` is off; make the optimizer with it on"
        )));
    }
    if saved.velocity && options.groups[spec.group].momentum == 0.0 {
        return Err(Error::State(format!(
            "holds a velocity of `{name}`, but the momentum of its group is 0; set it before loading"
        )));
    }
    Ok(())
}

/// What the adaptive method remembers, of all tensors and of each.
fn with_tensors(shared: History, entries: &[&Entry]) -> Result<History> {
    let of_tensor = |entry: &&Entry| {
        entry.history.ok_or_else(|| damaged_history(&format!("tensor `{}` has none", entry.name)))
    };
    let history = History { tensors: entries.iter().map(of_tensor).collect::<Result<_>>()?, ..shared };
    if history.is_sound() { Ok(history) } else { Err(damaged_history("a value is outside its domain")) }
}

fn damaged_history(problem: &str) -> Error {
    Error::State(format!("`history` in its metadata is damaged: {problem}; save it again"))
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
