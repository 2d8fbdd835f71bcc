//! The kernels compiled for the CPU (`kernels/shim`), for tests: the device's memory is the host's, streams
//! do their work at once.

use std::alloc::Layout;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::abi::{RfdStep, RfdTable};
use super::executor::{Device, Executor, HostBlock, Kernel, Launch, Launched, Stream};
use crate::error::{Error, Result};

unsafe extern "C" {
    fn rfd_shim_launch(
        kernel: *const c_char,
        cooperative: c_int,
        grid: c_uint,
        step: *const RfdStep,
        table: *const RfdTable,
    ) -> c_int;
    fn rfd_shim_seed(seed: u64);
}

/// What the shim pretends to be.
#[derive(Clone, Copy, Debug)]
pub struct ShimOptions {
    /// Blocks that it holds at a time, at most 8 in a cooperative launch.
    pub blocks: u32,
    /// Whether it has cooperative launches.
    pub cooperative: bool,
    /// Whether it refuses cooperative launches all the same, as a device does that is shared with others.
    pub refuses: bool,
    /// Whether streams say that they are being captured.
    pub capturing: bool,
}

impl Default for ShimOptions {
    fn default() -> Self {
        Self { blocks: 4, cooperative: true, refuses: false, capturing: false }
    }
}

/// What a shim has been asked to do, for tests of the host's side.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    /// Names of launched kernels, in order.
    pub launches: Vec<String>,
    /// Allocations of device memory that were not given back.
    pub allocations: usize,
    /// Allocations so far.
    pub allocated: usize,
    /// Copies from or to host memory.
    pub copies: usize,
    /// Waits for streams.
    pub waits: usize,
}

/// A device that runs kernels on the CPU. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Shim {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    options: ShimOptions,
    counts: Counts,
    layouts: HashMap<u64, Layout>,
}

impl Shim {
    /// A device with memory and counts of its own.
    pub fn new(options: ShimOptions) -> Self {
        let state = State { options, counts: Counts::default(), layouts: HashMap::new() };
        Self { inner: Arc::new(Inner { state: Mutex::new(state) }) }
    }

    /// The handle that optimizers take.
    pub fn device(&self) -> Device {
        Device::new(self.inner.clone())
    }

    /// Pretends to be something else from now on.
    pub fn set_options(&self, options: ShimOptions) {
        self.inner.state().options = options;
    }

    /// What has been asked of it since the last call; allocations stay.
    pub fn take_counts(&self) -> Counts {
        let mut state = self.inner.state();
        let rest = Counts { allocations: state.counts.allocations, ..Counts::default() };
        std::mem::replace(&mut state.counts, rest)
    }

    /// Decides in which order all shims run threads and blocks from now on.
    pub fn set_schedule(seed: u64) {
        // SAFETY: stores a number, atomically.
        unsafe { rfd_shim_seed(seed) };
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere left numbers that are still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Executor for Inner {
    fn name(&self) -> String {
        "the kernels on the CPU (shim, for tests)".into()
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let layout = Layout::from_size_align(bytes, 256)
            .map_err(|e| Error::Device(format!("{bytes} bytes of memory: {e}")))?;
        // SAFETY: the trait says that `bytes` > 0.
        let address = unsafe { std::alloc::alloc_zeroed(layout) } as u64;
        if address == 0 {
            return Err(Error::Device(format!("{bytes} bytes of memory: there is not enough")));
        }
        let mut state = self.state();
        state.layouts.insert(address, layout);
        state.counts.allocations += 1;
        state.counts.allocated += 1;
        Ok(address)
    }

    fn release(&self, address: u64) {
        let mut state = self.state();
        if let Some(layout) = state.layouts.remove(&address) {
            state.counts.allocations -= 1;
            // SAFETY: came from `alloc_zeroed` with this layout, and is in the map no more.
            unsafe { std::alloc::dealloc(address as *mut u8, layout) };
        }
    }

    fn allocate_host(&self, bytes: usize) -> Result<HostBlock> {
        let address = self.allocate(bytes)?;
        Ok(HostBlock { host: address as *mut u8, device: address })
    }

    fn release_host(&self, block: HostBlock) {
        self.release(block.device);
    }

    fn capturing(&self, _: Stream) -> Result<bool> {
        Ok(self.state().options.capturing)
    }

    fn synchronize(&self, _: Stream) -> Result<()> {
        self.state().counts.waits += 1;
        Ok(())
    }

    unsafe fn copy_to_device(&self, to: u64, from: *const u8, bytes: usize, _: Stream) -> Result<()> {
        self.state().counts.copies += 1;
        // SAFETY: the caller vouches for both ranges; device memory is host memory.
        unsafe { std::ptr::copy_nonoverlapping(from, to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn copy_to_host(&self, to: *mut u8, from: u64, bytes: usize, _: Stream) -> Result<()> {
        self.state().counts.copies += 1;
        // SAFETY: the caller vouches for both ranges; device memory is host memory.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to, bytes) };
        Ok(())
    }

    unsafe fn fill(&self, address: u64, word: u32, count: usize, _: Stream) -> Result<()> {
        // SAFETY: the caller vouches for the range and its alignment.
        unsafe { std::slice::from_raw_parts_mut(address as *mut u32, count) }.fill(word);
        Ok(())
    }

    fn resident_blocks(&self, _: Kernel) -> Result<u32> {
        Ok(self.state().options.blocks)
    }

    fn cooperative(&self) -> bool {
        self.state().options.cooperative
    }

    unsafe fn launch(&self, launch: &Launch<'_>, _: Stream) -> Result<Launched> {
        let &Launch { kernel, cooperative, grid, step, table } = launch;
        {
            let mut state = self.state();
            if cooperative && (state.options.refuses || !state.options.cooperative) {
                return Ok(Launched::Refused);
            }
            state.counts.launches.push(kernel.name().to_string_lossy().into_owned());
        }
        // SAFETY: the name ends with 0, both structs live until the call returns, and the caller vouches for
        // the addresses.
        match unsafe { rfd_shim_launch(kernel.name().as_ptr(), cooperative.into(), grid, step, table) } {
            0 => Ok(Launched::Queued),
            code => {
                Err(Error::Device(format!("the shim refused {kernel:?} with {grid} blocks: code {code}")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::abi::{
        RFD_METHOD_FITTED, RFD_OUTCOME_INVALID_OPTION, RFD_OUTCOME_ZERO_GRADIENT, RfdModel, RfdSettings,
        RfdStatus,
    };
    use crate::backend::executor::Instance;
    use crate::backend::kernels::FAMILIES;
    use crate::backend::words::Plain;

    #[test]
    fn every_kernel_exists() {
        let shim = Shim::new(ShimOptions::default());
        let memory = shim.device().allocate(4096).unwrap();
        for (index, name) in Kernel::NAMES.iter().enumerate() {
            // an empty list: nothing but the small block is touched
            let base = memory.address();
            let step = RfdStep {
                groups: base,
                settings: base + 256,
                status: base + 512,
                rank_sums: base + 1024,
                largest_grad: base + 1280,
                ..RfdStep::default()
            };
            let cooperative = name.to_bytes().starts_with(b"rfd_step_").into();
            // SAFETY: all addresses lie in `memory`; there are no tensors.
            let code = unsafe { rfd_shim_launch(name.as_ptr(), cooperative, 1, &step, &RfdTable::default()) };
            assert_eq!(code, 0, "{index} {name:?}");
        }
    }

    #[test]
    fn numbers_without_a_family_or_method_are_invalid_options() {
        let device = Shim::new(ShimOptions::default()).device();
        let mut memory = device.allocate(4096).unwrap();
        let settings = RfdSettings { multiplier: 1.0, inv_batch_size: 0.0, max_step_size: f64::INFINITY };
        memory.upload(256, settings.bytes(), Stream::DEFAULT).unwrap();
        let outcome = |instance: Instance, family: u32, method: u32| {
            let base = memory.address();
            let step = RfdStep {
                model: RfdModel { family, ..RfdModel::default() },
                method,
                groups: base,
                settings: base + 256,
                status: base + 512,
                largest_grad: base + 1280,
                ..RfdStep::default()
            };
            let name = Kernel::step(instance).name();
            // SAFETY: all addresses lie in `memory`; there are no tensors.
            assert_eq!(unsafe { rfd_shim_launch(name.as_ptr(), 1, 1, &step, &RfdTable::default()) }, 0);
            let mut status = RfdStatus::default();
            memory.download(512, status.bytes_mut(), Stream::DEFAULT).unwrap();
            status.outcome as u32
        };
        for instance in [Instance::F32, Instance::Generic] {
            for family in 0..FAMILIES.len() as u32 {
                assert_eq!(outcome(instance, family, RFD_METHOD_FITTED), RFD_OUTCOME_ZERO_GRADIENT);
            }
            assert_eq!(outcome(instance, 99, RFD_METHOD_FITTED), RFD_OUTCOME_INVALID_OPTION);
        }
        assert_eq!(outcome(Instance::Generic, 0, 99), RFD_OUTCOME_INVALID_OPTION);
    }
}
