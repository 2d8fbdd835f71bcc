//! Before a launch: the list of tensors as kernels read it, on its way to the device only where it has
//! changed.

use super::DeviceOptimizer;
use super::plan::{Extent, Plan};
use super::ranks::Ranks;
use crate::backend::abi::{
    RFD_INLINE_TENSORS, RFD_METHOD_FITTED, RFD_TENSOR_COUNTS, RFD_TENSOR_MATRIX, RfdStep, RfdTable,
    RfdTensorHistory,
};
use crate::backend::executor::{Instance, Kernel, Launch, Stream};
use crate::backend::words::Plain;
use crate::error::{Error, Result};
use crate::optimizer::raw::check_number;
use crate::optimizer::{RawInput, RawNumber, RawTensor};
use crate::rows::Rows;
use crate::tensor::DType;

/// As many tensors as a launch is passed by value.
pub(super) const INLINE: usize = RFD_INLINE_TENSORS as usize;

/// What the last step was prepared for; the next one with the same addresses uses it again.
#[derive(Debug)]
pub(super) struct Prepared {
    addresses: Vec<RawTensor>,
    pub plan: Plan,
    /// The tensors by value; scratch for more than [`INLINE`] of them.
    pub table: Box<RfdTable>,
    /// Whether the device's table holds them.
    stored: bool,
}

/// The instance that sums the squares of parameters of these formats: a lean one where all are alike.
pub(super) fn measuring(formats: impl Iterator<Item = DType>) -> Instance {
    let formats: Vec<DType> = formats.collect();
    match formats.first() {
        Some(first) if formats.iter().all(|format| format == first) => Instance::of_sums(first.number()),
        _ => Instance::Generic,
    }
}

/// Writes the numbers of a step, or their addresses, into the launch's parameters.
pub(super) fn place_input(input: &RawInput, step: &mut RfdStep) -> Result<()> {
    match input.loss {
        RawNumber::Host(value) => {
            step.loss = 0;
            step.loss_value = value;
        }
        RawNumber::Address { address, dtype } => {
            step.loss = check_number("loss", address, dtype)?;
            step.loss_dtype = dtype.number();
        }
    }
    let optional = |name, number: RawNumber, nothing| match number.on_device(name, nothing)? {
        None => Ok(0),
        Some((address, DType::F32)) => Ok(address),
        Some((_, dtype)) => Err(Error::invalid(name, dtype, "give the address of an f32")),
    };
    step.grad_scale = optional("grad_scale", input.grad_scale, 1.0)?;
    step.found_inf = optional("found_inf", input.found_inf, 0.0)?;
    Ok(())
}

impl DeviceOptimizer {
    /// Checks a step and lays its tensors out, unless the last one's had the same addresses; the launch's
    /// parameters.
    ///
    /// # Safety
    /// As [`DeviceOptimizer::step`].
    pub(super) unsafe fn prepare(
        &mut self,
        tensors: &[RawTensor],
        input: &RawInput,
        stream: Stream,
    ) -> Result<RfdStep> {
        let mut step = self.step;
        place_input(input, &mut step)?;
        if self.prepared.as_ref().is_none_or(|prepared| prepared.addresses != tensors) {
            self.placement.check(&self.core, tensors)?;
            let unfilled: Vec<usize> = (self.buffers.iter().zip(tensors).enumerate())
                .filter(|(_, (buffers, tensor))| {
                    buffers.master != 0 && !buffers.master_ready && tensor.grad != 0
                })
                .map(|(k, _)| k)
                .collect();
            // SAFETY: the caller vouches for the addresses.
            unsafe { self.fill_masters(&unfilled, tensors, stream)? };
            self.prepared = Some(self.lay_out(tensors));
        }
        let prepared = self.prepared.as_ref().expect("made above");
        step.chunks = prepared.plan.extent.chunks;
        step.segments = prepared.plan.extent.segments;
        self.workspace.place(&mut step);
        if self.tables.is_some() {
            step.tensors = self.store_table(stream)?;
        }
        Ok(step)
    }

    /// The plan for checked addresses; reuses the memory of the one before.
    fn lay_out(&mut self, tensors: &[RawTensor]) -> Prepared {
        let plan = Plan::new(&self.core, &self.buffers, tensors);
        let mut table = match self.prepared.take() {
            Some(prepared) => prepared.table,
            None => Box::default(),
        };
        if plan.tensors.len() <= INLINE {
            table.tensor[..plan.tensors.len()].copy_from_slice(&plan.tensors);
        }
        Prepared { addresses: tensors.to_vec(), plan, table, stored: false }
    }

    /// Brings a long list to the device, by value in launches, where it is not there already; its address.
    fn store_table(&mut self, stream: Stream) -> Result<u64> {
        let capturing = self.device.executor().capturing(stream)?;
        let (Some(tables), Some(prepared)) = (&self.tables, &mut self.prepared) else { return Ok(0) };
        let address = tables[usize::from(capturing)].address();
        if capturing || !prepared.stored {
            let Prepared { plan, table, .. } = prepared;
            for (batch, tensors) in plan.tensors.chunks(INLINE).enumerate() {
                table.tensor[..tensors.len()].copy_from_slice(tensors);
                let step = RfdStep {
                    tensors: address + (batch * size_of::<RfdTable>()) as u64,
                    chunks: (size_of_val(tensors) / 8) as u64,
                    ..self.step
                };
                let launch =
                    Launch { kernel: Kernel::STORE, cooperative: false, grid: 1, step: &step, table };
                // SAFETY: the kernel writes so many words of 8 bytes into a table of this optimizer's own,
                // which has room for the whole list; kernels that read the table come before or after on the
                // stream.
                unsafe { self.device.executor().launch(&launch, stream)? };
            }
            if !capturing {
                prepared.stored = true;
            }
        }
        Ok(address)
    }

    /// Fills master weights from the parameters.
    ///
    /// # Safety
    /// As [`DeviceOptimizer::step`], for the parameters.
    pub(super) unsafe fn fill_masters(
        &mut self,
        which: &[usize],
        tensors: &[RawTensor],
        stream: Stream,
    ) -> Result<()> {
        if which.is_empty() {
            return Ok(());
        }
        if self.device.executor().capturing(stream)? {
            let expected = "replays of this capture would fill the master weights over and over; call \
                            `init_master_weights` before the capture begins";
            return Err(Error::Device(expected.into()));
        }
        for batch in which.chunks(INLINE) {
            let mut table = Box::<RfdTable>::default();
            let mut extent = Extent::default();
            for (tensor, &k) in table.tensor.iter_mut().zip(batch) {
                // A gradient says that the tensor has chunks; the kernel does not read it.
                let address = RawTensor { grad: tensors[k].param, ..tensors[k] };
                *tensor = extent.place(&self.core, k, &self.buffers[k], &address, Rows::CHUNKS);
            }
            let step = RfdStep { chunks: extent.chunks, tensor_count: batch.len() as u32, ..self.step };
            let kernel = Kernel::FILL_MASTERS;
            let grid = self.grid(kernel, &step)?.max(1);
            let launch = Launch { kernel, cooperative: false, grid, step: &step, table: &table };
            // SAFETY: the caller vouches for the parameters; the master weights are this optimizer's own.
            unsafe { self.device.executor().launch(&launch, stream)? };
        }
        for &k in which {
            self.buffers[k].master_ready = true;
        }
        Ok(())
    }

    /// Lets the method take from the parameters what it remembers of them, once.
    ///
    /// # Safety
    /// As [`DeviceOptimizer::step`], for the parameters, whose addresses are checked.
    pub(super) unsafe fn measure(&mut self, tensors: &[RawTensor], stream: Stream) -> Result<()> {
        if self.unmeasured.is_some() {
            let expected = "call `init_master_weights`, or take a step, before the capture begins";
            // SAFETY: the caller vouches for the parameters.
            unsafe { self.sum_parameters(tensors, None, expected, stream)? };
            self.unmeasured = None;
        }
        Ok(())
    }

    /// Queues what [`DeviceOptimizer::measure`] takes, the squared norms of the parameters, formed as those
    /// of gradients are: to the history, or to the numbers of these ranks.
    ///
    /// # Safety
    /// As [`DeviceOptimizer::measure`].
    pub(super) unsafe fn sum_parameters(
        &self,
        tensors: &[RawTensor],
        ranks: Option<&Ranks>,
        expected: &str,
        stream: Stream,
    ) -> Result<()> {
        let Some(applied) = self.unmeasured else { return Ok(()) };
        if self.device.executor().capturing(stream)? {
            let problem = "replays of this capture would take the sizes of the parameters over and over";
            return Err(Error::Device(format!("{problem}; {expected}")));
        }
        let indices: Vec<usize> = (0..tensors.len()).collect();
        for batch in indices.chunks(INLINE) {
            let mut table = Box::<RfdTable>::default();
            let mut extent = Extent::default();
            for (tensor, &k) in table.tensor.iter_mut().zip(batch) {
                let values = RawTensor {
                    grad: tensors[k].param,
                    grad_dtype: self.core.specs()[k].dtype,
                    ..tensors[k]
                };
                *tensor = extent.place(&self.core, k, &self.buffers[k], &values, Rows::CHUNKS);
                tensor.flags &= (RFD_TENSOR_MATRIX | RFD_TENSOR_COUNTS) as u8;
            }
            let mut step = RfdStep {
                chunks: extent.chunks,
                segments: extent.segments,
                tensor_count: batch.len() as u32,
                // No method's: plain sums of squares.
                method: RFD_METHOD_FITTED,
                ..self.step
            };
            step.adaptive.history =
                self.history.of_tensors(applied, batch[0], RfdTensorHistory::FIELDS.len());
            self.workspace.place(&mut step);
            if let Some(ranks) = ranks {
                ranks.place(&mut step, batch[0], ranks.numbers());
            }
            let instance = measuring(batch.iter().map(|&k| self.core.specs()[k].dtype));
            for kernel in [Kernel::norm(instance), Kernel::MEASURE] {
                let grid = if kernel == Kernel::MEASURE { 1 } else { self.grid(kernel, &step)?.max(1) };
                let launch = Launch { kernel, cooperative: false, grid, step: &step, table: &table };
                // SAFETY: the caller vouches for the parameters; all else is this optimizer's own, with room
                // for a whole list of tensors.
                unsafe { self.device.executor().launch(&launch, stream)? };
            }
        }
        Ok(())
    }
}
