//! Stochastic rounding of f32 results to f16 and bf16, the same bits on every backend.
//!
//! Philox4x32-10 (Salmon et al., SC 2011) with key = seed and counter = (⌊element / 8⌋ in two words, tensor, step).
//! One call gives 128 bits: 16 for each of 8 neighbouring elements, the lower half of a word first.

use half::{bf16, f16};

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

    pub(super) fn round_bf16(&self, from: &[f32], to: &mut [bf16]) {
        self.round(from, to, |x, r| {
            if !x.is_finite() {
                return bf16::from_f32(x);
            }
            // Adding r·2⁻¹⁶ units in the last place before truncation carries with the probability of the fraction.
            bf16::from_bits((x.to_bits().wrapping_add(r) >> 16) as u16)
        });
    }

    pub(super) fn round_f16(&self, from: &[f32], to: &mut [f16]) {
        self.round(from, to, |x, r| {
            if !x.is_finite() || x.abs() >= 65536.0 {
                return f16::from_f32(x);
            }
            let sign = ((x.to_bits() >> 16) & 0x8000) as u16;
            let magnitude = if x.abs() < f16::MIN_POSITIVE.to_f32() {
                // Subnormal: a multiple of 2⁻²⁴. The product is exact, its fraction is compared with r/2¹⁶.
                let scaled = x.abs() * 16_777_216.0;
                let below = scaled.floor();
                below as u16 + u16::from((r as f32) < (scaled - below) * 65_536.0)
            } else {
                // 13 of the 23 fraction bits go; rebias the exponent from 127 to 15.
                ((((x.to_bits() & 0x7FFF_FFFF) + (r >> 3)) >> 13) - ((127 - 15) << 10)) as u16
            };
            f16::from_bits(sign | magnitude)
        });
    }

    /// Calls `one` with each element and its 16 random bits.
    fn round<H>(&self, from: &[f32], to: &mut [H], one: impl Fn(f32, u32) -> H) {
        let mut words = [0; 4];
        let mut drawn = None;
        for (i, (&x, out)) in from.iter().zip(to).enumerate() {
            let element = self.first + i as u64;
            if drawn != Some(element / 8) {
                drawn = Some(element / 8);
                words = self.words(element / 8);
            }
            let lane = (element % 8) as usize;
            *out = one(x, (words[lane / 2] >> (16 * (lane % 2))) & 0xFFFF);
        }
    }

    fn words(&self, octet: u64) -> [u32; 4] {
        philox([octet as u32, (octet >> 32) as u32, self.tensor, self.step], self.seed)
    }
}

/// Philox4x32 with 10 rounds.
fn philox(mut counter: [u32; 4], seed: u64) -> [u32; 4] {
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers published with Random123 (file kat_vectors, philox4x32 10).
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox([0; 4], 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], u64::MAX), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], 0x299f_31d0_a409_3822),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
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
            check_mean(x, ulp, bf16::ZERO, StochasticBits::round_bf16);
        }
        for x in [1.0001_f32, -1.0001, 3.3, 60_000.7, 7e-5, 6.2e-5, 1e-6, 3e-8, -1e-9] {
            let ulp = f64::from(x.abs()).log2().floor().max(-14.0).exp2() / 1024.0;
            check_mean(x, ulp, f16::ZERO, StochasticBits::round_f16);
        }
    }

    #[test]
    fn representable_values_stay() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let mut f = vec![f16::ZERO; all.len()];
        let from: Vec<f32> = all.iter().map(|&b| f16::from_bits(b).to_f32()).collect();
        bits(0).round_f16(&from, &mut f);
        let mut b = vec![bf16::ZERO; all.len()];
        let from_b: Vec<f32> = all.iter().map(|&b| bf16::from_bits(b).to_f32()).collect();
        bits(0).round_bf16(&from_b, &mut b);
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
        bits(5).round_bf16(&x, &mut whole);
        let mut pieces = vec![bf16::ZERO; 100];
        bits(5).round_bf16(&x[..37], &mut pieces[..37]);
        bits(5).advanced(37).round_bf16(&x[37..], &mut pieces[37..]);
        assert_eq!(whole, pieces);
        let mut later = vec![bf16::ZERO; 100];
        StochasticBits { step: 4, ..bits(5) }.round_bf16(&x, &mut later);
        assert_ne!(whole, later);
    }
}
