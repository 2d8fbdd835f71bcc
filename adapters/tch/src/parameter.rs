//! The trainable variables of a store, by name, and where they and their gradients lie in each step.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::PoisonError;

use rfdescent::DType;
use rfdescent::optimizer::{RawTensor, TensorSpec};
use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::layout::{dtype, is_dense, is_strided, same_places};

/// A variable that is trained.
#[derive(Debug)]
pub(crate) struct Parameter {
    pub name: String,
    /// Shares the variable of the store: whatever moves or converts that one does so to this.
    pub tensor: Tensor,
    /// As it was when the optimizer was made.
    size: Vec<i64>,
    dtype: DType,
    device: Device,
}

/// The trainable variables of a store in the order in which they were made, each with its group in the store.
pub(crate) fn trainable(store: &VarStore) -> Result<Vec<(Parameter, usize)>> {
    let variables = store.variables_.lock().unwrap_or_else(PoisonError::into_inner);
    let mut names: Vec<(&String, *const c_void)> =
        variables.named_variables.iter().map(|(name, tensor)| (name, identity(tensor))).collect();
    // A tensor may have several names; the first one counts, whatever the order of the map.
    names.sort_unstable_by(|a, b| b.0.cmp(a.0));
    let names: HashMap<*const c_void, &String> =
        names.into_iter().map(|(name, identity)| (identity, name)).collect();
    let mut seen = HashMap::new();
    (variables.trainable_variables.iter().enumerate())
        .map(|(index, variable)| {
            let identity = identity(&variable.tensor);
            let name = names.get(&identity).map_or_else(|| format!("variable {index}"), ToString::to_string);
            if let Some(first) = seen.insert(identity, index) {
                let problem =
                    format!("is added twice, as trainable variables {first} and {index}; add it once");
                return Err(Error::tensor(&name, problem));
            }
            Ok((Parameter::new(name, variable.tensor.shallow_clone())?, variable.group))
        })
        .collect()
}

/// What tells a tensor from all others, shared by its shallow clones: the address of libtorch's `TensorImpl`.
/// Neither memory nor shape would do, as empty tensors have no memory.
fn identity(tensor: &Tensor) -> *const c_void {
    // SAFETY: tch's pointer is to a live `at::Tensor`, whose one member is the pointer to its `TensorImpl`.
    unsafe { *tensor.as_ptr().cast::<*const c_void>() }
}

impl Parameter {
    fn new(name: String, tensor: Tensor) -> Result<Self> {
        let refuse = |problem: &str| Err(Error::tensor(&name, problem));
        if !is_strided(&tensor) {
            return refuse(
                "is sparse, in oneDNN's format, or on a device that is neither the CPU nor CUDA; steps need an array on one \
                 of these: use a dense tensor there",
            );
        }
        let kind = tensor.f_kind()?;
        let Some(dtype) = dtype(kind) else {
            return refuse(&format!(
                "is of kind {kind:?}; steps know Float, Double, Half and BFloat16: convert it, or make it not trainable"
            ));
        };
        if !tensor.is_leaf() {
            return refuse("is computed from other tensors, so it gets no gradient; add a detached copy");
        }
        let (size, device) = (tensor.size(), tensor.device());
        let parameter = Self { name, tensor, size, dtype, device };
        parameter.check()?;
        Ok(parameter)
    }

    /// As the library describes it.
    pub fn spec(&self) -> TensorSpec {
        // Sizes of a tensor are not negative.
        let shape: Vec<usize> = self.size.iter().map(|&size| size as usize).collect();
        TensorSpec::new(&self.name, &shape, self.dtype)
    }

    pub fn device(&self) -> Device {
        self.device
    }

    /// Where the parameter and its gradient lie now, and the tensor that keeps the gradient's memory.
    ///
    /// A gradient whose elements are in another order, or expanded, is copied into the parameter's order, on
    /// the device and its current stream.
    ///
    /// # Errors
    /// Names a parameter that is no longer what it was, and a gradient that can't be used, with the remedy.
    pub fn place(&self) -> Result<(RawTensor, Option<Tensor>)> {
        let stride = self.check()?;
        let param = address(&self.tensor);
        let grad = self.tensor.f_grad()?;
        if !grad.defined() {
            return Ok((RawTensor::without_grad(param), None));
        }
        let (grad, dtype) = self.gradient(grad, &stride)?;
        // An empty gradient has no address, which says that there is none: an empty tensor takes no part in
        // a step anyway.
        Ok((RawTensor::new(param, address(&grad), dtype), Some(grad)))
    }

    /// Whether the tensor is still the one that the optimizer was made for; its strides.
    fn check(&self) -> Result<Vec<i64>> {
        let (kind, device, size) = (self.tensor.f_kind()?, self.tensor.device(), self.tensor.size());
        if dtype(kind) != Some(self.dtype) || device != self.device || size != self.size {
            let problem = format!(
                "was {:?} {} on {:?} when the optimizer was made and is {size:?} {kind:?} on {device:?} now; convert and \
                 move variables first, then make the optimizer",
                self.size, self.dtype, self.device
            );
            return Err(Error::tensor(&self.name, problem));
        }
        let stride = self.tensor.stride();
        if !is_dense(&size, &stride) || self.tensor.f_is_neg()? {
            let problem = format!(
                "is a view with strides {stride:?}, whose elements are not a stretch of memory of their own; add \
                 `tensor.contiguous()` (or `copy()`) to the store instead"
            );
            return Err(Error::tensor(&self.name, problem));
        }
        Ok(stride)
    }

    /// A gradient whose elements are in the order of the parameter's, and its format.
    fn gradient(&self, grad: Tensor, param_stride: &[i64]) -> Result<(Tensor, DType)> {
        let refuse = |problem: String| Err(Error::tensor(&self.name, problem));
        if grad.is_sparse() || grad.is_mkldnn() {
            return refuse(
                "its gradient is sparse or in oneDNN's format; steps need a dense one: make the layer with `sparse: false`"
                    .into(),
            );
        }
        let (kind, device, size) = (grad.f_kind()?, grad.device(), grad.size());
        let Some(dtype) = dtype(kind).filter(|_| device == self.device && size == self.size) else {
            return refuse(format!(
                "its gradient is {size:?} {kind:?} on {device:?}, which does not fit the parameter's {:?} {} on {:?}; \
                 compute it anew after `zero_grad`",
                self.size, self.dtype, self.device
            ));
        };
        let tensor = if !same_places(&size, &grad.stride(), param_stride) || grad.f_is_neg()? {
            tch::no_grad(|| {
                let mut copy = Tensor::f_empty_strided(&size, param_stride, (kind, device))?;
                copy.f_copy_(&grad)?;
                Ok::<_, tch::TchError>(copy)
            })?
        } else {
            grad
        };
        Ok((tensor, dtype))
    }
}

/// Of the first element; 0 where there are none.
fn address(tensor: &Tensor) -> u64 {
    tensor.data_ptr().expose_provenance() as u64
}
