//! How many threads the CPU's steps use, and which instructions.

use crate::backend::cpu;

/// Threads that a step on the CPU works on large tensors with, the calling one among them: what
/// [`set_threads`] said last; else what the environment variable RAYON_NUM_THREADS says, if that is a number
/// above 0; else as many as there are processors; 1024 at most. Results do not depend on it.
pub fn threads() -> usize {
    cpu::threads()
}

/// Sets [`threads`] from the next step on, for the whole process; 0 brings back the default. With 1 no thread
/// is started, but those that have been stay. A step goes on with fewer where the system starts no more, and
/// says so on the standard error stream, once.
///
/// The threads start with the first step over 131,072 elements or more, and end with the last
/// [`Optimizer`](crate::optimizer::Optimizer). A process that is forked makes its own.
pub fn set_threads(count: usize) {
    cpu::set_threads(count);
}

/// The vector instructions that steps on the CPU use, in words; those of the architecture where it has no
/// wider ones that the library knows. Results do not depend on it.
pub fn instructions() -> &'static str {
    cpu::instructions()
}
