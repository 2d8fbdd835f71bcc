//! Memory in which kernels leave the sums of chunks, segments and tensors.

use super::plan::Extent;
use crate::backend::abi::RfdStep;
use crate::backend::executor::{Device, DeviceBuffer};
use crate::error::Result;

/// Memory for the sums, by size of the list.
#[derive(Debug)]
pub(super) struct Workspace {
    memory: DeviceBuffer,
    extent: Extent,
    tensors: usize,
    sums: usize,
    /// What steps captured before may still use.
    retired: Vec<DeviceBuffer>,
}

impl Workspace {
    pub fn new(device: &Device, extent: Extent, tensors: usize, sums: usize) -> Result<Self> {
        let memory = device.allocate(Self::offsets(extent, tensors, sums)[4])?;
        Ok(Self { memory, extent, tensors, sums, retired: Vec::new() })
    }

    /// Where sums of segments and tensors and the counters of both begin, behind the sums of chunks; the size
    /// of all.
    fn offsets(extent: Extent, tensors: usize, sums: usize) -> [usize; 5] {
        let segments = 8 * extent.chunks as usize * sums;
        let tensor_sums = segments + 8 * extent.segments as usize * sums;
        let segment_done = tensor_sums + 8 * tensors * sums;
        let tensor_done = segment_done + 4 * extent.segments as usize;
        [segments, tensor_sums, segment_done, tensor_done, tensor_done + 4 * tensors]
    }

    /// Makes it large enough for `sums` sums a chunk.
    pub fn require(&mut self, device: &Device, sums: usize) -> Result<()> {
        if sums > self.sums {
            let larger = Self::new(device, self.extent, self.tensors, sums)?;
            let smaller = std::mem::replace(self, larger);
            self.retired = smaller.retired;
            self.retired.push(smaller.memory);
        }
        Ok(())
    }

    pub fn place(&self, step: &mut RfdStep) {
        let base = self.memory.address();
        let at = Self::offsets(self.extent, self.tensors, self.sums).map(|offset| base + offset as u64);
        step.chunk_sums = base;
        [step.segment_sums, step.tensor_sums, step.segment_done, step.tensor_done, _] = at;
    }
}
