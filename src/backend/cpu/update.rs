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

use super::TASK;
use super::element::{Blocks, BlocksRef, Compute, Read, State, Stochastic, Store, rounds};
use super::reduce::is_large;
use super::rounding::{DRAWN, StochasticBits};
use super::rows::Variances;
use super::simd::{Instructions, LANES, Work};
use super::threads::for_each;
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

/// Applies the updates of tensors that have so many elements in all, in parallel. Tensors with a missing
/// gradient stay as they are.
pub(crate) fn update<'a>(elements: usize, tensors: impl Iterator<Item = TensorUpdate<'a>> + Send) {
    for_each(is_large(elements), tensors.flat_map(Pieces::new));
}

/// The pieces of a tensor, from the last to the first: what the sums have read last is in the caches.
struct Pieces<'a> {
    tensor: TensorUpdate<'a>,
    velocity: VelocityPart<'a>,
}

impl<'a> Pieces<'a> {
    fn new(mut tensor: TensorUpdate<'a>) -> Self {
        let velocity = match tensor.velocity.take() {
            None => VelocityPart::None,
            Some(Velocity::F32(v)) => VelocityPart::F32(v),
            Some(Velocity::F64(v)) => VelocityPart::F64(v),
        };
        Self { tensor, velocity }
    }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = Piece<'a>;

    fn next(&mut self) -> Option<Piece<'a>> {
        let Self { tensor, velocity } = self;
        let len = tensor.param.len();
        if len == 0 {
            return None;
        }
        // Whole rows.
        let size = tensor.variances.map_or(TASK, |variances| TASK.next_multiple_of(variances.rows.len));
        let first = (len - 1) / size * size;
        Some(Piece {
            param: tensor.param.split_off(first),
            grad: tensor.grad.slice(first, len - first),
            velocity: velocity.split_off(first),
            master: tensor.master.as_mut().map(|m| m.split_off_mut(first..).unwrap_or_default()),
            scalars: tensor.scalars,
            variances: tensor.variances.map(|variances| Variances {
                averages: &variances.averages[first / variances.rows.len..],
                ..variances
            }),
            stochastic: tensor.stochastic.map(|bits| bits.advanced(first)),
        })
    }
}

impl<'a> VelocityPart<'a> {
    /// Takes the elements from one on off.
    fn split_off(&mut self, first: usize) -> VelocityPart<'a> {
        match self {
            VelocityPart::None => VelocityPart::None,
            VelocityPart::F32(v) => VelocityPart::F32(v.split_off_mut(first..).unwrap_or_default()),
            VelocityPart::F64(v) => VelocityPart::F64(v.split_off_mut(first..).unwrap_or_default()),
        }
    }
}

impl Work for Piece<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, instructions: I) {
        let Piece { param, grad, velocity, master, scalars, variances, stochastic } = self;
        let (single, double) = match velocity {
            VelocityPart::None => (None, None),
            VelocityPart::F32(v) => (Some(v), None),
            VelocityPart::F64(v) => (None, Some(v)),
        };
        let change = Change { instructions, scalars, variances };
        match (master, stochastic) {
            (Some(master), _) => match param {
                ParamMut::F16(param) => change.piece(master, param, grad, single),
                ParamMut::BF16(param) => change.piece(master, param, grad, single),
                // They have none.
                ParamMut::F32(_) | ParamMut::F64(_) => {}
            },
            (None, Some(bits)) if param.dtype().is_half() => match param {
                ParamMut::F16(param) => change.rounded(param, bits, grad, single),
                ParamMut::BF16(param) => change.rounded(param, bits, grad, single),
                ParamMut::F32(_) | ParamMut::F64(_) => {}
            },
            (None, _) => each_param!(
                param,
                param => change.piece(param, &mut [0.0_f32; 0], grad, single),
                f64 => change.piece(param, &mut [0.0_f32; 0], grad, double)
            ),
        }
    }
}

/// How the elements of a piece change.
struct Change<'a, I> {
    instructions: I,
    scalars: UpdateScalars,
    variances: Option<Variances<'a>>,
}

impl<I: Instructions> Change<'_, I> {
    /// Changes `x`, parameters or master weights; `copy` are the parameters to be rounded from these, or
    /// empty.
    #[inline(always)]
    fn piece<V: State, X: Store<V> + Store<f64>, P: Store<f32>>(
        &self,
        x: &mut [X],
        copy: &mut [P],
        grad: GradRef<'_>,
        velocity: Option<&mut [V]>,
    ) where
        f32: Read<X>,
    {
        each_grad!(
            grad,
            g => self.each_row::<V, V, X, P, _>(x, copy, g, velocity),
            f64 => self.each_row::<f64, V, X, P, f64>(x, copy, g, velocity),
            missing => ()
        )
    }

    /// Changes parameters that results are rounded to stochastically: part by part by way of f32, which holds
    /// them exactly.
    #[inline(always)]
    fn rounded<P: Stochastic>(
        &self,
        param: &mut [P],
        bits: StochasticBits,
        grad: GradRef<'_>,
        mut velocity: Option<&mut [f32]>,
    ) {
        // Rows, or parts of a tensor that has none.
        let row = self.variances.map_or(param.len(), |variances| variances.rows.len);
        let mut start = 0;
        while start < param.len() {
            let place = start % row;
            let count = DRAWN.min(row - place).min(param.len() - start);
            let range = start..start + count;
            let part = &mut param[range.clone()];
            let mut exact = [[0.0_f32; LANES]; DRAWN / LANES];
            let blocks = BlocksRef::new(part);
            for (k, exact) in exact.iter_mut().take(count.div_ceil(LANES)).enumerate() {
                *exact = P::load(self.instructions, blocks.at(k * LANES));
            }
            let variances = self.variances.map(|variances| Variances {
                averages: &variances.averages[start / row..],
                column_scales: variances.column_scales.get(place..).unwrap_or_default(),
                ..variances
            });
            let change = Change { variances, ..*self };
            let velocity = velocity.as_mut().map(|v| &mut v[range]);
            let of_part = &mut exact.as_flattened_mut()[..count];
            change.piece(of_part, &mut [0.0_f32; 0], grad.slice(start, count), velocity);
            bits.advanced(start).round(self.instructions, &exact, part);
            start += count;
        }
    }

    /// Changes all rows, or all elements where there are none, computed in the format `T`.
    #[inline(always)]
    fn each_row<T: Compute + Read<G>, V: Store<T>, X: Store<T>, P: Store<f32>, G: Copy + Default>(
        &self,
        x: &mut [X],
        copy: &mut [P],
        g: &[G],
        mut velocity: Option<&mut [V]>,
    ) where
        f32: Read<X>,
    {
        let (size, column_scales, averages) = match self.variances {
            None => (x.len(), &[][..], &[][..]),
            Some(variances) => (variances.rows.len, variances.column_scales, variances.averages),
        };
        for (row, start) in (0..x.len()).step_by(size.max(1)).enumerate() {
            let range = start..x.len().min(start + size);
            let mut coefficient = self.scalars.coefficient;
            if let Some(variances) = self.variances {
                coefficient *= variances.rule.scale(averages[row]);
            }
            let copy = if copy.is_empty() { &mut [] } else { &mut copy[range.clone()] };
            let own_velocity = velocity.as_mut().map(|v| &mut v[range.clone()]);
            let coefficient = T::from_f64(coefficient);
            self.row(&mut x[range.clone()], copy, &g[range], own_velocity, column_scales, coefficient);
        }
    }

    #[inline(always)]
    fn row<T: Compute + Read<G>, V: Store<T>, X: Store<T>, P: Store<f32>, G: Copy + Default>(
        &self,
        x: &mut [X],
        copy: &mut [P],
        g: &[G],
        velocity: Option<&mut [V]>,
        column_scales: &[f32],
        coefficient: T,
    ) where
        f32: Read<X>,
    {
        let instructions = self.instructions;
        let decay = [T::from_f64(self.scalars.decay); LANES];
        let prescale = [T::from_f64(self.scalars.prescale); LANES];
        // What p·decay is added to: by the velocity, or by minus the gradient, which is exact.
        let coefficient = [if velocity.is_some() { coefficient } else { -coefficient }; LANES];
        let len = x.len();
        let (has_copy, has_columns) = (!copy.is_empty(), !column_scales.is_empty());
        let (mut x, mut copy, mut g) = (Blocks::new(x), Blocks::new(copy), BlocksRef::new(g));
        let mut velocity = velocity.map(Blocks::new);
        let mut columns = BlocksRef::new(if has_columns { &column_scales[..len] } else { &[] });
        for last in rounds(len) {
            let (x, g) = (x.round(last), g.round(last));
            let count = x.len().min(g.len());
            let copy = if has_copy { &mut copy.round(last)[..count] } else { &mut [] };
            let mut v = velocity.as_mut().map(|v| &mut v.round(last)[..count]);
            let u = if has_columns { &columns.round(last)[..count] } else { &[] };
            for k in 0..count {
                let g = T::read(instructions, g[k]);
                let mut d = match &mut v {
                    None => T::mul(instructions, g, prescale),
                    Some(v) => {
                        v[k] = advanced(instructions, v[k], g, &self.scalars);
                        V::load(instructions, v[k])
                    }
                };
                if has_columns {
                    d = T::mul(instructions, d, T::from_f32(instructions, u[k]));
                }
                let p = T::mul(instructions, X::load(instructions, x[k]), decay);
                x[k] = X::store(instructions, T::add(instructions, p, T::mul(instructions, d, coefficient)));
                if has_copy {
                    copy[k] = P::store(instructions, f32::read(instructions, x[k]));
                }
            }
        }
        x.finish();
        copy.finish();
        if let Some(velocity) = velocity {
            velocity.finish();
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
