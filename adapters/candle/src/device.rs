//! Which devices have steps, and steps on a CUDA device: addresses of candle's storages, queued on the
//! device's own stream.
//!
//! Nothing waits for the device. candle frees memory in stream order, so a gradient may go as soon as the
//! step is queued.

use std::cell::Cell;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CudaDevice, CudaStorage, Device, InplaceOp1, Layout, Result, Storage, Tensor};
use rfdescent::DType;
use rfdescent::device::{Stream, Target};
use rfdescent::optimizer::{AnyOptimizer, Method, Options, RawInput, RawNumber, RawTensor, TensorSpec};

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{self, wrap};
use crate::host::{host_loss, moved};
#[cfg(not(feature = "cuda"))]
use crate::no_cuda as cuda;
use crate::parameter::Parameter;
use crate::storage::{check_loss, format};
use crate::variables::Variables;

/// The library's optimizer for tensors on the device.
pub(crate) fn optimizer(
    method: Method,
    options: Options,
    specs: Vec<TensorSpec>,
    device: &Device,
) -> Result<AnyOptimizer> {
    let target = match device {
        Device::Cpu => Target::Cpu,
        Device::Cuda(device) => cuda::target(device).map_err(wrap)?,
        Device::Metal(_) => {
            let problem = "lies on a Metal device; there are steps on the CPU and on CUDA devices: move the \
                           model to one";
            return Err(error::tensor(specs.first().map_or("", |spec| &spec.name), problem));
        }
    };
    AnyOptimizer::new(method, options, specs, &target).map_err(wrap)
}

/// The stream that steps are queued on. It is live as long as the device is.
pub(crate) fn stream(device: &Device) -> Stream {
    match device {
        Device::Cuda(device) => cuda::stream(device),
        Device::Cpu | Device::Metal(_) => Stream::DEFAULT,
    }
}

/// A step on variables of the device, which the optimizer was made for.
pub(crate) fn step(
    optimizer: &mut AnyOptimizer,
    variables: &Variables,
    grads: &GradStore,
    loss: &Tensor,
    device: &CudaDevice,
) -> Result<()> {
    let grads = variables.gradients(grads)?;
    // The step reads the loss where it lies, which may be in a variable that it writes.
    let loss = variables.apart(loss)?;
    let tensors = (variables.parameters.iter().zip(&grads))
        .map(|(parameter, grad)| {
            let param = Address::of(parameter, device)?;
            let Some(grad) = grad else { return Ok(RawTensor::without_grad(param)) };
            let (grad, dtype) = tensor_address(&parameter.name, grad, device)?;
            Ok(RawTensor::new(param, grad, dtype))
        })
        .collect::<Result<Vec<_>>>()?;
    let input = RawInput::new(if loss.device().is_cpu() {
        RawNumber::Host(host_loss(&loss)?)
    } else {
        check_loss(loss.layout())?;
        let (address, dtype) = tensor_address("loss", &loss, device)?;
        RawNumber::Address { address, dtype }
    });
    // SAFETY: the addresses are those of live, contiguous tensors of these lengths and formats: `gradients`
    // has checked gradients, `Variables::new` and `Address::of` variables. All work on them is on this
    // stream, which is in order, and so is the freeing of their memory.
    unsafe { optimizer.step(&tensors, &input, cuda::stream(device)) }.map_err(wrap)?;
    // For programs with several streams: the variables were written before this point of the stream, and
    // the rest read.
    for (parameter, grad) in variables.parameters.iter().zip(&grads) {
        Address::of(parameter, device)?;
        if let Some(grad) = grad {
            tensor_address(&parameter.name, grad, device)?;
        }
    }
    Ok(())
}

/// A tensor on the device that a step reads: its storage and how it lies there.
type Operand<'a> = (&'a CudaStorage, &'a Layout);

/// A step on one tensor, whose layout and gradient's are contiguous and of the shape described.
pub(crate) fn step_one(
    optimizer: &mut AnyOptimizer,
    spec: &TensorSpec,
    (param, param_layout): (&mut CudaStorage, &Layout),
    grad: Operand<'_>,
    loss: Operand<'_>,
    device: &CudaDevice,
) -> Result<()> {
    if !param.device().same_device(device) {
        return Err(elsewhere(spec));
    }
    if format(param.dtype()) != Some(spec.dtype) {
        let problem = format!("was described as {} but is {}", spec.dtype, param.dtype().as_str());
        return Err(error::tensor(&spec.name, problem));
    }
    let address = offset(cuda::write(param, device), param_layout, spec.dtype);
    let (grad, dtype) = read_address(&spec.name, grad, device)?;
    let tensor = RawTensor::new(address, grad, dtype);
    check_loss(loss.1)?;
    let (loss, dtype) = read_address("loss", loss, device)?;
    let input = RawInput::new(RawNumber::Address { address: loss, dtype });
    // SAFETY: candle lends out the parameter for writing and the others for reading; formats and shapes were
    // checked here and by the caller. What follows on this stream follows the step, and memory is freed in
    // its order.
    unsafe { optimizer.step(&[tensor], &input, cuda::stream(device)) }.map_err(wrap)?;
    cuda::write(param, device);
    Ok(())
}

/// An error for a tensor that does not lie where it was said to.
pub(crate) fn elsewhere(spec: &TensorSpec) -> candle_core::Error {
    error::tensor(&spec.name, "lies on another device than the operation was made for; make one for each")
}

/// The address of the first element of a tensor; 0 for an empty one.
fn offset(storage: u64, layout: &Layout, dtype: DType) -> u64 {
    if layout.shape().elem_count() == 0 { 0 } else { storage + (layout.start_offset() * dtype.size()) as u64 }
}

/// Where a tensor to be read lies, and its format.
fn read_address(name: &str, (storage, layout): Operand<'_>, device: &CudaDevice) -> Result<(u64, DType)> {
    let Some(dtype) = format(storage.dtype()) else {
        let problem = format!("is {}; make it f32, f64, f16 or bf16", storage.dtype().as_str());
        return Err(error::tensor(name, problem));
    };
    Ok((offset(cuda::read(storage, device), layout, dtype), dtype))
}

/// [`read_address`] of a tensor.
fn tensor_address(name: &str, tensor: &Tensor, device: &CudaDevice) -> Result<(u64, DType)> {
    match &*tensor.storage_and_layout().0 {
        Storage::Cuda(storage) => read_address(name, (storage, tensor.layout()), device),
        _ => Err(error::tensor(name, "lies on another device than the variables; move it with `to_device`")),
    }
}

/// Asks candle for the address of a variable to be written.
struct Address<'a> {
    device: &'a CudaDevice,
    parameter: &'a Parameter,
    address: Cell<u64>,
}

impl Address<'_> {
    fn of(parameter: &Parameter, device: &CudaDevice) -> Result<u64> {
        // candle takes some shapes without elements for overlapping.
        if parameter.var.elem_count() == 0 {
            return Ok(0);
        }
        let op = Address { device, parameter, address: Cell::new(0) };
        parameter.var.inplace_op1(&op)?;
        Ok(op.address.get())
    }
}

impl InplaceOp1 for Address<'_> {
    fn name(&self) -> &'static str {
        "rfdescent-address"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        Err(moved(self.parameter))
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let dtype = storage.dtype();
        let Some(format) = format(dtype).filter(|_| dtype == self.parameter.var.dtype()) else {
            return Err(moved(self.parameter));
        };
        self.address.set(offset(cuda::write(storage, self.device), layout, format));
        Ok(())
    }
}
