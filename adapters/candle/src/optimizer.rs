//! The optimizer over variables.

use std::path::Path;

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor, Var};
use candle_nn::{Optimizer, VarMap};
use rfdescent::covariance::Model;
use rfdescent::device::Stream;
use rfdescent::optimizer::{AnyOptimizer, Group, Method, Options, StepReport};

use crate::error::wrap;
use crate::parameter::{Parameter, parameters};
use crate::variables::Variables;
use crate::{device, host};

/// What an optimizer is made of beside variables.
#[derive(Clone, Debug)]
pub struct Config {
    /// How steps are chosen: [`Fitted`](crate::Fitted), from the covariance model of the network on its data,
    /// or [`Adaptive`](crate::Adaptive).
    pub method: Method,
    /// What both methods have; the defaults need no change.
    pub options: Options,
}

impl Config {
    /// A fitted [`Model`], [`Fitted`](crate::Fitted) with settings of its own or
    /// [`Adaptive`](crate::Adaptive), with the default options.
    pub fn new(method: impl Into<Method>) -> Self {
        Self { method: method.into(), options: Options::default() }
    }

    /// For a model with a length scale for each tensor: configuration and variables with a group for each
    /// variable, see [`Fitted::per_tensor`](crate::Fitted::per_tensor). Nothing changes for a model with one
    /// length scale and for the adaptive method.
    ///
    /// # Errors
    /// Names the tensor of the model that is not among the variables or has another size, or the variable
    /// whose group does not exist.
    pub fn per_tensor(self, parameters: Vec<Parameter>) -> Result<(Config, Vec<Parameter>)> {
        let parameters = floats(parameters);
        let Method::Fitted(fitted) = self.method else { return Ok((self, parameters)) };
        let specs = parameters.iter().map(Parameter::spec).collect::<Result<_>>()?;
        let (fitted, options, specs) = fitted.per_tensor(self.options, specs).map_err(wrap)?;
        let parameters = parameters.into_iter().zip(specs).map(|(it, spec)| it.in_group(spec.group));
        Ok((Config { method: fitted.into(), options }, parameters.collect()))
    }
}

/// Those that can be trained.
fn floats(parameters: Vec<Parameter>) -> Vec<Parameter> {
    parameters.into_iter().filter(|parameter| parameter.var.dtype().is_float()).collect()
}

/// Random Function Descent over candle's variables.
///
/// A step needs the loss, so call [`backward_step`](Optimizer::backward_step) or [`Rfd::step_with_loss`]; a
/// plain `step` is an error. There is no learning rate to set: [`learning_rate`](Optimizer::learning_rate)
/// and [`set_learning_rate`](Optimizer::set_learning_rate) are the multiplier of the step size, 1 at first,
/// so that schedulers made for other optimizers go through their factors.
///
/// On the CPU the update is in place. While it runs (not between steps) the variables are empty for other
/// threads: what uses them there fails, instead of reading numbers that are half updated.
///
/// A variable without gradient is left alone and counts in no norm. Variables that are no floats are left
/// out, as by candle's own optimizers.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_nn::Optimizer;
/// use rfdescent_candle::rfdescent::covariance::{Family, Model};
/// use rfdescent_candle::rfdescent::Moments;
/// use rfdescent_candle::{Config, Rfd};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let weight = Var::new(&[0.5_f32, -0.5, 1.0], &Device::Cpu)?;
/// let moments = Moments {
///     mean: 2.0, variance: 0.5, noise_variance: 0.9,
///     grad_variance: 4.0, noise_grad_variance: 200.0, dims: 3,
/// };
/// let model = Model::new(Family::SquaredExponential, moments)?;
/// let mut optimizer = Rfd::new(vec![weight.clone()], Config::new(model))?;
/// let loss = weight.sqr()?.sum_all()?;
/// optimizer.backward_step(&loss)?;
/// assert!(weight.sqr()?.sum_all()?.to_scalar::<f32>()? < loss.to_scalar::<f32>()?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Rfd {
    variables: Variables,
    optimizer: AnyOptimizer,
    /// Where the variables lie.
    device: Device,
    /// A learning rate that was refused; the trait leaves no way to say so at once.
    refused: Option<f64>,
}

impl Rfd {
    /// An optimizer for variables with names and groups.
    ///
    /// # Errors
    /// Names the variable that is listed twice, shares its memory with another, is strided, lies on another
    /// device than the others or on one without steps, is of another format than f32, f64, f16 and bf16, or
    /// whose group does not exist; or the option outside its domain.
    pub fn for_parameters(parameters: Vec<Parameter>, config: Config) -> Result<Self> {
        let variables = Variables::new(floats(parameters))?;
        let parameters = &variables.parameters;
        let specs = parameters.iter().map(Parameter::spec).collect::<Result<_>>()?;
        let device = parameters.first().map_or(&Device::Cpu, |parameter| parameter.var.device()).clone();
        let optimizer = device::optimizer(config.method, config.options, specs, &device)?;
        Ok(Self { variables, optimizer, device, refused: None })
    }

    /// An optimizer for all variables of a map, in group 0; [`parameters`] for groups.
    ///
    /// # Errors
    /// As [`Rfd::for_parameters`].
    pub fn for_varmap(map: &VarMap, config: Config) -> Result<Self> {
        Self::for_parameters(parameters(map), config)
    }

    /// A step with gradients that were accumulated, clipped or otherwise made by the caller. `loss` is one
    /// number, the mean over the batch that the gradients are the mean of; on a CUDA device it is read there,
    /// without waiting.
    ///
    /// A loss or gradient that is not finite and a gradient of zero skip the step, see [`Rfd::report`].
    ///
    /// # Errors
    /// Names the variable whose gradient has another shape, an unknown format or lies on another device; a
    /// loss that is not one number; a learning rate that was refused. Nothing has changed then.
    pub fn step_with_loss(&mut self, grads: &GradStore, loss: &Tensor) -> Result<()> {
        if let Some(rate) = self.refused {
            self.set_multiplier(rate)?;
        }
        match &self.device {
            Device::Cuda(device) => device::step(&mut self.optimizer, &self.variables, grads, loss, device),
            _ => host::step(&mut self.optimizer, &self.variables, grads, loss),
        }
    }

    /// What the last step did, `None` before the first. On a CUDA device: the last step that it has finished;
    /// does not wait.
    ///
    /// # Errors
    /// When the device failed.
    pub fn report(&self) -> Result<Option<StepReport>> {
        self.optimizer.report().map_err(wrap)
    }

    /// What the last step did, after waiting for a CUDA device to finish it.
    ///
    /// # Errors
    /// When the device failed.
    pub fn wait_report(&self) -> Result<Option<StepReport>> {
        self.optimizer.wait_report(self.stream()).map_err(wrap)
    }

    /// The variables, in the order in which they count.
    pub fn parameters(&self) -> &[Parameter] {
        &self.variables.parameters
    }

    /// How steps are chosen.
    pub fn method(&self) -> &Method {
        self.optimizer.method()
    }

    /// The fitted covariance model; `None` with the adaptive method.
    pub fn model(&self) -> Option<&Model> {
        self.method().model()
    }

    /// The options in force.
    pub fn options(&self) -> &Options {
        self.optimizer.options()
    }

    /// Sets the multiplier of the step size from the next step on, for schedulers.
    ///
    /// # Errors
    /// For a negative or non-finite number.
    pub fn set_multiplier(&mut self, multiplier: f64) -> Result<()> {
        self.optimizer.set_multiplier(multiplier, self.stream()).map_err(wrap)?;
        self.refused = None;
        Ok(())
    }

    /// Replaces the settings of the method from the next step on. Of [`Fitted`](crate::Fitted),
    /// `inv_batch_size` and `momentum` may change, of [`Adaptive`](crate::Adaptive) nothing.
    ///
    /// # Errors
    /// For a setting that can't change or is outside its domain, and for another method.
    pub fn set_method(&mut self, method: impl Into<Method>) -> Result<()> {
        self.optimizer.set_method(method, self.stream()).map_err(wrap)
    }

    /// Sets the options of one group from the next step on.
    ///
    /// # Errors
    /// For a group that does not exist or a value outside its domain.
    pub fn set_group(&mut self, index: usize, group: Group) -> Result<()> {
        self.optimizer.set_group(index, group, self.stream()).map_err(wrap)
    }

    /// Writes velocities, master weights and counts to a safetensors file, by way of a temporary one; not the
    /// variables, which `VarMap::save` writes. Every other front end of the library reads the file. On a CUDA
    /// device it waits.
    ///
    /// # Errors
    /// When the file can't be written, or the device failed.
    pub fn save_state(&self, path: impl AsRef<Path>) -> Result<()> {
        self.optimizer.save_state(path.as_ref(), self.stream()).map_err(wrap)
    }

    /// Loads what [`Rfd::save_state`] wrote for variables of the same names, shapes and formats, whatever
    /// their order. On an error the optimizer is as it was.
    ///
    /// # Errors
    /// When the file can't be read, is damaged or is not for these variables; it says which one differs.
    pub fn load_state(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.optimizer.load_state(path.as_ref(), self.stream()).map_err(wrap)
    }

    /// The bytes of the file of [`Rfd::save_state`].
    ///
    /// # Errors
    /// When the device failed.
    pub fn state_to_bytes(&self) -> Result<Vec<u8>> {
        self.optimizer.state_to_bytes(self.stream()).map_err(wrap)
    }

    /// Loads bytes that [`Rfd::state_to_bytes`] made.
    ///
    /// # Errors
    /// As [`Rfd::load_state`].
    pub fn load_state_from_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.optimizer.load_state_from_bytes(bytes, self.stream()).map_err(wrap)
    }

    fn stream(&self) -> Stream {
        device::stream(&self.device)
    }
}

impl Optimizer for Rfd {
    type Config = Config;

    /// An optimizer for variables in group 0 that are called `var 0`, `var 1` and so on.
    fn new(vars: Vec<Var>, config: Config) -> Result<Self> {
        let name = |(index, var)| Parameter::new(format!("var {index}"), var);
        Self::for_parameters(vars.into_iter().enumerate().map(name).collect(), config)
    }

    /// Always an error: a step of RFD needs the loss.
    fn step(&mut self, _grads: &GradStore) -> Result<()> {
        candle_core::bail!(
            "a step of Random Function Descent needs the loss: call `backward_step(&loss)`, or \
             `step_with_loss(&grads, &loss)` for gradients of your own"
        )
    }

    /// The multiplier of the step size, not the length of a step over the gradient's norm, which
    /// [`Rfd::report`] has.
    fn learning_rate(&self) -> f64 {
        self.options().multiplier
    }

    /// Sets the multiplier; one that is negative or not finite makes the next step an error.
    fn set_learning_rate(&mut self, lr: f64) {
        self.refused = self.set_multiplier(lr).is_err().then_some(lr);
    }

    fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        self.step_with_loss(&loss.backward()?, loss)
    }
}
