//! The settings of the method of a fitted model.

use super::super::model::{rfd_model, rule};
use super::super::pointers::{Versioned, initialise, shared, slice, versioned};
use super::super::status::{Failure, RFD_ERROR_NULL, Result, guard, rfd_status};
use rfdescent::covariance::Model;
use rfdescent::optimizer::Fitted;

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

versioned!(rfd_fitted {});

impl rfd_fitted {
    /// Where `model` is null, `own` is meant.
    ///
    /// # Safety
    /// `model` is null or a live model, `group_momentum` is null or points to as many numbers as its
    /// count says.
    pub(super) unsafe fn convert(&self, own: Option<&Model>) -> Result<Fitted> {
        // SAFETY: the caller vouches for both.
        let (model, by_group) = unsafe {
            let model = if self.model.is_null() { None } else { Some(&shared(self.model, "model")?.model) };
            (model, slice(self.group_momentum, self.group_momentum_count, "group_momentum")?)
        };
        let Some(model) = model.or(own) else { return Err(Failure::new(RFD_ERROR_NULL, "model is null")) };
        Ok(Fitted {
            model: model.clone(),
            rule: rule(self.mode, self.conservatism)?,
            inv_batch_size: self.inv_batch_size,
            momentum: if by_group.is_empty() { vec![self.momentum] } else { by_group.to_vec() },
        })
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
