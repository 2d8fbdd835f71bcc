//! The settings of the method of a fitted model.

use super::super::model::{RFD_MODE_RFD, rfd_model, rule};
use super::super::pointers::{Versioned, initialise, shared, slice};
use super::super::status::{Failure, Result, guard, rfd_status};
use super::backend::Backend;
use rfdescent::covariance::{Model, StepRule, validate_inv_batch_size};
use rfdescent::optimizer::{Group, Method, Options};

/// Settings of RFD with a fitted model, as published; rfd_fitted_init sets the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rfd_fitted {
    /// sizeof(rfd_fitted).
    pub size: usize,
    /// The fitted model, which has no default.
    pub model: *const rfd_model,
    /// In [0, 1). Default 0.
    pub conservatism: f64,
    /// 1/b for gradients of batches of b examples; 0, the default, treats loss and gradient as noiseless.
    pub inv_batch_size: f64,
    /// In [0, 1), for all groups. Default 0: no velocity is kept.
    pub momentum: f64,
    /// One number for each group, in the place of `momentum`; null, the default, for none.
    pub group_momentum: *const f64,
    /// The number of groups, or 0 with null.
    pub group_momentum_count: usize,
    /// One of RFD_MODE_*. Default RFD_MODE_RFD.
    pub mode: u32,
}

// SAFETY: repr(C), a usize first, numbers and raw pointers only.
unsafe impl Versioned for rfd_fitted {
    const NAME: &'static str = "rfd_fitted";
    const SIZES: &'static [usize] = &[size_of::<Self>()];
    const DEFAULT: Self = Self {
        size: size_of::<Self>(),
        model: std::ptr::null(),
        conservatism: 0.0,
        inv_batch_size: 0.0,
        momentum: 0.0,
        group_momentum: std::ptr::null(),
        group_momentum_count: 0,
        mode: RFD_MODE_RFD,
    };
}

impl rfd_fitted {
    /// # Safety `model` is null or a live model, `group_momentum` is null or points to as many numbers as its
    /// count says.
    pub(super) unsafe fn convert(&self) -> Result<Fitted> {
        let rule = rule(self.mode, self.conservatism)?;
        validate_inv_batch_size(self.inv_batch_size)?;
        // SAFETY: the caller vouches for both.
        let (model, by_group) = unsafe {
            let model = if self.model.is_null() { None } else { Some(shared(self.model, "model")?) };
            (model, slice(self.group_momentum, self.group_momentum_count, "group_momentum")?)
        };
        let momentum = if by_group.is_empty() { vec![self.momentum] } else { by_group.to_vec() };
        for (index, &given) in momentum.iter().enumerate() {
            if !(0.0..1.0).contains(&given) {
                let name =
                    if by_group.is_empty() { "momentum".into() } else { format!("group_momentum[{index}]") };
                return Err(Failure::invalid(&name, given, "give a number in [0, 1)"));
            }
        }
        let model = model.map(|handle| handle.model.clone());
        Ok(Fitted { model, rule, inv_batch_size: self.inv_batch_size, momentum })
    }
}

/// Settings that are in their domains.
pub(super) struct Fitted {
    /// `None` where C gave null.
    pub model: Option<Model>,
    rule: StepRule,
    inv_batch_size: f64,
    /// Of all groups, or of each.
    momentum: Vec<f64>,
}

impl Fitted {
    /// Adds them to the options of a new optimizer.
    pub fn add_to(&self, options: &mut Options) -> Result<()> {
        let momentum = self.momentum_of(options.groups.len())?;
        options.rule = self.rule;
        options.inv_batch_size = self.inv_batch_size;
        for (group, momentum) in options.groups.iter_mut().zip(momentum) {
            group.momentum = momentum;
        }
        Ok(())
    }

    fn momentum_of(&self, groups: usize) -> Result<Vec<f64>> {
        match self.momentum[..] {
            [momentum] => Ok(vec![momentum; groups]),
            _ if self.momentum.len() == groups => Ok(self.momentum.clone()),
            _ => {
                let expected = format!("must be 0 or the number of groups, which is {groups}");
                Err(Failure::invalid("group_momentum_count", self.momentum.len(), &expected))
            }
        }
    }

    /// Changes what may change in an optimizer: all of it or, after an error, nothing.
    pub fn set(&self, optimizer: &mut dyn Backend, stream: *mut std::ffi::c_void) -> Result<()> {
        let Method::Published(model) = optimizer.method() else {
            return Err(Failure::invalid("method", "adaptive", "must be that of a fitted model"));
        };
        let fixed = "must stay what it was when the optimizer was made; make a new one";
        if let Some(given) = &self.model
            && given.to_json()? != model.to_json()?
        {
            return Err(Failure::invalid("model", "another one", fixed));
        }
        if optimizer.options().rule != self.rule {
            return Err(Failure::invalid("mode or conservatism", format!("{:?}", self.rule), fixed));
        }
        let groups = optimizer.options().groups.clone();
        let momentum = self.momentum_of(groups.len())?;
        optimizer.set_inv_batch_size(self.inv_batch_size, stream)?;
        for (index, (group, momentum)) in groups.into_iter().zip(momentum).enumerate() {
            if group.momentum != momentum {
                optimizer.set_group(index, Group { momentum, ..group }, stream)?;
            }
        }
        Ok(())
    }
}

/// Sets all settings of the method of a fitted model to their defaults but `model`, which is null and has to
/// be set; `size` is sizeof(rfd_fitted).
///
/// `fitted` must not be null. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_fitted_init(fitted: *mut rfd_fitted, size: usize) -> rfd_status {
    // SAFETY: the header says what it may point to.
    guard(|| unsafe { initialise(fitted, size) })
}
