//! Steps on tensors in the process's own memory.

use std::cell::Cell;
use std::ffi::c_void;

use half::{bf16, f16};

use super::super::pointers::{Array, no_stream};
use super::super::status::{Failure, RFD_ERROR_NULL, RFD_ERROR_TENSOR, Result};
use super::backend::{Backend, Tensors};
use super::structs::{RFD_DEVICE_CPU, dtype, rfd_step_input, rfd_tensor};
use crate::optimizer::{Group, Optimizer, Options, SquaredNorm, StepInput, StepReport};
use crate::{DType, Error, GradRef, ParamMut};

pub(super) struct Host {
    optimizer: Optimizer,
    /// The squared norms of the split form, which the caller adds up over the ranks in place.
    norm: Box<[Cell<f64>; 2]>,
    /// Where tensors lay in the last step, known not to overlap: the same again need no check.
    disjoint: Vec<Memory>,
    /// Scratch for this step's.
    memory: Vec<Memory>,
}

/// The bytes of a tensor.
#[derive(Clone, Copy, Default, PartialEq)]
struct Memory {
    start: usize,
    end: usize,
}

/// Checks a tensor's descriptor; where its elements are, `None` for null.
fn locate(name: &str, what: &str, tensor: &rfd_tensor) -> Result<Option<Memory>> {
    let wrong = |problem: String| Failure::from(Error::tensor(name, problem));
    if tensor.device_kind != RFD_DEVICE_CPU || tensor.device_index != 0 {
        return Err(wrong(format!(
            "its {what} is on device kind {}, index {}, but the optimizer works on the CPU; copy it, or make the \
             optimizer for that device",
            tensor.device_kind, tensor.device_index
        )));
    }
    let dtype = dtype(tensor.dtype).map_err(|failure| failure.at(&format!("tensor `{name}`, {what}")))?;
    if tensor.data.is_null() {
        return Ok(None);
    }
    let size = dtype.size();
    let start = tensor.data.addr();
    if !start.is_multiple_of(size) {
        return Err(wrong(format!("its {what} at {start:#x} is not aligned to {size} bytes")));
    }
    let end = usize::try_from(tensor.count)
        .ok()
        .and_then(|count| count.checked_mul(size))
        .filter(|&bytes| bytes <= isize::MAX as usize)
        .and_then(|bytes| start.checked_add(bytes));
    match end {
        Some(end) => Ok(Some(Memory { start, end })),
        None => Err(wrong(format!("its {what} with {} elements is larger than any memory", tensor.count))),
    }
}

/// # Safety
/// [`locate`] has accepted the tensor. Its memory is null or valid for reads and writes of its elements for `'a`, and used by
/// no one else.
unsafe fn param<'a>(tensor: &rfd_tensor) -> Result<ParamMut<'a>> {
    let (dtype, data, count) = (dtype(tensor.dtype)?, tensor.data, tensor.count as usize);
    if data.is_null() {
        return Ok(match dtype {
            DType::F32 => ParamMut::F32(&mut []),
            DType::F64 => ParamMut::F64(&mut []),
            DType::F16 => ParamMut::F16(&mut []),
            DType::BF16 => ParamMut::BF16(&mut []),
        });
    }
    // SAFETY: alignment and size are those that `locate` checked; every bit pattern is a number; the caller vouches for the
    // rest.
    Ok(unsafe {
        match dtype {
            DType::F32 => std::slice::from_raw_parts_mut(data.cast::<f32>(), count).into(),
            DType::F64 => std::slice::from_raw_parts_mut(data.cast::<f64>(), count).into(),
            DType::F16 => std::slice::from_raw_parts_mut(data.cast::<f16>(), count).into(),
            DType::BF16 => std::slice::from_raw_parts_mut(data.cast::<bf16>(), count).into(),
        }
    })
}

/// # Safety
/// [`locate`] has accepted the tensor. Its memory is null or valid for reads of its elements for `'a`, and written by no one.
unsafe fn grad<'a>(tensor: &rfd_tensor) -> Result<GradRef<'a>> {
    let (dtype, data, count) = (dtype(tensor.dtype)?, tensor.data, tensor.count as usize);
    if data.is_null() {
        return Ok(GradRef::Missing);
    }
    // SAFETY: as in `param`.
    Ok(unsafe {
        match dtype {
            DType::F32 => std::slice::from_raw_parts(data.cast::<f32>(), count).into(),
            DType::F64 => std::slice::from_raw_parts(data.cast::<f64>(), count).into(),
            DType::F16 => std::slice::from_raw_parts(data.cast::<f16>(), count).into(),
            DType::BF16 => std::slice::from_raw_parts(data.cast::<bf16>(), count).into(),
        }
    })
}

impl Host {
    pub fn new(optimizer: Optimizer) -> Self {
        Self { optimizer, norm: Box::default(), disjoint: Vec::new(), memory: Vec::new() }
    }

    /// Slices of all tensors, once it is known that no parameter overlaps anything.
    ///
    /// # Safety
    /// As [`Backend`] says, for `'a`.
    unsafe fn slices<'a>(&mut self, tensors: Tensors<'_>) -> Result<(Vec<ParamMut<'a>>, Vec<GradRef<'a>>)> {
        let count = self.optimizer.specs().len();
        for (name, list) in [("params", tensors.params), ("grads", tensors.grads)] {
            if list.len() != count {
                let expected = format!("the optimizer was made for {count} tensors; give one for each");
                return Err(Failure::invalid(&format!("number of {name}"), list.len(), &expected));
            }
        }
        self.memory.clear();
        let pairs = || tensors.params.iter().zip(tensors.grads.iter());
        for (spec, (p, g)) in self.optimizer.specs().zip(pairs()) {
            let p = p?;
            let memory = locate(&spec.name, "parameter", &p)?;
            if memory.is_none() && p.count > 0 {
                let message = format!("tensor `{}`: its parameter is null", spec.name);
                return Err(Failure::new(RFD_ERROR_NULL, message));
            }
            self.memory.extend([memory, locate(&spec.name, "gradient", &g?)?].map(Option::unwrap_or_default));
        }
        if self.memory != self.disjoint {
            self.disjoint.clear();
            self.check_overlap()?;
            self.disjoint.clone_from(&self.memory);
        }
        let (mut params, mut grads) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for (p, g) in pairs() {
            // SAFETY: the descriptors were checked above, and that no parameter overlaps another or a gradient; the caller
            // vouches that the memory is there.
            unsafe {
                params.push(param(&p?)?);
                grads.push(grad(&g?)?);
            }
        }
        Ok((params, grads))
    }

    /// An error if a parameter shares memory with another one or with a gradient. Gradients may share theirs.
    fn check_overlap(&self) -> Result<()> {
        let name = |index: usize| self.optimizer.specs().nth(index / 2).map_or("", |spec| &spec.name);
        // Parameters are the even ones.
        let mut order: Vec<usize> =
            (0..self.memory.len()).filter(|&k| self.memory[k].start < self.memory[k].end).collect();
        order.sort_unstable_by_key(|&k| self.memory[k].start);
        // The one that reaches furthest so far, of parameters and of gradients.
        let mut furthest: [Option<usize>; 2] = [None, None];
        for k in order {
            let is_grad = k % 2;
            let rivals = if is_grad == 1 { &furthest[..1] } else { &furthest[..] };
            let overlapped =
                rivals.iter().flatten().find(|&&rival| self.memory[rival].end > self.memory[k].start);
            if let Some(&rival) = overlapped {
                let what = |k: usize| if k.is_multiple_of(2) { "parameter" } else { "gradient" };
                return Err(Failure::new(
                    RFD_ERROR_TENSOR,
                    format!(
                        "tensor `{}`: its {} shares memory with the {} of `{}`; each needs its own",
                        name(k),
                        what(k),
                        what(rival),
                        name(rival)
                    ),
                ));
            }
            if furthest[is_grad].is_none_or(|best| self.memory[best].end < self.memory[k].end) {
                furthest[is_grad] = Some(k);
            }
        }
        Ok(())
    }
}

fn step_input(input: &rfd_step_input) -> Result<StepInput> {
    let addresses = [
        ("loss_address", input.loss_address),
        ("grad_scale_address", input.grad_scale_address.cast()),
        ("found_inf_address", input.found_inf_address.cast()),
    ];
    for (name, address) in addresses {
        if !address.is_null() {
            let expected = "must be null: this optimizer works on the CPU, give the number itself";
            return Err(Failure::invalid(name, format!("{address:p}"), expected));
        }
    }
    Ok(StepInput { loss: input.loss, grad_scale: input.grad_scale, found_inf: input.found_inf })
}

impl Backend for Host {
    fn options(&self) -> &Options {
        self.optimizer.options()
    }

    fn set_multiplier(&mut self, multiplier: f64, stream: *mut c_void) -> Result<()> {
        no_stream(stream)?;
        Ok(self.optimizer.set_multiplier(multiplier)?)
    }

    fn set_inv_batch_size(&mut self, inv_batch_size: f64, stream: *mut c_void) -> Result<()> {
        no_stream(stream)?;
        Ok(self.optimizer.set_inv_batch_size(inv_batch_size)?)
    }

    fn set_group(&mut self, index: usize, group: Group, stream: *mut c_void) -> Result<()> {
        no_stream(stream)?;
        Ok(self.optimizer.set_group(index, group)?)
    }

    unsafe fn step(
        &mut self,
        tensors: Tensors<'_>,
        norm: Option<*const f64>,
        input: &rfd_step_input,
        stream: *mut c_void,
    ) -> Result<Option<StepReport>> {
        no_stream(stream)?;
        let input = step_input(input)?;
        // SAFETY: the caller vouches for the tensors.
        let (mut params, grads) = unsafe { self.slices(tensors)? };
        let report = match norm {
            None => self.optimizer.step(&mut params, &grads, &input)?,
            Some(norm) => {
                // SAFETY: checked by the caller of this function to be not null and aligned; valid, the header says.
                let [euclidean, sigma] = unsafe { norm.cast::<[f64; 2]>().read() };
                let norm = SquaredNorm { euclidean, sigma };
                self.optimizer.step_with_norm(&mut params, &grads, norm, &input)?
            }
        };
        Ok(Some(report))
    }

    unsafe fn squared_norm(&mut self, tensors: Tensors<'_>, stream: *mut c_void) -> Result<*mut f64> {
        no_stream(stream)?;
        // SAFETY: the caller vouches for the tensors.
        let (_, grads) = unsafe { self.slices(tensors)? };
        let norm = self.optimizer.local_squared_norm(&grads)?;
        self.norm[0].set(norm.euclidean);
        self.norm[1].set(norm.sigma);
        Ok(self.norm.as_ptr().cast::<f64>().cast_mut())
    }

    unsafe fn init_master_weights(
        &mut self,
        _params: Array<'_, rfd_tensor>,
        stream: *mut c_void,
    ) -> Result<()> {
        // The first applied step makes them.
        no_stream(stream)
    }

    fn state_to_bytes(&self, stream: *mut c_void) -> Result<Vec<u8>> {
        no_stream(stream)?;
        Ok(self.optimizer.state_to_bytes()?)
    }

    fn load_state_from_bytes(&mut self, bytes: &[u8], stream: *mut c_void) -> Result<()> {
        no_stream(stream)?;
        Ok(self.optimizer.load_state_from_bytes(bytes)?)
    }
}
