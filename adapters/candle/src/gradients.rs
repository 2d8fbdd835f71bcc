//! Gradients from candle's store, in the order of the parameters, checked and contiguous.

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor};

use crate::error;
use crate::parameter::Parameter;
use crate::storage::{format, storage_id};

/// One entry for each parameter, `None` where there is no gradient.
///
/// A gradient is copied where it is strided or where it shares the memory of a variable, which the step is about to change;
/// callers may put such into a store, candle's backward pass does not. All others are borrowed.
pub(crate) fn gather(
    parameters: &[Parameter],
    storages: &HashMap<usize, usize>,
    grads: &GradStore,
) -> Result<Vec<Option<Tensor>>> {
    let gradient = |parameter: &Parameter| {
        let Some(grad) = grads.get(&parameter.var) else { return Ok(None) };
        check(parameter, grad)?;
        let copy = storages.contains_key(&storage_id(grad));
        Ok(Some(if copy { grad.force_contiguous()? } else { grad.contiguous()? }))
    };
    parameters.iter().map(gradient).collect()
}

fn check(Parameter { name, var, .. }: &Parameter, grad: &Tensor) -> Result<()> {
    if grad.dims() != var.dims() {
        let problem = format!("has shape {:?} but its gradient has {:?}", var.dims(), grad.dims());
        return Err(error::tensor(name, problem));
    }
    if format(grad.dtype()).is_none() {
        let problem = format!("has a gradient of {}; make it f32, f64, f16 or bf16", grad.dtype().as_str());
        return Err(error::tensor(name, problem));
    }
    if !grad.device().same_device(var.device()) {
        let (at, of) = (grad.device().location(), var.device().location());
        let problem =
            format!("lies on {of:?} but its gradient on {at:?}; move the gradient with `to_device`");
        return Err(error::tensor(name, problem));
    }
    Ok(())
}
