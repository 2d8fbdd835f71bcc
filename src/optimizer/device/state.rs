//! Saving and loading what a device optimizer remembers, in the format of the CPU's.

use std::path::Path;

use super::DeviceOptimizer;
use super::buffers::{Buffers, VariancesLayout, master_bytes, velocity_bytes};
use crate::backend::executor::Stream;
use crate::error::Result;
use crate::optimizer::method::History;
use crate::optimizer::state::{self, State, column_scales};

impl DeviceOptimizer {
    /// Writes the state to a file, by way of a temporary one. Waits for the work on the stream.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) when the file can't be written,
    /// [`Error::Device`](crate::Error::Device) when the device fails.
    pub fn save_state(&self, path: &Path, stream: Stream) -> Result<()> {
        crate::files::write_atomically(path, &self.state_to_bytes(stream)?)
    }

    /// Loads a state that this or the CPU's optimizer wrote for the same tensors. Waits for the work on the
    /// stream.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) when the file can't be read; else as
    /// [`DeviceOptimizer::load_state_from_bytes`].
    pub fn load_state(&mut self, path: &Path, stream: Stream) -> Result<()> {
        let bytes = crate::files::read_regular(path)?;
        self.load_state_from_bytes(&bytes, stream).map_err(state::of_file(path))
    }

    /// The state as the bytes of a safetensors file, which the CPU's optimizer loads as well. Waits for the
    /// work on the stream.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) when the device fails.
    pub fn state_to_bytes(&self, stream: Stream) -> Result<Vec<u8>> {
        let (applied_steps, skipped_steps) = self.control.read_counts(stream)?;
        let history = self.history.read(applied_steps, stream)?;
        let has_rows = self.core.method().descent().has_rows();
        let tensors = (self.core.specs().iter().zip(self.core.lens()).zip(&self.buffers).enumerate())
            .map(|(k, ((spec, &len), buffers))| {
                let read = |present: bool, address: u64, bytes: usize| {
                    present.then(|| self.read(address, bytes, stream)).transpose()
                };
                let moves = self.core.velocity_decay_of(k) > 0.0;
                let ready = buffers.master != 0 && buffers.master_ready;
                Ok(state::Buffers {
                    velocity: read(moves, buffers.velocity, velocity_bytes(spec, len))?,
                    master: read(ready, buffers.master, master_bytes(len))?,
                    variances: read(has_rows, self.averages(k, &history), self.layout(k).averages())?,
                })
            })
            .collect::<Result<_>>()?;
        state::write(&State { applied_steps, skipped_steps, history, tensors }, &self.core)
    }

    /// Loads a state that [`DeviceOptimizer::state_to_bytes`] or the CPU's optimizer made. Waits for the work
    /// on the stream; steps captured before have to be captured again.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) says what is damaged, of another version, which tensor differs
    /// in name, shape or format, or which option was on when the state was saved and is off now; the
    /// optimizer is then as it was. [`Error::Device`](crate::Error::Device) when the device fails.
    pub fn load_state_from_bytes(&mut self, bytes: &[u8], stream: Stream) -> Result<()> {
        let state = state::read(bytes, &self.core)?;
        for (k, saved) in state.tensors.iter().enumerate() {
            let Buffers { velocity, master, .. } = self.buffers[k];
            match saved.velocity {
                Some(bytes) => self.write(velocity, bytes, stream)?,
                None => self.clear_velocity(k, stream)?,
            }
            if let Some(bytes) = saved.master {
                self.write(master, bytes, stream)?;
            }
            self.buffers[k].master_ready = saved.master.is_some();
            if let Some(bytes) = saved.variances {
                let address = self.averages(k, &state.history);
                self.write(address, bytes, stream)?;
                let scales = column_scales(&self.core, &state.history, k, bytes);
                let scales: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
                self.write(address - self.layout(k).scales() as u64, &scales, stream)?;
            }
        }
        // The next step has to look which master weights to fill.
        self.prepared = None;
        self.half = None;
        let lacks = self.core.method().descent().lacks_measures(&state.history);
        self.unmeasured = lacks.then_some(state.applied_steps);
        self.history.write(state.applied_steps, &state.history, stream)?;
        // The status is that of an optimizer that has seen no step yet.
        self.control.write_counts(state.applied_steps, state.skipped_steps, stream)?;
        self.mirror.clear();
        Ok(())
    }

    /// Where the averages of a tensor's columns and rows lie that the next step reads.
    fn averages(&self, tensor: usize, history: &History) -> u64 {
        let turn = self.core.method().descent().turn(history, tensor);
        let layout = self.layout(tensor);
        self.buffers[tensor].variances + (turn * layout.side() + layout.scales()) as u64
    }

    fn layout(&self, tensor: usize) -> VariancesLayout {
        VariancesLayout::of(&self.core.parts()[tensor], self.core.lens()[tensor])
    }

    fn read(&self, address: u64, bytes: usize, stream: Stream) -> Result<Vec<u8>> {
        let mut copy = vec![0; bytes];
        if bytes > 0 {
            // SAFETY: one of this optimizer's own buffers, by its size; the copy stays until the wait below.
            unsafe { self.device.executor().copy_to_host(copy.as_mut_ptr(), address, bytes, stream)? };
            self.device.synchronize(stream)?;
        }
        Ok(copy)
    }

    fn write(&self, address: u64, bytes: &[u8], stream: Stream) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: one of this optimizer's own buffers, whose size the state's reader has checked; the bytes
        // stay borrowed until the wait below.
        unsafe { self.device.executor().copy_to_device(address, bytes.as_ptr(), bytes.len(), stream)? };
        self.device.synchronize(stream)
    }
}
