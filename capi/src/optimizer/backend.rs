//! What the handle of an optimizer asks of the one behind it.

use std::ffi::c_void;
use std::path::Path;

use super::super::pointers::Array;
use super::super::status::Result;
use super::structs::{rfd_step_input, rfd_tensor};
use rfdescent::optimizer::{Group, Method, Options, StepReport};

/// The tensors of one step, in the order of the specs.
#[derive(Clone, Copy)]
pub(super) struct Tensors<'a> {
    pub params: Array<'a, rfd_tensor>,
    pub grads: Array<'a, rfd_tensor>,
}

/// An optimizer on the CPU or on a device.
///
/// # Safety Callers of the unsafe functions vouch for the memory that tensors and input point to, until the
/// step is done: valid for as many elements as they say, not used by anyone else while parameters are
/// written, gradients not written.
pub(super) trait Backend: Send {
    fn method(&self) -> &Method;
    fn options(&self) -> &Options;
    fn set_multiplier(&mut self, multiplier: f64, stream: *mut c_void) -> Result<()>;
    fn set_inv_batch_size(&mut self, inv_batch_size: f64, stream: *mut c_void) -> Result<()>;
    fn set_group(&mut self, index: usize, group: Group, stream: *mut c_void) -> Result<()>;

    /// A whole step, or with `norm` the second half of one; what it did where that is known at once.
    unsafe fn step(
        &mut self,
        tensors: Tensors<'_>,
        norm: Option<*const f64>,
        input: &rfd_step_input,
        stream: *mut c_void,
    ) -> Result<Option<StepReport>>;

    /// The first half of a step; where the two numbers are.
    unsafe fn squared_norm(&mut self, tensors: Tensors<'_>, stream: *mut c_void) -> Result<*mut f64>;

    unsafe fn init_master_weights(
        &mut self,
        params: Array<'_, rfd_tensor>,
        stream: *mut c_void,
    ) -> Result<()>;

    fn save_state(&self, file: &Path, stream: *mut c_void) -> Result<()>;
    fn load_state(&mut self, file: &Path, stream: *mut c_void) -> Result<()>;
    fn state_to_bytes(&self, stream: *mut c_void) -> Result<Vec<u8>>;
    fn load_state_from_bytes(&mut self, bytes: &[u8], stream: *mut c_void) -> Result<()>;
}
