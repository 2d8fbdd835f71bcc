//! Stochastic rounding of f32 results to f16 and bf16, the same bits on every backend.
//!
//! Philox4x32-10 (Salmon et al., SC 2011) with key = seed and counter = (⌊element / 8⌋ in two words, tensor,
//! step). One call gives 128 bits: 16 for each of 8 neighbouring elements, the lower half of a word first.

use super::element::{Blocks, Stochastic, end, rounds};
use super::simd::{COUNTERS, Instructions, LANES};

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

    /// Rounds each element to one of its two neighbours, the nearer the likelier; as many as `to` has.
    #[inline(always)]
    pub(super) fn round<I: Instructions, H: Stochastic>(
        &self,
        instructions: I,
        from: &[[f32; LANES]; DRAWN / LANES],
        to: &mut [H],
    ) {
        let (octet, place) = (self.first / OCTET as u64, (self.first % OCTET as u64) as usize);
        let mut random = [[[0; OCTET]; COUNTERS]; DRAWN / TOGETHER + 1];
        for (k, random) in random.iter_mut().take((place + to.len()).div_ceil(TOGETHER)).enumerate() {
            *random = self.draw(instructions, octet.wrapping_add((k * COUNTERS) as u64));
        }
        let random = random.as_flattened().as_flattened()[place..].as_chunks().0;
        let mut pairs = from.iter().zip(random);
        let len = to.len();
        let mut end = end();
        let mut to = Blocks::new(to, &mut end);
        for last in rounds(len) {
            for (to, (from, random)) in to.round(last).iter_mut().zip(&mut pairs) {
                *to = H::round(instructions, *from, *random);
            }
        }
        to.finish();
    }

    /// The bits of [`TOGETHER`] elements from the given octet on.
    #[inline(always)]
    fn draw<I: Instructions>(&self, instructions: I, octet: u64) -> [[u16; OCTET]; COUNTERS] {
        let octets: [u64; COUNTERS] = std::array::from_fn(|i| octet.wrapping_add(i as u64));
        let counter = [
            octets,
            octets.map(|octet| octet >> 32),
            [u64::from(self.tensor); COUNTERS],
            [u64::from(self.step); COUNTERS],
        ];
        instructions.random_bits(philox(instructions, counter, self.seed))
    }
}

/// Elements that share one call of the generator.
const OCTET: usize = 8;
/// Those of the calls that are made together.
const TOGETHER: usize = OCTET * COUNTERS;
/// Elements that are rounded together.
pub(super) const DRAWN: usize = 2 * TOGETHER;

/// Philox4x32 with 10 rounds; each word is the lower half of its 64 bits, before and after.
#[inline(always)]
fn philox<I: Instructions>(
    instructions: I,
    mut counter: [[u64; COUNTERS]; 4],
    seed: u64,
) -> [[u64; COUNTERS]; 4] {
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let a = instructions.products(counter[0], 0xD251_1F53);
        let b = instructions.products(counter[2], 0xCD9E_8D57);
        let mixed = [instructions.mix(b, counter[1], key[0]), instructions.mix(a, counter[3], key[1])];
        counter = [mixed[0], b, mixed[1], a];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::super::simd::{Any, Work, run};
    use super::*;
    use half::{bf16, f16};

    /// Known answers published with Random123 (file kat_vectors, philox4x32 10).
    #[test]
    fn philox_known_answers() {
        // three counters with one key each, between others
        let known: [([u32; 4], u64, [u32; 4]); 3] = [
            ([0; 4], 0, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], u64::MAX, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                0x299f_31d0_a409_3822,
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        struct Bits([[u64; COUNTERS]; 4], u64);
        impl Work for Bits {
            type Output = [[u16; OCTET]; COUNTERS];
            fn run<I: Instructions>(self, instructions: I) -> Self::Output {
                instructions.random_bits(philox(instructions, self.0, self.1))
            }
        }
        for (counter, seed, expected) in known {
            let expected: [u16; OCTET] = std::array::from_fn(|k| (expected[k / 2] >> (16 * (k % 2))) as u16);
            for place in 0..COUNTERS {
                let list = counter.map(|word| std::array::from_fn(|i| u64::from(word) + (i != place) as u64));
                let found = run(Bits(list, seed));
                assert_eq!(found[place], expected);
                assert_eq!(found, Bits(list, seed).run(Any));
            }
        }
    }

    fn bits(first: u64) -> StochasticBits {
        StochasticBits { seed: 7, step: 3, tensor: 1, first }
    }

    struct Rounding<'a, H>(StochasticBits, &'a [f32], &'a mut [H]);

    impl<H: Stochastic> Work for Rounding<'_, H> {
        type Output = ();
        fn run<I: Instructions>(self, instructions: I) {
            for (k, (from, to)) in self.1.chunks(DRAWN).zip(self.2.chunks_mut(DRAWN)).enumerate() {
                let mut list = [[0.0; LANES]; DRAWN / LANES];
                list.as_flattened_mut()[..from.len()].copy_from_slice(from);
                self.0.advanced(k * DRAWN).round(instructions, &list, to);
            }
        }
    }

    /// With this processor's instructions, which change nothing.
    fn rounded<H: Stochastic + PartialEq + std::fmt::Debug>(bits: StochasticBits, from: &[f32]) -> Vec<H> {
        let (mut to, mut anywhere) = (vec![H::default(); from.len()], vec![H::default(); from.len()]);
        run(Rounding(bits, from, &mut to));
        Rounding(bits, from, &mut anywhere).run(Any);
        for (to, anywhere) in to.iter().zip(&anywhere) {
            // NaN differs from itself.
            assert!(to == anywhere || format!("{to:?}{anywhere:?}") == "NaNNaN");
        }
        to
    }

    /// The mean of n roundings is unbiased: |mean − x| ≤ 6·ulp/(2√n) but for one case in 10⁸.
    fn check_mean<H: Stochastic + PartialEq + Into<f64> + std::fmt::Debug>(x: f32, ulp: f64) {
        let n = 40_000;
        let out: Vec<f64> = rounded::<H>(bits(0), &vec![x; n]).into_iter().map(Into::into).collect();
        let mean = out.iter().sum::<f64>() / n as f64;
        let tolerance = 6.0 * ulp / (2.0 * (n as f64).sqrt());
        assert!((mean - f64::from(x)).abs() <= tolerance, "{x}: mean {mean}, tolerance {tolerance}");
        assert!(out.iter().all(|h| (h - f64::from(x)).abs() < ulp), "{x} is not rounded to a neighbour");
    }

    #[test]
    fn rounding_is_unbiased_and_to_a_neighbour() {
        for x in [1.001_f32, -1.001, 3.3, 1e-3, 1e-30, 4e-39, -7e37] {
            check_mean::<bf16>(x, f64::from(x.abs()).log2().floor().max(-126.0).exp2() / 128.0);
        }
        for x in [1.0001_f32, -1.0001, 3.3, 60_000.7, 7e-5, 6.2e-5, 1e-6, 3e-8, -1e-9] {
            check_mean::<f16>(x, f64::from(x.abs()).log2().floor().max(-14.0).exp2() / 1024.0);
        }
    }

    #[test]
    fn representable_values_stay() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let from: Vec<f32> = all.iter().map(|&b| f16::from_bits(b).to_f32()).collect();
        let from_b: Vec<f32> = all.iter().map(|&b| bf16::from_bits(b).to_f32()).collect();
        let (f, b) = (rounded::<f16>(bits(0), &from), rounded::<bf16>(bits(0), &from_b));
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

    /// All exponents and signs, in all places, beside others that are rounded another way.
    #[test]
    fn all_magnitudes_are_rounded_alike_by_all_instructions() {
        let list: Vec<f32> = (0..200_000_u32)
            .map(|i| i.wrapping_mul(2_654_435_761))
            .map(|hash| f32::from_bits(if hash % 7 < 3 { hash } else { (hash >> 9) | 0x3000_0000 }))
            .collect();
        for first in [0, 3, u64::from(u32::MAX) * 8 - 100] {
            rounded::<f16>(bits(first), &list);
            rounded::<bf16>(bits(first), &list);
        }
        let beyond: Vec<f16> = rounded(bits(0), &[1.0, -65_536.0, 1e30, 65_536.0]);
        assert_eq!(beyond[1..], [f16::NEG_INFINITY, f16::INFINITY, f16::INFINITY]);
    }

    #[test]
    fn bits_depend_on_the_element_not_on_the_piece() {
        let x = vec![1.000_123_f32; 1000];
        let whole: Vec<bf16> = rounded(bits(5), &x);
        let mut pieces: Vec<bf16> = rounded(bits(5), &x[..37]);
        pieces.extend(rounded::<bf16>(bits(5).advanced(37), &x[37..]));
        assert_eq!(whole, pieces);
        let later: Vec<bf16> = rounded(StochasticBits { step: 4, ..bits(5) }, &x);
        assert_ne!(whole, later);
    }
}
