//! Steps on tensors in the memory of a CUDA device.

use std::ffi::c_void;
use std::path::Path;

use super::super::pointers::Array;
use super::super::status::{Failure, Result};
use super::backend::{Backend, Tensors};
use super::structs::{RFD_DEVICE_CUDA, dtype, rfd_step_input, rfd_tensor};
use rfdescent::device::Stream;
use rfdescent::optimizer::{
    DeviceInput, DeviceLoss, DeviceOptimizer, DeviceTensor, Group, Method, Options, StepReport, TensorSpec,
};

pub(super) struct OnDevice {
    optimizer: DeviceOptimizer,
    /// The device's number.
    index: u32,
    /// Scratch for a step's tensors.
    tensors: Vec<DeviceTensor>,
}

/// An address as a number.
fn address<T>(pointer: *const T) -> u64 {
    pointer.expose_provenance() as u64
}

pub(super) fn stream(stream: *mut c_void) -> Stream {
    Stream::from_raw(address(stream))
}

impl OnDevice {
    pub fn new(optimizer: DeviceOptimizer, index: u32) -> Self {
        Self { optimizer, index, tensors: Vec::new() }
    }

    fn check(&self, spec: &TensorSpec, what: &str, tensor: &rfd_tensor) -> Result<()> {
        let wrong = |problem: String| Err(Failure::tensor(&spec.name, problem));
        if (tensor.device_kind, tensor.device_index) != (RFD_DEVICE_CUDA, self.index) {
            return wrong(format!(
                "its {what} is on device kind {}, index {}, but the optimizer works on CUDA device {}",
                tensor.device_kind, tensor.device_index, self.index
            ));
        }
        let len = spec.len()? as u64;
        if tensor.count != len && !(what == "gradient" && tensor.data.is_null()) {
            return wrong(format!("was described with {len} elements but its {what} has {}", tensor.count));
        }
        Ok(())
    }

    /// Addresses of the step's tensors; without `grads` as if all were missing.
    fn addresses(
        &mut self,
        params: Array<'_, rfd_tensor>,
        grads: Option<Array<'_, rfd_tensor>>,
    ) -> Result<()> {
        let count = self.optimizer.specs().len();
        let lists = [Some(("params", params)), grads.map(|grads| ("grads", grads))];
        for (name, list) in lists.into_iter().flatten() {
            if list.len() != count {
                let expected = format!("the optimizer was made for {count} tensors; give one for each");
                return Err(Failure::invalid(&format!("number of {name}"), list.len(), &expected));
            }
        }
        let mut tensors = std::mem::take(&mut self.tensors);
        tensors.clear();
        for (spec, param) in self.optimizer.specs().zip(params.iter()) {
            let param = param?;
            self.check(spec, "parameter", &param)?;
            let format = dtype(param.dtype)?;
            if format != spec.dtype {
                let problem = format!("was described as {} but is {format}", spec.dtype);
                return Err(Failure::tensor(&spec.name, problem));
            }
            tensors.push(DeviceTensor::without_grad(address(param.data)));
        }
        if let Some(grads) = grads {
            for ((spec, tensor), grad) in self.optimizer.specs().zip(&mut tensors).zip(grads.iter()) {
                let grad = grad?;
                self.check(spec, "gradient", &grad)?;
                *tensor = DeviceTensor::new(tensor.param, address(grad.data), dtype(grad.dtype)?);
            }
        }
        self.tensors = tensors;
        Ok(())
    }
}

fn device_input(input: &rfd_step_input) -> Result<DeviceInput> {
    let known = |name, value: f64, default: f64, instead| {
        if value == default {
            return Ok(());
        }
        let expected = format!("must be {default}: this optimizer works on a device, give {instead}");
        Err(Failure::invalid(name, value, &expected))
    };
    known("grad_scale", input.grad_scale, 1.0, "grad_scale_address")?;
    known("found_inf", input.found_inf, 0.0, "found_inf_address")?;
    let loss = if input.loss_address.is_null() {
        DeviceLoss::Host(input.loss)
    } else {
        DeviceLoss::Address { address: address(input.loss_address), dtype: dtype(input.loss_dtype)? }
    };
    let optional = |pointer: *const f32| (!pointer.is_null()).then(|| address(pointer));
    Ok(DeviceInput {
        loss,
        grad_scale: optional(input.grad_scale_address),
        found_inf: optional(input.found_inf_address),
    })
}

impl Backend for OnDevice {
    fn method(&self) -> &Method {
        self.optimizer.method()
    }

    fn options(&self) -> &Options {
        self.optimizer.options()
    }

    fn set_multiplier(&mut self, multiplier: f64, on: *mut c_void) -> Result<()> {
        Ok(self.optimizer.set_multiplier(multiplier, stream(on))?)
    }

    fn set_inv_batch_size(&mut self, inv_batch_size: f64, on: *mut c_void) -> Result<()> {
        Ok(self.optimizer.set_inv_batch_size(inv_batch_size, stream(on))?)
    }

    fn set_group(&mut self, index: usize, group: Group, on: *mut c_void) -> Result<()> {
        Ok(self.optimizer.set_group(index, group, stream(on))?)
    }

    unsafe fn step(
        &mut self,
        tensors: Tensors<'_>,
        norm: Option<*const f64>,
        input: &rfd_step_input,
        on: *mut c_void,
    ) -> Result<Option<StepReport>> {
        let input = device_input(input)?;
        self.addresses(tensors.params, Some(tensors.grads))?;
        // SAFETY: lengths and formats were compared with the specs; the caller vouches for the memory and the
        // stream.
        unsafe {
            match norm {
                None => self.optimizer.step(&self.tensors, &input, stream(on))?,
                Some(norm) => {
                    self.optimizer.step_with_norm(&self.tensors, address(norm), &input, stream(on))?;
                }
            }
        }
        Ok(None)
    }

    unsafe fn squared_norm(&mut self, tensors: Tensors<'_>, on: *mut c_void) -> Result<*mut f64> {
        self.addresses(tensors.params, Some(tensors.grads))?;
        // SAFETY: as in `step`.
        let address = unsafe { self.optimizer.local_squared_norm(&self.tensors, stream(on))? };
        Ok(std::ptr::with_exposed_provenance_mut(address as usize))
    }

    unsafe fn init_master_weights(&mut self, params: Array<'_, rfd_tensor>, on: *mut c_void) -> Result<()> {
        self.addresses(params, None)?;
        // SAFETY: as in `step`.
        unsafe { self.optimizer.init_master_weights(&self.tensors, stream(on)) }.map_err(Into::into)
    }

    fn save_state(&self, file: &Path, on: *mut c_void) -> Result<()> {
        Ok(self.optimizer.save_state(file, stream(on))?)
    }

    fn load_state(&mut self, file: &Path, on: *mut c_void) -> Result<()> {
        Ok(self.optimizer.load_state(file, stream(on))?)
    }

    fn state_to_bytes(&self, on: *mut c_void) -> Result<Vec<u8>> {
        Ok(self.optimizer.state_to_bytes(stream(on))?)
    }

    fn load_state_from_bytes(&mut self, bytes: &[u8], on: *mut c_void) -> Result<()> {
        Ok(self.optimizer.load_state_from_bytes(bytes, stream(on))?)
    }
}
