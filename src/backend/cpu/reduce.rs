//! Sums over lists of tensors: squared gradient norms, and what norm lock needs.

use std::marker::PhantomData;

use super::element::{Compute, Load, Parameter, Read, Store, block};
use super::rows::{Variances, squared};
use super::simd::{Instructions, LANES, Work, run};
use super::sum::{CHUNK, Leaves, lanes_sum, tensor_sums};
use super::threads::for_each;
use super::update::{UpdateScalars, Velocity, advanced};
use super::{SERIAL_BELOW, TASK};
use crate::backend::abi::RFD_TINY_EXPONENT;
use crate::numeric::{LEAVES, exponent_of, fold, power_of_two};
use crate::rows::Rows;
use crate::tensor::{GradRef, ParamMut, each_grad, each_param};

/// ‖g_k‖² of every tensor; `squares[k] · 4^exponent`. The exponent is 0 unless f64 gradients are so large or
/// so small that their squares leave the range of f64.
#[derive(Clone, Debug)]
pub(crate) struct SquaredNorms {
    pub squares: Vec<f64>,
    pub exponent: i32,
}

/// Squared norms below this may have lost terms to underflow, which only f64 gradients can cause: the square
/// of the smallest f32 is 2⁻²⁹⁸.
const TINY: f64 = f64::from_bits(((1023 + RFD_TINY_EXPONENT) as u64) << 52);

/// The squared norm of every gradient, in the fixed order. A missing gradient has norm 0.
pub(crate) fn squared_norms(grads: &[GradRef<'_>]) -> SquaredNorms {
    let layouts = chunked(grads);
    in_range(grads, &layouts, sums(grads, &layouts, 1.0))
}

/// ‖g_k‖² of every tensor, where squares may leave the range of f64.
pub(crate) fn plain_squares(grads: &[GradRef<'_>]) -> Vec<f64> {
    sums(grads, &chunked(grads), 1.0)
}

/// The layouts of tensors that have no rows.
fn chunked(grads: &[GradRef<'_>]) -> Vec<Layout> {
    grads.iter().map(|grad| Layout::of_chunks(grad.len().unwrap_or(0))).collect()
}

/// Forms the sums of squares again where they left the range of f64.
pub(super) fn in_range(grads: &[GradRef<'_>], layouts: &[Layout], squares: Vec<f64>) -> SquaredNorms {
    let mut norms = SquaredNorms { squares, exponent: 0 };
    let total = fold(norms.squares.iter().copied());
    if total < TINY || total == f64::INFINITY {
        let largest = grads.iter().map(largest_f64).fold(0.0, f64::max);
        if largest > 0.0 && largest.is_finite() {
            let exponent = exponent_of(largest);
            // The scale stays a normal power of two; 2^±1022 leaves every square in range.
            let exponent = exponent.clamp(-1022, 1022);
            norms = SquaredNorms { squares: sums(grads, layouts, power_of_two(-exponent)), exponent };
        }
    }
    norms
}

/// The largest |g| of an f64 gradient; 0 for the other formats, whose squares can't leave the range.
fn largest_f64(grad: &GradRef<'_>) -> f64 {
    match grad {
        GradRef::F64(g) => g.iter().fold(0.0, |largest: f64, x| largest.max(x.abs())),
        _ => 0.0,
    }
}

/// Σ (scale·g)² of every tensor.
fn sums(grads: &[GradRef<'_>], layouts: &[Layout], scale: f64) -> Vec<f64> {
    let sums = per_tensor(layouts, &mut [], &SquareWork { grads, layouts, scale });
    sums.into_iter().map(|[sum]| sum).collect()
}

/// The squares of chunks of tensors.
struct SquareWork<'a> {
    grads: &'a [GradRef<'a>],
    layouts: &'a [Layout],
    scale: f64,
}

impl ChunkWork<1> for SquareWork<'_> {
    type Row = ();

    #[inline(always)]
    fn chunk<I: Instructions>(
        &self,
        instructions: I,
        tensor: usize,
        start: usize,
        count: usize,
        _: &mut [()],
    ) -> [f64; 1] {
        let Self { grads, layouts, scale } = self;
        let grad = grads[tensor].slice(start, count);
        [Squares { grad, rows: layouts[tensor].rows, scale: *scale }.run(instructions)]
    }
}

/// The square of a chunk, which consists of rows where they are given.
pub(super) fn squares(grad: GradRef<'_>, rows: Option<Rows>, scale: f64) -> f64 {
    run(Squares { grad, rows, scale })
}

struct Squares<'a> {
    grad: GradRef<'a>,
    rows: Option<Rows>,
    scale: f64,
}

impl Work for Squares<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<I: Instructions>(self, instructions: I) -> f64 {
        #[inline(always)]
        fn sum<I: Instructions, T: Compute + Read<G>, G: Copy + Default>(
            instructions: I,
            g: &[G],
            rows: Option<Rows>,
            change: impl Fn([T; LANES]) -> [T; LANES] + Copy,
        ) -> f64 {
            #[inline(always)]
            fn squares<I: Instructions, T: Compute + Read<G>, G: Copy + Default>(
                instructions: I,
                g: &[G],
                lanes: usize,
                change: impl Fn([T; LANES]) -> [T; LANES] + Copy,
            ) -> f64 {
                let [sum] = lanes_sum(
                    instructions,
                    g.len(),
                    lanes,
                    #[inline(always)]
                    |at| {
                        let g = T::read(instructions, *block(g, at, &mut [G::default(); LANES]));
                        [squared(instructions, change(g))]
                    },
                );
                sum
            }
            let Some(rows) = rows else { return squares(instructions, g, LEAVES, change) };
            let mut leaves = Leaves::new();
            let lanes = rows.lanes();
            // No closure: what is not inlined has no vector instructions.
            for row in g.chunks(rows.len) {
                leaves.push_row(squares(instructions, row, lanes, change), lanes);
            }
            leaves.sum()
        }
        let Self { grad, rows, scale } = self;
        // The scale is a power of two, so both products are exact but for underflow to 0; 0 stays 0 at any
        // scale.
        let scaled = |sum: f64| if sum == 0.0 { 0.0 } else { sum * scale * scale };
        each_grad!(
            grad,
            g => scaled(sum::<I, f32, _>(instructions, g, rows, |x| x)),
            f64 => sum::<I, f64, _>(instructions, g, rows, |x| instructions.mul_f64(x, [scale; LANES])),
            missing => 0.0
        )
    }
}

/// How a tensor is cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Elements.
    pub len: usize,
    /// Elements of a chunk.
    chunk: usize,
    /// What chunks consist of, if not of plain elements.
    rows: Option<Rows>,
}

impl Layout {
    pub fn of_chunks(len: usize) -> Self {
        Self { len, chunk: CHUNK, rows: None }
    }

    pub fn of_rows(len: usize, rows: Rows) -> Self {
        Self { len, chunk: rows.chunk(), rows: Some(rows) }
    }

    fn rows_of_chunk(&self) -> usize {
        self.rows.map_or(0, |rows| self.chunk / rows.len)
    }
}

/// What is computed of each chunk of a list of tensors.
pub(super) trait ChunkWork<const N: usize>: Sync {
    /// What it leaves of each row.
    type Row: Send;

    /// The sums of `count` elements of a tensor from `start` on. `rows` are the places of their rows.
    fn chunk<I: Instructions>(
        &self,
        instructions: I,
        tensor: usize,
        start: usize,
        count: usize,
        rows: &mut [Self::Row],
    ) -> [f64; N];
}

/// Chunks of one tensor that one thread works on: the first, their sums, and the places of their rows.
struct Part<'a, const N: usize, W: ChunkWork<N>> {
    work: &'a W,
    tensor: usize,
    layout: Layout,
    first: usize,
    sums: &'a mut [[f64; N]],
    rows: &'a mut [W::Row],
}

impl<const N: usize, W: ChunkWork<N>> Work for Part<'_, N, W> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, instructions: I) {
        let Self { work, tensor, layout, first, sums, mut rows } = self;
        let Layout { len, chunk, .. } = layout;
        for (i, sum) in sums.iter_mut().enumerate() {
            let start = (first + i) * chunk;
            let own;
            (own, rows) = rows.split_at_mut(rows.len().min(layout.rows_of_chunk()));
            *sum = work.chunk(instructions, tensor, start, chunk.min(len - start), own);
        }
    }
}

/// Does the work on every chunk of every tensor, in parallel, and adds the `N` sums of each in the fixed
/// order. `rows` is a list by tensor, which has a place for each row, or nothing.
pub(super) fn per_tensor<const N: usize, W: ChunkWork<N>>(
    layouts: &[Layout],
    rows: &mut [Vec<W::Row>],
    work: &W,
) -> Vec<[f64; N]> {
    let chunks = |layout: &Layout| layout.len.div_ceil(layout.chunk);
    let mut partial = vec![[0.0; N]; layouts.iter().map(chunks).sum()];
    let (mut rest, mut rows) = (&mut partial[..], rows.iter_mut());
    let parts = layouts.iter().enumerate().flat_map(|(tensor, &layout)| {
        let sums = rest.split_off_mut(..chunks(&layout)).unwrap_or_default();
        let mut rows: &mut [W::Row] = rows.next().map_or(&mut [], |rows| rows);
        let size = (TASK / layout.chunk).max(1);
        sums.chunks_mut(size).enumerate().map(move |(part, sums)| {
            let count = rows.len().min(size * layout.rows_of_chunk());
            let rows = rows.split_off_mut(..count).unwrap_or_default();
            Part { work, tensor, layout, first: part * size, sums, rows }
        })
    });
    for_each(layouts.iter().map(|layout| layout.len).sum::<usize>() >= SERIAL_BELOW, parts, run);
    let mut rest = &partial[..];
    let mut own = |layout| rest.split_off(..chunks(layout)).unwrap_or_default();
    layouts.iter().map(|layout| tensor_sums(own(layout))).collect()
}

/// What norm lock needs to know of a tensor: ‖p‖², ⟨p, d⟩ and ‖d‖², where p is the parameter (or its master
/// weights) and −d the direction of the step: the gradient, or minus the new velocity, each element times w·u
/// where there are rows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LockSums {
    pub parameter: f64,
    pub product: f64,
    pub direction: f64,
}

/// The [`LockSums`] of one tensor; `variances` are those after the step, with the column scales before it.
pub(crate) fn lock_sums(
    param: &ParamMut<'_>,
    master: Option<&[f32]>,
    grad: GradRef<'_>,
    velocity: Option<&Velocity>,
    scalars: &UpdateScalars,
    variances: Option<Variances<'_>>,
) -> LockSums {
    let (single, double) = match velocity {
        None => (None, None),
        Some(Velocity::F32(v)) => (Some(&v[..]), None),
        Some(Velocity::F64(v)) => (None, Some(&v[..])),
    };
    let lock = Lock { scalars, variances };
    match master {
        Some(master) => lock.with_param(master, grad, single),
        None => each_param!(
            param,
            p => lock.with_param(p, grad, single),
            f64 => lock.with_param(p, grad, double)
        ),
    }
}

struct Lock<'a> {
    scalars: &'a UpdateScalars,
    variances: Option<Variances<'a>>,
}

impl Lock<'_> {
    fn with_param<P: Parameter>(
        &self,
        p: &[P],
        grad: GradRef<'_>,
        velocity: Option<&[P::State]>,
    ) -> LockSums {
        each_grad!(
            grad,
            g => self.with_grad::<P::State, P, _>(p, g, velocity),
            f64 => self.with_grad::<f64, P, f64>(p, g, velocity),
            missing => LockSums::default()
        )
    }

    fn with_grad<T: Compute + Read<G>, P: Parameter + Load<T>, G: Copy + Default + Sync>(
        &self,
        p: &[P],
        g: &[G],
        velocity: Option<&[P::State]>,
    ) -> LockSums
    where
        P::State: Store<T>,
    {
        let layout = match self.variances {
            None => Layout::of_chunks(p.len()),
            Some(variances) => Layout::of_rows(p.len(), variances.rows),
        };
        let work = LockWork { lock: self, p, g, velocity, format: PhantomData::<T> };
        let sums = per_tensor(&[layout], &mut [], &work);
        let [parameter, product, direction] = sums[0];
        // The velocity points along the step.
        let product = if velocity.is_some() { -product } else { product };
        LockSums { parameter, product, direction }
    }
}

/// The sums of chunks of one tensor, computed in the format `T`.
struct LockWork<'a, P: Parameter, G, T> {
    lock: &'a Lock<'a>,
    p: &'a [P],
    g: &'a [G],
    velocity: Option<&'a [P::State]>,
    format: PhantomData<T>,
}

impl<T: Compute + Read<G>, P: Parameter + Load<T>, G: Copy + Default + Sync> ChunkWork<3>
    for LockWork<'_, P, G, T>
where
    P::State: Store<T>,
{
    type Row = ();

    #[inline(always)]
    fn chunk<I: Instructions>(
        &self,
        instructions: I,
        _: usize,
        start: usize,
        count: usize,
        _: &mut [()],
    ) -> [f64; 3] {
        let range = start..start + count;
        let (p, g) = (&self.p[range.clone()], &self.g[range.clone()]);
        let velocity = self.velocity.map(|v| &v[range]);
        // Without rows the chunk is one, all of whose elements weigh 1.
        let variances = self.lock.variances;
        let (len, lanes) = variances.map_or((count, LEAVES), |v| (v.rows.len, v.rows.lanes()));
        let mut leaves = [const { Leaves::new() }; 3];
        for (row, (p, g)) in p.chunks(len).zip(g.chunks(len)).enumerate() {
            let velocity = velocity.map(|v| &v[row * len..][..p.len()]);
            let [parameter, product, direction] = lanes_sum(
                instructions,
                p.len(),
                lanes,
                #[inline(always)]
                |at| {
                    let p: [T; LANES] = P::load(instructions, *block(p, at, &mut [P::default(); LANES]));
                    let g: [T; LANES] = T::read(instructions, *block(g, at, &mut [G::default(); LANES]));
                    let d = match velocity {
                        None => g,
                        Some(v) => {
                            let v = *block(v, at, &mut [P::State::default(); LANES]);
                            P::State::load(instructions, advanced(instructions, v, g, self.lock.scalars))
                        }
                    };
                    let (p, d) = (T::to_f64(instructions, p), T::to_f64(instructions, d));
                    let u = variances.map_or([1.0; LANES], |v| v.column_scales(instructions, at));
                    let product = |x, y| instructions.mul_f64(x, y);
                    [product(p, p), product(product(p, d), u), product(product(d, d), product(u, u))]
                },
            );
            let w = variances.map_or(1.0, |variances| variances.scale(start / len + row));
            let terms = [parameter, w * product, (w * w) * direction];
            leaves.iter_mut().zip(terms).for_each(|(leaves, term)| leaves.push_row(term, lanes));
        }
        leaves.each_mut().map(Leaves::sum)
    }
}
