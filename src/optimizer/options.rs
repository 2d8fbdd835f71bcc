//! What a user can set, with defaults that need no tuning.

use std::collections::HashMap;

use super::TensorSpec;
use crate::covariance::{StepRule, TensorFactor, is_factor, validate_inv_batch_size};
use crate::error::{Error, Result};

/// Options of an [`Optimizer`](super::Optimizer). The defaults are RFD as published.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Step-size mode (RFD, A-RFD, A-RFD clipped at the plateau) and conservatism.
    pub rule: StepRule,
    /// 1/b for the S-RFD correction (paper, extension "S-RFD"): the inverse of the effective batch size of the gradients.
    /// 0, the default, treats loss and gradient as noiseless.
    pub inv_batch_size: f64,
    /// Multiplies the step size; for schedulers. The reported learning rate includes it. Default 1.
    pub multiplier: f64,
    /// The step size times the multiplier is cut to this. Default: no cap.
    pub max_step_size: Option<f64>,
    /// Seed of stochastic rounding for f16 and bf16 parameters without master weights; `None` rounds to nearest. What is rounded
    /// is an f32, so updates below half a unit of f32 in the parameter's last place (2⁻²⁵ of its value) are lost.
    pub stochastic_rounding: Option<u64>,
    /// Whether f16 and bf16 parameters get f32 master weights, which the step updates and the parameters are rounded from.
    pub master_weights: bool,
    /// Settings by group of tensors; [`TensorSpec::group`](super::TensorSpec::group) is an index into this list.
    pub groups: Vec<Group>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            rule: StepRule::default(),
            inv_batch_size: 0.0,
            multiplier: 1.0,
            max_step_size: None,
            stochastic_rounding: None,
            master_weights: false,
            groups: vec![Group::default()],
        }
    }
}

/// Settings of one group of tensors. All groups share one model, one global norm and one step size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// f: multiplies the group's length scale, that is Σ = f⁻² on its block (paper, extension "RFD steps under geometric
    /// anisotropy"). The direction becomes f²·g, the norm √(Σ f²‖g‖²). Default 1.
    pub length_scale_factor: f64,
    /// Multiplies the learning rate of this group alone. Default 1.
    pub multiplier: f64,
    /// m in v ← m·v − g, p ← p + learning_rate·v; in [0, 1). Default 0: no velocity is kept. Velocities are f32 for all but f64
    /// parameters, so a step whose gradient norm or learning rate leaves the range of f32 is skipped.
    pub momentum: f64,
    /// λ in p ← (1 − learning_rate·λ)·p − …, the factor never below 0. Default 0. The learning rate is η/‖g‖: near a critical
    /// point, where ‖g‖ is tiny, it can be large enough to decay parameters away in one step; a cap on the step size bounds it.
    pub weight_decay: f64,
    /// Whether each tensor keeps its Euclidean norm: after the step it is scaled back to the norm it had before. Tensors of
    /// norm 0 and of one element are left alone. Default false.
    pub norm_lock: bool,
}

impl Default for Group {
    fn default() -> Self {
        Self { length_scale_factor: 1.0, multiplier: 1.0, momentum: 0.0, weight_decay: 0.0, norm_lock: false }
    }
}

impl Options {
    /// The options and descriptions of an optimizer in the geometry of a model with
    /// [length scales by tensor](crate::covariance::Model::tensors): each tensor gets a group of its own, with the
    /// settings of the group it was in and that group's length-scale factor times the model's f_k. Tensors that the model
    /// does not know (such as running averages, which have no gradient) keep the factor of their group. Group k is then
    /// that of `specs[k]`; without `tensors` nothing changes.
    ///
    /// # Errors
    /// [`Error::Tensor`] names a tensor of the model that is not in `specs`, one that reaches beyond the number of elements
    /// the model was fitted with, or one whose group does not exist.
    pub fn per_tensor(
        mut self,
        mut specs: Vec<TensorSpec>,
        tensors: &[TensorFactor],
    ) -> Result<(Options, Vec<TensorSpec>)> {
        if tensors.is_empty() {
            return Ok((self, specs));
        }
        let mut factors: HashMap<&str, &TensorFactor> =
            tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        let mut groups = Vec::with_capacity(specs.len());
        for (index, spec) in specs.iter_mut().enumerate() {
            let Some(&group) = self.groups.get(spec.group) else {
                let count = self.groups.len();
                let problem = format!("belongs to group {}, but there are {count} groups", spec.group);
                return Err(Error::tensor(&spec.name, problem));
            };
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
            spec.group = index;
        }
        if let Some(tensor) = tensors.iter().find(|tensor| factors.contains_key(tensor.name.as_str())) {
            let problem = "has a length scale in the model but is not among the optimizer's tensors: give both the same \
                           names, or fit the model to this network";
            return Err(Error::tensor(&tensor.name, problem));
        }
        self.groups = groups;
        Ok((self, specs))
    }

    pub(crate) fn validate(&self) -> Result<()> {
        self.rule.validate()?;
        validate_inv_batch_size(self.inv_batch_size)?;
        not_negative("multiplier", self.multiplier)?;
        if let Some(cap) = self.max_step_size
            && (cap.is_nan() || cap <= 0.0)
        {
            return Err(Error::invalid("max_step_size", cap, "give a positive number, or none for no cap"));
        }
        if self.groups.is_empty() {
            return Err(Error::invalid(
                "groups",
                "[]",
                "give at least one group; `Group::default()` will do",
            ));
        }
        self.groups.iter().enumerate().try_for_each(|(index, group)| group.validate(index))
    }
}

impl Group {
    pub(crate) fn validate(&self, index: usize) -> Result<()> {
        let name = |field: &str| format!("groups[{index}].{field}");
        if !is_factor(self.length_scale_factor) {
            let expected =
                "give a positive number between 1e-150 and 1e150; 1 leaves the length scale as it is";
            return Err(Error::invalid(&name("length_scale_factor"), self.length_scale_factor, expected));
        }
        not_negative(&name("multiplier"), self.multiplier)?;
        not_negative(&name("weight_decay"), self.weight_decay)?;
        if !(0.0..1.0).contains(&self.momentum) {
            return Err(Error::invalid(&name("momentum"), self.momentum, "give a number in [0, 1)"));
        }
        Ok(())
    }
}

fn not_negative(name: &str, value: f64) -> Result<()> {
    if value >= 0.0 && value.is_finite() {
        return Ok(());
    }
    Err(Error::invalid(name, value, "give a finite number that is not negative"))
}
