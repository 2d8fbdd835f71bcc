//! Stochastic rounding of f32 results to f16 and bf16, the same bits on every backend.
//!
//! Philox4x32-10 (Salmon et al., SC 2011) with key = seed and counter = (⌊element / 8⌋ in two words, tensor,
//! step). One call gives 128 bits: 16 for each of 8 neighbouring elements, the lower half of a word first.

use half::{bf16, f16};

use super::simd::{Instructions, LANES};

/// Which random bits belong to the elements of one piece of a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StochasticBits {
    pub seed: u64,
    /// Number of steps applied before this one, modulo 2³².
    pub step: u32,
    /// Position of the tensor in the optimizer's list.
    pub tensor: u32,
    /// Index of the piece's first element in the whole (unsharded) tensor.
    pub first: u64,
}

impl StochasticBits {
    /// The same tensor and step, `count` elements further on.
    pub(super) fn advanced(self, count: usize) -> Self {
        Self { first: self.first + count as u64, ..self }
    }

    /// Rounds to one of the two neighbouring bf16, the nearer the likelier.
    #[inline(always)]
    pub(super) fn round_bf16<I: Instructions>(&self, _: I, from: &[f32], to: &mut [bf16]) {
        self.round(
            from,
            to,
            #[inline(always)]
            |x, r| {
                let bits = x.to_bits();
                // Adding r·2⁻¹⁶ units in the last place before truncation carries with the probability of the
                // fraction.
                let rounded = bits.wrapping_add(u32::from(r)) >> 16;
                let special = (bits >> 16) | if x.is_nan() { 0x40 } else { 0 };
                bf16::from_bits(if x.is_finite() { rounded } else { special } as u16)
            },
        );
    }

    /// Rounds to one of the two neighbouring f16, the nearer the likelier.
    #[inline(always)]
    pub(super) fn round_f16<I: Instructions>(&self, instructions: I, from: &[f32], to: &mut [f16]) {
        self.round(
            from,
            to,
            #[inline(always)]
            |x, r| {
                let bits = x.to_bits();
                let magnitude = bits & 0x7FFF_FFFF;
                // Subnormal: a multiple of 2⁻²⁴. The product is exact, its fraction is compared with r/2¹⁶.
                // Above, where this does not count, it is cut to what an i32 can hold.
                let scaled = (f32::from_bits(magnitude) * 16_777_216.0).min(2048.0);
                let below = scaled as i32;
                let carries = (r as f32) < (scaled - below as f32) * 65_536.0;
                let subnormal = below as u32 + u32::from(carries);
                // 13 of the 23 fraction bits go; rebias the exponent from 127 to 15.
                let normal = ((magnitude + u32::from(r >> 3)) >> 13).wrapping_sub((127 - 15) << 10);
                let rounded = if magnitude < SMALLEST_NORMAL { subnormal } else { normal };
                f16::from_bits((bits >> 16) as u16 & 0x8000 | rounded as u16)
            },
        );
        for (from, to) in from.chunks(LANES).zip(to.chunks_mut(LANES)) {
            if from.iter().any(|x| x.to_bits() & 0x7FFF_FFFF >= BEYOND) {
                let mut x = [0.0; LANES];
                x[..from.len()].copy_from_slice(from);
                let nearest = instructions.narrow_f32_to_f16(x);
                for ((x, nearest), to) in x.iter().zip(nearest).zip(to) {
                    if x.to_bits() & 0x7FFF_FFFF >= BEYOND {
                        *to = nearest;
                    }
                }
            }
        }
    }

    /// Calls `one` with each element and its 16 random bits.
    #[inline(always)]
    fn round<H>(&self, from: &[f32], to: &mut [H], one: impl Fn(f32, u16) -> H) {
        let mut random = [[0_u16; OCTET]; BATCH];
        let mut start = 0;
        while start < from.len() {
            let first = self.first + start as u64;
            let (octet, lane) = (first / OCTET as u64, (first % OCTET as u64) as usize);
            self.draw(octet, &mut random);
            let random = &random.as_flattened()[lane..];
            let count = random.len().min(from.len() - start);
            let piece = start..start + count;
            for ((&x, &r), out) in from[piece.clone()].iter().zip(random).zip(&mut to[piece]) {
                *out = one(x, r);
            }
            start += count;
        }
    }

    /// The bits of [`BATCH`] octets of elements from the given one on. The loops run over octets, so that
    /// they become vector code.
    #[inline(always)]
    fn draw(&self, octet: u64, random: &mut [[u16; OCTET]; BATCH]) {
        let octets: [u64; BATCH] = std::array::from_fn(|i| octet.wrapping_add(i as u64));
        let counter = [
            octets.map(|octet| octet as u32),
            octets.map(|octet| (octet >> 32) as u32),
            [self.tensor; BATCH],
            [self.step; BATCH],
        ];
        let words = philox(counter, self.seed);
        for (i, bits) in random.iter_mut().enumerate() {
            for (pair, word) in bits.as_chunks_mut::<2>().0.iter_mut().zip(&words) {
                *pair = [word[i] as u16, (word[i] >> 16) as u16];
            }
        }
    }
}

/// The bits of 2⁻¹⁴, the smallest normal f16.
const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
/// Those of 65536: what is as large, infinite or NaN converts as usual.
const BEYOND: u32 = (127 + 16) << 23;

/// Elements that share one call of the generator.
const OCTET: usize = 8;
/// Octets drawn at a time.
const BATCH: usize = 16;
/// Elements that they are for.
pub(super) const DRAWN: usize = BATCH * OCTET;

/// Philox4x32 with 10 rounds, on `N` counters at once.
#[inline(always)]
fn philox<const N: usize>(mut counter: [[u32; N]; 4], seed: u64) -> [[u32; N]; 4] {
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let previous = counter;
        for i in 0..N {
            let a = u64::from(previous[0][i]) * 0xD251_1F53;
            let b = u64::from(previous[2][i]) * 0xCD9E_8D57;
            counter[0][i] = (b >> 32) as u32 ^ previous[1][i] ^ key[0];
            counter[1][i] = b as u32;
            counter[2][i] = (a >> 32) as u32 ^ previous[3][i] ^ key[1];
            counter[3][i] = a as u32;
        }
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::super::simd::Any;
    use super::*;

    /// Known answers published with Random123 (file kat_vectors, philox4x32 10).
    #[test]
    fn philox_known_answers() {
        // three counters with one key each, and the same ones as three lanes of one call
        let known = [
            ([0; 4], 0, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], u64::MAX, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                0x299f_31d0_a409_3822,
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, seed, expected) in known {
            assert_eq!(philox(counter.map(|word: u32| [word]), seed).map(|[word]| word), expected);
            let lanes = philox(counter.map(|word| [1, word, 2]), seed);
            assert_eq!(lanes.map(|lane| lane[1]), expected);
        }
    }

    fn bits(first: u64) -> StochasticBits {
        StochasticBits { seed: 7, step: 3, tensor: 1, first }
    }

    /// The mean of n roundings is unbiased: |mean − x| ≤ 6·ulp/(2√n) but for one case in 10⁸.
    fn check_mean<H: Copy + Into<f64>>(
        x: f32,
        ulp: f64,
        zero: H,
        round: impl Fn(&StochasticBits, &[f32], &mut [H]),
    ) {
        let n = 40_000;
        let mut out = vec![zero; n];
        round(&bits(0), &vec![x; n], &mut out);
        let mean = out.iter().map(|&h| h.into()).sum::<f64>() / n as f64;
        let tolerance = 6.0 * ulp / (2.0 * (n as f64).sqrt());
        assert!((mean - f64::from(x)).abs() <= tolerance, "{x}: mean {mean}, tolerance {tolerance}");
        for &h in &out {
            assert!((h.into() - f64::from(x)).abs() < ulp, "{x} rounded to {}", h.into());
        }
    }

    #[test]
    fn rounding_is_unbiased_and_to_a_neighbour() {
        for x in [1.001_f32, -1.001, 3.3, 1e-3, 1e-30, 4e-39, -7e37] {
            let ulp = f64::from(x.abs()).log2().floor().max(-126.0).exp2() / 128.0;
            check_mean(x, ulp, bf16::ZERO, |bits, from, to| bits.round_bf16(Any, from, to));
        }
        for x in [1.0001_f32, -1.0001, 3.3, 60_000.7, 7e-5, 6.2e-5, 1e-6, 3e-8, -1e-9] {
            let ulp = f64::from(x.abs()).log2().floor().max(-14.0).exp2() / 1024.0;
            check_mean(x, ulp, f16::ZERO, |bits, from, to| bits.round_f16(Any, from, to));
        }
    }

    #[test]
    fn representable_values_stay() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let mut f = vec![f16::ZERO; all.len()];
        let from: Vec<f32> = all.iter().map(|&b| f16::from_bits(b).to_f32()).collect();
        bits(0).round_f16(Any, &from, &mut f);
        let mut b = vec![bf16::ZERO; all.len()];
        let from_b: Vec<f32> = all.iter().map(|&b| bf16::from_bits(b).to_f32()).collect();
        bits(0).round_bf16(Any, &from_b, &mut b);
        for (i, &raw) in all.iter().enumerate() {
            if from[i].is_nan() {
                assert!(f[i].is_nan());
            } else {
                assert_eq!(f[i].to_bits(), raw);
            }
            if from_b[i].is_nan() {
                assert!(b[i].is_nan());
            } else {
                assert_eq!(b[i].to_bits(), raw);
            }
        }
    }

    #[test]
    fn bits_depend_on_the_element_not_on_the_piece() {
        let x = vec![1.000_123_f32; 100];
        let mut whole = vec![bf16::ZERO; 100];
        bits(5).round_bf16(Any, &x, &mut whole);
        let mut pieces = vec![bf16::ZERO; 100];
        bits(5).round_bf16(Any, &x[..37], &mut pieces[..37]);
        bits(5).advanced(37).round_bf16(Any, &x[37..], &mut pieces[37..]);
        assert_eq!(whole, pieces);
        let mut later = vec![bf16::ZERO; 100];
        StochasticBits { step: 4, ..bits(5) }.round_bf16(Any, &x, &mut later);
        assert_ne!(whole, later);
    }
}
