//! What a user can set, with defaults that need no tuning.

use super::spec::TensorSpec;
use crate::covariance::is_factor;
use crate::error::{Error, Result};

/// Options of an [`Optimizer`](super::Optimizer), whatever its method.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Multiplies the step size; for schedulers. The reported learning rate includes it. Default 1.
    pub multiplier: f64,
    /// The step size times the multiplier is cut to this. Default: no cap.
    pub max_step_size: Option<f64>,
    /// Seed of stochastic rounding for f16 and bf16 parameters without master weights; `None` rounds to
    /// nearest. What is rounded is an f32, so updates below half a unit of f32 in the parameter's last place
    /// (2⁻²⁵ of its value) are lost.
    pub stochastic_rounding: Option<u64>,
    /// Whether f16 and bf16 parameters get f32 master weights, which the step updates and the parameters are
    /// rounded from.
    pub master_weights: bool,
    /// Settings by group of tensors; [`TensorSpec::group`](super::TensorSpec::group) is an index into this
    /// list.
    pub groups: Vec<Group>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
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
    /// f: multiplies the group's length scale, that is Σ = f⁻² on its block (paper, extension "RFD steps
    /// under geometric anisotropy"). The direction becomes f²·g, the norm √(Σ f²‖g‖²). Default 1.
    pub length_scale_factor: f64,
    /// Multiplies the learning rate of this group alone. Default 1.
    pub multiplier: f64,
    /// λ in p ← (1 − learning_rate·λ)·p − …, the factor never below 0. Default 0. The learning rate is η/‖g‖:
    /// near a critical point, where ‖g‖ is tiny, it can be large enough to decay parameters away in one step;
    /// a cap on the step size bounds it.
    pub weight_decay: f64,
    /// Whether each tensor keeps its Euclidean norm: after the step it is scaled back to the norm it had
    /// before. Tensors of norm 0 and of one element are left alone. Default false.
    pub norm_lock: bool,
}

impl Default for Group {
    fn default() -> Self {
        Self { length_scale_factor: 1.0, multiplier: 1.0, weight_decay: 0.0, norm_lock: false }
    }
}

impl Options {
    /// The group of a tensor, or an error when there is none of its number.
    pub(super) fn group_of(&self, spec: &TensorSpec) -> Result<&Group> {
        self.groups.get(spec.group).ok_or_else(|| {
            let (group, count) = (spec.group, self.groups.len());
            let problem = format!("belongs to group {group}, but there are {count} groups, counted from 0");
            Error::tensor(&spec.name, problem)
        })
    }

    /// A step size within the cap.
    pub(super) fn capped(&self, step_size: f64) -> f64 {
        step_size.min(self.max_step_size.unwrap_or(f64::MAX))
    }

    pub(crate) fn validate(&self) -> Result<()> {
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
        Ok(())
    }
}

fn not_negative(name: &str, value: f64) -> Result<()> {
    if value >= 0.0 && value.is_finite() {
        return Ok(());
    }
    Err(Error::invalid(name, value, "give a finite number that is not negative"))
}
