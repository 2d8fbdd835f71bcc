//! Variances of rows and columns, and sums that weigh each element by those of its own.

use std::marker::PhantomData;

use super::element::{BlocksRef, Compute, Read, State, Store, end, filled_up};
use super::is_large;
use super::reduce::{ChunkWork, Layout, Place, SquaredNorms, Sums};
use super::simd::{Instructions, LANES, Processor, Work};
use super::sum::{Leaves, ahead, lanes_sum};
use super::threads::{Task, for_each};
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
pub(crate) struct Weights<'a> {
    pub rows: Rows,
    /// w of each row.
    pub row_scales: &'a [f64],
    /// u of each column; empty where there are none.
    pub column_scales: &'a [f32],
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
    pub rows: Rows,
    /// How the variances of its rows change.
    pub rule: RowVariance,
    /// An average for each row, before the step.
    pub averages: &'a [f64],
    /// u of each column; empty where there are none.
    pub column_scales: &'a [f32],
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
    /// By tensor, the new average of each row and w; of one that other ranks share Σ g² and Σ u_j d_ij².
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
            // As a rule all have the lengths of the last step.
            if self.rows[tensor].len() != rows.count(len(grad)) {
                self.rows[tensor].resize(rows.count(len(grad)), [0.0; 2]);
            }
            if self.columns[tensor].len() != rows.columns {
                self.columns[tensor].resize(rows.columns, 0.0);
            }
        }
        let layout = |tensor: usize| Layout::new(len(&grads[tensor]), Some(rows_of(tensor)));
        self.with_rows.form(grads.len(), &mut self.rows, &RowWork { grads, rows_of, moving, unscale });
        let sums = self.with_rows.tensors();
        self.directions.clear();
        self.directions.extend(sums.iter().map(|&[_, direction]| direction));
        self.squares.take(sums.iter().map(|&[square, _]| square));
        if rescales {
            self.squares.rescale(grads, |tensor| Some(rows_of(tensor)));
        }
        if self.columns.iter().all(Vec::is_empty) {
            return;
        }
        let found = self.columns.iter_mut().zip(&mut self.sampled).zip(self.with_rows.chunks(layout));
        let columns = grads.iter().zip(found).enumerate();
        let columns = columns.filter_map(|(tensor, (&grad, ((means, sampled), chunks)))| {
            // Vectors have none.
            let rows = rows_of(tensor);
            let columns = ColumnMeans { grad, rows, chunks, unscale, applied_steps, sampled, means };
            (rows.columns > 0).then_some(columns)
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

impl Task for ColumnMeans<'_> {
    fn split_off(&mut self) -> Option<Self> {
        None
    }

    fn run(&mut self, processor: Processor) {
        processor.run(self);
    }
}

impl Work for &mut ColumnMeans<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, instructions: I) {
        *self.sampled = 0.0;
        if self.chunks.is_empty() {
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
    fn means<I: Instructions, T: Compute + Read<G>, G: Copy + Default>(&mut self, instructions: I, g: &[G]) {
        let Self { rows, chunks, unscale, .. } = *self;
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

    #[inline]
    fn chunk(&self, processor: Processor, place: Place, found: &mut [[f64; 2]], sums: &mut [f64; 2]) {
        let Place { tensor, start, count } = place;
        let range = start..start + count;
        let moving = (self.moving)(tensor);
        let chunk = RowChunk {
            processor,
            grad: self.grads[tensor].slice(start, count),
            first: start / moving.rows.len,
            moving: &moving,
            unscale: self.unscale,
            found,
            sums,
        };
        match (moving.dtype, moving.velocity) {
            // Along the gradient: as it is, whatever the format of a velocity would be.
            _ if moving.decay == 0.0 => each_grad!(
                chunk.grad,
                g => chunk.run::<f32, f32, _>(g, &[]),
                f64 => chunk.run::<f64, f64, f64>(g, &[]),
                missing => *chunk.sums = [0.0; 2]
            ),
            (DType::F64, Some(Velocity::F64(v))) => chunk.by_velocity(&v[range]),
            (DType::F64, _) => chunk.by_velocity::<f64>(&[]),
            (_, Some(Velocity::F32(v))) => chunk.by_velocity(&v[range]),
            _ => chunk.by_velocity::<f32>(&[]),
        }
    }
}

/// The rows of one chunk before the step.
struct RowChunk<'a> {
    processor: Processor,
    grad: GradRef<'a>,
    /// The row that is the first.
    first: usize,
    moving: &'a Moving<'a>,
    unscale: f64,
    /// As [`Norms::rows`].
    found: &'a mut [[f64; 2]],
    /// Σ g² and the part of the direction.
    sums: &'a mut [f64; 2],
}

// Inlined: an argument that is passed through memory comes late.
impl RowChunk<'_> {
    /// ‖g‖² and Σ w_i u_j d_ij²; without velocities those are at rest.
    #[inline(always)]
    fn by_velocity<V: State>(self, velocity: &[V]) {
        each_grad!(
            self.grad,
            g => self.run::<V, V, _>(g, velocity),
            f64 => self.run::<f64, V, f64>(g, velocity),
            missing => *self.sums = [0.0; 2]
        )
    }

    /// The same of certain formats, computed in the format `T`.
    #[inline(always)]
    fn run<T: Compute + Read<G>, V: State + Store<T>, G: Copy + Default>(self, g: &[G], velocity: &[V]) {
        let Self { first, moving, unscale, found, sums, .. } = self;
        let format = PhantomData::<T>;
        self.processor.run(TypedRows { first, moving, unscale, found, sums, g, velocity, format });
    }
}

struct TypedRows<'a, T, V, G> {
    first: usize,
    moving: &'a Moving<'a>,
    unscale: f64,
    found: &'a mut [[f64; 2]],
    sums: &'a mut [f64; 2],
    g: &'a [G],
    /// Empty at rest, and where there are none.
    velocity: &'a [V],
    format: PhantomData<T>,
}

impl<T: Compute + Read<G>, V: State + Store<T>, G: Copy + Default> Work for TypedRows<'_, T, V, G> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, instructions: I) {
        let Self { moving, unscale, found, sums, .. } = self;
        let &Moving { decay: velocity_decay, shares_rows, .. } = moving;
        let &Moving { rows, rule, averages, column_scales, .. } = moving;
        // Of rows that ranks share they are not known here.
        let before = if shares_rows { &[] } else { &averages[self.first..][..found.len()] };
        let mut scalars = UpdateScalars { velocity_decay, unscale, ..UpdateScalars::default() };
        let moves = scalars.velocity_decay != 0.0;
        if !moves {
            // d is the gradient itself, but for the sign.
            scalars.unscale = 1.0;
        }
        let (lanes, ahead) = (rows.lanes(), ahead(rows.len));
        let mut leaves = Leaves::<2>::new();
        for (row, g) in self.g.chunks(rows.len).enumerate() {
            let velocity = match self.velocity {
                [] => &[],
                velocity => &velocity[row * rows.len..][..g.len()],
            };
            let of_row =
                Row { instructions, scalars: &scalars, lanes, ahead, g, velocity, format: self.format };
            let [square, mut weighted] = match column_scales {
                [] => of_row.of(
                    #[inline(always)]
                    |_, sum, d| V::add_squares(instructions, sum, d),
                ),
                scales => {
                    let mut end = end();
                    let mut scales = BlocksRef::new(scales, &mut end);
                    of_row.of(
                        #[inline(always)]
                        |at, sum, d| {
                            let u = instructions.widen_f32(*scales.at(at));
                            let d = V::to_f64(instructions, d);
                            let square = instructions.mul_f64(d, d);
                            instructions.add_f64(sum, instructions.mul_f64(square, u))
                        },
                    )
                }
            };
            if !moves {
                weighted = weighted * unscale * unscale;
            }
            found[row] = if shares_rows {
                [square, weighted]
            } else {
                let mean = square * unscale * unscale / g.len() as f64;
                let average = averaged(rule.decay, before[row], mean);
                let scale = rule.scale(average);
                weighted *= scale;
                [average, scale]
            };
            if found.len() == 1 {
                // Most tensors of a long list have a single row.
                *sums = [square, weighted];
                return;
            }
            leaves.push_row([square, weighted], lanes);
        }
        *sums = leaves.sum();
    }
}

/// A row of a chunk.
struct Row<'a, I, T, V, G> {
    instructions: I,
    scalars: &'a UpdateScalars,
    lanes: usize,
    ahead: usize,
    g: &'a [G],
    velocity: &'a [V],
    format: PhantomData<T>,
}

impl<I: Instructions, T: Compute + Read<G>, V: State + Store<T>, G: Copy + Default> Row<'_, I, T, V, G> {
    /// Σ g², and the sum that `add` adds the terms of d to, which begin with a certain element.
    #[inline(always)]
    fn of(&self, mut add: impl FnMut(usize, [f64; LANES], [V; LANES]) -> [f64; LANES]) -> [f64; 2] {
        let Self { instructions, ahead, .. } = *self;
        // At rest all velocities are the last block, which then is one of zeros.
        let (mut g_end, mut v_end) = (end(), end());
        let mut g = BlocksRef::new(self.g, &mut g_end);
        let mut velocity = BlocksRef::new(self.velocity, &mut v_end);
        lanes_sum::<_, 2, false>(
            instructions,
            self.g.len(),
            self.lanes,
            #[inline(always)]
            |at, _, [squares, weighted]| {
                g.prefetch(instructions, at + ahead);
                velocity.prefetch(instructions, at + ahead);
                let g = T::read(instructions, *g.at(at));
                *squares = T::add_squares(instructions, *squares, g);
                let d = advanced(instructions, *velocity.at(at), g, self.scalars);
                *weighted = add(at, *weighted, d);
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
        let moving = Moving {
            dtype: DType::F32,
            velocity: Some(&velocity),
            decay,
            rows,
            rule: RULE,
            averages: &averages,
            column_scales: &column_scales,
            shares_rows: false,
        };
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
        let scales: Vec<f64> = next.iter().map(|next| 1.0 / (next / 0.3 + 1e-3).sqrt()).collect();
        let directions: Vec<f64> = (0..count)
            .map(|row| {
                let weighted = row_sum(row, &weighted);
                scales[row] * if decay > 0.0 { weighted } else { weighted * unscale * unscale }
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
        let next: Vec<_> = next.into_iter().zip(scales).map(|(next, scale)| [next, scale]).collect();
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
