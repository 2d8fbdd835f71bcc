//! Names, validation and files of fitted models.

mod covariance_support;

use std::fs;

use covariance_support::{families, opaque};
use rfdescent::covariance::{Family, Model, StepMode, StepRule, TensorFactor, validate_inv_batch_size};
use rfdescent::{Error, Moments};

/// Numbers whose shortest decimal forms have 16 and 17 digits.
fn moments() -> Moments {
    Moments {
        mean: 0.1 + 0.2,
        variance: 1.0 / 3.0,
        noise_variance: 0.0,
        grad_variance: 8.098580480494628e4 / 7.0,
        noise_grad_variance: 5e-324,
        dims: u64::MAX,
    }
}

#[test]
fn names_read_back() {
    for family in families() {
        assert_eq!(family.to_string().parse::<Family>().unwrap(), family);
        assert_eq!(serde_json::from_str::<Family>(&serde_json::to_string(&family).unwrap()).unwrap(), family);
    }
    for (alias, name) in [
        ("se", "squared_exponential"),
        ("rq", "rational_quadratic:1.0"),
        ("rq:7.5", "rational_quadratic:7.5"),
        ("rational_quadratic", "rational_quadratic:1.0"),
        ("matern32", "matern:1.5"),
        ("matern52", "matern:2.5"),
    ] {
        assert_eq!(alias.parse::<Family>().unwrap().to_string(), name);
    }
    for (wrong, hint) in [
        (
            "gauss",
            "squared_exponential (se), rational_quadratic:BETA (rq:BETA), matern:1.5 (matern32), matern:2.5",
        ),
        ("", "must be one of"),
        ("matern", "must be one of"),
        ("matern:0.5", "matern:1.5 or matern:2.5"),
        ("matern:x", "matern:1.5 or matern:2.5"),
        ("se:2", "no shape parameter"),
        ("rq:", "must be a number"),
        ("rq:0", "positive"),
        ("rq:-1", "positive"),
        ("rq:nan", "positive"),
        ("rq:inf", "positive"),
    ] {
        let message = wrong.parse::<Family>().unwrap_err().to_string();
        assert!(message.contains(hint), "{wrong}: {message}");
    }
    for mode in [StepMode::Rfd, StepMode::ARfd, StepMode::ClippedARfd] {
        assert_eq!(mode.to_string().parse::<StepMode>().unwrap(), mode);
        assert_eq!(serde_json::to_string(&mode).unwrap(), format!("\"{mode}\""));
    }
    assert!("sgd".parse::<StepMode>().unwrap_err().to_string().contains("clipped-a-rfd"));
}

#[test]
fn options_are_checked() {
    for conservatism in [-0.1, 1.0, f64::NAN, f64::INFINITY] {
        let message = StepRule::new(StepMode::Rfd, conservatism).unwrap_err().to_string();
        assert!(message.starts_with("conservatism = "), "{message}");
    }
    assert!(StepRule::new(StepMode::ARfd, 0.5).unwrap_err().to_string().contains("a-rfd"));
    for inv_batch_size in [-0.1, 1.5, f64::NAN, f64::INFINITY] {
        let message = validate_inv_batch_size(inv_batch_size).unwrap_err().to_string();
        assert!(message.starts_with("inv_batch_size = "), "{message}");
    }
    validate_inv_batch_size(0.0).unwrap();
    validate_inv_batch_size(1.0).unwrap();
}

#[test]
fn moments_are_checked() {
    type Change = fn(&mut Moments, f64);
    let changes: [(&str, Change, &[f64]); 5] = [
        ("mean", |m, v| m.mean = v, &[f64::NAN, f64::INFINITY]),
        ("variance", |m, v| m.variance = v, &[f64::NAN, f64::INFINITY, 0.0, -1.0]),
        ("noise_variance", |m, v| m.noise_variance = v, &[f64::NAN, f64::INFINITY, -1.0]),
        ("grad_variance", |m, v| m.grad_variance = v, &[f64::NAN, f64::INFINITY, 0.0, -1.0]),
        ("noise_grad_variance", |m, v| m.noise_grad_variance = v, &[f64::NAN, f64::INFINITY, -1.0]),
    ];
    for (name, change, values) in changes {
        for value in values {
            let mut wrong = moments();
            change(&mut wrong, *value);
            let message = Model::new(Family::Matern32, wrong).unwrap_err().to_string();
            assert!(
                message.starts_with(&format!("{name} = ")) && message.contains(';') || name == "mean",
                "{message}"
            );
        }
    }
    let message = Model::new(Family::Matern32, Moments { dims: 0, ..moments() }).unwrap_err().to_string();
    assert!(message.starts_with("dims = 0"), "{message}");
    let tiny = Moments { variance: 1e-300, grad_variance: 1e300, ..moments() };
    assert!(Model::new(Family::Matern32, tiny).unwrap_err().to_string().contains("length scale"));
}

#[test]
fn models_read_back_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.json");
    for family in families() {
        let model = Model::new(family, moments()).unwrap();
        model.save(&path).unwrap();
        let loaded = Model::load(&path).unwrap();
        assert_eq!((loaded.family(), *loaded.moments()), (Some(family), moments()));
        assert_eq!(loaded.length_scale().to_bits(), model.length_scale().to_bits());
        assert_eq!(Model::from_json(&model.to_json().unwrap()).unwrap().moments(), model.moments());
    }
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn what_is_wrong_with_a_model_file_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.json");
    let good = Model::new(Family::Matern32, moments()).unwrap().to_json().unwrap();
    for (text, said) in [
        (good.replace("\"version\": 1", "\"version\": 2"), vec!["is 2", "version 1"]),
        (good.replace("  \"version\": 1,\n", ""), vec!["missing", "version 1"]),
        (good.replace("rfdescent-model", "other"), vec!["`format`", "rfdescent-model"]),
        (good.replace("\"mean\"", "\"average\""), vec!["average", "mean"]),
        (good.replace("\"dims\": 18446744073709551615", "\"dims\": -3"), vec!["-3"]),
        (good.replace("matern:1.5", "matern:9"), vec!["matern:9", "matern:2.5"]),
        (good.replace("\"noise_variance\": 0.0", "\"noise_variance\": -1.0"), vec!["noise_variance = -1"]),
        (good[..good.len() / 2].to_string(), vec!["not a fitted model"]),
        ("[]".to_string(), vec!["`format`"]),
        (String::new(), vec!["not a fitted model"]),
    ] {
        assert_ne!(text, good);
        fs::write(&path, &text).unwrap();
        let error = Model::load(&path).unwrap_err();
        assert!(matches!(error, Error::File { .. }), "{error}");
        let message = error.to_string();
        assert!(
            message.contains("model.json") && said.iter().all(|part| message.contains(part)),
            "{message}"
        );
        assert!(!message.contains('\n'), "{message}");
    }
    let missing = folder.path().join("none.json");
    let error = Model::load(&missing).unwrap_err();
    assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("none.json"), "{error}");
}

#[test]
fn nothing_is_left_half_written() {
    let folder = tempfile::tempdir().unwrap();
    let model = Model::new(Family::Matern32, moments()).unwrap();
    let error = model.save(&folder.path().join("missing").join("model.json")).unwrap_err();
    assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("model.json"), "{error}");
    // A folder in the file's place: the rename fails and the temporary file goes.
    let occupied = folder.path().join("model.json");
    fs::create_dir(&occupied).unwrap();
    model.save(&occupied).unwrap_err();
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
}

#[test]
fn user_covariances_cannot_be_saved() {
    let folder = tempfile::tempdir().unwrap();
    let model = Model::with_covariance(opaque(Family::Matern32), moments()).unwrap();
    assert_eq!(model.family(), None);
    let message = model.save(&folder.path().join("model.json")).unwrap_err().to_string();
    assert!(message.contains("opaque") && message.contains("with_covariance"), "{message}");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
}

fn factor(name: &str, dims: u64, length_scale_factor: f64) -> TensorFactor {
    TensorFactor { name: name.into(), dims, length_scale_factor }
}

#[test]
fn models_with_tensors_read_back_to_the_same_bits_and_files_without_load() {
    let moments = Moments { dims: 10, ..moments() };
    let plain = Model::new(Family::Matern32, moments).unwrap();
    assert!(!plain.to_json().unwrap().contains("tensors"));
    assert_eq!(Model::from_json(&plain.to_json().unwrap()).unwrap().tensors(), []);
    let tensors = vec![factor("a, b", 7, 1.0 / 3.0), factor("c", 3, 5.7)];
    let model = plain.with_tensors(tensors.clone()).unwrap();
    let json = model.to_json().unwrap();
    let loaded = Model::from_json(&json).unwrap();
    assert_eq!((loaded.tensors(), loaded.moments()), (&tensors[..], model.moments()));
    assert_eq!(loaded.length_scale().to_bits(), model.length_scale().to_bits());

    for (from, to, said) in [
        ("\"name\": \"c\"", "\"name\": \"a, b\"", "`a, b`: is listed twice"),
        ("\"dims\": 3", "\"dims\": 0", "`c`: has no elements"),
        ("\"dims\": 3", "\"dims\": 4", "sum of the tensors' sizes, 11"),
        ("5.7", "-5.7", "`c`: has length-scale factor -5.7"),
        ("5.7", "1e200", "`c`: has length-scale factor"),
        ("length_scale_factor", "factor", "length_scale_factor"),
    ] {
        assert!(json.contains(from), "{json}");
        let error = Model::from_json(&json.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}
