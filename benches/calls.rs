//! What a call from C costs beside the same one from Rust: steps on tensors of one element, where there is
//! little else. Each figure is the best of many short rounds; the C program is compiled against the shared
//! library of this build.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rfdescent::covariance::{Family, Model};
use rfdescent::optimizer::{Optimizer, Options, Outcome, StepInput, TensorSpec};
use rfdescent::{DType, GradRef, Moments, ParamMut};

const COUNTS: [usize; 2] = [1, 200];

/// Nanoseconds of a step from Rust.
fn rust(count: usize) -> f64 {
    let moments = Moments {
        mean: 2.5,
        variance: 0.01,
        noise_variance: 0.9,
        grad_variance: 5.0,
        noise_grad_variance: 300.0,
        dims: 1000,
    };
    let model = Model::new(Family::SquaredExponential, moments).unwrap();
    let specs = (0..count).map(|k| TensorSpec::new(k.to_string(), &[], DType::F32)).collect();
    let mut optimizer = Optimizer::new(model, Options::default(), specs).unwrap();
    let (mut values, gradients) = (vec![[0.0_f32]; count], vec![[1.0_f32]; count]);
    let calls = 100 / count + 1;
    let mut best = f64::INFINITY;
    for _ in 0..5000 {
        let start = Instant::now();
        for _ in 0..calls {
            let mut params: Vec<ParamMut<'_>> =
                values.iter_mut().map(|v| ParamMut::from(&mut v[..])).collect();
            let grads: Vec<GradRef<'_>> = gradients.iter().map(|g| GradRef::from(&g[..])).collect();
            let report = optimizer.step(&mut params, &grads, &StepInput::new(2.0)).unwrap();
            assert_eq!(report.outcome, Outcome::Applied);
        }
        best = best.min(start.elapsed().as_nanos() as f64 / calls as f64);
    }
    assert!(values[0][0] < 0.0);
    best
}

/// Nanoseconds of a step from C, for each of the counts.
fn c() -> Option<Vec<f64>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let library = std::env::current_exe().unwrap().parent().unwrap().join("librfdescent.so");
    let program = folder.path().join("calls");
    #[cfg(unix)]
    for name in ["librfdescent.so".into(), format!("librfdescent.so.{}", rfdescent::capi::RFD_ABI_VERSION)] {
        std::os::unix::fs::symlink(&library, folder.path().join(name)).unwrap();
    }
    let built = Command::new(std::env::var("CC").unwrap_or("cc".into()))
        .args(["-std=c11", "-O2", "-I"])
        .arg(root.join("include"))
        .arg(root.join("benches/support/calls.c"))
        .arg("-o")
        .arg(&program)
        .arg("-L")
        .arg(folder.path())
        .arg("-lrfdescent")
        .status();
    if !built.is_ok_and(|status| status.success()) {
        println!("skipped from C: the program could not be built");
        return None;
    }
    let done = Command::new(program)
        .args(COUNTS.map(|count| count.to_string()))
        .env("LD_LIBRARY_PATH", folder.path())
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Some(String::from_utf8_lossy(&done.stdout).lines().map(|line| line.parse().unwrap()).collect())
}

fn main() {
    let from_c = c();
    for (k, count) in COUNTS.into_iter().enumerate() {
        let rust = rust(count);
        print!("{count} tensor(s) of one element: {rust:.0} ns from Rust");
        match &from_c {
            Some(from_c) => println!(", {:.0} ns from C ({:+.0} ns)", from_c[k], from_c[k] - rust),
            None => println!(),
        }
    }
}
