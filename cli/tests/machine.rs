//! `rfdescent doctor` and `rfdescent bench` as a user runs them, with and without a GPU; what shells and man
//! are given.

use std::collections::HashSet;

use assert_cmd::Command;
use predicates::prelude::*;
use serde_json::Value;

fn rfdescent(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rfdescent"));
    command.args(arguments);
    command
}

fn json(arguments: &[&str]) -> Value {
    let output = rfdescent(arguments).arg("--json").assert().success().stderr("").get_output().clone();
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_doctor_tells_what_there_is_and_what_is_chosen() {
    let text = rfdescent(&["doctor"]).env("RAYON_NUM_THREADS", "3").assert().success().stderr("");
    text.stdout(
        predicate::str::contains("CPU: 3 threads, ")
            .and(predicate::str::contains("CUDA driver: "))
            .and(predicate::str::contains("choice: ")),
    );
    let report = json(&["doctor"]);
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert!(report["threads"].as_u64().unwrap() >= 1);
    let usable = report["cuda"]["devices"].as_array().unwrap().iter().any(|device| device["usable"] == true);
    match report["cuda"]["driver"].as_str() {
        Some(_) => assert!(report["cuda"]["problem"].is_null()),
        None => assert!(!usable && !report["cuda"]["problem"].as_str().unwrap().is_empty()),
    }
    assert_eq!(report["choice"]["target"], if usable { "cuda" } else { "cpu" });
    assert!(!report["choice"]["reason"].as_str().unwrap().is_empty());
}

/// Neither the user nor we could guess what the loader knows.
#[cfg(target_os = "linux")]
#[test]
fn a_driver_library_that_cannot_be_loaded_is_named_with_the_loaders_reason() {
    let junk =
        |name: &std::path::Path| std::fs::write(name, "<html>not the file you asked for</html>".repeat(9));
    let empty = |name: &std::path::Path| std::fs::write(name, "");
    let folder = |name: &std::path::Path| std::fs::create_dir(name);
    type Make<'a> = &'a dyn Fn(&std::path::Path) -> std::io::Result<()>;
    let mut reasons = Vec::new();
    for make in [&junk as Make, &empty, &folder] {
        let path = tempfile::tempdir().unwrap();
        // Both names, as either may be installed as well.
        ["libcuda.so.1", "libcuda.so"].iter().for_each(|name| make(&path.path().join(name)).unwrap());
        let doctor = |arguments: &[&str]| {
            let mut command = rfdescent(arguments);
            command
                .env("LD_LIBRARY_PATH", path.path())
                .assert()
                .success()
                .stderr("")
                .get_output()
                .stdout
                .clone()
        };
        let report: Value = serde_json::from_slice(&doctor(&["doctor", "--json"])).unwrap();
        let problem = report["cuda"]["problem"].as_str().unwrap().to_string();
        assert!(problem.contains("cannot be loaded (") && problem.contains("libcuda.so.1: "), "{problem}");
        assert!(problem.contains("driver, release 530 or newer"), "{problem}");
        assert!(!problem.contains("not found") && !problem.contains('\n'), "{problem}");
        assert!(String::from_utf8(doctor(&["doctor"])).unwrap().contains(&problem));
        reasons.push(problem);
    }
    reasons.dedup();
    assert_eq!(reasons.len(), 3, "each has its own: {reasons:?}");
}

#[test]
fn the_benchmark_counts_bytes_and_checks_every_kind_of_step() {
    let of = |dtype: &str| json(&["bench", "--parameters", "10003", "--tensors", "7", "--dtype", dtype]);
    for (dtype, size, rounding) in [("f32", 4, 24), ("f16", 2, 11), ("bf16", 2, 8)] {
        let report = of(dtype);
        assert_eq!(report["tensors"], 7);
        let threads: HashSet<u64> = (report["steps"].as_array().unwrap().iter())
            .map(|step| step["threads"].as_u64().unwrap())
            .collect();
        // So few parameters take no others.
        assert_eq!(threads, HashSet::from([1]));
        // Gradients are read twice and parameters read and written, or written beside master weights; the
        // average of gradients is f32: read twice, written once.
        let mut bytes = vec![("fitted", 4 * size), ("momentum", 4 * size + 8), ("adaptive", 4 * size + 12)];
        if size == 2 {
            bytes.extend([("fitted, master weights", 14), ("adaptive, stochastic rounding", 20)]);
        }
        for (kind, bytes) in bytes {
            let steps: Vec<&Value> =
                report["steps"].as_array().unwrap().iter().filter(|step| step["kind"] == kind).collect();
            assert_eq!(steps.len(), threads.len(), "{kind}");
            for step in steps {
                assert_eq!((&step["dtype"], &step["parameters"]), (&dtype.into(), &10_003.into()));
                assert_eq!(step["bytes_per_parameter"], bytes, "{kind}");
                let number = |name: &str| step[name].as_f64().unwrap();
                // GB/s and µs are two forms of one time; three roundings.
                let gigabytes = f64::from(bytes) * 10_003.0 / number("step_us") * 1e-3;
                assert!((number("gb_per_second") / gigabytes - 1.0).abs() < 1e-14);
                let [low, high] = [0, 1].map(|k| step["quartiles"][k].as_f64().unwrap());
                assert!(0.0 < low && low <= number("over_plain_loop") && number("over_plain_loop") <= high);
                assert!(number("plain_loop_us") > 0.0);
                // Parameters are below 1/2 and change by less: four roundings of numbers below 1.
                let bound = 4.0 * 0.5f64.powi(rounding);
                assert!(number("largest_error") > 0.0 && number("largest_error") < bound, "{kind}");
            }
        }
        for method in ["fitted", "adaptive"] {
            for what in ["tensor", "element"] {
                assert!(report[format!("{method}_{what}_ns")].as_f64().unwrap() > 0.0);
            }
        }
    }
}

#[test]
fn the_benchmark_prints_a_row_for_each_kind_of_step() {
    let text = |more: &str| {
        let few = ["bench", "--parameters", "5", "--tensors", "5", "--dtype", "f32"];
        let mut command = rfdescent(&few);
        let command = command.env("RAYON_NUM_THREADS", "3").args((!more.is_empty()).then_some(more));
        String::from_utf8(command.assert().success().get_output().stdout.clone()).unwrap()
    };
    let rows = text("");
    for kind in ["fitted", "momentum", "adaptive"] {
        let is_row = |line: &&str| line.starts_with(&format!("f32   {kind} "));
        assert_eq!(rows.lines().filter(is_row).count(), 1, "{rows}");
    }
    assert!(rows.contains("a step over one f32"), "{rows}");
    let table = text("--table");
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(&lines[..2], ["| step | 5e0, 1 thread |", "|---|---|"], "{table}");
    let kinds: Vec<&str> = lines[2..5].iter().map(|line| line.split('|').nth(1).unwrap().trim()).collect();
    assert_eq!(kinds, ["f32, fitted", "f32, momentum", "f32, adaptive"]);
    assert!(lines[5].is_empty() && lines[6].contains("One more vector of 64 f32 costs"), "{table}");
}

#[test]
fn the_benchmark_of_a_device_that_is_not_there_says_so() {
    if json(&["doctor"])["choice"]["target"] == "cuda" {
        let report = json(&["bench", "--device", "cuda", "--parameters", "100003"]);
        assert!(report["fitted_step_us"].as_f64().unwrap() > 0.0);
        assert!(report["adaptive_step_us"].as_f64().unwrap() > 0.0);
        return;
    }
    let refused = rfdescent(&["bench", "--device", "cuda"]).assert().code(1).stdout("");
    refused.stderr(
        predicate::str::starts_with("error: CUDA")
            .and(predicate::function(|text: &str| text.lines().count() == 1)),
    );
}

#[test]
fn bad_usage() {
    for (arguments, words) in [
        (&["--parameters", "0"][..], ["--parameters", "1..="]),
        (&["--parameters", "3", "--tensors", "4"], ["--tensors 4", "3 parameters"]),
        (&["--tensors", "-1"], ["--tensors", "-1"]),
        (&["--tensors", "200000"], ["--tensors 200000", "100000 parameters"]),
        (&["--dtype", "f64"], ["--dtype", "f32, f16, bf16"]),
        (&["--device", "cuda", "--table"], ["--table", "--device cuda"]),
        (&["--json", "--table"], ["--table", "--json"]),
        (&["--device", "tpu"], ["--device", "cpu, cuda"]),
    ] {
        let assert = rfdescent(&["bench"]).args(arguments).assert().code(2).stdout("");
        let error = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
        assert!(error.lines().count() == 1 && words.iter().all(|word| error.contains(word)), "{error}");
    }
}

#[test]
fn completions_know_every_command_and_option() {
    // Not every shell's script knows the values of options.
    for (shell, values) in
        [("bash", true), ("elvish", false), ("fish", true), ("powershell", false), ("zsh", true)]
    {
        let script =
            rfdescent(&["completions", shell]).assert().success().stderr("").get_output().stdout.clone();
        let script = String::from_utf8(script).unwrap();
        for part in ["rfdescent", "train", "step-size", "anisotropy"] {
            assert!(script.contains(part), "{shell}: {part}");
        }
        assert_eq!(script.contains("tensorwise"), values, "{shell}");
    }
    let refused = rfdescent(&["completions", "csh"]).assert().code(2).stdout("");
    refused.stderr(predicate::str::contains("csh").and(predicate::str::contains("bash")));
}

/// What bash itself makes of the script.
#[cfg(unix)]
#[test]
fn bash_completes() {
    let script = rfdescent(&["completions", "bash"]).output().unwrap().stdout;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rfdescent");
    std::fs::write(&path, script).unwrap();
    let ask = r#"source "$0"; COMP_WORDS=(rfdescent train --an); COMP_CWORD=2
        _rfdescent rfdescent --an train; echo "${COMPREPLY[@]}""#;
    match std::process::Command::new("bash").args(["-c", ask]).arg(&path).output() {
        Ok(output) => {
            let (stdout, stderr) =
                (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert_eq!(stdout.trim(), "--anisotropy", "{stderr}");
        }
        Err(_) => {
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "skipped: bash not found");
        }
    }
}

#[test]
fn manual_pages_tell_every_command_and_option() {
    let page = rfdescent(&["man"]).assert().success().stderr("");
    page.stdout(
        predicate::str::starts_with(".ie").or(predicate::str::contains(".TH rfdescent 1")).and(
            predicate::str::contains(r"rfdescent\-step\-size(1)")
                .and(predicate::str::contains("Random Function Descent")),
        ),
    );
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("share/man1");
    rfdescent(&["man", "--output"]).arg(&pages).assert().success().stdout("").stderr("");
    let names = ["", "-train", "-fit", "-step-size", "-plan", "-doctor", "-bench", "-completions", "-man"];
    for name in names {
        let page = std::fs::read_to_string(pages.join(format!("rfdescent{name}.1"))).unwrap();
        assert!(page.contains(&format!(".TH rfdescent{name} 1")), "{page}");
    }
    assert_eq!(std::fs::read_dir(&pages).unwrap().count(), names.len());
    let train = std::fs::read_to_string(pages.join("rfdescent-train.1")).unwrap();
    assert!(train.contains(r"\-\-anisotropy") && train.contains("tensorwise"), "{train}");
    // A folder below a file.
    let refused = rfdescent(&["man", "--output"]).arg(pages.join("rfdescent.1/deeper")).assert().code(1);
    refused.stdout("").stderr(predicate::str::contains("deeper"));
}

#[cfg(target_os = "linux")]
#[test]
fn help_that_is_lost_is_an_error() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_rfdescent"));
    let output = command.arg("--help").stdout(full).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let output = output.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("error: standard output: "));
}
