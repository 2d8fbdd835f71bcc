//! Sums over lists of tensors: squared gradient norms, and what norm lock needs.

use std::marker::PhantomData;

use super::element::{BlocksRef, Compute, Load, Parameter, Read, Store};
use super::rows::Variances;
use super::simd::{Instructions, LANES, Work};
use super::sum::{CHUNK, Leaves, ahead, lanes_sum, tensor_sums};
use super::threads::for_each;
use super::update::{UpdateScalars, Velocity, advanced};
use super::{SERIAL_BELOW, TASK};
use crate::backend::abi::RFD_TINY_EXPONENT;
use crate::numeric::{LEAVES, exponent_of, fold, power_of_two};
use crate::rows::Rows;
use crate::tensor::{GradRef, ParamMut, each_grad, each_param};

/// ‖g_k‖² of every tensor; `squares[k] · 4^exponent`. The exponent is 0 unless f64 gradients are so large or
/// so small that their squares leave the range of f64.
#[derive(Clone, Debug, Default)]
pub(crate) struct SquaredNorms {
    pub squares: Vec<f64>,
    pub exponent: i32,
}

/// Squared norms below this may have lost terms to underflow, which only f64 gradients can cause: the square
/// of the smallest f32 is 2⁻²⁹⁸.
const TINY: f64 = f64::from_bits(((1023 + RFD_TINY_EXPONENT) as u64) << 52);

impl SquaredNorms {
    /// The squared norm of every gradient, in the fixed order. A missing gradient has norm 0.
    pub fn form(&mut self, grads: &[GradRef<'_>], space: &mut Sums<1>) {
        space.form(grads.len(), &mut [], &SquareWork { grads, rows: no_rows, scale: 1.0 });
        self.take(space.tensors().iter().map(|&[square]| square));
        self.rescale(grads, no_rows);
    }

    /// Takes these squares.
    pub(super) fn take(&mut self, squares: impl Iterator<Item = f64>) {
        self.exponent = 0;
        self.squares.clear();
        self.squares.extend(squares);
    }

    /// Forms the squares again where they left the range of f64.
    pub(super) fn rescale<R: Fn(usize) -> Option<Rows> + Sync>(&mut self, grads: &[GradRef<'_>], rows: R) {
        let total = fold(self.squares.iter().copied());
        if total < TINY || total == f64::INFINITY {
            let largest = grads.iter().map(largest_f64).fold(0.0, f64::max);
            if largest > 0.0 && largest.is_finite() {
                // The scale stays a normal power of two; 2^±1022 leaves every square in range.
                self.exponent = exponent_of(largest).clamp(-1022, 1022);
                self.squares = squares_of(grads, rows, power_of_two(-self.exponent));
            }
        }
    }
}

/// ‖g_k‖² of every tensor as they are, infinite or 0 where squares leave the range of f64.
pub(crate) fn plain_squares(grads: &[GradRef<'_>]) -> Vec<f64> {
    squares_of(grads, no_rows, 1.0)
}

/// Σ (scale·g)² of every tensor.
fn squares_of<R: Fn(usize) -> Option<Rows> + Sync>(grads: &[GradRef<'_>], rows: R, scale: f64) -> Vec<f64> {
    let mut space = Sums::default();
    space.form(grads.len(), &mut [], &SquareWork { grads, rows, scale });
    space.tensors().iter().map(|&[square]| square).collect()
}

fn no_rows(_: usize) -> Option<Rows> {
    None
}

/// The largest |g| of an f64 gradient; 0 for the other formats, whose squares can't leave the range.
fn largest_f64(grad: &GradRef<'_>) -> f64 {
    match grad {
        GradRef::F64(g) => g.iter().fold(0.0, |largest: f64, x| largest.max(x.abs())),
        _ => 0.0,
    }
}

/// The squares of chunks of tensors, which are cut into rows or not.
struct SquareWork<'a, R> {
    grads: &'a [GradRef<'a>],
    rows: R,
    scale: f64,
}

impl<R: Fn(usize) -> Option<Rows> + Sync> ChunkWork<1> for SquareWork<'_, R> {
    type Row = ();

    fn layout(&self, tensor: usize) -> Layout {
        Layout::new(self.grads[tensor].len().unwrap_or(0), (self.rows)(tensor))
    }

    #[inline(always)]
    fn chunk<I: Instructions>(
        &self,
        instructions: I,
        tensor: usize,
        start: usize,
        count: usize,
        _: &mut [()],
    ) -> [f64; 1] {
        let grad = self.grads[tensor].slice(start, count);
        [squares(instructions, grad, (self.rows)(tensor), self.scale)]
    }
}

/// The square of a chunk, which consists of rows where they are given.
#[inline(always)]
fn squares<I: Instructions>(instructions: I, grad: GradRef<'_>, rows: Option<Rows>, scale: f64) -> f64 {
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
            let (blocks, ahead) = (BlocksRef::new(g), ahead(g.len()));
            let [sum] = lanes_sum::<_, 1, true>(
                instructions,
                g.len(),
                lanes,
                #[inline(always)]
                |at, full, [sum]| {
                    blocks.prefetch(instructions, at + ahead);
                    let g = if full { blocks.full(at) } else { blocks.at(at) };
                    *sum = T::add_squares(instructions, *sum, change(T::read(instructions, g)));
                },
            );
            sum
        }
        let Some(rows) = rows else { return squares(instructions, g, LEAVES, change) };
        let mut leaves = Leaves::new();
        let lanes = rows.lanes();
        // No closure: what is not inlined has no vector instructions.
        for row in g.chunks(rows.len) {
            leaves.push_row([squares(instructions, row, lanes, change)], lanes);
        }
        let [sum] = leaves.sum();
        sum
    }
    // The scale is a power of two, so both products are exact but for underflow to 0; 0 stays 0 at any scale.
    let scaled = |sum: f64| if sum == 0.0 { 0.0 } else { sum * scale * scale };
    each_grad!(
        grad,
        g => scaled(sum::<I, f32, _>(instructions, g, rows, |x| x)),
        f64 => sum::<I, f64, _>(instructions, g, rows, |x| instructions.mul_f64(x, [scale; LANES])),
        missing => 0.0
    )
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
    pub fn new(len: usize, rows: Option<Rows>) -> Self {
        Self { len, chunk: rows.map_or(CHUNK, Rows::chunk), rows }
    }

    pub fn chunks(&self) -> usize {
        // Most tensors of a long list are short.
        if self.len <= self.chunk { usize::from(self.len > 0) } else { self.len.div_ceil(self.chunk) }
    }

    fn rows_of_chunk(&self) -> usize {
        self.rows.map_or(0, |rows| self.chunk / rows.len)
    }
}

/// Whether there is so much to do that other threads are worth while.
pub(super) fn is_large(elements: usize) -> bool {
    elements >= SERIAL_BELOW
}

/// What is computed of each chunk of a list of tensors.
pub(super) trait ChunkWork<const N: usize>: Sync {
    /// What it leaves of each row.
    type Row: Send;

    fn layout(&self, tensor: usize) -> Layout;

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

/// `N` sums of each chunk and of each tensor of a list, in memory that is used again.
#[derive(Clone, Debug)]
pub(crate) struct Sums<const N: usize> {
    chunks: Vec<[f64; N]>,
    tensors: Vec<[f64; N]>,
}

impl<const N: usize> Default for Sums<N> {
    fn default() -> Self {
        Self { chunks: Vec::new(), tensors: Vec::new() }
    }
}

impl<const N: usize> Sums<N> {
    /// Does the work on every chunk of so many tensors, in parallel, and adds the sums of each in the fixed
    /// order. `rows` is a list by tensor, which has a place for each row, or nothing.
    pub(super) fn form<W: ChunkWork<N>>(&mut self, tensors: usize, rows: &mut [Vec<W::Row>], work: &W) {
        let layouts = || (0..tensors).map(|tensor| work.layout(tensor));
        let (mut chunks, mut elements) = (0, 0);
        for layout in layouts() {
            chunks += layout.chunks();
            elements += layout.len;
        }
        self.chunks.resize(chunks, [0.0; N]);
        let (mut rest, mut rows) = (&mut self.chunks[..], rows.iter_mut());
        let parts = layouts().enumerate().flat_map(|(tensor, layout)| {
            let sums = rest.split_off_mut(..layout.chunks()).unwrap_or_default();
            let mut rows: &mut [W::Row] = rows.next().map_or(&mut [], |rows| rows);
            let size = (TASK / layout.chunk).max(1);
            sums.chunks_mut(size).enumerate().map(move |(part, sums)| {
                let count = rows.len().min(size * layout.rows_of_chunk());
                let rows = rows.split_off_mut(..count).unwrap_or_default();
                Part { work, tensor, layout, first: part * size, sums, rows }
            })
        });
        for_each(is_large(elements), parts);
        self.tensors.clear();
        let mut rest = &self.chunks[..];
        for layout in layouts() {
            self.tensors.push(tensor_sums(rest.split_off(..layout.chunks()).unwrap_or_default()));
        }
    }

    /// Of each tensor.
    pub(super) fn tensors(&self) -> &[[f64; N]] {
        &self.tensors
    }

    /// Of each chunk of all tensors, one behind the other.
    pub(super) fn chunks(&self) -> &[[f64; N]] {
        &self.chunks
    }
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
    space: &mut Sums<3>,
) -> LockSums {
    let (single, double) = match velocity {
        None => (None, None),
        Some(Velocity::F32(v)) => (Some(&v[..]), None),
        Some(Velocity::F64(v)) => (None, Some(&v[..])),
    };
    let mut lock = Lock { scalars, variances, space };
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
    space: &'a mut Sums<3>,
}

impl Lock<'_> {
    fn with_param<P: Parameter>(
        &mut self,
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
        &mut self,
        p: &[P],
        g: &[G],
        velocity: Option<&[P::State]>,
    ) -> LockSums
    where
        P::State: Store<T>,
    {
        let Self { scalars, variances, .. } = *self;
        let work = LockWork { scalars, variances, p, g, velocity, format: PhantomData::<T> };
        self.space.form(1, &mut [], &work);
        let [parameter, product, direction] = self.space.tensors()[0];
        // The velocity points along the step.
        let product = if velocity.is_some() { -product } else { product };
        LockSums { parameter, product, direction }
    }
}

/// The sums of chunks of one tensor, computed in the format `T`.
struct LockWork<'a, P: Parameter, G, T> {
    scalars: &'a UpdateScalars,
    variances: Option<Variances<'a>>,
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

    fn layout(&self, _: usize) -> Layout {
        Layout::new(self.p.len(), self.variances.map(|variances| variances.rows))
    }

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
        let variances = self.variances;
        let (len, lanes) = variances.map_or((count, LEAVES), |v| (v.rows.len, v.rows.lanes()));
        let (ahead, mut leaves) = (ahead(len), Leaves::<3>::new());
        for (row, (p, g)) in p.chunks(len).zip(g.chunks(len)).enumerate() {
            let velocity = velocity.map(|v| BlocksRef::new(&v[row * len..][..p.len()]));
            let scales = variances.filter(|variances| !variances.column_scales.is_empty());
            let scales = scales.map(|variances| BlocksRef::new(variances.column_scales));
            let (count, p, g) = (p.len(), BlocksRef::new(p), BlocksRef::new(g));
            let [parameter, product, direction] = lanes_sum::<_, 3, false>(
                instructions,
                count,
                lanes,
                #[inline(always)]
                |at, _, sums| {
                    p.prefetch(instructions, at + ahead);
                    g.prefetch(instructions, at + ahead);
                    if let Some(v) = &velocity {
                        v.prefetch(instructions, at + ahead);
                    }
                    let p: [T; LANES] = P::load(instructions, p.at(at));
                    let g: [T; LANES] = T::read(instructions, g.at(at));
                    let d = match &velocity {
                        None => g,
                        Some(v) => {
                            let v = advanced(instructions, v.at(at), g, self.scalars);
                            P::State::load(instructions, v)
                        }
                    };
                    let (p, d) = (T::to_f64(instructions, p), T::to_f64(instructions, d));
                    let u = match &scales {
                        None => [1.0; LANES],
                        Some(scales) => instructions.widen_f32(scales.at(at)),
                    };
                    let product = |x, y| instructions.mul_f64(x, y);
                    let terms =
                        [product(p, p), product(product(p, d), u), product(product(d, d), product(u, u))];
                    for (sum, term) in sums.iter_mut().zip(terms) {
                        *sum = instructions.add_f64(*sum, term);
                    }
                },
            );
            let w = variances.map_or(1.0, |variances| variances.scale(start / len + row));
            leaves.push_row([parameter, w * product, (w * w) * direction], lanes);
        }
        leaves.sum()
    }
}
