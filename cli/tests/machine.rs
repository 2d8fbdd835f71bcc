//! `rfdescent doctor` and `rfdescent bench` as a user runs them, with and without a GPU; what shells and man
//! are given.

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
fn the_benchmark_counts_bytes_and_checks_the_step() {
    for (dtype, bytes, rounding) in [("f32", 16, 24), ("bf16", 8, 8)] {
        let report = json(&["bench", "--parameters", "100003", "--tensors", "7", "--dtype", dtype]);
        assert_eq!(report["fitted_bytes_per_parameter"], bytes);
        assert_eq!((&report["parameters"], &report["tensors"]), (&100_003.into(), &7.into()));
        let number = |name: &str| report[name].as_f64().unwrap();
        // GB/s and µs are two forms of one time; three roundings.
        let gigabytes = f64::from(bytes) * 100_003.0 / number("fitted_step_us") * 1e-3;
        assert!((number("fitted_gb_per_second") / gigabytes - 1.0).abs() < 1e-14);
        // The average of gradients is f32: read twice, written once.
        assert_eq!(report["adaptive_bytes_per_parameter"], bytes + 12);
        let gigabytes = f64::from(bytes + 12) * 100_003.0 / number("adaptive_step_us") * 1e-3;
        assert!((number("adaptive_gb_per_second") / gigabytes - 1.0).abs() < 1e-14);
        for (method, of_loop) in [("fitted", "plain_loop"), ("adaptive", "adaptive_plain_loop")] {
            let ratio = number(&format!("{method}_step_us")) / number(&format!("{of_loop}_us"));
            assert!((number(&format!("{method}_over_plain_loop")) / ratio - 1.0).abs() < 1e-14);
        }
        // Parameters are below 1/2 and change by less: four roundings of numbers below 1.
        assert!(number("largest_error") > 0.0 && number("largest_error") < 4.0 * 0.5f64.powi(rounding));
    }
    let text = rfdescent(&["bench", "--parameters", "5", "--tensors", "5"]).assert().success();
    // Each row says of which method it is.
    let text = String::from_utf8(text.get_output().stdout.clone()).unwrap();
    let names: Vec<&str> = text.lines().map(|line| line[..18].trim_end()).collect();
    let methods = ["fitted step", "fitted bytes", "adaptive step", "adaptive bytes", "adaptive / fitted"];
    assert_eq!(names[2..7], methods, "{text}");
    let loops = ["plain loop", "fitted / plain", "averaging loop", "adaptive / loop", "check"];
    assert_eq!(names[7..], loops, "{text}");
    assert!(text.contains("\nfitted bytes       16 a parameter\n"), "{text}");
    assert!(text.contains("\nadaptive bytes     28 a parameter\n"), "{text}");
}

#[test]
fn the_benchmark_of_a_device_that_is_not_there_says_so() {
    if json(&["doctor"])["choice"]["target"] == "cuda" {
        let report = json(&["bench", "--device", "cuda", "--parameters", "100003"]);
        assert!(report["fitted_step_us"].as_f64().unwrap() > 0.0 && report["plain_loop_us"].is_null());
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
        (&["--dtype", "f64"], ["--dtype", "f32, bf16"]),
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
