//! Steps on the CPU, in place on the variables' memory.
//!
//! candle lends out the storage of one variable at a time, and the library updates all tensors together. So
//! each storage is moved out of its variable (a handful of words; the elements stay where they are) and back
//! after the step. No lock is held meanwhile, so that a thread which uses several variables at once can't be
//! deadlocked with.

use std::cell::RefCell;
use std::mem::swap;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor, Var};
use rfdescent::GradRef;
use rfdescent::optimizer::{AnyOptimizer, StepInput};

use crate::error;
use crate::parameter::Parameter;
use crate::storage::{empty_storage, grad_ref, loss_value, param_mut, range};
use crate::variables::Variables;

/// A step on variables on the CPU.
pub(crate) fn step(
    optimizer: &mut AnyOptimizer,
    variables: &Variables,
    grads: &GradStore,
    loss: &Tensor,
) -> Result<()> {
    let loss = host_loss(loss)?;
    let grads = variables.gradients(grads)?;
    let parameters = &variables.parameters;
    let guards: Vec<_> = grads.iter().map(|grad| grad.as_ref().map(Tensor::storage_and_layout)).collect();
    let grads = (parameters.iter().zip(&guards))
        .map(|(parameter, guard)| {
            let Some((storage, layout)) = guard else { return Ok(GradRef::Missing) };
            let Storage::Cpu(storage) = &**storage else { return Err(moved(parameter)) };
            range(layout).and_then(|range| grad_ref(storage, range)).ok_or_else(|| moved(parameter))
        })
        .collect::<Result<Vec<_>>>()?;
    let mut taken = Taken::new(parameters)?;
    let mut params = (taken.storages.iter_mut().zip(parameters))
        .map(|(storage, parameter)| {
            let range = range(parameter.var.layout());
            range.and_then(|range| param_mut(storage.0.get_mut(), range)).ok_or_else(|| moved(parameter))
        })
        .collect::<Result<Vec<_>>>()?;
    optimizer.step_slices(&mut params, &grads, &StepInput::new(loss)).map(drop).map_err(error::wrap)
}

/// The loss, wherever it lies.
pub(crate) fn host_loss(loss: &Tensor) -> Result<f64> {
    let loss = loss.to_device(&candle_core::Device::Cpu)?;
    let (storage, layout) = loss.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => loss_value(storage, layout),
        _ => unreachable!("moved to the CPU above"),
    }
}

/// An error for a variable that is no longer what it was.
pub(crate) fn moved(parameter: &Parameter) -> candle_core::Error {
    error::tensor(
        &parameter.name,
        "changed its number format or device after the optimizer was made; make a new one",
    )
}

/// What a variable holds while its storage is out: of a format that no variable of an optimizer has.
const PLACEHOLDER: CpuStorage = CpuStorage::U8(Vec::new());

/// Moves the storage of a variable in here, or back.
struct Exchange(RefCell<CpuStorage>);

impl InplaceOp1 for Exchange {
    fn name(&self) -> &'static str {
        "rfdescent-exchange"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let mut here = self.0.borrow_mut();
        let is_placeholder = |storage: &CpuStorage| matches!(storage, CpuStorage::U8(_));
        // Two placeholders: another step has the storage, and will bring it back.
        if is_placeholder(storage) == is_placeholder(&here) {
            candle_core::bail!("another thread takes a step on it; let one optimizer at a time use it");
        }
        swap(&mut *here, storage);
        Ok(())
    }
}

/// The storages of variables, moved out of them until this is dropped, by a panic too.
struct Taken<'a> {
    parameters: &'a [Parameter],
    storages: Vec<Exchange>,
}

impl<'a> Taken<'a> {
    fn new(parameters: &'a [Parameter]) -> Result<Self> {
        let mut taken = Self { parameters, storages: Vec::with_capacity(parameters.len()) };
        for Parameter { name, var, .. } in parameters {
            let storage = if is_empty(var) {
                Exchange(RefCell::new(empty_storage(var.dtype())))
            } else {
                let storage = Exchange(RefCell::new(PLACEHOLDER));
                var.inplace_op1(&storage).map_err(|problem| error::tensor(name, problem))?;
                storage
            };
            taken.storages.push(storage);
        }
        Ok(taken)
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        for (Parameter { var, .. }, storage) in self.parameters.iter().zip(&self.storages) {
            if !is_empty(var) {
                // It worked on the way out, on the same variable.
                let _ = var.inplace_op1(storage);
            }
        }
    }
}

/// Whether there is nothing to move; candle takes some shapes without elements for overlapping and lends out
/// none.
fn is_empty(var: &Var) -> bool {
    var.elem_count() == 0
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use candle_core::Device;

    use super::*;

    fn parameters() -> Vec<Parameter> {
        let var = |values: &[f32]| Var::new(values, &Device::Cpu).unwrap();
        vec![Parameter::new("a", var(&[1.0, 2.0])), Parameter::new("b", var(&[3.0]))]
    }

    fn values(parameter: &Parameter) -> Vec<f32> {
        parameter.var.to_vec1().unwrap()
    }

    #[test]
    fn storages_come_back_at_the_same_place_after_a_panic_too() {
        let parameters = parameters();
        let place = || match &*parameters[0].var.storage_and_layout().0 {
            Storage::Cpu(CpuStorage::F32(values)) => values.as_ptr(),
            _ => unreachable!(),
        };
        let before = place();
        let result = catch_unwind(AssertUnwindSafe(|| {
            let mut taken = Taken::new(&parameters).unwrap();
            match taken.storages[0].0.get_mut() {
                CpuStorage::F32(values) => values[0] = 7.0,
                _ => unreachable!(),
            }
            panic!("in the middle of a step");
        }));
        assert!(result.is_err());
        assert_eq!((values(&parameters[0]), values(&parameters[1])), (vec![7.0, 2.0], vec![3.0]));
        assert_eq!(place(), before);
    }

    #[test]
    fn a_second_step_at_the_same_time_is_refused_and_disturbs_nothing() {
        let parameters = parameters();
        let taken = Taken::new(&parameters[1..]).unwrap();
        let error = Taken::new(&parameters).err().unwrap().to_string();
        assert!(error.contains("`b`") && error.contains("another thread"), "{error}");
        drop(taken);
        assert_eq!((values(&parameters[0]), values(&parameters[1])), (vec![1.0, 2.0], vec![3.0]));
    }
}
