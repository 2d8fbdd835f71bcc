//! What a step is given by address: for tensors on a device, and for front ends that know the memory of
//! others only.

use super::{Core, StepInput};
use crate::backend::executor::Stream;
use crate::backend::memory::{self, Range};
use crate::error::{Error, Result};
use crate::tensor::DType;

/// Where one parameter and its gradient lie, in the memory of the optimizer's device, which may be the
/// process's own. Length and format of the parameter are those of its [`TensorSpec`](super::TensorSpec); both
/// are contiguous, and need be aligned to their elements only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawTensor {
    /// Address of the parameter's first element.
    pub param: u64,
    /// Address of the gradient's first element; 0 when it is missing: the tensor stays as it is and counts in
    /// no norm.
    pub grad: u64,
    /// Format of the gradient, whatever that of the parameter.
    pub grad_dtype: DType,
}

impl RawTensor {
    /// A parameter and its gradient.
    pub const fn new(param: u64, grad: u64, grad_dtype: DType) -> Self {
        Self { param, grad, grad_dtype }
    }

    /// A parameter that has no gradient in this step.
    pub const fn without_grad(param: u64) -> Self {
        Self { param, grad: 0, grad_dtype: DType::F32 }
    }
}

/// A number that a step is given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RawNumber {
    /// A number that the host knows. A captured graph keeps it.
    Host(f64),
    /// A number on the device, read when the step runs.
    Address {
        /// Where it lies.
        address: u64,
        /// Its format.
        dtype: DType,
    },
}

impl From<f64> for RawNumber {
    fn from(value: f64) -> Self {
        RawNumber::Host(value)
    }
}

impl RawNumber {
    /// The number itself.
    pub(super) fn on_host(self, name: &str) -> Result<f64> {
        match self {
            RawNumber::Host(value) => Ok(value),
            RawNumber::Address { address, .. } => {
                let expected = "must be a number on the host: this optimizer works on the CPU";
                Err(Error::invalid(name, format!("address {address:#x}"), expected))
            }
        }
    }

    /// Its address, `None` where it has the value that stands for nothing.
    pub(super) fn on_device(self, name: &str, nothing: f64) -> Result<Option<(u64, DType)>> {
        match self {
            RawNumber::Host(value) if value == nothing => Ok(None),
            RawNumber::Host(value) => {
                let expected = format!(
                    "must be {nothing}, or an address: this optimizer works on a device, which reads it there"
                );
                Err(Error::invalid(name, value, expected))
            }
            RawNumber::Address { address, dtype } => Ok(Some((check_number(name, address, dtype)?, dtype))),
        }
    }
}

/// What goes into a step beside tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RawInput {
    /// The mini-batch loss at the current parameters, without gradient scale.
    pub loss: RawNumber,
    /// S when the gradients are S times the real ones, as with a gradient scaler; on a device the address of
    /// an f32. Default 1.
    pub grad_scale: RawNumber,
    /// Any value but 0 skips the step; on a device the address of an f32. Default 0.
    pub found_inf: RawNumber,
}

impl RawInput {
    /// A step with the given loss, no gradient scale and no overflow.
    pub fn new(loss: impl Into<RawNumber>) -> Self {
        Self { loss: loss.into(), grad_scale: RawNumber::Host(1.0), found_inf: RawNumber::Host(0.0) }
    }

    pub(super) fn on_host(&self) -> Result<StepInput> {
        Ok(StepInput {
            loss: self.loss.on_host("loss")?,
            grad_scale: self.grad_scale.on_host("grad_scale")?,
            found_inf: self.found_inf.on_host("found_inf")?,
        })
    }
}

/// An error for a stream, of which the host has none.
pub(super) fn check_host_stream(stream: Stream) -> Result<()> {
    if stream == Stream::DEFAULT {
        return Ok(());
    }
    let given = format!("{:#x}", stream.as_raw());
    Err(Error::invalid("stream", given, "must be null: this optimizer works on the CPU"))
}

/// Checks the address of a number.
pub(super) fn check_number(name: &str, address: u64, dtype: DType) -> Result<u64> {
    if address != 0 && address.is_multiple_of(dtype.size() as u64) {
        return Ok(address);
    }
    let expected =
        format!("give the address of an {dtype} where the tensors are, aligned to {} bytes", dtype.size());
    Err(Error::invalid(name, format!("address {address:#x}"), expected))
}

/// Finds out whether tensors can lie where they are said to, and remembers the last list that could: the next
/// step's is mostly the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Placement {
    checked: Vec<RawTensor>,
    /// Of parameters and gradients in turn.
    ranges: Vec<Range>,
}

impl Placement {
    /// An error that names a tensor whose address is null, misaligned or beyond the address space, or whose
    /// parameter shares memory with another one or a gradient. Gradients may share theirs.
    pub fn check(&mut self, core: &Core, tensors: &[RawTensor]) -> Result<()> {
        core.check_count("tensors", tensors.len())?;
        if self.checked == tensors {
            return Ok(());
        }
        self.checked.clear();
        self.ranges.clear();
        for ((spec, &len), tensor) in core.specs().iter().zip(core.lens()).zip(tensors) {
            let range = |what: &str, address, dtype| {
                Range::new(address, len as u64, dtype)
                    .map_err(|problem| Error::tensor(&spec.name, format!("its {what} {problem}")))
            };
            if len == 0 {
                self.ranges.extend([Range::default(); 2]);
                continue;
            }
            if tensor.param == 0 {
                let problem = "its parameter is null; pass the address of its first element";
                return Err(Error::tensor(&spec.name, problem));
            }
            self.ranges.push(range("parameter", tensor.param, spec.dtype)?);
            self.ranges.push(match tensor.grad {
                0 => Range::default(),
                grad => range("gradient", grad, tensor.grad_dtype)?,
            });
        }
        if let Some((later, earlier)) = memory::overlap(&self.ranges, |k| k % 2 == 0) {
            let what = |k: usize| if k.is_multiple_of(2) { "parameter" } else { "gradient" };
            let name = |k: usize| &core.specs()[k / 2].name;
            let remedy = if self.ranges[later] == self.ranges[earlier] && later % 2 == 0 && earlier % 2 == 0 {
                "list a shared parameter once, with the sum of its gradients"
            } else {
                "each needs its own"
            };
            let problem = format!(
                "its {} shares memory with the {} of `{}`; {remedy}",
                what(later),
                what(earlier),
                name(earlier)
            );
            return Err(Error::tensor(name(later), problem));
        }
        self.checked.extend_from_slice(tensors);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::{Adaptive, Options, TensorSpec};

    #[test]
    fn errors_name_the_tensor() {
        let list = [(8, DType::F32), (8, DType::F64), (0, DType::F32), (8, DType::BF16)];
        let specs = list.iter().enumerate();
        let specs = specs.map(|(k, &(len, dtype))| TensorSpec::new(format!("t{k}"), &[len], dtype)).collect();
        let core = Core::new(Adaptive::default(), Options::default(), specs).unwrap();
        let good: Vec<RawTensor> =
            (1..=4_u64).map(|k| RawTensor::new(k << 40, k << 40 | 1 << 32, DType::F16)).collect();
        Placement::default().check(&core, &good).unwrap();
        let broken = |change: fn(&mut [RawTensor])| {
            let mut placement = Placement::default();
            placement.check(&core, &good).unwrap();
            let mut tensors = good.clone();
            change(&mut tensors);
            placement.check(&core, &tensors).map_err(|error| error.to_string())
        };
        for (change, tensor, word) in [
            ((|a| a[1].param = 0) as fn(&mut [RawTensor]), "`t1`", "null"),
            (|a| a[0].param += 2, "`t0`", "aligned to 4 bytes"),
            (|a| a[1].param += 4, "`t1`", "aligned to 8 bytes"),
            (|a| a[3].grad += 1, "`t3`", "gradient"),
            (|a| a[0].param = u64::MAX - 15, "`t0`", "beyond"),
            (|a| a[3].grad = u64::MAX - 15, "`t3`", "beyond"),
            (|a| a[3].param = a[0].param, "`t3`", "shares memory with the parameter of `t0`"),
            (|a| a[1].param = a[0].param + 24, "`t1`", "shares memory with the parameter of `t0`"),
            (|a| a[0].param = a[3].param + 12, "`t3`", "shares memory with the parameter of `t0`"),
            (|a| a[3].grad = a[0].param + 8, "`t3`", "its gradient shares memory with the parameter of `t0`"),
        ] {
            let message = broken(change).unwrap_err();
            assert!(message.contains(tensor) && message.contains(word), "{message}");
        }
        // neighbours, empty tensors anywhere, missing and shared gradients
        broken(|a| a[1].param = a[0].param + 32).unwrap();
        broken(|a| a[2] = RawTensor::new(0, 3, DType::F32)).unwrap();
        broken(|a| a[3].grad = 0).unwrap();
        broken(|a| a[3].grad = a[0].grad).unwrap();
        // one tensor too few
        assert!(Placement::default().check(&core, &good[1..]).is_err());
    }
}
