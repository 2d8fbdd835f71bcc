//! Steps on the processor, of the fitted and of the adaptive method, in turn with plain loops that move as
//! many bytes.

use std::hint::black_box;
use std::time::Instant;

use rfdescent::optimizer::{Adaptive, Optimizer, Options, StepInput};

use super::{Case, Element, LOSS, Measured, applied, cut, cut_mut, plain, values};
use crate::error::CliError;

/// Rounds: as many as fit in this time, within these limits.
const SECONDS: f64 = 1.0;
const ROUNDS: std::ops::RangeInclusive<usize> = 2..=200;
/// Repeats of each of the four in a round: the first finds what the others left in the caches, the median is
/// of the rest.
const REPEATS: usize = 5;

/// Medians of all times.
pub fn measure<E: Element>(case: &Case) -> Result<Measured, CliError> {
    let before = case.params::<E>()?;
    let grads = case.grads::<E>()?;
    let mut params = case.params::<E>()?;
    let mut averages = values::<f32>(case.total, 3)?;

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
    // Loops change parameters too, of their own.
    let mut plain_params = before;
    plain::averaged_step(&mut plain_params, &mut averages, &grads);

    let (mut steps, mut adaptive_steps, mut plain, mut plain_adaptive) = (vec![], vec![], vec![], vec![]);
    let started = Instant::now();
    for round in 1..=*ROUNDS.end() {
        for _ in 0..REPEATS {
            steps.push(step(&mut fitted, &mut params)?.1);
        }
        for _ in 0..REPEATS {
            plain.push(seconds(|| plain::step(&mut plain_params, &grads)));
        }
        for _ in 0..REPEATS {
            adaptive_steps.push(step(&mut adaptive, &mut params)?.1);
        }
        for _ in 0..REPEATS {
            plain_adaptive.push(seconds(|| plain::averaged_step(&mut plain_params, &mut averages, &grads)));
        }
        if round >= *ROUNDS.start() && started.elapsed().as_secs_f64() >= SECONDS {
            break;
        }
    }
    black_box((plain_params, averages));
    Ok(Measured {
        steps: steps.len() as u64,
        step: median(steps),
        adaptive_step: median(adaptive_steps),
        plain_loops: Some([median(plain), median(plain_adaptive)]),
        largest_error,
        kernels: None,
    })
}

fn seconds(work: impl FnOnce()) -> f64 {
    let started = Instant::now();
    work();
    started.elapsed().as_secs_f64()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
