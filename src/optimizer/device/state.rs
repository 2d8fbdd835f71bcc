//! Saving and loading what a device optimizer remembers, in the format of the CPU's.

use std::path::Path;

use super::DeviceOptimizer;
use super::plan::{TensorEntry, size_of};
use crate::backend::executor::Stream;
use crate::error::Result;
use crate::optimizer::TensorSpec;
use crate::optimizer::state_file::{self, Buffers, State};
use crate::tensor::DType;

impl TensorEntry {
    /// Bytes of the velocity.
    pub(super) fn momentum_bytes(&self) -> usize {
        let dtype = if self.spec.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        (self.len * size_of(dtype)) as usize
    }

    /// Bytes of the master weights.
    pub(super) fn master_bytes(&self) -> usize {
        (self.len * size_of(DType::F32)) as usize
    }

    /// Whether its parameter can have master weights.
    pub(super) fn is_half(&self) -> bool {
        matches!(self.spec.dtype, DType::F16 | DType::BF16)
    }
}

impl DeviceOptimizer {
    /// Writes the state to a file, by way of a temporary one. Waits for the work on the stream.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) when the file can't be written, [`Error::Device`](crate::Error::Device) when the device fails.
    pub fn save_state(&self, path: &Path, stream: Stream) -> Result<()> {
        crate::files::write_atomically(path, &self.state_to_bytes(stream)?)
    }

    /// Loads a state that this or the CPU's optimizer wrote for the same tensors. Waits for the work on the stream.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) when the file can't be read; else as [`DeviceOptimizer::load_state_from_bytes`].
    pub fn load_state(&mut self, path: &Path, stream: Stream) -> Result<()> {
        let bytes = crate::files::read_regular(path)?;
        self.load_state_from_bytes(&bytes, stream)
    }

    /// The state as the bytes of a safetensors file, which the CPU's optimizer loads as well. Waits for the work on the
    /// stream.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) when the device fails.
    pub fn state_to_bytes(&self, stream: Stream) -> Result<Vec<u8>> {
        let (applied_steps, skipped_steps) = self.control().read_counts(stream)?;
        let tensors = self
            .entries()
            .iter()
            .map(|entry| {
                let read = |present: bool, address: u64, bytes: usize| {
                    present.then(|| self.read(address, bytes, stream)).transpose()
                };
                Ok(Buffers {
                    momentum: read(
                        self.options().groups[entry.spec.group].momentum > 0.0,
                        entry.momentum,
                        entry.momentum_bytes(),
                    )?,
                    master: read(
                        entry.master != 0 && entry.master_ready,
                        entry.master,
                        entry.master_bytes(),
                    )?,
                })
            })
            .collect::<Result<_>>()?;
        let history = self.read_history(applied_steps, stream)?;
        let state = State { applied_steps, skipped_steps, history, tensors };
        state_file::write(&state, &self.spec_list(), self.method())
    }

    /// Loads a state that [`DeviceOptimizer::state_to_bytes`] or the CPU's optimizer made. Waits for the work on the stream;
    /// steps captured before have to be captured again.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) says what is damaged, of another version, which tensor differs in name, shape or format, or
    /// which option was on when the state was saved and is off now; the optimizer is then as it was. [`Error::Device`](crate::Error::Device) when the device fails.
    pub fn load_state_from_bytes(&mut self, bytes: &[u8], stream: Stream) -> Result<()> {
        let state = state_file::read(bytes, &self.spec_list(), self.method(), self.options())?;
        for (k, buffers) in state.tensors.iter().enumerate() {
            let entry = &self.entries()[k];
            let (momentum, master) = (entry.momentum, entry.master);
            match buffers.momentum {
                Some(bytes) => self.write(momentum, bytes, stream)?,
                None => self.clear(momentum, entry.momentum_bytes(), stream)?,
            }
            if let Some(bytes) = buffers.master {
                self.write(master, bytes, stream)?;
            }
            self.set_master_ready(k, buffers.master.is_some());
        }
        self.restore(state.applied_steps, state.skipped_steps, state.history.as_ref(), stream)
    }

    fn spec_list(&self) -> Vec<&TensorSpec> {
        self.specs().collect()
    }

    fn read(&self, address: u64, bytes: usize, stream: Stream) -> Result<Vec<u8>> {
        let mut copy = vec![0; bytes];
        if bytes > 0 {
            // SAFETY: one of this optimizer's own buffers, by its size; the copy stays until the wait below.
            unsafe { self.device().executor().copy_to_host(copy.as_mut_ptr(), address, bytes, stream)? };
            self.device().synchronize(stream)?;
        }
        Ok(copy)
    }

    fn write(&self, address: u64, bytes: &[u8], stream: Stream) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: one of this optimizer's own buffers, whose size the state's reader has checked; the bytes stay borrowed
        // until the wait below.
        unsafe { self.device().executor().copy_to_device(address, bytes.as_ptr(), bytes.len(), stream)? };
        self.device().synchronize(stream)
    }

    pub(super) fn clear(&self, address: u64, bytes: usize, stream: Stream) -> Result<()> {
        if address == 0 || bytes == 0 {
            return Ok(());
        }
        // SAFETY: one of this optimizer's own buffers, by its size, a multiple of 4; its kernels use the same stream.
        unsafe { self.device().executor().fill(address, 0, bytes / 4, stream) }
    }
}
