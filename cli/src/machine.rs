//! What the processor offers.

/// Threads that steps and training use; the environment variable RAYON_NUM_THREADS sets them.
pub fn threads() -> usize {
    rfdescent::threads()
}

/// The widest vector instructions among those that the CPU backend is compiled for.
pub fn instructions() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        if has!("avx512f") && has!("avx512bw") && has!("avx512cd") && has!("avx512dq") && has!("avx512vl") {
            "x86-64-v4 (AVX-512)"
        } else if has!("avx2") && has!("f16c") {
            "x86-64-v3 (AVX2)"
        } else {
            "x86-64 (SSE2)"
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        std::env::consts::ARCH
    }
}
