//! The threads that large tensors are worked on with.
//!
//! The calling thread always takes part; others come from a pool, which the first large step makes and the
//! last optimizer takes down. A thread that does not come in time is not waited for: what is to be done lies
//! in one list, from which each takes the next piece. A forked child inherits a pool without threads; it
//! forgets that and makes its own, unless another thread was making or ending one at the fork: then it goes
//! on with one thread. Which process it is tells its number, so that a child that has its parent's, as the
//! first one of a process namespace may, must not step; and a child of a program with optimizers keeps their
//! leases, so that its own pool lasts until it ends.

use std::any::Any;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::JoinHandle;

use super::FloatEnvironment;
use super::simd::Processor;

/// More would be a mistake, and take what the user may start.
const MOST: usize = 1024;

/// What [`set_count`] was given last; 0 before.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Of all optimizers together.
static LEASES: AtomicUsize = AtomicUsize::new(0);
static POOL: Mutex<Option<Arc<Pool>>> = Mutex::new(None);

/// Threads that work on large tensors, the calling one among them: what [`set_count`] said last; else the
/// environment variable RAYON_NUM_THREADS, read once; else one for each processor; 1024 at most.
pub(crate) fn count() -> usize {
    static DEFAULT: OnceLock<usize> = OnceLock::new();
    let count = match COUNT.load(Ordering::Relaxed) {
        0 => *DEFAULT.get_or_init(|| {
            let given = std::env::var("RAYON_NUM_THREADS").ok().and_then(|text| text.parse().ok());
            let given = given.filter(|&count: &usize| count > 0);
            given.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
        }),
        count => count,
    };
    count.min(MOST)
}

/// Sets [`count`] from the next step on, for the whole process; 0 brings back the default.
pub(crate) fn set_count(count: usize) {
    COUNT.store(count, Ordering::Relaxed);
}

/// Keeps the pool's threads. They end with the last of these, so that no thread is left in a library that is
/// going to be unloaded.
#[derive(Debug)]
pub(crate) struct Lease(());

impl Lease {
    pub(crate) fn new() -> Self {
        LEASES.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Clone for Lease {
    fn clone(&self) -> Self {
        Self::new()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if LEASES.fetch_sub(1, Ordering::AcqRel) == 1 {
            // Dropped without the lock: it waits for the threads.
            let _pool = lock_pool().and_then(|mut pool| pool.take());
        }
    }
}

/// Work that several threads can share.
pub(super) trait Task: Send + Sized {
    /// Takes off what is to be done next of it; `None` where all that is left is little enough for one piece.
    fn split_off(&mut self) -> Option<Self>;

    /// Does it.
    fn run(&mut self, processor: Processor);
}

/// Does all tasks piece by piece, in IEEE mode: on this thread alone, or on all where it is worth while.
pub(super) fn for_each<T: Task>(worth_while: bool, tasks: impl Iterator<Item = T> + Send) {
    let _ieee = FloatEnvironment::ieee();
    let processor = Processor::new();
    let threads = if worth_while { count() } else { 1 };
    let Some(pool) = (threads > 1).then(|| pool(threads)).flatten() else {
        // Long lists of small tasks are passed through faster like this than piece by piece.
        return tasks.for_each(|mut task| {
            while let Some(mut piece) = task.split_off() {
                piece.run(processor);
            }
            task.run(processor);
        });
    };
    let pieces = Mutex::new(Pieces { tasks, begun: None });
    pool.run(&|| {
        let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        while let Some(mut piece) = next() {
            piece.run(processor);
        }
    });
}

/// The pieces of all tasks.
struct Pieces<T: Iterator> {
    tasks: T,
    begun: Option<T::Item>,
}

impl<T: Iterator<Item: Task>> Iterator for Pieces<T> {
    type Item = T::Item;

    fn next(&mut self) -> Option<T::Item> {
        let mut task = self.begun.take().or_else(|| self.tasks.next())?;
        match task.split_off() {
            None => Some(task),
            Some(piece) => {
                self.begun = Some(task);
                Some(piece)
            }
        }
    }
}

/// The lock of [`POOL`]; `None` where it can't be had in a short time: a process that was forked while a
/// thread held it never gets it.
fn lock_pool() -> Option<MutexGuard<'static, Option<Arc<Pool>>>> {
    for _ in 0..1000 {
        match POOL.try_lock() {
            Ok(pool) => return Some(pool),
            Err(TryLockError::Poisoned(pool)) => return Some(pool.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
    None
}

/// The pool with so many threads, the calling one among them; `None` where there is none to be had.
fn pool(threads: usize) -> Option<Arc<Pool>> {
    let mut current = lock_pool()?;
    let is_right = |pool: &&Arc<Pool>| pool.wanted == threads && pool.process == std::process::id();
    if let Some(pool) = current.as_ref().filter(is_right) {
        return Some(Arc::clone(pool));
    }
    let pool = Arc::new(Pool::new(threads));
    let old = current.replace(Arc::clone(&pool));
    drop(current);
    drop(old);
    Some(pool)
}

/// Threads that wait for work.
struct Pool {
    /// That made it: a child of it has the pool, but not the threads.
    process: u32,
    /// As many as it was made for, the caller of [`Pool::run`] among them. Fewer may have started.
    wanted: usize,
    shared: ManuallyDrop<Arc<Shared>>,
    threads: ManuallyDrop<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    jobs: Mutex<Jobs>,
    /// There is a job, or the end has come.
    begin: Condvar,
    /// A helper has left a job.
    end: Condvar,
}

#[derive(Default)]
struct Jobs {
    /// Of callers on different threads.
    list: Vec<Job>,
    next: u64,
    closed: bool,
}

struct Job {
    number: u64,
    /// It lives until the job has left the list.
    work: &'static (dyn Fn() + Sync),
    /// Helpers that may still come.
    vacancies: usize,
    /// Helpers at work.
    helpers: usize,
    panic: Option<Box<dyn Any + Send>>,
}

impl Pool {
    fn new(wanted: usize) -> Self {
        let shared = Arc::<Shared>::default();
        let mut threads = Vec::new();
        for _ in 1..wanted {
            let shared = Arc::clone(&shared);
            match std::thread::Builder::new().name("rfdescent".into()).spawn(move || shared.help()) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    warn(wanted, threads.len() + 1, &error);
                    break;
                }
            }
        }
        Self {
            process: std::process::id(),
            wanted,
            shared: ManuallyDrop::new(shared),
            threads: ManuallyDrop::new(threads),
        }
    }

    /// Calls `work` on this thread, and at the same time on those that are free. Returns once all are done.
    fn run(&self, work: &(dyn Fn() + Sync)) {
        if self.threads.is_empty() {
            return work();
        }
        // SAFETY: helpers find `work` in the list of jobs alone. Before this function returns or unwinds,
        // `leave` has taken the job off the list and waited for the helpers that had found it.
        let work: &'static (dyn Fn() + Sync) = unsafe { std::mem::transmute(work) };
        let number = self.shared.enter(work, self.threads.len());
        let own = catch_unwind(AssertUnwindSafe(work));
        let others = self.shared.leave(number);
        if let Some(panic) = own.err().or(others) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // In a child there is nobody to wait for, and a thread that is no more may hold the lock.
            return;
        }
        self.shared.lock().closed = true;
        self.shared.begin.notify_all();
        // SAFETY: both are dropped here alone, and nothing reads them after that.
        let (threads, _shared) =
            unsafe { (ManuallyDrop::take(&mut self.threads), ManuallyDrop::take(&mut self.shared)) };
        for thread in threads {
            // It catches all panics.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, work: &'static (dyn Fn() + Sync), vacancies: usize) -> u64 {
        let mut jobs = self.lock();
        let number = jobs.next;
        jobs.next += 1;
        jobs.list.push(Job { number, work, vacancies, helpers: 0, panic: None });
        drop(jobs);
        self.begin.notify_all();
        number
    }

    /// Takes a job off the list once its helpers have left it; what one of them panicked with.
    fn leave(&self, number: u64) -> Option<Box<dyn Any + Send>> {
        let mut jobs = self.lock();
        loop {
            let at = jobs.position(number);
            jobs.list[at].vacancies = 0;
            if jobs.list[at].helpers == 0 {
                return jobs.list.swap_remove(at).panic;
            }
            jobs = self.end.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// What a thread of the pool does.
    fn help(&self) {
        let mut jobs = self.lock();
        while !jobs.closed {
            let Some(job) = jobs.list.iter_mut().find(|job| job.vacancies > 0) else {
                jobs = self.begin.wait(jobs).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            job.vacancies -= 1;
            job.helpers += 1;
            let (number, work) = (job.number, job.work);
            drop(jobs);
            let done = catch_unwind(AssertUnwindSafe(|| {
                let _ieee = FloatEnvironment::ieee();
                work();
            }));
            jobs = self.lock();
            let at = jobs.position(number);
            let job = &mut jobs.list[at];
            job.helpers -= 1;
            job.panic = job.panic.take().or(done.err());
            if job.helpers == 0 {
                self.end.notify_all();
            }
        }
    }
}

impl Jobs {
    /// Where a job is that its caller has not taken off the list.
    fn position(&self, number: u64) -> usize {
        self.list.iter().position(|job| job.number == number).expect("a job stays until its helpers left it")
    }
}

/// Says once that there are fewer threads than wanted.
fn warn(wanted: usize, started: usize, error: &std::io::Error) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        // Where that stream is closed nobody is told.
        let _ = writeln!(
            std::io::stderr(),
            "rfdescent: the system starts no more threads ({error}); steps go on with {started} of {wanted}, \
             which changes no result. Set fewer, or RAYON_NUM_THREADS, to be rid of this message"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    fn sum_on(pool: &Pool, items: u64) -> u64 {
        let (next, sum) = (AtomicU64::new(0), AtomicU64::new(0));
        pool.run(&|| {
            loop {
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= items {
                    break;
                }
                sum.fetch_add(item, Ordering::Relaxed);
            }
        });
        sum.into_inner()
    }

    #[test]
    fn every_item_is_worked_on_once_whoever_calls() {
        let pool = Pool::new(4);
        assert_eq!(pool.threads.len(), 3);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    (0..200).for_each(|items| {
                        assert_eq!(sum_on(&pool, items), items * items.saturating_sub(1) / 2)
                    })
                });
            }
        });
        assert!(pool.shared.lock().list.is_empty());
    }

    /// As long as helpers have work, the caller waits: what it lends them must live.
    #[test]
    fn helpers_that_have_begun_are_waited_for() {
        let pool = Pool::new(2);
        let (begun, done) = (AtomicBool::new(false), AtomicBool::new(false));
        let caller = std::thread::current().id();
        pool.run(&|| {
            if std::thread::current().id() == caller {
                while !begun.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
            } else {
                begun.store(true, Ordering::Release);
                std::thread::sleep(std::time::Duration::from_millis(50));
                done.store(true, Ordering::Release);
            }
        });
        assert!(done.into_inner());
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3);
        let panic = catch_unwind(AssertUnwindSafe(|| pool.run(&|| panic!("on purpose")))).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"on purpose"));
        assert_eq!(sum_on(&pool, 100), 4950);
    }

    /// A child that was forked sees another process number than that of its pool.
    #[test]
    fn a_pool_of_another_process_is_left_alone() {
        let pool = Arc::new(Pool::new(2));
        let (shared, started) = (Arc::clone(&pool.shared), std::time::Instant::now());
        let held = shared.lock();
        let mut foreign = Arc::into_inner(pool).unwrap();
        foreign.process = foreign.process.wrapping_add(1);
        // Would wait for ever for the lock that is held.
        drop(foreign);
        assert!(started.elapsed().as_secs() < 10);
        drop(held);
        shared.lock().closed = true;
        shared.begin.notify_all();
    }
}
