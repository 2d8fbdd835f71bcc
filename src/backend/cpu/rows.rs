//! Variances of rows and columns, and sums that weigh each element by those of its own.

use super::element::{Blocks, BlocksRef, Compute, Read, State, Store, block, rounds};
use super::reduce::{ChunkWork, Layout, SquaredNorms, in_range, is_large, per_tensor, squares};
use super::simd::{Instructions, LANES, Work, run};
use super::sum::{Leaves, lanes_sum};
use super::threads::for_each;
use super::update::{UpdateScalars, Velocity, advanced};
use crate::rows::{Rows, Sample};
use crate::tensor::{DType, GradRef, each_grad};

/// An exponential average after one more number.
pub(crate) fn averaged(decay: f64, before: f64, now: f64) -> f64 {
    decay * before + (1.0 - decay) * now
}

/// How the variance of a row changes with its gradient, and what the row's step is weighed with
/// (`docs/adaptive.md`): an average that begins at 0.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowVariance {
    /// Of the average.
    pub decay: f64,
    /// What the average weighs once it has seen this step, up to 1.
    pub weight: f64,
    /// What is added to every variance.
    pub floor: f64,
}

impl RowVariance {
    /// w = 1/√variance; 0 where nothing has been seen. The average has this step in it.
    pub fn scale(&self, average: f64) -> f64 {
        let variance = average / self.weight + self.floor;
        if variance > 0.0 { 1.0 / variance.sqrt() } else { 0.0 }
    }
}

/// How the variance of a column changes, and what it weighs in the step after that.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ColumnVariance {
    /// Of the average.
    pub decay: f64,
    /// The mean over the columns.
    pub mean: f64,
    /// What is added to every variance.
    pub floor: f64,
}

impl ColumnVariance {
    /// u = √(mean/variance); 1 where nothing has been seen.
    pub fn scale(&self, average: f64) -> f32 {
        if self.mean > 0.0 { (self.mean / (average + self.floor)).sqrt() as f32 } else { 1.0 }
    }
}

/// What the elements of a tensor weigh: those of row i and column j w_i·u_j.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variances<'a> {
    pub rows: Rows,
    pub rule: RowVariance,
    /// An average for each row.
    pub averages: &'a [f64],
    /// u of each column; empty where there are none.
    pub column_scales: &'a [f32],
}

impl Variances<'_> {
    /// w of one row.
    pub fn scale(&self, row: usize) -> f64 {
        self.rule.scale(self.averages[row])
    }

    /// u of the columns from one place of a row on; 1 where there are none.
    #[inline(always)]
    pub(super) fn column_scales<I: Instructions>(&self, instructions: I, place: usize) -> [f64; LANES] {
        match self.column_scales {
            [] => [1.0; LANES],
            scales => instructions.widen_f32(*block(scales, place, &mut [0.0; LANES])),
        }
    }
}

/// x² of each lane, in f64.
#[inline(always)]
pub(super) fn squared<I: Instructions, T: Compute>(instructions: I, x: [T; LANES]) -> [f64; LANES] {
    let x = T::to_f64(instructions, x);
    instructions.mul_f64(x, x)
}

/// A tensor whose rows are going to move.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moving<'a> {
    /// Format of the parameter.
    pub dtype: DType,
    /// `None` at rest.
    pub velocity: Option<&'a Velocity>,
    /// What it is multiplied with; 0 for one that moves along its gradient.
    pub decay: f64,
    /// Before the step.
    pub variances: Variances<'a>,
    /// Whether other ranks hold the rest of its rows, whose averages are not known here then.
    pub shares_rows: bool,
}

/// The averages of a tensor, one for each column and each row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Averages {
    pub columns: Vec<f64>,
    pub rows: Vec<f64>,
}

impl Averages {
    /// Those of columns after a step with these mean squares.
    pub fn next_columns(rule: ColumnVariance, before: &[f64], means: &[f64]) -> Vec<f64> {
        before.iter().zip(means).map(|(&before, &mean)| averaged(rule.decay, before, mean)).collect()
    }
}

/// What the first pass over tensors with rows finds.
#[derive(Clone, Debug)]
pub(crate) struct RowNorms {
    /// ‖g_k‖² of every gradient, in the order that rows define.
    pub squares: SquaredNorms,
    /// Σ w_i u_j d_ij² of every tensor, d being the new velocity as it will be stored, or the gradient
    /// without its scale.
    pub directions: Vec<f64>,
    /// By tensor, the mean square of the elements that tell of columns; 0 without columns.
    pub sampled: Vec<f64>,
    /// By tensor, the mean square of the gradient in each column of these elements.
    pub columns: Vec<Vec<f64>>,
    /// By tensor, the new average of each row and its part of the direction; of one that other
    /// ranks share Σ g² and Σ u_j d_ij².
    pub rows: Vec<Vec<[f64; 2]>>,
}

impl RowNorms {
    /// Those of a method that has no rows.
    pub fn without_rows(squares: SquaredNorms) -> Self {
        Self { squares, directions: Vec::new(), sampled: Vec::new(), columns: Vec::new(), rows: Vec::new() }
    }

    /// The same, with squares formed again where they leave the range of f64.
    pub fn in_range(mut self, grads: &[GradRef<'_>], moving: &[Moving<'_>]) -> Self {
        self.squares = in_range(grads, &layouts(grads, moving), self.squares.squares);
        self
    }
}

fn layouts(grads: &[GradRef<'_>], moving: &[Moving<'_>]) -> Vec<Layout> {
    (grads.iter().zip(moving))
        .map(|(grad, moving)| Layout::of_rows(grad.len().unwrap_or(0), moving.variances.rows))
        .collect()
}

/// The sums of every tensor in the step after so many; `unscale` is the inverse of the gradient scale.
pub(crate) fn row_norms(
    grads: &[GradRef<'_>],
    moving: &[Moving<'_>],
    unscale: f64,
    applied_steps: u64,
) -> RowNorms {
    let layouts = layouts(grads, moving);
    let mut rows: Vec<Vec<[f64; 2]>> = (layouts.iter().zip(moving))
        .map(|(layout, moving)| vec![[0.0; 2]; moving.variances.rows.count(layout.len)])
        .collect();
    let work = RowWork { grads, moving, unscale };
    let sums = per_tensor(&layouts, &mut rows, &work);
    let (squares, directions) = sums.into_iter().map(|[square, direction]| (square, direction)).unzip();
    let mut of_columns = vec![(0.0, Vec::new()); grads.len()];
    let tensors = of_columns.iter_mut().zip(grads.iter().zip(moving));
    for_each(is_large(&layouts), tensors, |(found, (grad, moving))| {
        *found = column_means(*grad, moving.variances.rows, unscale, applied_steps);
    });
    let (sampled, columns) = of_columns.into_iter().unzip();
    RowNorms { squares: SquaredNorms { squares, exponent: 0 }, directions, sampled, columns, rows }
}

/// The mean square of the elements of the sampled chunks, and that in each of their columns.
fn column_means(grad: GradRef<'_>, rows: Rows, unscale: f64, applied_steps: u64) -> (f64, Vec<f64>) {
    let len = grad.len().unwrap_or(0);
    if rows.columns == 0 || len == 0 {
        return (0.0, vec![0.0; rows.columns]);
    }
    let chunks = len.div_ceil(rows.chunk());
    let Sample { first, stride } = rows.sample(chunks, applied_steps);
    let mut sums = vec![0.0; rows.columns];
    let (mut total, mut elements) = (0.0, 0);
    for chunk in (first..chunks).step_by(stride) {
        let start = chunk * rows.chunk();
        let count = rows.chunk().min(len - start);
        let grad = grad.slice(start, count);
        for (sum, term) in sums.iter_mut().zip(column_sums(grad, rows.columns)) {
            *sum += term;
        }
        total += squares(grad, Some(rows), 1.0);
        elements += count;
    }
    let height = (elements / rows.columns).max(1) as f64;
    let means = sums.into_iter().map(|sum| sum * unscale * unscale / height).collect();
    (total * unscale * unscale / elements as f64, means)
}

/// Σ g² over the rows of a chunk, by column, from row to row.
fn column_sums(grad: GradRef<'_>, columns: usize) -> Vec<f64> {
    let mut sums = vec![0.0; columns];
    run(ColumnSums { grad, sums: &mut sums });
    sums
}

struct ColumnSums<'a> {
    grad: GradRef<'a>,
    /// One for each column.
    sums: &'a mut [f64],
}

impl Work for ColumnSums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, instructions: I) {
        #[inline(always)]
        fn add<I: Instructions, T: Compute + Read<G>, G: Copy + Default>(
            instructions: I,
            g: &[G],
            sums: &mut [f64],
        ) {
            for row in g.chunks(sums.len()) {
                let (mut sums, row_blocks) = (Blocks::new(&mut sums[..row.len()]), BlocksRef::new(row));
                for last in rounds(row.len()) {
                    for (sums, row) in sums.round(last).iter_mut().zip(row_blocks.round(last)) {
                        let terms = squared(instructions, T::read(instructions, *row));
                        *sums = instructions.add_f64(*sums, terms);
                    }
                }
                sums.finish();
            }
        }
        each_grad!(
            self.grad,
            g => add::<I, f32, _>(instructions, g, self.sums),
            f64 => add::<I, f64, _>(instructions, g, self.sums),
            missing => ()
        )
    }
}

/// The sums of chunks of tensors with rows.
struct RowWork<'a> {
    grads: &'a [GradRef<'a>],
    moving: &'a [Moving<'a>],
    unscale: f64,
}

impl ChunkWork<2> for RowWork<'_> {
    type Row = [f64; 2];

    #[inline(always)]
    fn chunk<I: Instructions>(
        &self,
        instructions: I,
        tensor: usize,
        start: usize,
        count: usize,
        found: &mut [[f64; 2]],
    ) -> [f64; 2] {
        let grad = self.grads[tensor].slice(start, count);
        let Moving { dtype, velocity, decay, variances, shares_rows } = self.moving[tensor];
        let before = match shares_rows {
            true => &[],
            false => &variances.averages[start / variances.rows.len..][..found.len()],
        };
        let chunk = RowChunk {
            instructions,
            variances: Variances { averages: before, ..variances },
            shares_rows,
            scalars: UpdateScalars {
                velocity_decay: decay,
                unscale: self.unscale,
                ..UpdateScalars::default()
            },
        };
        let range = start..start + count;
        match (dtype, velocity) {
            (DType::F64, Some(Velocity::F64(v))) => chunk.sums(grad, Some(&v[range]), found),
            (DType::F64, _) => chunk.sums::<f64>(grad, None, found),
            (_, Some(Velocity::F32(v))) => chunk.sums(grad, Some(&v[range]), found),
            _ => chunk.sums::<f32>(grad, None, found),
        }
    }
}

/// The rows of one chunk before the step.
struct RowChunk<'a, I> {
    instructions: I,
    variances: Variances<'a>,
    shares_rows: bool,
    scalars: UpdateScalars,
}

impl<I: Instructions> RowChunk<'_, I> {
    /// ‖g‖² and Σ w_i u_j d_ij²; writes what [`RowNorms`] has of rows.
    #[inline(always)]
    fn sums<V: State>(&self, grad: GradRef<'_>, velocity: Option<&[V]>, found: &mut [[f64; 2]]) -> [f64; 2] {
        each_grad!(
            grad,
            g => self.with_grad::<V, V, _>(g, velocity, found),
            f64 => self.with_grad::<f64, V, f64>(g, velocity, found),
            missing => [0.0; 2]
        )
    }

    // Without optimisation the arrays of all formats would add up in one frame, beyond a thread's stack.
    #[cfg_attr(debug_assertions, inline(never))]
    #[cfg_attr(not(debug_assertions), inline(always))]
    fn with_grad<T: Compute + Read<G>, V: State + Store<T>, G: Copy + Default>(
        &self,
        g: &[G],
        velocity: Option<&[V]>,
        found: &mut [[f64; 2]],
    ) -> [f64; 2] {
        let unscale = self.scalars.unscale;
        let Variances { rows, rule, averages: before, .. } = self.variances;
        let lanes = rows.lanes();
        let (mut squares, mut directions) = (Leaves::new(), Leaves::new());
        for (row, g) in g.chunks(rows.len).enumerate() {
            let velocity = velocity.map(|v| &v[row * rows.len..][..g.len()]);
            let [square, mut weighted] = self.row::<T, V, G>(g, velocity, lanes);
            if self.scalars.velocity_decay == 0.0 {
                weighted = weighted * unscale * unscale;
            }
            found[row] = if self.shares_rows {
                [square, weighted]
            } else {
                let mean = square * unscale * unscale / g.len() as f64;
                let average = averaged(rule.decay, before[row], mean);
                [average, rule.scale(average) * weighted]
            };
            squares.push_row(square, lanes);
            directions.push_row(found[row][1], lanes);
        }
        [squares.sum(), directions.sum()]
    }

    /// Σ g² and Σ u d² of a row.
    #[inline(always)]
    fn row<T: Compute + Read<G>, V: State + Store<T>, G: Copy + Default>(
        &self,
        g: &[G],
        velocity: Option<&[V]>,
        lanes: usize,
    ) -> [f64; 2] {
        let instructions = self.instructions;
        let moves = self.scalars.velocity_decay != 0.0;
        let has_columns = !self.variances.column_scales.is_empty();
        lanes_sum(
            instructions,
            g.len(),
            lanes,
            #[inline(always)]
            |at| {
                let g = T::read(instructions, *block(g, at, &mut [G::default(); LANES]));
                let squares = squared(instructions, g);
                let mut weighted = if moves {
                    let v = match velocity {
                        Some(v) => *block(v, at, &mut [V::default(); LANES]),
                        None => [V::default(); LANES],
                    };
                    squared(instructions, advanced(instructions, v, g, &self.scalars))
                } else {
                    squares
                };
                if has_columns {
                    let u = self.variances.column_scales(instructions, at);
                    weighted = instructions.mul_f64(weighted, u);
                }
                [squares, weighted]
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::sum::naive;
    use super::*;

    const RULE: RowVariance = RowVariance { decay: 0.98, weight: 0.3, floor: 1e-3 };
    const COLUMN_RULE: ColumnVariance = ColumnVariance { decay: 0.98, mean: 0.4, floor: 0.012 };

    /// Numbers of different sizes, in no order.
    fn numbers(seed: u64, len: usize) -> Vec<f32> {
        naive::spread(seed, len).iter().enumerate().map(|(i, x)| x.powf(0.1) * [1.0, -1.0][i % 2]).collect()
    }

    fn squares_of(seed: u64, len: usize) -> Vec<f64> {
        numbers(seed, len).iter().map(|&x| f64::from(x) * f64::from(x)).collect()
    }

    /// What the first pass finds, by the documented order with indices only: matrices of one and of many
    /// chunks, of which some tell of columns; a last row that is shorter; rows that one lane sums, and all
    /// lanes.
    #[test]
    fn sums_of_rows_follow_the_documented_order() {
        for (rows, elements) in [
            (Rows::of_matrix(3), 30),
            (Rows::of_matrix(64), 64 * 700),
            (Rows::of_matrix(100), 4_250),
            (Rows::of_matrix(257), 257 * 300),
            (Rows::of_matrix(4000), 4000 * 18),
            (Rows::of_matrix(9000), 18_000),
            (Rows::of_vector(5000), 5000),
        ] {
            for (decay, applied_steps) in [(0.9, 0), (0.9, 2), (0.0, 1)] {
                compare(rows, elements, decay, applied_steps);
            }
        }
    }

    fn compare(rows: Rows, elements: usize, decay: f64, applied_steps: u64) {
        let (len, unscale) = (rows.len, 0.3);
        let grad = numbers(1, elements);
        let velocity = Velocity::F32(numbers(2, elements));
        let averages = squares_of(3, rows.count(elements));
        let column_averages = squares_of(4, rows.columns);
        let column_scales: Vec<f32> = column_averages.iter().map(|&x| COLUMN_RULE.scale(x)).collect();
        let variances = Variances { rows, rule: RULE, averages: &averages, column_scales: &column_scales };
        let moving =
            Moving { dtype: DType::F32, velocity: Some(&velocity), decay, variances, shares_rows: false };
        let found = row_norms(&[grad[..].into()], &[moving], unscale, applied_steps);

        let lanes = (0..9).map(|k| 1 << k).find(|lanes| 16 * lanes >= len).unwrap();
        let square = |i: usize| f64::from(grad[i]) * f64::from(grad[i]);
        let Velocity::F32(velocity) = &velocity else { unreachable!() };
        let weighted = |i: usize| {
            let d = if decay > 0.0 { velocity[i] * decay as f32 - grad[i] * unscale as f32 } else { grad[i] };
            let product = f64::from(d) * f64::from(d);
            if rows.columns > 0 { product * f64::from(column_scales[i % len]) } else { product }
        };
        let place = |row: usize| row * len..elements.min((row + 1) * len);
        let row_sum = |row: usize, of: &dyn Fn(usize) -> f64| {
            naive::lanes(lanes, &place(row).map(of).collect::<Vec<_>>())
        };
        let count = elements.div_ceil(len);
        let squares: Vec<f64> = (0..count).map(|row| row_sum(row, &square)).collect();
        let next: Vec<f64> = (0..count)
            .map(|row| {
                let mean = squares[row] * unscale * unscale / place(row).len() as f64;
                0.98 * averages[row] + (1.0 - 0.98) * mean
            })
            .collect();
        let directions: Vec<f64> = (0..count)
            .map(|row| {
                let w = 1.0 / (next[row] / 0.3 + 1e-3).sqrt();
                let weighted = row_sum(row, &weighted);
                w * if decay > 0.0 { weighted } else { weighted * unscale * unscale }
            })
            .collect();
        let per_chunk = 256 / lanes;
        let chunks =
            |list: &[f64]| list.chunks(per_chunk).map(|rows| naive::rows(lanes, rows)).collect::<Vec<_>>();
        let of_chunks = chunks(&squares);
        assert_eq!(found.squares.squares, [naive::tensor(&of_chunks)]);
        assert_eq!(found.directions, [naive::tensor(&chunks(&directions))]);

        let stride = of_chunks.len().div_ceil(16);
        let (mut columns, mut sampled, mut seen) = (vec![0.0; rows.columns], 0.0, 0);
        for chunk in (0..of_chunks.len()).filter(|chunk| chunk % stride == applied_steps as usize % stride) {
            let place = chunk * per_chunk * len..elements.min((chunk + 1) * per_chunk * len);
            for (column, sum) in columns.iter_mut().enumerate() {
                let own = place.clone().skip(column).step_by(len);
                *sum += own.map(square).fold(0.0, |sum, term| sum + term);
            }
            sampled += of_chunks[chunk];
            seen += place.len();
        }
        let height = (seen / len) as f64;
        let columns: Vec<f64> = columns.iter().map(|sum| sum * unscale * unscale / height).collect();
        let sampled = if rows.columns > 0 { sampled * unscale * unscale / seen as f64 } else { 0.0 };
        assert_eq!((found.sampled, found.columns), (vec![sampled], vec![columns]));
        let next: Vec<_> =
            next.into_iter().zip(directions).map(|(next, direction)| [next, direction]).collect();
        assert_eq!(found.rows, [next]);

        // Of rows that other ranks share it is known what they add up to here.
        let shared = Moving { shares_rows: true, ..moving };
        let found = row_norms(&[grad[..].into()], &[shared], unscale, applied_steps);
        let sums = |row| {
            let weighted = row_sum(row, &weighted);
            [squares[row], if decay > 0.0 { weighted } else { weighted * unscale * unscale }]
        };
        assert_eq!(found.rows, [(0..count).map(sums).collect::<Vec<_>>()]);
    }
}
