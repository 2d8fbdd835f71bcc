//! The settings of the adaptive method.

use super::super::model::code;
use super::super::pointers::{Versioned, initialise, versioned};
use super::super::status::{Result, guard, rfd_status};
use rfdescent::optimizer::{Adaptive, Anisotropy};

/// Each tensor has a length scale of its own.
pub const RFD_ANISOTROPY_TENSORWISE: u32 = 0;
/// All parameters share one, but for the factors of groups.
pub const RFD_ANISOTROPY_ISOTROPIC: u32 = 1;

/// Settings of the adaptive method, which needs no fitted model; rfd_adaptive_init sets the defaults, which
/// are for all networks.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rfd_adaptive {
    /// sizeof(rfd_adaptive).
    pub size: usize,
    /// Decay of the averages of gradients and losses, in [0, 1). Default 0.9; with 0 no buffer is kept.
    pub averaging: f64,
    /// The largest number known that no loss falls below; a step with a loss below it is skipped. Default 0,
    /// which is right for cross entropy and squared errors.
    pub loss_bound: f64,
    /// One of RFD_ANISOTROPY_*. Default RFD_ANISOTROPY_TENSORWISE.
    pub anisotropy: u32,
}

versioned!(rfd_adaptive { averaging: 0.9 });

impl rfd_adaptive {
    pub(super) fn convert(&self) -> Result<Adaptive> {
        let known = [Anisotropy::Tensorwise, Anisotropy::Isotropic];
        let expected = "must be one of RFD_ANISOTROPY_*";
        Ok(Adaptive {
            anisotropy: code("anisotropy", self.anisotropy, &known, expected)?,
            averaging: self.averaging,
            loss_bound: self.loss_bound,
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_the_rust_interface() {
        assert_eq!(rfd_adaptive::DEFAULT.convert().ok(), Some(Adaptive::default()));
    }
}
