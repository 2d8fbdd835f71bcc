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

use std::ops::Range;

use rayon::prelude::*;

use super::element::{BLOCK, Compute, Load, Parameter, Read, Store};
use super::rounding::StochasticBits;
use super::rows::Variances;
use super::{SERIAL_BELOW, TASK, run};
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

/// One tensor to update.
pub(crate) struct TensorUpdate<'a> {
    pub param: ParamMut<'a>,
    pub grad: GradRef<'a>,
    pub velocity: Option<&'a mut Velocity>,
    pub master: Option<&'a mut [f32]>,
    pub scalars: UpdateScalars,
    /// Scales of rows multiply the coefficient, those of columns the gradient or velocity.
    pub variances: Option<Variances<'a>>,
    pub stochastic: Option<StochasticBits>,
}

/// A part of a tensor, small enough for one task.
struct Piece<'a> {
    param: ParamMut<'a>,
    grad: GradRef<'a>,
    velocity: VelocityPart<'a>,
    master: Option<&'a mut [f32]>,
    scalars: UpdateScalars,
    variances: Option<Variances<'a>>,
    stochastic: Option<StochasticBits>,
}

enum VelocityPart<'a> {
    None,
    F32(&'a mut [f32]),
    F64(&'a mut [f64]),
}

/// Applies the updates, in parallel. Tensors with a missing gradient stay as they are.
pub(crate) fn update(tensors: Vec<TensorUpdate<'_>>) {
    let total: usize = tensors.iter().map(|t| t.param.len()).sum();
    let mut pieces = Vec::with_capacity(total / TASK + tensors.len());
    for tensor in tensors {
        cut(tensor, &mut pieces);
    }
    let apply = |piece: Piece<'_>| {
        run(
            #[inline(always)]
            || piece.apply(),
        )
    };
    if total < SERIAL_BELOW {
        pieces.into_iter().for_each(apply);
    } else {
        pieces.into_par_iter().for_each(apply);
    }
}

fn cut<'a>(tensor: TensorUpdate<'a>, pieces: &mut Vec<Piece<'a>>) {
    let TensorUpdate { mut param, grad, velocity, mut master, scalars, variances, stochastic } = tensor;
    // Whole rows.
    let size = variances.map_or(TASK, |variances| TASK.next_multiple_of(variances.rows.len));
    let mut velocity = match velocity {
        None => VelocityPart::None,
        Some(Velocity::F32(v)) => VelocityPart::F32(v),
        Some(Velocity::F64(v)) => VelocityPart::F64(v),
    };
    let mut start = 0;
    while !param.is_empty() {
        let count = size.min(param.len());
        let (head, rest) = param.split_at(count);
        param = rest;
        let head_velocity;
        (head_velocity, velocity) = velocity.split_at(count);
        let head_master;
        (head_master, master) = match master {
            None => (None, None),
            Some(m) => {
                let (head, rest) = m.split_at_mut(count);
                (Some(head), Some(rest))
            }
        };
        pieces.push(Piece {
            param: head,
            grad: grad.slice(start, count),
            velocity: head_velocity,
            master: head_master,
            scalars,
            variances: variances.map(|variances| Variances {
                averages: &variances.averages[start / variances.rows.len..],
                ..variances
            }),
            stochastic: stochastic.map(|bits| bits.advanced(start)),
        });
        start += count;
    }
}

impl<'a> VelocityPart<'a> {
    fn split_at(self, at: usize) -> (VelocityPart<'a>, VelocityPart<'a>) {
        match self {
            VelocityPart::None => (VelocityPart::None, VelocityPart::None),
            VelocityPart::F32(v) => {
                let (head, rest) = v.split_at_mut(at);
                (VelocityPart::F32(head), VelocityPart::F32(rest))
            }
            VelocityPart::F64(v) => {
                let (head, rest) = v.split_at_mut(at);
                (VelocityPart::F64(head), VelocityPart::F64(rest))
            }
        }
    }
}

impl Piece<'_> {
    #[inline(always)]
    fn apply(self) {
        let Piece { param, grad, velocity, master, scalars, variances, stochastic } = self;
        let (single, double) = match velocity {
            VelocityPart::None => (None, None),
            VelocityPart::F32(v) => (Some(v), None),
            VelocityPart::F64(v) => (None, Some(v)),
        };
        let change = Change { scalars, variances, stochastic };
        match master {
            None => each_param!(
                param,
                p => with_param(p, grad, single, &change),
                f64 => with_param(p, grad, double, &change)
            ),
            Some(master) => {
                with_param(master, grad, single, &change);
                each_param!(param, p => Parameter::set_f32(p, master));
            }
        }
    }
}

/// How the elements of a piece change.
struct Change<'a> {
    scalars: UpdateScalars,
    variances: Option<Variances<'a>>,
    stochastic: Option<StochasticBits>,
}

impl Change<'_> {
    /// Calls `change` for each part of a block, which begins at an element of the piece, with the coefficient
    /// of that part and the scales of its columns: for all of it, or for each row. Where there are no columns
    /// the scales are empty.
    #[inline(always)]
    fn each_row<T: Compute>(
        &self,
        start: usize,
        len: usize,
        mut change: impl FnMut(Range<usize>, T, &[f32]),
    ) {
        let coefficient = self.scalars.coefficient;
        let Some(variances) = self.variances else {
            return change(0..len, T::from_f64(coefficient), &[]);
        };
        let size = variances.rows.len;
        let mut at = 0;
        while at < len {
            let row = (start + at) / size;
            let end = len.min((row + 1) * size - start);
            let columns =
                (variances.rows.columns > 0).then(|| start + at - row * size..start + end - row * size);
            let scales = columns.map_or(&[][..], |columns| &variances.column_scales[columns]);
            change(at..end, T::from_f64(coefficient * variances.scale(row)), scales);
            at = end;
        }
    }
}

#[inline(always)]
fn with_param<P: Parameter>(
    p: &mut [P],
    grad: GradRef<'_>,
    velocity: Option<&mut [P::State]>,
    change: &Change<'_>,
) {
    each_grad!(
        grad,
        g => with_grad::<P::State, P, _>(p, g, velocity, change),
        f64 => with_grad::<f64, P, f64>(p, g, velocity, change),
        missing => ()
    )
}

/// The update in the format `T`, block by block.
#[inline(always)]
fn with_grad<T: Compute + Read<G>, P: Parameter + Store<T>, G>(
    p: &mut [P],
    g: &[G],
    mut velocity: Option<&mut [P::State]>,
    change: &Change<'_>,
) where
    P::State: Store<T>,
{
    let decay = T::from_f64(change.scalars.decay);
    let prescale = T::from_f64(change.scalars.prescale);
    let (mut p_buffer, mut g_buffer, mut v_buffer) =
        ([T::default(); BLOCK], [T::default(); BLOCK], [T::default(); BLOCK]);
    for (index, (p, g)) in p.chunks_mut(BLOCK).zip(g.chunks(BLOCK)).enumerate() {
        let start = index * BLOCK;
        let range = start..start + p.len();
        let bits = change.stochastic.map(|bits| bits.advanced(start));
        let g = T::read(g, &mut g_buffer);
        match velocity.as_deref_mut() {
            None => P::modify(p, &mut p_buffer, bits.as_ref(), |p: &mut [T]| {
                change.each_row(start, p.len(), |row, coefficient, scales| {
                    let (p, g) = (&mut p[row.clone()], &g[row]);
                    if scales.is_empty() {
                        for (p, &g) in p.iter_mut().zip(g) {
                            *p = *p * decay - (g * prescale) * coefficient;
                        }
                    } else {
                        for ((p, &g), &u) in p.iter_mut().zip(g).zip(scales) {
                            *p = *p * decay - ((g * prescale) * T::from_f32(u)) * coefficient;
                        }
                    }
                });
            }),
            Some(velocity) => {
                let velocity = &mut velocity[range];
                advance_velocity(velocity, &mut v_buffer, g, &change.scalars);
                let v = <P::State as Load<T>>::load(velocity, &mut v_buffer);
                P::modify(p, &mut p_buffer, bits.as_ref(), |p: &mut [T]| {
                    change.each_row(start, p.len(), |row, coefficient, scales| {
                        let (p, v) = (&mut p[row.clone()], &v[row]);
                        if scales.is_empty() {
                            for (p, &v) in p.iter_mut().zip(v) {
                                *p = *p * decay + v * coefficient;
                            }
                        } else {
                            for ((p, &v), &u) in p.iter_mut().zip(v).zip(scales) {
                                *p = *p * decay + (v * T::from_f32(u)) * coefficient;
                            }
                        }
                    });
                });
            }
        }
    }
}

/// v ← v·velocity_decay − g·unscale.
#[inline(always)]
pub(super) fn advance_velocity<T: Compute, V: Store<T>>(
    velocity: &mut [V],
    buffer: &mut [T],
    g: &[T],
    scalars: &UpdateScalars,
) {
    let decay = T::from_f64(scalars.velocity_decay);
    let unscale = T::from_f64(scalars.unscale);
    V::modify(velocity, buffer, None, |v| {
        for (v, &g) in v.iter_mut().zip(g) {
            *v = *v * decay - g * unscale;
        }
    });
}
