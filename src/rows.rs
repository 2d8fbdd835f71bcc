//! What counts as a row of a tensor, and how rows lie in chunks (`docs/summation.md`).

use crate::backend::abi::{RFD_CHUNK, RFD_SAMPLED_CHUNKS, RFD_THREADS};

/// The longest row: what a chunk holds.
const LONGEST: usize = RFD_CHUNK as usize;
/// Longer ones are cut into equal parts of at least this many elements where that is possible.
const SHORTEST_PART: usize = 256;
/// Elements of a row that one lane holds at most.
const OF_A_LANE: usize = LONGEST / LANES;
/// Lanes of a chunk.
const LANES: usize = RFD_THREADS as usize;

/// Chunks that tell of a tensor's columns in one step, at most.
const SAMPLED: usize = RFD_SAMPLED_CHUNKS as usize;

/// A tensor cut into rows of neighbouring elements, the last of which may be shorter. Chunks are whole rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    /// Elements of a row.
    pub len: usize,
    /// As many, where elements at the same place of all rows belong together; else 0.
    pub columns: usize,
}

/// The chunks of a tensor that tell of its columns in one step: every so many, from one on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    pub first: usize,
    pub stride: usize,
}

impl Rows {
    /// Chunks as such, of a tensor whose rows don't matter.
    pub const CHUNKS: Self = Self { len: LONGEST, columns: 0 };

    /// The rows of a matrix, which have so many elements. Those longer than a chunk are cut, and then there
    /// are no columns.
    pub fn of_matrix(len: usize) -> Self {
        let cut = Self::cut(len);
        Self { columns: if cut.len == len { len } else { 0 }, ..cut }
    }

    /// A vector: one row, or several where it is longer than a chunk.
    pub fn of_vector(len: usize) -> Self {
        Self::cut(len)
    }

    /// The fewest equal parts that fit into a chunk, or chunks where the length has no such divisor.
    fn cut(len: usize) -> Self {
        if len <= LONGEST {
            return Self { len: len.max(1), columns: 0 };
        }
        let longest = (SHORTEST_PART..=LONGEST).rev().find(|part| len.is_multiple_of(*part));
        Self { len: longest.unwrap_or(LONGEST), columns: 0 }
    }

    /// Those of a tensor: what lies behind its first dimension, or all of it where there is no other.
    pub fn of_shape(shape: &[usize]) -> Self {
        match shape {
            [_, row @ ..] if !row.is_empty() => {
                // Only a tensor without elements, of which some size is 0, has a row beyond all numbers.
                let len = row.iter().try_fold(1_usize, |product, &size| product.checked_mul(size));
                Self::of_matrix(len.unwrap_or(0))
            }
            vector => Self::of_vector(vector.iter().product()),
        }
    }

    /// How many rows so many elements have.
    pub fn count(self, elements: usize) -> usize {
        // Most vectors are one: no division.
        if elements <= self.len { usize::from(elements > 0) } else { elements.div_ceil(self.len) }
    }

    /// Lanes that sum a row: a power of two, few enough that each holds as much as it can.
    pub fn lanes(self) -> usize {
        self.len.div_ceil(OF_A_LANE).next_power_of_two()
    }

    /// Rows of a chunk.
    pub fn of_chunk(self) -> usize {
        // As LANES / lanes.
        LANES >> self.lanes().trailing_zeros()
    }

    /// Elements of a chunk.
    pub fn chunk(self) -> usize {
        self.of_chunk() * self.len
    }

    /// The chunks that tell of the columns of a tensor of so many chunks in the step after so many: all, or
    /// in turn so many that their number stays small.
    pub fn sample(self, chunks: usize, applied_steps: u64) -> Sample {
        let stride = chunks.div_ceil(SAMPLED).max(1);
        Sample { first: (applied_steps % stride as u64) as usize, stride }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_follow_the_shape() {
        let len = |shape: &[usize]| Rows::of_shape(shape).len;
        assert_eq!(len(&[128, 64]), 64);
        assert_eq!(len(&[64, 3, 7, 7]), 147);
        assert_eq!(len(&[50257, 768]), 768);
        assert_eq!(len(&[10]), 10);
        assert_eq!(len(&[]), 1);
        assert_eq!(len(&[5, 1]), 1);
        assert_eq!(len(&[0, 7]), 7);
        assert_eq!(len(&[7, 0]), 1);
        // longer than a chunk: 11008 = 4 · 2752 and 50257 = 29 · 1733, a prime has no parts
        assert_eq!(len(&[4096, 11008]), 11008 / 4);
        assert_eq!(len(&[8192]), 4096);
        assert_eq!(len(&[50257]), 1733);
        assert_eq!(len(&[8191]), 4096);
    }

    #[test]
    fn huge_rows_are_cut_at_once() {
        assert_eq!(Rows::of_vector(1 << 60).len, 4096);
        // 2⁶¹ − 1 is a prime.
        assert_eq!(Rows::of_vector((1 << 61) - 1).len, 4096);
        // 2⁶⁴ − 1 = 3·5·17·257·641·65537·6700417
        assert_eq!(Rows::of_shape(&[0, usize::MAX]), Rows { len: 15 * 257, columns: 0 });
    }

    #[test]
    fn rows_of_no_elements_may_be_beyond_all_numbers() {
        let one = Rows { len: 1, columns: 0 };
        assert_eq!(Rows::of_shape(&[0, 1 << 40, 1 << 40]), one);
        assert_eq!(Rows::of_shape(&[7, 1 << 40, 1 << 40, 0]), one);
        assert_eq!(Rows::of_shape(&[7, 0, 1 << 40]), one);
    }

    /// As the contract has it, part by part: the fewest that fit into a chunk.
    #[test]
    fn rows_are_cut_into_the_fewest_equal_parts() {
        for len in (LONGEST + 1..70_000).step_by(7) {
            let parts = (len.div_ceil(LONGEST)..=len / SHORTEST_PART).find(|parts| len % parts == 0);
            assert_eq!(Rows::of_vector(len).len, parts.map_or(LONGEST, |parts| len / parts), "{len}");
        }
    }

    #[test]
    fn every_chunk_tells_of_columns_in_its_turn() {
        for chunks in [1, 15, 16, 17, 100, 1000] {
            let mut seen = vec![0; chunks];
            let steps = Rows::CHUNKS.sample(chunks, 0).stride;
            for applied in 0..steps {
                let Sample { first, stride } = Rows::CHUNKS.sample(chunks, applied as u64);
                let sampled: Vec<usize> = (first..chunks).step_by(stride).collect();
                assert!((1..=SAMPLED).contains(&sampled.len()), "{chunks}");
                sampled.into_iter().for_each(|chunk| seen[chunk] += 1);
            }
            assert_eq!(seen, vec![1; chunks]);
        }
    }

    #[test]
    fn chunks_hold_whole_rows() {
        for (len, lanes, chunk) in
            [(1, 1, 256), (3, 1, 768), (16, 1, 4096), (17, 2, 128 * 17), (64, 4, 4096), (147, 16, 16 * 147)]
        {
            let rows = Rows::of_matrix(len);
            assert_eq!((rows.lanes(), rows.chunk(), rows.columns), (lanes, chunk, len), "{len}");
        }
        for len in 1..=LONGEST {
            let rows = Rows::of_vector(len);
            assert!(rows.chunk() <= LONGEST && rows.chunk().is_multiple_of(len), "{len}");
            assert!(rows.lanes() <= LANES && rows.lanes() * OF_A_LANE >= len, "{len}");
        }
        assert_eq!(Rows::CHUNKS.chunk(), 4096);
        assert_eq!(Rows::of_vector(64).count(129), 3);
        assert_eq!(Rows::of_shape(&[4096, 11008]).columns, 0);
        assert_eq!(Rows::of_shape(&[64]).columns, 0);
    }
}
