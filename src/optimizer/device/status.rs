//! Reading the status block that kernels keep in host memory, while they may be writing it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use crate::backend::abi::{
    RFD_REASON_APPLIED, RFD_REASON_FOUND_INF, RFD_REASON_INVALID_OPTION, RFD_REASON_LOSS_BELOW_BOUND,
    RFD_REASON_NON_FINITE_GRADIENT, RFD_REASON_NON_FINITE_LOSS, RFD_REASON_OUT_OF_RANGE,
    RFD_REASON_ZERO_GRADIENT, RfdStatus,
};
use crate::backend::executor::{Device, HostBlock};
use crate::error::{Error, Result};
use crate::optimizer::{Outcome, SkipReason, StepReport};

const WORDS: usize = size_of::<RfdStatus>() / size_of::<u64>();

/// A writer needs less than a microsecond, unless it is put aside half way: a GPU that several processes share, and a
/// thread of the kernels' stand-in on the CPU, may be for many milliseconds. One that takes this long has stopped.
const PATIENCE: Duration = Duration::from_secs(10);

/// Attempts before the reader, too, makes room for others.
const SPINS: u32 = 1000;

/// A status block in host memory that a device writes to.
#[derive(Debug)]
pub(super) struct Mirror {
    device: Device,
    block: HostBlock,
}

impl Mirror {
    pub fn new(device: &Device) -> Result<Self> {
        let block = device.executor().allocate_host(size_of::<RfdStatus>())?;
        Ok(Self { device: device.clone(), block })
    }

    /// Address for the device.
    pub fn address(&self) -> u64 {
        self.block.device
    }

    /// As if no step had been seen. Only while no kernel runs.
    pub fn clear(&self) {
        for word in self.words() {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// The last whole block; `None` before the first step.
    ///
    /// A kernel first raises one of the two counts, then writes the rest, then the sequence, which is the sum of the
    /// counts. So what is read between the sequence and counts of the same sum is of one step.
    pub fn read(&self) -> Result<Option<StepReport>> {
        let mut attempts = 0;
        let mut started = None;
        loop {
            let words = self.words();
            let sequence = words[std::mem::offset_of!(RfdStatus, sequence) / 8].load(Ordering::Acquire);
            let copy: [u64; WORDS] = std::array::from_fn(|i| words[i].load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            let count = |offset: usize| words[offset / 8].load(Ordering::Relaxed);
            let applied = count(std::mem::offset_of!(RfdStatus, applied));
            let skipped = count(std::mem::offset_of!(RfdStatus, skipped));
            if applied.wrapping_add(skipped) == sequence {
                if sequence == 0 {
                    return Ok(None);
                }
                return report(&status(copy)).map(Some);
            }
            attempts += 1;
            if attempts < SPINS {
                std::hint::spin_loop();
            } else if started.get_or_insert_with(Instant::now).elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_micros(50));
            } else {
                let message = "a kernel stopped while it was writing its status; restart the program";
                return Err(Error::Device(message.into()));
            }
        }
    }

    fn words(&self) -> &[AtomicU64; WORDS] {
        // SAFETY: the block is 8-byte aligned, as large as the array, and lives as long as `self`. The device's writes are
        // aligned 8-byte stores, like those of another thread's atomics.
        unsafe { &*self.block.host.cast() }
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.device.executor().release_host(self.block);
    }
}

/// Reads the status of a [`DeviceOptimizer`](crate::optimizer::DeviceOptimizer) from any thread, while it takes steps.
#[derive(Clone, Debug)]
pub struct StatusReader {
    mirror: Arc<Mirror>,
}

impl StatusReader {
    pub(super) fn new(mirror: Arc<Mirror>) -> Self {
        Self { mirror }
    }

    /// What the last step did that the device has finished; `None` before the first. Does not wait for a
    /// step; only while a kernel is writing the block, until it has.
    ///
    /// # Errors
    /// [`Error::Device`] when a kernel stopped half way.
    pub fn read(&self) -> Result<Option<StepReport>> {
        self.mirror.read()
    }
}

fn status(words: [u64; WORDS]) -> RfdStatus {
    let [sequence, applied, skipped, loss, grad_norm, sigma_norm, theta, step_size, learning_rate, reason] =
        words;
    RfdStatus {
        sequence,
        applied,
        skipped,
        loss: f64::from_bits(loss),
        grad_norm: f64::from_bits(grad_norm),
        sigma_norm: f64::from_bits(sigma_norm),
        theta: f64::from_bits(theta),
        step_size: f64::from_bits(step_size),
        learning_rate: f64::from_bits(learning_rate),
        reason,
    }
}

fn report(status: &RfdStatus) -> Result<StepReport> {
    let reason = u32::try_from(status.reason).unwrap_or(u32::MAX);
    let outcome = match reason {
        RFD_REASON_APPLIED => Outcome::Applied,
        RFD_REASON_FOUND_INF => Outcome::Skipped(SkipReason::FoundInf),
        RFD_REASON_NON_FINITE_LOSS => Outcome::Skipped(SkipReason::NonFiniteLoss),
        RFD_REASON_NON_FINITE_GRADIENT => Outcome::Skipped(SkipReason::NonFiniteGradient),
        RFD_REASON_ZERO_GRADIENT => Outcome::Skipped(SkipReason::ZeroGradient),
        RFD_REASON_INVALID_OPTION => Outcome::Skipped(SkipReason::InvalidOption),
        RFD_REASON_OUT_OF_RANGE => Outcome::Skipped(SkipReason::OutOfRange),
        RFD_REASON_LOSS_BELOW_BOUND => Outcome::Skipped(SkipReason::LossBelowBound),
        other => {
            return Err(Error::Device(format!(
                "its status block names a reason {other} that this release doesn't know; something overwrote it"
            )));
        }
    };
    Ok(StepReport {
        outcome,
        loss: status.loss,
        grad_norm: status.grad_norm,
        sigma_norm: status.sigma_norm,
        theta: status.theta,
        step_size: status.step_size,
        learning_rate: status.learning_rate,
        applied_steps: status.applied,
        skipped_steps: status.skipped,
    })
}
