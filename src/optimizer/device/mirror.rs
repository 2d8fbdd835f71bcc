//! Reading the status block that kernels keep in host memory, while they may be writing it.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use crate::backend::abi::{RFD_OUTCOME_TORN_TENSOR, RfdStatus};
use crate::backend::executor::{Device, HostBlock, Stream};
use crate::backend::words::Plain;
use crate::error::{Error, Result};
use crate::optimizer::{Limit, Outcome, StepReport, TensorSpec};

const WORDS: usize = size_of::<RfdStatus>() / size_of::<u64>();

/// A writer needs less than a microsecond, unless it is put aside half way: a GPU that several processes
/// share, and a thread of the kernels' stand-in on the CPU, may be for many milliseconds. One that takes this
/// long has stopped.
const PATIENCE: Duration = Duration::from_secs(10);

/// Attempts before the reader, too, makes room for others.
const SPINS: u32 = 1000;

/// A status block in host memory that a device writes to.
#[derive(Debug)]
pub(crate) struct Mirror {
    device: Device,
    block: HostBlock,
    /// Those of the tensors.
    names: Box<[String]>,
}

impl Mirror {
    pub fn new(device: &Device, specs: &[TensorSpec]) -> Result<Self> {
        let block = device.executor().allocate_host(size_of::<RfdStatus>())?;
        let names = specs.iter().map(|spec| spec.name.clone()).collect();
        Ok(Self { device: device.clone(), block, names })
    }

    /// Address for the device.
    pub fn address(&self) -> u64 {
        self.block.device
    }

    /// Waits for the device.
    pub fn wait(&self, stream: Stream) -> Result<()> {
        self.device.synchronize(stream)
    }

    /// As if no step had been seen. Only while no kernel runs.
    pub fn clear(&self) {
        let words = self.words();
        // In the order in which a kernel writes, for those who read meanwhile: the counts before the rest.
        words[std::mem::offset_of!(RfdStatus, applied) / 8].store(0, Ordering::Relaxed);
        words[std::mem::offset_of!(RfdStatus, skipped) / 8].store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        for word in words {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// The last whole block; `None` before the first step.
    ///
    /// A kernel first raises one of the two counts, then writes the rest, then the sequence, which is the sum
    /// of the counts. So what is read between the sequence and counts of the same sum is of one step.
    pub fn read(&self) -> Result<Option<RfdStatus>> {
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
                return Ok((sequence != 0).then(|| RfdStatus::from_words(&copy)));
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

    /// What the last step did; `None` before the first.
    pub fn report(&self) -> Result<Option<StepReport>> {
        let Some(status) = self.read()? else { return Ok(None) };
        if status.outcome == u64::from(RFD_OUTCOME_TORN_TENSOR)
            && let Some(name) = self.names.get(status.limit as usize)
        {
            let problem = "has parts on the ranks that do not make it up: give a gradient on all ranks that hold \
                           it, or on none, and let each part count in the norm on one of them";
            return Err(Error::tensor(name, problem));
        }
        report(&status).map(Some)
    }

    fn words(&self) -> &[AtomicU64; WORDS] {
        // SAFETY: the block is 8-byte aligned, as large as the array, and lives as long as `self`. The
        // device's writes are aligned 8-byte stores, like those of another thread's atomics.
        unsafe { &*self.block.host.cast() }
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.device.executor().release_host(self.block);
    }
}

fn report(status: &RfdStatus) -> Result<StepReport> {
    let outcome = u32::try_from(status.outcome).ok().and_then(Outcome::from_code).ok_or_else(|| {
        Error::Device(format!(
            "its status block names an outcome {} that this release doesn't know; something overwrote it",
            status.outcome
        ))
    })?;
    let limit = u32::try_from(status.limit).ok().and_then(Limit::from_code).ok_or_else(|| {
        Error::Device(format!(
            "its status block names a limit {} that this release doesn't know; something overwrote it",
            status.limit
        ))
    })?;
    Ok(StepReport {
        outcome,
        loss: status.loss,
        grad_norm: status.grad_norm,
        sigma_norm: status.sigma_norm,
        theta: status.theta,
        step_size: status.step_size,
        learning_rate: status.learning_rate,
        trust: status.trust,
        limit,
        applied_steps: status.applied,
        skipped_steps: status.skipped,
    })
}
