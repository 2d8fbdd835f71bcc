//! The parameter update. Per element, each operation rounded on its own (no fused multiply-add):
//!
//! ```text
//! along the gradient   p ← p·decay − (g·prescale)·coefficient
//! by a velocity        v ← v·velocity_decay − g·unscale     v is rounded to its storage format
//!                      p ← p·decay + v·coefficient
//! ```
//!
//! Where rows have scales, each row's multiplies the coefficient before that is rounded; those of columns
//! multiply the prescaled gradient, or the velocity.

use std::marker::PhantomData;

use super::element::{BlocksRef, Compute, Read, State, Stochastic, Store, end, filled_up};
use super::rounding::{DRAWN, StochasticBits};
use super::rows::Weights;
use super::simd::{Instructions, LANES, Processor, Work};
use super::threads::{Task, for_each};
use super::{TASK, is_large};
use crate::tensor::{DType, GradRef, ParamMut, each_grad, each_param};

/// The scalars of one tensor's update, each rounded to the format that is computed in.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct UpdateScalars {
    /// Weight decay and norm lock: what the old parameter is multiplied with.
    pub decay: f64,
    /// Learning rate for the prescaled gradient, or for the velocity.
    pub coefficient: f64,
    /// A power of two that brings a very large or small gradient into range; 1 otherwise.
    pub prescale: f64,
    /// Decay of the velocity; 0 means that there is none.
    pub velocity_decay: f64,
    /// The inverse of the gradient scale.
    pub unscale: f64,
}

/// A velocity buffer: f64 for f64 parameters, f32 for all others.
#[derive(Clone, Debug)]
pub(crate) enum Velocity {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Velocity {
    /// A buffer for parameters of the given format, at rest.
    pub(crate) fn zeros(dtype: DType, len: usize) -> Self {
        match dtype.state() {
            DType::F64 => Velocity::F64(vec![0.0; len]),
            _ => Velocity::F32(vec![0.0; len]),
        }
    }
}

impl<'a> From<Option<&'a mut Velocity>> for VelocityMut<'a> {
    fn from(velocity: Option<&'a mut Velocity>) -> Self {
        match velocity {
            None => VelocityMut::None,
            Some(Velocity::F32(v)) => VelocityMut::F32(v),
            Some(Velocity::F64(v)) => VelocityMut::F64(v),
        }
    }
}

/// The velocities of the elements that are to be updated.
pub(crate) enum VelocityMut<'a> {
    None,
    F32(&'a mut [f32]),
    F64(&'a mut [f64]),
}

/// One tensor to update, or a part of it.
pub(crate) struct TensorUpdate<'a> {
    pub param: ParamMut<'a>,
    pub grad: GradRef<'a>,
    pub velocity: VelocityMut<'a>,
    pub master: Option<&'a mut [f32]>,
    pub scalars: &'a UpdateScalars,
    /// Scales of rows multiply the coefficient, those of columns the gradient or velocity.
    pub weights: Option<Weights<'a>>,
    pub stochastic: Option<StochasticBits>,
}

/// Applies the updates of tensors that have so many elements in all, in parallel. Tensors with a missing
/// gradient stay as they are.
pub(crate) fn update<'a>(elements: usize, tensors: impl Iterator<Item = TensorUpdate<'a>> + Send) {
    for_each(is_large(elements), tensors);
}

impl Task for TensorUpdate<'_> {
    /// From the last piece to the first: what the sums have read last is in the caches.
    #[inline]
    fn split_off(&mut self) -> Option<Self> {
        let len = self.param.len();
        if len <= TASK {
            return None;
        }
        // Whole rows.
        let size = self.weights.map_or(TASK, |weights| TASK.next_multiple_of(weights.rows.len));
        let first = (len - 1) / size * size;
        if first == 0 {
            return None;
        }
        let grad = self.grad.slice(first, len - first);
        self.grad = self.grad.slice(0, first);
        Some(Self {
            param: self.param.split_off(first),
            grad,
            velocity: self.velocity.split_off(first),
            master: self.master.as_mut().map(|m| m.split_off_mut(first..).unwrap_or_default()),
            scalars: self.scalars,
            weights: self.weights.map(|weights| Weights {
                row_scales: &weights.row_scales[first / weights.rows.len..],
                ..weights
            }),
            stochastic: self.stochastic.map(|bits| bits.advanced(first)),
        })
    }

    #[inline]
    fn run(&mut self, processor: Processor) {
        let (grad, scalars) = (self.grad, self.scalars);
        if matches!(grad, GradRef::Missing) {
            return;
        }
        let (single, double) = match &mut self.velocity {
            VelocityMut::None => (None, None),
            VelocityMut::F32(v) => (Some(&mut **v), None),
            VelocityMut::F64(v) => (None, Some(&mut **v)),
        };
        let change = Change { scalars, weights: self.weights.as_ref() };
        match (&mut self.master, self.stochastic) {
            (Some(master), _) => match &mut self.param {
                ParamMut::F16(param) => change.run(processor, master, param, grad, single),
                ParamMut::BF16(param) => change.run(processor, master, param, grad, single),
                // They have none.
                ParamMut::F32(_) | ParamMut::F64(_) => {}
            },
            (None, Some(bits)) if self.param.dtype().is_half() => match &mut self.param {
                ParamMut::F16(param) => {
                    processor.run(Rounded { change, param, bits, grad, velocity: single });
                }
                ParamMut::BF16(param) => {
                    processor.run(Rounded { change, param, bits, grad, velocity: single });
                }
                ParamMut::F32(_) | ParamMut::F64(_) => {}
            },
            (None, _) => each_param!(
                &mut self.param,
                param => change.run(processor, param, &mut [0.0_f32; 0], grad, single),
                f64 => change.run(processor, param, &mut [0.0_f32; 0], grad, double)
            ),
        }
    }
}

impl VelocityMut<'_> {
    /// Takes the elements from one on off.
    fn split_off(&mut self, first: usize) -> Self {
        match self {
            VelocityMut::None => VelocityMut::None,
            VelocityMut::F32(v) => VelocityMut::F32(v.split_off_mut(first..).unwrap_or_default()),
            VelocityMut::F64(v) => VelocityMut::F64(v.split_off_mut(first..).unwrap_or_default()),
        }
    }
}

/// How the elements of a tensor or of a part of it change.
#[derive(Clone, Copy)]
struct Change<'a> {
    scalars: &'a UpdateScalars,
    weights: Option<&'a Weights<'a>>,
}

impl Change<'_> {
    /// Changes `x`, parameters or master weights; `copy` are the parameters to be rounded from these, or
    /// empty.
    #[inline]
    fn run<V: State, X: Store<V> + Store<f64>, P: Store<f32>>(
        &self,
        processor: Processor,
        x: &mut [X],
        copy: &mut [P],
        grad: GradRef<'_>,
        velocity: Option<&mut [V]>,
    ) where
        f32: Read<X>,
    {
        let change = self;
        each_grad!(
            grad,
            g => processor.run(Piece { change, x, copy, g, velocity, format: PhantomData::<V> }),
            f64 => processor.run(Piece { change, x, copy, g, velocity, format: PhantomData::<f64> }),
            missing => ()
        )
    }
}

/// Parameters that results are rounded to stochastically: part by part by way of f32, which holds them
/// exactly.
struct Rounded<'a, P> {
    change: Change<'a>,
    param: &'a mut [P],
    bits: StochasticBits,
    grad: GradRef<'a>,
    velocity: Option<&'a mut [f32]>,
}

impl<P: Stochastic> Work for Rounded<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, instructions: I) {
        let Self { change, param, bits, grad, mut velocity } = self;
        // Rows, or parts of a tensor that has none.
        let row = change.weights.map_or(param.len(), |weights| weights.rows.len);
        let mut start = 0;
        while start < param.len() {
            let place = start % row;
            let count = DRAWN.min(row - place).min(param.len() - start);
            let range = start..start + count;
            let part = &mut param[range.clone()];
            let mut exact = [[0.0_f32; LANES]; DRAWN / LANES];
            let mut end = end();
            let mut blocks = BlocksRef::new(part, &mut end);
            for (k, exact) in exact.iter_mut().take(count.div_ceil(LANES)).enumerate() {
                *exact = P::load(instructions, *blocks.at(k * LANES));
            }
            let weights = change.weights.map(|weights| Weights {
                row_scales: &weights.row_scales[start / row..],
                column_scales: weights.column_scales.get(place..).unwrap_or_default(),
                ..*weights
            });
            let change = &Change { weights: weights.as_ref(), ..change };
            let velocity = velocity.as_mut().map(|v| &mut v[range]);
            let (x, copy) = (&mut exact.as_flattened_mut()[..count], &mut [0.0_f32; 0]);
            each_grad!(
                grad.slice(start, count),
                g => Piece { change, x, copy, g, velocity, format: PhantomData::<f32> }.run(instructions),
                f64 => Piece { change, x, copy, g, velocity, format: PhantomData::<f64> }.run(instructions),
                missing => ()
            );
            bits.advanced(start).round(instructions, &exact, part);
            start += count;
        }
    }
}

/// A [`Change`] computed in the format `T`.
struct Piece<'a, T, V, X, P, G> {
    change: &'a Change<'a>,
    x: &'a mut [X],
    copy: &'a mut [P],
    g: &'a [G],
    velocity: Option<&'a mut [V]>,
    format: PhantomData<T>,
}

impl<T: Compute + Read<G>, V: Store<T>, X: Store<T>, P: Store<f32>, G: Copy + Default> Work
    for Piece<'_, T, V, X, P, G>
where
    f32: Read<X>,
{
    type Output = ();

    /// Changes all rows, or all elements where there are none.
    #[inline(always)]
    fn run<I: Instructions>(self, instructions: I) {
        let Self { change, x, copy, g, mut velocity, .. } = self;
        // A copy: through the reference they might be among what is written, and would be read again.
        let scalars = *change.scalars;
        let (size, column_scales, row_scales) = match change.weights {
            None => (x.len(), &[][..], &[][..]),
            Some(weights) => (weights.rows.len, weights.column_scales, weights.row_scales),
        };
        let (mut row, mut start) = (0, 0);
        while start < x.len() {
            let range = start..x.len().min(start + size);
            let mut coefficient = scalars.coefficient;
            if change.weights.is_some() {
                coefficient *= row_scales[row];
            }
            let elements = Row {
                x: &mut x[range.clone()],
                copy: if copy.is_empty() { &mut [] } else { &mut copy[range.clone()] },
                g: &g[range.clone()],
                velocity: match &mut velocity {
                    Some(velocity) => &mut velocity[range.clone()],
                    None => &mut [],
                },
                column_scales: if column_scales.is_empty() { &[] } else { &column_scales[..range.len()] },
                coefficient: T::from_f64(coefficient),
            };
            elements.run(instructions, &scalars);
            (row, start) = (row + 1, range.end);
        }
    }
}

/// One row of a piece. What there is none of is empty.
struct Row<'a, T, V, X, P, G> {
    x: &'a mut [X],
    copy: &'a mut [P],
    g: &'a [G],
    velocity: &'a mut [V],
    column_scales: &'a [f32],
    coefficient: T,
}

impl<T: Compute + Read<G>, V: Store<T>, X: Store<T>, P: Store<f32>, G: Copy + Default> Row<'_, T, V, X, P, G>
where
    f32: Read<X>,
{
    #[inline(always)]
    fn run<I: Instructions>(self, instructions: I, scalars: &UpdateScalars) {
        let factors = Factors {
            scalars,
            decay: [T::from_f64(scalars.decay); LANES],
            prescale: [T::from_f64(scalars.prescale); LANES],
            // What p·decay is added to: by the velocity, or by minus the gradient, which is exact.
            coefficient: [if self.velocity.is_empty() { -self.coefficient } else { self.coefficient }; LANES],
        };
        let (x, x_rest) = self.x.as_chunks_mut();
        let (g, g_rest) = self.g.as_chunks();
        let (v, v_rest) = self.velocity.as_chunks_mut();
        let (u, u_rest) = self.column_scales.as_chunks();
        let (copy, copy_rest) = self.copy.as_chunks_mut();
        for (k, (x, g)) in x.iter_mut().zip(g).enumerate() {
            factors.block(instructions, x, *g, v.get_mut(k), u.get(k), copy.get_mut(k));
        }
        if x_rest.is_empty() {
            return;
        }
        // In blocks that are filled up, of which then belongs to the row what was read.
        let (mut x, mut v, u, mut copy) =
            (filled_up(x_rest), filled_up(v_rest), filled_up(u_rest), [P::default(); LANES]);
        let v_there = if v_rest.is_empty() { None } else { Some(&mut v) };
        let u_there = if u_rest.is_empty() { None } else { Some(&u) };
        let copy_there = if copy_rest.is_empty() { None } else { Some(&mut copy) };
        factors.block(instructions, &mut x, filled_up(g_rest), v_there, u_there, copy_there);
        take_back(x_rest, &x);
        take_back(v_rest, &v);
        take_back(copy_rest, &copy);
    }
}

/// The first elements.
#[inline(always)]
fn take_back<T: Copy>(to: &mut [T], from: &[T; LANES]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = *from;
    }
}

/// What the elements of a row are multiplied with.
struct Factors<'a, T> {
    scalars: &'a UpdateScalars,
    decay: [T; LANES],
    prescale: [T; LANES],
    coefficient: [T; LANES],
}

impl<T: Compute> Factors<'_, T> {
    /// Changes some elements, their velocities and rounded copies where there are any.
    #[inline(always)]
    fn block<I: Instructions, V: Store<T>, X: Store<T>, P: Store<f32>, G: Copy>(
        &self,
        instructions: I,
        x: &mut [X; LANES],
        g: [G; LANES],
        velocity: Option<&mut [V; LANES]>,
        column_scales: Option<&[f32; LANES]>,
        copy: Option<&mut [P; LANES]>,
    ) where
        T: Read<G>,
        f32: Read<X>,
    {
        let g = T::read(instructions, g);
        let mut d = match velocity {
            None => T::mul(instructions, g, self.prescale),
            Some(velocity) => {
                *velocity = advanced(instructions, *velocity, g, self.scalars);
                V::load(instructions, *velocity)
            }
        };
        if let Some(u) = column_scales {
            d = T::mul(instructions, d, T::from_f32(instructions, *u));
        }
        let p = T::mul(instructions, X::load(instructions, *x), self.decay);
        *x = X::store(instructions, T::add(instructions, p, T::mul(instructions, d, self.coefficient)));
        if let Some(copy) = copy {
            *copy = P::store(instructions, f32::read(instructions, *x));
        }
    }
}

/// v·velocity_decay − g·unscale, in the format of the velocity.
#[inline(always)]
pub(super) fn advanced<I: Instructions, T: Compute, V: Store<T>>(
    instructions: I,
    velocity: [V; LANES],
    g: [T; LANES],
    scalars: &UpdateScalars,
) -> [V; LANES] {
    let decay = [T::from_f64(scalars.velocity_decay); LANES];
    let unscale = [T::from_f64(scalars.unscale); LANES];
    let v = T::mul(instructions, V::load(instructions, velocity), decay);
    V::store(instructions, T::sub(instructions, v, T::mul(instructions, g, unscale)))
}
