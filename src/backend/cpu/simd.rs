//! Vector instructions. What is worked on are arrays of [`LANES`] elements; the functions below are done on
//! all lanes at once. A processor runs the widest instructions that it has. They change no result: every
//! operation stays a separate IEEE one, in the same order, but for products that are exact and can be fused
//! with a sum.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Elements that are worked on together.
pub(super) const LANES: usize = 16;

/// Leaves that as many columns make ([`super::sum`]).
pub(super) const LEAVES_OF_LANES: usize = LANES / 4;

/// Counters that random bits are drawn for together ([`super::rounding`]), with 8 elements each.
pub(super) const COUNTERS: usize = 8;

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

    /// Says that what lies there is going to be read; any address will do.
    #[inline(always)]
    fn prefetch<T>(self, _: *const T) {}

    /// `sum` and the squares of `x`.
    #[inline(always)]
    fn add_squares(self, sum: [f64; LANES], x: [f64; LANES]) -> [f64; LANES] {
        self.add_f64(sum, self.mul_f64(x, x))
    }

    /// The same where squares are exact: fused or not, each result is rounded once.
    #[inline(always)]
    fn add_exact_squares(self, sum: [f64; LANES], x: [f64; LANES]) -> [f64; LANES] {
        self.add_squares(sum, x)
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

    /// Rounds to one of the two neighbouring bf16 by as many random bits.
    #[inline(always)]
    fn round_to_bf16(self, x: [f32; LANES], random: [u16; LANES]) -> [bf16; LANES] {
        std::array::from_fn(|i| round_to_bf16(x[i], random[i]))
    }

    /// Rounds to one of the two neighbouring f16 by as many random bits.
    #[inline(always)]
    fn round_to_f16(self, x: [f32; LANES], random: [u16; LANES]) -> [f16; LANES] {
        std::array::from_fn(|i| round_to_f16(x[i], random[i]))
    }

    /// Products of the lower halves with a factor of 32 bits.
    #[inline(always)]
    fn products(self, x: [u64; COUNTERS], factor: u32) -> [u64; COUNTERS] {
        x.map(|x| (x & 0xFFFF_FFFF) * u64::from(factor))
    }

    /// The upper halves of `x`, `y` and a key in exclusive or.
    #[inline(always)]
    fn mix(self, x: [u64; COUNTERS], y: [u64; COUNTERS], key: u32) -> [u64; COUNTERS] {
        std::array::from_fn(|i| (x[i] >> 32) ^ y[i] ^ u64::from(key))
    }

    /// The bits of each counter's 8 elements: the lower halves of its four words, the lower half of a word
    /// first.
    #[inline(always)]
    fn random_bits(self, words: [[u64; COUNTERS]; 4]) -> [[u16; 8]; COUNTERS] {
        std::array::from_fn(|i| std::array::from_fn(|k| (words[k / 2][i] >> (16 * (k % 2))) as u16))
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

/// One element of [`Instructions::round_to_bf16`].
#[inline(always)]
fn round_to_bf16(x: f32, random: u16) -> bf16 {
    let bits = x.to_bits();
    // Adding r·2⁻¹⁶ units in the last place before truncation carries with the probability of the fraction.
    let rounded = bits.wrapping_add(u32::from(random)) >> 16;
    let special = (bits >> 16) | if x.is_nan() { 0x40 } else { 0 };
    bf16::from_bits(if x.is_finite() { rounded } else { special } as u16)
}

/// One element of [`Instructions::round_to_f16`].
#[inline(always)]
fn round_to_f16(x: f32, random: u16) -> f16 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    if magnitude >= BEYOND_F16 {
        return f16::from_f32(x);
    }
    let rounded = if magnitude < SMALLEST_F16 {
        // Subnormal: a multiple of 2⁻²⁴. The product is exact, its fraction is compared with r/2¹⁶.
        let scaled = f32::from_bits(magnitude) * F16_UNITS;
        let below = scaled as u32;
        below + u32::from(f32::from(random) < (scaled - below as f32) * 65_536.0)
    } else {
        // 13 of the 23 fraction bits go; rebias the exponent from 127 to 15.
        ((magnitude + u32::from(random >> 3)) >> 13) - F16_BIAS
    };
    f16::from_bits((bits >> 16) as u16 & 0x8000 | rounded as u16)
}

/// The bits of 2⁻¹⁴, the smallest normal f16.
const SMALLEST_F16: u32 = (127 - 14) << 23;
/// Those of 65536: what is as large, infinite or NaN converts to f16 as usual.
const BEYOND_F16: u32 = (127 + 16) << 23;
/// Subnormal f16 in 1.
const F16_UNITS: f32 = 16_777_216.0;
/// What the exponents of f32 and f16 differ by, where it stands in an f16.
const F16_BIAS: u32 = (127 - 15) << 10;

/// Which vectors this processor has.
#[derive(Clone, Copy)]
pub(super) struct Processor {
    #[cfg(target_arch = "x86_64")]
    has_avx2: bool,
}

impl Processor {
    #[inline]
    pub(super) fn new() -> Self {
        Self {
            #[cfg(target_arch = "x86_64")]
            has_avx2: x86::has_avx2(),
        }
    }

    /// Runs a piece of work with the widest of them.
    #[inline]
    pub(super) fn run<W: Work>(self, work: W) -> W::Output {
        #[cfg(target_arch = "x86_64")]
        if self.has_avx2 {
            // SAFETY: `new`, which alone makes one, found all features that this function is compiled with.
            return unsafe { x86::with_avx2(work) };
        }
        with_any(work)
    }
}

/// Apart from who calls it, whose frame would else be as large.
#[inline(never)]
fn with_any<W: Work>(work: W) -> W::Output {
    work.run(Any)
}

/// Runs a piece of work with the widest vectors that this processor has.
pub(super) fn run<W: Work>(work: W) -> W::Output {
    Processor::new().run(work)
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

/// x86-64-v3, with 256 bits. 512 bits were slower for sums of f32, faster for random bits and for updates of
/// bf16 (docs/performance.md).
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::mem::transmute;
    use std::sync::OnceLock;

    use half::{bf16, f16};

    use super::{
        BEYOND_F16, COUNTERS, F16_BIAS, F16_UNITS, Instructions, LANES, LEAVES_OF_LANES, SMALLEST_F16, Work,
        round_to_bf16, round_to_f16,
    };

    /// Whether this processor has all of it.
    pub(super) fn has_avx2() -> bool {
        use std::arch::is_x86_feature_detected as has;
        static HAS: OnceLock<bool> = OnceLock::new();
        *HAS.get_or_init(|| {
            has!("avx2") && has!("fma") && has!("f16c") && has!("bmi1") && has!("bmi2") && has!("lzcnt")
        })
    }

    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt")]
    #[inline(never)]
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
        fn prefetch<T>(self, address: *const T) {
            // SAFETY: all x86-64 have it, and it never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
        }

        #[inline(always)]
        fn add_exact_squares(self, sum: [f64; LANES], x: [f64; LANES]) -> [f64; LANES] {
            // SAFETY: as in `vectors`.
            unsafe {
                let x = transmute::<[f64; LANES], [__m256d; 4]>(x);
                let sum = transmute::<[f64; LANES], [__m256d; 4]>(sum);
                transmute([
                    _mm256_fmadd_pd(x[0], x[0], sum[0]),
                    _mm256_fmadd_pd(x[1], x[1], sum[1]),
                    _mm256_fmadd_pd(x[2], x[2], sum[2]),
                    _mm256_fmadd_pd(x[3], x[3], sum[3]),
                ])
            }
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
                transmute(packed(upper_half(a), upper_half(b)))
            }
        }

        #[inline(always)]
        fn round_to_bf16(self, x: [f32; LANES], random: [u16; LANES]) -> [bf16; LANES] {
            // SAFETY: as in `vectors`.
            unsafe {
                let [a, b]: [__m256; 2] = transmute(x);
                let zero = _mm256_setzero_ps();
                // NaN where a factor is infinite or NaN.
                let (zero_a, zero_b) = (_mm256_mul_ps(a, zero), _mm256_mul_ps(b, zero));
                if _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(zero_a, zero_b)) != 0 {
                    return each(x, random, round_to_bf16);
                }
                let [low, high]: [__m128i; 2] = transmute(random);
                let a = _mm256_add_epi32(_mm256_castps_si256(a), _mm256_cvtepu16_epi32(low));
                let b = _mm256_add_epi32(_mm256_castps_si256(b), _mm256_cvtepu16_epi32(high));
                transmute(packed(_mm256_srli_epi32::<16>(a), _mm256_srli_epi32::<16>(b)))
            }
        }

        #[inline(always)]
        fn round_to_f16(self, x: [f32; LANES], random: [u16; LANES]) -> [f16; LANES] {
            // SAFETY: as in `vectors`.
            unsafe {
                let [a, b]: [__m256i; 2] = transmute(x);
                let all = _mm256_set1_epi32(0x7FFF_FFFF);
                let beyond = _mm256_set1_epi32(BEYOND_F16 as i32 - 1);
                let (magnitude_a, magnitude_b) = (_mm256_and_si256(a, all), _mm256_and_si256(b, all));
                let is_beyond = _mm256_cmpgt_epi32(_mm256_max_epi32(magnitude_a, magnitude_b), beyond);
                if _mm256_movemask_epi8(is_beyond) != 0 {
                    return each(x, random, round_to_f16);
                }
                let [low, high]: [__m128i; 2] = transmute(random);
                let a = rounded_f16(a, magnitude_a, _mm256_cvtepu16_epi32(low));
                let b = rounded_f16(b, magnitude_b, _mm256_cvtepu16_epi32(high));
                transmute(packed(a, b))
            }
        }

        #[inline(always)]
        fn products(self, x: [u64; COUNTERS], factor: u32) -> [u64; COUNTERS] {
            // SAFETY: as in `vectors`.
            unsafe {
                let [a, b]: [__m256i; 2] = transmute(x);
                let factor = _mm256_set1_epi64x(i64::from(factor));
                transmute([_mm256_mul_epu32(a, factor), _mm256_mul_epu32(b, factor)])
            }
        }

        #[inline(always)]
        fn mix(self, x: [u64; COUNTERS], y: [u64; COUNTERS], key: u32) -> [u64; COUNTERS] {
            // SAFETY: as in `vectors`.
            unsafe {
                let [a, b]: [__m256i; 2] = transmute(x);
                let [c, d]: [__m256i; 2] = transmute(y);
                let key = _mm256_set1_epi64x(i64::from(key));
                let mix = |x, y| _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64::<32>(x), y), key);
                transmute([mix(a, c), mix(b, d)])
            }
        }

        #[inline(always)]
        fn random_bits(self, words: [[u64; COUNTERS]; 4]) -> [[u16; 8]; COUNTERS] {
            // SAFETY: as in `vectors`.
            unsafe {
                let words: [[__m256i; 2]; 4] = transmute(words);
                let mut bits = [[_mm256_setzero_si256(); 2]; 2];
                for (k, bits) in bits.iter_mut().enumerate() {
                    let joined = |x, y| _mm256_blend_epi32::<0b10_10_10_10>(x, _mm256_slli_epi64::<32>(y));
                    let (low, high) = (joined(words[0][k], words[1][k]), joined(words[2][k], words[3][k]));
                    // Of counters 0 and 2, and of 1 and 3.
                    let (even, odd) = (_mm256_unpacklo_epi64(low, high), _mm256_unpackhi_epi64(low, high));
                    *bits = [
                        _mm256_permute2x128_si256::<0x20>(even, odd),
                        _mm256_permute2x128_si256::<0x31>(even, odd),
                    ];
                }
                transmute(bits)
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

    /// What has no vector form, and is rare: one element after the other.
    #[cold]
    #[inline(never)]
    fn each<H>(x: [f32; LANES], random: [u16; LANES], one: impl Fn(f32, u16) -> H) -> [H; LANES] {
        std::array::from_fn(|i| one(x[i], random[i]))
    }

    /// The lower halves of 32 bits, which are all that is there.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[inline(always)]
    unsafe fn packed(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: the caller vouches for the instructions.
        unsafe { _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(a, b)) }
    }

    /// The f16 that each lane, of this magnitude below [`BEYOND_F16`], is rounded to by random bits, in 32
    /// bits.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[inline(always)]
    unsafe fn rounded_f16(bits: __m256i, magnitude: __m256i, random: __m256i) -> __m256i {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            let sign = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(0x8000));
            let raised = _mm256_add_epi32(magnitude, _mm256_srli_epi32::<3>(random));
            let bias = _mm256_set1_epi32(F16_BIAS as i32);
            let mut rounded = _mm256_sub_epi32(_mm256_srli_epi32::<13>(raised), bias);
            let is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(SMALLEST_F16 as i32), magnitude);
            if _mm256_movemask_epi8(is_small) != 0 {
                let scaled = _mm256_mul_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(F16_UNITS));
                // Beyond the range of integers in lanes that are not small.
                let below = _mm256_cvttps_epi32(scaled);
                let fraction = _mm256_sub_ps(scaled, _mm256_cvtepi32_ps(below));
                let fraction = _mm256_mul_ps(fraction, _mm256_set1_ps(65_536.0));
                let carries = _mm256_cmp_ps::<_CMP_LT_OQ>(_mm256_cvtepi32_ps(random), fraction);
                // A carry is −1.
                let small = _mm256_sub_epi32(below, _mm256_castps_si256(carries));
                rounded = _mm256_blendv_epi8(rounded, small, is_small);
            }
            _mm256_or_si256(sign, rounded)
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
