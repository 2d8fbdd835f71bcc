//! Where the tensors of a step are.

use super::super::pointers::{Array, address};
use super::super::status::{Failure, Result};
use super::structs::{RFD_DEVICE_CPU, dtype, rfd_gradient, rfd_tensor};
use rfdescent::DType;
use rfdescent::optimizer::{AnyOptimizer, RawTensor, TensorSpec};

/// A device, as C names it.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Place {
    /// One of RFD_DEVICE_*.
    pub kind: u32,
    pub index: u32,
}

/// The tensors of one step, in the order of the specs.
pub(super) struct Tensors<'a> {
    pub params: Array<'a, rfd_tensor>,
    /// `None`: all are missing.
    pub grads: Option<Array<'a, rfd_gradient>>,
    /// Where the optimizer wants them.
    pub place: Place,
}

/// The tensors of one step that lie one after the other in two arrays, in the order of the specs.
pub(super) struct Flat {
    /// Addresses of the arrays.
    pub params: u64,
    pub grads: u64,
    /// Elements in each of them.
    pub count: u64,
    /// One of RFD_DTYPE_*, of both.
    pub dtype: u32,
}

impl Flat {
    /// As [`Tensors::locate`].
    pub fn locate(&self, optimizer: &AnyOptimizer, list: &mut Vec<RawTensor>) -> Result<()> {
        let format = dtype(self.dtype)?;
        // Of an array that goes beyond the address space the optimizer says which tensor does.
        let at = |array: u64, offset: u64| array.saturating_add(offset.saturating_mul(format.size() as u64));
        let mut offset = 0_u64;
        list.clear();
        for spec in optimizer.specs() {
            if spec.dtype != format {
                let problem = format!(
                    "was described as {} but the arrays are {format}; describe all tensors in the arrays' format, or take \
                     rfd_optimizer_step, which has one for each",
                    spec.dtype
                );
                return Err(Failure::tensor(&spec.name, problem));
            }
            list.push(RawTensor::new(at(self.params, offset), at(self.grads, offset), format));
            offset = offset.saturating_add(spec.len()? as u64);
        }
        if offset != self.count {
            let expected = format!(
                "the optimizer's {} tensors have {offset} elements together; pass arrays that hold all of them, one after \
                 the other in the order of the specs",
                list.len()
            );
            return Err(Failure::invalid("count", self.count, &expected));
        }
        Ok(())
    }
}

/// What a descriptor says, of a parameter or a gradient.
struct Given {
    address: u64,
    count: u64,
    dtype: u32,
    place: Place,
}

macro_rules! given {
    ($descriptor:ty) => {
        impl From<$descriptor> for Given {
            fn from(tensor: $descriptor) -> Self {
                Given {
                    address: address(tensor.data),
                    count: tensor.count,
                    dtype: tensor.dtype,
                    place: Place { kind: tensor.device_kind, index: tensor.device_index },
                }
            }
        }
    };
}
given!(rfd_tensor);
given!(rfd_gradient);

impl Tensors<'_> {
    /// Compares descriptors with what the optimizer was made for; the addresses, in `list`.
    pub fn locate(&self, optimizer: &AnyOptimizer, list: &mut Vec<RawTensor>) -> Result<()> {
        let count = optimizer.specs().len();
        let lists = [Some(("params", self.params.len())), self.grads.map(|grads| ("grads", grads.len()))];
        for (name, given) in lists.into_iter().flatten() {
            if given != count {
                let expected = format!("the optimizer was made for {count} tensors; give one for each");
                return Err(Failure::invalid(&format!("number of {name}"), given, &expected));
            }
        }
        list.clear();
        for (spec, param) in optimizer.specs().iter().zip(self.params.iter()) {
            let param = Given::from(param?);
            let format = self.check(spec, "parameter", &param)?;
            if format != spec.dtype {
                let problem = format!("was described as {} but is {format}", spec.dtype);
                return Err(Failure::tensor(&spec.name, problem));
            }
            list.push(RawTensor::without_grad(param.address));
        }
        let Some(grads) = self.grads else { return Ok(()) };
        for ((spec, tensor), grad) in optimizer.specs().iter().zip(list).zip(grads.iter()) {
            let grad = Given::from(grad?);
            let format = self.check(spec, "gradient", &grad)?;
            *tensor = RawTensor::new(tensor.param, grad.address, format);
        }
        Ok(())
    }

    /// The format of a tensor whose place and length are right.
    fn check(&self, spec: &TensorSpec, what: &str, tensor: &Given) -> Result<DType> {
        let found = tensor.place;
        if found != self.place {
            let own = match self.place {
                Place { kind: RFD_DEVICE_CPU, .. } => "the CPU".into(),
                Place { index, .. } => format!("CUDA device {index}"),
            };
            let problem = format!(
                "its {what} is on device kind {}, index {}, but the optimizer works on {own}; copy it, or make the \
                 optimizer for that device",
                found.kind, found.index
            );
            return Err(Failure::tensor(&spec.name, problem));
        }
        let format =
            dtype(tensor.dtype).map_err(|failure| failure.at(&format!("tensor `{}`, {what}", spec.name)))?;
        let missing = what == "gradient" && tensor.address == 0;
        let len = spec.len()? as u64;
        if tensor.count != len && !missing {
            let problem = format!("was described with {len} elements but its {what} has {}", tensor.count);
            return Err(Failure::tensor(&spec.name, problem));
        }
        Ok(format)
    }
}
