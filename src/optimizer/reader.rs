//! The report of the last step, for other threads.

use std::sync::{Arc, Mutex, PoisonError};

use super::StepReport;
use super::device::Mirror;
use super::raw::check_host_stream;
use crate::backend::executor::Stream;
use crate::error::Result;

/// Reads from any thread what the last step of an optimizer did, while that takes steps.
#[derive(Clone, Debug)]
pub struct ReportReader {
    source: Source,
}

#[derive(Clone, Debug)]
enum Source {
    Host(Arc<LastReport>),
    Device(Arc<Mirror>),
}

/// Where an optimizer on the host leaves its reports.
#[derive(Debug, Default)]
pub(super) struct LastReport(Mutex<Option<StepReport>>);

impl LastReport {
    pub fn set(&self, report: StepReport) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(report);
    }

    /// As if no step had been seen.
    pub fn clear(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub fn get(&self) -> Option<StepReport> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReportReader {
    pub(super) fn of_host(last: Arc<LastReport>) -> Self {
        Self { source: Source::Host(last) }
    }

    pub(super) fn of_device(mirror: Arc<Mirror>) -> Self {
        Self { source: Source::Device(mirror) }
    }

    /// What the last step did, on a device the last one that it has finished; `None` before the first. Does
    /// not wait for a step; only while a kernel is writing the report, until it has.
    ///
    /// # Errors
    /// As [`DeviceOptimizer::report`](super::DeviceOptimizer::report).
    pub fn read(&self) -> Result<Option<StepReport>> {
        match &self.source {
            Source::Host(last) => Ok(last.get()),
            Source::Device(mirror) => mirror.report(),
        }
    }

    /// What the last step on the stream did, after waiting for it. On the host there is nothing to wait for,
    /// and the stream must be [`Stream::DEFAULT`].
    ///
    /// # Errors
    /// As [`DeviceOptimizer::wait_report`](super::DeviceOptimizer::wait_report).
    pub fn wait(&self, stream: Stream) -> Result<Option<StepReport>> {
        match &self.source {
            Source::Host(_) => check_host_stream(stream)?,
            Source::Device(mirror) => mirror.wait(stream)?,
        }
        self.read()
    }
}
