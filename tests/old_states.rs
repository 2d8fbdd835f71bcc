//! States of the fitted method that earlier versions saved, through Rust, C and candle, load and go on with
//! the bits that they went on with then; those of the adaptive method, whose rule was another one, are
//! refused. `tests/data/states/README.md` says what they are. Python has a test of its own.

mod common;
mod recorded;
mod states;

use common::{Owned, grads, params, refused};
use recorded::{GroupSetup, Setup};
use rfdescent::covariance::{Family, StepMode};
use rfdescent::optimizer::{Optimizer, StepInput, TensorSpec};
use rfdescent::{DType, GradRef};
use states::{Kind, Recorded};

fn setup(kind: Kind) -> Setup {
    let group = GroupSetup::default();
    let (groups, method) = match kind {
        Kind::Fitted => (
            vec![group, GroupSetup { length_scale_factor: 1.25, weight_decay: 1.0 / 64.0, ..group }],
            recorded::Kind::Fitted {
                family: Family::Matern52,
                mode: StepMode::Rfd,
                conservatism: 0.0,
                inv_batch_size: 1.0 / 128.0,
                momentum: vec![0.9, 0.5],
            },
        ),
        Kind::Adaptive => (vec![group], recorded::Kind::Adaptive { averaging: 0.9, loss_bound: None }),
    };
    Setup {
        kind: method,
        moments: states::moments(),
        groups,
        multiplier: 1.0,
        max_step_size: None,
        stochastic_rounding: None,
        master_weights: true,
    }
}

fn specs(kind: Kind) -> Vec<TensorSpec> {
    let spec = |t: &states::Tensor| TensorSpec::new(t.name, t.shape, t.dtype).in_group(t.group);
    kind.tensors().iter().map(spec).collect()
}

fn optimizer(kind: Kind) -> Optimizer {
    recorded::optimizer(&setup(kind), specs(kind), None).unwrap()
}

/// Takes these steps; the bits of the last one's step size.
fn steps(kind: Kind, optimizer: &mut Optimizer, values: &mut [Owned], range: std::ops::Range<usize>) -> u64 {
    let mut last = 0;
    for step in range {
        let gradients: Vec<Owned> = (kind.tensors().iter().enumerate())
            .map(|(k, tensor)| Owned::from_f64(tensor.dtype, &kind.gradient(k, step)))
            .collect();
        let mut gradients: Vec<GradRef<'_>> = grads(&gradients);
        for (gradient, tensor) in gradients.iter_mut().zip(kind.tensors()) {
            if !tensor.used {
                *gradient = GradRef::Missing;
            }
        }
        let input = StepInput::new(kind.loss(step));
        last = optimizer.step(&mut params(values), &gradients, &input).unwrap().step_size.to_bits();
    }
    last
}

fn from_bits(dtype: DType, bits: &[u64]) -> Owned {
    match dtype {
        DType::F32 => Owned::F32(bits.iter().map(|&x| f32::from_bits(x as u32)).collect()),
        DType::F64 => Owned::F64(bits.iter().map(|&x| f64::from_bits(x)).collect()),
        DType::F16 => Owned::F16(bits.iter().map(|&x| half::f16::from_bits(x as u16)).collect()),
        DType::BF16 => Owned::BF16(bits.iter().map(|&x| half::bf16::from_bits(x as u16)).collect()),
    }
}

/// The values of a tensor as it began.
fn start(kind: Kind) -> Vec<Owned> {
    let tensors = kind.tensors().iter().enumerate();
    tensors.map(|(k, tensor)| Owned::from_f64(tensor.dtype, &kind.start(k))).collect()
}

#[test]
fn the_run_has_the_bits_recorded() {
    let kind = Kind::Fitted;
    let (saved, end) = kind.steps();
    let (mut values, mut optimizer) = (start(kind), optimizer(kind));
    steps(kind, &mut optimizer, &mut values, 0..saved);
    let before = common::bits(&values);
    let step_size = steps(kind, &mut optimizer, &mut values, saved..end);
    let recorded = Recorded { before, after: common::bits(&values), step_size };
    assert_eq!(recorded, kind.recorded());
}

#[test]
fn old_states_go_on_with_the_same_bits() {
    let kind = Kind::Fitted;
    let recorded = kind.recorded();
    let (saved, end) = kind.steps();
    for front in FRONTS {
        let file = file(front, kind);
        let tensors = kind.tensors().iter().zip(&recorded.before);
        let mut values: Vec<Owned> = tensors.map(|(tensor, bits)| from_bits(tensor.dtype, bits)).collect();
        let mut old = optimizer(kind);
        old.load_state(&file).unwrap();
        assert_eq!((old.applied_steps(), old.skipped_steps()), (saved as u64 - 1, 1), "{file:?}");
        // Saved by today's code, it is the same state.
        let mut anew = optimizer(kind);
        anew.load_state_from_bytes(&old.state_to_bytes().unwrap()).unwrap();
        let mut values_anew = values.clone();
        for (optimizer, values) in [(&mut old, &mut values), (&mut anew, &mut values_anew)] {
            let step_size = steps(kind, optimizer, values, saved..end);
            assert_eq!(common::bits(values), recorded.after, "{file:?}");
            assert_eq!(step_size, recorded.step_size, "{file:?}");
        }
    }
}

/// As today's code would have saved them.
#[test]
fn old_states_are_those_of_the_same_steps() {
    let kind = Kind::Fitted;
    let mut whole = optimizer(kind);
    steps(kind, &mut whole, &mut start(kind), 0..kind.steps().0);
    let whole = whole.state_to_bytes().unwrap();
    for front in FRONTS {
        let old = file(front, kind);
        let mut resumed = optimizer(kind);
        resumed.load_state(&old).unwrap();
        assert!(resumed.state_to_bytes().unwrap() == whole, "{old:?}");

        let backwards = specs(kind).into_iter().rev().collect();
        let mut other = recorded::optimizer(&setup(kind), backwards, None).unwrap();
        other.load_state(&old).unwrap();
        let mut back = optimizer(kind);
        back.load_state_from_bytes(&other.state_to_bytes().unwrap()).unwrap();
        assert!(back.state_to_bytes().unwrap() == whole, "{old:?}");
    }
}

/// Those of version 1 and the one of version 2.
#[test]
fn states_of_the_earlier_adaptive_rule_are_refused_by_name() {
    for front in FRONTS.into_iter().chain(["rust-2"]) {
        let state = std::fs::read(file(front, Kind::Adaptive)).unwrap();
        refused(
            &mut optimizer(Kind::Adaptive),
            &state,
            &["earlier release", "adaptive method", "begin anew"],
        );
    }
    let error = optimizer(Kind::Adaptive).load_state(&file("rust", Kind::Adaptive)).unwrap_err().to_string();
    assert!(error.contains("rust-adaptive.safetensors"), "{error}");
}

const FRONTS: [&str; 3] = ["rust", "c", "candle"];

fn file(front: &str, kind: Kind) -> std::path::PathBuf {
    states::folder().join(format!("{front}-{}.safetensors", kind.name()))
}

#[test]
fn old_states_that_are_refused() {
    let read = |kind: Kind| std::fs::read(file("rust", kind)).unwrap();
    let (of_fitted, of_adaptive) = (read(Kind::Fitted), read(Kind::Adaptive));
    refused(&mut optimizer(Kind::Fitted), &of_adaptive, &["by the adaptive method"]);
    refused(&mut optimizer(Kind::Adaptive), &of_fitted, &["by the fitted method"]);
    for (from, to, part) in [
        ("applied_steps\":\"5", "applied_steps\":\"-", "`applied_steps`"),
        ("applied_steps", "applied_stage", "`applied_steps`"),
        ("\"format\":\"rfdescent", "\"format\":\"RFDescent", "format"),
        ("\"version\":\"1\"", "\"version\":\"2\"", "version 2"),
        ("\\\"shape\\\"", "\\\"Shape\\\"", "`tensors`"),
        ("momentum.double", "momentum.doubts", "`momentum.double`"),
    ] {
        let at = of_fitted.windows(from.len()).position(|bytes| bytes == from.as_bytes()).unwrap();
        let mut bytes = of_fitted.clone();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        refused(&mut optimizer(Kind::Fitted), &bytes, &[part]);
    }
}
