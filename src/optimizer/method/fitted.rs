//! Random Function Descent as published: step sizes from a covariance model that was fitted to samples.

use std::collections::HashMap;

use super::{Descent, History, Method, Next, Seen, another_method, fixed};
use crate::backend::abi::{
    RFD_METHOD_FITTED, RFD_MODE_A_RFD, RFD_MODE_CLIPPED_A_RFD, RFD_MODE_RFD, RfdModel, RfdSettings, RfdStep,
};
use crate::backend::executor::InstanceKind;
use crate::backend::kernels::{FAMILIES, are_same};
use crate::covariance::{
    Family, Model, Observation, StepMode, StepRule, TensorFactor, quantile, validate_inv_batch_size,
};
use crate::error::{Error, Result};
use crate::optimizer::decision::Decision;
use crate::optimizer::options::{Group, Options};
use crate::optimizer::report::SkipReason;
use crate::optimizer::spec::TensorSpec;

/// Steps from a fitted covariance model (paper, Theorem "Explicit RFD"). With the defaults, RFD as published;
/// it takes loss and gradient as noiseless.
#[derive(Clone, Debug)]
pub struct Fitted {
    /// What was fitted.
    pub model: Model,
    /// Step-size mode (RFD, A-RFD, A-RFD clipped at the plateau) and conservatism (paper, Definition "A-RFD"
    /// and section "Conservative RFD"). Default: RFD.
    pub rule: StepRule,
    /// 1/b for the S-RFD correction (paper, extension "S-RFD"): the inverse of the effective batch size of
    /// the gradients, in (0, 1]. 0, the default, treats loss and gradient as noiseless.
    pub inv_batch_size: f64,
    /// m in v ← m·v − g, p ← p + learning_rate·v, in [0, 1): one number for all groups, or one for each;
    /// none, the default, is 0 for all. Tensors with momentum 0 keep no velocity. Velocities are f32 for all
    /// but f64 parameters, so a step whose gradient norm or learning rate leaves the range of f32 is skipped.
    pub momentum: Vec<f64>,
}

impl Fitted {
    /// RFD as published with the given model.
    pub fn new(model: Model) -> Self {
        Self { model, rule: StepRule::default(), inv_batch_size: 0.0, momentum: Vec::new() }
    }

    /// The same with momentum in all groups.
    pub fn with_momentum(self, momentum: f64) -> Self {
        Self { momentum: vec![momentum], ..self }
    }

    /// Method, options and descriptions of an optimizer in the geometry of a model with [length scales by
    /// tensor](Model::tensors): each tensor gets a group of its own, with the settings of the group it was in
    /// and that group's length-scale factor times the model's f_k. Tensors that the model does not know (such
    /// as running averages, which have no gradient) keep the factor of their group. Group k is then that of
    /// `specs[k]`; a model without such tensors changes nothing.
    ///
    /// # Errors
    /// [`Error::Tensor`] names a tensor of the model that is not in `specs`, one that reaches beyond the
    /// number of elements the model was fitted with, or one whose group does not exist;
    /// [`Error::InvalidArgument`] a setting outside its domain.
    pub fn per_tensor(
        mut self,
        mut options: Options,
        mut specs: Vec<TensorSpec>,
    ) -> Result<(Self, Options, Vec<TensorSpec>)> {
        let tensors = self.model.tensors();
        if tensors.is_empty() {
            return Ok((self, options, specs));
        }
        // Here, where groups have the numbers that the caller gave them.
        options.validate()?;
        self.check(options.groups.len())?;
        let mut factors: HashMap<&str, &TensorFactor> =
            tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        let (mut groups, mut momentum) = (Vec::with_capacity(specs.len()), Vec::with_capacity(specs.len()));
        for (index, spec) in specs.iter_mut().enumerate() {
            let group = *options.group_of(spec)?;
            let mut length_scale_factor = group.length_scale_factor;
            if let Some(tensor) = factors.remove(spec.name.as_str()) {
                if u128::from(spec.offset) + spec.len()? as u128 > u128::from(tensor.dims) {
                    let problem = format!(
                        "has shape {:?} but {} elements in the model: fit the model to this network",
                        spec.shape, tensor.dims
                    );
                    return Err(Error::tensor(&spec.name, problem));
                }
                length_scale_factor *= tensor.length_scale_factor;
            }
            groups.push(Group { length_scale_factor, ..group });
            momentum.push(self.velocity_decay(spec.group));
            spec.group = index;
        }
        if let Some(tensor) = tensors.iter().find(|tensor| factors.contains_key(tensor.name.as_str())) {
            let problem = "has a length scale in the model but is not among the optimizer's tensors: give both the same \
                           names, or fit the model to this network";
            return Err(Error::tensor(&tensor.name, problem));
        }
        if self.momentum.len() > 1 {
            self.momentum = momentum;
        }
        options.groups = groups;
        Ok((self, options, specs))
    }

    /// The model as the kernels evaluate it.
    fn on_device(&self) -> Result<RfdModel> {
        let Self { model, rule, .. } = self;
        let Some(family) = model.family() else {
            let expected =
                "only the built-in covariances run on a device; use the CPU's `Optimizer` for others";
            return Err(Error::invalid("covariance", model.covariance().name(), expected));
        };
        let beta = if let Family::RationalQuadratic { beta } = family { beta } else { 0.0 };
        let moments = model.moments();
        Ok(RfdModel {
            mean: moments.mean,
            variance: moments.variance,
            noise_variance: moments.noise_variance,
            grad_variance: moments.grad_variance,
            noise_grad_variance: moments.noise_grad_variance,
            length_scale: model.length_scale(),
            slope: model.slope(),
            plateau: model.plateau(),
            beta,
            quantile: quantile(rule.conservatism),
            family: family.number(),
            mode: match rule.mode {
                StepMode::Rfd => RFD_MODE_RFD,
                StepMode::ARfd => RFD_MODE_A_RFD,
                StepMode::ClippedARfd => RFD_MODE_CLIPPED_A_RFD,
            },
        })
    }
}

// The families of host and kernels have the same numbers.
const _: () =
    assert!(are_same(Family::NAMES, FAMILIES), "src/covariance and kernels/abi.h have other families");

impl From<Model> for Fitted {
    fn from(model: Model) -> Self {
        Self::new(model)
    }
}

impl Descent for Fitted {
    fn name(&self) -> &'static str {
        "fitted"
    }

    fn check(&self, groups: usize) -> Result<()> {
        self.rule.validate()?;
        validate_inv_batch_size(self.inv_batch_size)?;
        if self.momentum.len() > 1 && self.momentum.len() != groups {
            let expected = format!("there are {groups} groups; give one number for all, or one for each");
            return Err(Error::invalid("length of momentum", self.momentum.len(), expected));
        }
        for (index, &momentum) in self.momentum.iter().enumerate() {
            if !(0.0..1.0).contains(&momentum) {
                let name = format!("momentum[{index}]");
                return Err(Error::invalid(&name, momentum, "give a number in [0, 1)"));
            }
        }
        Ok(())
    }

    /// A model with length scales by tensor needs groups that have them.
    fn check_tensors(&self, specs: &[TensorSpec]) -> Result<()> {
        let groups: HashMap<&str, usize> =
            specs.iter().map(|spec| (spec.name.as_str(), spec.group)).collect();
        let mut of_groups = HashMap::new();
        for tensor in self.model.tensors() {
            let factor = tensor.length_scale_factor;
            let group = groups.get(tensor.name.as_str());
            if group.is_none_or(|group| *of_groups.entry(group).or_insert(factor) != factor) {
                let problem = "has a length scale of its own in the model, but no group with it: `Fitted::per_tensor` \
                               makes the groups, or fit without tensors";
                return Err(Error::tensor(&tensor.name, problem));
            }
        }
        Ok(())
    }

    /// Batch size and momentum may change: model and rule are part of a captured step.
    fn check_change(&self, new: &Method) -> Result<()> {
        let Method::Fitted(new) = new else { return Err(another_method(self.name(), new.name())) };
        if !new.model.is_same(&self.model) {
            return Err(fixed("model", new.model.covariance().name()));
        }
        if new.rule != self.rule {
            return Err(fixed("rule", format!("{:?}", new.rule)));
        }
        Ok(())
    }

    fn velocity_decay(&self, group: usize) -> f64 {
        match self.momentum[..] {
            [] => 0.0,
            [momentum] => momentum,
            _ => self.momentum[group],
        }
    }

    fn kind(&self) -> InstanceKind {
        if self.rule.conservatism > 0.0 { InstanceKind::Generic } else { InstanceKind::Fitted }
    }

    fn decide(
        &self,
        seen: &Seen<'_>,
        _history: &History,
        _next: &mut Next,
    ) -> std::result::Result<Decision, SkipReason> {
        let (options, norms) = (seen.core.options(), seen.norms);
        let observation = Observation {
            loss: seen.input.loss,
            grad_norm: norms.sigma,
            inv_batch_size: self.inv_batch_size,
        };
        let step = self.model.step(&observation, &self.rule)?;
        let step_size = options.capped(step.step_size * options.multiplier);
        let decision = Decision::along_gradient(step.theta, step_size, norms, seen.input);
        let mut groups = options.groups.iter().enumerate();
        if !groups.all(|(index, group)| decision.fits_velocities(group, self.velocity_decay(index), 1.0)) {
            return Err(SkipReason::OutOfRange);
        }
        Ok(decision)
    }

    fn place(&self, step: &mut RfdStep, _history: u64) -> Result<()> {
        step.method = RFD_METHOD_FITTED;
        step.model = self.on_device()?;
        Ok(())
    }

    fn place_settings(&self, settings: &mut RfdSettings) {
        settings.inv_batch_size = self.inv_batch_size;
    }
}
