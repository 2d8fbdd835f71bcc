//! What the method remembers, on the device: two slots, of which a step reads one and writes the other. The
//! first is that after an even number of applied steps.

use crate::backend::executor::{Device, DeviceBuffer, Stream};
use crate::error::Result;
use crate::optimizer::method::History;

/// Memory for both slots; empty for a method that remembers nothing.
#[derive(Debug)]
pub(super) struct HistoryMemory {
    memory: Option<DeviceBuffer>,
    /// Numbers of all tensors together, and those of each tensor.
    shared: usize,
    tensors: usize,
}

impl HistoryMemory {
    /// That of an optimizer that has applied no step.
    pub fn new(device: &Device, fresh: &History) -> Result<Self> {
        let (shared, tensors) = (fresh.shared.len(), fresh.tensors.len());
        let mut history = Self { memory: None, shared, tensors };
        if history.slot_bytes() > 0 {
            history.memory = Some(device.allocate(2 * history.slot_bytes())?);
            history.write(0, fresh, Stream::PER_THREAD)?;
        }
        Ok(history)
    }

    /// Its address for the kernels, 0 where there is none.
    pub fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, DeviceBuffer::address)
    }

    /// That of the tensors from one on, after so many applied steps.
    pub fn of_tensors(&self, applied: u64, first: usize, numbers: usize) -> u64 {
        let numbers = (self.shared + first * numbers) * size_of::<f64>();
        self.address() + (self.offset(applied) + numbers) as u64
    }

    /// What is remembered after so many applied steps, after the work on the stream.
    pub fn read(&self, applied: u64, stream: Stream) -> Result<History> {
        let Some(memory) = &self.memory else { return Ok(History::default()) };
        let mut bytes = vec![0; self.slot_bytes()];
        memory.download(self.offset(applied), &mut bytes, stream)?;
        let mut shared: Vec<f64> = bytes.as_chunks().0.iter().map(|word| f64::from_le_bytes(*word)).collect();
        let tensors = shared.split_off(self.shared);
        Ok(History { shared, tensors })
    }

    /// Replaces it.
    pub fn write(&mut self, applied: u64, history: &History, stream: Stream) -> Result<()> {
        let offset = self.offset(applied);
        let Some(memory) = &mut self.memory else { return Ok(()) };
        let numbers = history.shared.iter().chain(&history.tensors);
        let bytes: Vec<u8> = numbers.flat_map(|number| number.to_le_bytes()).collect();
        memory.upload(offset, &bytes, stream)
    }

    fn slot_bytes(&self) -> usize {
        (self.shared + self.tensors) * size_of::<f64>()
    }

    fn offset(&self, applied: u64) -> usize {
        if applied.is_multiple_of(2) { 0 } else { self.slot_bytes() }
    }
}
