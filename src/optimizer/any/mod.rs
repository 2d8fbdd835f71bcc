//! An optimizer on host or device, chosen when it is made: for front ends, which so need no switch of their
//! own.

mod on_host;

use std::ops::Deref;
use std::path::Path;

use self::on_host::OnHost;
use super::core::Core;
use super::raw::check_host_stream;
use super::reader::ReportReader;
use super::{
    DeviceOptimizer, Group, Method, Optimizer, Options, RawInput, RawNumber, RawTensor, StepInput,
    StepReport, TensorSpec,
};
use crate::backend::executor::Stream;
use crate::device::Target;
use crate::error::{Error, Result};
use crate::tensor::{DType, GradRef, ParamMut};

/// [`Optimizer`] or [`DeviceOptimizer`], with tensors given by address. On the host a step is done when the
/// call returns, and the stream is [`Stream::DEFAULT`].
#[derive(Debug)]
pub struct AnyOptimizer {
    place: Place,
}

#[derive(Debug)]
enum Place {
    Host(Box<OnHost>),
    Device(Box<DeviceOptimizer>),
}

impl From<Optimizer> for AnyOptimizer {
    fn from(optimizer: Optimizer) -> Self {
        Self { place: Place::Host(Box::new(OnHost::new(optimizer))) }
    }
}

impl From<DeviceOptimizer> for AnyOptimizer {
    fn from(optimizer: DeviceOptimizer) -> Self {
        Self { place: Place::Device(Box::new(optimizer)) }
    }
}

impl Deref for AnyOptimizer {
    type Target = Core;

    fn deref(&self) -> &Core {
        match &self.place {
            Place::Host(host) => &host.optimizer,
            Place::Device(device) => device,
        }
    }
}

impl AnyOptimizer {
    /// An optimizer for tensors in the memory of `target`.
    ///
    /// # Errors
    /// As [`Optimizer::new`] and [`DeviceOptimizer::new`].
    pub fn new(
        method: impl Into<Method>,
        options: Options,
        specs: Vec<TensorSpec>,
        target: &Target,
    ) -> Result<Self> {
        Ok(match target {
            Target::Cpu => Optimizer::new(method, options, specs)?.into(),
            Target::Device(device) => DeviceOptimizer::new(method, options, specs, device)?.into(),
        })
    }

    /// Whether a step is only queued when the call returns.
    pub fn is_on_device(&self) -> bool {
        matches!(self.place, Place::Device(_))
    }

    /// The device's optimizer, where it is one: for what a device alone has, such as
    /// [`DeviceOptimizer::set_max_blocks`].
    pub fn as_device(&mut self) -> Option<&mut DeviceOptimizer> {
        match &mut self.place {
            Place::Host(_) => None,
            Place::Device(device) => Some(device),
        }
    }

    /// As [`DeviceOptimizer::explain_kernels`]; `CPU` on the host.
    pub fn explain_kernels(&self) -> String {
        match &self.place {
            Place::Host(_) => "CPU".into(),
            Place::Device(device) => device.explain_kernels(),
        }
    }

    /// As [`DeviceOptimizer::set_multiplier`].
    ///
    /// # Errors
    /// As [`DeviceOptimizer::set_multiplier`]; [`Error::InvalidArgument`] for a stream on the host.
    pub fn set_multiplier(&mut self, multiplier: f64, stream: Stream) -> Result<()> {
        match &mut self.place {
            Place::Host(host) => host.alone(stream)?.set_multiplier(multiplier),
            Place::Device(device) => device.set_multiplier(multiplier, stream),
        }
    }

    /// As [`DeviceOptimizer::set_max_step_size`].
    ///
    /// # Errors
    /// As [`DeviceOptimizer::set_max_step_size`]; [`Error::InvalidArgument`] for a stream on the host.
    pub fn set_max_step_size(&mut self, max_step_size: Option<f64>, stream: Stream) -> Result<()> {
        match &mut self.place {
            Place::Host(host) => host.alone(stream)?.set_max_step_size(max_step_size),
            Place::Device(device) => device.set_max_step_size(max_step_size, stream),
        }
    }

    /// As [`DeviceOptimizer::set_group`].
    ///
    /// # Errors
    /// As [`DeviceOptimizer::set_group`]; [`Error::InvalidArgument`] for a stream on the host.
    pub fn set_group(&mut self, index: usize, group: Group, stream: Stream) -> Result<()> {
        match &mut self.place {
            Place::Host(host) => host.alone(stream)?.set_group(index, group),
            Place::Device(device) => device.set_group(index, group, stream),
        }
    }

    /// As [`DeviceOptimizer::set_method`].
    ///
    /// # Errors
    /// As [`DeviceOptimizer::set_method`]; [`Error::InvalidArgument`] for a stream on the host.
    pub fn set_method(&mut self, method: impl Into<Method>, stream: Stream) -> Result<()> {
        match &mut self.place {
            Place::Host(host) => host.alone(stream)?.set_method(method),
            Place::Device(device) => device.set_method(method, stream),
        }
    }

    /// Finds out whether tensors can lie where they are said to, as [`AnyOptimizer::step`] does, for front
    /// ends that say so earlier. Reads no tensor.
    ///
    /// # Errors
    /// Those of [`DeviceOptimizer::step`] that are about `tensors`.
    pub fn check_tensors(&mut self, tensors: &[RawTensor]) -> Result<()> {
        match &mut self.place {
            Place::Host(host) => host.placement.check(&host.optimizer, tensors),
            Place::Device(device) => device.check_tensors(tensors),
        }
    }

    /// What [`AnyOptimizer::step`] would refuse, for processes that tell each other before all take a step.
    /// Reads no tensor and changes nothing.
    ///
    /// # Errors
    /// Those of [`AnyOptimizer::step`] that are known before a step is begun.
    pub fn check_step(&mut self, tensors: &[RawTensor], input: &RawInput, stream: Stream) -> Result<()> {
        self.check_tensors(tensors)?;
        match &mut self.place {
            Place::Host(host) => host.alone(stream)?.check_input(&input.on_host()?),
            Place::Device(device) => device.check_input(input),
        }
    }

    /// One step; what it did, where that is known at once.
    ///
    /// # Safety
    /// As [`DeviceOptimizer::step`]. On the host the addresses are those of this process's memory, exposed,
    /// initialised, and of the length and format that specs and `tensors` say; parameters must not be used by
    /// others during the call, nor gradients be written.
    ///
    /// # Errors
    /// As [`DeviceOptimizer::step`].
    pub unsafe fn step(
        &mut self,
        tensors: &[RawTensor],
        input: &RawInput,
        stream: Stream,
    ) -> Result<Option<StepReport>> {
        match &mut self.place {
            Place::Host(host) => {
                host.alone(stream)?;
                // SAFETY: the caller vouches for the addresses.
                let (mut params, grads) = unsafe { host.slices(tensors)? };
                host.step(&mut params, &grads, &input.on_host()?).map(Some)
            }
            // SAFETY: the caller vouches for the addresses.
            Place::Device(device) => unsafe { device.step(tensors, input, stream) }.map(|()| None),
        }
    }

    /// One step of an optimizer on the host, with tensors by slice.
    ///
    /// # Errors
    /// As [`Optimizer::step`]; [`Error::Device`] on a device.
    pub fn step_slices(
        &mut self,
        params: &mut [ParamMut<'_>],
        grads: &[GradRef<'_>],
        input: &StepInput,
    ) -> Result<StepReport> {
        match &mut self.place {
            Place::Host(host) => host.step(params, grads, input),
            Place::Device(_) => Err(Error::Device(
                "the optimizer works on a device: copy the tensors there and give their addresses".into(),
            )),
        }
    }

    /// Takes a copy of the gradient of one tensor, for programs that update tensor by tensor:
    /// [`finish`](Self::finish) takes the step. What is given of one tensor before is added up, in f32, or in
    /// f64 as soon as one of its gradients is f64; so gradients can be accumulated over several backward
    /// passes, with their number as the gradient scale where means are. A single one has the bits that
    /// [`step`](Self::step) sees.
    ///
    /// Other steps leave what was given as it is; saved states do not hold it. On a device it is an error.
    ///
    /// # Safety
    /// The address is one of this process's memory, exposed, initialised, and of the tensor's length in
    /// `dtype`; no one writes there during the call.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is no such tensor, [`Error::Tensor`] when the gradient can't lie
    /// there, [`Error::Device`] on a device.
    pub unsafe fn give_gradient(&mut self, index: usize, grad: u64, dtype: DType) -> Result<()> {
        let Place::Host(host) = &mut self.place else { return Err(not_one_by_one()) };
        // SAFETY: the caller vouches for the address.
        unsafe { host.give_gradient(index, grad, dtype) }
    }

    /// One step with the gradients that were [given](Self::give_gradient), and parameters by address. Tensors
    /// of which none was given have none in this step. Gradients are given anew after it, also where it was
    /// skipped; after an error they are still there.
    ///
    /// # Safety
    /// As [`AnyOptimizer::step`].
    ///
    /// # Errors
    /// As [`AnyOptimizer::step`]; [`Error::InvalidArgument`] when no gradient was given, [`Error::Device`] on
    /// a device.
    pub unsafe fn finish(&mut self, params: &[u64], input: &RawInput) -> Result<StepReport> {
        let Place::Host(host) = &mut self.place else { return Err(not_one_by_one()) };
        // SAFETY: the caller vouches for the addresses.
        unsafe { host.finish(params, input) }
    }

    /// The first half of a step in sharded training; where the [`Core::sums_len`] numbers are that ranks add
    /// up, f64 each. They are valid until the next step or half of one.
    ///
    /// # Safety
    /// As [`AnyOptimizer::step`].
    ///
    /// # Errors
    /// As [`Optimizer::local_sums`] and [`DeviceOptimizer::local_sums`].
    pub unsafe fn local_sums(
        &mut self,
        tensors: &[RawTensor],
        grad_scale: RawNumber,
        stream: Stream,
    ) -> Result<u64> {
        match &mut self.place {
            Place::Host(host) => {
                host.alone(stream)?;
                let grad_scale = grad_scale.on_host("grad_scale")?;
                // SAFETY: the caller vouches for the addresses.
                let (params, grads) = unsafe { host.slices(tensors)? };
                host.local_sums(&params, &grads, grad_scale)
            }
            // SAFETY: the caller vouches for the addresses.
            Place::Device(device) => unsafe { device.local_sums(tensors, grad_scale, stream) },
        }
    }

    /// The second half, with the sums of all ranks at the address `sums`, which need not be that of the
    /// first.
    ///
    /// # Safety
    /// As [`AnyOptimizer::step`], and for the numbers.
    ///
    /// # Errors
    /// As [`Optimizer::step_with_sums`] and [`DeviceOptimizer::step_with_sums`]; on the host with every
    /// method where there was no first half since the last step.
    pub unsafe fn step_with_sums(
        &mut self,
        tensors: &[RawTensor],
        sums: u64,
        input: &RawInput,
        stream: Stream,
    ) -> Result<Option<StepReport>> {
        match &mut self.place {
            Place::Host(host) => {
                host.alone(stream)?;
                let input = input.on_host()?;
                // SAFETY: the caller vouches for the addresses.
                unsafe { host.step_with_sums(tensors, sums, &input) }.map(Some)
            }
            Place::Device(device) => {
                // SAFETY: the caller vouches for the addresses.
                unsafe { device.step_with_sums(tensors, sums, input, stream) }.map(|()| None)
            }
        }
    }

    /// Queues filling the master weights, see [`DeviceOptimizer::init_master_weights`]; on the host the first
    /// applied step makes them.
    ///
    /// # Safety
    /// As [`DeviceOptimizer::init_master_weights`].
    ///
    /// # Errors
    /// As [`DeviceOptimizer::init_master_weights`]; [`Error::InvalidArgument`] for a stream on the host.
    pub unsafe fn init_master_weights(&mut self, tensors: &[RawTensor], stream: Stream) -> Result<()> {
        match &mut self.place {
            Place::Host(host) => {
                host.alone(stream)?;
                host.placement.check(&host.optimizer, tensors)
            }
            // SAFETY: the caller vouches for the addresses.
            Place::Device(device) => unsafe { device.init_master_weights(tensors, stream) },
        }
    }

    /// What the last step did, on a device the last one that it has finished; `None` before the first. Does
    /// not wait.
    ///
    /// # Errors
    /// As [`DeviceOptimizer::report`].
    pub fn report(&self) -> Result<Option<StepReport>> {
        match &self.place {
            Place::Host(host) => Ok(host.last.get()),
            Place::Device(device) => device.report(),
        }
    }

    /// What the last step on the stream did, after waiting for it.
    ///
    /// # Errors
    /// As [`DeviceOptimizer::wait_report`].
    pub fn wait_report(&self, stream: Stream) -> Result<Option<StepReport>> {
        match &self.place {
            Place::Host(host) => check_host_stream(stream).map(|()| host.last.get()),
            Place::Device(device) => device.wait_report(stream),
        }
    }

    /// A handle to [`AnyOptimizer::report`] for another thread.
    pub fn report_reader(&self) -> ReportReader {
        match &self.place {
            Place::Host(host) => ReportReader::of_host(host.last.clone()),
            Place::Device(device) => device.report_reader(),
        }
    }

    /// As [`DeviceOptimizer::save_state`].
    ///
    /// # Errors
    /// As [`DeviceOptimizer::save_state`]; [`Error::InvalidArgument`] for a stream on the host.
    pub fn save_state(&self, path: &Path, stream: Stream) -> Result<()> {
        crate::files::write_atomically(path, &self.state_to_bytes(stream)?)
    }

    /// As [`DeviceOptimizer::load_state`].
    ///
    /// # Errors
    /// As [`DeviceOptimizer::load_state`]; [`Error::InvalidArgument`] for a stream on the host.
    pub fn load_state(&mut self, path: &Path, stream: Stream) -> Result<()> {
        let bytes = crate::files::read_regular(path)?;
        self.load_state_from_bytes(&bytes, stream).map_err(super::state::of_file(path))
    }

    /// As [`DeviceOptimizer::state_to_bytes`].
    ///
    /// # Errors
    /// As [`DeviceOptimizer::state_to_bytes`]; [`Error::InvalidArgument`] for a stream on the host.
    pub fn state_to_bytes(&self, stream: Stream) -> Result<Vec<u8>> {
        match &self.place {
            Place::Host(host) => {
                check_host_stream(stream)?;
                host.optimizer.state_to_bytes()
            }
            Place::Device(device) => device.state_to_bytes(stream),
        }
    }

    /// As [`DeviceOptimizer::load_state_from_bytes`].
    ///
    /// # Errors
    /// As [`DeviceOptimizer::load_state_from_bytes`]; [`Error::InvalidArgument`] for a stream on the host.
    pub fn load_state_from_bytes(&mut self, bytes: &[u8], stream: Stream) -> Result<()> {
        match &mut self.place {
            Place::Host(host) => {
                host.alone(stream)?.load_state_from_bytes(bytes)?;
                // As on a device: the last report was of what is no more.
                host.last.clear();
                Ok(())
            }
            Place::Device(device) => device.load_state_from_bytes(bytes, stream),
        }
    }
}

fn not_one_by_one() -> Error {
    Error::Device(
        "the optimizer works on a device, where gradients are not taken one by one: keep them there, added up, and give \
         all of them to one step"
            .into(),
    )
}

/// Front ends share it between threads.
const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<AnyOptimizer>();
};
