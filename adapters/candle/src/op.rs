//! A step on one tensor as a candle operation.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{CpuStorage, CudaStorage, Device, InplaceOp3, Layout, Result, Tensor};
use rfdescent::optimizer::{AnyOptimizer, Method, Options, StepInput, StepReport, TensorSpec};

use crate::device::{self, elsewhere};
use crate::error::{self, wrap};
use crate::storage::{format, grad_ref, loss_value, param_mut, range};

/// One step on the storages of a tensor, its gradient and the loss:
/// `tensor.inplace_op3(&gradient, &loss, &op)`.
///
/// For those who keep parameters outside of variables, or build steps into operations of their own. In place
/// because a step is, with three operands because the loss decides its length; so on a CUDA device nothing
/// leaves the device. It has no gradient itself. All is of one tensor: networks of several need
/// [`Rfd`](crate::Rfd), whose norm is that of all.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use rfdescent_candle::StepOp;
/// # use rfdescent_candle::rfdescent::covariance::{Family, Model};
/// # use rfdescent_candle::rfdescent::{Moments, optimizer::Options};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let moments = Moments {
/// #     mean: 2.0, variance: 0.5, noise_variance: 0.9,
/// #     grad_variance: 4.0, noise_grad_variance: 200.0, dims: 3,
/// # };
/// # let model = Model::new(Family::SquaredExponential, moments)?;
/// let weight = Tensor::new(&[0.5_f32, -0.5, 1.0], &Device::Cpu)?;
/// let (gradient, loss) = ((&weight * 2.0)?, weight.sqr()?.sum_all()?);
/// let op = StepOp::new("weight", &weight, model, Options::default())?;
/// weight.inplace_op3(&gradient, &loss, &op)?;
/// assert!(op.report()?.unwrap().step_size > 0.0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct StepOp {
    spec: TensorSpec,
    device: Device,
    /// Operations are shared, and a step changes velocities and counts.
    optimizer: Mutex<AnyOptimizer>,
}

impl StepOp {
    /// Steps for tensors of this shape, format and device, by a fitted
    /// [`Model`](rfdescent::covariance::Model) or [`Adaptive`](crate::Adaptive); velocities and the like
    /// belong to the operation.
    ///
    /// # Errors
    /// Names the tensor when its format or device has no steps; names an option outside its domain.
    pub fn new(name: &str, tensor: &Tensor, method: impl Into<Method>, options: Options) -> Result<Self> {
        let Some(format) = format(tensor.dtype()) else {
            let problem = format!("is {}; make it f32, f64, f16 or bf16", tensor.dtype().as_str());
            return Err(error::tensor(name, problem));
        };
        let spec = TensorSpec::new(name, tensor.dims(), format);
        let device = tensor.device().clone();
        let optimizer = device::optimizer(method.into(), options, vec![spec.clone()], &device)?;
        Ok(Self { spec, device, optimizer: Mutex::new(optimizer) })
    }

    /// What the last step did, as [`Rfd::report`](crate::Rfd::report).
    ///
    /// # Errors
    /// When the device failed.
    pub fn report(&self) -> Result<Option<StepReport>> {
        self.lock().report().map_err(wrap)
    }

    fn lock(&self) -> MutexGuard<'_, AnyOptimizer> {
        self.optimizer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_shape(&self, param: &Layout, grad: &Layout) -> Result<()> {
        for (what, layout) in [("tensor", param), ("gradient", grad)] {
            if layout.dims() != self.spec.shape {
                let problem = format!(
                    "was described with shape {:?}, but the {what} has {:?}",
                    self.spec.shape,
                    layout.dims()
                );
                return Err(error::tensor(&self.spec.name, problem));
            }
        }
        Ok(())
    }

    fn unsuitable(&self, what: &str) -> candle_core::Error {
        let problem = format!(
            "the {what} is strided or no float; give its `contiguous()` copy in f32, f64, f16 or bf16"
        );
        error::tensor(&self.spec.name, problem)
    }
}

impl InplaceOp3 for StepOp {
    fn name(&self) -> &'static str {
        "rfdescent-step"
    }

    fn cpu_fwd(
        &self,
        param: &mut CpuStorage,
        param_layout: &Layout,
        grad: &CpuStorage,
        grad_layout: &Layout,
        loss: &CpuStorage,
        loss_layout: &Layout,
    ) -> Result<()> {
        self.check_shape(param_layout, grad_layout)?;
        let loss = loss_value(loss, loss_layout)?;
        let param = range(param_layout).and_then(|range| param_mut(param, range));
        let grad = range(grad_layout).and_then(|range| grad_ref(grad, range));
        let param = param.ok_or_else(|| self.unsuitable("tensor"))?;
        let grad = grad.ok_or_else(|| self.unsuitable("gradient"))?;
        if !self.device.is_cpu() {
            return Err(elsewhere(&self.spec));
        }
        self.lock().step_slices(&mut [param], &[grad], &StepInput::new(loss)).map(drop).map_err(wrap)
    }

    fn cuda_fwd(
        &self,
        param: &mut CudaStorage,
        param_layout: &Layout,
        grad: &CudaStorage,
        grad_layout: &Layout,
        loss: &CudaStorage,
        loss_layout: &Layout,
    ) -> Result<()> {
        self.check_shape(param_layout, grad_layout)?;
        if range(param_layout).is_none() {
            return Err(self.unsuitable("tensor"));
        }
        if range(grad_layout).is_none() {
            return Err(self.unsuitable("gradient"));
        }
        let Device::Cuda(device) = &self.device else { return Err(elsewhere(&self.spec)) };
        let (param, grad, loss) = ((param, param_layout), (grad, grad_layout), (loss, loss_layout));
        device::step_one(&mut self.lock(), &self.spec, param, grad, loss, device)
    }
}
