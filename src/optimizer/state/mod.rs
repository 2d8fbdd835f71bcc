//! The file format of saved states, the same for every backend: safetensors. The metadata has one key, whose
//! value is JSON text: version, method, counts, what the method remembers, and the list of tensors
//! ([`Header`]). Velocities are stored as `velocity.NAME`, master weights as `master.NAME`, averages of
//! columns and rows as `variances.NAME`, flat and little-endian. Equal states have equal bytes.

mod v1;

use std::collections::{HashMap, HashSet};
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::core::Core;
use super::method::History;
use super::spec::TensorSpec;
use crate::error::{Error, Result};
use crate::tensor::DType;

/// The one key of the metadata: more would be written in a random order.
const KEY: &str = "rfdescent_optimizer_state";
const VERSION: u64 = 2;
/// Beyond what any run has taken, and far from where counts, or their sum, would overflow.
const MOST_STEPS: u64 = 1 << 62;
/// The end of the message about a file that is not one of these.
pub(super) const STRANGE: &str = "in its metadata; it was not saved by this library";

/// Numbers by their names.
type Named = serde_json::Map<String, Value>;

/// The metadata. The order of the fields is that in the file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Header {
    pub version: u64,
    /// Its name.
    pub method: String,
    /// Those of the method that what it remembers is only right with.
    pub settings: Named,
    pub applied_steps: u64,
    pub skipped_steps: u64,
    /// What the method remembers of all tensors together.
    #[serde(default, skip_serializing_if = "Named::is_empty")]
    pub history: Named,
    pub tensors: Vec<Entry>,
}

/// What identifies a tensor in a saved state, which buffers are stored of it, and what the method remembers
/// of it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Entry {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub velocity: bool,
    pub master: bool,
    /// Elements of a row and number of columns; only of a method that has rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<[usize; 2]>,
    #[serde(default, skip_serializing_if = "Named::is_empty")]
    pub history: Named,
}

/// The buffers of one tensor, little-endian; `None` for one that does not exist.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffers<B> {
    /// In the format that [`DType::state`] says.
    pub velocity: Option<B>,
    /// f32.
    pub master: Option<B>,
    /// A f64 for each column, then for each row; always with a method that has rows.
    pub variances: Option<B>,
}

/// What a state holds.
#[derive(Clone, Debug)]
pub(crate) struct State<B> {
    pub applied_steps: u64,
    pub skipped_steps: u64,
    /// What the method remembers.
    pub history: History,
    /// In the order of the optimizer's tensors.
    pub tensors: Vec<Buffers<B>>,
}

/// Numbers under their names.
fn named(names: &[&str], numbers: &[f64]) -> Named {
    names.iter().zip(numbers).map(|(&name, &number)| (name.into(), number.into())).collect()
}

/// Elements of a row and number of columns of a tensor, where the method has rows.
fn rows_of(core: &Core, tensor: usize) -> Option<[usize; 2]> {
    core.method().descent().has_rows().then(|| core.parts()[tensor].described())
}

/// The settings of a method that belong to what it remembers.
fn settings(core: &Core) -> Named {
    let settings = core.method().descent().lasting_settings();
    settings.into_iter().map(|(name, value)| (name.into(), value.into())).collect()
}

/// The format of the velocity of a parameter of the given one.
fn velocity_format(dtype: DType) -> Dtype {
    if dtype.state() == DType::F64 { Dtype::F64 } else { Dtype::F32 }
}

/// The error about a state, with the file that it came from.
pub(crate) fn of_file(path: &Path) -> impl Fn(Error) -> Error {
    move |error| match error {
        Error::State(problem) => Error::State(format!("{}: {problem}", path.display())),
        other => other,
    }
}

/// The bytes of the file.
pub(crate) fn write(state: &State<Vec<u8>>, core: &Core) -> Result<Vec<u8>> {
    let specs = core.specs();
    let names = core.method().descent().names();
    let mut views = Vec::new();
    for ((spec, buffers), (&len, part)) in
        (specs.iter().zip(&state.tensors)).zip(core.lens().iter().zip(core.parts()))
    {
        let stored = [
            ("velocity", &buffers.velocity, velocity_format(spec.dtype), len),
            ("master", &buffers.master, Dtype::F32, len),
            ("variances", &buffers.variances, Dtype::F64, part.averages()),
        ];
        for (kind, bytes, dtype, len) in stored {
            if let Some(bytes) = bytes {
                let view =
                    TensorView::new(dtype, vec![len], bytes).map_err(|e| Error::State(e.to_string()))?;
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
            rows: rows_of(core, index),
            history: named(names.tensor, &state.history.tensors[index * names.tensor.len()..]),
        })
        .collect();
    let header = Header {
        version: VERSION,
        method: core.method().name().into(),
        settings: settings(core),
        applied_steps: state.applied_steps,
        skipped_steps: state.skipped_steps,
        history: named(names.shared, &state.history.shared),
        tensors,
    };
    let text = serde_json::to_string(&header).map_err(|e| Error::State(e.to_string()))?;
    let metadata = HashMap::from([(KEY.to_string(), text)]);
    safetensors::serialize(views, Some(metadata)).map_err(|e| Error::State(e.to_string()))
}

/// Reads a file that [`write`] made for the same tensors in any order, with the same method and options that
/// keep the same buffers; also one of version 1.
pub(crate) fn read<'a>(bytes: &'a [u8], core: &Core) -> Result<State<&'a [u8]>> {
    let specs = core.specs();
    let damaged = |e: safetensors::SafeTensorError| {
        Error::State(format!("is not a whole safetensors file ({e}); save it again"))
    };
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(damaged)?;
    let stored = SafeTensors::deserialize(bytes).map_err(damaged)?;
    let metadata = metadata.metadata().clone().unwrap_or_default();
    let (header, velocity) = match metadata.get(KEY) {
        Some(text) => (parse(text)?, "velocity"),
        None => match v1::header(&metadata) {
            Some(header) => (header?, v1::VELOCITY),
            None => return Err(Error::State(format!("has no `{KEY}` {STRANGE}"))),
        },
    };
    compare_methods(&header, core)?;
    let entries = in_order_of(specs, &header.tensors)?;
    for (tensor, entry) in entries.iter().enumerate() {
        compare(entry, core, tensor)?;
    }
    let history = history(&header.history, &entries, core)?;
    let has_rows = core.method().descent().has_rows();
    let buffers = |e: &Entry| usize::from(e.velocity) + usize::from(e.master) + usize::from(has_rows);
    let promised = entries.iter().map(|e| buffers(e)).sum::<usize>();
    if stored.len() != promised {
        return Err(Error::State(format!(
            "holds {} buffers, but its metadata promises {promised}; it is damaged: save it again",
            stored.len()
        )));
    }
    let tensors = (specs.iter().zip(&entries).enumerate())
        .map(|(tensor, (spec, entry))| {
            let len = core.lens()[tensor];
            let values = |kind: &str, present: bool, dtype, len| {
                present.then(|| values(&stored, &format!("{kind}.{}", spec.name), dtype, len)).transpose()
            };
            let variances = values("variances", has_rows, Dtype::F64, core.parts()[tensor].averages())?;
            check_variances(variances, &spec.name)?;
            Ok(Buffers {
                velocity: values(velocity, entry.velocity, velocity_format(spec.dtype), len)?,
                master: values("master", entry.master, Dtype::F32, len)?,
                variances,
            })
        })
        .collect::<Result<_>>()?;
    let Header { applied_steps, skipped_steps, .. } = header;
    for (name, count) in [("applied_steps", applied_steps), ("skipped_steps", skipped_steps)] {
        if count > MOST_STEPS {
            let problem =
                format!("`{name}` in its metadata is {count}, more than any run takes; save it again");
            return Err(Error::State(problem));
        }
    }
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
fn compare_methods(header: &Header, core: &Core) -> Result<()> {
    let (saved, own) = (&header.method, core.method().name());
    if saved != own {
        return Err(Error::State(format!(
            "was saved by the {saved} method, but the optimizer is {own}; make one of the method it was saved by"
        )));
    }
    let own = settings(core);
    if let Some(lacking) = own.keys().find(|name| !header.settings.contains_key(*name)) {
        return Err(Error::State(format!(
            "was saved by an earlier release, whose {} method remembered other things (it has no `{lacking}`): go on with \
             that release, or begin anew",
            header.method
        )));
    }
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
fn in_order_of<'a>(specs: &[TensorSpec], saved: &'a [Entry]) -> Result<Vec<&'a Entry>> {
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
fn compare(saved: &Entry, core: &Core, tensor: usize) -> Result<()> {
    let spec = &core.specs()[tensor];
    let name = &spec.name;
    if (&saved.shape, saved.dtype) != (&spec.shape, spec.dtype) {
        return Err(Error::State(format!(
            "tensor `{name}` is {:?} {} in the state but {:?} {} in the optimizer; make the optimizer for the same tensors",
            saved.shape, saved.dtype, spec.shape, spec.dtype
        )));
    }
    let own = rows_of(core, tensor);
    if saved.rows != own {
        let text = |rows: Option<[usize; 2]>| match rows {
            None => "no rows".into(),
            Some([len, 0]) => format!("rows of {len} elements without columns"),
            Some([len, _]) => format!("rows of {len} elements"),
        };
        return Err(Error::State(format!(
            "tensor `{name}` has {} in the state but {} in the optimizer; describe its rows as they were",
            text(saved.rows),
            text(own)
        )));
    }
    if saved.master && !core.options().master_weights {
        return Err(Error::State(format!(
            "holds master weights of `{name}`, but the option `master_weights` is off; make the optimizer with it on"
        )));
    }
    if saved.velocity && core.velocity_decay_of(tensor) == 0.0 {
        return Err(Error::State(format!(
            "holds a velocity of `{name}`, but the momentum of its group is 0; set it before loading"
        )));
    }
    Ok(())
}

/// What the method remembers, of all tensors together and of each.
fn history(shared: &Named, entries: &[&Entry], core: &Core) -> Result<History> {
    let descent = core.method().descent();
    let names = descent.names();
    let mut history = History { shared: numbers(shared, names.shared)?, tensors: Vec::new() };
    for entry in entries {
        let of_tensor = |error| match error {
            Error::State(problem) => Error::State(format!("tensor `{}`: {problem}", entry.name)),
            other => other,
        };
        history.tensors.extend(numbers(&entry.history, names.tensor).map_err(of_tensor)?);
    }
    if !names.is_empty() {
        descent.check_history(&history)?;
    }
    Ok(history)
}

/// The numbers of the given names, of which there must be no others.
fn numbers(named: &Named, names: &[&str]) -> Result<Vec<f64>> {
    if let Some(strange) = named.keys().find(|key| !names.contains(&key.as_str())) {
        return Err(damaged_history(&format!("this release does not know its `{strange}`")));
    }
    let number = |&name: &&str| {
        let found = named.get(name).and_then(Value::as_f64);
        found.ok_or_else(|| damaged_history(&format!("it has no number `{name}`")))
    };
    names.iter().map(number).collect()
}

/// The error for numbers that no step has left.
pub(super) fn damaged_history(problem: &str) -> Error {
    Error::State(format!("`history` in its metadata is damaged: {problem}; save it again"))
}

/// What the columns of a tensor weigh, by the averages of a state.
pub(crate) fn column_scales(core: &Core, history: &History, tensor: usize, averages: &[u8]) -> Vec<f32> {
    let rule = core.method().descent().column_variance(history, tensor);
    let columns = averages.as_chunks::<8>().0.iter().take(core.parts()[tensor].rows.columns);
    columns.map(|bytes| rule.scale(f64::from_le_bytes(*bytes))).collect()
}

/// An error unless the numbers can be averages of squares.
fn check_variances(bytes: Option<&[u8]>, name: &str) -> Result<()> {
    let bytes = bytes.unwrap_or_default();
    let mut numbers = bytes.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes));
    match numbers.position(|x| !(x >= 0.0 && x.is_finite())) {
        None => Ok(()),
        Some(place) => Err(Error::State(format!(
            "`variances.{name}` is not a number of 0 or more at place {place}; it is damaged: save it again"
        ))),
    }
}

/// The bytes of a stored list of numbers.
fn values<'a>(stored: &SafeTensors<'a>, name: &str, dtype: Dtype, len: usize) -> Result<&'a [u8]> {
    let view = stored
        .tensor(name)
        .map_err(|e| Error::State(format!("lacks `{name}` ({e}); it is damaged: save it again")))?;
    if view.dtype() != dtype || view.shape() != [len] {
        return Err(Error::State(format!(
            "`{name}` is {:?} {:?}, not {dtype:?} [{len}]; it is damaged: save it again",
            view.dtype(),
            view.shape()
        )));
    }
    Ok(view.data())
}
