//! Batch-size designs against brute force.

use rfdescent::estimation::{Design, DesignKind, DesignProblem};
use std::time::Instant;

const PROBLEM: DesignProblem = DesignProblem {
    variance: 0.009362,
    noise_variance: 0.851,
    min_batch_size: 20,
    max_batch_size: None,
};

#[test]
fn reference() {
    for kind in [DesignKind::COptimal, DesignKind::Gibbs] {
        let t = Instant::now();
        let d = PROBLEM.design(kind).unwrap();
        println!(
            "{kind}: {:?} {} {:?} n={} E[B]={}",
            t.elapsed(),
            d.objective(),
            d.lambda(),
            d.points().len(),
            d.expected_batch_size()
        );
        if d.points().len() < 5 {
            println!("{:?}", d.points());
        }
    }
    for (v, n, m, max) in [
        (1e-4, 0.333, 20, Some(50000)),
        (1.0, 0.0, 20, None),
        (1.0, 1.0, 1, Some(60000)),
        (0.05, 1.0, 20, Some(60000)),
        (1e-4, 1.0, 20, Some(1000)),
        (1e-4, 1.0, 20, None),
        (0.01, 1., 20, Some(22)),
    ] {
        let p = DesignProblem {
            variance: v,
            noise_variance: n,
            min_batch_size: m,
            max_batch_size: max,
        };
        for kind in [DesignKind::COptimal, DesignKind::Gibbs] {
            let t = Instant::now();
            let d = p.design(kind).unwrap();
            println!(
                "{p:?} {kind}: {:?} {} {:?} n={} E[B]={}",
                t.elapsed(),
                d.objective() / v / v,
                d.lambda(),
                d.points().len(),
                d.expected_batch_size()
            );
        }
    }
}
