//! The optimizer over the variables of a store.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rfdescent::covariance::Model;
use rfdescent::optimizer::{Group, Method, Options, StepReport};
use tch::nn::{self, VarStore, Variables};
use tch::{Device, Tensor};

use crate::cpu::Cpu;
use crate::cuda::Cuda;
use crate::error::{Error, Result};
use crate::input::StepTensors;
use crate::parameter::{Parameter, Place};

/// Where steps run.
#[derive(Debug)]
pub(crate) enum Backend {
    Cpu(Box<Cpu>),
    Cuda(Box<Cuda>),
}

/// Random Function Descent over the variables of a store, with the look of tch's `nn::Optimizer`.
/// [`Rfd`](crate::Rfd) builds it.
///
/// Steps change the variables in place. A variable whose gradient is undefined is left alone and counts in no
/// norm. A variable need not be contiguous, but its elements must fill a stretch of memory, as those of
/// channels-last tensors do; they are taken in the order in which they lie, which decides the last bits of
/// norms and which random bits stochastic rounding draws.
///
/// libtorch does not notice that a step changes variables: do not go backward after a step through a graph
/// from before it.
///
/// On a CUDA device all work is queued on libtorch's current stream and nothing waits for it, except where a
/// method says so.
pub struct Optimizer {
    parameters: Vec<Parameter>,
    backend: Backend,
    /// Unsets gradients.
    gradients: nn::Optimizer,
    /// Those of the store, to notice new ones.
    variables: Arc<Mutex<Variables>>,
}

impl fmt::Debug for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the store, which would print every variable.
        f.debug_struct("Optimizer")
            .field("options", self.options())
            .field("parameters", &self.parameters.len())
            .finish_non_exhaustive()
    }
}

/// Calls a method that both of the library's optimizers have; the device's takes the stream as last argument.
macro_rules! on_backend {
    ($self:ident.$method:ident($($argument:expr),*)) => {
        match &mut $self.backend {
            Backend::Cpu(cpu) => cpu.optimizer.$method($($argument),*).map_err(Error::from),
            Backend::Cuda(cuda) => {
                let stream = cuda.stream()?;
                cuda.optimizer.$method($($argument,)* stream).map_err(Error::from)
            }
        }
    };
}

impl Optimizer {
    pub(crate) fn new(
        store: &VarStore,
        gradients: nn::Optimizer,
        parameters: Vec<Parameter>,
        backend: Backend,
    ) -> Result<Self> {
        Ok(Self { parameters, backend, gradients, variables: store.variables_.clone() })
    }

    /// Makes all gradients undefined.
    ///
    /// # Errors
    /// [`Error::Rfd`] when the store has got variables that this optimizer does not know.
    pub fn zero_grad(&mut self) -> Result<()> {
        self.check_store()?;
        self.gradients.zero_grad();
        Ok(())
    }

    /// Goes backward from the loss, the mean over the batch, and takes a step. Gradients from before do not
    /// count.
    ///
    /// # Errors
    /// [`Error::Torch`] when libtorch can't go backward; else as [`Optimizer::step`].
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        self.zero_grad()?;
        loss.f_backward()?;
        self.step(loss)
    }

    /// One step with the gradients as they are; `loss` is the mean over what they are the mean gradient of.
    /// With gradient accumulation: of all of it.
    ///
    /// A NaN or infinite loss or gradient and a zero gradient skip the step: nothing changes, and
    /// [`Optimizer::report`] says why.
    ///
    /// # Errors
    /// [`Error::Rfd`] names the variable that has changed its kind, shape or device, or whose gradient is
    /// sparse or does not fit; or it says why the loss can't be used or the device failed. Nothing has
    /// changed then.
    pub fn step(&mut self, loss: &Tensor) -> Result<()> {
        self.step_with(&StepTensors::new(loss))
    }

    /// The same with what a gradient scaler knows.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    pub fn step_with(&mut self, input: &StepTensors<'_>) -> Result<()> {
        self.check_store()?;
        let places = self.parameters.iter().map(Parameter::place).collect::<Result<Vec<Place>>>()?;
        match &mut self.backend {
            Backend::Cpu(cpu) => cpu.step(&self.parameters, &places, input),
            Backend::Cuda(cuda) => cuda.step(&places, input),
        }
    }

    /// What the last step did that is finished; `None` before the first. Does not wait: on a CUDA device it
    /// may be an earlier step.
    ///
    /// # Errors
    /// [`Error::Rfd`] when the device failed.
    pub fn report(&self) -> Result<Option<StepReport>> {
        match &self.backend {
            Backend::Cpu(cpu) => Ok(cpu.last),
            Backend::Cuda(cuda) => Ok(cuda.optimizer.status()?),
        }
    }

    /// What the last step did, after waiting for it.
    ///
    /// # Errors
    /// [`Error::Rfd`] when the device failed.
    pub fn wait_report(&self) -> Result<Option<StepReport>> {
        match &self.backend {
            Backend::Cpu(cpu) => Ok(cpu.last),
            Backend::Cuda(cuda) => Ok(cuda.optimizer.wait_status(cuda.stream()?)?),
        }
    }

    /// Sets what step sizes are multiplied with, for schedulers; 1 at first. There is no learning rate to
    /// set.
    ///
    /// # Errors
    /// [`Error::Rfd`] for a negative or non-finite number.
    pub fn set_lr(&mut self, multiplier: f64) -> Result<()> {
        on_backend!(self.set_multiplier(multiplier))
    }

    /// Sets what the learning rate of one group is multiplied with beside.
    ///
    /// # Errors
    /// [`Error::Rfd`] for a negative or non-finite number, or a group that does not exist.
    pub fn set_lr_group(&mut self, group: usize, multiplier: f64) -> Result<()> {
        self.change_group(group, |group| group.multiplier = multiplier)
    }

    /// Sets the momentum of all groups.
    ///
    /// # Errors
    /// [`Error::Rfd`] for a number outside [0, 1), or other than 0 with the adaptive method, which averages
    /// gradients itself.
    pub fn set_momentum(&mut self, momentum: f64) -> Result<()> {
        self.change_groups(|group| group.momentum = momentum)
    }

    /// Sets the momentum of one group.
    ///
    /// # Errors
    /// As [`Optimizer::set_momentum`], or for a group that does not exist.
    pub fn set_momentum_group(&mut self, group: usize, momentum: f64) -> Result<()> {
        self.change_group(group, |group| group.momentum = momentum)
    }

    /// Sets the decoupled weight decay of all groups.
    ///
    /// # Errors
    /// [`Error::Rfd`] for a negative or non-finite number.
    pub fn set_weight_decay(&mut self, weight_decay: f64) -> Result<()> {
        self.change_groups(|group| group.weight_decay = weight_decay)
    }

    /// Sets the decoupled weight decay of one group.
    ///
    /// # Errors
    /// [`Error::Rfd`] for a negative or non-finite number, or a group that does not exist.
    pub fn set_weight_decay_group(&mut self, group: usize, weight_decay: f64) -> Result<()> {
        self.change_group(group, |group| group.weight_decay = weight_decay)
    }

    /// Sets all options of one group. Groups are counted as in [`Rfd`](crate::Rfd): those of the options,
    /// then the named ones.
    ///
    /// # Errors
    /// [`Error::Rfd`] for a value outside its domain, or a group that does not exist.
    pub fn set_group(&mut self, index: usize, group: Group) -> Result<()> {
        on_backend!(self.set_group(index, group))
    }

    /// Sets 1/b for the S-RFD correction, [`Options::inv_batch_size`].
    ///
    /// # Errors
    /// [`Error::Rfd`] for a negative or non-finite number.
    pub fn set_inv_batch_size(&mut self, inv_batch_size: f64) -> Result<()> {
        on_backend!(self.set_inv_batch_size(inv_batch_size))
    }

    /// The options in force, named groups included.
    pub fn options(&self) -> &Options {
        match &self.backend {
            Backend::Cpu(cpu) => cpu.optimizer.options(),
            Backend::Cuda(cuda) => cuda.optimizer.options(),
        }
    }

    /// How steps are chosen.
    pub fn method(&self) -> &Method {
        match &self.backend {
            Backend::Cpu(cpu) => cpu.optimizer.method(),
            Backend::Cuda(cuda) => cuda.optimizer.method(),
        }
    }

    /// The fitted covariance model; `None` with the adaptive method.
    pub fn model(&self) -> Option<&Model> {
        self.method().model()
    }

    /// The variables that steps change, in the order of the store.
    pub fn trainable_variables(&self) -> Vec<Tensor> {
        self.parameters.iter().map(|parameter| parameter.tensor.shallow_clone()).collect()
    }

    /// The device of the variables.
    pub fn device(&self) -> Device {
        // `Rfd::build` refuses a store without variables.
        self.parameters[0].device()
    }

    /// Writes velocities, master weights and counts to a safetensors file, the same for every device and
    /// adapter. Save the variables with the store's own `save`. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Rfd`] when the file can't be written.
    pub fn save_state(&mut self, path: impl AsRef<Path>) -> Result<()> {
        on_backend!(self.save_state(path.as_ref()))
    }

    /// Loads a state that was saved for the same variables. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Rfd`] says what is damaged, which variable differs in name, shape or kind, or which option
    /// was on when the state was saved and is off now. The optimizer is then as it was.
    pub fn load_state(&mut self, path: impl AsRef<Path>) -> Result<()> {
        on_backend!(self.load_state(path.as_ref()))
    }

    /// The state as the bytes of such a file.
    ///
    /// # Errors
    /// [`Error::Rfd`] when the device fails.
    pub fn state_to_bytes(&mut self) -> Result<Vec<u8>> {
        on_backend!(self.state_to_bytes())
    }

    /// Loads a state from the bytes of such a file.
    ///
    /// # Errors
    /// As [`Optimizer::load_state`].
    pub fn load_state_from_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        on_backend!(self.load_state_from_bytes(bytes))
    }

    fn change_group(&mut self, index: usize, change: impl FnOnce(&mut Group)) -> Result<()> {
        // The library says what is wrong with a group that does not exist.
        let mut group = self.options().groups.get(index).copied().unwrap_or_default();
        change(&mut group);
        self.set_group(index, group)
    }

    fn change_groups(&mut self, change: impl Fn(&mut Group)) -> Result<()> {
        (0..self.options().groups.len()).try_for_each(|index| self.change_group(index, &change))
    }

    /// An error when the store's list of trainable variables is not the one that the optimizer was made for.
    fn check_store(&self) -> Result<()> {
        let variables = self.variables.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, then) = (variables.trainable_variables.len(), self.parameters.len());
        if now == then {
            return Ok(());
        }
        let expected =
            format!("the optimizer was made for {then}; make all layers first, then the optimizer");
        Err(Error::invalid("trainable variables of the store", now, expected))
    }
}
