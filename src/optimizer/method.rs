//! How steps follow from losses and gradients: RFD as published, or adaptive.

use std::collections::HashMap;

use crate::covariance::{Model, StepRule};
use crate::error::{Error, Result};

use super::{Group, Options, TensorSpec};

/// How an [`Optimizer`](super::Optimizer) chooses its steps.
#[derive(Clone, Debug)]
pub enum Method {
    /// Random Function Descent as published: steps from a covariance model fitted to samples.
    Published(Model),
    /// Steps from what training itself shows, without a fit.
    Adaptive(Adaptive),
}

impl From<Model> for Method {
    fn from(model: Model) -> Self {
        Method::Published(model)
    }
}

impl From<Adaptive> for Method {
    fn from(adaptive: Adaptive) -> Self {
        Method::Adaptive(adaptive)
    }
}

/// RFD on the logarithm of the cost, whose variances are those of the gradients seen last (`docs/adaptive.md`). It needs no
/// samples and trains networks whose cost is far from stationary, where RFD as published diverges. The defaults are for all
/// networks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adaptive {
    /// Whether each tensor has a length scale of its own. Default: each has.
    pub anisotropy: Anisotropy,
    /// β, the decay of the averages of gradients and losses, in [0, 1). 0 means no averages, and no buffer for that of the
    /// gradients. Default 0.9. The buffer is f32 for all but f64 parameters.
    pub averaging: f64,
    /// The largest known lower bound of the loss. Default 0, which is right for cross entropy and squared errors. Steps with a
    /// loss below it are skipped.
    pub loss_bound: f64,
}

/// Which parameters share a length scale, beside the factors of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anisotropy {
    /// All parameters.
    Isotropic,
    /// The elements of a tensor (paper, section "Geometric anisotropy/Adaptive step sizes").
    Tensorwise,
}

impl Default for Adaptive {
    fn default() -> Self {
        Self { anisotropy: Anisotropy::Tensorwise, averaging: 0.9, loss_bound: 0.0 }
    }
}

impl Method {
    /// The fitted covariance model; `None` with the adaptive method.
    pub fn model(&self) -> Option<&Model> {
        match self {
            Method::Published(model) => Some(model),
            Method::Adaptive(_) => None,
        }
    }

    /// The model, or the error that sharded training has for the adaptive method.
    pub(crate) fn published(&self) -> Result<&Model> {
        self.model().ok_or_else(|| {
            let expected =
                "a shard does not know the norms of whole tensors; use `step`, or RFD as published";
            Error::invalid("method", "adaptive", expected)
        })
    }

    /// An error if the model has length scales by tensor and the groups of the tensors don't.
    pub(crate) fn check_groups(&self, specs: &[TensorSpec]) -> Result<()> {
        let tensors = self.model().map_or(&[][..], Model::tensors);
        let mut of_groups = HashMap::new();
        for tensor in tensors {
            let factor = tensor.length_scale_factor;
            let group = specs.iter().find(|spec| spec.name == tensor.name).map(|spec| spec.group);
            if group.is_none_or(|group| *of_groups.entry(group).or_insert(factor) != factor) {
                let problem = "has a length scale of its own in the model, but no group with it: `Options::per_tensor` \
                               makes the groups, or fit without tensors";
                return Err(Error::tensor(&tensor.name, problem));
            }
        }
        Ok(())
    }

    pub(crate) fn is_adaptive(&self) -> bool {
        matches!(self, Method::Adaptive(_))
    }

    /// Checks the options together with the method and brings them into the form that steps use.
    pub(crate) fn prepare(&self, mut options: Options) -> Result<Options> {
        options.validate()?;
        if let Method::Adaptive(adaptive) = self {
            adaptive.validate(&options)?;
            for (index, group) in options.groups.iter_mut().enumerate() {
                *group = adaptive.prepare_group(index, *group)?;
            }
        }
        Ok(options)
    }

    /// The same for one group.
    pub(crate) fn prepare_group(&self, index: usize, group: Group) -> Result<Group> {
        group.validate(index)?;
        match self {
            Method::Published(_) => Ok(group),
            Method::Adaptive(adaptive) => adaptive.prepare_group(index, group),
        }
    }
}

impl Adaptive {
    fn validate(&self, options: &Options) -> Result<()> {
        if !(0.0..1.0).contains(&self.averaging) {
            return Err(Error::invalid("averaging", self.averaging, "give a number in [0, 1)"));
        }
        if !self.loss_bound.is_finite() {
            let expected = "give a finite number that no loss falls below; 0 for most";
            return Err(Error::invalid("loss_bound", self.loss_bound, expected));
        }
        let published = "is for RFD as published; leave it at its default with the adaptive method";
        if options.rule != StepRule::default() {
            return Err(Error::invalid("rule", format!("{:?}", options.rule), published));
        }
        if options.inv_batch_size != 0.0 {
            return Err(Error::invalid("inv_batch_size", options.inv_batch_size, published));
        }
        Ok(())
    }

    /// The velocity of a group is the sum that the average is made of: v = −Σ βⁱ g.
    fn prepare_group(&self, index: usize, group: Group) -> Result<Group> {
        if group.momentum != 0.0 && group.momentum != self.averaging {
            let expected =
                "the adaptive method averages gradients itself, see its option `averaging`; leave it at 0";
            return Err(Error::invalid(&format!("groups[{index}].momentum"), group.momentum, expected));
        }
        Ok(Group { momentum: self.averaging, ..group })
    }
}
