//! Programs in C and C++ against the shared library: the tests of `capi/tests/c`, and the examples, whose
//! steps have to be those of the Rust interface to the last bit. `scripts/check-c` runs the same programs
//! under sanitizers and valgrind.
#![cfg(target_os = "linux")]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use half::{bf16, f16};
use rfdescent::covariance::{Family, Model, Observation, StepRule};
use rfdescent::optimizer::{
    Adaptive, Fitted, Group, Method, Optimizer, Options, Outcome, StepInput, TensorSpec,
};
use rfdescent::{DType, GradRef, Moments, ParamMut};

mod support;
use support::{root, say_skipped, shared_library, soname};

/// A folder with the shared library under the name that programs look for.
fn stage() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["librfdescent.so", &soname()] {
        std::os::unix::fs::symlink(shared_library(), folder.path().join(name)).unwrap();
    }
    folder
}

/// The compiler in an environment variable, or by its usual name; `None`, with a line printed, where it is
/// missing.
fn compiler(variable: &str, usual: &str) -> Option<String> {
    let name = std::env::var(variable).unwrap_or(usual.into());
    let found = Command::new(&name).arg("--version").output().is_ok();
    if !found {
        say_skipped(format_args!("skipped: {name} not found"));
    }
    found.then_some(name)
}

fn run(command: &mut Command) -> String {
    let done = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(done.status.success(), "{command:?}:\n{}{}", text(&done.stdout), text(&done.stderr));
    text(&done.stdout)
}

/// Compiles and links sources of the repository; `None` without a compiler.
fn build(stage: &Path, name: &str, sources: &[&str]) -> Option<PathBuf> {
    let (c, cpp): (Vec<&str>, Vec<&str>) = sources.iter().partition(|source| source.ends_with(".c"));
    let cc = compiler("CC", "cc")?;
    let linker = if cpp.is_empty() { cc.clone() } else { compiler("CXX", "c++")? };
    let mut objects = Vec::new();
    for (compiler, standard, sources) in [(&cc, "-std=c11", c), (&linker, "-std=c++17", cpp)] {
        for source in sources {
            let object = stage.join(format!("{name}-{}.o", source.replace('/', "-")));
            let warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"];
            run(Command::new(compiler)
                .args(["-O1", standard, "-c", "-ffp-contract=off"])
                .args(warnings)
                .arg("-I")
                .arg(root().join("include"))
                .arg(root().join(source))
                .arg("-o")
                .arg(&object));
            objects.push(object);
        }
    }
    let program = stage.join(name);
    let mut rpath = OsString::from("-Wl,-rpath,");
    rpath.push(stage);
    run(Command::new(linker).args(objects).arg("-o").arg(&program).arg("-L").arg(stage).arg(rpath).args([
        // One that loads the library by hand does not depend on it, so that it can be unloaded.
        "-Wl,--as-needed",
        "-lrfdescent",
        "-lm",
        "-pthread",
    ]));
    Some(program)
}

#[test]
fn the_interface_works_from_c() {
    let stage = stage();
    let Some(program) = build(stage.path(), "abi", &["capi/tests/c/abi.c"]) else { return };
    print!("{}", run(Command::new(program).arg(tempfile::tempdir().unwrap().path())));
}

#[test]
fn threads_fork_fail_and_end() {
    let stage = stage();
    let Some(program) = build(stage.path(), "threads", &["capi/tests/c/threads.c"]) else { return };
    // More than a file's link, which the system user that the test becomes could not follow.
    let library = shared_library().canonicalize().unwrap();
    print!("{}", run(Command::new(program).arg(library).env_remove("RAYON_NUM_THREADS")));
}

#[test]
fn every_function_has_a_test_in_c() {
    let tests = std::fs::read_to_string(root().join("capi/tests/c/abi.c")).unwrap()
        + &std::fs::read_to_string(root().join("capi/tests/c/check.h")).unwrap();
    for name in std::fs::read_to_string(root().join("capi/tests/exported.txt")).unwrap().lines() {
        assert!(tests.contains(&format!("{name}(")), "{name} occurs in no test of capi/tests/c");
    }
}

#[test]
fn every_function_is_in_the_wrapper() {
    let wrapper = std::fs::read_to_string(root().join("include/rfdescent.hpp")).unwrap();
    let words: std::collections::HashSet<&str> =
        wrapper.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
    for name in std::fs::read_to_string(root().join("capi/tests/exported.txt")).unwrap().lines() {
        assert!(words.contains(name), "{name} is not in rfdescent.hpp");
    }
}

#[test]
fn the_wrapper_works_from_cpp() {
    let stage = stage();
    let Some(program) = build(stage.path(), "wrapper", &["capi/tests/c/wrapper.cpp"]) else { return };
    print!("{}", run(Command::new(program).arg(tempfile::tempdir().unwrap().path())));
}

/// A hexadecimal float as `%a` prints it.
fn hex_float(text: &str) -> f64 {
    let (sign, rest) = text.strip_prefix('-').map_or((1.0, text), |rest| (-1.0, rest));
    if rest == "inf" {
        return sign * f64::INFINITY;
    }
    let (mantissa, exponent) = rest.strip_prefix("0x").unwrap().split_once('p').unwrap();
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = u64::from_str_radix(&format!("{whole}{fraction}"), 16).unwrap();
    let exponent: i32 = exponent.parse::<i32>().unwrap() - 4 * fraction.len() as i32;
    // The digits fit into 53 bits and no number here is subnormal, so both products are exact.
    sign * digits as f64 * 2f64.powi(exponent)
}

#[test]
fn hexadecimal_floats_are_read_exactly() {
    assert_eq!(hex_float("0x1p+0"), 1.0);
    assert_eq!(hex_float("-0x1.8p-3"), -0.1875);
    assert_eq!(hex_float("0x1.fffffffffffffp+1023"), f64::MAX);
    assert_eq!(hex_float("inf"), f64::INFINITY);
}

/// What an example does with an argument that it does not know.
fn refuses(example: &Path) {
    for arguments in [&["--epoch", "1"][..], &["--tracing"], &["--trace", "more"]] {
        let output = Command::new(example).args(arguments).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && text.starts_with("usage: "), "{arguments:?}: {text}");
    }
}

#[test]
fn examples_take_the_steps_of_the_rust_interface() {
    let stage = stage();
    let network = ["examples/c/data.c", "examples/c/network.c"];
    let Some(program) = build(stage.path(), "train", &[&network[..], &["examples/c/train.c"]].concat())
    else {
        return;
    };
    refuses(&program);
    let file = stage.path().join("model.json");
    let output = run(Command::new(&program).args(["--trace", "--model"]).arg(&file));
    let model = Model::load(&file).unwrap();
    let steps: Vec<&str> = output.lines().filter(|line| line.starts_with("step ")).collect();
    assert_eq!(steps.len(), 3 * (6000 / 128));
    for line in &steps {
        let fields: Vec<&str> = line.split(' ').collect();
        let [loss, grad_norm, step_size] = [3, 5, 7].map(|k| hex_float(fields[k]));
        let observation = Observation { loss, grad_norm, inv_batch_size: 1.0 / 128.0 };
        let expected = model.step(&observation, &StepRule::default()).unwrap().step_size;
        assert_eq!(expected.to_bits(), step_size.to_bits(), "{line}");
    }
    let adaptive = run(Command::new(&program).args(["--adaptive", "--trace"]));
    for output in [&output, &adaptive] {
        let accuracy: f64 =
            output.trim_end().rsplit("accuracy ").next().unwrap().trim_end_matches(" %").parse().unwrap();
        assert!(accuracy > 85.0, "the example does not learn:\n{output}");
    }

    // Over one array, and tensor by tensor.
    let traced = |output: &str| -> Vec<String> {
        output.lines().filter(|line| line.starts_with("step ")).map(str::to_string).collect()
    };
    assert_eq!(traced(&adaptive).len(), steps.len());
    for (name, source) in [("flat", "examples/c/flat.c"), ("per_tensor", "examples/c/per_tensor.c")] {
        let program = build(stage.path(), name, &[&network[..], &[source]].concat()).unwrap();
        let output = run(Command::new(&program).arg("--trace"));
        assert!(traced(&output) == traced(&adaptive), "{name} and train --adaptive differ");
        refuses(&program);
    }

    let sources = [&network[..], &["examples/cpp/train.cpp"]].concat();
    let Some(program) = build(stage.path(), "train-cpp", &sources) else { return };
    let output = run(Command::new(&program).arg("--trace"));
    refuses(&program);
    let same: Vec<&str> = output.lines().filter(|line| line.starts_with("step ")).collect();
    assert!(same == steps, "the examples in C and C++ differ");
}

#[test]
fn the_gpt_learns_and_its_gradients_are_right() {
    let stage = stage();
    let Some(program) = build(stage.path(), "gpt", &["examples/c/gpt.c"]) else { return };
    refuses(&program);
    let checked = run(Command::new(&program).arg("--check"));
    assert!(checked.ends_with("gradients are right\n"), "{checked}");
    let gpt = |args: &[&str]| {
        run(Command::new(&program).arg(root().join("examples/c/gpt.c")).args(args).args(["--generate", "30"]))
    };
    let losses = |output: &str, step: &str| -> Vec<f64> {
        let lines = output.lines().filter_map(|line| line.strip_prefix(step));
        let words =
            lines.flat_map(|line| line.split([' ', ',']).filter_map(|word| word.parse().ok()).take(2));
        words.collect()
    };
    // Training and validation; a uniform guess has log 256 = 5.55.
    let learnt = gpt(&["--steps", "20"]);
    let last = losses(&learnt, "step    20: ");
    assert!(last.len() == 2 && last.iter().all(|&loss| loss < 4.5), "{learnt}");
    // All methods begin at the same parameters, with the same batch.
    let compared = gpt(&["--steps", "2", "--compare"]);
    let first: Vec<f64> = losses(&compared, "step     1: ").into_iter().step_by(2).collect();
    assert!(first.len() == 5 && first.iter().all(|&loss| loss == first[0]), "{compared}");
    for name in
        ["adaptive  ", "AdamW 0.0001 ", "AdamW 0.0003 ", "AdamW 0.001 ", "AdamW 0.003 ", "adaptive over"]
    {
        assert!(compared.lines().rev().take(6).any(|line| line.starts_with(name)), "{name}: {compared}");
    }
}

/// The tensors of `capi/tests/c/parity.c`.
struct Tensors {
    a: Vec<f32>,
    b: Vec<f64>,
    c: Vec<f16>,
    d: Vec<bf16>,
}

struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn tensors(&mut self) -> Tensors {
        let mut list = |count: usize| (0..count).map(|_| self.next()).collect::<Vec<u64>>();
        let (a, b, c, d) = (list(70_000), list(4097), list(333), list(5000));
        let double = |bits: u64| f64::from_bits((bits & 0xb00f_ffff_ffff_ffff) | 0x3000_0000_0000_0000);
        Tensors {
            a: a.into_iter().map(|bits| f32::from_bits(bits as u32 & 0xbfff_ffff)).collect(),
            b: b.into_iter().map(double).collect(),
            c: c.into_iter().map(|bits| f16::from_bits(bits as u16 & 0xbfff)).collect(),
            d: d.into_iter().map(|bits| bf16::from_bits(bits as u16 & 0xbfff)).collect(),
        }
    }
}

fn hash(bytes: impl Iterator<Item = u8>) -> String {
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("hash {hash:016x}")
}

#[test]
fn steps_from_c_have_the_bits_of_the_rust_interface() {
    let stage = stage();
    let Some(program) = build(stage.path(), "parity", &["capi/tests/c/parity.c"]) else { return };
    let moments = Moments {
        mean: 2.5,
        variance: 0.01,
        noise_variance: 0.9,
        grad_variance: 5.0,
        noise_grad_variance: 300.0,
        dims: 79_430,
    };
    let model = Model::new(Family::RationalQuadratic { beta: 1.0 }, moments).unwrap();
    let fitted = Fitted { inv_batch_size: 1.0 / 128.0, momentum: vec![0.0, 0.9], ..Fitted::new(model) };
    check_parity(run(Command::new(&program).arg("fitted")), fitted.into());
    let adaptive = Adaptive { averaging: 0.8, loss_bound: Some(-2.0) };
    check_parity(run(Command::new(&program).arg("adaptive")), adaptive.into());
}

/// Takes the steps of `capi/tests/c/parity.c` and compares with what it printed.
fn check_parity(output: String, method: Method) {
    let mut lines = output.lines();
    let second = Group { weight_decay: 0.01, length_scale_factor: 0.5, norm_lock: true, ..Group::default() };
    let options = Options {
        groups: vec![Group::default(), second],
        stochastic_rounding: Some(7),
        ..Options::default()
    };
    let specs = [(70_000, DType::F32), (4097, DType::F64), (333, DType::F16), (5000, DType::BF16)]
        .into_iter()
        .zip(["a", "b", "c", "d"])
        .enumerate()
        .map(|(k, ((count, dtype), name))| TensorSpec {
            group: k % 2,
            offset: k as u64,
            row: (k == 0).then_some(100),
            ..TensorSpec::new(name, &[count], dtype)
        })
        .collect();
    let mut optimizer = Optimizer::new(method, options, specs).unwrap();
    let mut random = SplitMix(0);
    let mut p = random.tensors();
    for step in 0..35 {
        let g = random.tensors();
        let report = optimizer
            .step(
                &mut [
                    ParamMut::from(&mut p.a[..]),
                    ParamMut::from(&mut p.b[..]),
                    ParamMut::from(&mut p.c[..]),
                    ParamMut::from(&mut p.d[..]),
                ],
                &[
                    GradRef::from(&g.a[..]),
                    GradRef::from(&g.b[..]),
                    GradRef::from(&g.c[..]),
                    GradRef::from(&g.d[..]),
                ],
                &StepInput::new(2.4 - 0.0625 * f64::from(step)),
            )
            .unwrap();
        assert_eq!(report.outcome, Outcome::Applied);
        let line = lines.next().unwrap();
        let fields: Vec<&str> = line.split(' ').skip(2).collect();
        let (limit, fields) = fields.split_last().unwrap();
        let fields: Vec<u64> = fields.iter().map(|field| hex_float(field).to_bits()).collect();
        let numbers = [
            report.loss,
            report.grad_norm,
            report.sigma_norm,
            report.theta,
            report.step_size,
            report.learning_rate,
            report.trust,
        ];
        assert_eq!(fields, numbers.map(f64::to_bits), "{line}\n{report:?}");
        assert_eq!(*limit, report.limit.code().to_string(), "{line}");
    }
    let hashes = [
        hash(p.a.iter().flat_map(|x| x.to_ne_bytes())),
        hash(p.b.iter().flat_map(|x| x.to_ne_bytes())),
        hash(p.c.iter().flat_map(|x| x.to_ne_bytes())),
        hash(p.d.iter().flat_map(|x| x.to_ne_bytes())),
    ];
    assert_eq!(lines.collect::<Vec<_>>(), hashes, "parameters differ");
}
