//! The train command from outside: files, exit statuses, error lines.

use std::fs;
use std::path::Path;

use assert_cmd::Command;

fn train(arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("rfdescent").unwrap();
    command.arg("train").args(arguments);
    command
}

/// A run of seconds: few images, one epoch, a coarse fit.
const SMALL: [&str; 12] = [
    "--train-images",
    "600",
    "--validation-images",
    "100",
    "--batch-size",
    "100",
    "--epochs",
    "1",
    "--method",
    "fitted",
    "--tolerance",
    "2",
];

/// Fails with `status`, one line on standard error that holds each of `parts`, and nothing on standard
/// output.
fn refuses(arguments: &[&str], status: i32, parts: &[&str]) {
    let output = train(arguments).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("error: "), "{text}");
    for part in parts {
        assert!(text.contains(part), "{arguments:?}: `{text}` should say `{part}`");
    }
    assert!(output.stdout.is_empty());
}

#[test]
fn a_small_run_ends_well_and_writes_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let path = output.to_str().unwrap();
    // What auto-fit will cost comes first, what it has cost and what more would after it.
    let text = train(&SMALL).args(["--output", path, "--compare"]).assert().success();
    let text = String::from_utf8(text.get_output().stdout.clone()).unwrap();
    let parts = [
        "Auto-fit will draw about 6000 images, 1000000 at most",
        "Auto-fit of the",
        "half the relative",
        "Best Adam",
    ];
    let places: Vec<Option<usize>> = parts.iter().map(|part| text.find(part)).collect();
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{text}");

    let report: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(output.join("run.json")).unwrap()).unwrap();
    let methods = report["seeds"][0]["methods"].as_array().unwrap();
    assert_eq!(methods.len(), 7);
    assert!(methods.iter().all(|m| m["epochs"][0]["accuracy"].as_f64().unwrap() <= 1.0));
    assert!(report["seeds"][0]["fit"]["variance"].as_f64().unwrap() > 0.0);

    let mut steps = csv::Reader::from_path(output.join("run.csv")).unwrap();
    let header: Vec<String> = steps.headers().unwrap().iter().map(str::to_owned).collect();
    assert_eq!(
        header,
        [
            "step",
            "epoch",
            "loss",
            "grad_norm",
            "theta",
            "step_size",
            "learning_rate",
            "trust",
            "limit",
            "skipped"
        ]
    );
    assert_eq!(steps.records().count(), 6);
    assert_eq!(csv::Reader::from_path(output.join("epochs.csv")).unwrap().records().count(), 1);
    rfdescent::covariance::Model::load(&output.join("model.json")).unwrap();
    let parameters =
        candle_core::safetensors::load(output.join("parameters.safetensors"), &candle_core::Device::Cpu);
    assert_eq!(parameters.unwrap()["linear1.weight"].dims(), [512, 784]);
    assert!(!rfdescent::estimation::read_samples(&output.join("samples.csv")).unwrap().is_empty());
    let names: Vec<_> =
        fs::read_dir(&output).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.iter().all(|name| !name.contains("tmp") && !name.starts_with('.')), "{names:?}");
}

#[test]
fn a_plot_shows_the_method_beside_what_it_is_compared_with() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("run/training.svg");
    let path = plot.to_str().unwrap();
    let output = folder.path().join("run");
    let plotted = |arguments: &[&str]| {
        let run = train(WITHOUT_FIT).args(["--plot", path]).args(arguments).assert().success().stderr("");
        let printed = String::from_utf8(run.get_output().stdout.clone()).unwrap();
        assert!(
            printed.contains(&format!("Written to {path}")) || arguments.contains(&"--json"),
            "{printed}"
        );
        let text = fs::read_to_string(&plot).unwrap();
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"));
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        let named = |name: &str| text.lines().filter(|line| line.trim() == name).count();
        (named("adaptive"), named("fitted"), named("SGD 0.3"), named("Adam 0.001"), text.clone())
    };
    // The folder of the run is made before the plot is tried.
    let (adaptive, fitted, sgd, adam, text) = plotted(&["--output", output.to_str().unwrap(), "--compare"]);
    assert_eq!((adaptive, fitted, sgd, adam), (1, 0, 1, 1));
    // Six steps and an epoch of seven methods with the learning rates' ends, and the method's own six.
    assert_eq!(text.matches("<circle").count(), 7 * 6 + 7 + 6 + 6 + 6 * 2);
    for part in ["Training loss", "Validation loss", "step size η", "Learning rate", "generated", "1 epoch,"]
    {
        assert!(text.contains(part), "{part}");
    }
    let (adaptive, fitted, sgd, _, text) = plotted(&["--method", "fitted", "--tolerance", "2", "--json"]);
    assert_eq!((adaptive, fitted, sgd), (0, 1, 0));
    assert_eq!(text.matches("<circle").count(), 3 * 6 + 1);
    let (adaptive, .., text) = plotted(&["--seeds", "2"]);
    assert_eq!((adaptive, text.matches("<circle").count()), (1, 2 * (3 * 6 + 1)));
    assert!(text.contains("2 seeds"));
}

#[test]
fn seeds_alone_are_no_comparison() {
    let arguments =
        ["--epochs", "1", "--train-images", "300", "--validation-images", "100", "--batch-size", "150"];
    let text = |more: &[&str]| {
        let output = train(&arguments).args(more).assert().success().get_output().stdout.clone();
        String::from_utf8(output).unwrap()
    };
    let seeds = text(&["--seeds", "2"]);
    assert!(seeds.contains("; 1 epoch of 2 steps with 150 images"), "{seeds}");
    assert!(seeds.contains("\nValidation loss (accuracy) after each epoch, mean of 2 seeds\n"), "{seeds}");
    assert!(!seeds.contains("Comparison") && !seeds.contains("SGD"), "{seeds}");
    let compared = text(&["--compare"]);
    assert!(compared.contains("\nComparison: validation loss (accuracy) after each epoch\n"), "{compared}");
}

#[test]
fn a_plot_that_cannot_be_written_is_refused_before_the_training() {
    let folder = tempfile::tempdir().unwrap();
    let plot = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    refuses(&["--plot", "training.png"], 2, &["--plot training.png", ".svg"]);
    refuses(&["--plot", &plot("missing/training.svg")], 1, &["missing/training.svg", "there is no folder"]);
    fs::create_dir(plot("folder.svg")).unwrap();
    refuses(&["--plot", &plot("folder.svg")], 1, &["folder.svg", "is a folder"]);
    // What is there stays where the run fails.
    fs::write(plot("old.svg"), "old").unwrap();
    refuses(&["--plot", &plot("old.svg"), "--data", "does/not/exist"], 1, &["does/not/exist"]);
    assert_eq!(fs::read_to_string(plot("old.svg")).unwrap(), "old");
}

#[test]
fn whole_numbers_may_have_a_point_or_an_exponent() {
    let run = |images: &str, batch_size: &str| {
        let arguments = ["--train-images", images, "--batch-size", batch_size, "--validation-images", "1e2"];
        let output = train(&arguments).args(["--epochs", "1.0", "--json"]).output().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        ["training_images", "validation_images", "epochs", "batch_size"].map(|name| report[name].clone())
    };
    assert_eq!(run("6e2", "1.0e+02"), [600, 100, 1, 100].map(serde_json::Value::from));
    refuses(&["--epochs", "1.5"], 2, &["--epochs", "1.5", "not a whole number"]);
    refuses(&["--epochs", "1e9"], 2, &["--epochs", "1e9 is not in 1..=1000000"]);
    refuses(&["--method", "fitted", "--samples", "-"], 2, &["--samples -", "name one"]);
}

/// [`SMALL`] without what belongs to the fit.
const WITHOUT_FIT: &[&str] = SMALL.split_at(8).0;

#[test]
fn the_adaptive_method_trains_without_a_fit_and_leaves_no_model_of_an_earlier_run() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let path = output.to_str().unwrap();
    train(&SMALL).args(["--output", path]).assert().success();
    assert!(output.join("model.json").exists());
    let printed = train(WITHOUT_FIT)
        .args(["--method", "adaptive", "--compare", "--output", path, "--overwrite"])
        .assert()
        .success()
        .stderr("");
    let text = String::from_utf8(printed.get_output().stdout.clone()).unwrap();
    for part in ["Training with the adaptive method", "Best SGD", "; adaptive: ", "nor fitted"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(!text.contains("uto-fit") && !text.contains("the fitted method"), "{text}");

    let report: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(output.join("run.json")).unwrap()).unwrap();
    assert_eq!((&report["method"], &report["complete"]), (&"adaptive".into(), &true.into()));
    assert!(report["seeds"][0]["fit"].is_null());
    assert_eq!(report["seeds"][0]["methods"].as_array().unwrap().len(), 7);
    assert_eq!(report["summary"][0]["method"], "adaptive");
    let mut steps = csv::Reader::from_path(output.join("run.csv")).unwrap();
    let rows: Vec<csv::StringRecord> = steps.records().map(Result::unwrap).collect();
    assert_eq!(rows.len(), 6);
    // No Θ; a gradient norm, a step size, a learning rate and trust, and what limited the step.
    assert!(rows.iter().all(|row| row[4].is_empty()));
    assert!(rows.iter().all(|row| [3, 5, 6, 7].iter().all(|&k| row[k].parse::<f64>().unwrap() > 0.0)));
    assert!(rows.iter().all(|row| ["rate", "loss"].contains(&&row[8])), "{rows:?}");
    let methods = &report["seeds"][0]["methods"];
    assert!(methods[0]["epochs"][0]["trust"].as_f64().unwrap() > 0.0);
    assert!(methods[1]["epochs"][0]["trust"].is_null());
    assert!(!output.join("model.json").exists());
    assert!(output.join("parameters.safetensors").exists());
    assert!(output.join("samples.csv").exists(), "samples outlive every run");
}

#[test]
fn options_of_the_fit_are_refused_by_name_without_a_fit() {
    let method = ["--method", "adaptive"];
    for option in [
        &["--covariance", "squared_exponential"][..],
        &["--anisotropy", "isotropic"],
        &["--stochastic"],
        &["--samples", "samples.csv"],
        // Its default, too: it was asked for.
        &["--tolerance", "0.3"],
        &["--max-images", "1000"],
        &["--robust"],
    ] {
        refuses(&[&method[..], option].concat(), 2, &[option[0], "--method fitted", "leave it out"]);
    }
    refuses(&["--method", "adam"], 2, &["--method", "fitted, adaptive"]);
}

#[test]
fn json_is_one_document_the_same_each_time_and_nothing_else() {
    for method in [&SMALL[..], &[WITHOUT_FIT, &["--method", "adaptive"]].concat()] {
        one_document_the_same_each_time(method);
    }
}

fn one_document_the_same_each_time(arguments: &[&str]) {
    let once = || {
        let output = train(arguments).args(["--json", "--seeds", "2"]).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty());
        let mut report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        for seed in report["seeds"].as_array_mut().unwrap() {
            if let Some(fit) = seed["fit"].as_object_mut() {
                fit.remove("seconds");
                fit.remove("halving_seconds");
            }
            seed["methods"][0]["epochs"][0]["seconds"].take();
        }
        report
    };
    let first = once();
    assert_eq!(first["seeds"].as_array().unwrap().len(), 2);
    assert_ne!(first["seeds"][0]["methods"], first["seeds"][1]["methods"]);
    assert_eq!(first, once());
}

#[test]
fn length_scales_by_tensor_are_fitted_to_the_same_samples_and_kept_in_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let output = |name: &str| folder.path().join(name);
    let run = |name: &str, arguments: &[&str]| -> serde_json::Value {
        let (output, samples) = (output(name), output("samples.csv"));
        train(&SMALL)
            .arg("--output")
            .arg(&output)
            .arg("--samples")
            .arg(samples)
            .args(arguments)
            .assert()
            .success();
        serde_json::from_str(&fs::read_to_string(output.join("run.json")).unwrap()).unwrap()
    };
    let plain = run("plain", &[]);
    let samples = fs::read_to_string(output("samples.csv")).unwrap();
    let tensor = run("tensor", &["--anisotropy", "tensorwise"]);
    assert_eq!(
        fs::read_to_string(output("samples.csv")).unwrap(),
        samples,
        "the samples of the first run are enough"
    );
    assert_eq!((&plain["anisotropy"], &tensor["anisotropy"]), (&"isotropic".into(), &"tensorwise".into()));
    let fit = |report: &serde_json::Value, name: &str| report["seeds"][0]["fit"][name].clone();
    assert_eq!(fit(&plain, "variance"), fit(&tensor, "variance"));
    assert!(fit(&plain, "tensors").is_null());
    assert_eq!(fit(&tensor, "tensors").as_array().unwrap().len(), 12);
    assert_ne!(
        plain["seeds"][0]["methods"][0]["epochs"][0]["step_size"],
        tensor["seeds"][0]["methods"][0]["epochs"][0]["step_size"]
    );

    let model = |name: &str| rfdescent::covariance::Model::load(&output(name).join("model.json")).unwrap();
    assert_eq!(model("plain").tensors(), []);
    let model = model("tensor");
    assert_eq!((model.tensors().len(), model.tensors()[0].name.as_str()), (12, "linear1.weight"));
    assert_eq!(fit(&tensor, "grad_variance"), model.moments().grad_variance);

    // Samples of before there were columns of tensors.
    let old = output("old.csv");
    let columns = |line: &str| line.split(',').take(4).collect::<Vec<_>>().join(",") + "\n";
    fs::write(&old, samples.lines().map(columns).collect::<String>()).unwrap();
    let old = old.to_str().unwrap();
    train(&SMALL).args(["--samples", old]).assert().success();
    let output = train(&SMALL).args(["--samples", old, "--anisotropy", "tensorwise"]).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("old.csv") && text.contains("--samples") && text.lines().count() == 1, "{text}");
}

#[test]
fn wrong_usage_is_one_line_with_the_choices() {
    refuses(&["--batch-size", "0"], 2, &["--batch-size", "2..=1000000"]);
    refuses(&["--epochs", "0"], 2, &["--epochs"]);
    refuses(&["--epochs", "-1"], 2, &["--epochs", "-1"]);
    refuses(&["--seed", "-1"], 2, &["--seed", "-1"]);
    refuses(&["--tolerance", "-inf"], 2, &["--tolerance", "-inf"]);
    refuses(&["--overwrite"], 2, &["--output"]);
    refuses(&["--model", "transformer"], 2, &["--model", "mlp, cnn"]);
    refuses(&["--anisotropy", "element"], 2, &["--anisotropy", "isotropic, tensorwise"]);
    refuses(&["--covariance", "linear"], 2, &["--covariance", "squared_exponential", "matern:1.5"]);
    refuses(&["--tolerance", "-1"], 2, &["--tolerance", "above 0"]);
    refuses(&["--train-images", "500"], 2, &["--batch-size 1024", "500"]);
    refuses(&["--nonsense"], 2, &["--nonsense"]);
}

#[test]
fn bad_data_is_one_line_with_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    refuses(&["--data", path], 1, &["train-images-idx3-ubyte", "no such file"]);
    fs::write(folder.path().join("train-images-idx3-ubyte"), [0, 0, 8, 3, 0, 0]).unwrap();
    fs::write(folder.path().join("train-labels-idx1-ubyte"), [0, 0, 8, 1, 0, 0, 0, 1, 5]).unwrap();
    refuses(&["--data", path], 1, &["train-images-idx3-ubyte", "truncated"]);
    refuses(&["--data", "does/not/exist"], 1, &["does/not/exist", "--data"]);
}

#[test]
fn an_output_folder_that_cannot_be_written_is_named_before_any_work() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let below = file.path().join("run");
    refuses(&["--output", below.to_str().unwrap()], 1, &[below.to_str().unwrap(), "--output"]);
}

#[test]
fn a_bad_sample_cache_is_one_line_with_file_and_row() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("samples.csv");
    fs::write(&cache, "loss,grad_norm,batchsize,time\n2.5,3.0,20,0\n2.5,-3.0,20,0\n").unwrap();
    let mut arguments = SMALL.to_vec();
    arguments.extend(["--json", "--samples", cache.to_str().unwrap()]);
    refuses(&arguments, 1, &["samples.csv", "row ", "grad_norm"]);
}

#[test]
fn samples_that_blow_up_are_refused_with_the_remedy_and_left_out_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("samples.csv");
    let mut text = String::from("loss,grad_norm,batchsize,time\n");
    for i in 0..210u32 {
        let b = [20.0, 50.0, 100.0, 200.0, 300.0, 400.0, 600.0][i as usize % 7];
        let u = (f64::from(i / 7) + 0.5) / 30.0;
        let loss = match i {
            49 | 78 | 121 => 1e4,
            _ => 2.5 + (u / (1.0 - u)).ln() / 1.8138 * f64::sqrt(0.01 + 0.8 / b),
        };
        text += &format!("{loss},{},{b},0\n", f64::sqrt(5.0 + 300.0 / b));
    }
    fs::write(&cache, text).unwrap();
    let mut arguments = SMALL.to_vec();
    arguments.extend(["--json", "--samples", cache.to_str().unwrap()]);
    refuses(&arguments, 1, &["look foreign: samples ", "--robust", "`rfdescent fit ", "samples.csv"]);

    let output = train(&arguments).arg("--robust").assert().success();
    let report: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    let fit = &report["seeds"][0]["fit"];
    let variance = fit["variance"].as_f64().unwrap();
    assert!((0.002..0.05).contains(&variance), "{fit}");
    let warnings = fit["warnings"].to_string();
    assert!(
        warnings.contains("samples 49, 78 and 121 (loss") && warnings.contains("left out of the fit"),
        "{fit}"
    );
}

#[cfg(unix)]
#[test]
fn ctrl_c_during_auto_fit_keeps_the_samples_and_the_next_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("samples.csv");
    let rows =
        |path: &Path| fs::read_to_string(path).map_or(0, |text| text.lines().count().saturating_sub(1));
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("rfdescent"))
        .args([
            "train",
            "--method",
            "fitted",
            "--train-images",
            "600",
            "--batch-size",
            "100",
            "--tolerance",
            "1e-3",
            "--samples",
        ])
        .arg(&cache)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    while rows(&cache) < 5 {
        assert!(child.try_wait().unwrap().is_none(), "the run ended before it drew five samples");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("samples.csv") && text.contains("--samples"), "{text}");

    let kept = rows(&cache);
    let before = fs::read_to_string(&cache).unwrap();
    assert!(kept >= 5);
    train(&SMALL).arg("--samples").arg(&cache).assert().success();
    assert!(fs::read_to_string(&cache).unwrap().starts_with(&before));
}

/// Starts a run, waits until its standard output is `ready`, and presses Ctrl-C; what it wrote there and to
/// standard error.
#[cfg(unix)]
fn interrupted(arguments: &[&str], ready: impl Fn(&str) -> bool) -> (String, String) {
    let stdout = tempfile::NamedTempFile::new().unwrap();
    let printed = || fs::read_to_string(stdout.path()).unwrap();
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("rfdescent"))
        .arg("train")
        .args(arguments)
        .stdout(stdout.reopen().unwrap())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    while !ready(&printed()) {
        assert!(child.try_wait().unwrap().is_none(), "the run ended too early");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    (printed(), text)
}

#[cfg(unix)]
#[test]
fn finished_seeds_are_reported_when_a_later_one_stops_and_the_folder_can_be_gone_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let report = || -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(output.join("run.json")).unwrap()).unwrap()
    };
    let mut arguments = SMALL.to_vec();
    arguments.extend(["--seeds", "1000", "--json", "--output", output.to_str().unwrap()]);
    // Seed 2's auto-fit: its samples are there, its training is not.
    let (document, text) = interrupted(&arguments, |_| output.join("seed-2/samples.csv").exists());
    assert!(text.contains("written to the output folder"), "{text}");
    let document: serde_json::Value = serde_json::from_str(&document).unwrap();
    assert_eq!(document, report());
    assert_eq!(document["complete"], false);
    assert!(document["seeds"].as_array().unwrap().len() >= 2);
    assert_eq!(document["seeds"][1]["complete"], true);
    assert_eq!(document["summary"][0]["method"], "fitted");

    // An error is no other case: a note of another network stops seed 1.
    let note = output.join("seed-1/samples.csv.origin.json");
    fs::write(&note, fs::read_to_string(&note).unwrap().replace("mlp", "cnn")).unwrap();
    let failed = train(&arguments).output().unwrap();
    assert_eq!(failed.status.code(), Some(1));
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&failed.stdout).unwrap(), report());
    assert_eq!(report()["seeds"].as_array().unwrap().len(), 1);
}

#[cfg(unix)]
#[test]
fn an_interrupt_in_the_first_epoch_leaves_readable_files_and_a_finished_run_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let path = output.to_str().unwrap();
    let mut arguments = SMALL.to_vec();
    arguments.extend(["--output", path]);
    let mut long = arguments.clone();
    long[7] = "1000000";
    let (_, text) = interrupted(&long, |printed| printed.contains("Training with the fitted method"));
    assert!(text.contains("training stopped"), "{text}");
    let header = fs::read_to_string(output.join("epochs.csv")).unwrap();
    assert!(header.starts_with("epoch,train_loss,validation_loss,accuracy,step_size"), "{header}");

    train(&arguments).assert().success();
    let finished = fs::read_to_string(output.join("run.json")).unwrap();
    refuses(&arguments, 1, &["run.json", "finished run", "--overwrite"]);
    assert_eq!(fs::read_to_string(output.join("run.json")).unwrap(), finished);
    train(&arguments).arg("--overwrite").assert().success();

    use std::os::unix::fs::PermissionsExt;
    let mode = |name: &str| fs::metadata(output.join(name)).unwrap().permissions().mode();
    assert_eq!(mode("parameters.safetensors"), mode("run.json"));
}

#[cfg(target_os = "linux")]
#[test]
fn what_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    fs::create_dir(&output).unwrap();
    std::os::unix::fs::symlink("/dev/full", output.join("parameters.safetensors")).unwrap();
    let run = |arguments: &[&str]| {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let child = std::process::Command::new(assert_cmd::cargo::cargo_bin("rfdescent"))
            .arg("train")
            .args(SMALL)
            .args(arguments)
            .stdout(full)
            .stderr(std::process::Stdio::piped())
            .spawn();
        let output = child.unwrap().wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let text = run(&["--output", output.to_str().unwrap()]);
    assert!(text.contains("run/parameters.safetensors: ") && text.contains("free some space"), "{text}");
    assert!(text.contains("; standard output: "), "{text}");
    assert!(output.join("run.json").exists());
    let text = run(&["--json"]);
    assert!(text.starts_with("error: standard output: "), "{text}");
}

#[cfg(unix)]
#[test]
fn a_reader_that_has_gone_away_is_no_error() {
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("rfdescent"))
        .arg("train")
        .args(SMALL)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
}

/// As Ctrl-C does. The shell's own `kill`: the program of that name is not everywhere.
fn interrupt(child: &std::process::Child) {
    let command = format!("kill -INT {}", child.id());
    assert!(std::process::Command::new("sh").args(["-c", &command]).status().unwrap().success());
}
