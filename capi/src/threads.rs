//! The threads that large tensors are worked on with.

use super::status::{Failure, Result, guard, rfd_status};

/// More would be a mistake, and start slowly.
const MOST: u32 = 1024;

/// Sets how many threads of its own the library works on large tensors with; without it they are as many as
/// there are processors, or as the environment variable RAYON_NUM_THREADS says. Results do not depend on it.
///
/// They are started here, once for the process: call it before the first step. Any thread.
/// RFD_ERROR_INVALID_ARGUMENT when `count` is 0 or more than 1024, when the system refuses so many threads,
/// or when another number of them is running already; nothing has changed then.
#[unsafe(no_mangle)]
pub extern "C" fn rfd_set_threads(count: u32) -> rfd_status {
    guard(|| start(count))
}

fn start(count: u32) -> Result<()> {
    let invalid = |expected: &str| Failure::invalid("count", count, expected);
    if !(1..=MOST).contains(&count) {
        return Err(invalid(&format!("must be at least 1 and at most {MOST}")));
    }
    let threads = || rayon::ThreadPoolBuilder::new().num_threads(count as usize);
    // The global pool gets one attempt only, so that these threads are tried out first.
    if let Err(error) = threads().build() {
        return Err(invalid(&format!("the system can't start so many threads ({error}); take fewer")));
    }
    if threads().build_global().is_err() && rayon::current_num_threads() != count as usize {
        return Err(invalid(&format!(
            "{} threads are running already; call rfd_set_threads before the first step, or set RAYON_NUM_THREADS when \
             the program is started",
            rayon::current_num_threads()
        )));
    }
    Ok(())
}
