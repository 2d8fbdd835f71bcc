//! Number formats: how arrays of f32, f64, f16 and bf16 become the format that is computed in, and back.

use std::ops::Neg;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::simd::{Instructions, LANES};
use crate::tensor::{ParamMut, each_param};

/// A format that is computed in: f64 where parameter or gradient is f64, f32 everywhere else.
pub(super) trait Compute: Copy + Send + Sync + Default + Neg<Output = Self> {
    /// Rounded to nearest; a value beyond the largest finite one becomes that one, so that 0·coefficient
    /// stays 0.
    fn from_f64(x: f64) -> Self;

    fn from_f32<I: Instructions>(instructions: I, x: [f32; LANES]) -> [Self; LANES];
    fn to_f64<I: Instructions>(instructions: I, x: [Self; LANES]) -> [f64; LANES];
    /// Adds the squares, each rounded to f64 before where it is not exact.
    fn add_squares<I: Instructions>(instructions: I, sum: [f64; LANES], x: [Self; LANES]) -> [f64; LANES];
    fn add<I: Instructions>(instructions: I, x: [Self; LANES], y: [Self; LANES]) -> [Self; LANES];
    fn sub<I: Instructions>(instructions: I, x: [Self; LANES], y: [Self; LANES]) -> [Self; LANES];
    fn mul<I: Instructions>(instructions: I, x: [Self; LANES], y: [Self; LANES]) -> [Self; LANES];
    /// Times a power of two, but as they are in a format whose squares can't leave the range of f64.
    fn scaled<I: Instructions>(instructions: I, x: [Self; LANES], scale: f64) -> [Self; LANES];
}

macro_rules! compute {
    (
        $t:ty, $add:ident, $sub:ident, $mul:ident, $widen:expr, $to_f64:expr, $add_squares:ident, $scaled:expr
    ) => {
        impl Compute for $t {
            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                (x as $t).clamp(-<$t>::MAX, <$t>::MAX)
            }
            #[inline(always)]
            fn from_f32<I: Instructions>(instructions: I, x: [f32; LANES]) -> [Self; LANES] {
                $widen(instructions, x)
            }
            #[inline(always)]
            fn to_f64<I: Instructions>(instructions: I, x: [Self; LANES]) -> [f64; LANES] {
                $to_f64(instructions, x)
            }
            #[inline(always)]
            fn add_squares<I: Instructions>(
                instructions: I,
                sum: [f64; LANES],
                x: [Self; LANES],
            ) -> [f64; LANES] {
                instructions.$add_squares(sum, Self::to_f64(instructions, x))
            }
            #[inline(always)]
            fn add<I: Instructions>(instructions: I, x: [Self; LANES], y: [Self; LANES]) -> [Self; LANES] {
                instructions.$add(x, y)
            }
            #[inline(always)]
            fn sub<I: Instructions>(instructions: I, x: [Self; LANES], y: [Self; LANES]) -> [Self; LANES] {
                instructions.$sub(x, y)
            }
            #[inline(always)]
            fn mul<I: Instructions>(instructions: I, x: [Self; LANES], y: [Self; LANES]) -> [Self; LANES] {
                instructions.$mul(x, y)
            }
            #[inline(always)]
            fn scaled<I: Instructions>(instructions: I, x: [Self; LANES], scale: f64) -> [Self; LANES] {
                $scaled(instructions, x, [scale; LANES])
            }
        }
    };
}

compute!(f32, add_f32, sub_f32, mul_f32, |_, x| x, I::widen_f32, add_exact_squares, |_, x, _| x);
compute!(f64, add_f64, sub_f64, mul_f64, I::widen_f32, |_, x| x, add_squares, I::mul_f64);

/// A format that can be read as `T`, exactly.
pub(super) trait Load<T>: Copy + Default + Send + Sync {
    fn load<I: Instructions>(instructions: I, from: [Self; LANES]) -> [T; LANES];
}

/// A format that `G` can be read as, exactly.
pub(super) trait Read<G>: Sized {
    /// As [`Load::load`].
    fn read<I: Instructions>(instructions: I, from: [G; LANES]) -> [Self; LANES];
}

impl<T, G: Load<T>> Read<G> for T {
    #[inline(always)]
    fn read<I: Instructions>(instructions: I, from: [G; LANES]) -> [T; LANES] {
        G::load(instructions, from)
    }
}

/// A format that results in `T` can be written to.
pub(super) trait Store<T>: Load<T> {
    /// Rounded to nearest; half formats through f32, as on a GPU, where only f32 converts to them in
    /// hardware.
    fn store<I: Instructions>(instructions: I, from: [T; LANES]) -> [Self; LANES];
}

/// A format of velocities. Gradients of any format but f64 can be read as it.
pub(super) trait State:
    Compute + Store<Self> + Store<f64> + Read<f32> + Read<f16> + Read<bf16>
{
}
impl State for f32 {}
impl State for f64 {}

/// A format of parameters.
pub(super) trait Parameter: Store<Self::State> + Store<f64> + Store<f32> {
    /// The format of the velocity: f64 for f64 parameters, f32 for all others.
    type State: State;

    /// The values as f32, rounded to nearest where they are f64.
    fn to_f32(values: &[Self]) -> Vec<f32>;
}

/// A format that f32 can be rounded to stochastically.
pub(super) trait Stochastic: Parameter<State = f32> {
    /// To one of the two neighbours, by as many random bits.
    fn round<I: Instructions>(instructions: I, x: [f32; LANES], random: [u16; LANES]) -> [Self; LANES];
}

/// Where the last array of a list is filled up.
pub(super) type End<T> = [[T; LANES]; 1];

/// One that is going to be written.
#[inline(always)]
pub(super) fn end<T: Copy + Default>() -> End<T> {
    [[T::default(); LANES]]
}

/// A list cut into arrays, the last one of which is filled up with zeros. That one is read when its turn
/// comes: before, it would be far ahead of what the processor fetches.
// The place of that one is given: with it in this struct all of it would lie in memory, not in registers.
pub(super) struct Blocks<'a, T> {
    full: &'a mut [[T; LANES]],
    rest: &'a mut [T],
    last: &'a mut End<T>,
}

impl<'a, T: Copy + Default> Blocks<'a, T> {
    #[inline(always)]
    pub(super) fn new(list: &'a mut [T], last: &'a mut End<T>) -> Self {
        let (full, rest) = list.as_chunks_mut();
        Self { full, rest, last }
    }

    /// The full arrays, then the last one.
    #[inline(always)]
    pub(super) fn round(&mut self, last: bool) -> &mut [[T; LANES]] {
        if !last {
            return self.full;
        }
        *self.last = [filled_up(self.rest)];
        self.last
    }

    /// Takes back what belongs to the list, after the last round.
    #[inline(always)]
    pub(super) fn finish(&mut self) {
        for (to, from) in self.rest.iter_mut().zip(&self.last[0]) {
            *to = *from;
        }
    }
}

/// The same to be read.
pub(super) struct BlocksRef<'a, T> {
    full: &'a [[T; LANES]],
    rest: &'a [T],
    last: &'a mut End<T>,
}

impl<'a, T: Copy + Default> BlocksRef<'a, T> {
    #[inline(always)]
    pub(super) fn new(list: &'a [T], last: &'a mut End<T>) -> Self {
        let (full, rest) = list.as_chunks();
        Self { full, rest, last }
    }

    #[inline(always)]
    pub(super) fn round(&mut self, last: bool) -> &[[T; LANES]] {
        if !last {
            return self.full;
        }
        *self.last = [filled_up(self.rest)];
        self.last
    }

    /// The full one that begins with a certain element.
    #[inline(always)]
    pub(super) fn full(&self, element: usize) -> &[T; LANES] {
        &self.full[element / LANES]
    }

    /// The one that begins with a certain element; that behind the full ones is the last one.
    // By reference: the compiler would copy an array that comes from one of two places to a third one first.
    #[inline(always)]
    pub(super) fn at(&mut self, element: usize) -> &[T; LANES] {
        match self.full.get(element / LANES) {
            Some(full) => full,
            None => {
                *self.last = [filled_up(self.rest)];
                &self.last[0]
            }
        }
    }

    /// Asks for the one that begins with a certain element, which may lie behind the list.
    #[inline(always)]
    pub(super) fn prefetch<I: Instructions>(&self, instructions: I, element: usize) {
        instructions.prefetch(self.full.as_ptr().cast::<T>().wrapping_add(element));
    }
}

/// Fewer elements than an array has, and zeros behind them.
#[inline(always)]
pub(super) fn filled_up<T: Copy + Default>(rest: &[T]) -> [T; LANES] {
    let mut block = [T::default(); LANES];
    let mut at = 0;
    // Halves that are there, each of a length that is known: a copy of any other is a call, which costs more.
    macro_rules! copy {
        ($($half:literal)*) => {$(
            if rest.len() & $half != 0 {
                block[at..at + $half].copy_from_slice(&rest[at..at + $half]);
                at += $half;
            }
        )*};
    }
    copy!(8 4 2 1);
    debug_assert_eq!(at, rest.len());
    block
}

/// Into how many rounds the blocks of so many elements fall: the full ones, and the last one if it is not.
#[inline(always)]
pub(super) fn rounds(len: usize) -> impl Iterator<Item = bool> {
    let (first, end) = (usize::from(len < LANES), 1 + usize::from(!len.is_multiple_of(LANES)));
    (first..end).map(|round| round == 1)
}

macro_rules! convert {
    ($($from:ty => $to:ty: |$instructions:pat_param, $x:ident| $body:expr;)*) => {$(
        impl Load<$to> for $from {
            #[inline(always)]
            fn load<I: Instructions>($instructions: I, $x: [$from; LANES]) -> [$to; LANES] {
                $body
            }
        }
    )*};
}

convert! {
    f32 => f32: |_, x| x;
    f64 => f64: |_, x| x;
    f32 => f64: |instructions, x| instructions.widen_f32(x);
    f64 => f32: |instructions, x| instructions.narrow_f64(x);
    f16 => f32: |instructions, x| instructions.widen_f16(x);
    f16 => f64: |instructions, x| instructions.widen_f32(instructions.widen_f16(x));
    bf16 => f32: |instructions, x| instructions.widen_bf16(x);
    bf16 => f64: |instructions, x| instructions.widen_f32(instructions.widen_bf16(x));
}

macro_rules! store {
    ($($from:ty => $to:ty: |$instructions:pat_param, $x:ident| $body:expr;)*) => {$(
        impl Store<$from> for $to {
            #[inline(always)]
            fn store<I: Instructions>($instructions: I, $x: [$from; LANES]) -> [$to; LANES] {
                $body
            }
        }
    )*};
}

store! {
    f32 => f32: |_, x| x;
    f64 => f64: |_, x| x;
    f64 => f32: |instructions, x| instructions.narrow_f64(x);
    f32 => f64: |instructions, x| instructions.widen_f32(x);
    f32 => f16: |instructions, x| instructions.narrow_f32_to_f16(x);
    f64 => f16: |instructions, x| instructions.narrow_f32_to_f16(instructions.narrow_f64(x));
    f32 => bf16: |instructions, x| instructions.narrow_f32_to_bf16(x);
    f64 => bf16: |instructions, x| instructions.narrow_f32_to_bf16(instructions.narrow_f64(x));
}

macro_rules! half_format {
    ($t:ty, $round:ident) => {
        impl Parameter for $t {
            type State = f32;
            fn to_f32(values: &[$t]) -> Vec<f32> {
                values.to_f32_vec()
            }
        }

        impl Stochastic for $t {
            #[inline(always)]
            fn round<I: Instructions>(
                instructions: I,
                x: [f32; LANES],
                random: [u16; LANES],
            ) -> [Self; LANES] {
                instructions.$round(x, random)
            }
        }
    };
}
half_format!(f16, round_to_f16);
half_format!(bf16, round_to_bf16);

impl Parameter for f32 {
    type State = f32;
    fn to_f32(values: &[f32]) -> Vec<f32> {
        values.to_vec()
    }
}

impl Parameter for f64 {
    type State = f64;
    fn to_f32(values: &[f64]) -> Vec<f32> {
        values.iter().map(|&x| x as f32).collect()
    }
}

/// The elements as f32, rounded to nearest where they are f64.
pub(crate) fn to_f32(param: &ParamMut<'_>) -> Vec<f32> {
    each_param!(param, p => Parameter::to_f32(p))
}

#[cfg(test)]
mod tests {
    use super::super::simd::{Any, Work, run};
    use super::*;

    /// f32 to a half format and back.
    struct There<'a, H>(&'a [f32], std::marker::PhantomData<H>);

    impl<H: Store<f32>> Work for There<'_, H> {
        type Output = Vec<(H, f32)>;

        fn run<I: Instructions>(self, instructions: I) -> Self::Output {
            let narrow = self.0.as_chunks().0.iter().flat_map(|&x| {
                let narrow: [H; LANES] = H::store(instructions, x);
                narrow.into_iter().zip(H::load(instructions, narrow))
            });
            narrow.collect()
        }
    }

    /// By whatever instructions this machine has, and by those of all machines.
    fn compare<H: Store<f32> + PartialEq>(
        from: &[f32],
        narrow: fn(f32) -> H,
        wide: fn(H) -> f32,
        negative: fn(H) -> bool,
    ) {
        assert!(from.len().is_multiple_of(LANES));
        let work = || There(from, std::marker::PhantomData);
        for found in [run(work()), work().run(Any)] {
            assert_eq!(found.len(), from.len());
            for (&from, (found, back)) in from.iter().zip(found) {
                let expected = narrow(from);
                let same = found == expected && negative(found) == negative(expected);
                assert!(same || from.is_nan() && back.is_nan(), "{from:e}");
                assert!(
                    back.to_bits() == wide(found).to_bits() || back.is_nan() && from.is_nan(),
                    "{from:e}"
                );
            }
        }
    }

    /// Every half-precision number, those beside it in f32, ties, and what lies beside these.
    #[test]
    fn half_formats_convert_as_the_half_crate_does() {
        let near = (0..=u16::MAX).flat_map(|b| {
            [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF].map(|low| f32::from_bits(u32::from(b) << 16 | low))
        });
        compare(&near.collect::<Vec<_>>(), bf16::from_f32, bf16::to_f32, bf16::is_sign_negative);
        let near = (0..=u16::MAX).flat_map(|b| {
            let bits = f16::from_bits(b).to_f32().to_bits();
            [0, 0x0FFF, 0x1000, 0x1001].map(|low| f32::from_bits(bits.wrapping_add(low)))
        });
        compare(&near.collect::<Vec<_>>(), f16::from_f32, f16::to_f32, f16::is_sign_negative);
    }
}
