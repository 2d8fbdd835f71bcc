//! Sums over lists of tensors: squared gradient norms, and what norm lock needs.

use rayon::prelude::*;

use super::element::{Compute, Load, Parameter, Read, Store};
use super::rows::{Variances, row_squares};
use super::sum::{CHUNK, chunk_dot, line, row_sum, rows_sum, tensor_sum};
use super::update::{UpdateScalars, Velocity};
use super::{SERIAL_BELOW, TASK, run};
use crate::backend::abi::RFD_TINY_EXPONENT;
use crate::numeric::{exponent_of, fold, power_of_two};
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
    let total = fold(&norms.squares);
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
    let sums = per_tensor::<1, ()>(
        layouts,
        &mut [],
        #[inline(always)]
        |tensor, start, count, _| {
            let rows = layouts[tensor].rows;
            [squares(grads[tensor].slice(start, count), rows, scale)]
        },
    );
    sums.into_iter().map(|[sum]| sum).collect()
}

/// The square of a chunk, which consists of rows where they are given.
#[inline(always)]
pub(super) fn squares(grad: GradRef<'_>, rows: Option<Rows>, scale: f64) -> f64 {
    #[inline(always)]
    fn dot<T: Compute>(g: &[T], rows: Option<Rows>) -> f64 {
        match rows {
            None => chunk_dot(g, g),
            Some(rows) => {
                let (lanes, mut line) = (rows.lanes(), line());
                rows_sum(g.chunks(rows.len).map(|row| row_squares(row, lanes, &mut line)), lanes)
            }
        }
    }
    #[inline(always)]
    fn narrow<G: Load<f32>>(g: &[G], rows: Option<Rows>, scale: f64) -> f64 {
        let mut buffer = [0.0_f32; CHUNK];
        let sum = dot(G::load(g, &mut buffer), rows);
        // The scale is a power of two, so both products are exact but for underflow to 0; 0 stays 0 at any
        // scale.
        if sum == 0.0 { 0.0 } else { sum * scale * scale }
    }
    #[inline(always)]
    fn wide(g: &[f64], rows: Option<Rows>, scale: f64) -> f64 {
        if scale == 1.0 {
            return dot(g, rows);
        }
        let mut scaled = [0.0_f64; CHUNK];
        let scaled = &mut scaled[..g.len()];
        for (s, g) in scaled.iter_mut().zip(g) {
            *s = g * scale;
        }
        dot(scaled, rows)
    }
    each_grad!(grad, g => narrow(g, rows, scale), f64 => wide(g, rows, scale), missing => 0.0)
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
}

/// Chunks of one tensor that one thread works on: the first, their sums, and the places of their rows.
struct Part<'a, const N: usize, R> {
    tensor: usize,
    first: usize,
    sums: &'a mut [[f64; N]],
    rows: &'a mut [R],
}

/// Runs `chunk(tensor, start, count, rows)` over every chunk of every tensor, in parallel, and adds the `N`
/// sums it returns in the fixed order. `rows` are those of the chunk out of a list by tensor, which has a
/// place for each row, or nothing.
pub(super) fn per_tensor<const N: usize, R: Send>(
    layouts: &[Layout],
    rows: &mut [Vec<R>],
    chunk: impl Fn(usize, usize, usize, &mut [R]) -> [f64; N] + Sync,
) -> Vec<[f64; N]> {
    let mut partial: Vec<Vec<[f64; N]>> =
        layouts.iter().map(|layout| vec![[0.0; N]; layout.len.div_ceil(layout.chunk)]).collect();
    let rows_of_chunk = |tensor: usize| {
        let Layout { chunk, rows, .. } = layouts[tensor];
        rows.map_or(0, |rows| chunk / rows.len)
    };
    let work = |Part { tensor, first, sums, mut rows }: Part<'_, N, R>| {
        run(
            #[inline(always)]
            || {
                let Layout { len, chunk: size, .. } = layouts[tensor];
                for (i, sum) in sums.iter_mut().enumerate() {
                    let start = (first + i) * size;
                    let own;
                    (own, rows) = rows.split_at_mut(rows.len().min(rows_of_chunk(tensor)));
                    *sum = chunk(tensor, start, size.min(len - start), own);
                }
            },
        );
    };
    let mut parts = Vec::new();
    let mut rows = rows.iter_mut();
    for (tensor, sums) in partial.iter_mut().enumerate() {
        let mut rows: &mut [R] = rows.next().map_or(&mut [], |rows| rows);
        let chunks = (TASK / layouts[tensor].chunk).max(1);
        for (part, sums) in sums.chunks_mut(chunks).enumerate() {
            let own;
            (own, rows) = rows.split_at_mut(rows.len().min(chunks * rows_of_chunk(tensor)));
            parts.push(Part { tensor, first: part * chunks, sums, rows: own });
        }
    }
    if layouts.iter().map(|layout| layout.len).sum::<usize>() < SERIAL_BELOW {
        parts.into_iter().for_each(work);
    } else {
        parts.into_par_iter().for_each(work);
    }
    partial
        .iter()
        .map(|chunks| {
            std::array::from_fn(|n| tensor_sum(&chunks.iter().map(|sums| sums[n]).collect::<Vec<_>>()))
        })
        .collect()
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

    fn with_grad<T: Compute + Read<G>, P: Parameter + Load<T>, G: Sync>(
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
        let sums = per_tensor::<3, ()>(&[layout], &mut [], |_, start, count, _| {
            let range = start..start + count;
            let (mut p_buffer, mut g_buffer, mut v_buffer) =
                ([T::default(); CHUNK], [T::default(); CHUNK], [T::default(); CHUNK]);
            let p = P::load(&p[range.clone()], &mut p_buffer);
            let g = T::read(&g[range.clone()], &mut g_buffer);
            let Some(velocity) = velocity else {
                return self.chunk(start, p, g);
            };
            let mut next = [P::State::default(); CHUNK];
            let next = &mut next[..count];
            next.copy_from_slice(&velocity[range]);
            super::update::advance_velocity(next, &mut v_buffer, g, self.scalars);
            let v = <P::State as Load<T>>::load(next, &mut v_buffer);
            let [parameter, product, direction] = self.chunk(start, p, v);
            [parameter, -product, direction]
        });
        let [parameter, product, direction] = sums[0];
        LockSums { parameter, product, direction }
    }

    /// ‖p‖², ⟨p, d⟩ and ‖d‖² of a chunk that begins at an element of the tensor.
    fn chunk<T: Compute>(&self, start: usize, p: &[T], d: &[T]) -> [f64; 3] {
        let Some(variances) = self.variances else {
            return [chunk_dot(p, p), chunk_dot(p, d), chunk_dot(d, d)];
        };
        let (len, lanes) = (variances.rows.len, variances.rows.lanes());
        let rows = || p.chunks(len).zip(d.chunks(len)).enumerate();
        let w = |row: usize| variances.scale(start / len + row);
        let u = |i: usize| variances.column_scale(i);
        let mut line = line();
        let parameter = rows_sum(rows().map(|(_, (p, _))| row_squares(p, lanes, &mut line)), lanes);
        let mut product =
            |p: &[T], d: &[T]| row_sum(p.len(), lanes, &mut line, |i| (p[i].to_f64() * d[i].to_f64()) * u(i));
        let product = rows_sum(rows().map(|(row, (p, d))| w(row) * product(p, d)), lanes);
        let mut direction =
            |d: &[T]| row_sum(d.len(), lanes, &mut line, |i| (d[i].to_f64() * d[i].to_f64()) * (u(i) * u(i)));
        [parameter, product, rows_sum(rows().map(|(row, (_, d))| (w(row) * w(row)) * direction(d)), lanes)]
    }
}
