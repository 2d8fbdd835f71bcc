//! The plain structs that optimizers take and give.

use std::ffi::{c_char, c_void};

use super::super::model::code;
use super::super::pointers::{Array, Versioned, address, initialise, slice, text, versioned};
use super::super::status::{Failure, Result, guard, rfd_status};
use rfdescent::DType;
use rfdescent::optimizer::{Group, Options, RawInput, RawNumber, StepReport, TensorSpec, Whole};

/// IEEE binary32.
pub const RFD_DTYPE_F32: u32 = 0;
/// IEEE binary64.
pub const RFD_DTYPE_F64: u32 = 1;
/// IEEE binary16.
pub const RFD_DTYPE_F16: u32 = 2;
/// bfloat16.
pub const RFD_DTYPE_BF16: u32 = 3;

/// Memory of the process.
pub const RFD_DEVICE_CPU: u32 = 0;
/// Memory of a CUDA device.
pub const RFD_DEVICE_CUDA: u32 = 1;

/// A flag of a tensor: its gradient does not count in the global norm. In sharded training a tensor that
/// several ranks hold counts on one of them.
pub const RFD_TENSOR_NOT_IN_NORM: u32 = 1;
/// A flag of a tensor that is a part of a whole one: on some rank the part is cut along another dimension
/// than the first. The same on all ranks.
pub const RFD_TENSOR_SPLITS_ROWS: u32 = 2;

/// A flag of an optimizer: f16 and bf16 parameters get f32 master weights, which steps update and the
/// parameters are rounded from.
pub const RFD_OPTIMIZER_MASTER_WEIGHTS: u32 = 1;
/// A flag of an optimizer: f16 and bf16 parameters without master weights are rounded stochastically.
pub const RFD_OPTIMIZER_STOCHASTIC_ROUNDING: u32 = 2;

/// A flag of a group: each of its tensors keeps its Euclidean norm. Those of norm 0 and of one element are
/// left alone.
pub const RFD_GROUP_NORM_LOCK: u32 = 1;

/// No step has been seen yet.
pub const RFD_OUTCOME_NONE: u32 = 0;
/// Parameters were updated.
pub const RFD_OUTCOME_APPLIED: u32 = 1;
/// Skipped: found_inf was not 0.
pub const RFD_OUTCOME_FOUND_INF: u32 = 2;
/// Skipped: the loss is NaN or infinite. NaN it is too where a program forgot to set it after
/// rfd_step_input_init.
pub const RFD_OUTCOME_NON_FINITE_LOSS: u32 = 3;
/// Skipped: a gradient has a NaN or infinite element, or the norm exceeds the range of double.
pub const RFD_OUTCOME_NON_FINITE_GRADIENT: u32 = 4;
/// Skipped: the gradient is 0.
pub const RFD_OUTCOME_ZERO_GRADIENT: u32 = 5;
/// Skipped: a setting in a device's memory is outside its domain.
pub const RFD_OUTCOME_INVALID_OPTION: u32 = 6;
/// Skipped: with momentum or the adaptive method, gradient norm or learning rate leave the range of float, in
/// which velocities are kept.
pub const RFD_OUTCOME_OUT_OF_RANGE: u32 = 7;
/// Skipped: the loss is below the lower bound given to the adaptive method.
pub const RFD_OUTCOME_LOSS_BELOW_BOUND: u32 = 8;

/// Nothing limited the step by the adaptive method's rules: it was skipped, or is of another method.
pub const RFD_LIMIT_NONE: u32 = 0;
/// The largest rate of the adaptive method.
pub const RFD_LIMIT_RATE: u32 = 1;
/// The share of the loss that a step of the adaptive method may promise to lower it by.
pub const RFD_LIMIT_LOSS: u32 = 2;
/// `max_step_size` of the options.
pub const RFD_LIMIT_SIZE: u32 = 3;

/// Describes one parameter of an optimizer. All zero but `size`, `name`, `shape`, `rank` and `dtype` is a
/// whole tensor of the first group that counts in the norm.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rfd_tensor_spec {
    /// sizeof(rfd_tensor_spec).
    pub size: usize,
    /// A name of its own, UTF-8; it appears in errors and in saved states.
    pub name: *const c_char,
    /// Its `rank` sizes; null for rank 0, which has one element.
    pub shape: *const u64,
    /// Index of the first element in the whole tensor, when this is a shard of it.
    pub offset: u64,
    /// Number of sizes.
    pub rank: u32,
    /// One of RFD_DTYPE_*.
    pub dtype: u32,
    /// Index into the groups of the options.
    pub group: u32,
    /// RFD_TENSOR_* or 0.
    pub flags: u32,
    /// For the adaptive method: elements of a row, which are neighbours and share a variance. 0 for what lies
    /// behind the first size, or for one variance where there are no more than one size. No more than the
    /// tensor has.
    pub row: u64,
    /// In sharded training with the adaptive method, where this is a part of a tensor: `rank` sizes of the
    /// whole one, on every rank, also on one that happens to hold all of it or nothing. Null when it is not
    /// cut.
    pub whole: *const u64,
    /// For each of them, the place of the part's first element. Null exactly where `whole` is.
    pub start: *const u64,
}

versioned!(rfd_tensor_spec {} then row then whole);

/// Where a parameter lies in one step. Contiguous, aligned to its elements.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rfd_tensor {
    /// sizeof(rfd_tensor).
    pub size: usize,
    /// Its first element, on the host or on the device. May be null when it has no elements.
    pub data: *mut c_void,
    /// Number of elements.
    pub count: u64,
    /// One of RFD_DTYPE_*.
    pub dtype: u32,
    /// One of RFD_DEVICE_*; the optimizer's.
    pub device_kind: u32,
    /// Number of the device among those of its kind; 0 for the CPU.
    pub device_index: u32,
}

versioned!(rfd_tensor {});

/// Where a gradient lies in one step: as rfd_tensor, but it is only read.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rfd_gradient {
    /// sizeof(rfd_gradient).
    pub size: usize,
    /// Its first element, on the host or on the device. One that is null is missing: the parameter stays as
    /// it is and counts in no norm.
    pub data: *const c_void,
    /// Number of elements: the parameter's.
    pub count: u64,
    /// One of RFD_DTYPE_*. May differ from the parameter's.
    pub dtype: u32,
    /// One of RFD_DEVICE_*; the optimizer's.
    pub device_kind: u32,
    /// Number of the device among those of its kind; 0 for the CPU.
    pub device_index: u32,
}

versioned!(rfd_gradient {});

/// Settings of a group of tensors; rfd_group_init sets the defaults. All groups share one norm and one step
/// size.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rfd_group {
    /// sizeof(rfd_group).
    pub size: usize,
    /// Multiplies the group's length scale. Default 1.
    pub length_scale_factor: f64,
    /// Multiplies the learning rate of this group alone. Default 1.
    pub multiplier: f64,
    /// Decoupled: parameters are multiplied with 1 - learning_rate * weight_decay. Default 0.
    pub weight_decay: f64,
    /// RFD_GROUP_* or 0.
    pub flags: u32,
}

versioned!(rfd_group { length_scale_factor: 1.0, multiplier: 1.0 });

/// Options of an optimizer; rfd_optimizer_options_init sets the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rfd_optimizer_options {
    /// sizeof(rfd_optimizer_options).
    pub size: usize,
    /// The groups; null, the default, for one with default settings.
    pub groups: *const rfd_group,
    /// Number of groups; 0 with null.
    pub group_count: usize,
    /// Multiplies the step size; for schedulers. Default 1.
    pub multiplier: f64,
    /// The step size times the multiplier is cut to this. Default: infinity.
    pub max_step_size: f64,
    /// Of stochastic rounding. Default 0.
    pub seed: u64,
    /// RFD_OPTIMIZER_* added up, or 0.
    pub flags: u32,
    /// Where the tensors will be: one of RFD_DEVICE_*. Default RFD_DEVICE_CPU.
    pub device_kind: u32,
    /// Number of the device among those of its kind, as CUDA_VISIBLE_DEVICES counts. Default 0.
    pub device_index: u32,
}

versioned!(rfd_optimizer_options { multiplier: 1.0, max_step_size: f64::INFINITY });

/// The scalars of a step; rfd_step_input_init sets the defaults. Addresses are for tensors on a device and
/// must be null for tensors on the CPU.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rfd_step_input {
    /// sizeof(rfd_step_input).
    pub size: usize,
    /// The mini-batch loss at the current parameters: the mean over the batch that the gradients are the
    /// mean of, without gradient scale. A captured CUDA graph keeps it; use `loss_address` there. Has to be
    /// set: NaN from rfd_step_input_init on, with which steps are skipped.
    pub loss: f64,
    /// S when the gradients are S times the real ones, as with a gradient scaler. CPU only. Default 1.
    pub grad_scale: f64,
    /// Any value but 0 skips the step. CPU only. Default 0.
    pub found_inf: f64,
    /// Where the loss lies on the device, in place of `loss`; read when the step runs. Default null.
    pub loss_address: *const c_void,
    /// Where S lies on the device. Default null: no gradient scale.
    pub grad_scale_address: *const f32,
    /// Where found_inf lies on the device. Default null: none.
    pub found_inf_address: *const f32,
    /// Format of the number at `loss_address`, one of RFD_DTYPE_*. Default RFD_DTYPE_F32.
    pub loss_dtype: u32,
}

versioned!(rfd_step_input { loss: f64::NAN, grad_scale: 1.0 });

/// What a step did.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rfd_step_report {
    /// sizeof(rfd_step_report).
    pub size: usize,
    /// The loss given.
    pub loss: f64,
    /// Euclidean norm of the gradient, gradient scale removed; 0 when found_inf skipped the step.
    pub grad_norm: f64,
    /// The norm that the step refers to; differs from `grad_norm` when length-scale factors do from 1. With
    /// the adaptive method that of the averaged gradient.
    pub sigma_norm: f64,
    /// Gradient cost quotient; infinite at a loss of the cost's mean or above and with the adaptive method, 0
    /// in a skipped step.
    pub theta: f64,
    /// Length of the step, multiplier and cap included; 0 in a skipped step.
    pub step_size: f64,
    /// `step_size` / `sigma_norm`: what the gradient is multiplied with, with the adaptive method the
    /// averaged one, and each tensor's scale beside; 0 in a skipped step.
    pub learning_rate: f64,
    /// Steps applied so far, this one included.
    pub applied_steps: u64,
    /// Steps skipped so far, this one included.
    pub skipped_steps: u64,
    /// One of RFD_OUTCOME_*.
    pub outcome: u32,
    /// What limits a step of the adaptive method, one of RFD_LIMIT_*; RFD_LIMIT_NONE with other methods.
    pub limit: u32,
    /// How far the adaptive method trusts its model: a factor on the step, between 0.001 and 4; 0 in a
    /// skipped step and with other methods. Below 0.01 for long, either the loss can't fall any more, or the
    /// gradients are not those of the loss.
    pub trust: f64,
}

versioned!(rfd_step_report {} then trust);

impl From<StepReport> for rfd_step_report {
    fn from(report: StepReport) -> Self {
        Self {
            size: size_of::<Self>(),
            loss: report.loss,
            grad_norm: report.grad_norm,
            sigma_norm: report.sigma_norm,
            theta: report.theta,
            step_size: report.step_size,
            learning_rate: report.learning_rate,
            applied_steps: report.applied_steps,
            skipped_steps: report.skipped_steps,
            outcome: report.outcome.code(),
            limit: report.limit.code(),
            trust: report.trust,
        }
    }
}

/// Before the first step all is 0.
impl From<Option<StepReport>> for rfd_step_report {
    fn from(report: Option<StepReport>) -> Self {
        report.map_or(Self::DEFAULT, Into::into)
    }
}

impl rfd_step_input {
    pub(super) fn convert(&self) -> Result<RawInput> {
        let number = |value, at: *const c_void, dtype| match address(at) {
            0 => RawNumber::Host(value),
            address => RawNumber::Address { address, dtype },
        };
        let loss_dtype = if self.loss_address.is_null() { DType::F64 } else { dtype(self.loss_dtype)? };
        Ok(RawInput {
            loss: number(self.loss, self.loss_address, loss_dtype),
            grad_scale: number(self.grad_scale, self.grad_scale_address.cast(), DType::F32),
            found_inf: number(self.found_inf, self.found_inf_address.cast(), DType::F32),
        })
    }
}

pub(super) fn dtype(value: u32) -> Result<DType> {
    let formats = [DType::F32, DType::F64, DType::F16, DType::BF16];
    code("dtype", value, &formats, "must be one of RFD_DTYPE_*")
}

/// The largest step size, where there is one.
pub(super) fn cap(max_step_size: f64) -> Option<f64> {
    (max_step_size != f64::INFINITY).then_some(max_step_size)
}

/// An error for flags that this release does not know.
fn flags(name: &str, value: u32, known: u32) -> Result<()> {
    if value & !known == 0 { Ok(()) } else { Err(Failure::invalid(name, value, "has unknown bits")) }
}

impl rfd_group {
    pub(super) fn convert(&self) -> Result<Group> {
        flags("rfd_group.flags", self.flags, RFD_GROUP_NORM_LOCK)?;
        Ok(Group {
            length_scale_factor: self.length_scale_factor,
            multiplier: self.multiplier,
            weight_decay: self.weight_decay,
            norm_lock: self.flags & RFD_GROUP_NORM_LOCK != 0,
        })
    }
}

impl rfd_optimizer_options {
    /// # Safety
    /// `groups` is null or points to `group_count` of them.
    pub(super) unsafe fn convert(&self) -> Result<Options> {
        let known = RFD_OPTIMIZER_MASTER_WEIGHTS | RFD_OPTIMIZER_STOCHASTIC_ROUNDING;
        flags("rfd_optimizer_options.flags", self.flags, known)?;
        // SAFETY: the caller vouches for them.
        let groups = unsafe { Array::new(self.groups, self.group_count, "groups")? };
        let mut groups = groups.iter().map(|group| group?.convert()).collect::<Result<Vec<_>>>()?;
        if groups.is_empty() {
            groups.push(Group::default());
        }
        let stochastic = self.flags & RFD_OPTIMIZER_STOCHASTIC_ROUNDING != 0;
        Ok(Options {
            multiplier: self.multiplier,
            max_step_size: cap(self.max_step_size),
            stochastic_rounding: stochastic.then_some(self.seed),
            master_weights: self.flags & RFD_OPTIMIZER_MASTER_WEIGHTS != 0,
            groups,
        })
    }
}

impl rfd_tensor_spec {
    /// # Safety
    /// `name` is null or a string that ends with 0; `shape`, `whole` and `start` are each null or point to
    /// `rank` sizes.
    pub(super) unsafe fn convert(&self) -> Result<TensorSpec> {
        // SAFETY: the caller vouches for the text.
        let name = unsafe { text(self.name, "name of a tensor")? };
        let convert = || {
            let known = RFD_TENSOR_NOT_IN_NORM | RFD_TENSOR_SPLITS_ROWS;
            flags("rfd_tensor_spec.flags", self.flags, known)?;
            let size = |name: &str, size: u64| {
                usize::try_from(size)
                    .map_err(|_| Failure::invalid(name, size, "is too large for this machine"))
            };
            let sizes = |pointer, name| {
                // SAFETY: the caller vouches for the sizes.
                let sizes = unsafe { slice(pointer, self.rank as usize, name)? };
                sizes.iter().map(|&n| size(name, n)).collect::<Result<Vec<usize>>>()
            };
            let shape = sizes(self.shape, "shape")?;
            let whole = match (self.whole.is_null(), self.start.is_null()) {
                (true, true) => None,
                _ => Some(Whole {
                    shape: sizes(self.whole, "whole")?,
                    start: sizes(self.start, "start")?,
                    splits_rows: self.flags & RFD_TENSOR_SPLITS_ROWS != 0,
                }),
            };
            let row = if self.row == 0 { None } else { Some(size("row", self.row)?) };
            Ok(TensorSpec {
                row,
                group: self.group as usize,
                counts_in_norm: self.flags & RFD_TENSOR_NOT_IN_NORM == 0,
                offset: self.offset,
                whole,
                ..TensorSpec::new(name, &shape, dtype(self.dtype)?)
            })
        };
        convert().map_err(|failure: Failure| failure.at(&format!("tensor `{name}`")))
    }
}

/// Sets all settings of a group to their defaults; `size` is sizeof(rfd_group).
///
/// `group` must not be null. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_group_init(group: *mut rfd_group, size: usize) -> rfd_status {
    // SAFETY: the header says what it may point to.
    guard(|| unsafe { initialise(group, size) })
}

/// Sets all options to their defaults; `size` is sizeof(rfd_optimizer_options).
///
/// `options` must not be null. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_options_init(
    options: *mut rfd_optimizer_options,
    size: usize,
) -> rfd_status {
    // SAFETY: the header says what it may point to.
    guard(|| unsafe { initialise(options, size) })
}

/// Sets all scalars of a step to their defaults but `loss`, which is NaN and has to be set; `size` is
/// sizeof(rfd_step_input).
///
/// `input` must not be null. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_step_input_init(input: *mut rfd_step_input, size: usize) -> rfd_status {
    // SAFETY: the header says what it may point to.
    guard(|| unsafe { initialise(input, size) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rfdescent::optimizer::{Limit, Outcome, SkipReason};

    #[test]
    fn outcomes_have_the_numbers_of_the_rust_interface() {
        let skipped = Outcome::Skipped;
        for (code, outcome) in [
            (RFD_OUTCOME_APPLIED, Outcome::Applied),
            (RFD_OUTCOME_FOUND_INF, skipped(SkipReason::FoundInf)),
            (RFD_OUTCOME_NON_FINITE_LOSS, skipped(SkipReason::NonFiniteLoss)),
            (RFD_OUTCOME_NON_FINITE_GRADIENT, skipped(SkipReason::NonFiniteGradient)),
            (RFD_OUTCOME_ZERO_GRADIENT, skipped(SkipReason::ZeroGradient)),
            (RFD_OUTCOME_INVALID_OPTION, skipped(SkipReason::InvalidOption)),
            (RFD_OUTCOME_OUT_OF_RANGE, skipped(SkipReason::OutOfRange)),
            (RFD_OUTCOME_LOSS_BELOW_BOUND, skipped(SkipReason::LossBelowBound)),
        ] {
            assert_eq!(Outcome::from_code(code), Some(outcome));
        }
        assert_eq!(Outcome::from_code(RFD_OUTCOME_NONE), None);
        assert_eq!(Outcome::from_code(RFD_OUTCOME_LOSS_BELOW_BOUND + 1), None);
    }

    #[test]
    fn limits_have_the_numbers_of_the_rust_interface() {
        for (code, limit) in [
            (RFD_LIMIT_NONE, Limit::None),
            (RFD_LIMIT_RATE, Limit::Rate),
            (RFD_LIMIT_LOSS, Limit::Loss),
            (RFD_LIMIT_SIZE, Limit::Size),
        ] {
            assert_eq!(Limit::from_code(code), Some(limit));
        }
        assert_eq!(Limit::from_code(RFD_LIMIT_SIZE + 1), None);
    }
}
