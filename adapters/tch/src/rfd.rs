//! The configuration that an optimizer is built from.

use rfdescent::device::Target;
use rfdescent::optimizer::{AnyOptimizer, Group, Method, Options};
use tch::Device;
use tch::nn::{self, OptimizerConfig, VarStore};

use crate::error::{Error, Result};
use crate::optimizer::Optimizer;
use crate::parameter::{Parameter, trainable};

/// Random Function Descent, to be built for a store: what tch's `nn::Sgd` is to its optimizer.
///
/// The groups of the options are those of the store: a variable made under `path.set_group(k)` has the
/// settings `options.groups[k]`. [`Rfd::group`] adds groups by name.
///
/// ```no_run
/// use rfdescent::covariance::Model;
/// use rfdescent::optimizer::Group;
/// use rfdescent_tch::Rfd;
/// use tch::{Device, nn};
///
/// # fn main() -> rfdescent_tch::Result<()> {
/// let vs = nn::VarStore::new(Device::cuda_if_available());
/// let layer = nn::linear(vs.root() / "head", 784, 10, Default::default());
/// let head = Group { weight_decay: 1e-4, ..Group::default() };
/// let optimizer = Rfd::new(Model::load("model.json".as_ref())?).group("head", head).build(&vs)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Rfd {
    method: Method,
    options: Options,
    prefixes: Vec<(String, Group)>,
}

impl Rfd {
    /// With a fitted [`Model`](rfdescent::covariance::Model) RFD as published, with [`Fitted`](crate::Fitted)
    /// the same with momentum and other settings; or [`Adaptive`](crate::Adaptive), which needs no fit.
    pub fn new(method: impl Into<Method>) -> Self {
        Self { method: method.into(), options: Options::default(), prefixes: Vec::new() }
    }

    /// The same with other options.
    pub fn options(self, options: Options) -> Self {
        Self { options, ..self }
    }

    /// The same with a group of its own, after those of the options, for the variable of this name and all
    /// variables below it: `layer1` takes `layer1.weight`, not `layer10.weight`. Of several the longest name
    /// counts; it takes precedence over the group that the store knows. Momentum is the method's: a list of
    /// it has a number for each named group too.
    pub fn group(mut self, name: impl Into<String>, group: Group) -> Self {
        self.prefixes.push((name.into(), group));
        self
    }

    /// An optimizer for the variables that are trainable in the store now.
    ///
    /// # Errors
    /// [`Error::Rfd`] names an option outside its domain, a group that takes no variable, and a variable that
    /// steps can't change in place (sparse, not of a floating-point kind, not dense in memory, on another
    /// device than the first, sharing memory with another), each with the remedy; or it says why the CUDA
    /// device can't be used.
    pub fn build(self, store: &VarStore) -> Result<Optimizer> {
        let Self { method, mut options, prefixes } = self;
        let first_named = options.groups.len();
        options.groups.extend(prefixes.iter().map(|(_, group)| *group));
        let (parameters, store_groups): (Vec<Parameter>, Vec<usize>) = trainable(store)?.into_iter().unzip();
        let device = common_device(&parameters)?;
        let mut taken = vec![false; prefixes.len()];
        let mut specs = Vec::with_capacity(parameters.len());
        for (parameter, store_group) in parameters.iter().zip(store_groups) {
            let named = longest_prefix(&prefixes, &parameter.name);
            if let Some(k) = named {
                taken[k] = true;
            } else if store_group >= first_named {
                let problem = format!(
                    "is in group {store_group} of the store, but the options have {first_named} groups; add groups to the \
                     options, or `set_group` another one"
                );
                return Err(Error::tensor(&parameter.name, problem));
            }
            specs.push(parameter.spec().in_group(named.map_or(store_group, |k| first_named + k)));
        }
        if let Some(k) = taken.iter().position(|taken| !taken) {
            let expected =
                "takes no trainable variable of the store; give the name of a variable or of a path above it";
            return Err(Error::invalid("group", &prefixes[k].0, expected));
        }
        let target = match device {
            Device::Cuda(ordinal) => Target::Device(rfdescent::cuda::device(ordinal)?),
            _ => Target::Cpu,
        };
        let mut optimizer = AnyOptimizer::new(method, options, specs, &target)?;
        let (tensors, _gradients): (Vec<_>, Vec<_>) =
            parameters.iter().map(Parameter::place).collect::<Result<_>>()?;
        optimizer.check_tensors(&tensors)?;
        // Only libtorch's own optimizers can make gradients undefined again, so that a parameter without a
        // part in the next loss is left alone; this one does nothing else.
        let gradients = nn::Sgd::default().build(store, 0.0)?;
        Ok(Optimizer::new(store, gradients, parameters, optimizer))
    }
}

/// The device of all parameters.
fn common_device(parameters: &[Parameter]) -> Result<Device> {
    let Some(first) = parameters.first() else {
        let expected = "the store has no trainable variables; make the layers first";
        return Err(Error::invalid("store", "empty", expected));
    };
    if let Some(other) = parameters.iter().find(|parameter| parameter.device() != first.device()) {
        let problem = format!(
            "is on {:?}, but `{}` is on {:?}; move them to one device with `set_device`",
            other.device(),
            first.name,
            first.device()
        );
        return Err(Error::tensor(&other.name, problem));
    }
    Ok(first.device())
}

/// The index of the longest name that takes the variable.
fn longest_prefix(prefixes: &[(String, Group)], name: &str) -> Option<usize> {
    let takes = |prefix: &str| {
        prefix.is_empty()
            || name.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    (prefixes.iter().enumerate())
        .filter(|(_, (prefix, _))| takes(prefix))
        .max_by_key(|(_, (prefix, _))| prefix.len())
        .map(|(k, _)| k)
}
