//! Velocities, master weights and variances on the device.

use super::DeviceOptimizer;
use crate::backend::abi::RFD_SAMPLED_CHUNKS;
use crate::backend::executor::Stream;
use crate::error::Result;
use crate::optimizer::TensorSpec;
use crate::optimizer::part::Part;
use crate::tensor::DType;

/// Those of one tensor.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Buffers {
    /// Address of the velocity, 0 for none.
    pub velocity: u64,
    /// Address of the master weights, 0 for none.
    pub master: u64,
    /// Whether the master weights hold something.
    pub master_ready: bool,
    /// Address of the variances of rows and columns, as [`VariancesLayout`] says; 0 for none.
    pub variances: u64,
}

/// Bytes of the velocity of so many elements.
pub(super) fn velocity_bytes(spec: &TensorSpec, len: usize) -> usize {
    len * spec.dtype.state().size()
}

/// Bytes of master weights.
pub(super) fn master_bytes(len: usize) -> usize {
    len * DType::F32.size()
}

/// How the variances of one tensor lie (`kernels/rows.cuh`): two sides, of which a step reads one and writes
/// the other, and a workspace for sums over columns, and over pieces of rows that ranks share. A side is the
/// scales of columns, f32, then their averages and those of rows, f64.
#[derive(Clone, Copy, Debug)]
pub(super) struct VariancesLayout {
    rows: usize,
    columns: usize,
    pieces: usize,
}

impl VariancesLayout {
    pub fn of(part: &Part, len: usize) -> Self {
        let pieces = if part.shared.is_some() { part.rows.count(len) } else { 0 };
        Self { rows: part.row_averages, columns: part.rows.columns, pieces }
    }

    /// Bytes of the scales, a multiple of 16.
    pub fn scales(self) -> usize {
        (self.columns * size_of::<f32>()).next_multiple_of(16)
    }

    /// Bytes of the averages.
    pub fn averages(self) -> usize {
        (self.columns + self.rows) * size_of::<f64>()
    }

    /// Bytes of a side, a multiple of 16.
    pub fn side(self) -> usize {
        (self.scales() + self.averages()).next_multiple_of(16)
    }

    /// Bytes of all.
    fn bytes(self) -> usize {
        2 * self.side() + (RFD_SAMPLED_CHUNKS as usize * self.columns + 2 * self.pieces) * size_of::<f64>()
    }
}

impl DeviceOptimizer {
    /// Makes velocities, at rest, for those of the tensors that have none.
    pub(super) fn require_velocities(&mut self, tensors: Vec<usize>) -> Result<()> {
        let missing: Vec<usize> = tensors.into_iter().filter(|&k| self.buffers[k].velocity == 0).collect();
        let (specs, lens) = (self.core.specs(), self.core.lens());
        let sizes: Vec<usize> = missing.iter().map(|&k| velocity_bytes(&specs[k], lens[k])).collect();
        for (k, address) in missing.into_iter().zip(self.allocate(&sizes)?) {
            self.buffers[k].velocity = address;
        }
        Ok(())
    }

    /// Makes master weights, not yet filled, for all tensors that can have some.
    pub(super) fn require_masters(&mut self) -> Result<()> {
        let halves: Vec<usize> = (self.core.specs().iter().enumerate())
            .filter(|(_, spec)| spec.dtype.is_half())
            .map(|(k, _)| k)
            .collect();
        let sizes: Vec<usize> = halves.iter().map(|&k| master_bytes(self.core.lens()[k])).collect();
        for (k, address) in halves.into_iter().zip(self.allocate(&sizes)?) {
            self.buffers[k].master = address;
        }
        Ok(())
    }

    /// Makes variances of rows and columns for each tensor: averages of nothing, and columns that weigh 1.
    pub(super) fn require_variances(&mut self) -> Result<()> {
        let sizes: Vec<usize> = (self.core.parts().iter().zip(self.core.lens()))
            .map(|(part, &len)| VariancesLayout::of(part, len).bytes())
            .collect();
        let addresses = self.allocate(&sizes)?;
        for (buffers, address) in self.buffers.iter_mut().zip(addresses) {
            buffers.variances = address;
        }
        for (buffers, part) in self.buffers.iter().zip(self.core.parts()) {
            let rows = part.rows;
            if rows.columns > 0 {
                let one = 1_f32.to_bits();
                // SAFETY: the scales of the side that is read first, a part of memory that nobody uses yet.
                unsafe {
                    self.device.executor().fill(buffers.variances, one, rows.columns, Stream::PER_THREAD)?;
                }
            }
        }
        self.device.synchronize(Stream::PER_THREAD)?;
        Ok(())
    }

    /// One allocation for buffers of the given sizes; their addresses, multiples of 256.
    fn allocate(&mut self, sizes: &[usize]) -> Result<Vec<u64>> {
        if sizes.is_empty() {
            return Ok(Vec::new());
        }
        let mut end = 0;
        let mut offsets = Vec::with_capacity(sizes.len());
        for size in sizes {
            offsets.push(end);
            end += size.next_multiple_of(256);
        }
        let slab = self.device.allocate(end)?;
        let base = slab.address();
        self.slabs.push(slab);
        self.prepared = None;
        Ok(offsets.into_iter().map(|offset| base + offset as u64).collect())
    }

    /// Brings a velocity to rest.
    pub(super) fn clear_velocity(&self, tensor: usize, stream: Stream) -> Result<()> {
        let address = self.buffers[tensor].velocity;
        let bytes = velocity_bytes(&self.core.specs()[tensor], self.core.lens()[tensor]);
        if address == 0 || bytes == 0 {
            return Ok(());
        }
        // SAFETY: this optimizer's own buffer, by its size, a multiple of 4; its kernels use the same stream.
        unsafe { self.device.executor().fill(address, 0, bytes / 4, stream) }
    }
}
