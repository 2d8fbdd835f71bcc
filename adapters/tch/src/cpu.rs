//! Steps on the CPU: the library's optimizer on the memory of libtorch's tensors.

use std::ffi::c_void;

use half::{bf16, f16};
use rfdescent::optimizer::{self, StepInput, StepReport};
use rfdescent::{DType, GradRef, ParamMut};
use tch::Device;

use crate::error::Result;
use crate::input::{Scalar, StepTensors, scalar};
use crate::overlap::check_apart;
use crate::parameter::{Parameter, Place};

/// The optimizer and what the last step did.
#[derive(Debug)]
pub(crate) struct Cpu {
    pub optimizer: optimizer::Optimizer,
    pub last: Option<StepReport>,
    /// First bytes of parameters and gradients whose ranges were found apart; the next step's are mostly the
    /// same.
    apart: Vec<(usize, usize)>,
}

impl Cpu {
    pub fn new(optimizer: optimizer::Optimizer) -> Self {
        Self { optimizer, last: None, apart: Vec::new() }
    }

    pub fn step(
        &mut self,
        parameters: &[Parameter],
        places: &[Place],
        input: &StepTensors<'_>,
    ) -> Result<()> {
        let grad_scale = input.grad_scale.map_or(Ok(1.0), |scale| value("grad_scale", scale))?;
        let found_inf = input.found_inf.map_or(Ok(0.0), |found| value("found_inf", found))?;
        let input = StepInput { loss: value("loss", input.loss)?, grad_scale, found_inf };
        self.require_apart(parameters, places)?;
        let mut params: Vec<ParamMut<'_>> = (parameters.iter().zip(places))
            .map(|(parameter, place)| {
                // SAFETY: `place` has checked that the parameter is a dense, aligned tensor on the CPU of
                // this length and format, which the store keeps; no other range of this step overlaps it.
                // That no other thread uses it is what every in-place operation of tch asks for.
                unsafe { param_mut(place.param, place.len, parameter.dtype()) }
            })
            .collect();
        let grads: Vec<GradRef<'_>> = (places.iter())
            .map(|place| match &place.grad {
                // SAFETY: as above; the gradient's tensor lives as long as `place`, and no parameter overlaps
                // it.
                Some(grad) => unsafe { grad_ref(grad.first, place.len, grad.dtype) },
                None => GradRef::Missing,
            })
            .collect();
        self.last = Some(self.optimizer.step(&mut params, &grads, &input)?);
        Ok(())
    }

    /// An error where memory that is written is used twice.
    fn require_apart(&mut self, parameters: &[Parameter], places: &[Place]) -> Result<()> {
        let firsts = places
            .iter()
            .map(|place| (place.param.addr(), place.grad.as_ref().map_or(0, |grad| grad.first.addr())));
        if firsts.clone().eq(self.apart.iter().copied()) {
            return Ok(());
        }
        check_apart(parameters, places)?;
        self.apart = firsts.collect();
        Ok(())
    }
}

fn value(name: &str, tensor: &tch::Tensor) -> Result<f64> {
    match scalar(name, tensor, Device::Cpu)? {
        Scalar::Value(value) => Ok(value),
        // Only scalars on the step's device are left there.
        Scalar::Device { tensor, .. } => Ok(tensor.f_double_value(&[])?),
    }
}

/// # Safety
/// `first` is aligned for the format and begins `len` elements, which nothing else uses while the slice
/// lives.
unsafe fn param_mut<'a>(first: *mut c_void, len: usize, dtype: DType) -> ParamMut<'a> {
    /// # Safety
    /// As the function around.
    unsafe fn slice<'a, T>(first: *mut c_void, len: usize) -> &'a mut [T] {
        if len == 0 {
            // libtorch has no memory for an empty tensor.
            return &mut [];
        }
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(first.cast(), len) }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => ParamMut::F32(slice::<f32>(first, len)),
            DType::F64 => ParamMut::F64(slice::<f64>(first, len)),
            DType::F16 => ParamMut::F16(slice::<f16>(first, len)),
            DType::BF16 => ParamMut::BF16(slice::<bf16>(first, len)),
        }
    }
}

/// # Safety
/// `first` is aligned for the format and begins `len` elements, which nothing writes while the slice lives.
unsafe fn grad_ref<'a>(first: *const c_void, len: usize, dtype: DType) -> GradRef<'a> {
    /// # Safety
    /// As the function around.
    unsafe fn slice<'a, T>(first: *const c_void, len: usize) -> &'a [T] {
        if len == 0 {
            return &[];
        }
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(first.cast(), len) }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => GradRef::F32(slice::<f32>(first, len)),
            DType::F64 => GradRef::F64(slice::<f64>(first, len)),
            DType::F16 => GradRef::F16(slice::<f16>(first, len)),
            DType::BF16 => GradRef::BF16(slice::<bf16>(first, len)),
        }
    }
}
