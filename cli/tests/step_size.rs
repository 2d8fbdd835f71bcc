//! `rfdescent step-size` as a user runs it.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use predicates::prelude::*;
use rfdescent::Moments;
use rfdescent::covariance::{Family, Model};
use serde_json::Value;

const HEADER: &str = "model,shape,mean,variance,noise_variance,grad_variance,noise_grad_variance,dims,loss,grad_norm,\
                      inv_batch_size,conservatism";
/// s² = C(0)·d/grad_variance = 100, Θ → the plateau s = 10 at loss = μ.
const ROW: &str = "squared_exponential,,2.5,0.04,0,400,0,1000000,2.5,3,0.01,0";

fn step_size() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rfdescent"));
    command.arg("step-size");
    command
}

fn written(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    path
}

fn output(command: &mut Command) -> String {
    String::from_utf8(command.assert().success().get_output().stdout.clone()).unwrap()
}

#[test]
fn the_golden_table() {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/golden/step_sizes.csv"));
    if !path.exists() {
        say_skipped(format_args!("skipped: {} not found", path.display()));
        return;
    }
    let given = fs::read_to_string(&path).unwrap();
    // As it is, and without the last two columns.
    let folder = tempfile::tempdir().unwrap();
    let shortened: String =
        given.lines().map(|line| format!("{}\n", line.rsplitn(3, ',').nth(2).unwrap())).collect();
    let short = written(folder.path(), "short.csv", &shortened);
    for table in [&path, &short] {
        let printed = output(step_size().arg("--table").arg(table));
        let json: Value =
            serde_json::from_str(&output(step_size().arg("--json").arg("--table").arg(table))).unwrap();
        assert_eq!(printed.lines().count(), 201);
        assert_eq!(json.as_array().unwrap().len(), 200);
        for (row, (expected, line)) in given.lines().zip(printed.lines()).enumerate() {
            let expected: Vec<&str> = expected.split(',').collect();
            let line: Vec<&str> = line.split(',').collect();
            assert_eq!(expected[..12], line[..12]);
            if row == 0 {
                assert_eq!(expected, line);
                continue;
            }
            let error = |column: usize, value: f64| {
                let exact: f64 = expected[column].parse().unwrap();
                ((value - exact) / exact).abs()
            };
            let tolerance = if expected[11] == "0.0" { 1e-13 } else { 1e-9 };
            assert!(error(12, line[12].parse().unwrap()) <= 1e-13, "row {row}");
            assert!(error(13, line[13].parse().unwrap()) <= tolerance, "row {row}");
            assert!(error(13, json[row - 1]["step_size"].as_f64().unwrap()) <= tolerance, "row {row}");
        }
    }
}

#[test]
fn rows_beyond_the_golden_table() {
    let folder = tempfile::tempdir().unwrap();
    let no_gradient = ROW.replace("2.5,3,", "1.0,0,");
    let table = written(folder.path(), "table.csv", &format!("{HEADER}\n{ROW}\n{no_gradient}\n"));
    let printed = output(step_size().arg("--table").arg(&table));
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines[0], format!("{HEADER},length_scale,step_size"));
    assert_eq!(lines[1], format!("{ROW},10.0,10.0"));
    assert_eq!(lines[2], format!("{no_gradient},10.0,0.0"));
    let json: Value =
        serde_json::from_str(&output(step_size().arg("--json").arg("--table").arg(&table))).unwrap();
    assert_eq!(json[0]["model"], "squared_exponential");
    assert_eq!(json[0]["shape"], Value::Null);
    assert_eq!(json[0]["dims"], 1_000_000);
    assert_eq!(json[1]["step_size"], 0.0);
}

/// What tools write, one row for each; the separator and all cells that are not filled in are printed as they
/// are.
#[test]
fn tables_as_tools_write_them() {
    let folder = tempfile::tempdir().unwrap();
    let given = format!("{HEADER}\n{ROW}\n");
    let filled = [",length_scale,step_size\n", ",10.0,10.0\n"];
    let printed = format!("{HEADER}{}{ROW}{}", filled[0], filled[1]);
    for (from, to) in [
        (",", ";"),
        (",", "\t"),
        ("grad_norm", "Grad Norm"),
        ("inv_batch_size", "InvBatchSize"),
        ("1000000", "1e6"),
        ("1000000", "1000000.0"),
        ("1000000", "1.000000000000000000e+06"),
    ] {
        let table =
            written(folder.path(), "table.csv", &format!("# made by hand\n{}", given.replace(from, to)));
        assert_eq!(output(step_size().arg("--table").arg(&table)), printed.replace(from, to), "{to}");
        let json: Value =
            serde_json::from_str(&output(step_size().arg("--json").arg("--table").arg(&table))).unwrap();
        assert_eq!(json[0]["dims"], 1_000_000, "{to}");
    }
    let packed = {
        use std::io::Write;
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(given.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    let table = folder.path().join("table.csv.gz");
    fs::write(&table, &packed).unwrap();
    assert_eq!(output(step_size().arg("--table").arg(&table)), printed);
    for standard in [given.as_bytes(), &packed] {
        assert_eq!(output(step_size().args(["--table", "-"]).write_stdin(standard)), printed);
    }
    let refused =
        step_size().args(["--table", "-"]).write_stdin(given.replace(",400,", ",x,")).assert().code(1);
    refused.stdout("").stderr("error: standard input: row 2: column `grad_variance`: `x` is not a number\n");
}

#[test]
fn bad_tables() {
    let folder = tempfile::tempdir().unwrap();
    for (from, to, said) in [
        ("squared_exponential", "gauss", vec!["column `model`", "gauss", "matern:1.5"]),
        ("0.04", "-1", vec!["column `variance`", "-1"]),
        ("0.04", "x", vec!["column `variance`", "`x` is not a number"]),
        (",400,", ",nan,", vec!["column `grad_variance`", "nan"]),
        ("1000000", "0", vec!["column `dims`", "at least 1"]),
        ("1000000", "1.5", vec!["column `dims`", "1.5"]),
        ("2.5,3,", "inf,3,", vec!["column `loss`", "inf"]),
        ("2.5,3,", "2.5,-3,", vec!["column `grad_norm`", "-3"]),
        ("0.01,0", "2,0", vec!["column `inv_batch_size`", "2"]),
        ("0.01,0", "0.01,1", vec!["column `conservatism`", "below 1"]),
        ("0.01,0", "1e300,0", vec!["column `inv_batch_size`", "1e300:"]),
        (",0.01,0", "", vec!["fields"]),
    ] {
        let bad = ROW.replace(from, to);
        assert_ne!(bad, ROW);
        let table = written(folder.path(), "table.csv", &format!("{HEADER}\n{ROW}\r\n\n{bad}\n"));
        let place = "row 4: ";
        let mut expectation =
            predicate::str::contains("table.csv").and(predicate::str::contains(place)).boxed();
        for part in said {
            expectation = expectation.and(predicate::str::contains(part)).boxed();
        }
        step_size()
            .arg("--table")
            .arg(&table)
            .assert()
            .code(1)
            .stdout("")
            .stderr(expectation.and(predicate::function(|text: &str| text.lines().count() == 1)));
    }
    let table = written(folder.path(), "table.csv", &format!("{}\n{ROW}\n", HEADER.replace("loss", "cost")));
    step_size()
        .arg("--table")
        .arg(&table)
        .assert()
        .code(1)
        .stdout("")
        .stderr(predicate::str::contains("row 1: no column `loss`"));
    step_size()
        .arg("--table")
        .arg(folder.path().join("none.csv"))
        .assert()
        .code(1)
        .stdout("")
        .stderr(predicate::str::contains("none.csv"));
}

#[test]
fn a_table_must_be_a_file_with_a_header() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |table: &Path, said: &str| {
        let name = table.file_name().unwrap().to_str().unwrap();
        let expectation = predicate::str::contains(name).and(predicate::str::contains(said));
        step_size().arg("--table").arg(table).assert().code(1).stdout("").stderr(expectation);
    };
    for content in ["", "\n", "\r\n\n"] {
        refused(&written(folder.path(), "empty.csv", content), "empty; its first row must name model, shape");
    }
    refused(folder.path(), "is a folder");
    #[cfg(target_os = "linux")]
    refused(Path::new("/dev/zero"), "a device or a pipe");
    let bytes = [HEADER.as_bytes(), b"\n\xff,1\n"].concat();
    let table = folder.path().join("latin.csv");
    fs::write(&table, bytes).unwrap();
    refused(&table, "row 2: not a CSV text file in UTF-8");
    // A header alone is a table without rows.
    let table = written(folder.path(), "header.csv", HEADER);
    assert_eq!(output(step_size().arg("--table").arg(&table)), format!("{HEADER},length_scale,step_size\n"));
}

#[test]
fn one_value() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.json");
    let moments = Moments {
        mean: 2.5,
        variance: 0.04,
        noise_variance: 1.0,
        grad_variance: 400.0,
        noise_grad_variance: 9e4,
        dims: 1_000_000,
    };
    Model::new(Family::SquaredExponential, moments).unwrap().save(&model).unwrap();
    let at = |options: &str| {
        let mut command = step_size();
        command.arg("--model-file").arg(&model).args(options.split_whitespace());
        command
    };
    let json = |command: &mut Command| -> Value { serde_json::from_str(&output(command)).unwrap() };

    let plateau = json(&mut at("--loss 3 --grad-norm 4 --batch-size 100 --json"));
    assert_eq!(plateau["step_size"], 10.0);
    assert_eq!(plateau["learning_rate"], 2.5);
    assert_eq!(plateau["theta"], Value::Null);
    assert_eq!(plateau["length_scale"], 10.0);
    assert_eq!(plateau["plateau_step_size"], 10.0);

    // q = 0.04/0.05, p = 400/1300: Θ = p/q·‖g‖/0.5, η̂ = 100·Θ.
    let asymptotic = json(&mut at("--loss 2 --grad-norm 0.001 --batch-size 100 --mode a-rfd --json"));
    let theta = (400.0 / 1300.0) / 0.8 * 0.001 / 0.5;
    assert!((asymptotic["theta"].as_f64().unwrap() / theta - 1.0).abs() < 1e-13);
    assert!((asymptotic["step_size"].as_f64().unwrap() / (100.0 * theta) - 1.0).abs() < 1e-13);

    let bold =
        json(&mut at("--loss -3.5 --grad-norm 4 --batch-size 100 --json"))["step_size"].as_f64().unwrap();
    // Without a batch size loss and gradient count as noiseless.
    let noiseless = json(&mut at("--loss -3.5 --grad-norm 4 --json"))["step_size"].as_f64().unwrap();
    let vast = json(&mut at("--loss -3.5 --grad-norm 4 --batch-size 9000000000000000000 --json"));
    assert!((vast["step_size"].as_f64().unwrap() / noiseless - 1.0).abs() < 1e-12);
    let text = output(&mut at("--loss -3.5 --grad-norm 4 --batch-size 100"));
    assert!(text.contains(&format!("step_size          {bold:?}\n")), "{text}");

    let standard = json(
        step_size()
            .args("--model-file - --loss 3 --grad-norm 4 --batch-size 1e2 --json".split(' '))
            .write_stdin(fs::read(&model).unwrap()),
    );
    assert_eq!(standard, plateau);
    step_size()
        .args("--model-file - --loss 3 --grad-norm 4".split(' '))
        .write_stdin("{}")
        .assert()
        .code(1)
        .stdout("")
        .stderr(predicate::str::starts_with("error: standard input: not a fitted model"));

    let still = json(&mut at("--loss 2 --grad-norm 0 --batch-size 100 --json"));
    assert_eq!((&still["step_size"], &still["learning_rate"]), (&Value::from(0.0), &Value::Null));

    for (options, said) in [
        ("--loss 2 --grad-norm 1 --batch-size 0", "--batch-size"),
        ("--loss 2 --grad-norm 1 --batch-size -1", "--batch-size"),
        ("--loss nan --grad-norm 1 --batch-size 1", "--loss"),
        ("--loss 2 --grad-norm -1 --batch-size 1", "--grad-norm -1: a norm must not be negative"),
        ("--loss -inf --grad-norm 1 --batch-size 1", "--loss -inf: "),
        ("--loss 2 --grad-norm -1e300 --batch-size 1", "--grad-norm -1e300: "),
        ("--loss 2 --grad-norm 1 --batch-size 1 --conservatism 1", "--conservatism"),
        ("--loss 2 --grad-norm 1 --batch-size 1 --conservatism 0.5 --mode a-rfd", "--conservatism"),
        ("--loss 2 --grad-norm 1 --batch-size 1 --mode sgd", "clipped-a-rfd"),
        ("--loss 2 --grad-norm 1 --batch-size 1 --table t.csv", "--table"),
    ] {
        at(options).assert().code(2).stdout("").stderr(predicate::str::contains(said));
    }
    step_size().assert().code(2).stdout("");

    let text = fs::read_to_string(&model).unwrap().replace("\"version\": 1", "\"version\": 9");
    fs::write(&model, text).unwrap();
    at("--loss 2 --grad-norm 1 --batch-size 1")
        .assert()
        .code(1)
        .stdout("")
        .stderr(predicate::str::contains("model.json").and(predicate::str::contains("version 1")));
}

/// Straight to stderr: the test runner shows what passing tests print only when asked.
fn say_skipped(what: std::fmt::Arguments<'_>) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{what}");
}
