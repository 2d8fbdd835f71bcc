//! The methods: their settings, and the optimizers that are made of them. All that C has of a method stands
//! here.

use std::ffi::c_void;

use super::super::model::{rfd_model, rule};
use super::super::pointers::{Out, Versioned, initialise, read, read_or_default, shared, slice, versioned};
use super::super::status::{Failure, RFD_ERROR_NULL, Result, guard, rfd_status};
use super::{create, rfd_optimizer, rfd_optimizer_options, rfd_tensor_spec};
use rfdescent::covariance::Model;
use rfdescent::optimizer::{Adaptive, Fitted};

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

/// Makes an optimizer of a fitted model for `count` tensors, whose order every step follows.
///
/// `fitted`, its `model` and `optimizer` must not be null; `options` may be, for the defaults; `specs` may be
/// when `count` is 0. All inputs are copied; the model may be freed afterwards. On success `*optimizer` is a
/// new handle that the caller frees with rfd_optimizer_destroy.
///
/// Any thread. For CUDA the device's primary context is used, the one of CUDA's runtime; it is bound during
/// calls only. RFD_ERROR_INVALID_ARGUMENT names an option outside its domain, RFD_ERROR_TENSOR a tensor that
/// is listed twice or whose group does not exist; RFD_ERROR_DEVICE says why a device can't be used,
/// RFD_ERROR_UNSUPPORTED that the library was built without that kind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_fitted_optimizer_create(
    fitted: *const rfd_fitted,
    options: *const rfd_optimizer_options,
    specs: *const rfd_tensor_spec,
    count: usize,
    optimizer: *mut *mut rfd_optimizer,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (fitted, out) = unsafe { (read(fitted)?.convert(None)?, Out::new(optimizer, "optimizer")?) };
        // SAFETY: the header says so of the options and the specs.
        out.set_handle(unsafe { create(fitted, options, specs, count)? });
        Ok(())
    })
}

/// Sets `inv_batch_size`, `momentum` and `group_momentum` from the next step on, in an optimizer of a fitted
/// model. All else must be as it was when the optimizer was made; `model` may be null.
/// RFD_ERROR_INVALID_ARGUMENT says what is not; nothing has changed then. Otherwise as
/// rfd_optimizer_set_multiplier; on a device switching momentum on or off means that steps must be captured
/// again.
///
/// `fitted` must not be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_optimizer_set_fitted(
    optimizer: *mut rfd_optimizer,
    fitted: *const rfd_fitted,
    stream: *mut c_void,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (optimizer, fitted) = unsafe { (shared(optimizer, "optimizer")?, read(fitted)?) };
        let mut inner = optimizer.lock()?;
        let method = inner.optimizer.method();
        if method.model().is_none() {
            return Err(Failure::invalid("method", method.name(), "must be that of a fitted model"));
        }
        // SAFETY: the header says so of the model and the numbers.
        let fitted = unsafe { fitted.convert(method.model())? };
        Ok(inner.optimizer.set_method(fitted, super::stream(stream))?)
    })
}

/// Settings of the adaptive method, which needs no fitted model; rfd_adaptive_init sets the defaults, which
/// are for all networks.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rfd_adaptive {
    /// sizeof(rfd_adaptive).
    pub size: usize,
    /// Decay of the averages of gradients and losses, in [0, 1). Default 0.85; with 0 no buffer is kept.
    pub averaging: f64,
    /// The largest number known that no loss falls below; a step with a loss below it is skipped. Default
    /// -INFINITY, for none known: losses are taken to have the bound 0 until one is negative, and then to
    /// have none.
    pub loss_bound: f64,
    /// 0.
    pub reserved: u32,
}

versioned!(rfd_adaptive { averaging: 0.85, loss_bound: f64::NEG_INFINITY });

impl rfd_adaptive {
    pub(super) fn convert(&self) -> Result<Adaptive> {
        if self.reserved != 0 {
            // What it was in the first header.
            let expected = "must be 0 in the place of `anisotropy`: every tensor has variances of its own";
            return Err(Failure::invalid("rfd_adaptive.reserved", self.reserved, expected));
        }
        let loss_bound = (self.loss_bound != f64::NEG_INFINITY).then_some(self.loss_bound);
        Ok(Adaptive { averaging: self.averaging, loss_bound })
    }
}

/// Sets all settings of the adaptive method to their defaults; `size` is sizeof(rfd_adaptive).
///
/// `adaptive` must not be null. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_adaptive_init(adaptive: *mut rfd_adaptive, size: usize) -> rfd_status {
    // SAFETY: the header says what it may point to.
    guard(|| unsafe { initialise(adaptive, size) })
}

/// Makes an optimizer of the adaptive method, whose steps follow from the losses and gradients of training
/// itself, without a fitted model. Otherwise as rfd_fitted_optimizer_create.
///
/// `adaptive` may be null, for the defaults. In sharded training, which is for the CPU, specs say what their
/// tensors are parts of (`whole`), and every rank lists the same tensors. A saved state can be loaded into an
/// optimizer of the same method only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_adaptive_optimizer_create(
    adaptive: *const rfd_adaptive,
    options: *const rfd_optimizer_options,
    specs: *const rfd_tensor_spec,
    count: usize,
    optimizer: *mut *mut rfd_optimizer,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (adaptive, out) = unsafe { (read_or_default(adaptive)?, Out::new(optimizer, "optimizer")?) };
        // SAFETY: the header says so of the options and the specs.
        out.set_handle(unsafe { create(adaptive.convert()?, options, specs, count)? });
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_the_rust_interface() {
        assert_eq!(rfd_adaptive::DEFAULT.convert().ok(), Some(Adaptive::default()));
    }
}
