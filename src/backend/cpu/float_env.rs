//! The processor's floating-point mode, set to IEEE defaults for the time of a computation.
//!
//! Host programs may have switched on flush-to-zero or another rounding mode, per thread, and threads inherit
//! it from the thread that made them. Results must not depend on that.

/// Holds the IEEE default mode on this thread until dropped, then restores what was set before.
pub(crate) struct FloatEnvironment {
    previous: Mode,
}

impl FloatEnvironment {
    pub(crate) fn ieee() -> Self {
        let previous = read();
        if previous & MODE_BITS != DEFAULT {
            write((previous & !MODE_BITS) | DEFAULT);
        }
        Self { previous }
    }
}

impl Drop for FloatEnvironment {
    fn drop(&mut self) {
        if self.previous & MODE_BITS != DEFAULT {
            write(self.previous);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use std::arch::asm;

    pub(super) type Mode = u32;
    /// DAZ (6), exception masks (7 to 12), rounding (13, 14), FTZ (15); the sticky flags (0 to 5) are left
    /// alone.
    pub(super) const MODE_BITS: Mode = 0xFFC0;
    /// All exceptions masked, round to nearest, no flush to zero.
    pub(super) const DEFAULT: Mode = 0x1F80;

    pub(super) fn read() -> Mode {
        let mut mode: Mode = 0;
        // SAFETY: stmxcsr writes 4 bytes to the given address, which is that of a live, aligned u32.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut mode, options(nostack)) };
        mode
    }

    pub(super) fn write(mode: Mode) {
        // SAFETY: ldmxcsr reads 4 bytes from a live, aligned u32. `mode` comes from `read` with only defined
        // bits changed, so no reserved bit is set. Code compiled by Rust assumes the default mode, which is
        // the one that is set; the caller's own mode comes back before its code runs again.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack)) };
    }
}

#[cfg(target_arch = "aarch64")]
mod arch {
    use std::arch::asm;

    pub(super) type Mode = u64;
    /// FIZ, AH, NEP (0 to 2), trap enables (8 to 12, 15), FZ16 (19), rounding (22, 23), FZ (24).
    pub(super) const MODE_BITS: Mode = 0x01C8_9F07;
    pub(super) const DEFAULT: Mode = 0;

    pub(super) fn read() -> Mode {
        let mode: Mode;
        // SAFETY: reading FPCR into a register has no effect beside that.
        unsafe { asm!("mrs {}, fpcr", out(reg) mode, options(nomem, nostack)) };
        mode
    }

    pub(super) fn write(mode: Mode) {
        // SAFETY: `mode` comes from `read` with mode bits cleared, which is the default that compiled Rust
        // assumes; the caller's own mode comes back before its code runs again.
        unsafe { asm!("msr fpcr, {}", in(reg) mode, options(nomem, nostack)) };
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod arch {
    pub(super) type Mode = u32;
    pub(super) const MODE_BITS: Mode = 0;
    pub(super) const DEFAULT: Mode = 0;

    pub(super) fn read() -> Mode {
        0
    }

    pub(super) fn write(_: Mode) {}
}

use arch::{DEFAULT, MODE_BITS, Mode, read, write};

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use std::hint::black_box;

    #[test]
    fn flush_to_zero_is_lifted_and_restored() {
        let before = read();
        write(before | 0x8040);
        let flushed = black_box(f32::MIN_POSITIVE) * black_box(0.5);
        let (inside, after) = {
            let guard = FloatEnvironment::ieee();
            let inside = black_box(f32::MIN_POSITIVE) * black_box(0.5);
            drop(guard);
            (inside, read())
        };
        write(before);
        assert_eq!(flushed, 0.0, "the test's own flush to zero has no effect");
        assert_eq!(inside, f32::MIN_POSITIVE / 2.0);
        assert_eq!(after & MODE_BITS, (before | 0x8040) & MODE_BITS);
    }
}
