//! The format of saved states: equal bytes for equal states, tensors by name, damage. Files of the first
//! version are in `old_states.rs`.

mod common;

use std::collections::BTreeMap;

use common::*;
use rfdescent::device::Stream;
use rfdescent::optimizer::{Adaptive, AnyOptimizer, Method, Optimizer, Options, StepInput, TensorSpec};
use rfdescent::{DType, GradRef};
use serde_json::{Value, json};

const SHAPES: [&[usize]; 4] = [&[3, 2], &[5], &[2, 2], &[1]];
const NAMES: [&str; 4] = ["0.weight", "0.bias", "1.weight", "1.bias"];

/// f32, f64, f16 and bf16.
fn values(seed: u64) -> Vec<Owned> {
    let len = |k: usize| SHAPES[k].iter().product();
    DTYPES.iter().enumerate().map(|(k, &d)| Owned::from_f64(d, &uniform(seed + k as u64, len(k)))).collect()
}

fn specs() -> Vec<TensorSpec> {
    (0..4).map(|k| TensorSpec::new(NAMES[k], SHAPES[k], DTYPES[k])).collect()
}

fn fitted() -> (Method, Options) {
    (moving(0.9).into(), Options { master_weights: true, ..Options::default() })
}

fn adaptive() -> (Method, Options) {
    (Adaptive::default().into(), Options { master_weights: true, ..Options::default() })
}

/// Steps `from..to`; the second tensor has no gradient in every third.
fn train(optimizer: &mut Optimizer, values: &mut [Owned], steps: std::ops::Range<u64>) {
    for i in steps {
        let gradient = self::values(100 + 10 * i);
        let mut gradients = grads(&gradient);
        if i % 3 == 2 {
            gradients[1] = GradRef::Missing;
        }
        let loss = 2.0 / (1.0 + i as f64) + uniform(i, 1)[0] / 8.0;
        optimizer.step(&mut params(values), &gradients, &StepInput::new(loss)).unwrap();
    }
}

/// After 40 steps: for the adaptive method two windows and a half.
fn trained((method, options): (Method, Options)) -> (Optimizer, Vec<Owned>) {
    let mut values = values(1);
    let mut optimizer = Optimizer::new(method, options, specs()).unwrap();
    train(&mut optimizer, &mut values, 0..40);
    (optimizer, values)
}

/// An optimizer for the tensors in the given order.
fn fresh((method, options): (Method, Options), order: [usize; 4]) -> Optimizer {
    let specs = specs();
    Optimizer::new(method, options, order.map(|k| specs[k].clone()).to_vec()).unwrap()
}

const GIVEN: [usize; 4] = [0, 1, 2, 3];
const KEY: &str = "rfdescent_optimizer_state";

/// The one entry of a state's metadata.
fn header(state: &[u8]) -> Value {
    let (_, metadata) = safetensors::SafeTensors::read_metadata(state).unwrap();
    let metadata = metadata.metadata().as_ref().unwrap();
    assert_eq!(metadata.keys().collect::<Vec<_>>(), [KEY]);
    serde_json::from_str(&metadata[KEY]).unwrap()
}

/// Velocities and master weights.
fn buffers(state: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let state = safetensors::SafeTensors::deserialize(state).unwrap();
    state.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect()
}

/// The state with another header: `edit` changes it.
fn edited(state: &[u8], edit: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut header = header(state);
    edit(&mut header);
    let stored = safetensors::SafeTensors::deserialize(state).unwrap();
    let metadata = [(KEY.to_string(), header.to_string())].into_iter().collect();
    safetensors::serialize(stored.tensors(), Some(metadata)).unwrap()
}

#[test]
fn equal_states_have_equal_bytes() {
    for method in [fitted, adaptive] {
        let (first, _) = trained(method());
        let bytes = first.state_to_bytes().unwrap();
        for _ in 0..8 {
            assert!(first.state_to_bytes().unwrap() == bytes);
        }
        assert!(trained(method()).0.state_to_bytes().unwrap() == bytes);
        let mut second = fresh(method(), GIVEN);
        second.load_state_from_bytes(&bytes).unwrap();
        assert!(second.state_to_bytes().unwrap() == bytes);
    }
}

#[test]
fn what_is_stored_has_names() {
    let state = trained(adaptive()).0.state_to_bytes().unwrap();
    let header = header(&state);
    assert_eq!(
        (&header["version"], &header["method"], &header["settings"]),
        (&json!(2), &json!("adaptive"), &json!({"averaging": 0.85, "rule": 2.0}))
    );
    assert_eq!(header["applied_steps"].as_u64().unwrap() + header["skipped_steps"].as_u64().unwrap(), 40);
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(
        keys(&header["history"]),
        "below cut high last loss loss_rest promised promised_before squares squares_before steps sum sum_before trust \
         windows"
    );
    let tensor = &header["tensors"][1];
    assert_eq!(keys(tensor), "dtype history master name rows shape velocity");
    assert_eq!((&header["tensors"][0]["rows"], &tensor["rows"]), (&json!([2, 2]), &json!([5, 0])));
    assert_eq!(keys(&tensor["history"]), "average_rest column_mean length squares squares_rest turn");
    assert_eq!((&tensor["name"], &tensor["dtype"]), (&json!("0.bias"), &json!("f64")));
    let of_each = |kind: &str| NAMES.map(|name| format!("{kind}.{name}"));
    let mut expected = [of_each("velocity"), of_each("variances")].concat();
    expected.extend(["master.1.bias", "master.1.weight"].map(String::from));
    expected.sort();
    assert!(buffers(&state).into_keys().eq(expected));
    let lens: Vec<usize> = of_each("variances").iter().map(|name| buffers(&state)[name].len() / 8).collect();
    assert_eq!(lens, [2 + 3, 1, 2 + 2, 1], "columns and rows");

    let header = self::header(&trained(fitted()).0.state_to_bytes().unwrap());
    assert_eq!((&header["method"], &header["settings"]), (&json!("fitted"), &json!({})));
    let tensor = &header["tensors"][0];
    assert_eq!(
        (&header["history"], &tensor["history"], &tensor["rows"]),
        (&Value::Null, &Value::Null, &Value::Null)
    );
}

#[test]
fn tensors_are_found_by_name_whatever_their_order() {
    for method in [fitted, adaptive] {
        let state = trained(method()).0.state_to_bytes().unwrap();
        for order in [[2, 3, 0, 1], [3, 1, 2, 0]] {
            let mut other = fresh(method(), order);
            other.load_state_from_bytes(&state).unwrap();
            let moved = other.state_to_bytes().unwrap();
            assert!(buffers(&state) == buffers(&moved));
            let (before, after) = (header(&state), header(&moved));
            for (k, from) in order.into_iter().enumerate() {
                assert_eq!(after["tensors"][k], before["tensors"][from]);
            }
            let mut back = fresh(method(), GIVEN);
            back.load_state_from_bytes(&moved).unwrap();
            assert!(back.state_to_bytes().unwrap() == state);
        }
    }
}

#[test]
fn names_that_only_one_side_has_are_told() {
    let state = trained(adaptive()).0.state_to_bytes().unwrap();
    let (method, options) = adaptive();
    let make = |specs: Vec<TensorSpec>| Optimizer::new(method.clone(), options.clone(), specs).unwrap();
    let mut renamed = specs();
    renamed[2].name = "2.weight".into();
    refused(&mut make(renamed), &state, &["lacks `2.weight`", "additionally has `1.weight`"]);
    refused(&mut make(specs()[..3].to_vec()), &state, &["4 tensors", "has 3", "has `1.bias`"]);
    let more: Vec<TensorSpec> = (0..8).map(|k| TensorSpec::new(format!("n{k}"), &[1], DType::F32)).collect();
    let all = specs().into_iter().chain(more).collect();
    refused(&mut make(all), &state, &["lacks `n0`, `n1`, `n2`, `n3`, `n4` and 3 more;"]);
}

#[test]
fn damaged_headers() {
    let state = trained(adaptive()).0.state_to_bytes().unwrap();
    let mut optimizer = fresh(adaptive(), GIVEN);
    let mut check = |parts: &[&str], edit: &dyn Fn(&mut Value)| {
        refused(&mut optimizer, &edited(&state, edit), parts);
    };
    check(&["version 3", "versions 1 and 2"], &|header| header["version"] = json!(3));
    check(&["version 3"], &|header| *header = json!({"version": 3}));
    check(&["damaged"], &|header| header["version"] = json!("2"));
    check(&["damaged", "-1"], &|header| header["applied_steps"] = json!(-1));
    check(&["`applied_steps`", "18446744073709551615"], &|header| header["applied_steps"] = json!(u64::MAX));
    check(&["`skipped_steps`", "18446744073709551615"], &|header| header["skipped_steps"] = json!(u64::MAX));
    check(&["by the momentum method"], &|header| header["method"] = json!("momentum"));
    check(&["averaging 0.5", "has 0.85"], &|header| header["settings"]["averaging"] = json!(0.5));
    check(&["averaging \"0.85\""], &|header| header["settings"]["averaging"] = json!("0.85"));
    check(&["decay 0.5", "does not know"], &|header| header["settings"]["decay"] = json!(0.5));
    check(&["`0.weight` twice"], &|header| header["tensors"][1]["name"] = json!("0.weight"));
    check(&["`0.weight` is [6] f32", "[3, 2] f32"], &|header| header["tensors"][0]["shape"] = json!([6]));
    check(&["damaged", "null"], &|header| header["history"] = Value::Null);
    check(&["`0.bias`", "`history`", "no number `squares`"], &|header| {
        header["tensors"][1].as_object_mut().unwrap().remove("history");
    });
    check(&["`history`", "no number `loss`"], &|header| {
        header.as_object_mut().unwrap().remove("history");
    });
    check(&["`history`", "know its `level`"], &|header| header["history"]["level"] = json!(1.0));
    check(&["`history`", "domain"], &|header| header["history"]["steps"] = json!(1e9));
    check(&["`history`", "domain"], &|header| header["tensors"][3]["history"]["squares"] = json!(-1.0));
    check(&["damaged", "squares_rest"], &|header| {
        header["tensors"][3]["history"].as_object_mut().unwrap().remove("squares_rest");
    });
    check(&["`history`", "domain"], &|header| header["tensors"][3]["history"]["length"] = json!(0.0));
    check(&["`history`", "domain"], &|header| header["tensors"][3]["history"]["turn"] = json!(2.0));
    check(&["`history`", "domain"], &|header| header["history"]["trust"] = json!(5.0));
    check(&["`1.weight`", "rows of 4", "rows of 2"], &|header| header["tensors"][2]["rows"] = json!([4, 4]));
    check(&["`1.weight`", "rows of 2", "columns"], &|header| header["tensors"][2]["rows"] = json!([2, 0]));
    check(&["holds 10 buffers", "promises 9"], &|header| header["tensors"][0]["velocity"] = json!(false));
    // The first rule had no number.
    check(&["earlier release", "`rule`"], &|header| header["settings"] = json!({"averaging": 0.85}));
    check(&["rule 3", "has 2"], &|header| header["settings"]["rule"] = json!(3.0));
    let other =
        safetensors::serialize(Vec::<(String, safetensors::tensor::TensorView)>::new(), None).unwrap();
    refused(&mut optimizer, &other, &["not saved by this library"]);
}

#[test]
fn damaged_variances() {
    let state = trained(adaptive()).0.state_to_bytes().unwrap();
    let mut optimizer = fresh(adaptive(), GIVEN);
    let stored = safetensors::SafeTensors::deserialize(&state).unwrap();
    let metadata = || [(KEY.to_string(), header(&state).to_string())].into_iter().collect();
    let mut check = |parts: &[&str], edit: &dyn Fn(&mut Vec<f64>)| {
        let of_tensor = "variances.0.weight";
        let mut numbers: Vec<f64> = (stored.tensor(of_tensor).unwrap().data().as_chunks::<8>().0.iter())
            .map(|bytes| f64::from_le_bytes(*bytes))
            .collect();
        edit(&mut numbers);
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F64, vec![numbers.len()], &bytes);
        let mut tensors = stored.tensors();
        tensors.iter_mut().find(|(name, _)| name == of_tensor).unwrap().1 = view.unwrap();
        refused(&mut optimizer, &safetensors::serialize(tensors, Some(metadata())).unwrap(), parts);
    };
    check(&["`variances.0.weight`", "place 3"], &|numbers| numbers[3] = -1e-300);
    check(&["`variances.0.weight`", "place 0"], &|numbers| numbers[0] = f64::NAN);
    check(&["`variances.0.weight`", "place 4"], &|numbers| numbers[4] = f64::INFINITY);
    check(&["`variances.0.weight`", "[4]", "[5]"], &|numbers| numbers.truncate(4));
    let without = stored.tensors().into_iter().filter(|(name, _)| name != "variances.1.bias");
    let without = safetensors::serialize(without.collect::<Vec<_>>(), Some(metadata())).unwrap();
    refused(&mut optimizer, &without, &["holds 9 buffers", "promises 10"]);
    let renamed =
        stored.tensors().into_iter().map(|(name, view)| (name.replace("variances.1", "variance.1"), view));
    let renamed = safetensors::serialize(renamed.collect::<Vec<_>>(), Some(metadata())).unwrap();
    refused(&mut optimizer, &renamed, &["lacks `variances.1.weight`"]);
}

/// Averages of rows and columns are worth nothing to others, though there may be as many.
#[test]
fn a_state_of_other_rows_is_refused() {
    let make = |row| {
        let spec = TensorSpec { row, ..TensorSpec::new("w", &[4, 6], DType::F32) };
        Optimizer::new(Adaptive::default(), Options::default(), vec![spec]).unwrap()
    };
    let state = make(None).state_to_bytes().unwrap();
    refused(&mut make(Some(4)), &state, &["`w`", "rows of 6", "rows of 4"]);
    make(Some(6)).load_state_from_bytes(&state).unwrap();
}

#[test]
fn averages_below_the_bound_of_the_loss_are_refused() {
    let make = |loss_bound| {
        let (_, options) = adaptive();
        let adaptive = Adaptive { loss_bound: Some(loss_bound), ..Adaptive::default() };
        Optimizer::new(adaptive, options, specs()).unwrap()
    };
    let after = |loss: f64, loss_bound: f64| {
        let (mut optimizer, mut values) = (make(loss_bound), values(1));
        let gradient = self::values(100);
        for _ in 0..20 {
            optimizer.step(&mut params(&mut values), &grads(&gradient), &StepInput::new(loss)).unwrap();
        }
        optimizer.state_to_bytes().unwrap()
    };
    let state = after(-3.0, -5.0);
    make(-5.0).load_state_from_bytes(&state).unwrap();
    make(-4.0).load_state_from_bytes(&state).unwrap();
    refused(&mut make(0.0), &state, &["averaged loss -", "loss_bound 0", "saved with"]);
    // Losses at the bound, and none at all.
    make(0.1).load_state_from_bytes(&after(0.1, 0.1)).unwrap();
    make(0.1).load_state_from_bytes(&make(0.1).state_to_bytes().unwrap()).unwrap();
}

#[test]
fn a_loaded_state_leaves_no_report_of_steps_before() {
    let (mut first, mut values) = trained(fitted());
    let state = first.state_to_bytes().unwrap();
    train(&mut first, &mut values, 40..41);
    let mut optimizer = AnyOptimizer::from(first);
    let gradient = self::values(100);
    optimizer.step_slices(&mut params(&mut values), &grads(&gradient), &StepInput::new(1.0)).unwrap();
    let reader = optimizer.report_reader();
    assert!(optimizer.load_state_from_bytes(&state[1..], Stream::DEFAULT).is_err());
    assert!(reader.read().unwrap().is_some(), "a refused state changes nothing");
    optimizer.load_state_from_bytes(&state, Stream::DEFAULT).unwrap();
    assert_eq!((optimizer.report().unwrap(), reader.read().unwrap()), (None, None));
}
