//! The operation on storages: the library's bits, and what it refuses.

mod common;

use common::library::{DTYPES, Owned, bits, moving, params, uniform};
use common::{owned, scalar, tensor};
use rfdescent_candle::StepOp;
use rfdescent_candle::rfdescent::optimizer::{Group, Optimizer, Options, StepInput, TensorSpec};

fn options() -> Options {
    let group = Group { weight_decay: 0.01, ..Group::default() };
    Options { groups: vec![group], ..Options::default() }
}

#[test]
fn steps_have_the_bits_of_the_library_in_all_formats() {
    for dtype in DTYPES {
        for grad_dtype in DTYPES {
            let shape = [7, 11];
            let mut list = vec![Owned::from_f64(dtype, &uniform(1, 77))];
            let param = tensor(&list[0], &shape);
            let specs = vec![TensorSpec::new("w", &shape, dtype)];
            let mut reference = Optimizer::new(moving(0.5), options(), specs).unwrap();
            let op = StepOp::new("w", &param, moving(0.5), options()).unwrap();
            for step in 0..3 {
                let gradient = Owned::from_f64(grad_dtype, &uniform(2 + step, 77));
                let input = StepInput::new(2.0);
                let report = reference.step(&mut params(&mut list), &[gradient.grad()], &input).unwrap();
                param.inplace_op3(&tensor(&gradient, &shape), &scalar(2.0), &op).unwrap();
                assert_eq!(bits(&[owned(&param)]), bits(&list));
                assert_eq!(op.report().unwrap(), Some(report));
            }
        }
    }
}

#[test]
fn strided_operands_and_other_shapes_are_refused_by_name() {
    let param = tensor(&Owned::from_f64(DTYPES[0], &uniform(1, 6)), &[2, 3]);
    let op = StepOp::new("w", &param, moving(0.5), options()).unwrap();
    let refused = |result: candle_core::Result<()>, parts: &[&str]| {
        let text = result.unwrap_err().to_string();
        parts.iter().for_each(|part| assert!(text.contains(part), "`{text}` should say `{part}`"));
    };
    let loss = scalar(2.0);
    let turned = tensor(&Owned::from_f64(DTYPES[0], &uniform(2, 6)), &[3, 2]);
    refused(param.inplace_op3(&turned, &loss, &op), &["`w`", "[2, 3]", "[3, 2]"]);
    refused(param.inplace_op3(&turned.t().unwrap(), &loss, &op), &["`w`", "gradient", "contiguous()"]);
    let good = turned.t().unwrap().contiguous().unwrap();
    refused(turned.t().unwrap().inplace_op3(&good, &loss, &op), &["`w`", "tensor", "contiguous()"]);
    refused(param.inplace_op3(&good, &good, &op), &["loss", "[2, 3]"]);
    assert_eq!(op.report().unwrap(), None);
    param.inplace_op3(&good, &loss, &op).unwrap();
    assert_eq!(op.report().unwrap().unwrap().applied_steps, 1);
}
