//! Steps on a device: wall time of many, queued one behind the other, with one wait at the end.

use std::time::Instant;

use rfdescent::device::Device;
use rfdescent::optimizer::{Adaptive, Method};

use super::device_steps::DeviceSteps;
use super::{Case, Element, Measured, applied, wrong};
use crate::error::CliError;

/// A measurement lasts at least this long, unless it has this many steps.
const SECONDS: f64 = 0.5;
const MOST: u64 = 1 << 17;

/// Both methods, one after the other.
pub fn measure<E: Element>(case: &Case, device: &Device) -> Result<Measured, CliError> {
    let fitted = measure_method::<E>(case, case.fitted(), device)?;
    let adaptive = measure_method::<E>(case, Adaptive::default().into(), device)?;
    Ok(Measured {
        steps: fitted.steps,
        step: fitted.step,
        adaptive_step: adaptive.step,
        largest_error: fitted.largest_error.max(adaptive.largest_error),
        kernels: [fitted.kernels, adaptive.kernels],
    })
}

struct OfMethod {
    steps: u64,
    /// The mean over the last and longest measurement.
    step: f64,
    largest_error: f64,
    kernels: String,
}

fn measure_method<E: Element>(case: &Case, method: Method, device: &Device) -> Result<OfMethod, CliError> {
    let (before, grads) = (case.params::<E>()?, case.grads::<E>()?);
    let mut run = DeviceSteps::new(case, &method, &before, &grads, device)?;
    run.step()?;
    let report = run.wait()?;
    let largest_error = case.check(&method, &before, &grads, &run.params()?, &report)?;

    let mut taken = 1;
    let mut steps = 4;
    loop {
        let started = Instant::now();
        for _ in 0..steps {
            run.step()?;
        }
        let report = run.wait()?;
        let seconds = started.elapsed().as_secs_f64();
        taken += steps;
        applied(&report)?;
        if report.applied_steps != taken {
            return Err(wrong(format!("{} of {taken} were applied", report.applied_steps)));
        }
        if seconds >= SECONDS || steps >= MOST {
            let step = seconds / steps as f64;
            return Ok(OfMethod { steps, step, largest_error, kernels: run.kernels() });
        }
        steps *= 2;
    }
}

#[cfg(all(test, feature = "shim"))]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use rfdescent::device::{Shim, ShimOptions};

    fn measured<E: Element>() {
        let shim = Shim::new(ShimOptions::default());
        // More than one upload of CHUNK.
        let case = Case::new(super::super::device_steps::CHUNK + 1003, 5).unwrap();
        let measured = measure::<E>(&case, &shim.device()).unwrap();
        assert!(measured.step > 0.0 && measured.adaptive_step > 0.0);
        assert!(measured.largest_error > 0.0 && measured.largest_error <= 4.0 * E::ROUNDING);
    }

    #[test]
    fn the_kernels_pass_the_check() {
        measured::<f32>();
        measured::<f16>();
        measured::<bf16>();
    }
}
