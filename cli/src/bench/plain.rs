//! The least that a step must do, in plain loops with no order to keep: read the gradients, then read
//! gradients and parameters and write parameters; where there are velocities, the second pass reads and
//! writes those too, and with the adaptive method the first one reads them. In the step's own formats,
//! compiled for this machine's vectors.

use half::f16;
use half::slice::HalfFloatSliceExt;
use rayon::ThreadPool;
use rayon::prelude::*;

use super::Element;

/// Elements of a task.
const TASK: usize = 65_536;
/// Elements that are worked on together, and independent sums.
const LANES: usize = 64;
/// What velocities are multiplied with.
const DECAY: f32 = 0.9;
/// What a loop goes over beside the gradients: as many elements each, or none.
pub struct Loop<E> {
    pub params: Vec<E>,
    pub master: Vec<f32>,
    pub velocity: Vec<f32>,
    /// Whether the first pass reads velocities too.
    pub averages: bool,
    /// What the rate of a step is divided by one more than the root of all squares to give.
    pub rate: f32,
}

/// Parts of the lists of a [`Loop`].
struct Part<'a, E> {
    params: &'a mut [E],
    master: &'a mut [f32],
    velocity: &'a mut [f32],
    grads: &'a [E],
}

impl<E: Element> Loop<E> {
    /// Both passes, on this thread or on those of a pool; of each task all but less than [`LANES`] elements.
    pub fn run(&mut self, grads: &[E], pool: Option<&ThreadPool>) {
        let velocity = if self.averages { &self.velocity[..] } else { &[] };
        let squares = |task: usize| {
            let range = task * TASK..grads.len().min((task + 1) * TASK);
            match velocity.get(range.clone()) {
                Some(velocity) => averaged_squares(velocity, &grads[range]),
                None => squares(&grads[range]),
            }
        };
        let tasks = grads.len().div_ceil(TASK);
        let square: f32 = match pool {
            None => (0..tasks).map(squares).sum(),
            Some(pool) => pool.install(|| (0..tasks).into_par_iter().map(squares).sum()),
        };
        let rate = self.rate / (1.0 + square.sqrt());
        let (mut params, mut master) = (&mut self.params[..], &mut self.master[..]);
        let (mut velocity, mut grads) = (&mut self.velocity[..], grads);
        let parts = (0..tasks).map(|_| {
            let count = TASK.min(grads.len());
            Part {
                params: params.split_off_mut(..count).unwrap_or_default(),
                master: master.split_off_mut(..count).unwrap_or_default(),
                velocity: velocity.split_off_mut(..count).unwrap_or_default(),
                grads: grads.split_off(..count).unwrap_or_default(),
            }
        });
        match pool {
            None => parts.for_each(|part| part.update(rate)),
            Some(pool) => {
                let parts: Vec<_> = parts.collect();
                pool.install(|| parts.into_par_iter().for_each(|part| part.update(rate)));
            }
        }
    }
}

impl<E: Element> Part<'_, E> {
    fn update(self, rate: f32) {
        match (self.master.is_empty(), self.velocity.is_empty()) {
            (true, true) => update(self.params, self.grads, rate),
            (true, false) => moving_update(self.params, self.velocity, self.grads, rate),
            (false, true) => master_update(self.params, self.master, self.grads, rate),
            (false, false) => {
                moving_master_update(self.params, self.master, self.velocity, self.grads, rate);
            }
        }
    }
}

/// The instructions that a loop is compiled for.
pub trait Instructions {
    /// Whether there are conversions of f16 among them.
    const F16: bool = false;
}

/// A list in the format that is computed in, and back.
#[inline(always)]
pub fn widen_f16<I: Instructions, const N: usize>(list: &[f16; N]) -> [f32; N] {
    let mut wide = [0.0; N];
    #[cfg(target_arch = "x86_64")]
    if I::F16 {
        use std::arch::x86_64::*;
        for (wide, list) in wide.as_chunks_mut::<8>().0.iter_mut().zip(list.as_chunks::<8>().0) {
            // SAFETY: with `F16` there are the instructions; 8 elements of 16 bits are read, 8 of 32 written.
            unsafe {
                let list = _mm_loadu_si128(list.as_ptr().cast());
                _mm256_storeu_ps(wide.as_mut_ptr(), _mm256_cvtph_ps(list));
            }
        }
        return wide;
    }
    list.convert_to_f32_slice(&mut wide);
    wide
}

#[inline(always)]
pub fn narrow_f16<I: Instructions, const N: usize>(list: &[f32; N]) -> [f16; N] {
    let mut narrow = [f16::ZERO; N];
    #[cfg(target_arch = "x86_64")]
    if I::F16 {
        use std::arch::x86_64::*;
        for (narrow, list) in narrow.as_chunks_mut::<8>().0.iter_mut().zip(list.as_chunks::<8>().0) {
            // SAFETY: with `F16` there are the instructions; 8 elements of 32 bits are read, 8 of 16 written.
            unsafe {
                let list = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(list.as_ptr()));
                _mm_storeu_si128(narrow.as_mut_ptr().cast(), list);
            }
        }
        return narrow;
    }
    narrow.convert_from_f32_slice(list);
    narrow
}

/// Compiles a function for several sets of instructions, and calls it with the widest that there is.
macro_rules! for_this_machine {
    ($(fn $name:ident<E: Element, I: Instructions>($($argument:ident: $t:ty),*) $(-> $r:ty)? $body:block)*) => {$(
        fn $name<E: Element>($($argument: $t),*) $(-> $r)? {
            #[inline(always)]
            fn any<E: Element, I: Instructions>($($argument: $t),*) $(-> $r)? $body
            #[cfg(target_arch = "x86_64")]
            {
                use std::arch::is_x86_feature_detected as has;
                #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512cd,avx512dq,avx512vl")]
                fn v4<E: Element>($($argument: $t),*) $(-> $r)? {
                    any::<E, X86>($($argument),*)
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                fn v3<E: Element>($($argument: $t),*) $(-> $r)? {
                    any::<E, X86>($($argument),*)
                }
                let has_v3 = has!("avx2") && has!("fma") && has!("f16c");
                let has_v4 = has!("avx512f") && has!("avx512bw") && has!("avx512cd") && has!("avx512dq");
                if has_v3 && has_v4 && has!("avx512vl") {
                    // SAFETY: the processor has what it is compiled for.
                    return unsafe { v4($($argument),*) };
                }
                if has_v3 {
                    // SAFETY: as above.
                    return unsafe { v3($($argument),*) };
                }
            }
            any::<E, Any>($($argument),*)
        }
    )*};
}

struct Any;
impl Instructions for Any {}

#[cfg(target_arch = "x86_64")]
struct X86;
#[cfg(target_arch = "x86_64")]
impl Instructions for X86 {
    const F16: bool = true;
}

for_this_machine! {
    fn squares<E: Element, I: Instructions>(grads: &[E]) -> f32 {
        let mut sums = [0.0_f32; LANES];
        for grads in grads.as_chunks().0 {
            let grads = E::widen::<I, LANES>(grads);
            for k in 0..LANES {
                sums[k] += grads[k] * grads[k];
            }
        }
        sums.iter().sum()
    }

    fn averaged_squares<E: Element, I: Instructions>(velocity: &[f32], grads: &[E]) -> f32 {
        let (mut sums, mut of_velocity) = ([0.0_f32; LANES], [0.0_f32; LANES]);
        for (velocity, grads) in velocity.as_chunks::<LANES>().0.iter().zip(grads.as_chunks().0) {
            let grads = E::widen::<I, LANES>(grads);
            for k in 0..LANES {
                let next = velocity[k] * DECAY - grads[k];
                sums[k] += grads[k] * grads[k];
                of_velocity[k] += next * next;
            }
        }
        sums.iter().zip(of_velocity).map(|(sum, of_velocity)| sum + of_velocity).sum()
    }

    fn update<E: Element, I: Instructions>(params: &mut [E], grads: &[E], rate: f32) {
        for (params, grads) in params.as_chunks_mut().0.iter_mut().zip(grads.as_chunks().0) {
            let (mut wide, grads) = (E::widen::<I, LANES>(params), E::widen::<I, LANES>(grads));
            for k in 0..LANES {
                wide[k] -= rate * grads[k];
            }
            *params = E::narrow::<I, LANES>(&wide);
        }
    }

    fn moving_update<E: Element, I: Instructions>(
        params: &mut [E], velocity: &mut [f32], grads: &[E], rate: f32
    ) {
        let velocity = velocity.as_chunks_mut::<LANES>().0.iter_mut();
        for ((params, velocity), grads) in
            params.as_chunks_mut().0.iter_mut().zip(velocity).zip(grads.as_chunks().0)
        {
            let (mut wide, grads) = (E::widen::<I, LANES>(params), E::widen::<I, LANES>(grads));
            for k in 0..LANES {
                velocity[k] = velocity[k] * DECAY - grads[k];
                wide[k] += rate * velocity[k];
            }
            *params = E::narrow::<I, LANES>(&wide);
        }
    }

    fn master_update<E: Element, I: Instructions>(
        params: &mut [E], master: &mut [f32], grads: &[E], rate: f32
    ) {
        let master = master.as_chunks_mut::<LANES>().0.iter_mut();
        for ((params, master), grads) in
            params.as_chunks_mut().0.iter_mut().zip(master).zip(grads.as_chunks().0)
        {
            let grads = E::widen::<I, LANES>(grads);
            for k in 0..LANES {
                master[k] -= rate * grads[k];
            }
            *params = E::narrow::<I, LANES>(master);
        }
    }

    fn moving_master_update<E: Element, I: Instructions>(
        params: &mut [E], master: &mut [f32], velocity: &mut [f32], grads: &[E], rate: f32
    ) {
        let master = master.as_chunks_mut::<LANES>().0.iter_mut();
        let velocity = velocity.as_chunks_mut::<LANES>().0.iter_mut();
        for (((params, master), velocity), grads) in
            params.as_chunks_mut().0.iter_mut().zip(master).zip(velocity).zip(grads.as_chunks().0)
        {
            let grads = E::widen::<I, LANES>(grads);
            for k in 0..LANES {
                velocity[k] = velocity[k] * DECAY - grads[k];
                master[k] += rate * velocity[k];
            }
            *params = E::narrow::<I, LANES>(master);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    /// One round, element by element in f64.
    fn a_loop_does_what_a_step_must<E: Element>(with_master: bool, with_velocity: bool, averages: bool) {
        let len = 2 * TASK + 5 * LANES;
        let value = |i: usize| (i % 97) as f32 / 64.0 - 0.75;
        let params: Vec<E> = (0..len).map(|i| E::from_f32(value(i))).collect();
        let grads: Vec<E> = (0..len).map(|i| E::from_f32(value(i + 5))).collect();
        let list =
            |is: bool, of: &dyn Fn(usize) -> f32| if is { (0..len).map(of).collect() } else { Vec::new() };
        let next = |k: usize| if with_velocity { 0.9 - grads[k].to_f64() } else { -grads[k].to_f64() };
        let squares: f64 =
            (0..len).map(|k| grads[k].to_f64().powi(2) + if averages { next(k).powi(2) } else { 0.0 }).sum();
        let rate = 100.0 / (1.0 + squares.sqrt());
        for threads in [1, 2] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut run = Loop {
                params: params.clone(),
                master: list(with_master, &|k| params[k].to_f64() as f32),
                velocity: list(with_velocity, &|_| 1.0),
                averages,
                rate: 100.0,
            };
            run.run(&grads, (threads > 1).then_some(&pool));
            assert!((run.velocity.iter().enumerate()).all(|(k, &v)| (f64::from(v) - next(k)).abs() < 1e-6));
            for k in 0..len {
                let expected = params[k].to_f64() + rate * next(k);
                // Sums in f32 are no better.
                let near = |x: f64, rounding: f64| (x - expected).abs() < rounding * (1.0 + expected.abs());
                assert!(near(run.params[k].to_f64(), E::ROUNDING + 1e-4));
                assert!(!with_master || near(f64::from(run.master[k]), 1e-4));
            }
        }
    }

    #[test]
    fn loops_do_what_steps_must() {
        for (with_velocity, averages) in [(false, false), (true, false), (true, true)] {
            a_loop_does_what_a_step_must::<f32>(false, with_velocity, averages);
            for with_master in [false, true] {
                a_loop_does_what_a_step_must::<f16>(with_master, with_velocity, averages);
                a_loop_does_what_a_step_must::<bf16>(with_master, with_velocity, averages);
            }
        }
    }
}
