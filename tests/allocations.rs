//! A step after the first takes no memory from the system and gives none back.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use rfdescent::covariance::Family;
use rfdescent::optimizer::{
    Adaptive, Fitted, Group, Method, Optimizer, Options, Outcome, StepInput, TensorSpec,
};
use rfdescent::{GradRef, ParamMut};

use common::{DTYPES, Owned, grads, model, params, uniform};

thread_local! {
    /// Of this thread: others of the test's process may start or end at any time.
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: all is left to the system's allocator; counting needs no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller vouches for the layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller vouches for place and layout.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Matrices and vectors, of one element and of many chunks, of every format, one without a gradient.
fn steps_take_no_memory(method: &Method, options: &Options, large: usize) {
    let shapes: [&[usize]; 6] = [&[3, 5], &[64], &[1], &[0, 7], &[large, 300], &[5000]];
    let lists = DTYPES.iter().flat_map(|&dtype| shapes.map(|shape| (shape, dtype))).enumerate();
    let specs: Vec<_> =
        lists.map(|(k, (shape, dtype))| TensorSpec::new(format!("t{k}"), shape, dtype)).collect();
    let values = |seed: u64| -> Vec<Owned> {
        let list = specs.iter().enumerate();
        list.map(|(k, s)| Owned::from_f64(s.dtype, &uniform(seed + k as u64, s.len().unwrap()))).collect()
    };
    let (mut values, gradients) = (values(1), values(100));
    let mut optimizer = Optimizer::new(method.clone(), options.clone(), specs.clone()).unwrap();
    let mut params: Vec<ParamMut<'_>> = params(&mut values);
    let mut grads: Vec<GradRef<'_>> = grads(&gradients);
    grads[1] = GradRef::Missing;
    for step in 0..5 {
        let before = CALLS.get();
        let report = optimizer.step(&mut params, &grads, &StepInput::new(1.5)).unwrap();
        let calls = CALLS.get() - before;
        assert_eq!(report.outcome, Outcome::Applied);
        let is_first = step == 0;
        assert_eq!(calls > 0, is_first, "{calls} calls in step {step} of {method:?} with {options:?}");
    }
}

#[test]
fn steps_after_the_first_take_no_memory() {
    let model = model(Family::SquaredExponential);
    let methods: [Method; 4] = [
        model.clone().into(),
        Fitted::new(model).with_momentum(0.9).into(),
        Adaptive::default().into(),
        Adaptive { averaging: 0.0, ..Adaptive::default() }.into(),
    ];
    let locked = Group { norm_lock: true, weight_decay: 0.1, ..Group::default() };
    let options = [
        Options::default(),
        Options { master_weights: true, groups: vec![locked], ..Options::default() },
        Options { stochastic_rounding: Some(1), ..Options::default() },
    ];
    for threads in [1, 2] {
        rfdescent::set_threads(threads);
        for method in &methods {
            // With 500 rows there is work for several threads.
            options.iter().for_each(|options| steps_take_no_memory(method, options, [7, 500][threads - 1]));
        }
    }
}
