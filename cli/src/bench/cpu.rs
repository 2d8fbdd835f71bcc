//! Steps on the processor, of the fitted and of the adaptive method, in turn with a plain loop that moves as
//! many bytes as the first.

use std::hint::black_box;
use std::time::Instant;

use rayon::prelude::*;
use rfdescent::optimizer::{Adaptive, Optimizer, Options, StepInput};

use super::{Case, Element, LOSS, Measured, applied, cut, cut_mut, values};
use crate::error::CliError;

/// Rounds: as many as fit in this time, within these limits.
const SECONDS: f64 = 1.0;
const ROUNDS: std::ops::RangeInclusive<usize> = 2..=200;
/// Repeats of each of the three in a round: the first finds what the others left in the caches, the median is
/// of the rest.
const REPEATS: usize = 5;

/// Medians of all times.
pub fn measure<E: Element>(case: &Case) -> Result<Measured, CliError> {
    let before = case.params::<E>()?;
    let grads = case.grads::<E>()?;
    let mut params = case.params::<E>()?;
    // As many bytes in f32, which needs no conversion.
    let plain_len = (case.total * size_of::<E>()).div_ceil(size_of::<f32>());
    let (mut plain_params, plain_grads) = (values::<f32>(plain_len, 1)?, values::<f32>(plain_len, 2)?);

    let grad_list: Vec<_> = cut(&grads, &case.lengths).into_iter().map(E::grad).collect();
    let step = |optimizer: &mut Optimizer, params: &mut [E]| {
        let mut list: Vec<_> = cut_mut(params, &case.lengths).into_iter().map(E::param).collect();
        let started = Instant::now();
        let report = optimizer.step(&mut list, &grad_list, &StepInput::new(LOSS))?;
        let seconds = started.elapsed().as_secs_f64();
        applied(&report)?;
        Ok::<_, CliError>((report, seconds))
    };
    let mut largest_error = 0.0_f64;
    let mut checked = |method| {
        let mut optimizer = Optimizer::new(method, Options::default(), case.specs::<E>())?;
        params.copy_from_slice(&before);
        let (report, _) = step(&mut optimizer, &mut params)?;
        let error = case.check(optimizer.method(), &before, &grads, &params, &report)?;
        largest_error = largest_error.max(error);
        Ok::<_, CliError>(optimizer)
    };
    let mut fitted = checked(case.fitted())?;
    let mut adaptive = checked(Adaptive::default().into())?;
    drop(before);
    black_box(plain_loop(&mut plain_params, &plain_grads));

    let (mut steps, mut adaptive_steps, mut plain) = (Vec::new(), Vec::new(), Vec::new());
    let started = Instant::now();
    for round in 1..=*ROUNDS.end() {
        for _ in 0..REPEATS {
            steps.push(step(&mut fitted, &mut params)?.1);
        }
        for _ in 0..REPEATS {
            adaptive_steps.push(step(&mut adaptive, &mut params)?.1);
        }
        for _ in 0..REPEATS {
            let started = Instant::now();
            black_box(plain_loop(&mut plain_params, &plain_grads));
            plain.push(started.elapsed().as_secs_f64());
        }
        if round >= *ROUNDS.start() && started.elapsed().as_secs_f64() >= SECONDS {
            break;
        }
    }
    Ok(Measured {
        steps: steps.len() as u64,
        step: median(steps),
        adaptive_step: median(adaptive_steps),
        plain_loop: Some(median(plain)),
        largest_error,
    })
}

/// The least that any step must do: read the gradients, then read gradients and parameters and write
/// parameters.
fn plain_loop(params: &mut [f32], grads: &[f32]) -> f32 {
    const TASK: usize = 65_536;
    let square: f32 = grads
        .par_chunks(TASK)
        .map(|grads| {
            // Independent sums, for the compiler to put side by side.
            let mut lanes = [0.0_f32; 32];
            for grads in grads.chunks_exact(lanes.len()) {
                for (lane, g) in lanes.iter_mut().zip(grads) {
                    *lane += g * g;
                }
            }
            lanes.iter().sum::<f32>()
        })
        .sum();
    let rate = 1e-6 / (1.0 + square.sqrt());
    params.par_chunks_mut(TASK).zip(grads.par_chunks(TASK)).for_each(|(params, grads)| {
        for (p, g) in params.iter_mut().zip(grads) {
            *p -= rate * g;
        }
    });
    square
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
