//! Vector instructions. What is worked on are arrays of [`LANES`] elements; the functions below are done on
//! all lanes at once. A processor runs the widest instructions that it has. They change no result: every
//! operation stays a separate IEEE one, in the same order.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::FloatEnvironment;

/// Elements that are worked on together.
pub(super) const LANES: usize = 16;

/// Leaves that as many columns make ([`super::sum`]).
pub(super) const LEAVES_OF_LANES: usize = LANES / 4;

macro_rules! each_lane {
    ($($name:ident: $t:ty, $operation:tt;)*) => {$(
        #[inline(always)]
        fn $name(self, x: [$t; LANES], y: [$t; LANES]) -> [$t; LANES] {
            std::array::from_fn(|i| x[i] $operation y[i])
        }
    )*};
}

/// A set of instructions. The functions have a form for all machines, which the compiler finds vectors for as
/// well as it can.
pub(super) trait Instructions: Copy {
    /// For those who ask what steps run with.
    const NAME: &'static str = std::env::consts::ARCH;

    each_lane! {
        add_f32: f32, +;
        sub_f32: f32, -;
        mul_f32: f32, *;
        add_f64: f64, +;
        sub_f64: f64, -;
        mul_f64: f64, *;
    }

    #[inline(always)]
    fn widen_f32(self, x: [f32; LANES]) -> [f64; LANES] {
        x.map(f64::from)
    }

    /// Rounds to nearest, as all that follow.
    #[inline(always)]
    fn narrow_f64(self, x: [f64; LANES]) -> [f32; LANES] {
        x.map(|x| x as f32)
    }

    #[inline(always)]
    fn widen_f16(self, x: [f16; LANES]) -> [f32; LANES] {
        let mut wide = [0.0; LANES];
        x.convert_to_f32_slice(&mut wide);
        wide
    }

    #[inline(always)]
    fn narrow_f32_to_f16(self, x: [f32; LANES]) -> [f16; LANES] {
        let mut narrow = [f16::ZERO; LANES];
        narrow.convert_from_f32_slice(&x);
        narrow
    }

    /// bf16 is the upper half of an f32.
    #[inline(always)]
    fn widen_bf16(self, x: [bf16; LANES]) -> [f32; LANES] {
        x.map(|x| f32::from_bits(u32::from(x.to_bits()) << 16))
    }

    /// Ties to even; a NaN becomes a quiet one.
    #[inline(always)]
    fn narrow_f32_to_bf16(self, x: [f32; LANES]) -> [bf16; LANES] {
        x.map(|x| {
            let bits = x.to_bits();
            let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
            let quiet = (bits >> 16) | 0x40;
            bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
        })
    }

    /// The leaves that neighbouring columns make.
    #[inline(always)]
    fn leaves(self, c: [f64; LANES]) -> [f64; LEAVES_OF_LANES] {
        std::array::from_fn(|l| (c[4 * l] + c[4 * l + 2]) + (c[4 * l + 1] + c[4 * l + 3]))
    }
}

/// Work to be compiled for each instruction set. `run` and what it calls are inlined.
pub(super) trait Work {
    type Output;

    fn run<I: Instructions>(self, instructions: I) -> Self::Output;
}

/// Runs a piece of work in IEEE mode and with the widest vectors that this processor has.
pub(super) fn run<W: Work>(work: W) -> W::Output {
    let _ieee = FloatEnvironment::ieee();
    #[cfg(target_arch = "x86_64")]
    if x86::has_avx2() {
        // SAFETY: `has_avx2` found all features that this function is compiled with.
        return unsafe { x86::with_avx2(work) };
    }
    work.run(Any)
}

/// The name of what [`run`] chooses.
pub(crate) fn instructions() -> &'static str {
    struct Name;
    impl Work for Name {
        type Output = &'static str;

        fn run<I: Instructions>(self, _: I) -> &'static str {
            I::NAME
        }
    }
    run(Name)
}

/// What all processors of an architecture have.
#[derive(Clone, Copy)]
pub(super) struct Any;

impl Instructions for Any {}

/// x86-64-v3, with 256 bits. 512 bits were no faster: where memory is not the limit, conversions are, and
/// the compiler's vectors of addresses cost more than they save.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::mem::transmute;

    use half::{bf16, f16};

    use super::{Instructions, LANES, LEAVES_OF_LANES, Work};

    /// Whether this processor has all of it. The standard library asks it once.
    pub(super) fn has_avx2() -> bool {
        use std::arch::is_x86_feature_detected as has;
        has!("avx2") && has!("f16c") && has!("bmi1") && has!("bmi2") && has!("lzcnt")
    }

    #[target_feature(enable = "avx2,f16c,bmi1,bmi2,lzcnt")]
    pub(super) fn with_avx2<W: Work>(work: W) -> W::Output {
        work.run(Avx2(()))
    }

    /// Only [`with_avx2`] makes one.
    #[derive(Clone, Copy)]
    struct Avx2(());

    macro_rules! vectors {
        ($($name:ident: $t:ty, $vector:ty, $count:literal, $operation:ident, $($part:literal)*;)*) => {$(
            #[inline(always)]
            fn $name(self, x: [$t; LANES], y: [$t; LANES]) -> [$t; LANES] {
                // SAFETY: an `Avx2` is there only where the instructions are. The compiler checks that arrays
                // and vectors are equally large; any bits are values of both.
                unsafe {
                    let x = transmute::<[$t; LANES], [$vector; $count]>(x);
                    let y = transmute::<[$t; LANES], [$vector; $count]>(y);
                    transmute([$($operation(x[$part], y[$part])),*])
                }
            }
        )*};
    }

    impl Instructions for Avx2 {
        const NAME: &'static str = "x86-64-v3 (AVX2)";

        vectors! {
            add_f32: f32, __m256, 2, _mm256_add_ps, 0 1;
            sub_f32: f32, __m256, 2, _mm256_sub_ps, 0 1;
            mul_f32: f32, __m256, 2, _mm256_mul_ps, 0 1;
            add_f64: f64, __m256d, 4, _mm256_add_pd, 0 1 2 3;
            sub_f64: f64, __m256d, 4, _mm256_sub_pd, 0 1 2 3;
            mul_f64: f64, __m256d, 4, _mm256_mul_pd, 0 1 2 3;
        }

        #[inline(always)]
        fn widen_f32(self, x: [f32; LANES]) -> [f64; LANES] {
            // SAFETY: as in `vectors`.
            unsafe {
                let [a, b, c, d]: [__m128; 4] = transmute(x);
                transmute([_mm256_cvtps_pd(a), _mm256_cvtps_pd(b), _mm256_cvtps_pd(c), _mm256_cvtps_pd(d)])
            }
        }

        #[inline(always)]
        fn narrow_f64(self, x: [f64; LANES]) -> [f32; LANES] {
            // SAFETY: as in `vectors`.
            unsafe {
                let [a, b, c, d]: [__m256d; 4] = transmute(x);
                transmute([_mm256_cvtpd_ps(a), _mm256_cvtpd_ps(b), _mm256_cvtpd_ps(c), _mm256_cvtpd_ps(d)])
            }
        }

        #[inline(always)]
        fn widen_f16(self, x: [f16; LANES]) -> [f32; LANES] {
            // SAFETY: as in `vectors`.
            unsafe {
                let [a, b]: [__m128i; 2] = transmute(x);
                transmute([_mm256_cvtph_ps(a), _mm256_cvtph_ps(b)])
            }
        }

        #[inline(always)]
        fn narrow_f32_to_f16(self, x: [f32; LANES]) -> [f16; LANES] {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
            // SAFETY: as in `vectors`.
            unsafe {
                let [a, b]: [__m256; 2] = transmute(x);
                transmute([_mm256_cvtps_ph::<NEAREST>(a), _mm256_cvtps_ph::<NEAREST>(b)])
            }
        }

        #[inline(always)]
        fn widen_bf16(self, x: [bf16; LANES]) -> [f32; LANES] {
            // SAFETY: as in `vectors`.
            unsafe {
                let [a, b]: [__m128i; 2] = transmute(x);
                let (a, b) = (_mm256_cvtepu16_epi32(a), _mm256_cvtepu16_epi32(b));
                transmute([_mm256_slli_epi32::<16>(a), _mm256_slli_epi32::<16>(b)])
            }
        }

        #[inline(always)]
        fn narrow_f32_to_bf16(self, x: [f32; LANES]) -> [bf16; LANES] {
            // SAFETY: as in `vectors`.
            unsafe {
                let [a, b]: [__m256; 2] = transmute(x);
                let packed = _mm256_packus_epi32(upper_half(a), upper_half(b));
                transmute(_mm256_permute4x64_epi64::<0b11_01_10_00>(packed))
            }
        }

        #[inline(always)]
        fn leaves(self, c: [f64; LANES]) -> [f64; LEAVES_OF_LANES] {
            // SAFETY: as in `vectors`.
            unsafe {
                let [c0, c1, c2, c3]: [__m256d; 4] = transmute(c);
                // Of two leaves, beside each other: c0 + c2 and c1 + c3.
                let a = _mm256_add_pd(
                    _mm256_permute2f128_pd::<0x20>(c0, c1),
                    _mm256_permute2f128_pd::<0x31>(c0, c1),
                );
                let b = _mm256_add_pd(
                    _mm256_permute2f128_pd::<0x20>(c2, c3),
                    _mm256_permute2f128_pd::<0x31>(c2, c3),
                );
                // Leaves 0, 2, 1, 3.
                transmute(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_hadd_pd(a, b)))
            }
        }
    }

    /// The bits of the bf16 next to each lane, in 32 bits.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[inline(always)]
    unsafe fn upper_half(x: __m256) -> __m256i {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            let bits = _mm256_castps_si256(x);
            let upper = _mm256_srli_epi32::<16>(bits);
            let odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
            let raised = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
            let rounded = _mm256_srli_epi32::<16>(raised);
            let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
            let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            _mm256_blendv_epi8(rounded, quiet, is_nan)
        }
    }
}
