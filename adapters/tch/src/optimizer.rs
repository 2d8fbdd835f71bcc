//! The optimizer over the variables of a store.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rfdescent::covariance::Model;
use rfdescent::device::Stream;
use rfdescent::optimizer::{AnyOptimizer, Fitted, Group, Method, Options, StepReport};
use tch::nn::{self, VarStore, Variables};
use tch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::input::{Scalars, StepTensors};
use crate::parameter::Parameter;
use crate::stream::current_stream;

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
    inner: AnyOptimizer,
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

impl Optimizer {
    pub(crate) fn new(
        store: &VarStore,
        gradients: nn::Optimizer,
        parameters: Vec<Parameter>,
        inner: AnyOptimizer,
    ) -> Self {
        Self { parameters, inner, gradients, variables: store.variables_.clone() }
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
        let (tensors, _gradients): (Vec<_>, Vec<_>) =
            self.parameters.iter().map(Parameter::place).collect::<Result<_>>()?;
        let scalars = Scalars::new(input, self.device())?;
        let stream = self.stream()?;
        // SAFETY: `place` has checked that parameters and gradients are dense tensors on this device, of the
        // length and format that it says, and has exposed their addresses. The store keeps the parameters,
        // this function gradients and scalars. On a CUDA device they may be dropped before the step has run:
        // libtorch gives memory that was freed to later work of the same stream only. Its streams are those
        // of the primary context. That no other thread uses the tensors meanwhile is what every in-place
        // operation of tch asks for.
        unsafe { self.inner.step(&tensors, &scalars.raw(), stream)? };
        Ok(())
    }

    /// What the last step did that is finished; `None` before the first. Does not wait: on a CUDA device it
    /// may be an earlier step.
    ///
    /// # Errors
    /// [`Error::Rfd`] when the device failed.
    pub fn report(&self) -> Result<Option<StepReport>> {
        Ok(self.inner.report()?)
    }

    /// What the last step did, after waiting for it.
    ///
    /// # Errors
    /// [`Error::Rfd`] when the device failed.
    pub fn wait_report(&self) -> Result<Option<StepReport>> {
        Ok(self.inner.wait_report(self.stream()?)?)
    }

    /// Sets what step sizes are multiplied with, for schedulers; 1 at first. There is no learning rate to
    /// set.
    ///
    /// # Errors
    /// [`Error::Rfd`] for a negative or non-finite number.
    pub fn set_lr(&mut self, multiplier: f64) -> Result<()> {
        Ok(self.inner.set_multiplier(multiplier, self.stream()?)?)
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
    /// [`Error::Rfd`] for a number outside [0, 1), and with the adaptive method, which averages gradients
    /// itself.
    pub fn set_momentum(&mut self, momentum: f64) -> Result<()> {
        let fitted = self.fitted(momentum)?;
        self.set_method(fitted.with_momentum(momentum))
    }

    /// Sets the momentum of one group.
    ///
    /// # Errors
    /// As [`Optimizer::set_momentum`], or for a group that does not exist.
    pub fn set_momentum_group(&mut self, group: usize, momentum: f64) -> Result<()> {
        let mut fitted = self.fitted(momentum)?;
        let count = self.options().groups.len();
        if group >= count {
            return Err(Error::invalid("group", group, format!("there are {count} groups")));
        }
        if fitted.momentum.len() < count {
            let shared = fitted.momentum.first().copied().unwrap_or_default();
            fitted.momentum = vec![shared; count];
        }
        fitted.momentum[group] = momentum;
        self.set_method(fitted)
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
        Ok(self.inner.set_group(index, group, self.stream()?)?)
    }

    /// Replaces the settings of the method: of [`Fitted`] momentum and batch size may change, of
    /// [`Adaptive`](crate::Adaptive) nothing.
    ///
    /// # Errors
    /// [`Error::Rfd`] for another method, a setting that can't change, or a value outside its domain.
    pub fn set_method(&mut self, method: impl Into<Method>) -> Result<()> {
        Ok(self.inner.set_method(method, self.stream()?)?)
    }

    /// The options in force, named groups included.
    pub fn options(&self) -> &Options {
        self.inner.options()
    }

    /// How steps are chosen.
    pub fn method(&self) -> &Method {
        self.inner.method()
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
    pub fn save_state(&self, path: impl AsRef<Path>) -> Result<()> {
        Ok(self.inner.save_state(path.as_ref(), self.stream()?)?)
    }

    /// Loads a state that was saved for the same variables. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Rfd`] says what is damaged, which variable differs in name, shape or kind, or which option
    /// was on when the state was saved and is off now. The optimizer is then as it was.
    pub fn load_state(&mut self, path: impl AsRef<Path>) -> Result<()> {
        Ok(self.inner.load_state(path.as_ref(), self.stream()?)?)
    }

    /// The state as the bytes of such a file.
    ///
    /// # Errors
    /// [`Error::Rfd`] when the device fails.
    pub fn state_to_bytes(&self) -> Result<Vec<u8>> {
        Ok(self.inner.state_to_bytes(self.stream()?)?)
    }

    /// Loads a state from the bytes of such a file.
    ///
    /// # Errors
    /// As [`Optimizer::load_state`].
    pub fn load_state_from_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.inner.load_state_from_bytes(bytes, self.stream()?)?)
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

    /// The fitted method, to be given a momentum.
    fn fitted(&self, momentum: f64) -> Result<Fitted> {
        match self.method() {
            Method::Fitted(fitted) => Ok(fitted.clone()),
            _ => {
                let expected = "is for the fitted method; the adaptive one averages gradients itself, see `Adaptive::averaging`";
                Err(Error::invalid("momentum", momentum, expected))
            }
        }
    }

    /// libtorch's current stream on the device.
    fn stream(&self) -> Result<Stream> {
        current_stream(self.device())
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
