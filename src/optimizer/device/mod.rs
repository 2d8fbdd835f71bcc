//! Steps on tensors in a device's memory: owns their state there and launches kernels on the caller's stream.
//!
//! [`plan`] lays out tensors for the kernels, [`settings`] are the numbers that may change between replays of a captured
//! step, [`history`] is what the adaptive method remembers, [`status`] reads what steps did.

mod history;
mod input;
mod plan;
mod settings;
mod state;
mod status;

use std::sync::Arc;

use crate::backend::abi::{RFD_INLINE_TENSORS, RfdAdaptive, RfdModel, RfdStep, RfdTable, RfdTensor};
use crate::backend::executor::{Device, DeviceBuffer, Kernel, Launch, Launched, Stream};
use crate::covariance::Model;
use crate::error::{Error, Result};
use crate::optimizer::adaptive::History;
use crate::optimizer::{Group, Method, Options, SquaredNorm, StepReport, TensorSpec};
use crate::tensor::DType;
use history::HistoryMemory;
use input::scalar;
pub use input::{DeviceInput, DeviceLoss, DeviceTensor};
use plan::{Extent, Kind, Plan, TensorEntry, check_addresses, check_overlap};
use settings::Control;
use status::Mirror;
pub use status::StatusReader;

/// As many tensors as a launch is passed by value.
const INLINE: usize = RFD_INLINE_TENSORS as usize;

/// Random Function Descent over tensors that live on a device: [`Optimizer`](crate::optimizer::Optimizer), with norm, step
/// size and update of all tensors in one launch, and the same bits.
///
/// A step is queued on the caller's stream and nothing waits for it: no synchronisation, no allocation, no copy from host
/// memory. It can be captured in a graph and replayed: a replay uses the addresses and a host loss as they were when it
/// was captured, but everything that lies on the device as it is then: loss, gradient scale, `found_inf` and the settings
/// that [`DeviceOptimizer::set_multiplier`] and its like write. The first step with master weights must not be captured,
/// as it fills them; [`DeviceOptimizer::init_master_weights`] does that beforehand.
///
/// All calls that take a stream work on this optimizer's state: use one stream, or order those that you use.
#[derive(Debug)]
pub struct DeviceOptimizer {
    device: Device,
    method: Method,
    options: Options,
    entries: Vec<TensorEntry>,
    control: Control,
    mirror: Arc<Mirror>,
    /// Of the adaptive method.
    history: Option<HistoryMemory>,
    workspace: Workspace,
    /// Velocities and master weights.
    slabs: Vec<DeviceBuffer>,
    /// Where lists of more than [`INLINE`] tensors lie: one table for steps that run, one for those that are captured,
    /// which bring it along. So no step that runs can change the table of a captured one.
    tables: Option<[DeviceBuffer; 2]>,
    prepared: Option<Prepared>,
    /// Parameters of the launches, with all that does not change from step to step.
    step: RfdStep,
    max_blocks: u32,
    cooperative: bool,
}

/// What the last step was prepared for; the next one with the same addresses uses it again.
#[derive(Debug)]
struct Prepared {
    addresses: Vec<DeviceTensor>,
    plan: Plan,
    /// The tensors by value; scratch for more than [`INLINE`] of them.
    table: Box<RfdTable>,
    /// Whether the device's table holds them.
    stored: bool,
}

/// Memory for the sums, by size of the list.
#[derive(Debug)]
struct Workspace {
    memory: DeviceBuffer,
    extent: Extent,
    tensors: usize,
    sums: usize,
    /// What steps captured before may still use.
    retired: Vec<DeviceBuffer>,
}

impl Workspace {
    fn new(device: &Device, extent: Extent, tensors: usize, sums: usize) -> Result<Self> {
        let memory = device.allocate(Self::offsets(extent, tensors, sums)[4])?;
        Ok(Self { memory, extent, tensors, sums, retired: Vec::new() })
    }

    /// Where sums of segments and tensors and the counters of both begin, behind the sums of chunks; the size of all.
    fn offsets(extent: Extent, tensors: usize, sums: usize) -> [usize; 5] {
        let segments = 8 * extent.chunks as usize * sums;
        let tensor_sums = segments + 8 * extent.segments as usize * sums;
        let segment_done = tensor_sums + 8 * tensors * sums;
        let tensor_done = segment_done + 4 * extent.segments as usize;
        [segments, tensor_sums, segment_done, tensor_done, tensor_done + 4 * tensors]
    }

    /// Makes it large enough for `sums` sums a chunk.
    fn require(&mut self, device: &Device, sums: usize) -> Result<()> {
        if sums > self.sums {
            let larger = Self::new(device, self.extent, self.tensors, sums)?;
            let smaller = std::mem::replace(self, larger);
            self.retired = smaller.retired;
            self.retired.push(smaller.memory);
        }
        Ok(())
    }

    fn apply(&self, step: &mut RfdStep) {
        let base = self.memory.address();
        let at = Self::offsets(self.extent, self.tensors, self.sums).map(|offset| base + offset as u64);
        step.chunk_sums = base;
        [step.segment_sums, step.tensor_sums, step.segment_done, step.tensor_done, _] = at;
    }
}

impl DeviceOptimizer {
    /// An optimizer for tensors on the given device. Allocates velocities and master weights as the options ask.
    ///
    /// # Errors
    /// As [`Optimizer::new`](crate::optimizer::Optimizer::new); besides [`Error::InvalidArgument`] for a covariance of
    /// your own, which a device can't evaluate, and [`Error::Device`] when the device has not enough memory.
    pub fn new(
        method: impl Into<Method>,
        options: Options,
        specs: Vec<TensorSpec>,
        device: &Device,
    ) -> Result<Self> {
        let method = method.into();
        let options = method.prepare(options)?;
        method.check_groups(&specs)?;
        let lengths = crate::optimizer::validate(&options, &specs)?;
        if options.groups.len() > usize::from(u16::MAX) + 1 {
            return Err(Error::invalid(
                "number of groups",
                options.groups.len(),
                "a device has at most 65536",
            ));
        }
        let entries: Vec<TensorEntry> = specs
            .into_iter()
            .zip(lengths)
            .map(|(spec, len)| TensorEntry {
                spec,
                len: len as u64,
                momentum: 0,
                master: 0,
                master_ready: false,
            })
            .collect();
        let tensor_count = u32::try_from(entries.len()).map_err(|_| {
            Error::invalid("number of tensors", entries.len(), "a device has fewer than 2^32")
        })?;
        let extent = Extent::of_all(&entries)?;
        let locked = options.groups.iter().any(|group| group.norm_lock);
        let sums = Kind::new(&method, &options).sums(locked) as usize;
        let control = Control::new(device, &options)?;
        let mirror = Arc::new(Mirror::new(device)?);
        let (model, adaptive, history) = match &method {
            Method::Published(model) => (settings::model(model, &options)?, RfdAdaptive::default(), None),
            Method::Adaptive(adaptive) => {
                let history = HistoryMemory::new(device, entries.len())?;
                (RfdModel::default(), history.rule(adaptive), Some(history))
            }
        };
        let step = RfdStep {
            model,
            adaptive,
            groups: control.groups(),
            settings: control.settings(),
            status: control.status(),
            mirror: mirror.address(),
            rescue: control.rescue(),
            seed: options.stochastic_rounding.unwrap_or(0),
            stochastic: options.stochastic_rounding.is_some().into(),
            group_count: options.groups.len() as u32,
            tensor_count,
            ..RfdStep::default()
        };
        let table = || device.allocate(entries.len() * size_of::<RfdTensor>());
        let tables = if entries.len() > INLINE { Some([table()?, table()?]) } else { None };
        let mut optimizer = Self {
            workspace: Workspace::new(device, extent, entries.len(), sums)?,
            cooperative: device.executor().cooperative(),
            device: device.clone(),
            method,
            options,
            entries,
            control,
            mirror,
            history,
            slabs: Vec::new(),
            tables,
            prepared: None,
            step,
            max_blocks: u32::MAX,
        };
        let all = 0..optimizer.entries.len();
        let moving = all.clone().filter(|&k| optimizer.group_of(k).momentum > 0.0).collect();
        optimizer.require_momentum(moving)?;
        if optimizer.options.master_weights {
            optimizer.require_master(all.collect())?;
        }
        Ok(optimizer)
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How steps are chosen.
    pub fn method(&self) -> &Method {
        &self.method
    }

    /// The fitted covariance model; `None` with the adaptive method.
    pub fn model(&self) -> Option<&Model> {
        self.method.model()
    }

    /// The options in force.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The tensors, in the order in which steps expect them.
    pub fn specs(&self) -> impl ExactSizeIterator<Item = &TensorSpec> {
        self.entries.iter().map(|entry| &entry.spec)
    }

    /// Uses at most this many blocks a launch from the next step on, to leave a part of the device to other work; `None`
    /// for as many as the device holds. The bits of a step do not depend on it.
    pub fn set_max_blocks(&mut self, blocks: Option<std::num::NonZeroU32>) {
        self.max_blocks = blocks.map_or(u32::MAX, Into::into);
    }

    /// Whether a step may be one cooperative launch (the default where the device has them) or is several launches, with the
    /// same bits. A step whose cooperative launch the device refuses switches to several by itself.
    pub fn set_cooperative(&mut self, cooperative: bool) {
        self.cooperative = cooperative && self.device.executor().cooperative();
    }

    /// Whether the next step is one cooperative launch.
    pub fn is_cooperative(&self) -> bool {
        self.cooperative
    }

    /// Sets [`Options::multiplier`] for all later work on the stream, replays of captured steps included.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a negative or non-finite number.
    pub fn set_multiplier(&mut self, multiplier: f64, stream: Stream) -> Result<()> {
        self.change_settings(|options| options.multiplier = multiplier, stream)
    }

    /// Sets [`Options::inv_batch_size`] for all later work on the stream, replays of captured steps included.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a number outside [0, 1].
    pub fn set_inv_batch_size(&mut self, inv_batch_size: f64, stream: Stream) -> Result<()> {
        self.change_settings(|options| options.inv_batch_size = inv_batch_size, stream)
    }

    /// Sets [`Options::max_step_size`] for all later work on the stream, replays of captured steps included.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a number that is not positive.
    pub fn set_max_step_size(&mut self, max_step_size: Option<f64>, stream: Stream) -> Result<()> {
        self.change_settings(|options| options.max_step_size = max_step_size, stream)
    }

    /// Sets the options of one group for all later work on the stream, replays of captured steps included. Switching momentum
    /// or norm lock on or off changes the launches too: capture the step again after that.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a group that does not exist or a value outside its domain.
    pub fn set_group(&mut self, index: usize, group: Group, stream: Stream) -> Result<()> {
        let Some(&old) = self.options.groups.get(index) else {
            let expected = format!("there are {} groups", self.options.groups.len());
            return Err(Error::invalid("group", index, expected));
        };
        let group = self.method.prepare_group(index, group)?;
        if (old.momentum > 0.0) != (group.momentum > 0.0) || old.norm_lock != group.norm_lock {
            self.prepared = None;
        }
        if group.norm_lock {
            self.workspace.require(&self.device, 4)?;
        }
        let members: Vec<usize> =
            (0..self.entries.len()).filter(|&k| self.entries[k].spec.group == index).collect();
        if group.momentum > 0.0 {
            self.require_momentum(members)?;
        } else if old.momentum > 0.0 {
            // Momentum that is switched on again starts at rest.
            for k in members {
                let entry = &self.entries[k];
                self.clear(entry.momentum, entry.momentum_bytes(), stream)?;
            }
        }
        self.options.groups[index] = group;
        self.control.write_group(index, &group, stream)
    }

    fn change_settings(&mut self, change: impl FnOnce(&mut Options), stream: Stream) -> Result<()> {
        let mut options = self.options.clone();
        change(&mut options);
        self.options = self.method.prepare(options)?;
        self.control.write_settings(&self.options, stream)
    }

    /// Queues one step: norms, step size, update.
    ///
    /// `tensors` follow the order of the specs given to [`DeviceOptimizer::new`]. A NaN or infinite loss or gradient, a zero
    /// gradient or `found_inf` skip the step, which then changes nothing but the status.
    ///
    /// # Safety
    /// All addresses must be those of memory on this optimizer's device, of the length and format that specs and `tensors`
    /// say, from now until the stream has done the step (for a captured one: its last replay); parameters must not be used
    /// by other work meanwhile, nor gradients be written. The stream must be a live one of the device's primary context.
    ///
    /// # Errors
    /// [`Error::Tensor`] names a tensor whose address is null, misaligned, beyond the address space, or shared with another
    /// parameter; [`Error::InvalidArgument`] a wrong number of tensors or the address of a scalar; [`Error::Device`] says
    /// why a launch failed. Nothing has changed then.
    pub unsafe fn step(
        &mut self,
        tensors: &[DeviceTensor],
        input: &DeviceInput,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the addresses.
        let step = unsafe { self.prepare(tensors, input, stream)? };
        let prepared = self.prepared.as_ref().expect("prepare leaves a plan");
        let kernel = Kernel::step(prepared.plan.instance);
        if self.cooperative {
            let grid = self.grid(kernel, &step);
            // SAFETY: the caller vouches for the addresses of tensors and input; the others are this optimizer's own.
            if grid > 0 && unsafe { self.launch(kernel, true, grid, &step, stream)? } == Launched::Queued {
                return Ok(());
            }
            self.cooperative = false;
        }
        // SAFETY: as above.
        unsafe {
            self.launch_norms(&step, stream)?;
            self.launch_update(&step, stream)
        }
    }

    /// Queues the first half of a step in sharded training, the squared norms of this rank's gradients: two f64 at the
    /// address returned, [`SquaredNorm`](crate::optimizer::SquaredNorm)'s `euclidean` and `sigma`, for the caller to add up
    /// over the ranks in place or elsewhere. The address stays the same.
    ///
    /// # Safety
    /// As [`DeviceOptimizer::step`].
    ///
    /// # Errors
    /// As [`DeviceOptimizer::step`]; [`Error::InvalidArgument`] with the adaptive method, whose norms a shard doesn't know.
    pub unsafe fn local_squared_norm(&mut self, tensors: &[DeviceTensor], stream: Stream) -> Result<u64> {
        self.method.published()?;
        // The loss does not matter to norms.
        let input = DeviceInput::new(DeviceLoss::Host(0.0));
        // SAFETY: the caller vouches for the addresses.
        let mut step = unsafe { self.prepare(tensors, &input, stream)? };
        step.given_norm = self.control.norm();
        // SAFETY: the caller vouches for the addresses of tensors; the others are this optimizer's own.
        unsafe {
            self.launch_norms(&step, stream)?;
            self.launch(Kernel::TOTAL, false, 1, &step, stream)?;
        }
        Ok(step.given_norm)
    }

    /// The norms that the last [`DeviceOptimizer::local_squared_norm`] wrote, after waiting for the stream: for those who
    /// add them up on the host.
    ///
    /// # Errors
    /// [`Error::Device`] with what the driver reports.
    pub fn read_squared_norm(&self, stream: Stream) -> Result<SquaredNorm> {
        self.control.read_norm(stream)
    }

    /// Queues the second half: the update with the norm of all ranks, two f64 at the address `norm`. Every rank must give
    /// the same norm and input; then all take bitwise the same step.
    ///
    /// # Safety
    /// As [`DeviceOptimizer::step`].
    ///
    /// # Errors
    /// As [`DeviceOptimizer::step`]; [`Error::InvalidArgument`] with the adaptive method and when a group has norm lock,
    /// whose norms a shard doesn't know.
    pub unsafe fn step_with_norm(
        &mut self,
        tensors: &[DeviceTensor],
        norm: u64,
        input: &DeviceInput,
        stream: Stream,
    ) -> Result<()> {
        self.method.published()?;
        crate::optimizer::refuse_norm_lock(&self.options)?;
        let norm = scalar("norm", norm, DType::F64)?;
        // SAFETY: the caller vouches for the addresses.
        let mut step = unsafe { self.prepare(tensors, input, stream)? };
        step.given_norm = norm;
        // SAFETY: as above.
        unsafe { self.launch_update(&step, stream) }
    }

    /// Queues filling the master weights from the parameters: before a first step that is captured, and after parameters
    /// were changed by something else. A step fills those of its tensors that have not been filled yet by itself.
    ///
    /// # Safety
    /// As [`DeviceOptimizer::step`], for the parameters.
    ///
    /// # Errors
    /// As [`DeviceOptimizer::step`], for the parameters.
    pub unsafe fn init_master_weights(&mut self, tensors: &[DeviceTensor], stream: Stream) -> Result<()> {
        self.check(tensors)?;
        let all: Vec<usize> = (0..self.entries.len()).filter(|&k| self.entries[k].master != 0).collect();
        // SAFETY: the caller vouches for the addresses.
        unsafe { self.fill_masters(&all, tensors, stream) }
    }

    /// What the last step did that the device has finished; `None` before the first. Does not wait, and may be called while
    /// steps run.
    ///
    /// # Errors
    /// [`Error::Device`] when a kernel stopped half way.
    pub fn status(&self) -> Result<Option<StepReport>> {
        self.mirror.read()
    }

    /// A handle to [`DeviceOptimizer::status`] for another thread.
    pub fn status_reader(&self) -> StatusReader {
        StatusReader::new(self.mirror.clone())
    }

    /// What the last step on the stream did, after waiting for it.
    ///
    /// # Errors
    /// [`Error::Device`] with what the driver reports.
    pub fn wait_status(&self, stream: Stream) -> Result<Option<StepReport>> {
        self.device.synchronize(stream)?;
        self.status()
    }

    fn group_of(&self, k: usize) -> &Group {
        &self.options.groups[self.entries[k].spec.group]
    }

    fn entries(&self) -> &[TensorEntry] {
        &self.entries
    }

    fn control(&self) -> &Control {
        &self.control
    }

    /// Makes velocities, at rest, for those of the tensors that have none.
    fn require_momentum(&mut self, tensors: Vec<usize>) -> Result<()> {
        let missing: Vec<usize> = tensors.into_iter().filter(|&k| self.entries[k].momentum == 0).collect();
        let sizes: Vec<usize> = missing.iter().map(|&k| self.entries[k].momentum_bytes()).collect();
        for (k, address) in missing.into_iter().zip(self.allocate(&sizes)?) {
            self.entries[k].momentum = address;
        }
        Ok(())
    }

    /// Makes master weights, not yet filled, for those of the tensors that can have some and have none.
    fn require_master(&mut self, tensors: Vec<usize>) -> Result<()> {
        let missing: Vec<usize> = tensors
            .into_iter()
            .filter(|&k| self.entries[k].master == 0 && self.entries[k].is_half())
            .collect();
        let sizes: Vec<usize> = missing.iter().map(|&k| self.entries[k].master_bytes()).collect();
        for (k, address) in missing.into_iter().zip(self.allocate(&sizes)?) {
            self.entries[k].master = address;
        }
        Ok(())
    }

    /// One allocation for buffers of the given sizes; their addresses, multiples of 256.
    fn allocate(&mut self, sizes: &[usize]) -> Result<Vec<u64>> {
        if sizes.is_empty() {
            return Ok(Vec::new());
        }
        let mut end = 0;
        let mut offsets = Vec::with_capacity(sizes.len());
        for size in sizes {
            offsets.push(end);
            end += size.next_multiple_of(256);
        }
        let slab = self.device.allocate(end)?;
        let base = slab.address();
        self.slabs.push(slab);
        self.prepared = None;
        Ok(offsets.into_iter().map(|offset| base + offset as u64).collect())
    }

    /// After loading: whether the master weights of a tensor hold something.
    fn set_master_ready(&mut self, k: usize, ready: bool) {
        self.entries[k].master_ready = ready;
        // The next step has to look which ones to fill.
        self.prepared = None;
    }

    /// What the adaptive method remembers after so many applied steps, after the work on the stream.
    fn read_history(&self, applied: u64, stream: Stream) -> Result<Option<History>> {
        self.history.as_ref().map(|memory| memory.read(applied, stream)).transpose()
    }

    /// After loading: what belongs to a count of applied steps. The status is that of an optimizer that has seen none yet.
    fn restore(
        &mut self,
        applied: u64,
        skipped: u64,
        history: Option<&History>,
        stream: Stream,
    ) -> Result<()> {
        if let (Some(memory), Some(history)) = (&mut self.history, history) {
            memory.write(applied, history, stream)?;
        }
        self.control.write_counts(applied, skipped, stream)?;
        self.mirror.clear();
        Ok(())
    }

    /// Checks a step and lays its tensors out, unless the last one's had the same addresses; the launch's parameters.
    ///
    /// # Safety
    /// As [`DeviceOptimizer::step`].
    unsafe fn prepare(
        &mut self,
        tensors: &[DeviceTensor],
        input: &DeviceInput,
        stream: Stream,
    ) -> Result<RfdStep> {
        let mut step = self.step;
        input.apply(&mut step)?;
        if self.prepared.as_ref().is_none_or(|prepared| prepared.addresses != tensors) {
            self.check(tensors)?;
            let unfilled: Vec<usize> = (0..self.entries.len())
                .filter(|&k| {
                    let entry = &self.entries[k];
                    entry.master != 0 && !entry.master_ready && tensors[k].grad != 0
                })
                .collect();
            // SAFETY: the caller vouches for the addresses.
            unsafe { self.fill_masters(&unfilled, tensors, stream)? };
            self.prepared = Some(self.lay_out(tensors));
        }
        let prepared = self.prepared.as_ref().expect("made above");
        step.chunks = prepared.plan.extent.chunks;
        step.segments = prepared.plan.extent.segments;
        step.sums = prepared.plan.sums;
        self.workspace.apply(&mut step);
        if self.tables.is_some() {
            step.tensors = self.store_table(stream)?;
        }
        Ok(step)
    }

    fn check(&self, tensors: &[DeviceTensor]) -> Result<()> {
        if tensors.len() != self.entries.len() {
            let expected =
                format!("the optimizer was made for {} tensors; give one for each", self.entries.len());
            return Err(Error::invalid("number of tensors", tensors.len(), expected));
        }
        check_addresses(&self.entries, tensors)?;
        let same_params = self.prepared.as_ref().is_some_and(|prepared| {
            prepared.addresses.iter().zip(tensors).all(|(old, new)| old.param == new.param)
        });
        if same_params { Ok(()) } else { check_overlap(&self.entries, tensors) }
    }

    /// The plan for checked addresses; reuses the memory of the one before.
    fn lay_out(&mut self, tensors: &[DeviceTensor]) -> Prepared {
        let kind = Kind::new(&self.method, &self.options);
        let plan = Plan::new(&self.entries, &self.options.groups, tensors, kind);
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
                    tensor_count: tensors.len() as u32,
                    ..self.step
                };
                let launch =
                    Launch { kernel: Kernel::STORE_TABLE, cooperative: false, grid: 1, step: &step, table };
                // SAFETY: the kernel writes `tensor_count` entries into a table of this optimizer's own, which has room for
                // the whole list; kernels that read the table come before or after on the stream.
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
    unsafe fn fill_masters(
        &mut self,
        which: &[usize],
        tensors: &[DeviceTensor],
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
                let address = DeviceTensor { grad: tensors[k].param, ..tensors[k] };
                let entry = std::slice::from_ref(&self.entries[k]);
                let single = Plan::new(entry, &self.options.groups, &[address], Kind::Published);
                *tensor = RfdTensor { first_chunk: extent.chunks, ..single.tensors[0] };
                extent.chunks += single.extent.chunks;
            }
            let step = RfdStep { chunks: extent.chunks, tensor_count: batch.len() as u32, ..self.step };
            let kernel = Kernel::FILL_MASTERS;
            let grid = self.grid(kernel, &step).max(1);
            let launch = Launch { kernel, cooperative: false, grid, step: &step, table: &table };
            // SAFETY: the caller vouches for the parameters; the master weights are this optimizer's own.
            unsafe { self.device.executor().launch(&launch, stream)? };
        }
        for &k in which {
            self.entries[k].master_ready = true;
        }
        Ok(())
    }

    /// Blocks for a launch: one for each chunk, but no more than the device holds; 0 when it holds none.
    fn grid(&self, kernel: Kernel, step: &RfdStep) -> u32 {
        let useful = u32::try_from(step.chunks).unwrap_or(u32::MAX).max(1);
        self.device.executor().resident_blocks(kernel).min(self.max_blocks).min(useful)
    }

    /// # Safety
    /// As [`DeviceOptimizer::step`].
    unsafe fn launch(
        &self,
        kernel: Kernel,
        cooperative: bool,
        grid: u32,
        step: &RfdStep,
        stream: Stream,
    ) -> Result<Launched> {
        let table = &self.prepared.as_ref().expect("made by `prepare`").table;
        // SAFETY: the caller vouches for the addresses.
        unsafe { self.device.executor().launch(&Launch { kernel, cooperative, grid, step, table }, stream) }
    }

    /// # Safety
    /// As [`DeviceOptimizer::step`].
    unsafe fn launch_norms(&self, step: &RfdStep, stream: Stream) -> Result<()> {
        let plan = &self.prepared.as_ref().expect("made by `prepare`").plan;
        let rescue = [Kernel::RESCUE_MAX, Kernel::RESCUE_NORM];
        let kernels =
            [Kernel::norm(plan.instance)].into_iter().chain(rescue.into_iter().filter(|_| plan.f64_grads));
        for kernel in kernels {
            // SAFETY: the caller vouches for the addresses.
            unsafe { self.launch(kernel, false, self.grid(kernel, step).max(1), step, stream)? };
        }
        Ok(())
    }

    /// # Safety
    /// As [`DeviceOptimizer::step`].
    unsafe fn launch_update(&self, step: &RfdStep, stream: Stream) -> Result<()> {
        let plan = &self.prepared.as_ref().expect("made by `prepare`").plan;
        let kernel = Kernel::update(plan.instance);
        // SAFETY: the caller vouches for the addresses.
        unsafe {
            self.launch(kernel, false, self.grid(kernel, step).max(1), step, stream)?;
            self.launch(Kernel::STATUS, false, 1, step, stream)?;
        }
        Ok(())
    }
}
