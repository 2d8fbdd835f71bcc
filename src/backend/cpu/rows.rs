//! Variances of rows and columns, and sums that weigh each element by those of its own.

use super::element::{BlocksRef, Compute, Read, State, Store, filled_up};
use super::reduce::{ChunkWork, Layout, SquaredNorms, Sums, is_large};
use super::simd::{Instructions, LANES, Work};
use super::sum::{Leaves, ahead, lanes_sum};
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
#[derive(Clone, Debug, Default)]
pub(crate) struct Averages {
    pub columns: Vec<f64>,
    pub rows: Vec<f64>,
}

impl Averages {
    /// Takes those of columns after a step with these mean squares.
    pub fn take_columns(&mut self, rule: ColumnVariance, before: &[f64], means: &[f64]) {
        let pairs = before.iter().zip(means);
        self.columns.clear();
        self.columns.extend(pairs.map(|(&before, &mean)| averaged(rule.decay, before, mean)));
    }
}

/// What the first pass over tensors finds, in memory that is used again. But for the squares all is empty
/// with a method that has no rows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Norms {
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
    without_rows: Sums<1>,
    with_rows: Sums<2>,
}

impl Norms {
    /// Those of a method that has no rows.
    pub fn form_without_rows(&mut self, grads: &[GradRef<'_>]) {
        self.squares.form(grads, &mut self.without_rows);
    }

    /// Those of every tensor in the step after so many; `rows_of` and `moving` tell of one, and `unscale` is
    /// the inverse of the gradient scale. `rescales` forms squares again that leave the range of f64.
    pub fn form_with_rows<'a>(
        &mut self,
        grads: &[GradRef<'_>],
        rows_of: impl Fn(usize) -> Rows + Copy + Send + Sync,
        moving: impl Fn(usize) -> Moving<'a> + Sync,
        unscale: f64,
        applied_steps: u64,
        rescales: bool,
    ) {
        let len = |grad: &GradRef<'_>| grad.len().unwrap_or(0);
        self.rows.resize_with(grads.len(), Vec::new);
        self.columns.resize_with(grads.len(), Vec::new);
        self.sampled.resize(grads.len(), 0.0);
        for (tensor, grad) in grads.iter().enumerate() {
            let rows = rows_of(tensor);
            self.rows[tensor].resize(rows.count(len(grad)), [0.0; 2]);
            self.columns[tensor].resize(rows.columns, 0.0);
        }
        let work = RowWork { grads, rows_of, moving, unscale };
        self.with_rows.form(grads.len(), &mut self.rows, &work);
        let sums = self.with_rows.tensors();
        self.directions.clear();
        self.directions.extend(sums.iter().map(|&[_, direction]| direction));
        self.squares.take(sums.iter().map(|&[square, _]| square));
        if rescales {
            self.squares.rescale(grads, |tensor| Some(rows_of(tensor)));
        }
        let mut chunks = self.with_rows.chunks();
        let found = self.columns.iter_mut().zip(&mut self.sampled);
        let columns = grads.iter().zip(found).enumerate().map(|(tensor, (&grad, (means, sampled)))| {
            let rows = rows_of(tensor);
            let count = Layout::new(len(&grad), Some(rows)).chunks();
            let chunks = chunks.split_off(..count).unwrap_or_default();
            ColumnMeans { grad, rows, chunks, unscale, applied_steps, sampled, means }
        });
        for_each(is_large(grads.iter().map(len).sum()), columns);
    }
}

/// The mean square of the elements of the sampled chunks of a tensor, and that in each of their columns.
struct ColumnMeans<'a> {
    grad: GradRef<'a>,
    rows: Rows,
    /// What is known of each chunk, Σ g² first.
    chunks: &'a [[f64; 2]],
    unscale: f64,
    applied_steps: u64,
    sampled: &'a mut f64,
    means: &'a mut [f64],
}

impl Work for ColumnMeans<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, instructions: I) {
        *self.sampled = 0.0;
        if self.means.is_empty() || self.chunks.is_empty() {
            self.means.fill(0.0);
            return;
        }
        each_grad!(
            self.grad,
            g => self.means::<I, f32, _>(instructions, g),
            f64 => self.means::<I, f64, _>(instructions, g),
            missing => ()
        )
    }
}

impl ColumnMeans<'_> {
    #[inline(always)]
    fn means<I: Instructions, T: Compute + Read<G>, G: Copy + Default>(self, instructions: I, g: &[G]) {
        let Self { rows, chunks, unscale, .. } = self;
        let Sample { first, stride } = rows.sample(chunks.len(), self.applied_steps);
        let place = |chunk: usize| chunk * rows.chunk()..g.len().min((chunk + 1) * rows.chunk());
        let (mut total, mut elements) = (0.0, 0);
        for chunk in (first..chunks.len()).step_by(stride) {
            total += chunks[chunk][0];
            elements += place(chunk).len();
        }
        *self.sampled = total * unscale * unscale / elements as f64;
        let height = (elements / rows.columns).max(1) as f64;
        // Some columns in all rows before the next: their sums stay in registers.
        for (block_of, means) in self.means.chunks_mut(LANES).enumerate() {
            let mut sums = [0.0; LANES];
            for chunk in (first..chunks.len()).step_by(stride) {
                let mut of_chunk = [0.0; LANES];
                for row in g[place(chunk)].chunks(rows.columns) {
                    let Some(columns) = row.get(block_of * LANES..) else { break };
                    let columns = match columns.first_chunk() {
                        Some(columns) => T::read(instructions, *columns),
                        None => T::read(instructions, filled_up(columns)),
                    };
                    of_chunk = T::add_squares(instructions, of_chunk, columns);
                }
                sums = instructions.add_f64(sums, of_chunk);
            }
            for (mean, sum) in means.iter_mut().zip(sums) {
                *mean = sum * unscale * unscale / height;
            }
        }
    }
}

/// The sums of chunks of tensors with rows.
struct RowWork<'a, R, M> {
    grads: &'a [GradRef<'a>],
    rows_of: R,
    moving: M,
    unscale: f64,
}

impl<'a, R, M> ChunkWork<2> for RowWork<'_, R, M>
where
    R: Fn(usize) -> Rows + Sync,
    M: Fn(usize) -> Moving<'a> + Sync,
{
    type Row = [f64; 2];

    fn layout(&self, tensor: usize) -> Layout {
        Layout::new(self.grads[tensor].len().unwrap_or(0), Some((self.rows_of)(tensor)))
    }

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
        let Moving { dtype, velocity, decay, variances, shares_rows } = (self.moving)(tensor);
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
    /// ‖g‖² and Σ w_i u_j d_ij²; writes the two sums of each row to `found`.
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
        let mut leaves = Leaves::<2>::new();
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
            leaves.push_row([square, found[row][1]], lanes);
        }
        leaves.sum()
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
        let scales = BlocksRef::new(self.variances.column_scales);
        // At rest all are the last block, which then is one of zeros.
        let velocity = BlocksRef::new(velocity.unwrap_or_default());
        let (len, g) = (g.len(), BlocksRef::new(g));
        let ahead = ahead(len);
        lanes_sum::<_, 2, false>(
            instructions,
            len,
            lanes,
            #[inline(always)]
            |at, _, [squares, weighted]| {
                g.prefetch(instructions, at + ahead);
                if moves {
                    velocity.prefetch(instructions, at + ahead);
                }
                let g = T::read(instructions, g.at(at));
                *squares = T::add_squares(instructions, *squares, g);
                let u = if has_columns { Some(instructions.widen_f32(scales.at(at))) } else { None };
                *weighted = if moves {
                    let v = advanced(instructions, velocity.at(at), g, &self.scalars);
                    add_weighted(instructions, *weighted, v, u)
                } else {
                    add_weighted(instructions, *weighted, g, u)
                };
            },
        )
    }
}

/// Adds d², times u where there are columns.
#[inline(always)]
fn add_weighted<I: Instructions, T: Compute>(
    instructions: I,
    sum: [f64; LANES],
    d: [T; LANES],
    u: Option<[f64; LANES]>,
) -> [f64; LANES] {
    let Some(u) = u else { return T::add_squares(instructions, sum, d) };
    let d = T::to_f64(instructions, d);
    instructions.add_f64(sum, instructions.mul_f64(instructions.mul_f64(d, d), u))
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
        let mut found = Norms::default();
        found.form_with_rows(&[grad[..].into()], |_| rows, |_| moving, unscale, applied_steps, true);

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
        assert_eq!((&found.sampled, &found.columns), (&vec![sampled], &vec![columns]));
        let next: Vec<_> =
            next.into_iter().zip(directions).map(|(next, direction)| [next, direction]).collect();
        assert_eq!(found.rows, [next]);

        // Of rows that other ranks share it is known what they add up to here.
        let shared = Moving { shares_rows: true, ..moving };
        found.form_with_rows(&[grad[..].into()], |_| rows, |_| shared, unscale, applied_steps, true);
        let sums = |row| {
            let weighted = row_sum(row, &weighted);
            [squares[row], if decay > 0.0 { weighted } else { weighted * unscale * unscale }]
        };
        assert_eq!(found.rows, [(0..count).map(sums).collect::<Vec<_>>()]);
    }
}
