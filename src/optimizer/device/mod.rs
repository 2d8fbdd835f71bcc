//! Steps on tensors in a device's memory: owns their state there and launches kernels on the caller's stream.
//!
//! [`plan`] lays out tensors for the kernels and [`prepare`] brings the list to the device, [`settings`] are
//! the numbers that may change between replays of a captured step, [`history`] is what the method remembers,
//! [`buffers`] are velocities, master weights and variances, [`workspace`] holds sums, [`mirror`] tells what
//! steps did. [`halves`] are those of a step in sharded training, and [`ranks`] what they need beside.

mod buffers;
mod constants;
mod halves;
mod history;
mod mirror;
mod plan;
mod prepare;
mod ranks;
mod settings;
mod state;
mod workspace;

use std::io::Write;
use std::ops::Deref;
use std::sync::{Arc, Once};

use self::buffers::Buffers;
use self::history::HistoryMemory;
pub(super) use self::mirror::Mirror;
use self::plan::{Choice, Extent, Plan, Reason};
use self::prepare::{INLINE, Prepared};
use self::ranks::Ranks;
use self::settings::Control;
use self::workspace::Workspace;
use super::core::Core;
use super::raw::Placement;
use super::{Group, Method, Options, RawInput, RawTensor, ReportReader, StepReport, TensorSpec};
use crate::backend::abi::{RFD_MOST_SUMS, RfdStep, RfdTensor};
use crate::backend::executor::{Device, DeviceBuffer, Kernel, Launch, Launched, Stream};
use crate::error::{Error, Result};

/// Random Function Descent over tensors that live on a device: [`Optimizer`](crate::optimizer::Optimizer),
/// with norm, step size and update of all tensors in one launch, and the same bits.
///
/// A step is queued on the caller's stream and nothing waits for it: no synchronisation, no allocation, no
/// copy from host memory. It can be captured in a graph and replayed: a replay uses the addresses and a host
/// loss as they were when it was captured, but everything that lies on the device as it is then: loss,
/// gradient scale, `found_inf` and the settings that [`DeviceOptimizer::set_multiplier`] and its like write.
/// The first step with master weights or with the adaptive method must not be captured, as it takes them, or
/// their sizes, from the parameters; [`DeviceOptimizer::init_master_weights`] does that beforehand, but for
/// sizes of parts of tensors: with those wait for the report of a step before the capture.
///
/// All calls that take a stream work on this optimizer's state: use one stream, or order those that you use.
#[derive(Debug)]
pub struct DeviceOptimizer {
    core: Core,
    device: Device,
    /// Velocities and master weights of each tensor, and the memory that all lie in.
    buffers: Vec<Buffers>,
    slabs: Vec<DeviceBuffer>,
    control: Control,
    mirror: Arc<Mirror>,
    history: HistoryMemory,
    workspace: Workspace,
    /// Where lists of more than [`INLINE`] tensors lie: one table for steps that run, one for those that are
    /// captured, which bring it along. So no step that runs can change the table of a captured one.
    tables: Option<[DeviceBuffer; 2]>,
    placement: Placement,
    prepared: Option<Prepared>,
    /// For steps in two halves of a method with rows.
    ranks: Option<Ranks>,
    /// By tensor, whether it had a gradient in the first half since the last step, with such a method.
    half: Option<Vec<bool>>,
    /// The applied steps after which the method lacks what it remembers of parameters, until it has taken it.
    unmeasured: Option<u64>,
    /// Parameters of the launches, with all that does not change from step to step.
    step: RfdStep,
    /// What the optimizer's own formats ask for; loaded when it was made.
    expected: Choice,
    max_blocks: u32,
    cooperative: bool,
    /// Steps to be taken as several launches, after one launch was refused.
    apart: u32,
}

/// Steps after a refused launch until the next one is tried: others may have left the device.
const APART: u32 = 100;

/// Chunks of a list that one block works off alone. Each further one costs it two more trips to memory, some
/// 1.4 µs, where a cooperative launch and its barrier cost some 4 µs: reasoned, not measured.
const ALONE: u64 = 4;

impl Deref for DeviceOptimizer {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

/// Sums that kernels form of a chunk, at most.
fn sums_of(core: &Core, locked: bool) -> usize {
    match (core.method().descent().has_rows(), locked) {
        (false, false) => 1,
        (false, true) => 4,
        (true, false) => 2,
        (true, true) => RFD_MOST_SUMS as usize,
    }
}

impl DeviceOptimizer {
    /// An optimizer for tensors on the given device. Allocates velocities and master weights as method and
    /// options ask.
    ///
    /// # Errors
    /// As [`Optimizer::new`](crate::optimizer::Optimizer::new); besides [`Error::InvalidArgument`] for a
    /// covariance of your own, which a device can't evaluate, and [`Error::Device`] when the device has not
    /// enough memory.
    pub fn new(
        method: impl Into<Method>,
        options: Options,
        specs: Vec<TensorSpec>,
        device: &Device,
    ) -> Result<Self> {
        let core = Core::new(method, options, specs)?;
        let (options, count) = (core.options(), core.specs().len());
        if options.groups.len() > usize::from(u16::MAX) + 1 {
            return Err(Error::invalid(
                "number of groups",
                options.groups.len(),
                "a device has at most 65536",
            ));
        }
        let tensor_count = u32::try_from(count)
            .map_err(|_| Error::invalid("number of tensors", count, "a device has fewer than 2^32"))?;
        let extent = Extent::of_all(&core)?;
        let locked = options.groups.iter().any(|group| group.norm_lock);
        let sums = sums_of(&core, locked);
        let fresh = core.method().fresh_history(count);
        let lacks_measures = core.method().descent().lacks_measures(&fresh);
        let control = Control::new(device, &core)?;
        let mirror = Arc::new(Mirror::new(device, core.specs())?);
        let history = HistoryMemory::new(device, &fresh)?;
        let mut step = RfdStep {
            groups: control.groups(),
            settings: control.settings(),
            status: control.status(),
            mirror: mirror.address(),
            largest_grad: control.largest_grad(),
            seed: options.stochastic_rounding.unwrap_or(0),
            stochastic: options.stochastic_rounding.is_some().into(),
            group_count: options.groups.len() as u32,
            tensor_count,
            ..RfdStep::default()
        };
        core.method().descent().place(&mut step, history.address())?;
        let table = || device.allocate(count * size_of::<RfdTensor>());
        let tables = if count > INLINE { Some([table()?, table()?]) } else { None };
        let has_rows = core.method().descent().has_rows();
        let ranks = has_rows.then(|| Ranks::new(device, &core)).transpose()?;
        let mut optimizer = Self {
            workspace: Workspace::new(device, extent, count, sums)?,
            cooperative: device.executor().cooperative(),
            device: device.clone(),
            buffers: vec![Buffers::default(); count],
            core,
            control,
            mirror,
            history,
            slabs: Vec::new(),
            tables,
            placement: Placement::default(),
            prepared: None,
            ranks,
            half: None,
            unmeasured: lacks_measures.then_some(0),
            step,
            expected: Choice::Generic(Reason::Empty),
            max_blocks: u32::MAX,
            apart: 0,
        };
        let moving = (0..count).filter(|&k| optimizer.core.velocity_decay_of(k) > 0.0).collect();
        optimizer.require_velocities(moving)?;
        if optimizer.core.options().master_weights {
            optimizer.require_masters()?;
        }
        if has_rows {
            optimizer.require_variances()?;
        }
        // Compiled or loaded here rather than in a step.
        let addresses: Vec<RawTensor> =
            optimizer.core.specs().iter().map(|spec| RawTensor::new(16, 16, spec.dtype)).collect();
        optimizer.expected = Plan::new(&optimizer.core, &optimizer.buffers, &addresses).choice;
        let in_halves = optimizer.core.first_part().is_some();
        let kernel = if optimizer.cooperative && !in_halves { Kernel::step } else { Kernel::norm };
        device.executor().resident_blocks(kernel(optimizer.expected.instance()))?;
        if in_halves {
            device.executor().resident_blocks(Kernel::LOCAL_SUMS)?;
        }
        if lacks_measures {
            let instance = prepare::measuring(optimizer.core.specs().iter().map(|spec| spec.dtype));
            device.executor().resident_blocks(Kernel::norm(instance))?;
        }
        Ok(optimizer)
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Uses at most this many blocks a launch from the next step on, to leave a part of the device to other
    /// work; `None` for as many as the device holds. The bits of a step do not depend on it.
    ///
    /// The blocks of a step that is one launch wait for one another, and as many as the device holds leave no
    /// room beside them. Where a kernel of another stream spins until its partner on another device comes, as
    /// those of communication do, and that partner waits behind a step of its own, both may wait for ever:
    /// wait for communication before the step, or take several launches
    /// ([`DeviceOptimizer::set_cooperative`]), of which no block waits for another. A number of blocks keeps
    /// room only where it is below that of multiprocessors, as blocks are spread over all of them and a
    /// kernel of communication takes nearly the whole of one; a step of one block a multiprocessor has about
    /// a quarter of its loads under way.
    pub fn set_max_blocks(&mut self, blocks: Option<std::num::NonZeroU32>) {
        self.max_blocks = blocks.map_or(u32::MAX, Into::into);
    }

    /// Whether a step may be one launch, a cooperative one (the default where the device has them), or is
    /// several launches, with the same bits. A step whose cooperative launch the device refuses, as one may
    /// that other processes use, switches to several by itself, which is said on standard error once in a
    /// program, and the 100th step after it tries again.
    pub fn set_cooperative(&mut self, cooperative: bool) {
        self.cooperative = cooperative && self.device.executor().cooperative();
        self.apart = 0;
    }

    /// Whether the next step is one launch.
    pub fn is_cooperative(&self) -> bool {
        self.cooperative && self.apart == 0
    }

    /// The kernels that the last step took; before it, those that one will take whose gradients have the
    /// parameters' formats. By their names in `kernels/instances.h`: `generic` is for lists whose tensors
    /// differ in format, momentum or master weights, for norm lock, conservative steps, f64 and the adaptive
    /// method without averages; the others are faster.
    pub fn kernels(&self) -> &'static str {
        self.choice().instance().name()
    }

    /// As [`DeviceOptimizer::kernels`], and of the generic ones the tensor or setting that asks for them.
    pub fn explain_kernels(&self) -> String {
        self.choice().explain(&self.core)
    }

    fn choice(&self) -> Choice {
        self.prepared.as_ref().map_or(self.expected, |prepared| prepared.plan.choice)
    }

    /// After a cooperative launch that was refused; of no block where the device can't hold one.
    fn refused(&mut self, grid: u32) {
        static SAID: Once = Once::new();
        self.apart = APART;
        if grid == 0 {
            return;
        }
        SAID.call_once(|| {
            // Where that stream is closed nobody is told.
            let _ = writeln!(
                std::io::stderr(),
                "rfdescent: {} refused a cooperative launch of {grid} blocks: steps take several launches now, with \
                 the same bits, and every {APART}th tries again; fewer blocks (set_max_blocks) may fit",
                self.device.name()
            );
        });
    }

    /// Sets [`Options::multiplier`] for all later work on the stream, replays of captured steps included.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a negative or non-finite number.
    pub fn set_multiplier(&mut self, multiplier: f64, stream: Stream) -> Result<()> {
        self.core.change_options(|options| options.multiplier = multiplier)?;
        self.control.write_settings(&self.core, stream)
    }

    /// Sets [`Options::max_step_size`] for all later work on the stream, replays of captured steps included.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a number that is not positive.
    pub fn set_max_step_size(&mut self, max_step_size: Option<f64>, stream: Stream) -> Result<()> {
        self.core.change_options(|options| options.max_step_size = max_step_size)?;
        self.control.write_settings(&self.core, stream)
    }

    /// Sets the options of one group for all later work on the stream, replays of captured steps included.
    /// Switching norm lock on or off changes the launches too: capture the step again after that.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a group that does not exist or a value outside its domain.
    pub fn set_group(&mut self, index: usize, group: Group, stream: Stream) -> Result<()> {
        if group.norm_lock {
            self.workspace.require(&self.device, sums_of(&self.core, true))?;
        }
        let old = self.core.set_group(index, group)?;
        if old.norm_lock != group.norm_lock {
            self.prepared = None;
        }
        self.control.write_group(&self.core, index, stream)
    }

    /// Replaces the settings of the method for all later work on the stream, replays of captured steps
    /// included; see [`Optimizer::set_method`](super::Optimizer::set_method). Switching momentum on or off
    /// changes the launches too: capture the step again after that.
    ///
    /// # Errors
    /// As [`Optimizer::set_method`](super::Optimizer::set_method); [`Error::Device`] when the device has not
    /// enough memory.
    pub fn set_method(&mut self, method: impl Into<Method>, stream: Stream) -> Result<()> {
        let method = method.into();
        self.core.check_method(&method)?;
        let (mut moving, mut resting) = (Vec::new(), Vec::new());
        for (k, spec) in self.core.specs().iter().enumerate() {
            let before = self.core.velocity_decay_of(k) > 0.0;
            let after = method.descent().velocity_decay(spec.group) > 0.0;
            if after && !before {
                moving.push(k);
            } else if before && !after {
                resting.push(k);
            }
        }
        if !(moving.is_empty() && resting.is_empty()) {
            self.prepared = None;
        }
        // Before the change: where there is no memory the method stays as it was.
        self.require_velocities(moving)?;
        let old = self.core.set_method(method)?;
        for k in resting {
            // Momentum that is switched on again starts at rest.
            self.clear_velocity(k, stream)?;
        }
        for group in 0..self.core.options().groups.len() {
            let decay = |method: &Method| method.descent().velocity_decay(group);
            if decay(&old) != decay(self.core.method()) {
                self.control.write_group(&self.core, group, stream)?;
            }
        }
        self.control.write_settings(&self.core, stream)
    }

    /// As [`AnyOptimizer::check_tensors`](super::AnyOptimizer::check_tensors).
    pub(super) fn check_tensors(&mut self, tensors: &[RawTensor]) -> Result<()> {
        self.placement.check(&self.core, tensors)
    }

    /// An error for what a step alone would refuse beside tensors.
    pub(super) fn check_input(&self, input: &RawInput) -> Result<()> {
        self.core.check_alone()?;
        prepare::place_input(input, &mut { self.step })
    }

    /// Queues one step: norms, step size, update.
    ///
    /// `tensors` follow the order of the specs given to [`DeviceOptimizer::new`]. A NaN or infinite loss or
    /// gradient, a zero gradient or `found_inf` skip the step, which then changes nothing but the report.
    ///
    /// # Safety
    /// All addresses must be those of memory on this optimizer's device, of the length and format that specs
    /// and `tensors` say, from now until the stream has done the step (for a captured one: its last replay);
    /// parameters must not be used by other work meanwhile, nor gradients be written. The stream must be a
    /// live one of the device's primary context.
    ///
    /// # Errors
    /// [`Error::Tensor`] names a tensor whose address is null, misaligned, beyond the address space, or
    /// shared with another parameter; [`Error::InvalidArgument`] a wrong number of tensors or the address of
    /// a scalar; [`Error::Device`] says why a launch failed. Nothing has changed then.
    pub unsafe fn step(&mut self, tensors: &[RawTensor], input: &RawInput, stream: Stream) -> Result<()> {
        self.core.check_alone()?;
        // SAFETY: the caller vouches for the addresses.
        let step = unsafe { self.prepare(tensors, input, stream)? };
        // SAFETY: the caller vouches for the addresses, which `prepare` has checked.
        unsafe { self.measure(tensors, stream)? };
        self.half = None;
        let prepared = self.prepared.as_ref().expect("prepare leaves a plan");
        let kernel = Kernel::step(prepared.plan.instance());
        if self.is_cooperative() {
            let grid = self.grid(kernel, &step)?;
            let grid = if step.chunks <= ALONE { grid.min(1) } else { grid };
            // One block has nobody to wait for.
            // SAFETY: `prepare` has found every address of the list aligned, in range and apart from the
            // others; that they are live memory of the device the caller vouches for. What else the kernels
            // use is this optimizer's own.
            if grid > 0 && unsafe { self.launch(kernel, grid > 1, grid, &step, stream)? } == Launched::Queued
            {
                return Ok(());
            }
            self.refused(grid);
        }
        self.apart = self.apart.saturating_sub(1);
        // SAFETY: `prepare` has found every address of the list aligned, in range and apart from the others;
        // that they are live memory of the device the caller vouches for. What else the kernels use is this
        // optimizer's own.
        unsafe {
            self.launch_norms(&step, stream)?;
            self.launch_rescale(&step, stream)?;
            self.launch_update(&step, stream)
        }
    }

    /// Queues filling the master weights from the parameters, and what else a first step takes from them:
    /// before a first step that is captured, and after parameters were changed by something else. A step
    /// fills those of its tensors that have not been filled yet by itself. Sizes of parts of tensors are
    /// taken by a step alone, as ranks have to add them up ([`DeviceOptimizer::local_sums`]).
    ///
    /// # Safety
    /// As [`DeviceOptimizer::step`], for the parameters.
    ///
    /// # Errors
    /// As [`DeviceOptimizer::step`], for the parameters.
    pub unsafe fn init_master_weights(&mut self, tensors: &[RawTensor], stream: Stream) -> Result<()> {
        self.placement.check(&self.core, tensors)?;
        let all: Vec<usize> = (0..self.buffers.len()).filter(|&k| self.buffers[k].master != 0).collect();
        // SAFETY: the caller vouches for the addresses.
        unsafe {
            // Of parts of tensors the ranks have to add it up.
            if self.core.first_part().is_none() {
                self.measure(tensors, stream)?;
            }
            self.fill_masters(&all, tensors, stream)
        }
    }

    /// What the last step did that the device has finished; `None` before the first. Does not wait, and may
    /// be called while steps run.
    ///
    /// # Errors
    /// [`Error::Device`] when a kernel stopped half way; [`Error::Tensor`] names one of which
    /// [`DeviceOptimizer::step_with_sums`] was not given the sums of all parts, by which nothing has changed
    /// but the number of skipped steps.
    pub fn report(&self) -> Result<Option<StepReport>> {
        self.mirror.report()
    }

    /// A handle to [`DeviceOptimizer::report`] for another thread.
    pub fn report_reader(&self) -> ReportReader {
        ReportReader::of_device(self.mirror.clone())
    }

    /// What the last step on the stream did, after waiting for it.
    ///
    /// # Errors
    /// As [`DeviceOptimizer::report`]; [`Error::Device`] with what the driver reports.
    pub fn wait_report(&self, stream: Stream) -> Result<Option<StepReport>> {
        self.device.synchronize(stream)?;
        self.report()
    }

    /// Blocks for a launch: one for each chunk, but no more than the device holds; 0 when it holds none.
    fn grid(&self, kernel: Kernel, step: &RfdStep) -> Result<u32> {
        let useful = u32::try_from(step.chunks).unwrap_or(u32::MAX).max(1);
        Ok(self.device.executor().resident_blocks(kernel)?.min(self.max_blocks).min(useful))
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
        let kernel = Kernel::norm(plan.instance());
        // SAFETY: the caller vouches for the addresses.
        unsafe { self.launch(kernel, false, self.grid(kernel, step)?.max(1), step, stream)? };
        Ok(())
    }

    /// The sums again where squares of f64 gradients leave the range of f64.
    ///
    /// # Safety
    /// As [`DeviceOptimizer::step`].
    unsafe fn launch_rescale(&self, step: &RfdStep, stream: Stream) -> Result<()> {
        let plan = &self.prepared.as_ref().expect("made by `prepare`").plan;
        for kernel in [Kernel::RESCALE_MAX, Kernel::RESCALE_NORM].into_iter().filter(|_| plan.f64_grads) {
            // SAFETY: the caller vouches for the addresses.
            unsafe { self.launch(kernel, false, self.grid(kernel, step)?.max(1), step, stream)? };
        }
        Ok(())
    }

    /// # Safety
    /// As [`DeviceOptimizer::step`].
    unsafe fn launch_update(&self, step: &RfdStep, stream: Stream) -> Result<()> {
        let plan = &self.prepared.as_ref().expect("made by `prepare`").plan;
        let kernel = Kernel::update(plan.instance());
        // SAFETY: the caller vouches for the addresses.
        unsafe {
            self.launch(kernel, false, self.grid(kernel, step)?.max(1), step, stream)?;
            self.launch(Kernel::STATUS, false, 1, step, stream)?;
        }
        Ok(())
    }
}
