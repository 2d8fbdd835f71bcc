//! Sums over lists of tensors: squared gradient norms, and what norm lock needs.

use rayon::prelude::*;

use super::element::{Compute, Load, Parameter, Read, State, Store};
use super::sum::{CHUNK, chunk_dot, tensor_sum};
use super::update::{UpdateScalars, Velocity};
use super::{SERIAL_BELOW, TASK, run};
use crate::backend::abi::RFD_TINY_EXPONENT;
use crate::numeric::{exponent_of, fold, power_of_two};
use crate::tensor::{DType, GradRef, ParamMut, each_grad, each_param};

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
    in_range(grads, sums(grads, 1.0))
}

/// Forms the sums of squares again where they left the range of f64.
fn in_range(grads: &[GradRef<'_>], squares: Vec<f64>) -> SquaredNorms {
    let mut norms = SquaredNorms { squares, exponent: 0 };
    let total = fold(&norms.squares);
    if total < TINY || total == f64::INFINITY {
        let largest = grads.iter().map(largest_f64).fold(0.0, f64::max);
        if largest > 0.0 && largest.is_finite() {
            let exponent = exponent_of(largest);
            // The scale stays a normal power of two; 2^±1022 leaves every square in range.
            let exponent = exponent.clamp(-1022, 1022);
            norms = SquaredNorms { squares: sums(grads, power_of_two(-exponent)), exponent };
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
fn sums(grads: &[GradRef<'_>], scale: f64) -> Vec<f64> {
    let lengths: Vec<usize> = grads.iter().map(|g| g.len().unwrap_or(0)).collect();
    let sums = per_tensor(
        &lengths,
        #[inline(always)]
        |tensor, start, count| [squares(grads[tensor].slice(start, count), scale)],
    );
    sums.into_iter().map(|[sum]| sum).collect()
}

/// A tensor that moves by a velocity.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moving<'a> {
    /// Format of the parameter.
    pub dtype: DType,
    /// `None` at rest.
    pub velocity: Option<&'a Velocity>,
    /// What it is multiplied with.
    pub decay: f64,
}

/// The [`squared_norms`] of the gradients, and the squared norm of each new velocity v·decay − g·unscale as
/// it will be stored.
pub(crate) fn averaged_norms(
    grads: &[GradRef<'_>],
    moving: &[Moving<'_>],
    unscale: f64,
) -> (SquaredNorms, Vec<f64>) {
    let lengths: Vec<usize> = grads.iter().map(|g| g.len().unwrap_or(0)).collect();
    let sums = per_tensor(
        &lengths,
        #[inline(always)]
        |tensor, start, count| {
            let grad = grads[tensor].slice(start, count);
            let range = start..start + count;
            let Moving { dtype, velocity, decay } = moving[tensor];
            let scalars = UpdateScalars { velocity_decay: decay, unscale, ..UpdateScalars::default() };
            let velocity = match (dtype, velocity) {
                (DType::F64, Some(Velocity::F64(v))) => next_squares(grad, Some(&v[range]), &scalars),
                (DType::F64, _) => next_squares::<f64>(grad, None, &scalars),
                (_, Some(Velocity::F32(v))) => next_squares(grad, Some(&v[range]), &scalars),
                _ => next_squares::<f32>(grad, None, &scalars),
            };
            [squares(grad, 1.0), velocity]
        },
    );
    let (squares, directions) = sums.into_iter().map(|[square, direction]| (square, direction)).unzip();
    (in_range(grads, squares), directions)
}

/// ‖v‖² of a chunk of a new velocity that is stored as `V`.
#[inline(always)]
fn next_squares<V: State>(grad: GradRef<'_>, velocity: Option<&[V]>, scalars: &UpdateScalars) -> f64 {
    // Without optimisation the buffers of all formats would add up in one frame, beyond a thread's stack.
    #[cfg_attr(debug_assertions, inline(never))]
    #[cfg_attr(not(debug_assertions), inline(always))]
    fn with_grad<T: Compute + Read<G>, V: State + Store<T>, G>(
        g: &[G],
        velocity: Option<&[V]>,
        scalars: &UpdateScalars,
    ) -> f64 {
        let (mut g_buffer, mut v_buffer) = ([T::default(); CHUNK], [T::default(); CHUNK]);
        let g = T::read(g, &mut g_buffer);
        let mut next = [V::default(); CHUNK];
        let next = &mut next[..g.len()];
        if let Some(velocity) = velocity {
            next.copy_from_slice(velocity);
        }
        super::update::advance_velocity(next, &mut v_buffer, g, scalars);
        let v = <V as Load<T>>::load(next, &mut v_buffer);
        chunk_dot(v, v)
    }
    each_grad!(
        grad,
        g => with_grad::<V, V, _>(g, velocity, scalars),
        f64 => with_grad::<f64, V, f64>(g, velocity, scalars),
        missing => 0.0
    )
}

#[inline(always)]
fn squares(grad: GradRef<'_>, scale: f64) -> f64 {
    #[inline(always)]
    fn narrow<G: Load<f32>>(g: &[G], scale: f64) -> f64 {
        let mut buffer = [0.0_f32; CHUNK];
        let g = G::load(g, &mut buffer);
        let sum = chunk_dot(g, g);
        // The scale is a power of two, so both products are exact but for underflow to 0; 0 stays 0 at any
        // scale.
        if sum == 0.0 { 0.0 } else { sum * scale * scale }
    }
    #[inline(always)]
    fn wide(g: &[f64], scale: f64) -> f64 {
        if scale == 1.0 {
            return chunk_dot(g, g);
        }
        let mut scaled = [0.0_f64; CHUNK];
        let scaled = &mut scaled[..g.len()];
        for (s, g) in scaled.iter_mut().zip(g) {
            *s = g * scale;
        }
        chunk_dot(scaled, scaled)
    }
    each_grad!(grad, g => narrow(g, scale), f64 => wide(g, scale), missing => 0.0)
}

/// Runs `chunk(tensor, start, count)` over every chunk of every tensor, in parallel, and adds the `N` sums it
/// returns in the fixed order.
fn per_tensor<const N: usize>(
    lengths: &[usize],
    chunk: impl Fn(usize, usize, usize) -> [f64; N] + Sync,
) -> Vec<[f64; N]> {
    let mut partial: Vec<Vec<[f64; N]>> =
        lengths.iter().map(|len| vec![[0.0; N]; len.div_ceil(CHUNK)]).collect();
    let work = |(tensor, first, partial): (usize, usize, &mut [[f64; N]])| {
        run(
            #[inline(always)]
            || {
                for (i, sum) in partial.iter_mut().enumerate() {
                    let start = (first + i) * CHUNK;
                    *sum = chunk(tensor, start, CHUNK.min(lengths[tensor] - start));
                }
            },
        );
    };
    let tasks = partial.iter_mut().enumerate().flat_map(|(tensor, partial)| {
        let chunks = TASK / CHUNK;
        partial.chunks_mut(chunks).enumerate().map(move |(task, partial)| (tensor, task * chunks, partial))
    });
    if lengths.iter().sum::<usize>() < SERIAL_BELOW {
        tasks.for_each(work);
    } else {
        tasks.collect::<Vec<_>>().into_par_iter().for_each(work);
    }
    partial
        .iter()
        .map(|chunks| {
            std::array::from_fn(|n| tensor_sum(&chunks.iter().map(|sums| sums[n]).collect::<Vec<_>>()))
        })
        .collect()
}

/// What norm lock needs to know of a tensor: ‖p‖², ⟨p, d⟩ and ‖d‖², where p is the parameter (or its master
/// weights) and −d the direction of the step: the gradient, or minus the new velocity.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LockSums {
    pub parameter: f64,
    pub product: f64,
    pub direction: f64,
}

/// The [`LockSums`] of one tensor.
pub(crate) fn lock_sums(
    param: &ParamMut<'_>,
    master: Option<&[f32]>,
    grad: GradRef<'_>,
    velocity: Option<&Velocity>,
    scalars: &UpdateScalars,
) -> LockSums {
    fn with_param<P: Parameter>(
        p: &[P],
        grad: GradRef<'_>,
        velocity: Option<&[P::State]>,
        scalars: &UpdateScalars,
    ) -> LockSums {
        each_grad!(
            grad,
            g => with_grad::<P::State, P, _>(p, g, velocity, scalars),
            f64 => with_grad::<f64, P, f64>(p, g, velocity, scalars),
            missing => LockSums::default()
        )
    }

    fn with_grad<T: Compute + Read<G>, P: Parameter + Load<T>, G: Sync>(
        p: &[P],
        g: &[G],
        velocity: Option<&[P::State]>,
        scalars: &UpdateScalars,
    ) -> LockSums
    where
        P::State: Store<T>,
    {
        let sums = per_tensor(&[p.len()], |_, start, count| {
            let range = start..start + count;
            let (mut p_buffer, mut g_buffer, mut v_buffer) =
                ([T::default(); CHUNK], [T::default(); CHUNK], [T::default(); CHUNK]);
            let p = P::load(&p[range.clone()], &mut p_buffer);
            let g = T::read(&g[range.clone()], &mut g_buffer);
            let Some(velocity) = velocity else {
                return [chunk_dot(p, p), chunk_dot(p, g), chunk_dot(g, g)];
            };
            let mut next = [P::State::default(); CHUNK];
            let next = &mut next[..count];
            next.copy_from_slice(&velocity[range]);
            super::update::advance_velocity(next, &mut v_buffer, g, scalars);
            let v = <P::State as Load<T>>::load(next, &mut v_buffer);
            [chunk_dot(p, p), -chunk_dot(p, v), chunk_dot(v, v)]
        });
        let [parameter, product, direction] = sums[0];
        LockSums { parameter, product, direction }
    }

    let (single, double) = match velocity {
        None => (None, None),
        Some(Velocity::F32(v)) => (Some(&v[..]), None),
        Some(Velocity::F64(v)) => (None, Some(&v[..])),
    };
    match master {
        Some(master) => with_param(master, grad, single, scalars),
        None => each_param!(
            param,
            p => with_param(p, grad, single, scalars),
            f64 => with_param(p, grad, double, scalars)
        ),
    }
}
