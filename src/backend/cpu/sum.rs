//! The order of summation: the same for every machine, thread count and number format (`docs/summation.md`).
//!
//! ```text
//! tensor   cut into chunks of 4096 elements, from its first element on; the last one may be shorter
//! chunk    4 rows × 1024 columns; a column adds its 4 products from row 0 to row 3
//!          a leaf adds its 4 columns as (c0 + c2) + (c1 + c3); the 256 leaves fold in a tree
//! segment  256 chunks fold in the same tree
//! tensor   its segments fold; the list's total is the fold of its tensors
//! ```
//!
//! Where rows are summed for themselves, chunks are made up of whole rows, each with a part of the leaves.
//!
//! A leaf is what one GPU thread can hold: 16 bytes of f32 from each of 4 rows. The tree first joins leaves
//! of the same group of 32 (a warp), then the groups. Missing elements count as +0, which changes no partial
//! sum.

use std::mem::MaybeUninit;

use super::simd::{Instructions, LANES, LEAVES_OF_LANES};
use crate::backend::abi;
use crate::numeric::{GROUP, LEAVES, fold, tree};

/// Neighbouring elements of one row that a leaf holds.
const QUAD: usize = 4;
/// Columns of a chunk.
const COLUMNS: usize = LEAVES * QUAD;
/// Elements of a chunk.
pub(super) const CHUNK: usize = LINES * COLUMNS;
/// Lines that the columns of a chunk or row add up.
const LINES: usize = 4;
/// Chunks of a segment; the tree has this many leaves.
const CHUNKS_PER_SEGMENT: usize = LEAVES;

// The kernels' numbers.
const _: () = assert!(
    LEAVES == abi::RFD_THREADS as usize
        && COLUMNS == abi::RFD_COLUMNS as usize
        && CHUNK == abi::RFD_CHUNK as usize
        && CHUNK == COLUMNS * abi::RFD_ROWS as usize
        && CHUNKS_PER_SEGMENT == abi::RFD_CHUNKS_PER_SEGMENT as usize
);

/// Σ of `K` kinds of terms over what so many lanes share: a row, or a chunk that has no rows. `add(at, full,
/// sums)` adds those of the elements from `at` on, 0 beyond the end; `full` says that all are there, but only
/// where `TWICE` asks for it: the compiler then makes code of its own for them.
///
/// No partial sum of a column leaves its register, and columns without elements cost nothing.
#[inline(always)]
pub(super) fn lanes_sum<I: Instructions, const K: usize, const TWICE: bool>(
    instructions: I,
    len: usize,
    lanes: usize,
    mut add: impl FnMut(usize, bool, &mut [[f64; LANES]; K]),
) -> [f64; K] {
    debug_assert!(len <= LINES * QUAD * lanes && lanes <= LEAVES);
    let width = QUAD * lanes;
    // With one lane or two, lines are shorter than an array: what there is, is read first and added up then.
    let narrow = width < LANES;
    let (end, lines) = if narrow { (len, 1) } else { (len.min(width), LINES) };
    let mut leaves = Leaves::<K>::new();
    let (mut start, mut place) = (0, 0);
    while start < end {
        let mut columns = [[0.0; LANES]; K];
        let mut at = start;
        for _ in 0..lines {
            if at >= len {
                break;
            }
            if TWICE && at + LANES <= len {
                add(at, true, &mut columns);
            } else {
                add(at, false, &mut columns);
            }
            at += width;
        }
        start += LANES;
        if narrow {
            leaves.put(place, columns);
            place += LANES;
        } else {
            // No `map`: a closure that is not inlined has no vector instructions.
            let mut of_columns = [[0.0; LEAVES_OF_LANES]; K];
            for k in 0..K {
                of_columns[k] = instructions.leaves(columns[k]);
            }
            if end <= LANES {
                // These are all: no need for a list.
                let mut sums = [0.0; K];
                for k in 0..K {
                    let [a, b, c, d] = of_columns[k];
                    sums[k] = (a + c) + (b + d);
                }
                return sums;
            }
            leaves.put(place, of_columns);
            place += LEAVES_OF_LANES;
        }
    }
    leaves.len = place;
    if !narrow {
        return leaves.sum();
    }
    leaves.fill(LINES * width);
    let mut sums = [0.0; K];
    for (k, sum) in sums.iter_mut().enumerate() {
        *sum = narrow_sum(leaves.of(k), width);
    }
    sums
}

/// So many elements behind those of a row that are summed lies what has to be asked for by now: the same
/// place of a later row. Of the lines of a row the processor itself finds nothing in time.
#[inline(always)]
pub(super) fn ahead(row: usize) -> usize {
    AHEAD.next_multiple_of(row.max(1))
}

/// At least so many: the time that memory takes. With half as many a step over 10⁷ f32 takes as long.
const AHEAD: usize = 2048;

/// The terms of one lane or of two.
#[inline(always)]
fn narrow_sum(terms: &[f64], width: usize) -> f64 {
    // A lane's columns, each added up; no closures: those that are not inlined have no vector instructions.
    let mut leaves = [0.0; 2];
    for (lane, leaf) in leaves.iter_mut().enumerate().take(width / QUAD) {
        let mut c = [0.0; QUAD];
        for (column, sum) in c.iter_mut().enumerate() {
            let at = lane * QUAD + column;
            *sum = ((terms[at] + terms[at + width]) + terms[at + 2 * width]) + terms[at + 3 * width];
        }
        *leaf = (c[0] + c[2]) + (c[1] + c[3]);
    }
    if width == QUAD { leaves[0] } else { leaves[0] + leaves[1] }
}

/// The first leaves of `K` trees whose others are 0.
pub(super) struct Leaves<const K: usize> {
    list: [[MaybeUninit<f64>; LEAVES]; K],
    /// So many are there.
    len: usize,
}

impl<const K: usize> Leaves<K> {
    /// Not as a constant, which would be copied with all that it leaves open.
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self { list: [[MaybeUninit::uninit(); LEAVES]; K], len: 0 }
    }

    /// Writes leaves to a place that is a multiple of their number. They count once all are there.
    // The number of those that are there is not asked for: it lies in memory.
    #[inline(always)]
    fn put<const N: usize>(&mut self, place: usize, leaves: [[f64; N]; K]) {
        debug_assert!(place.is_multiple_of(N));
        for (list, leaves) in self.list.iter_mut().zip(leaves) {
            list.as_chunks_mut().0[place / N] = leaves.map(MaybeUninit::new);
        }
    }

    /// Adds a row's sums, which stand where the first of its lanes does; those are a power of two.
    #[inline(always)]
    pub(super) fn push_row(&mut self, sums: [f64; K], lanes: usize) {
        debug_assert!(lanes.is_power_of_two());
        // The rest of the row before.
        self.fill((self.len + lanes - 1) & !(lanes - 1));
        self.put(self.len, sums.map(|sum| [sum]));
        self.len += 1;
    }

    /// Adds zeros until there are so many, at least.
    #[inline(always)]
    fn fill(&mut self, len: usize) {
        if len <= self.len {
            return;
        }
        for list in &mut self.list {
            for place in &mut list[self.len..len] {
                place.write(0.0);
            }
        }
        self.len = len;
    }

    /// What all add up to.
    #[inline(always)]
    pub(super) fn sum(&mut self) -> [f64; K] {
        // Zeros in the upper half of a tree change nothing.
        self.fill(match self.len {
            0..=GROUP => self.len.next_power_of_two(),
            len => len.div_ceil(GROUP).next_power_of_two() * GROUP,
        });
        let mut sums = [0.0; K];
        for (k, sum) in sums.iter_mut().enumerate() {
            *sum = tree(self.of(k));
        }
        sums
    }

    /// Those of one tree.
    #[inline(always)]
    fn of(&mut self, k: usize) -> &mut [f64] {
        let leaves = &mut self.list[k][..self.len];
        // SAFETY: `lanes_sum`, `push_row` and `fill` have written as many from the first on; f64 lies as
        // `MaybeUninit` of it.
        unsafe { std::slice::from_raw_parts_mut(leaves.as_mut_ptr().cast::<f64>(), leaves.len()) }
    }
}

/// Σ over the chunks of one tensor, of each of `N` sums.
#[inline]
pub(super) fn tensor_sums<const N: usize>(chunks: &[[f64; N]]) -> [f64; N] {
    std::array::from_fn(|n| {
        let segments =
            chunks.chunks(CHUNKS_PER_SEGMENT).map(|segment| fold(segment.iter().map(|sums| sums[n])));
        fold(segments)
    })
}

/// The documented order, written with indices only and no shared code.
#[cfg(test)]
pub(super) mod naive {
    fn pairs(v: Vec<f64>) -> f64 {
        if v.len() == 1 {
            return v[0];
        }
        let half = v.len() / 2;
        pairs((0..half).map(|i| v[i] + v[i + half]).collect())
    }

    /// The tree over a power of two of leaves: groups of 32 first.
    fn tree(leaves: &[f64]) -> f64 {
        pairs(leaves.chunks(32).map(|group| pairs(group.to_vec())).collect())
    }

    /// A chunk, or a row that so many lanes share.
    pub fn lanes(lanes: usize, terms: &[f64]) -> f64 {
        let at = |i: usize| terms.get(i).copied().unwrap_or(0.0);
        let width = 4 * lanes;
        let column = |c: usize| ((at(c) + at(c + width)) + at(c + 2 * width)) + at(c + 3 * width);
        let leaf = |l: usize| (column(4 * l) + column(4 * l + 2)) + (column(4 * l + 1) + column(4 * l + 3));
        tree(&(0..lanes).map(leaf).collect::<Vec<_>>())
    }

    /// The rows of a chunk.
    pub fn rows(lanes: usize, rows: &[f64]) -> f64 {
        let leaf = |l: usize| {
            if l.is_multiple_of(lanes) { rows.get(l / lanes).copied().unwrap_or(0.0) } else { 0.0 }
        };
        tree(&(0..256).map(leaf).collect::<Vec<_>>())
    }

    /// At most 256 chunks.
    pub fn tensor(chunks: &[f64]) -> f64 {
        assert!(chunks.len() <= 256);
        tree(&(0..256).map(|l| chunks.get(l).copied().unwrap_or(0.0)).collect::<Vec<_>>())
    }

    /// Magnitudes from 1e-20 to 1e20, so that another order would round differently.
    pub fn spread(seed: u64, len: usize) -> Vec<f32> {
        (0..len as u64)
            .map(|i| {
                let h = (i ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                let h = (h ^ (h >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
                10f32.powf((h >> 40) as f32 / (1u64 << 24) as f32 * 40.0 - 20.0)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::element::{BlocksRef, end};
    use super::super::simd::{Any, Work, run};
    use super::*;
    use proptest::prelude::*;

    fn squares(x: &[f32]) -> Vec<f64> {
        x.iter().map(|&x| f64::from(x) * f64::from(x)).collect()
    }

    struct Terms<'a> {
        lanes: usize,
        terms: &'a [f64],
    }

    impl Work for Terms<'_> {
        type Output = [f64; 2];

        fn run<I: Instructions>(self, instructions: I) -> [f64; 2] {
            let mut end = end();
            let mut blocks = BlocksRef::new(self.terms, &mut end);
            lanes_sum::<_, 2, true>(instructions, self.terms.len(), self.lanes, |at, _, [twice, once]| {
                let terms = *blocks.at(at);
                *twice = instructions.add_f64(*twice, terms.map(|x| 2.0 * x));
                *once = instructions.add_f64(*once, terms);
            })
        }
    }

    fn lanes_of(lanes: usize, terms: &[f64]) -> f64 {
        // neither sum may count for the other
        let sums = run(Terms { lanes, terms });
        assert_eq!(sums, Terms { lanes, terms }.run(Any));
        assert_eq!(sums[0], 2.0 * sums[1]);
        sums[1]
    }

    proptest! {
        #[test]
        fn chunk_follows_the_documented_order(
            len in prop_oneof![0usize..70, 1020usize..1030, 3070usize..3080, 4090usize..=4096],
            seed in any::<u64>(),
        ) {
            let x = naive::spread(seed, len);
            prop_assert_eq!(lanes_of(256, &squares(&x)).to_bits(), naive::lanes(256, &squares(&x)).to_bits());
        }

        #[test]
        fn rows_follow_the_documented_order(
            lanes in prop::sample::select(vec![1_usize, 2, 4, 8, 16, 32, 64, 128, 256]),
            share in 0.0..=1.0_f64,
            fewer in 0_usize..256,
            seed in any::<u64>(),
        ) {
            let len = (16.0 * lanes as f64 * share) as usize;
            let terms = squares(&naive::spread(seed, len));
            prop_assert_eq!(lanes_of(lanes, &terms).to_bits(), naive::lanes(lanes, &terms).to_bits());
            let rows = squares(&naive::spread(!seed, 256 / lanes - fewer % (256 / lanes)));
            let mut leaves = Leaves::new();
            rows.iter().for_each(|&row| leaves.push_row([row], lanes));
            let [sum] = leaves.sum();
            prop_assert_eq!(sum.to_bits(), naive::rows(lanes, &rows).to_bits());
        }
    }

    #[test]
    fn order_matters_for_the_test_data() {
        // guards the properties above: a plain running sum differs, so they can fail
        let x: Vec<f32> = (0..4096).map(|i| 1.0 + i as f32 * 1e-3).collect();
        let running = x.iter().fold(0.0, |s, &v| s + f64::from(v) * f64::from(v));
        assert_ne!(lanes_of(256, &squares(&x)).to_bits(), running.to_bits());
        let x = squares(&naive::spread(1, 64));
        assert_ne!(lanes_of(4, &x).to_bits(), x.iter().fold(0.0, |s, v| s + v).to_bits());
    }
}
