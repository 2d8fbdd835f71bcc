//! The least that a step must do, in plain loops with no order to keep: read the gradients, then read
//! gradients and parameters and write parameters. Where gradients are averaged both passes read the averages,
//! and the second writes them. In the step's own formats, compiled for this machine's vectors.

use rayon::prelude::*;

use super::Element;

/// Elements of a task.
const TASK: usize = 65_536;
/// Independent sums, for the compiler to put side by side.
const SUMS: usize = 64;

/// The bytes of a step of the fitted method, without momentum.
pub fn step<E: Element>(params: &mut [E], grads: &[E]) {
    let square: f32 = grads.par_chunks(TASK).map(squares).sum();
    let rate = 1e-6 / (1.0 + square.sqrt());
    let tasks = params.par_chunks_mut(TASK).zip(grads.par_chunks(TASK));
    tasks.for_each(|(params, grads)| update(params, grads, rate));
}

/// Those of a step that moves along an average.
pub fn averaged_step<E: Element>(params: &mut [E], averages: &mut [f32], grads: &[E]) {
    let tasks = averages.par_chunks(TASK).zip(grads.par_chunks(TASK));
    let square: f32 = tasks.map(|(averages, grads)| averaged_squares(averages, grads)).sum();
    let rate = 1e-6 / (1.0 + square.sqrt());
    let tasks = params.par_chunks_mut(TASK).zip(averages.par_chunks_mut(TASK)).zip(grads.par_chunks(TASK));
    tasks.for_each(|((params, averages), grads)| averaged_update(params, averages, grads, rate));
}

/// Compiles a function for several sets of instructions, and calls it with the widest that there is.
macro_rules! for_this_machine {
    ($(fn $name:ident<E: Element>($($argument:ident: $t:ty),*) $(-> $r:ty)? $body:block)*) => {$(
        fn $name<E: Element>($($argument: $t),*) $(-> $r)? {
            #[inline(always)]
            fn any<E: Element>($($argument: $t),*) $(-> $r)? $body
            #[cfg(target_arch = "x86_64")]
            {
                use std::arch::is_x86_feature_detected as has;
                #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512cd,avx512dq,avx512vl")]
                fn v4<E: Element>($($argument: $t),*) $(-> $r)? {
                    any($($argument),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn v3<E: Element>($($argument: $t),*) $(-> $r)? {
                    any($($argument),*)
                }
                let has_v3 = has!("avx2") && has!("fma");
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
            any($($argument),*)
        }
    )*};
}

for_this_machine! {
    fn squares<E: Element>(grads: &[E]) -> f32 {
        let mut sums = [0.0_f32; SUMS];
        for grads in grads.as_chunks::<SUMS>().0 {
            for (sum, g) in sums.iter_mut().zip(grads) {
                *sum += g.widen() * g.widen();
            }
        }
        sums.iter().sum()
    }

    fn averaged_squares<E: Element>(averages: &[f32], grads: &[E]) -> f32 {
        let (mut sums, mut of_averages) = ([0.0_f32; SUMS], [0.0_f32; SUMS]);
        for (averages, grads) in averages.as_chunks::<SUMS>().0.iter().zip(grads.as_chunks::<SUMS>().0) {
            for k in 0..SUMS {
                let g = grads[k].widen();
                let average = averages[k] * 0.9 - g;
                sums[k] += g * g;
                of_averages[k] += average * average;
            }
        }
        sums.iter().zip(of_averages).map(|(sum, of_average)| sum + of_average).sum()
    }

    fn update<E: Element>(params: &mut [E], grads: &[E], rate: f32) {
        for (p, g) in params.iter_mut().zip(grads) {
            *p = E::narrow(p.widen() - rate * g.widen());
        }
    }

    fn averaged_update<E: Element>(params: &mut [E], averages: &mut [f32], grads: &[E], rate: f32) {
        for ((p, average), g) in params.iter_mut().zip(averages).zip(grads) {
            *average = *average * 0.9 - g.widen();
            *p = E::narrow(p.widen() + rate * *average);
        }
    }
}
