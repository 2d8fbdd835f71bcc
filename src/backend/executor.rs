//! Who executes: what a device has to be able to do, and the handles to it.

use std::ffi::CStr;
use std::fmt;
use std::sync::Arc;

use super::abi::{RfdStep, RfdTable};
use super::kernels::{ENTRIES, Entry, PARTS};
pub(crate) use super::kernels::{Instance, InstanceKind, Kernel};
use crate::error::{Error, Result};

/// A queue of work of a device: the raw handle that the framework uses, e.g. a `CUstream` or `cudaStream_t`
/// as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(u64);

impl Stream {
    /// The device's default stream (handle 0), which orders itself with all blocking streams.
    pub const DEFAULT: Stream = Stream(0);
    /// The default stream by its own handle, 1.
    pub const LEGACY: Stream = Stream(1);
    /// The default stream of the calling thread (handle 2).
    pub const PER_THREAD: Stream = Stream(2);

    /// The stream with this handle, which must belong to the device's primary context, as those of CUDA's
    /// runtime do.
    pub const fn from_raw(handle: u64) -> Self {
        Self(handle)
    }

    /// The handle.
    pub const fn as_raw(self) -> u64 {
        self.0
    }
}

impl Kernel {
    /// All of them, in the order of [`Kernel::NAMES`].
    pub fn all() -> impl Iterator<Item = Self> {
        (0..Self::NAMES.len()).map(Self::at)
    }

    pub fn name(self) -> &'static CStr {
        Self::NAMES[self.index()]
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name().to_string_lossy())
    }
}

impl Instance {
    /// The lean instance for tensors that are all alike: of these formats, with or without master weights and
    /// velocities. The generic one where there is none.
    pub fn of(kind: InstanceKind, param: u32, grad: u32, master: bool, velocity: bool) -> Self {
        let wanted = (kind, param, grad, master, velocity);
        let fits =
            |entry: &&Entry| (entry.kind, entry.param, entry.grad, entry.master, entry.velocity) == wanted;
        ENTRIES.iter().find(fits).map_or(Instance::Generic, |entry| entry.instance)
    }

    /// One whose norm pass sums the squares of tensors of this format, without rows.
    pub fn of_sums(format: u32) -> Self {
        let fits = |entry: &&Entry| entry.kind == InstanceKind::Fitted && entry.grad == format;
        ENTRIES.iter().find(fits).map_or(Instance::Generic, |entry| entry.instance)
    }

    /// Its name in `kernels/instances.h`.
    pub fn name(self) -> &'static str {
        PARTS[Kernel::step(self).part()]
    }
}

/// One launch of [`RFD_THREADS`](super::abi::RFD_THREADS) threads a block.
#[derive(Clone, Copy)]
pub(crate) struct Launch<'a> {
    pub kernel: Kernel,
    pub cooperative: bool,
    pub grid: u32,
    pub step: &'a RfdStep,
    pub table: &'a RfdTable,
}

/// What became of a launch that was not an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Launched {
    Queued,
    /// The grid of a cooperative launch does not fit on the device now, or the device has no such launches.
    Refused,
}

/// Host memory that the device can write to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostBlock {
    /// As the host sees it; 8-byte aligned.
    pub host: *mut u8,
    /// As the device sees it.
    pub device: u64,
}

// SAFETY: two addresses; who reads or writes through them has to say why that is sound.
unsafe impl Send for HostBlock {}
// SAFETY: shared addresses are only read; who goes through them has to say why that is sound.
unsafe impl Sync for HostBlock {}

/// A device. Work on one stream runs in order; calls may come from any thread.
pub(crate) trait Executor: fmt::Debug + Send + Sync {
    /// What the device is, for people.
    fn name(&self) -> String;

    /// Device memory, 256-byte aligned; its zeros are there for every stream when the call returns. `bytes` >
    /// 0.
    fn allocate(&self, bytes: usize) -> Result<u64>;

    /// Gives back what [`Self::allocate`] gave, once all work queued before is done.
    fn release(&self, address: u64);

    /// Zeroed host memory that kernels can write.
    fn allocate_host(&self, bytes: usize) -> Result<HostBlock>;

    /// Gives back what [`Self::allocate_host`] gave, once all work queued before is done.
    fn release_host(&self, block: HostBlock);

    /// Whether the stream records its work into a graph instead of running it.
    fn capturing(&self, stream: Stream) -> Result<bool>;

    /// Waits for all work on the stream.
    fn synchronize(&self, stream: Stream) -> Result<()>;

    /// Queues a copy from host memory.
    ///
    /// # Safety
    /// Both ranges are valid for `bytes` bytes until the work on the stream is done, and no one else uses the
    /// device's.
    unsafe fn copy_to_device(&self, to: u64, from: *const u8, bytes: usize, stream: Stream) -> Result<()>;

    /// Queues a copy to host memory.
    ///
    /// # Safety
    /// As [`Self::copy_to_device`], the host's range being the one that is written.
    unsafe fn copy_to_host(&self, to: *mut u8, from: u64, bytes: usize, stream: Stream) -> Result<()>;

    /// Queues writing `count` equal words; the word is part of the command, so that it may be captured in a
    /// graph.
    ///
    /// # Safety
    /// The range is valid for 4·`count` bytes, 4-byte aligned, and used by no one else until the work is
    /// done.
    unsafe fn fill(&self, address: u64, word: u32, count: usize, stream: Stream) -> Result<()>;

    /// How many blocks of a kernel the device holds at a time. Its code is loaded then: what has been asked
    /// for need not be loaded in a step.
    fn resident_blocks(&self, kernel: Kernel) -> Result<u32>;

    /// Whether the device has launches whose blocks can wait for one another.
    fn cooperative(&self) -> bool;

    /// Queues a launch; `step` and `table` are copied.
    ///
    /// # Safety
    /// All addresses in `step` and `table` are valid for what the kernel reads and writes until the work is
    /// done, and no one else uses what it writes.
    unsafe fn launch(&self, launch: &Launch<'_>, stream: Stream) -> Result<Launched>;
}

/// A device that tensors live on. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Device {
    executor: Arc<dyn Executor>,
}

impl Device {
    pub(crate) fn new(executor: Arc<dyn Executor>) -> Self {
        Self { executor }
    }

    pub(crate) fn executor(&self) -> &dyn Executor {
        &*self.executor
    }

    /// What it is, e.g. `NVIDIA H100 80GB HBM3 (CUDA device 0, compute capability 9.0, PTX)`.
    pub fn name(&self) -> String {
        self.executor.name()
    }

    /// Device memory of the given size, all zeros.
    ///
    /// # Errors
    /// [`Error::Device`] when there is not enough of it.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceBuffer> {
        // A device has no empty allocations; one byte keeps the address unique.
        let address = self.executor.allocate(bytes.max(1))?;
        Ok(DeviceBuffer { device: self.clone(), address, bytes })
    }

    /// Waits until all work on the stream is done.
    ///
    /// # Errors
    /// [`Error::Device`] with what the driver reports, which may come from work queued earlier.
    pub fn synchronize(&self, stream: Stream) -> Result<()> {
        self.executor.synchronize(stream)
    }
}

/// Owned device memory, for those who have no framework that owns theirs. Freed when dropped.
#[derive(Debug)]
pub struct DeviceBuffer {
    device: Device,
    address: u64,
    bytes: usize,
}

impl DeviceBuffer {
    /// Address on the device, a multiple of 256.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Copies bytes to `offset`, in the order of the stream's work, and waits for it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when they do not fit, [`Error::Device`] when the copy fails.
    pub fn upload(&mut self, offset: usize, bytes: &[u8], stream: Stream) -> Result<()> {
        // SAFETY: the bytes stay borrowed until the wait below.
        unsafe { self.upload_async(offset, bytes, stream)? };
        self.device.synchronize(stream)
    }

    /// Copies bytes from `offset`, after the stream's work so far, and waits for it.
    ///
    /// # Errors
    /// As [`DeviceBuffer::upload`].
    pub fn download(&self, offset: usize, bytes: &mut [u8], stream: Stream) -> Result<()> {
        // SAFETY: the bytes stay borrowed until the wait below.
        unsafe { self.download_async(offset, bytes, stream)? };
        self.device.synchronize(stream)
    }

    /// Queues a copy of bytes to `offset`.
    ///
    /// # Safety
    /// `bytes` must stay as they are, and this buffer exist, until the stream has done the copy.
    ///
    /// # Errors
    /// As [`DeviceBuffer::upload`].
    pub unsafe fn upload_async(&mut self, offset: usize, bytes: &[u8], stream: Stream) -> Result<()> {
        self.check(offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the range lies in this buffer, checked above; the caller keeps both sides as they are.
        unsafe {
            self.device.executor().copy_to_device(
                self.address + offset as u64,
                bytes.as_ptr(),
                bytes.len(),
                stream,
            )
        }
    }

    /// Queues a copy of bytes from `offset`.
    ///
    /// # Safety
    /// `bytes` must not be used, and this buffer exist, until the stream has done the copy.
    ///
    /// # Errors
    /// As [`DeviceBuffer::upload`].
    pub unsafe fn download_async(&self, offset: usize, bytes: &mut [u8], stream: Stream) -> Result<()> {
        self.check(offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the range lies in this buffer, checked above; the caller keeps both sides alone.
        unsafe {
            self.device.executor().copy_to_host(
                bytes.as_mut_ptr(),
                self.address + offset as u64,
                bytes.len(),
                stream,
            )
        }
    }

    fn check(&self, offset: usize, bytes: usize) -> Result<()> {
        if offset.checked_add(bytes).is_some_and(|end| end <= self.bytes) {
            return Ok(());
        }
        let expected =
            format!("{bytes} bytes from there do not fit into the buffer, which has {}", self.bytes);
        Err(Error::invalid("offset", offset, expected))
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.device.executor().release(self.address);
    }
}
