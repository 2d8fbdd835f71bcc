//! Numbers for tensors of any length: a pattern that repeats, so that filling and checking 10⁹ of them takes
//! no longer than copying them.

use half::bf16;
use rfdescent::DType;
use rfdescent::device::{DeviceBuffer, Stream};

const PERIOD: usize = 1 << 20;

/// A pattern in one format.
pub struct Pattern {
    size: usize,
    /// Two periods, so that one can begin anywhere in the first.
    bytes: Vec<u8>,
    numbers: Vec<f64>,
    /// Sums of squares of the first so many.
    squares: Vec<f64>,
}

impl Pattern {
    pub fn new(dtype: DType, seed: u32) -> Self {
        let values = (0..PERIOD as u32)
            .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / 16_777_216.0 - 0.5);
        let (mut bytes, numbers): (Vec<u8>, Vec<f64>) = match dtype {
            DType::BF16 => {
                let values: Vec<bf16> = values.map(bf16::from_f32).collect();
                (
                    values.iter().flat_map(|x| x.to_le_bytes()).collect(),
                    values.iter().map(|&x| x.into()).collect(),
                )
            }
            _ => (values.clone().flat_map(f32::to_le_bytes).collect(), values.map(f64::from).collect()),
        };
        bytes.extend_from_within(..);
        let squares = std::iter::once(0.0).chain(numbers.iter().scan(0.0, |sum, x| {
            *sum += x * x;
            Some(*sum)
        }));
        Self { size: bytes.len() / (2 * PERIOD), bytes, squares: squares.collect(), numbers }
    }

    /// The number at a place.
    pub fn at(&self, place: usize) -> f64 {
        self.numbers[place % PERIOD]
    }

    /// The sum of squares of `len` numbers from a place on.
    pub fn square_sum(&self, place: usize, len: usize) -> f64 {
        let up_to = |end: usize| (end / PERIOD) as f64 * self.squares[PERIOD] + self.squares[end % PERIOD];
        up_to(place + len) - up_to(place)
    }

    /// Writes `len` numbers from a place of the pattern on to a byte of a buffer on.
    pub fn upload(&self, place: usize, len: usize, buffer: &mut DeviceBuffer, byte: usize, stream: Stream) {
        for start in (0..len).step_by(PERIOD) {
            let (from, count) = ((place + start) % PERIOD, PERIOD.min(len - start));
            let bytes = &self.bytes[from * self.size..(from + count) * self.size];
            buffer.upload(byte + start * self.size, bytes, stream).unwrap();
        }
    }
}
