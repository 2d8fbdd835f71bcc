//! Sums of gradients, element by element.

use super::element::{Blocks, BlocksRef, Compute, Load, end, rounds};
use super::simd::{Instructions, Processor, Work};
use super::threads::{Task, for_each};
use super::{TASK, is_large};
use crate::tensor::GradRef;

/// Gradients of one tensor, added up in the order in which they come: in f64 as soon as one of them is f64,
/// in f32 until then. A single one keeps its values to the bit.
#[derive(Clone, Debug)]
pub(crate) enum GradSum {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Default for GradSum {
    fn default() -> Self {
        GradSum::F32(Vec::new())
    }
}

impl GradSum {
    /// What has been added up.
    pub fn get(&self) -> GradRef<'_> {
        match self {
            GradSum::F32(sums) => GradRef::F32(sums),
            GradSum::F64(sums) => GradRef::F64(sums),
        }
    }

    /// Begins anew with one gradient, in the memory that is there where it fits. Nothing happens where the
    /// gradient is missing.
    pub fn set(&mut self, grad: GradRef<'_>) {
        match (&mut *self, grad) {
            (_, GradRef::Missing) => {}
            (GradSum::F64(sums), GradRef::F64(g)) => {
                sums.resize(g.len(), 0.0);
                each(sums, g, false);
            }
            (_, GradRef::F64(g)) => *self = GradSum::F64(g.to_vec()),
            (GradSum::F32(sums), _) => {
                sums.resize(grad.len().unwrap_or(0), 0.0);
                match grad {
                    GradRef::F32(g) => each(sums, g, false),
                    GradRef::F16(g) => each(sums, g, false),
                    GradRef::BF16(g) => each(sums, g, false),
                    GradRef::F64(_) | GradRef::Missing => {}
                }
            }
            (GradSum::F64(_), _) => {
                *self = GradSum::default();
                self.set(grad);
            }
        }
    }

    /// Adds a gradient of the same length. Nothing happens where it is missing.
    pub fn add(&mut self, grad: GradRef<'_>) {
        match (&mut *self, grad) {
            (_, GradRef::Missing) => {}
            (GradSum::F32(sums), GradRef::F32(g)) => each(sums, g, true),
            (GradSum::F32(sums), GradRef::F16(g)) => each(sums, g, true),
            (GradSum::F32(sums), GradRef::BF16(g)) => each(sums, g, true),
            (GradSum::F64(sums), GradRef::F32(g)) => each(sums, g, true),
            (GradSum::F64(sums), GradRef::F16(g)) => each(sums, g, true),
            (GradSum::F64(sums), GradRef::BF16(g)) => each(sums, g, true),
            (GradSum::F64(sums), GradRef::F64(g)) => each(sums, g, true),
            (GradSum::F32(sums), GradRef::F64(_)) => {
                let mut wide = vec![0.0; sums.len()];
                each(&mut wide, sums.as_slice(), false);
                *self = GradSum::F64(wide);
                self.add(grad);
            }
        }
    }
}

/// Adds a gradient to sums, or sets them to it, in parallel.
fn each<T: Compute, G: Load<T>>(sums: &mut [T], grad: &[G], add: bool) {
    debug_assert_eq!(sums.len(), grad.len());
    for_each(is_large(sums.len()), std::iter::once(Pair { sums, grad, add }));
}

struct Pair<'a, T, G> {
    sums: &'a mut [T],
    grad: &'a [G],
    add: bool,
}

impl<T: Compute, G: Load<T>> Task for Pair<'_, T, G> {
    fn split_off(&mut self) -> Option<Self> {
        if self.sums.len() <= TASK {
            return None;
        }
        let (sums, grad) = (self.sums.split_off_mut(..TASK)?, self.grad.split_off(..TASK)?);
        Some(Self { sums, grad, add: self.add })
    }

    fn run(&mut self, processor: Processor) {
        processor.run(self);
    }
}

impl<T: Compute, G: Load<T>> Work for &mut Pair<'_, T, G> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, instructions: I) {
        let len = self.sums.len();
        let (mut sums_end, mut grad_end) = (end(), end());
        let mut sums = Blocks::new(&mut *self.sums, &mut sums_end);
        let mut grad = BlocksRef::new(self.grad, &mut grad_end);
        for last in rounds(len) {
            for (sum, g) in sums.round(last).iter_mut().zip(grad.round(last)) {
                let g = G::load(instructions, *g);
                *sum = if self.add { T::add(instructions, *sum, g) } else { g };
            }
        }
        sums.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::super::SERIAL_BELOW;
    use super::*;
    use half::{bf16, f16};

    fn values(sum: &GradSum) -> (Vec<f64>, bool) {
        match sum {
            GradSum::F32(sums) => (sums.iter().map(|&x| f64::from(x)).collect(), false),
            GradSum::F64(sums) => (sums.clone(), true),
        }
    }

    #[test]
    fn sums_are_in_f64_as_soon_as_a_gradient_is() {
        let mut sum = GradSum::default();
        sum.set(GradRef::BF16(&[bf16::from_f32(1.5), bf16::from_f32(-0.0)]));
        assert!(matches!(sum.get(), GradRef::F32(&[1.5, zero]) if zero.is_sign_negative()));
        sum.add(GradRef::F16(&[f16::from_f32(0.25), f16::from_f32(2.0)]));
        sum.add(GradRef::F32(&[1.0, 1e-9]));
        sum.add(GradRef::Missing);
        assert_eq!(values(&sum), (vec![2.75, 2.0], false));
        sum.add(GradRef::F64(&[0.0, 1e-9]));
        assert_eq!(values(&sum), (vec![2.75, 2.0 + 1e-9], true));
        sum.add(GradRef::F32(&[1e-9, 0.0]));
        assert_eq!(values(&sum).0[0], 2.75 + f64::from(1e-9_f32));
        sum.set(GradRef::F64(&[3.0]));
        assert_eq!(values(&sum), (vec![3.0], true));
        sum.set(GradRef::F32(&[4.0, 5.0]));
        assert_eq!(values(&sum), (vec![4.0, 5.0], false));
    }

    #[test]
    fn long_gradients_are_added_everywhere() {
        let list: Vec<f32> = (0..SERIAL_BELOW + 777).map(|k| k as f32).collect();
        let mut sum = GradSum::default();
        sum.set(GradRef::F32(&list));
        sum.add(GradRef::F32(&list));
        assert!(values(&sum).0.iter().zip(&list).all(|(sum, &g)| *sum == 2.0 * f64::from(g)));
    }
}
