//! The threads that large tensors are worked on with.

use super::status::{Failure, Result, guard, rfd_status};

/// More would be a mistake, and start slowly.
const MOST: u32 = 1024;

/// Sets how many threads the library works on large tensors with from the next step on, the calling one among
/// them; 0 brings back the default, as many as there are processors, or as the environment variable
/// RAYON_NUM_THREADS says. Results do not depend on it.
///
/// For the whole process. With 1 no thread is started, but those that have been stay; else they start with
/// the first large step and end when the last optimizer is destroyed. Where the system starts fewer, steps go
/// on with those and say so on the standard error stream, once. A process that is forked starts its own. Any
/// thread.
/// RFD_ERROR_INVALID_ARGUMENT when `count` is more than 1024.
#[unsafe(no_mangle)]
pub extern "C" fn rfd_set_threads(count: u32) -> rfd_status {
    guard(|| set(count))
}

fn set(count: u32) -> Result<()> {
    if count > MOST {
        return Err(Failure::invalid(
            "count",
            count,
            &format!("must be at most {MOST}, or 0 for the default"),
        ));
    }
    rfdescent::set_threads(count as usize);
    Ok(())
}
