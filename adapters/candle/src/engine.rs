//! Where the steps are taken: on the CPU or on a CUDA device.

use std::path::Path;

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor};
use rfdescent::optimizer::{Group, Method, Optimizer, Options, StepReport, TensorSpec};

#[cfg(feature = "cuda")]
use crate::cuda::Cuda;
use crate::error::{self, wrap};
use crate::host::Host;
use crate::variables::Variables;

#[derive(Debug)]
pub(crate) enum Engine {
    Host(Box<Host>),
    #[cfg(feature = "cuda")]
    Cuda(Box<Cuda>),
}

/// The same for either engine; the device's methods take its stream as well.
macro_rules! either {
    ($engine:expr, $method:ident($($argument:expr),*)) => {
        match $engine {
            Engine::Host(host) => host.optimizer.$method($($argument),*).map_err(wrap),
            #[cfg(feature = "cuda")]
            Engine::Cuda(cuda) => cuda.optimizer.$method($($argument,)* cuda.stream()).map_err(wrap),
        }
    };
}

impl Engine {
    pub fn new(method: Method, options: Options, specs: Vec<TensorSpec>, device: &Device) -> Result<Self> {
        match device {
            Device::Cpu => {
                let optimizer = Optimizer::new(method, options, specs).map_err(wrap)?;
                Ok(Engine::Host(Box::new(Host { optimizer, report: None })))
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Ok(Engine::Cuda(Box::new(Cuda::new(method, options, specs, device)?))),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => {
                Err(unusable(&specs, "CUDA", "build rfdescent-candle with its feature `cuda`"))
            }
            Device::Metal(_) => Err(unusable(
                &specs,
                "Metal",
                "there are steps on the CPU and on CUDA devices: move the model to one",
            )),
        }
    }

    pub fn step(&mut self, variables: &Variables, grads: &GradStore, loss: &Tensor) -> Result<()> {
        match self {
            Engine::Host(host) => host.step(variables, grads, loss),
            #[cfg(feature = "cuda")]
            Engine::Cuda(cuda) => cuda.step(variables, grads, loss),
        }
    }

    pub fn report(&self) -> Result<Option<StepReport>> {
        match self {
            Engine::Host(host) => Ok(host.report),
            #[cfg(feature = "cuda")]
            Engine::Cuda(cuda) => cuda.optimizer.status().map_err(wrap),
        }
    }

    pub fn options(&self) -> &Options {
        match self {
            Engine::Host(host) => host.optimizer.options(),
            #[cfg(feature = "cuda")]
            Engine::Cuda(cuda) => cuda.optimizer.options(),
        }
    }

    pub fn method(&self) -> &Method {
        match self {
            Engine::Host(host) => host.optimizer.method(),
            #[cfg(feature = "cuda")]
            Engine::Cuda(cuda) => cuda.optimizer.method(),
        }
    }

    pub fn set_multiplier(&mut self, multiplier: f64) -> Result<()> {
        either!(self, set_multiplier(multiplier))
    }

    pub fn set_inv_batch_size(&mut self, inv_batch_size: f64) -> Result<()> {
        either!(self, set_inv_batch_size(inv_batch_size))
    }

    pub fn set_group(&mut self, index: usize, group: Group) -> Result<()> {
        either!(self, set_group(index, group))
    }

    pub fn save_state(&self, path: &Path) -> Result<()> {
        either!(self, save_state(path))
    }

    pub fn load_state(&mut self, path: &Path) -> Result<()> {
        either!(self, load_state(path))
    }

    pub fn state_to_bytes(&self) -> Result<Vec<u8>> {
        either!(self, state_to_bytes())
    }

    pub fn load_state_from_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        either!(self, load_state_from_bytes(bytes))
    }
}

fn unusable(specs: &[TensorSpec], kind: &str, remedy: &str) -> candle_core::Error {
    let name = specs.first().map_or("", |spec| &spec.name);
    error::tensor(name, format!("lies on a {kind} device; {remedy}"))
}
