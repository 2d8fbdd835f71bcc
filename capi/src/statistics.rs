//! The handle of sample statistics.

use std::ffi::c_char;
use std::sync::Mutex;

use super::buffer::rfd_buffer;
use super::fit::rfd_fit;
use super::model::utf8;
use super::pointers::{Out, OutStruct, destroy, lock, path, shared, slice};
use super::status::{Failure, Result, guard, rfd_status};
use rfdescent::estimation::{Sample, SampleStatistics, SampleTable, fit, read_samples};

/// Sufficient statistics of samples (loss, squared gradient norm, batch size) at random initialisations;
/// memory grows with the number of distinct batch sizes only. One thread at a time: a call while another
/// thread is in one returns RFD_ERROR_BUSY. Give each worker its own and merge them.
pub struct rfd_statistics {
    inner: Mutex<SampleStatistics>,
}

impl rfd_statistics {
    pub(super) fn new(statistics: SampleStatistics) -> Self {
        Self { inner: Mutex::new(statistics) }
    }

    /// A copy, so that no two handles are ever locked at once.
    pub(super) fn snapshot(&self) -> Result<SampleStatistics> {
        Ok(lock(&self.inner, "statistics")?.clone())
    }
}

/// The samples of lists of equal length.
///
/// # Safety
/// The pointers are null or valid for reads of `count` values; they may be null when `count` is 0.
pub(super) unsafe fn collect(
    losses: *const f64,
    sq_grad_norms: *const f64,
    batch_sizes: *const u64,
    count: usize,
) -> Result<Vec<Sample>> {
    // SAFETY: the caller vouches for these.
    let (losses, sq_grad_norms, batch_sizes) = unsafe {
        (
            slice(losses, count, "losses")?,
            slice(sq_grad_norms, count, "sq_grad_norms")?,
            slice(batch_sizes, count, "batch_sizes")?,
        )
    };
    let columns = losses.iter().zip(sq_grad_norms).zip(batch_sizes).enumerate();
    let samples = columns.map(|(index, ((&loss, &sq_grad_norm), &batch_size))| {
        let sample = Sample { loss, sq_grad_norm, batch_size };
        let checked = sample.validate().map_err(rfdescent::Error::from);
        checked.map_err(|error| Failure::from(error).at(&format!("sample {index}")))?;
        Ok(sample)
    });
    samples.collect()
}

/// Makes statistics of no samples.
///
/// `statistics` must not be null. On success `*statistics` is a new handle that the caller frees with
/// rfd_statistics_destroy. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_statistics_create(statistics: *mut *mut rfd_statistics) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what it may point to.
        unsafe { Out::new(statistics, "statistics")? }
            .set_handle(rfd_statistics::new(SampleStatistics::new()));
        Ok(())
    })
}

/// Frees statistics. Null does nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_statistics_destroy(statistics: *mut rfd_statistics) {
    // SAFETY: null, or a handle that its owner uses no more.
    unsafe { destroy(statistics) }
}

/// Adds one sample: the mean loss of a mini-batch at a random initialisation, the squared norm of its
/// gradient, and its size.
///
/// `statistics` must not be null. One thread at a time. RFD_ERROR_INVALID_ARGUMENT names the number that is
/// not finite or outside its domain; nothing is added then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_statistics_push(
    statistics: *mut rfd_statistics,
    loss: f64,
    sq_grad_norm: f64,
    batch_size: u64,
) -> rfd_status {
    guard(|| {
        // SAFETY: null or a live handle, says the header.
        let statistics = unsafe { shared(statistics, "statistics")? };
        Ok(lock(&statistics.inner, "statistics")?.push(&Sample { loss, sq_grad_norm, batch_size })?)
    })
}

/// Adds `count` samples from arrays: all of them, or none when one is outside its domain.
///
/// `statistics` must not be null, nor the arrays unless `count` is 0. One thread at a time. The message of
/// RFD_ERROR_INVALID_ARGUMENT has the index of the sample.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_statistics_push_array(
    statistics: *mut rfd_statistics,
    losses: *const f64,
    sq_grad_norms: *const f64,
    batch_sizes: *const u64,
    count: usize,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (statistics, more) = unsafe {
            (shared(statistics, "statistics")?, collect(losses, sq_grad_norms, batch_sizes, count)?)
        };
        let more = SampleTable::from(more).statistics()?;
        lock(&statistics.inner, "statistics")?.merge(&more);
        Ok(())
    })
}

/// Adds the samples of a CSV file with the columns `loss`, `grad_norm` (or `sq_grad_norm`) and `batchsize`:
/// all of them, or none when a row is wrong.
///
/// No pointer may be null. One thread at a time. RFD_ERROR_IO when the file can't be read; the message of
/// RFD_ERROR_FILE has row and column.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_statistics_push_csv(
    statistics: *mut rfd_statistics,
    file: *const c_char,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (statistics, file) = unsafe { (shared(statistics, "statistics")?, path(file, "file")?) };
        let more = SampleTable::from(read_samples(file)?).statistics()?;
        lock(&statistics.inner, "statistics")?.merge(&more);
        Ok(())
    })
}

/// Adds the samples of other statistics, which stay as they are. The two may be the same.
///
/// No pointer may be null. One thread at a time, for both.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_statistics_merge(
    statistics: *mut rfd_statistics,
    other: *const rfd_statistics,
) -> rfd_status {
    guard(|| {
        // SAFETY: null or live handles, says the header.
        let (statistics, other) = unsafe { (shared(statistics, "statistics")?, shared(other, "other")?) };
        let more = other.snapshot()?;
        lock(&statistics.inner, "statistics")?.merge(&more);
        Ok(())
    })
}

/// Number of mini-batches, and of examples in them.
///
/// `statistics` must not be null; an output that is null is left out. One thread at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_statistics_counts(
    statistics: *const rfd_statistics,
    batches: *mut u64,
    examples: *mut u64,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (statistics, batches, examples) = unsafe {
            (
                shared(statistics, "statistics")?,
                Out::optional(batches, "batches")?,
                Out::optional(examples, "examples")?,
            )
        };
        let inner = lock(&statistics.inner, "statistics")?;
        if let Some(out) = batches {
            out.set(inner.batches());
        }
        if let Some(out) = examples {
            out.set(inner.examples());
        }
        Ok(())
    })
}

/// Fits mean and variances. Set `result->size` before the call.
///
/// No pointer may be null. One thread at a time. RFD_ERROR_ESTIMATION says which samples are missing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_statistics_fit(
    statistics: *const rfd_statistics,
    result: *mut rfd_fit,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (statistics, out) = unsafe { (shared(statistics, "statistics")?, OutStruct::new(result)?) };
        let found = fit(&statistics.snapshot()?)?;
        out.set(&found.into());
        Ok(())
    })
}

/// The statistics as JSON text, for a file or another process. rfd_statistics_from_json restores them bit for
/// bit.
///
/// No pointer may be null. On success `*json` is a new buffer that the caller frees with rfd_buffer_destroy.
/// One thread at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_statistics_to_json(
    statistics: *const rfd_statistics,
    json: *mut *mut rfd_buffer,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (statistics, out) = unsafe { (shared(statistics, "statistics")?, Out::new(json, "json")?) };
        let text = lock(&statistics.inner, "statistics")?.to_json();
        out.set_handle(rfd_buffer::new(text));
        Ok(())
    })
}

/// Reads what rfd_statistics_to_json wrote: `size` bytes at `json`.
///
/// No pointer may be null; the text is not kept. On success `*statistics` is a new handle that the caller
/// frees with rfd_statistics_destroy. Any thread. RFD_ERROR_FILE when it is something else, of another
/// version, or inconsistent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rfd_statistics_from_json(
    json: *const c_char,
    size: usize,
    statistics: *mut *mut rfd_statistics,
) -> rfd_status {
    guard(|| {
        // SAFETY: the header says what these may point to.
        let (json, out) = unsafe { (utf8(json, size, "json")?, Out::new(statistics, "statistics")?) };
        out.set_handle(rfd_statistics::new(SampleStatistics::from_json(json)?));
        Ok(())
    })
}
