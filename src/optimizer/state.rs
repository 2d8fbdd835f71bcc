//! Saving and loading what an optimizer remembers: velocities, master weights and counts.
//!
//! The format is safetensors. The metadata holds format, version, counts and the list of tensors; velocities are
//! stored as `momentum.NAME`, master weights as `master.NAME`.

use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};

use super::{Optimizer, TensorState};
use crate::backend::cpu::Momentum;
use crate::error::{Error, Result};
use crate::tensor::DType;

const FORMAT: &str = "rfdescent-optimizer-state";
const VERSION: &str = "1";

/// What identifies a tensor in a saved state.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Identity {
    name: String,
    shape: Vec<usize>,
    dtype: DType,
}

impl Identity {
    fn of(tensor: &TensorState) -> Self {
        let spec = &tensor.spec;
        Self { name: spec.name.clone(), shape: spec.shape.clone(), dtype: spec.dtype }
    }
}

impl Optimizer {
    /// Writes the state to a file, by way of a temporary one, so that a full disk leaves an older file whole.
    ///
    /// # Errors
    /// [`Error::Io`] when the file can't be written.
    pub fn save_state(&self, path: &Path) -> Result<()> {
        crate::files::write_atomically(path, &self.state_to_bytes()?)
    }

    /// Loads a state that [`Optimizer::save_state`] wrote.
    ///
    /// # Errors
    /// [`Error::Io`] when the file can't be read; else as [`Optimizer::load_state_from_bytes`].
    pub fn load_state(&mut self, path: &Path) -> Result<()> {
        let bytes = std::fs::read(path).map_err(|source| Error::Io { path: path.into(), source })?;
        self.load_state_from_bytes(&bytes)
    }

    /// The state as the bytes of a safetensors file.
    ///
    /// # Errors
    /// [`Error::State`] when safetensors refuses it.
    pub fn state_to_bytes(&self) -> Result<Vec<u8>> {
        let mut entries: Vec<(String, Dtype, usize, Vec<u8>)> = Vec::new();
        for tensor in &self.tensors {
            let name = &tensor.spec.name;
            match &tensor.momentum {
                Some(Momentum::F32(v)) => {
                    entries.push((format!("momentum.{name}"), Dtype::F32, v.len(), f32_bytes(v)))
                }
                Some(Momentum::F64(v)) => {
                    let bytes = v.iter().flat_map(|x| x.to_le_bytes()).collect();
                    entries.push((format!("momentum.{name}"), Dtype::F64, v.len(), bytes));
                }
                None => {}
            }
            if let Some(master) = &tensor.master {
                entries.push((format!("master.{name}"), Dtype::F32, master.len(), f32_bytes(master)));
            }
        }
        let views = entries
            .iter()
            .map(|(name, dtype, len, bytes)| Ok((name.as_str(), TensorView::new(*dtype, vec![*len], bytes)?)))
            .collect::<std::result::Result<Vec<_>, safetensors::SafeTensorError>>()
            .map_err(|e| Error::State(e.to_string()))?;
        let identities: Vec<Identity> = self.tensors.iter().map(Identity::of).collect();
        let metadata = HashMap::from([
            ("format".to_string(), FORMAT.to_string()),
            ("version".to_string(), VERSION.to_string()),
            ("applied_steps".to_string(), self.applied_steps.to_string()),
            ("skipped_steps".to_string(), self.skipped_steps.to_string()),
            (
                "tensors".to_string(),
                serde_json::to_string(&identities).map_err(|e| Error::State(e.to_string()))?,
            ),
        ]);
        safetensors::serialize(views, Some(metadata)).map_err(|e| Error::State(e.to_string()))
    }

    /// Loads a state that [`Optimizer::state_to_bytes`] made. On an error the optimizer is as it was.
    ///
    /// # Errors
    /// [`Error::State`] says what is damaged, of another version, or which tensor differs in name, shape or format.
    pub fn load_state_from_bytes(&mut self, bytes: &[u8]) -> Result<()> {
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
        let identities: Vec<Identity> = serde_json::from_str(entry("tensors")?)
            .map_err(|e| Error::State(format!("`tensors` in its metadata is damaged: {e}")))?;
        self.compare(&identities)?;

        let mut loaded = Vec::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            let name = &tensor.spec.name;
            let momentum_format = if tensor.spec.dtype == DType::F64 { Dtype::F64 } else { Dtype::F32 };
            let momentum = values(&stored, &format!("momentum.{name}"), momentum_format, tensor.len)?;
            let master = values(&stored, &format!("master.{name}"), Dtype::F32, tensor.len)?;
            let momentum = momentum.map(|bytes| match momentum_format {
                Dtype::F64 => {
                    Momentum::F64(bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect())
                }
                _ => Momentum::F32(f32_values(bytes)),
            });
            loaded.push((momentum, master.map(f32_values)));
        }
        for (tensor, (momentum, master)) in self.tensors.iter_mut().zip(loaded) {
            tensor.momentum = momentum;
            tensor.master = master;
        }
        (self.applied_steps, self.skipped_steps) = (applied_steps, skipped_steps);
        Ok(())
    }

    /// Says which tensor of a saved state is not the optimizer's.
    fn compare(&self, saved: &[Identity]) -> Result<()> {
        if saved.len() != self.tensors.len() {
            return Err(Error::State(format!(
                "is for {} tensors, the optimizer has {}; make the optimizer for the same list",
                saved.len(),
                self.tensors.len()
            )));
        }
        for (index, (saved, tensor)) in saved.iter().zip(&self.tensors).enumerate() {
            let here = Identity::of(tensor);
            if *saved != here {
                return Err(Error::State(format!(
                    "tensor {index} is `{}` {:?} {} in the state but `{}` {:?} {} in the optimizer",
                    saved.name, saved.shape, saved.dtype, here.name, here.shape, here.dtype
                )));
            }
        }
        Ok(())
    }
}

/// The bytes of a stored list of numbers, `None` where there is none.
fn values<'a>(stored: &SafeTensors<'a>, name: &str, dtype: Dtype, len: usize) -> Result<Option<&'a [u8]>> {
    if !stored.names().contains(&name) {
        return Ok(None);
    }
    let view = stored.tensor(name).map_err(|e| Error::State(e.to_string()))?;
    if view.dtype() != dtype || view.shape() != [len] {
        return Err(Error::State(format!(
            "`{name}` is {:?} {:?}, expected {dtype:?} [{len}]",
            view.dtype(),
            view.shape()
        )));
    }
    Ok(Some(view.data()))
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn f32_values(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}
