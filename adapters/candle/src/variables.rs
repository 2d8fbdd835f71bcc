//! The variables of an optimizer: checked once, then matched with the gradients of each step.

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor};

use crate::error;
use crate::parameter::Parameter;
use crate::storage::{format, storage_id};

/// Variables on one device, each with memory of its own.
#[derive(Debug)]
pub(crate) struct Variables {
    pub parameters: Vec<Parameter>,
    /// The place in the list, by the identity of the memory.
    places: HashMap<usize, usize>,
}

impl Variables {
    /// An error for a variable that is strided, lies elsewhere than the first or shares its memory with
    /// another.
    pub fn new(parameters: Vec<Parameter>) -> Result<Self> {
        let mut places = HashMap::with_capacity(parameters.len());
        for (place, Parameter { name, var, .. }) in parameters.iter().enumerate() {
            if !var.is_contiguous() {
                return Err(error::tensor(name, "is strided; make a variable of its `contiguous()` copy"));
            }
            let first = &parameters[0];
            if !var.device().same_device(first.var.device()) {
                let problem = format!(
                    "lies on another device ({:?}) than `{}` ({:?}); move all variables to one device, or use an \
                     optimizer for each",
                    var.device().location(),
                    first.name,
                    first.var.device().location()
                );
                return Err(error::tensor(name, problem));
            }
            if let Some(other) = places.insert(storage_id(var), place) {
                let other = &parameters[other].name;
                let problem = format!("shares its memory with `{other}`; give each variable once");
                return Err(error::tensor(name, problem));
            }
        }
        Ok(Self { parameters, places })
    }

    /// The gradients in the order of the variables, checked and contiguous; `None` where there is none.
    ///
    /// One is copied where it is strided or lies in the memory of a variable, which the step is about to
    /// change; callers may put such into a store, candle's backward pass does not. All others are borrowed.
    pub fn gradients(&self, grads: &GradStore) -> Result<Vec<Option<Tensor>>> {
        let gradient = |parameter: &Parameter| {
            let Some(grad) = grads.get(&parameter.var) else { return Ok(None) };
            check(parameter, grad)?;
            Ok(Some(self.apart(grad)?.contiguous()?))
        };
        self.parameters.iter().map(gradient).collect()
    }

    /// The tensor, or a copy where it lies in the memory of a variable.
    pub fn apart(&self, tensor: &Tensor) -> Result<Tensor> {
        if self.places.contains_key(&storage_id(tensor)) {
            tensor.force_contiguous()
        } else {
            Ok(tensor.clone())
        }
    }
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
