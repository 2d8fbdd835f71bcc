//! Steps of a program that has a pool of threads of its own, on all of whose threads they are taken at once.

mod common;

use std::sync::mpsc::channel;
use std::time::Duration;

use rayon::prelude::*;
use rfdescent::DType;
use rfdescent::optimizer::{Adaptive, Optimizer, Options, Outcome, StepInput, TensorSpec};

use common::uniform;

/// Two steps over tensors that are worked on by several threads.
fn trained() -> Vec<f32> {
    let specs = vec![TensorSpec::new("w", &[500, 900], DType::F32)];
    let mut optimizer = Optimizer::new(Adaptive::default(), Options::default(), specs).unwrap();
    let values = |seed| -> Vec<f32> { uniform(seed, 450_000).into_iter().map(|x| x as f32).collect() };
    let (mut values, gradient) = (values(1), values(2));
    for _ in 0..2 {
        let report = optimizer
            .step(&mut [(&mut values[..]).into()], &[(&gradient[..]).into()], &StepInput::new(1.0))
            .unwrap();
        assert_eq!(report.outcome, Outcome::Applied);
    }
    values
}

#[test]
fn steps_in_a_pool_of_the_caller_neither_wait_for_it_nor_change() {
    rfdescent::set_threads(1);
    let expected = trained();
    rfdescent::set_threads(3);
    let (send, receive) = channel();
    std::thread::spawn(move || {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let found: Vec<Vec<f32>> = pool.install(|| (0..8).into_par_iter().map(|_| trained()).collect());
        send.send(found).unwrap();
    });
    let found = receive.recv_timeout(Duration::from_secs(120)).expect("steps wait for one another");
    assert_eq!(found.len(), 8);
    assert!(found.iter().all(|found| *found == expected));
}
