//! Tensors on a device and the steps on them: the one place where addresses must be vouched for.

use rfdescent::device::{Device, DeviceBuffer, Stream};
use rfdescent::optimizer::{DeviceOptimizer, Method, Options, RawInput, RawTensor, StepReport};

use super::{Case, Element, LOSS, values};
use crate::error::CliError;

/// Elements of a copy, so that no second whole list is needed on the host.
pub const CHUNK: usize = 1 << 20;

/// An optimizer with the memory it works on.
pub struct DeviceSteps<E> {
    optimizer: DeviceOptimizer,
    params: DeviceBuffer,
    _grads: DeviceBuffer,
    tensors: Vec<RawTensor>,
    total: usize,
    format: std::marker::PhantomData<E>,
}

const STREAM: Stream = Stream::DEFAULT;

impl<E: Element> DeviceSteps<E> {
    /// Copies parameters and gradients to the device.
    pub fn new(
        case: &Case,
        method: &Method,
        params: &[E],
        grads: &[E],
        device: &Device,
    ) -> Result<Self, CliError> {
        let (params, grads) = (upload(params, device)?, upload(grads, device)?);
        let mut start = 0;
        let tensors = case
            .lengths
            .iter()
            .map(|&len| {
                let offset = (start * size_of::<E>()) as u64;
                start += len;
                RawTensor::new(params.address() + offset, grads.address() + offset, E::DTYPE)
            })
            .collect();
        let optimizer = DeviceOptimizer::new(method.clone(), Options::default(), case.specs::<E>(), device)?;
        let format = std::marker::PhantomData;
        Ok(DeviceSteps { optimizer, params, _grads: grads, tensors, total: start, format })
    }

    /// Which kernels the last step took, and why.
    pub fn kernels(&self) -> String {
        self.optimizer.explain_kernels()
    }

    /// Queues a step.
    pub fn step(&mut self) -> Result<(), CliError> {
        let input = RawInput::new(LOSS);
        // SAFETY: `new` cut the addresses from two buffers of the optimizer's device, which are as long as
        // all tensors in the optimizer's specs together. This struct owns them and gives them to no one, its
        // other calls wait for the stream, and freeing them waits for the work that was queued. The stream is
        // the device's default one.
        unsafe { self.optimizer.step(&self.tensors, &input, STREAM)? };
        Ok(())
    }

    /// Waits for all steps; what the last one did.
    pub fn wait(&self) -> Result<StepReport, CliError> {
        let report = self.optimizer.wait_report(STREAM)?;
        report.ok_or_else(|| super::wrong("the device tells of none".into()))
    }

    /// The parameters as they are after all steps.
    pub fn params(&self) -> Result<Vec<E>, CliError> {
        let mut params = values(self.total, 0)?;
        let mut bytes = vec![0; CHUNK * size_of::<E>()];
        for (index, chunk) in params.chunks_mut(CHUNK).enumerate() {
            let bytes = &mut bytes[..size_of_val(chunk)];
            self.params.download(index * CHUNK * size_of::<E>(), bytes, STREAM)?;
            E::decode(bytes, chunk);
        }
        Ok(params)
    }
}

fn upload<E: Element>(values: &[E], device: &Device) -> Result<DeviceBuffer, CliError> {
    let mut buffer = device.allocate(size_of_val(values))?;
    for (index, chunk) in values.chunks(CHUNK).enumerate() {
        buffer.upload(index * CHUNK * size_of::<E>(), &E::encode(chunk), STREAM)?;
    }
    Ok(buffer)
}
