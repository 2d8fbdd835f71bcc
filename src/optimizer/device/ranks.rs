//! What the halves of a step need on the device beside what a step needs, with a method that has rows: where
//! each tensor lies in a whole one, and the numbers that ranks add up.

use crate::backend::abi::{RfdPart, RfdStep};
use crate::backend::executor::{Device, DeviceBuffer, Stream};
use crate::backend::words::Plain;
use crate::error::Result;
use crate::optimizer::core::Core;
use crate::optimizer::sums;

#[derive(Debug)]
pub(super) struct Ranks {
    /// An [`RfdPart`] for each tensor, then the places of columns.
    parts: DeviceBuffer,
    numbers: DeviceBuffer,
}

impl Ranks {
    pub fn new(device: &Device, core: &Core) -> Result<Self> {
        let behind = core.parts().len() * size_of::<RfdPart>();
        let places = || core.parts().iter().filter_map(|part| part.places());
        let count = places().map(<[usize]>::len).sum::<usize>();
        let mut parts = device.allocate(behind + count * size_of::<u32>())?;
        let (mut bytes, mut first_number) = (Vec::new(), 0);
        let mut address = parts.address() + behind as u64;
        for part in core.parts() {
            let columns = part.places().map_or(0, <[usize]>::len);
            let places = if columns > 0 { address } else { 0 };
            bytes.extend_from_slice(RfdPart { first_number, places, ..part.for_kernels() }.bytes());
            first_number += sums::len(part) as u64;
            address += (columns * size_of::<u32>()) as u64;
        }
        // No more than a row has elements, of which longer ones have no columns.
        bytes.extend(places().flatten().flat_map(|&place| (place as u32).to_le_bytes()));
        parts.upload(0, &bytes, Stream::PER_THREAD)?;
        let numbers = device.allocate(core.sums_len() * size_of::<f64>())?;
        Ok(Self { parts, numbers })
    }

    /// Where the numbers lie.
    pub fn numbers(&self) -> u64 {
        self.numbers.address()
    }

    /// Writes into a launch's parameters where the parts lie, those from one tensor on, and numbers of all
    /// tensors.
    pub fn place(&self, step: &mut RfdStep, first: usize, numbers: u64) {
        step.parts = self.parts.address() + (first * size_of::<RfdPart>()) as u64;
        step.rank_sums = numbers;
    }

    /// Queues zeros in the place of the numbers.
    pub fn clear(&self, device: &Device, stream: Stream) -> Result<()> {
        match self.numbers.len() / size_of::<u32>() {
            0 => Ok(()),
            // SAFETY: this object's own memory, by its size; kernels that use it come before or after on the
            // stream, which the caller gives for that.
            words => unsafe { device.executor().fill(self.numbers(), 0, words, stream) },
        }
    }

    /// The numbers, after the work on the stream.
    pub fn read(&self, stream: Stream) -> Result<Vec<f64>> {
        let mut bytes = vec![0; self.numbers.len()];
        self.numbers.download(0, &mut bytes, stream)?;
        Ok(bytes.as_chunks().0.iter().map(|word| f64::from_le_bytes(*word)).collect())
    }
}
