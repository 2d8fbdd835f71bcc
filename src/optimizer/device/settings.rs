//! The small block of device memory that holds what may change between replays of a captured step, and its
//! writes.

use crate::backend::abi::{RfdGroup, RfdSettings, RfdSquaredNorm, RfdStatus, RfdStep, RfdTable, RfdTensor};
use crate::backend::executor::{Device, DeviceBuffer, Kernel, Launch, Stream};
use crate::backend::words::Plain;
use crate::error::Result;
use crate::optimizer::core::Core;

const SETTINGS: u64 = 0;
const STATUS: u64 = 64;
const NORM: u64 = 192;
const LARGEST_GRAD: u64 = 224;
const GROUPS: u64 = 256;
const _: () = assert!(
    size_of::<RfdSettings>() as u64 <= STATUS
        && STATUS + size_of::<RfdStatus>() as u64 <= NORM
        && NORM + size_of::<RfdSquaredNorm>() as u64 <= LARGEST_GRAD
);

/// Settings, groups, status, the norms of the split form and the word of the largest f64 gradient.
#[derive(Debug)]
pub(super) struct Control {
    device: Device,
    memory: DeviceBuffer,
}

impl Control {
    pub fn new(device: &Device, core: &Core) -> Result<Self> {
        let groups = core.options().groups.len();
        let bytes = GROUPS as usize + groups * size_of::<RfdGroup>();
        let control = Self { device: device.clone(), memory: device.allocate(bytes)? };
        control.write_settings(core, Stream::PER_THREAD)?;
        for index in 0..groups {
            control.write_group(core, index, Stream::PER_THREAD)?;
        }
        device.synchronize(Stream::PER_THREAD)?;
        Ok(control)
    }

    pub fn settings(&self) -> u64 {
        self.memory.address() + SETTINGS
    }

    pub fn status(&self) -> u64 {
        self.memory.address() + STATUS
    }

    pub fn norm(&self) -> u64 {
        self.memory.address() + NORM
    }

    pub fn largest_grad(&self) -> u64 {
        self.memory.address() + LARGEST_GRAD
    }

    pub fn groups(&self) -> u64 {
        self.memory.address() + GROUPS
    }

    /// Queues a write of all settings that are not a group's.
    pub fn write_settings(&self, core: &Core, stream: Stream) -> Result<()> {
        let options = core.options();
        let mut settings = RfdSettings {
            multiplier: options.multiplier,
            max_step_size: options.max_step_size.unwrap_or(f64::INFINITY),
            ..RfdSettings::default()
        };
        core.method().descent().place_settings(&mut settings);
        self.write(SETTINGS, &settings, stream)
    }

    /// Queues a write of a group's settings.
    pub fn write_group(&self, core: &Core, index: usize, stream: Stream) -> Result<()> {
        let group = &core.options().groups[index];
        let group = RfdGroup {
            length_scale_factor: group.length_scale_factor,
            multiplier: group.multiplier,
            velocity_decay: core.method().descent().velocity_decay(index),
            weight_decay: group.weight_decay,
        };
        self.write(GROUPS + (index * size_of::<RfdGroup>()) as u64, &group, stream)
    }

    /// Applied and skipped steps, after the work on the stream.
    pub fn read_counts(&self, stream: Stream) -> Result<(u64, u64)> {
        let mut status = RfdStatus::default();
        self.memory.download(STATUS as usize, status.bytes_mut(), stream)?;
        Ok((status.applied, status.skipped))
    }

    /// The norms of the split form, after the work on the stream.
    pub fn read_norm(&self, stream: Stream) -> Result<Vec<f64>> {
        let mut norm = RfdSquaredNorm::default();
        self.memory.download(NORM as usize, norm.bytes_mut(), stream)?;
        Ok(vec![norm.euclidean, norm.sigma])
    }

    /// Replaces the counts of steps.
    pub fn write_counts(&mut self, applied: u64, skipped: u64, stream: Stream) -> Result<()> {
        let sequence = applied.wrapping_add(skipped);
        let status = RfdStatus { sequence, applied, skipped, ..RfdStatus::default() };
        self.memory.upload(STATUS as usize, status.bytes(), stream)
    }

    /// As a launch that the value is a part of: a graph may record it, and no host memory has to stay.
    fn write<T: Plain>(&self, offset: u64, value: &T, stream: Stream) -> Result<()> {
        let mut words = [0; size_of::<RfdTensor>() / 8];
        words[..value.words().len()].copy_from_slice(value.words());
        let mut table = Box::<RfdTable>::default();
        table.tensor[0] = RfdTensor::from_words(&words);
        let step = RfdStep {
            tensors: self.memory.address() + offset,
            chunks: value.words().len() as u64,
            ..RfdStep::default()
        };
        let launch =
            Launch { kernel: Kernel::STORE, cooperative: false, grid: 1, step: &step, table: &table };
        // SAFETY: the kernel writes so many words to this object's own memory, whose size follows from the
        // groups; kernels that read them come before or after on the stream, which the caller gives for that.
        unsafe { self.device.executor().launch(&launch, stream)? };
        Ok(())
    }
}
