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

use super::element::Compute;
use crate::backend::abi;
use crate::numeric::{LEAVES, fold, tree};

/// Neighbouring elements of one row that a leaf holds.
const QUAD: usize = 4;
/// Columns of a chunk.
const COLUMNS: usize = LEAVES * QUAD;
/// Elements of a chunk.
pub(super) const CHUNK: usize = 4 * COLUMNS;
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

/// Σ x·y over at most one chunk. Products are formed in f64: exact unless an operand is f64 itself.
#[inline(always)]
pub(super) fn chunk_dot<T: Compute>(x: &[T], y: &[T]) -> f64 {
    debug_assert!(x.len() <= CHUNK && x.len() == y.len());
    let mut columns = [0.0_f64; COLUMNS];
    if let (Ok(x), Ok(y)) = (<&[T; CHUNK]>::try_from(x), <&[T; CHUNK]>::try_from(y)) {
        // The same sums as below, four rows at once: no partial sum leaves its register.
        let product = |i: usize| x[i].to_f64() * y[i].to_f64();
        for (c, column) in columns.iter_mut().enumerate() {
            *column =
                ((product(c) + product(c + COLUMNS)) + product(c + 2 * COLUMNS)) + product(c + 3 * COLUMNS);
        }
    } else {
        for (x_row, y_row) in x.chunks(COLUMNS).zip(y.chunks(COLUMNS)) {
            for ((column, x), y) in columns.iter_mut().zip(x_row).zip(y_row) {
                *column += x.to_f64() * y.to_f64();
            }
        }
    }
    let mut leaves = [0.0; LEAVES];
    for (leaf, c) in leaves.iter_mut().zip(columns.as_chunks::<QUAD>().0) {
        *leaf = (c[0] + c[2]) + (c[1] + c[3]);
    }
    tree(&mut leaves)
}

/// Memory in which the columns of a row add up.
pub(super) type Line = [f64; COLUMNS];

/// Memory for [`row_sum`].
pub(super) fn line() -> Line {
    [0.0; COLUMNS]
}

/// Σ of the terms of one row that so many lanes share, as a chunk of as many leaves.
#[inline(always)]
pub(super) fn row_sum(len: usize, lanes: usize, line: &mut Line, term: impl Fn(usize) -> f64) -> f64 {
    let columns = &mut line[..QUAD * lanes];
    columns.fill(0.0);
    let mut start = 0;
    while start < len {
        for (column, i) in columns.iter_mut().zip(start..len) {
            *column += term(i);
        }
        start += QUAD * lanes;
    }
    join_columns(columns)
}

/// The leaves of a row, each of four columns, in the tree.
fn join_columns(columns: &mut [f64]) -> f64 {
    let lanes = columns.len() / QUAD;
    for lane in 0..lanes {
        let c = &columns[QUAD * lane..][..QUAD];
        // In place: what is overwritten has been read.
        columns[lane] = (c[0] + c[2]) + (c[1] + c[3]);
    }
    tree(&mut columns[..lanes])
}

/// Σ over the rows of one chunk, each of which stands where the first of its lanes does.
#[inline(always)]
pub(super) fn rows_sum(rows: impl Iterator<Item = f64>, lanes: usize) -> f64 {
    let mut leaves = [0.0; LEAVES];
    for (leaf, row) in leaves.iter_mut().step_by(lanes).zip(rows) {
        *leaf = row;
    }
    tree(&mut leaves)
}

/// Σ over the chunks of one tensor.
pub(super) fn tensor_sum(chunks: &[f64]) -> f64 {
    let segments: Vec<f64> = chunks.chunks(CHUNKS_PER_SEGMENT).map(fold).collect();
    fold(&segments)
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
    use super::*;
    use proptest::prelude::*;

    fn squares(x: &[f32]) -> Vec<f64> {
        x.iter().map(|&x| f64::from(x) * f64::from(x)).collect()
    }

    proptest! {
        #[test]
        fn chunk_follows_the_documented_order(
            len in prop_oneof![0usize..70, 1020usize..1030, 3070usize..3080, 4090usize..=4096],
            seed in any::<u64>(),
        ) {
            let x = naive::spread(seed, len);
            prop_assert_eq!(chunk_dot(&x, &x).to_bits(), naive::lanes(256, &squares(&x)).to_bits());
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
            let mut line = line();
            // what was there before must not count
            line.fill(7.0);
            let row = row_sum(len, lanes, &mut line, |i| terms[i]);
            prop_assert_eq!(row.to_bits(), naive::lanes(lanes, &terms).to_bits());
            let rows = squares(&naive::spread(!seed, 256 / lanes - fewer % (256 / lanes)));
            let sum = rows_sum(rows.iter().copied(), lanes);
            prop_assert_eq!(sum.to_bits(), naive::rows(lanes, &rows).to_bits());
        }
    }

    #[test]
    fn order_matters_for_the_test_data() {
        // guards the properties above: a plain running sum differs, so they can fail
        let x: Vec<f32> = (0..4096).map(|i| 1.0 + i as f32 * 1e-3).collect();
        let running = x.iter().fold(0.0, |s, &v| s + f64::from(v) * f64::from(v));
        assert_ne!(chunk_dot(&x, &x).to_bits(), running.to_bits());
        let x = squares(&naive::spread(1, 64));
        assert_ne!(
            row_sum(64, 4, &mut line(), |i| x[i]).to_bits(),
            x.iter().fold(0.0, |s, v| s + v).to_bits()
        );
    }
}
