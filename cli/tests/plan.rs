//! `rfdescent plan` as a user runs it.

use assert_cmd::Command;
use predicates::prelude::*;
use serde_json::Value;

fn plan(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rfdescent"));
    command.arg("plan").args(arguments);
    command
}

const REFERENCE: [&str; 6] = ["--variance", "0.009362", "--noise-variance", "0.851", "--min-batch", "20"];

fn json(arguments: &[&str]) -> Value {
    let all = [&REFERENCE[..], arguments, &["--json"]].concat();
    serde_json::from_slice(&plan(&all).assert().success().get_output().stdout).unwrap()
}

fn close(got: &Value, want: f64, relative: f64) -> bool {
    (got.as_f64().unwrap() / want - 1.0).abs() < relative
}

#[test]
fn the_published_values() {
    let got = json(&["--design", "c-optimal"]);
    assert!(close(&got["objective"], 0.114288, 1e-5), "{got}");
    assert_eq!(got["points"][0]["batch_size"], 20);
    assert!(close(&got["points"][0]["weight"], 0.541, 1e-3), "{got}");
    assert_eq!(got["points"][1]["batch_size"], 225);
    assert_eq!(got["examples_needed"], 14489.0);
    assert!(got["lambda"].is_null());
    // Half the tolerance takes four times the samples.
    let half = json(&["--design", "c-optimal", "--tolerance", "0.15"]);
    assert!(close(&half["examples_needed"], 4.0 * 14488.44, 1e-4), "{half}");

    let got = json(&[]);
    assert_eq!(got["design"], "gibbs");
    assert!(close(&got["objective"], 0.19044, 5e-5), "{}", got["objective"]);
    assert!(got["points"].as_array().unwrap().len() > 1000);
    let total: f64 = got["points"].as_array().unwrap().iter().map(|p| p["weight"].as_f64().unwrap()).sum();
    assert!((total - 1.0).abs() < 1e-12);
}

#[test]
fn what_it_costs_and_what_half_the_error_would() {
    let got = json(&["--design", "c-optimal", "--examples-per-second", "1000"]);
    assert!(close(&got["examples_to_halve"], 3.0 * 14488.44, 1e-4), "{got}");
    assert!(close(&got["seconds_needed"], 14.48844, 1e-4), "{got}");
    assert!(close(&got["seconds_to_halve"], 43.466, 1e-4), "{got}");
    assert!(json(&[])["seconds_needed"].is_null());
    let all = [&REFERENCE[..], &["--design", "c-optimal", "--examples-per-second", "1000"]].concat();
    plan(&all).assert().success().stdout(
        predicate::str::contains("seconds_needed               14.5")
            .and(predicate::str::contains("(more, for tolerance 0.15)")),
    );
    let all = [&REFERENCE[..], &["--examples-per-second", "0"]].concat();
    plan(&all).assert().failure().stderr(predicate::str::contains("--examples-per-second 0: must be"));
}

#[test]
fn a_maximum_is_kept() {
    let got = json(&["--max-batch", "100"]);
    let sizes = got["points"].as_array().unwrap().iter().map(|p| p["batch_size"].as_u64().unwrap());
    assert_eq!(sizes.max(), Some(100));
}

#[test]
fn the_text_is_short() {
    for design in ["gibbs", "c-optimal"] {
        let all = [&REFERENCE[..], &["--design", design]].concat();
        let assert = plan(&all).assert().success().stdout(predicate::str::contains("examples_needed"));
        let text = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
        assert!(text.lines().count() < 20, "{text}");
    }
}

#[test]
fn bad_usage() {
    for (arguments, words) in [
        (&["--variance", "0", "--noise-variance", "1"][..], ["--variance", "above 0"]),
        (&["--variance", "1", "--noise-variance", "-1"], ["--noise-variance", "at least 0"]),
        (&["--variance", "nan", "--noise-variance", "1"], ["--variance", "finite"]),
        (&["--variance", "1", "--noise-variance", "1", "--min-batch", "0"], ["--min-batch", "at least 1"]),
        (&["--variance", "1", "--noise-variance", "1", "--design", "best"], ["--design", "c-optimal"]),
        (&["--variance", "1", "--noise-variance", "1", "--tolerance", "0"], ["--tolerance", "above 0"]),
        (&["--variance", "1e-9", "--noise-variance", "1"], ["--max-batch is needed", "million"]),
        (
            &["--variance", "1", "--noise-variance", "1", "--max-batch", "20"],
            ["--max-batch 20:", "above --min-batch = 20"],
        ),
        (&["--variance", "1", "--noise-variance", "1", "--max-batch", "-1"], ["--max-batch", "-1"]),
        (&["--variance", "-inf", "--noise-variance", "1"], ["--variance -inf:", "finite"]),
        (
            &["--variance", "1e-300", "--noise-variance", "1"],
            ["--variance 1e-300:", "against --noise-variance"],
        ),
    ] {
        let assert = plan(arguments).assert().code(2).stdout("");
        let error = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
        assert_eq!(error.trim_end().lines().count(), 1, "{error}");
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}
