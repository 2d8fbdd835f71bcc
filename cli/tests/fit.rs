//! `rfdescent fit` as a user runs it.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use predicates::prelude::*;
use rfdescent::covariance::Model;
use serde_json::Value;

fn fit() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rfdescent"));
    command.arg("fit");
    command
}

/// Losses at 2 ± √(0.01 + 0.8/b), ‖g‖² = 500 + 9e4/b: the fit is exact.
fn exact_samples(folder: &Path) -> PathBuf {
    let mut text = String::from("loss,grad_norm,batchsize,time\n");
    for b in [20.0, 50.0, 225.0, 1000.0f64] {
        let (std, norm) = ((0.01 + 0.8 / b).sqrt(), (500.0 + 9e4 / b).sqrt());
        for loss in [2.0 + std, 2.0 - std] {
            text += &format!("{loss},{norm},{b},0\n");
        }
    }
    let path = folder.join("samples.csv");
    fs::write(&path, text).unwrap();
    path
}

fn json(command: &mut Command) -> Value {
    serde_json::from_slice(&command.assert().success().get_output().stdout).unwrap()
}

#[test]
fn golden_fits() {
    let shared = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared"));
    let table = shared.join("golden/covariance_fits.csv");
    if !table.exists() {
        say_skipped(format_args!("skipped: {} not found", table.display()));
        return;
    }
    let mut reader = csv::Reader::from_path(&table).unwrap();
    let header = reader.headers().unwrap().clone();
    for row in reader.records() {
        let row = row.unwrap();
        let file = shared.join("data/covariance").join(&row[0]);
        let got = json(fit().arg(file).args(["--json", "--dims", "2291972"]));
        for name in
            ["mean", "variance", "noise_variance", "grad_variance", "noise_grad_variance", "relative_std"]
        {
            let want: f64 = row[header.iter().position(|h| h == name).unwrap()].parse().unwrap();
            let error = (got[name].as_f64().unwrap() / want - 1.0).abs();
            assert!(error <= 1e-9, "{} {name}: {error:e}", &row[0]);
        }
        assert!(got["length_scale"].as_f64().unwrap() > 0.0);
    }
}

/// Five of 420 losses are 1e4, at five of the seven batch sizes.
fn blown_samples(folder: &Path) -> PathBuf {
    let mut text = String::from("loss,grad_norm,batchsize\n");
    for i in 0..420u32 {
        let b = f64::from([20u32, 50, 100, 200, 400, 800, 1600][i as usize % 7]);
        // The quantiles of a normal distribution would do as well: values with one mode and no tails.
        let u = (f64::from(i / 7) + 0.5) / 60.0;
        let loss = match i {
            49 | 78 | 121 | 234 | 412 => 1e4,
            _ => 2.0 + (u / (1.0 - u)).ln() / 1.8138 * (0.01 + 0.8 / b).sqrt(),
        };
        let norm = ((500.0 + 9e4 / b) * (1.0 + 0.02 * f64::from(i * 17 % 11))).sqrt();
        text += &format!("{loss},{norm},{b}\n");
    }
    let path = folder.join("blown.csv");
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn foreign_samples_are_named_in_one_line_and_left_out_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let samples = blown_samples(folder.path());
    let got = fit().arg(&samples).args(["--dims", "1000"]).assert().success();
    let warnings = String::from_utf8(got.get_output().stderr.clone()).unwrap();
    assert_eq!(warnings.lines().count(), 1, "{warnings}");
    for part in [
        "5 of 420 samples look foreign: rows 51, 80, 123, 236 and 414 (loss",
        "decide over the fit",
        "--robust",
    ] {
        assert!(warnings.contains(part), "{warnings}");
    }
    let text = String::from_utf8(got.get_output().stdout.clone()).unwrap();
    assert!(text.contains("foreign_samples           5  (part of the fit)"), "{text}");

    let plot = folder.path().join("fit.svg");
    let robust =
        json(fit().arg(&samples).args(["--json", "--robust", "--dims", "1000", "--plot"]).arg(&plot));
    assert!((robust["variance"].as_f64().unwrap() / 0.01 - 1.0).abs() < 0.3, "{robust}");
    assert_eq!((&robust["batches"], &robust["left_out"]), (&415.into(), &5.into()));
    assert_eq!(robust["findings"]["foreign"][0]["row"], 51);
    assert!(plot.exists());
    let plain = json(fit().arg(&samples).args(["--json", "--dims", "1000"]));
    assert!(plain["variance"].as_f64().unwrap() > 1e3 && plain["left_out"] == 0, "{plain}");

    // Without foreign samples the option changes nothing.
    let clean = exact_samples(folder.path());
    let numbers = |arguments: &[&str]| {
        let mut value = json(fit().arg(&clean).args(["--json", "--dims", "1000"]).args(arguments));
        value.as_object_mut().unwrap().remove("robust");
        value
    };
    assert_eq!(numbers(&[]), numbers(&["--robust"]));
}

#[test]
fn a_foreign_sample_that_prevents_the_fit_is_named_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let samples = blown_samples(folder.path());
    let text = fs::read_to_string(&samples).unwrap();
    // Of the five, only the one at a batch size of 20: the intercept is negative.
    let only: String = text
        .lines()
        .enumerate()
        .filter(|(i, line)| *i == 50 || !line.starts_with("10000,"))
        .map(|(_, line)| format!("{line}\n"))
        .collect();
    fs::write(&samples, only).unwrap();
    fit().arg(&samples).assert().failure().stderr(
        predicate::str::contains("row 51 (loss")
            .and(predicate::str::contains("use --robust"))
            .and(predicate::str::contains("larger batch sizes").not()),
    );
    fit().arg(&samples).arg("--robust").assert().success();
}

#[test]
fn two_populations_are_named_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let samples = blown_samples(folder.path());
    let text = fs::read_to_string(&samples).unwrap();
    let shifted: String = text
        .lines()
        .filter(|line| !line.starts_with("10000,"))
        .enumerate()
        .map(|(i, line)| match line.split_once(',') {
            Some((loss, rest)) if i > 200 => format!("{},{rest}\n", loss.parse::<f64>().unwrap() + 5.0),
            _ => format!("{line}\n"),
        })
        .collect();
    fs::write(&samples, shifted).unwrap();
    let remedy = || {
        predicate::str::contains("two populations: rows 2, 3, 4, 5")
            .and(predicate::str::contains("a file of their own"))
    };
    fit().arg(&samples).assert().success().stderr(remedy());
    fit().arg(&samples).arg("--robust").assert().failure().stderr(remedy());
}

#[test]
fn all_numbers_with_dims_and_nulls_without() {
    let folder = tempfile::tempdir().unwrap();
    let samples = exact_samples(folder.path());
    let got = json(fit().arg(&samples).args(["--json", "--dims", "1000", "--tolerance", "9"]));
    let close = |name: &str, want: f64| {
        let got = got[name].as_f64().unwrap();
        assert!((got / want - 1.0).abs() < 1e-11, "{name}: {got} instead of {want}");
    };
    // Squared exponential: length scale² = C(0)·d/500, which is the square of the plateau too;
    // asymptotic rate = C(0)/(−C'(0)·μ) = (0.01/(500/1000))/2 in the units of the length scale per dimension.
    let length_scale = (0.01f64 * 1000.0 / 500.0).sqrt();
    close("length_scale", length_scale);
    close("plateau_step_size", length_scale);
    close("asymptotic_learning_rate", length_scale * length_scale / 2.0);
    close("mean", 2.0);
    close("noise_grad_variance", 9e4);

    let got = json(fit().arg(&samples).args(["--json", "--tolerance", "9"]));
    for name in ["length_scale", "asymptotic_learning_rate", "plateau_step_size", "dims"] {
        assert!(got.as_object().unwrap()[name].is_null(), "{name}");
    }
    let text = fit().arg(&samples).args(["--tolerance", "9"]).assert().success();
    text.stdout(predicate::str::contains("needs --dims")).stderr("");
}

#[test]
fn columns_of_tensors_give_a_table_in_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("samples.csv");
    let mut text = String::from("loss,sq_grad_norm,batchsize,sq_grad_norm:weight,\"sq_grad_norm:a, b\"\n");
    for b in [20.0, 50.0, 225.0, 1000.0f64] {
        let (std, weight, bias) = ((0.01 + 0.8 / b).sqrt(), 400.0 + 1e4 / b, 100.0 + 8e4 / b);
        for loss in [2.0 + std, 2.0 - std] {
            text += &format!("{loss},{},{b},{weight},{bias}\n", weight + bias);
        }
    }
    fs::write(&path, text).unwrap();
    let got = json(fit().arg(&path).args(["--json", "--tolerance", "9"]));
    for (tensor, (name, variance, noise)) in
        got["tensors"].as_array().unwrap().iter().zip([("weight", 400.0, 1e4), ("a, b", 100.0, 8e4)])
    {
        assert_eq!(tensor["name"], name);
        assert!((tensor["grad_variance"].as_f64().unwrap() / variance - 1.0).abs() < 1e-11);
        assert!((tensor["noise_grad_variance"].as_f64().unwrap() / noise - 1.0).abs() < 1e-11);
    }
    let text = fit().arg(&path).args(["--tolerance", "9"]).assert().success();
    text.stdout(
        predicate::str::is_match("(?m)^weight +4.000000e2 +80.0 % +1.000000e4\n^a, b .* 20.0 %").unwrap(),
    );

    let without = exact_samples(folder.path());
    assert_eq!(
        json(fit().arg(&without).args(["--json", "--tolerance", "9"]))["tensors"],
        Value::Array(vec![])
    );
    let text = fit().arg(&without).args(["--tolerance", "9"]).assert().success();
    text.stdout(predicate::str::contains("tensor").not());
}

#[test]
fn an_unreliable_fit_warns_on_standard_error() {
    let folder = tempfile::tempdir().unwrap();
    let samples = exact_samples(folder.path());
    let assert = fit().arg(&samples).arg("--json").assert().success();
    let assert =
        assert.stderr(predicate::str::contains("warning").and(predicate::str::contains("more are needed")));
    let got: Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    assert!(got["further_examples"].as_u64().unwrap() > 0);
}

#[test]
fn the_model_file_holds_the_fit() {
    let folder = tempfile::tempdir().unwrap();
    let samples = exact_samples(folder.path());
    let output = folder.path().join("model.json");
    let got = json(
        fit()
            .arg(&samples)
            .args(["--json", "--dims", "1000", "--model", "matern:1.5", "--output"])
            .arg(&output),
    );
    let model = Model::load(&output).unwrap();
    assert_eq!(got["variance"].as_f64().unwrap(), model.moments().variance);
    assert_eq!(got["length_scale"].as_f64().unwrap(), model.length_scale());
    assert_eq!(got["model"], "matern:1.5");
}

/// What tools write and where it comes from, one row for each: the fit is that of the plain file.
#[test]
fn samples_as_tools_write_them() {
    use std::io::Write;
    let folder = tempfile::tempdir().unwrap();
    let plain = exact_samples(folder.path());
    let text = fs::read_to_string(&plain).unwrap();
    let packed = |text: &str| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    let more = ["--json", "--dims", "1000", "--tolerance", "9"];
    let want = json(fit().arg(&plain).args(more));
    for dims in ["1000.0", "1e3", "1.0e+03", "+1000"] {
        assert_eq!(
            json(fit().arg(&plain).args(["--json", "--tolerance", "9", "--dims", dims])),
            want,
            "{dims}"
        );
    }
    let other = text.replace(",20,", ",2.0e+01,").replace(',', ";").replace("batchsize", "Batch_Size");
    for (name, content) in [
        ("semicolons.csv", other.clone().into_bytes()),
        ("samples.csv.gz", packed(&text)),
        ("packed-without-suffix.csv", packed(&other)),
        ("unpacked-with-suffix.csv.gz", text.clone().into_bytes()),
        // As `cat one.gz two.gz` makes it.
        ("members.csv.gz", [packed(&text[..100]), packed(&text[100..])].concat()),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, &content).unwrap();
        assert_eq!(json(fit().arg(&path).args(more)), want, "{name}");
        assert_eq!(json(fit().arg("-").args(more).write_stdin(content)), want, "{name}, standard input");
    }
    let plot = folder.path().join("fit.svg");
    fit().arg("-").args(more).arg("--plot").arg(&plot).write_stdin(text.clone()).assert().success();
    assert!(plot.exists());

    refused(
        fit().arg("-").write_stdin("loss,grad_norm,batchsize\n1,1,x\n"),
        1,
        &["standard input: row 2", "`x`"],
    );
    refused(fit().arg("-").write_stdin(""), 1, &["standard input: row 1", "header"]);
    refused(fit().arg(&plain).args(["--dims", "1e3.5"]), 2, &["--dims", "not a whole number"]);
    refused(fit().arg(&plain).args(["--dims", "1.5"]), 2, &["--dims", "not a whole number"]);
    let path = folder.path().join("bad.csv.gz");
    let whole = packed(&text);
    fs::write(&path, &whole[..whole.len() - 9]).unwrap();
    refused(fit().arg(&path), 1, &["bad.csv.gz", "gzip data ends too early"]);
    fs::write(&path, [0x1f, 0x8b, 7, 7, 7, 7, 7, 7, 7, 7, 7]).unwrap();
    refused(fit().arg(&path), 1, &["bad.csv.gz", "not a valid gzip file"]);
    let warned = fit().arg("-").arg("--json").write_stdin(text).assert().success();
    warned.stderr(predicate::str::starts_with("warning: standard input: "));
}

fn count(text: &str, what: &str) -> usize {
    text.matches(what).count()
}

#[test]
fn a_plot_shows_every_sample_and_the_step_sizes_only_with_dims() {
    let folder = tempfile::tempdir().unwrap();
    let samples = exact_samples(folder.path());
    let plot = folder.path().join("fit.svg");
    let plotted = |more: &[&str]| {
        fit().arg(&samples).args(["--tolerance", "9", "--plot"]).arg(&plot).args(more).assert().success();
        let text = fs::read_to_string(&plot).unwrap();
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
        for label in ["batch size b", "loss L", "(L − μ)²", "‖g‖²", "N(0, 1)", "χ²(1)", "8 mini-batches"]
        {
            assert!(text.contains(label), "{label}");
        }
        // 8 samples in each of six panels, and two in the key.
        assert_eq!(count(&text, "<circle"), 6 * 8 + 2);
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        text
    };
    let without = plotted(&[]);
    assert!(!without.contains("step size"));
    let with = plotted(&["--dims", "1000"]);
    assert!(with.contains("step size η") && with.contains("plateau") && with.contains("k = 1000"));
    assert_ne!(plotted(&["--dims", "1000", "--model", "matern:1.5"]), with);
    // Nothing random, nothing left beside it.
    assert_eq!(plotted(&["--dims", "1000"]), with);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn a_plot_of_many_or_far_spread_samples_is_small_and_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("many.csv");
    let mut text = String::from("loss,sq_grad_norm,batchsize\n");
    for i in 0..30_000 {
        let (b, sign): (f64, f64) = ([20.0, 50.0, 225.0, 1000.0][i % 4], if i % 8 < 4 { 1.0 } else { -1.0 });
        let spread = (0.01 + 0.8 / b).sqrt() * (1.0 + 1e-3 * (i % 13) as f64);
        // Losses around 1e20 and norms up to the largest that are taken.
        text += &format!("{},{},{b}\n", 1e20 * (1.0 + sign * spread), 1e119 * (1.0 + 1.0 / b));
    }
    fs::write(&path, text).unwrap();
    let plot = folder.path().join("many.SVG");
    fit().arg(&path).args(["--dims", "1000000000000", "--plot"]).arg(&plot).assert().success();
    let text = fs::read_to_string(&plot).unwrap();
    assert_eq!(count(&text, "<circle"), 6 * 2000 + 2);
    assert!(text.trim_end().ends_with("</svg>") && !text.contains("NaN") && !text.contains("inf"));
    assert!(text.len() < 3_000_000, "{}", text.len());
}

#[test]
fn a_plot_that_cannot_be_written_is_named_and_leaves_no_model() {
    let folder = tempfile::tempdir().unwrap();
    let samples = exact_samples(folder.path());
    let fit = |plot: &Path| {
        let mut command = fit();
        command.arg(&samples).args(["--tolerance", "9", "--dims", "10", "--output"]);
        command.arg(folder.path().join("model.svg")).arg("--plot").arg(plot);
        command
    };
    refused(&mut fit(Path::new("fit.png")), 2, &["--plot fit.png", ".svg"]);
    refused(&mut fit(Path::new("fit")), 2, &["--plot fit", ".svg"]);
    refused(&mut fit(&folder.path().join("model.svg")), 2, &["--plot", "--output"]);
    refused(
        &mut fit(&folder.path().join("missing/fit.svg")),
        1,
        &["missing/fit.svg", "there is no folder", "missing"],
    );
    // Samples are read under any name, and not replaced.
    let named = folder.path().join("samples.svg");
    fs::copy(&samples, &named).unwrap();
    let around = folder.path().join(".").join("samples.svg");
    for (option, file) in [("--plot", &named), ("--plot", &around), ("--output", &named)] {
        let mut command = self::fit();
        command.arg(&named).args(["--tolerance", "9", "--dims", "10", option]).arg(file);
        refused(&mut command, 2, &[option, "samples.svg", "file of the samples"]);
    }
    assert_eq!(fs::read(&named).unwrap(), fs::read(&samples).unwrap());
    let taken = folder.path().join("folder.svg");
    fs::create_dir(&taken).unwrap();
    refused(&mut fit(&taken), 1, &["folder.svg", "is a folder"]);
    assert!(!folder.path().join("model.svg").exists());
}

/// One line, the given words, the given status, nothing on standard output.
fn refused(command: &mut Command, code: i32, words: &[&str]) {
    let assert = command.assert().code(code).stdout("");
    let error = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    for word in words {
        assert!(error.contains(word), "{word}: {error}");
    }
}

#[test]
fn bad_usage() {
    let folder = tempfile::tempdir().unwrap();
    let samples = exact_samples(folder.path());
    let output = folder.path().join("model.json");
    refused(fit().arg(&samples).arg("--output").arg(&output), 2, &["--output", "--dims"]);
    refused(fit().arg(&samples).args(["--dims", "0"]), 2, &["--dims"]);
    refused(fit().arg(&samples).args(["--dims", "-1"]), 2, &["--dims", "-1"]);
    refused(fit().arg(&samples).args(["--tolerance", "-inf"]), 2, &["--tolerance -inf"]);
    refused(fit().arg(&samples).args(["--tolerance", "-1"]), 2, &["--tolerance"]);
    refused(fit().arg(&samples).args(["--model", "cubic"]), 2, &["--model", "cubic"]);
    assert!(!output.exists());
}

#[test]
fn bad_data() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("model.json");
    let head = "loss,grad_norm,batchsize,time\n1,1,20,0\n";
    for (content, words) in [
        (format!("{head}nan,1,20,0\n"), ["row 3", "loss"]),
        (format!("{head}1,-1,20,0\n"), ["row 3", "grad_norm"]),
        (format!("{head}1,1,0,0\n"), ["row 3", "batchsize"]),
        (format!("{head}1,1,2"), ["row 3", "fields"]),
        (head.to_string(), ["distinct batch size", "larger"]),
        (String::new(), ["row 1", "header"]),
    ] {
        let path = folder.path().join("bad.csv");
        fs::write(&path, content).unwrap();
        let words: Vec<&str> = words.into_iter().chain(["bad.csv"]).collect();
        refused(fit().arg(&path).args(["--dims", "10", "--output"]).arg(&output), 1, &words);
        assert!(!output.exists());
    }
    refused(fit().arg(folder.path().join("none.csv")), 1, &["none.csv"]);
    let nowhere = folder.path().join("missing/model.json");
    let samples = exact_samples(folder.path());
    refused(
        fit().arg(&samples).args(["--tolerance", "9", "--dims", "10", "--output"]).arg(nowhere),
        1,
        &["model.json"],
    );
}

#[cfg(target_os = "linux")]
#[test]
fn a_report_that_is_lost_is_an_error_and_leaves_no_model() {
    let folder = tempfile::tempdir().unwrap();
    let samples = exact_samples(folder.path());
    let output = folder.path().join("model.json");
    let full = || fs::File::options().write(true).open("/dev/full").unwrap();
    let run = |stdout: fs::File, stderr: fs::File| {
        std::process::Command::new(env!("CARGO_BIN_EXE_rfdescent"))
            .arg("fit")
            .arg(&samples)
            .args(["--dims", "1000", "--output"])
            .arg(&output)
            .stdout(stdout)
            .stderr(stderr)
            .status()
            .unwrap()
            .code()
    };
    let log = folder.path().join("log");
    assert_eq!(run(full(), fs::File::create(&log).unwrap()), Some(1));
    assert!(fs::read_to_string(&log).unwrap().contains("error: standard output: "));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "samples and log");
    // Warnings and errors that no one can read change no exit status.
    assert_eq!(run(full(), full()), Some(1));
    assert_eq!(run(fs::File::create(&log).unwrap(), full()), Some(0));
    Model::load(&output).unwrap();
}

/// Straight to stderr: the test runner shows what passing tests print only when asked.
fn say_skipped(what: std::fmt::Arguments<'_>) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{what}");
}
