//! Sums over lists of tensors: squared gradient norms, and what norm lock needs.

use std::marker::PhantomData;

use super::element::{BlocksRef, Compute, Load, Parameter, Read, Store, end};
use super::rows::Weights;
use super::simd::{Instructions, LANES, Processor, Work};
use super::sum::{CHUNK, Leaves, ahead, lanes_sum, tensor_sums};
use super::threads::{Task, for_each};
use super::update::{UpdateScalars, Velocity, advanced};
use super::{TASK, is_large};
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
        form_squares(grads, no_rows, 1.0, space);
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
    pub(super) fn rescale(&mut self, grads: &[GradRef<'_>], rows: impl Fn(usize) -> Option<Rows> + Sync) {
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
fn squares_of(grads: &[GradRef<'_>], rows: impl Fn(usize) -> Option<Rows> + Sync, scale: f64) -> Vec<f64> {
    let mut space = Sums::default();
    form_squares(grads, rows, scale, &mut space);
    space.tensors().iter().map(|&[square]| square).collect()
}

fn form_squares(
    grads: &[GradRef<'_>],
    rows: impl Fn(usize) -> Option<Rows> + Sync,
    scale: f64,
    space: &mut Sums<1>,
) {
    space.form(grads.len(), &mut [], &SquareWork { grads, rows, scale });
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

    #[inline]
    fn chunk(&self, processor: Processor, place: Place, _: &mut [()], sums: &mut [f64; 1]) {
        let (rows, scale) = ((self.rows)(place.tensor), self.scale);
        // The scale is a power of two, so both products are exact but for underflow to 0; 0 stays 0 at any
        // scale.
        let scaled = |sum: f64| if sum == 0.0 { 0.0 } else { sum * scale * scale };
        sums[0] = each_grad!(
            self.grads[place.tensor].slice(place.start, place.count),
            g => scaled(processor.run(Squares { g, rows, scale, format: PhantomData::<f32> })),
            f64 => processor.run(Squares { g, rows, scale, format: PhantomData::<f64> }),
            missing => 0.0
        );
    }
}

/// The square of a chunk, which consists of rows where they are given, computed in the format `T`.
struct Squares<'a, T, G> {
    g: &'a [G],
    rows: Option<Rows>,
    scale: f64,
    format: PhantomData<T>,
}

impl<T: Compute + Read<G>, G: Copy + Default> Work for Squares<'_, T, G> {
    type Output = f64;

    #[inline(always)]
    fn run<I: Instructions>(self, instructions: I) -> f64 {
        let Some(rows) = self.rows else { return self.row(instructions, self.g, LEAVES, ahead(CHUNK)) };
        let mut leaves = Leaves::new();
        let (lanes, ahead) = (rows.lanes(), ahead(rows.len));
        // No closure: what is not inlined has no vector instructions.
        for row in self.g.chunks(rows.len) {
            leaves.push_row([self.row(instructions, row, lanes, ahead)], lanes);
        }
        let [sum] = leaves.sum();
        sum
    }
}

impl<T: Compute + Read<G>, G: Copy + Default> Squares<'_, T, G> {
    #[inline(always)]
    fn row<I: Instructions>(&self, instructions: I, g: &[G], lanes: usize, ahead: usize) -> f64 {
        let mut end = end();
        let mut blocks = BlocksRef::new(g, &mut end);
        let [sum] = lanes_sum::<_, 1, true>(
            instructions,
            g.len(),
            lanes,
            #[inline(always)]
            |at, full, [sum]| {
                blocks.prefetch(instructions, at + ahead);
                let g = if full { blocks.full(at) } else { blocks.at(at) };
                let g = T::scaled(instructions, T::read(instructions, *g), self.scale);
                *sum = T::add_squares(instructions, *sum, g);
            },
        );
        sum
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
    pub fn new(len: usize, rows: Option<Rows>) -> Self {
        Self { len, chunk: rows.map_or(CHUNK, Rows::chunk), rows }
    }

    pub fn chunks(&self) -> usize {
        // Most tensors of a long list are short.
        if self.len <= self.chunk { usize::from(self.len > 0) } else { self.len.div_ceil(self.chunk) }
    }

    fn rows_of_chunk(&self) -> usize {
        self.rows.map_or(0, Rows::of_chunk)
    }
}

/// A chunk: `count` elements of a tensor from `start` on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub tensor: usize,
    pub start: usize,
    pub count: usize,
}

/// What is computed of each chunk of a list of tensors.
pub(super) trait ChunkWork<const N: usize>: Sync {
    /// What it leaves of each row.
    type Row: Send;

    fn layout(&self, tensor: usize) -> Layout;

    /// Finds the sums of one; `rows` are the places of its rows.
    // Through memory of its own the result would come late.
    fn chunk(&self, processor: Processor, place: Place, rows: &mut [Self::Row], sums: &mut [f64; N]);
}

/// Chunks of one tensor: where the first begins, their sums, and the places of their rows.
struct Chunks<'a, const N: usize, W: ChunkWork<N>> {
    work: &'a W,
    tensor: usize,
    layout: Layout,
    start: usize,
    sums: &'a mut [[f64; N]],
    rows: &'a mut [W::Row],
}

impl<const N: usize, W: ChunkWork<N>> Task for Chunks<'_, N, W> {
    #[inline]
    fn split_off(&mut self) -> Option<Self> {
        // Most tensors of a long list: nothing is divided for them.
        if self.sums.len() <= 1 {
            return None;
        }
        let Self { work, tensor, layout, start, .. } = *self;
        let count = (TASK / layout.chunk).max(1);
        if self.sums.len() <= count {
            return None;
        }
        self.start += count * layout.chunk;
        let sums = self.sums.split_off_mut(..count)?;
        let rows = self.rows.len().min(count * layout.rows_of_chunk());
        let rows = self.rows.split_off_mut(..rows)?;
        Some(Self { work, tensor, layout, start, sums, rows })
    }

    #[inline]
    fn run(&mut self, processor: Processor) {
        let Self { work, tensor, layout, mut start, .. } = *self;
        let mut rows = &mut self.rows[..];
        for sum in self.sums.iter_mut() {
            let place = Place { tensor, start, count: layout.chunk.min(layout.len - start) };
            let own;
            (own, rows) = rows.split_at_mut(rows.len().min(layout.rows_of_chunk()));
            work.chunk(processor, place, own, sum);
            start += layout.chunk;
        }
    }
}

/// `N` sums of each chunk and of each tensor of a list, in memory that is used again.
#[derive(Clone, Debug)]
pub(crate) struct Sums<const N: usize> {
    /// Of all tensors that have several, one behind the other. That of a single one is the tensor's.
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
        let (mut chunks, mut elements) = (0, 0);
        for layout in (0..tensors).map(|tensor| work.layout(tensor)) {
            chunks += if layout.chunks() > 1 { layout.chunks() } else { 0 };
            elements += layout.len;
        }
        self.chunks.resize(chunks, [0.0; N]);
        self.tensors.resize(tensors, [0.0; N]);
        let (mut rest, mut rows) = (&mut self.chunks[..], rows.iter_mut());
        let tasks = self.tensors.iter_mut().enumerate().map(|(tensor, sum)| {
            let layout = work.layout(tensor);
            let rows: &mut [W::Row] = rows.next().map_or(&mut [], |rows| rows);
            let sums = match layout.chunks() {
                0 => {
                    *sum = [0.0; N];
                    &mut []
                }
                1 => std::slice::from_mut(sum),
                several => rest.split_off_mut(..several).unwrap_or_default(),
            };
            Chunks { work, tensor, layout, start: 0, sums, rows }
        });
        for_each(is_large(elements), tasks);
        let mut rest = &self.chunks[..];
        for (tensor, sum) in self.tensors.iter_mut().enumerate() {
            if rest.is_empty() {
                break;
            }
            let chunks = work.layout(tensor).chunks();
            if chunks > 1 {
                *sum = tensor_sums(rest.split_off(..chunks).unwrap_or_default());
            }
        }
    }

    /// Of each tensor.
    pub(super) fn tensors(&self) -> &[[f64; N]] {
        &self.tensors
    }

    /// Of each chunk of each tensor that is cut like this.
    pub(super) fn chunks(&self, layout: impl Fn(usize) -> Layout) -> impl Iterator<Item = &[[f64; N]]> {
        let mut rest = &self.chunks[..];
        self.tensors.iter().enumerate().map(move |(tensor, sum)| match layout(tensor).chunks() {
            0 => &[][..],
            1 => std::slice::from_ref(sum),
            several => rest.split_off(..several).unwrap_or_default(),
        })
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

/// The [`LockSums`] of one tensor; `weights` are those after the step, with the column scales before it.
pub(crate) fn lock_sums(
    param: &ParamMut<'_>,
    master: Option<&[f32]>,
    grad: GradRef<'_>,
    velocity: Option<&Velocity>,
    scalars: &UpdateScalars,
    weights: Option<Weights<'_>>,
    space: &mut Sums<3>,
) -> LockSums {
    let (single, double) = match velocity {
        None => (None, None),
        Some(Velocity::F32(v)) => (Some(&v[..]), None),
        Some(Velocity::F64(v)) => (None, Some(&v[..])),
    };
    let mut lock = Lock { scalars, weights, space };
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
    weights: Option<Weights<'a>>,
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
        let Self { scalars, weights, .. } = *self;
        let work = LockWork { scalars, weights, p, g, velocity, format: PhantomData::<T> };
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
    weights: Option<Weights<'a>>,
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
        Layout::new(self.p.len(), self.weights.map(|weights| weights.rows))
    }

    fn chunk(&self, processor: Processor, place: Place, _: &mut [()], sums: &mut [f64; 3]) {
        let Place { start, count, .. } = place;
        let range = start..start + count;
        *sums = processor.run(Self {
            weights: self.weights.map(|weights| Weights {
                row_scales: &weights.row_scales[start / weights.rows.len..],
                ..weights
            }),
            scalars: self.scalars,
            p: &self.p[range.clone()],
            g: &self.g[range.clone()],
            velocity: self.velocity.map(|v| &v[range]),
            format: self.format,
        });
    }
}

impl<T: Compute + Read<G>, P: Parameter + Load<T>, G: Copy + Default> Work for LockWork<'_, P, G, T>
where
    P::State: Store<T>,
{
    type Output = [f64; 3];

    /// Of one chunk.
    #[inline(always)]
    fn run<I: Instructions>(self, instructions: I) -> [f64; 3] {
        let Self { weights, p, g, velocity, .. } = self;
        // Without rows the chunk is one, all of whose elements weigh 1.
        let (len, lanes) = weights.map_or((p.len(), LEAVES), |v| (v.rows.len, v.rows.lanes()));
        let (ahead, mut leaves) = (ahead(len), Leaves::<3>::new());
        for (row, (p, g)) in p.chunks(len).zip(g.chunks(len)).enumerate() {
            let (mut p_end, mut g_end, mut v_end, mut u_end) = (end(), end(), end(), end());
            let mut velocity = velocity.map(|v| BlocksRef::new(&v[row * len..][..p.len()], &mut v_end));
            let scales = weights.filter(|weights| !weights.column_scales.is_empty());
            let mut scales = scales.map(|weights| BlocksRef::new(weights.column_scales, &mut u_end));
            let count = p.len();
            let (mut p, mut g) = (BlocksRef::new(p, &mut p_end), BlocksRef::new(g, &mut g_end));
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
                    let p: [T; LANES] = P::load(instructions, *p.at(at));
                    let g: [T; LANES] = T::read(instructions, *g.at(at));
                    let d = match &mut velocity {
                        None => g,
                        Some(v) => {
                            let v = advanced(instructions, *v.at(at), g, self.scalars);
                            P::State::load(instructions, v)
                        }
                    };
                    let (p, d) = (T::to_f64(instructions, p), T::to_f64(instructions, d));
                    let u = match &mut scales {
                        None => [1.0; LANES],
                        Some(scales) => instructions.widen_f32(*scales.at(at)),
                    };
                    let product = |x, y| instructions.mul_f64(x, y);
                    let terms =
                        [product(p, p), product(product(p, d), u), product(product(d, d), product(u, u))];
                    for (sum, term) in sums.iter_mut().zip(terms) {
                        *sum = instructions.add_f64(*sum, term);
                    }
                },
            );
            let w = weights.map_or(1.0, |weights| weights.row_scales[row]);
            leaves.push_row([parameter, w * product, (w * w) * direction], lanes);
        }
        leaves.sum()
    }
}
