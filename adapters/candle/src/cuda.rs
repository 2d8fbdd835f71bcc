//! Steps on a CUDA device: addresses of candle's storages, queued on the device's own stream.
//!
//! Nothing waits for the device. candle frees memory in stream order, so a gradient may go as soon as the
//! step is queued.

use std::cell::Cell;

use candle_core::backend::BackendStorage;
use candle_core::backprop::GradStore;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, DeviceLocation, InplaceOp1, Layout, Result, Storage, Tensor,
};
use rfdescent::DType;
use rfdescent::device::Stream;
use rfdescent::optimizer::{
    DeviceInput, DeviceLoss, DeviceOptimizer, DeviceTensor, Method, Options, TensorSpec,
};

use crate::error::{self, wrap};
use crate::host::host_loss;
use crate::parameter::Parameter;
use crate::storage::{check_loss, format};
use crate::variables::Variables;

/// The library's optimizer on candle's device.
#[derive(Debug)]
pub(crate) struct Cuda {
    pub optimizer: DeviceOptimizer,
    device: CudaDevice,
}

/// A tensor on the device that a step reads: its storage and how it lies there.
type Operand<'a> = (&'a CudaStorage, &'a Layout);

impl Cuda {
    pub fn new(
        method: Method,
        options: Options,
        specs: Vec<TensorSpec>,
        device: &CudaDevice,
    ) -> Result<Self> {
        use candle_core::backend::BackendDevice;
        let DeviceLocation::Cuda { gpu_id } = device.location() else {
            unreachable!("a CUDA device says that it is one")
        };
        let on = rfdescent::cuda::device(gpu_id).map_err(wrap)?;
        let optimizer = DeviceOptimizer::new(method, options, specs, &on).map_err(wrap)?;
        Ok(Self { optimizer, device: device.clone() })
    }

    /// candle's stream of the device. It is live as long as `self.device` is.
    pub fn stream(&self) -> Stream {
        Stream::from_raw(self.device.cuda_stream().cu_stream().expose_provenance() as u64)
    }

    pub fn step(&mut self, variables: &Variables, grads: &GradStore, loss: &Tensor) -> Result<()> {
        let stream = self.device.cuda_stream();
        let grads = variables.gradients(grads)?;
        // The step reads the loss where it lies, which may be in a variable that it writes.
        let loss = variables.apart(loss)?;
        let tensors = variables
            .parameters
            .iter()
            .zip(&grads)
            .map(|(parameter, grad)| {
                let param = Address::of(parameter, &stream)?;
                let Some(grad) = grad else { return Ok(DeviceTensor::without_grad(param)) };
                let (grad, dtype) = tensor_address(&parameter.name, grad, &stream)?;
                Ok(DeviceTensor::new(param, grad, dtype))
            })
            .collect::<Result<Vec<_>>>()?;
        let input = DeviceInput::new(match loss.device().location() {
            DeviceLocation::Cpu => DeviceLoss::Host(host_loss(&loss)?),
            _ => {
                check_loss(loss.layout())?;
                let (address, dtype) = tensor_address("loss", &loss, &stream)?;
                DeviceLoss::Address { address, dtype }
            }
        });
        // SAFETY: the addresses are those of live, contiguous tensors of these lengths and formats:
        // `gradients` has checked gradients, `Rfd::for_parameters` variables. All work on them is on this
        // stream, which is in order, and so is the freeing of their memory.
        unsafe { self.optimizer.step(&tensors, &input, self.stream()) }.map_err(wrap)?;
        // For programs with several streams: the variables were written before this point of the stream, and
        // the rest read.
        for parameter in &variables.parameters {
            Address::of(parameter, &stream)?;
        }
        for (parameter, grad) in variables.parameters.iter().zip(&grads) {
            if let Some(grad) = grad {
                tensor_address(&parameter.name, grad, &stream)?;
            }
        }
        Ok(())
    }

    /// A step on one tensor, whose layout and gradient's are contiguous and of the shape described.
    pub fn step_one(
        &mut self,
        (param, param_layout): (&mut CudaStorage, &Layout),
        grad: Operand<'_>,
        loss: Operand<'_>,
    ) -> Result<()> {
        let stream = self.device.cuda_stream();
        let spec = self.optimizer.specs().next().cloned();
        let Some(spec) = spec else { return Ok(()) };
        if !param.device().id().eq(&self.device.id()) {
            return Err(error::tensor(
                &spec.name,
                "lies on another device than the operation was made for; make one for each",
            ));
        }
        if format(param.dtype()) != Some(spec.dtype) {
            let problem = format!("was described as {} but is {}", spec.dtype, param.dtype().as_str());
            return Err(error::tensor(&spec.name, problem));
        }
        let address = write_address(param, param_layout, &stream);
        let (grad, dtype) = read_address(&spec.name, grad, &stream)?;
        let loss = device_loss(loss, &stream)?;
        let tensor = DeviceTensor::new(address, grad, dtype);
        // SAFETY: candle lends out the parameter for writing and the others for reading; formats and shapes
        // were checked here and by the caller. What follows on this stream follows the step, and memory is
        // freed in its order.
        unsafe { self.optimizer.step(&[tensor], &DeviceInput::new(loss), self.stream()) }.map_err(wrap)?;
        write_address(param, param_layout, &stream);
        Ok(())
    }
}

/// Runs `$body` with `$slice` bound to the elements and `$dtype` to their format, or `$other` for a format
/// without steps.
macro_rules! each_format {
    ($storage:expr, ($slice:ident, $dtype:ident) => $body:expr, $other:expr) => {
        match $storage {
            CudaStorageSlice::F32($slice) => {
                let $dtype = DType::F32;
                $body
            }
            CudaStorageSlice::F64($slice) => {
                let $dtype = DType::F64;
                $body
            }
            CudaStorageSlice::F16($slice) => {
                let $dtype = DType::F16;
                $body
            }
            CudaStorageSlice::BF16($slice) => {
                let $dtype = DType::BF16;
                $body
            }
            _ => $other,
        }
    };
}

/// The address of an element; 0 for an empty tensor.
fn offset<T>(base: u64, layout: &Layout) -> u64 {
    if layout.shape().elem_count() == 0 { 0 } else { base + (layout.start_offset() * size_of::<T>()) as u64 }
}

/// Where a tensor to be read lies, and its format. The stream waits for what other streams write there.
fn read_address(name: &str, (storage, layout): Operand<'_>, stream: &CudaStream) -> Result<(u64, DType)> {
    fn of<T>(slice: &CudaSlice<T>, layout: &Layout, stream: &CudaStream) -> u64 {
        offset::<T>(slice.device_ptr(stream).0, layout)
    }
    each_format!(
        &storage.slice,
        (slice, dtype) => Ok((of(slice, layout, stream), dtype)),
        Err(error::tensor(name, format!("is {}; make it f32, f64, f16 or bf16", storage.dtype().as_str())))
    )
}

/// [`read_address`] of a tensor.
fn tensor_address(name: &str, tensor: &Tensor, stream: &CudaStream) -> Result<(u64, DType)> {
    match &*tensor.storage_and_layout().0 {
        Storage::Cuda(storage) => read_address(name, (storage, tensor.layout()), stream),
        _ => Err(error::tensor(name, "lies on another device than the variables; move it with `to_device`")),
    }
}

/// Where a tensor to be written lies; 0 for a format without steps. The stream waits for what other streams
/// do there, and they for what it has been given so far.
fn write_address(storage: &mut CudaStorage, layout: &Layout, stream: &CudaStream) -> u64 {
    fn of<T>(slice: &mut CudaSlice<T>, layout: &Layout, stream: &CudaStream) -> u64 {
        offset::<T>(slice.device_ptr_mut(stream).0, layout)
    }
    each_format!(&mut storage.slice, (slice, _dtype) => of(slice, layout, stream), 0)
}

fn device_loss((storage, layout): Operand<'_>, stream: &CudaStream) -> Result<DeviceLoss> {
    check_loss(layout)?;
    let (address, dtype) = read_address("loss", (storage, layout), stream)?;
    Ok(DeviceLoss::Address { address, dtype })
}

/// Asks candle for the address of a variable to be written.
struct Address<'a> {
    stream: &'a CudaStream,
    address: Cell<u64>,
}

impl Address<'_> {
    fn of(parameter: &Parameter, stream: &CudaStream) -> Result<u64> {
        // candle takes some shapes without elements for overlapping.
        if parameter.var.elem_count() == 0 {
            return Ok(0);
        }
        let op = Address { stream, address: Cell::new(0) };
        parameter.var.inplace_op1(&op)?;
        Ok(op.address.get())
    }
}

impl InplaceOp1 for Address<'_> {
    fn name(&self) -> &'static str {
        "rfdescent-address"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        candle_core::bail!("a variable on a CUDA device has its storage on the CPU")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        self.address.set(write_address(storage, layout, self.stream));
        Ok(())
    }
}
