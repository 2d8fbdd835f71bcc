//! States of the fitted method that an earlier version saved load into candle's optimizer and go on with the
//! bits that they went on with then; those of the Rust and of the C interface too. Those of the adaptive
//! method, whose rule was another one, are refused. `tests/data/states/README.md` says what they are.

mod common;
mod states;

use std::path::PathBuf;

use candle_core::Var;
use common::library::{Owned, bits};
use common::{owned, scalar, store, tensor, var};
use half::{bf16, f16};
use rfdescent_candle::rfdescent::DType;
use rfdescent_candle::rfdescent::covariance::{Family, Model};
use rfdescent_candle::rfdescent::optimizer::{Group, Options};
use rfdescent_candle::{Adaptive, Config, Fitted, Parameter, Rfd};
use states::Kind;

fn config(kind: Kind) -> Config {
    let group = Group::default();
    let (method, groups) = match kind {
        Kind::Fitted => {
            let model = Model::new(Family::Matern52, states::moments()).unwrap();
            let momentum = vec![0.9, 0.5];
            let fitted = Fitted { inv_batch_size: 1.0 / 128.0, momentum, ..Fitted::new(model) };
            let second = Group { length_scale_factor: 1.25, weight_decay: 1.0 / 64.0, ..group };
            (fitted.into(), vec![group, second])
        }
        Kind::Adaptive => (Adaptive::default().into(), vec![group]),
    };
    Config { method, options: Options { groups, master_weights: true, ..Options::default() } }
}

fn from_bits(dtype: DType, bits: &[u64]) -> Owned {
    match dtype {
        DType::F32 => Owned::F32(bits.iter().map(|&x| f32::from_bits(x as u32)).collect()),
        DType::F64 => Owned::F64(bits.iter().map(|&x| f64::from_bits(x)).collect()),
        DType::F16 => Owned::F16(bits.iter().map(|&x| f16::from_bits(x as u16)).collect()),
        DType::BF16 => Owned::BF16(bits.iter().map(|&x| bf16::from_bits(x as u16)).collect()),
    }
}

fn optimizer(kind: Kind, vars: &[Var]) -> Rfd {
    let parameter = |(t, var): (&states::Tensor, &Var)| Parameter::new(t.name, var.clone()).in_group(t.group);
    Rfd::for_parameters(kind.tensors().iter().zip(vars).map(parameter).collect(), config(kind)).unwrap()
}

const FRONTS: [&str; 3] = ["rust", "c", "candle"];

fn file(front: &str, kind: Kind) -> PathBuf {
    states::folder().join(format!("{front}-{}.safetensors", kind.name()))
}

fn vars(kind: Kind, values: &[Vec<u64>]) -> Vec<Var> {
    let var = |(t, bits): (&states::Tensor, &Vec<u64>)| var(&from_bits(t.dtype, bits), t.shape);
    kind.tensors().iter().zip(values).map(var).collect()
}

fn steps(kind: Kind, optimizer: &mut Rfd, vars: &[Var], range: std::ops::Range<usize>) {
    for step in range {
        let used = kind.tensors().iter().zip(vars).enumerate().filter(|(_, (tensor, _))| tensor.used);
        let gradients = used.map(|(k, (described, var))| {
            let gradient = Owned::from_f64(described.dtype, &kind.gradient(k, step));
            (var, tensor(&gradient, described.shape))
        });
        optimizer.step_with_loss(&store(gradients), &scalar(kind.loss(step))).unwrap();
    }
}

#[test]
fn old_states_go_on_with_the_same_bits() {
    let kind = Kind::Fitted;
    let recorded = kind.recorded();
    let (saved, end) = kind.steps();
    for front in FRONTS {
        let vars = vars(kind, &recorded.before);
        let mut optimizer = optimizer(kind, &vars);
        let file = file(front, kind);
        optimizer.load_state(&file).unwrap();
        steps(kind, &mut optimizer, &vars, saved..end);
        let values: Vec<Owned> = vars.iter().map(|var| owned(var)).collect();
        assert_eq!(bits(&values), recorded.after, "{file:?}");
        let report = optimizer.report().unwrap().unwrap();
        assert_eq!(report.step_size.to_bits(), recorded.step_size, "{file:?}");
        assert_eq!((report.applied_steps, report.skipped_steps), (end as u64 - 1, 1), "{file:?}");
    }
}

#[test]
fn states_of_the_earlier_adaptive_rule_are_refused_by_name() {
    let kind = Kind::Adaptive;
    for front in FRONTS {
        let mut optimizer = optimizer(kind, &vars(kind, &kind.recorded().before));
        let error = optimizer.load_state(file(front, kind)).unwrap_err().to_string();
        for part in [&format!("{front}-adaptive.safetensors"), "earlier release", "adaptive method"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}
