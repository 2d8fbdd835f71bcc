//! Saving and loading what the CPU optimizer remembers: velocities, master weights and counts.

use std::path::Path;

use super::Optimizer;
use crate::backend::cpu::{Averages, Velocity};
use crate::error::Result;
use crate::optimizer::state::{self, State, column_scales};
use crate::tensor::DType;

impl Optimizer {
    /// Writes the state to a file, by way of a temporary one, so that a full disk leaves an older file whole.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) when the file can't be written.
    pub fn save_state(&self, path: &Path) -> Result<()> {
        crate::files::write_atomically(path, &self.state_to_bytes()?)
    }

    /// Loads a state that [`Optimizer::save_state`] wrote.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) when the file can't be read; else as
    /// [`Optimizer::load_state_from_bytes`].
    pub fn load_state(&mut self, path: &Path) -> Result<()> {
        let bytes = crate::files::read_regular(path)?;
        self.load_state_from_bytes(&bytes).map_err(state::of_file(path))
    }

    /// The state as the bytes of a safetensors file.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) when safetensors refuses it.
    pub fn state_to_bytes(&self) -> Result<Vec<u8>> {
        let has_rows = self.core.method().descent().has_rows();
        let tensors = (self.buffers.iter())
            .map(|buffers| state::Buffers {
                velocity: buffers.velocity.as_ref().map(|velocity| match velocity {
                    Velocity::F32(v) => f32_bytes(v),
                    Velocity::F64(v) => f64_bytes(v),
                }),
                master: buffers.master.as_deref().map(f32_bytes),
                variances: has_rows
                    .then(|| f64_bytes(&[&buffers.averages.columns[..], &buffers.averages.rows].concat())),
            })
            .collect();
        let state = State {
            applied_steps: self.applied_steps,
            skipped_steps: self.skipped_steps,
            history: self.history.clone(),
            tensors,
        };
        state::write(&state, &self.core)
    }

    /// Loads a state that [`Optimizer::state_to_bytes`] made. On an error the optimizer is as it was.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) says what is damaged, of another version, which tensor differs
    /// in name, shape or format, or which option was on when the state was saved and is off now.
    pub fn load_state_from_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        let state = state::read(bytes, &self.core)?;
        for (k, (own, saved)) in self.buffers.iter_mut().zip(state.tensors).enumerate() {
            let spec = &self.core.specs()[k];
            if let Some(bytes) = saved.variances {
                let mut columns = f64_values(bytes);
                let rows = columns.split_off(self.core.parts()[k].rows.columns);
                own.averages = Averages { columns, rows };
                own.column_scales = column_scales(&self.core, &state.history, k, bytes);
            }
            own.velocity = saved.velocity.map(|bytes| match spec.dtype.state() {
                DType::F64 => Velocity::F64(f64_values(bytes)),
                _ => Velocity::F32(f32_values(bytes)),
            });
            own.master = saved.master.map(f32_values);
        }
        self.history = state.history;
        (self.applied_steps, self.skipped_steps) = (state.applied_steps, state.skipped_steps);
        Ok(())
    }
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn f64_bytes(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn f64_values(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
}

fn f32_values(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}
