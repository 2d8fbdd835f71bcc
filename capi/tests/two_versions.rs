//! A Rust program has no function of the C interface in it, and two versions of the Rust library get along in
//! one program, as where two of its dependencies need different ones.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::Path;
use std::process::Command;

mod support;
use support::{Cargo, root, say_skipped};

const PROGRAM: &str = r#"
fn main() {
    use one::optimizer::{Adaptive, Optimizer, Options};
    let old = Optimizer::new(Adaptive::default(), Options::default(), vec![]).unwrap();
    use two::optimizer as new;
    let new =
        new::Optimizer::new(new::Adaptive::default(), new::Options::default(), vec![]).unwrap();
    println!("{} {}", old.applied_steps(), new.applied_steps());
}
"#;

/// Writes a file unless it holds that already: a newer one would be compiled again.
fn write(path: &Path, text: &[u8]) {
    if fs::read(path).is_ok_and(|old| old == text) {
        return;
    }
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Makes a folder what another one is.
fn copy(from: &Path, to: &Path) {
    for old in fs::read_dir(to).into_iter().flatten().map(|entry| entry.unwrap().path()) {
        let kept = from.join(old.file_name().unwrap());
        if kept.is_dir() != old.is_dir() || !kept.exists() {
            let removed = if old.is_dir() { fs::remove_dir_all(&old) } else { fs::remove_file(&old) };
            removed.unwrap();
        }
    }
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            write(&to, &fs::read(entry.path()).unwrap());
        }
    }
}

/// The library's manifest for another version, outside of the workspace, with what a build needs.
fn manifest(version: &str) -> String {
    let text = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let sections = text.split("\n[").filter(|section| {
        ["package]", "features]", "dependencies]", "build-dependencies]"]
            .iter()
            .any(|name| section.starts_with(name))
    });
    let text: String = sections.map(|section| format!("[{section}\n")).collect();
    text.replace("version.workspace = true", &format!("version = \"{version}\""))
        .replace("edition.workspace = true", "edition = \"2024\"")
        .lines()
        .filter(|line| !line.contains(".workspace = true") && !line.starts_with("rust-version"))
        .map(|line| format!("{line}\n"))
        .collect()
}

#[test]
fn two_versions_in_one_program_and_no_function_of_the_c_interface() {
    // At one place, for what has been compiled to be found again.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("two_versions");
    let (own, other) = (env!("CARGO_PKG_VERSION"), "0.0.1");
    let copied = folder.join("other");
    copy(&root().join("src"), &copied.join("src"));
    copy(&root().join("kernels"), &copied.join("kernels"));
    for file in ["build.rs", "README.md"] {
        write(&copied.join(file), &fs::read(root().join(file)).unwrap());
    }
    write(&copied.join("Cargo.toml"), manifest(other).as_bytes());
    let program = folder.join("program");
    write(&program.join("src/main.rs"), PROGRAM.as_bytes());
    let manifest = format!(
        "[package]\nname = \"two-versions\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n\n[dependencies]\n\
         one = {{ package = \"rfdescent\", path = {:?}, default-features = false }}\n\
         two = {{ package = \"rfdescent\", path = \"../other\", default-features = false }}\n\n\
         [profile.release.package.\"rfdescent@{own}\"]\nopt-level = 0\n\n\
         [profile.release.package.\"rfdescent@{other}\"]\nopt-level = 0\n",
        root()
    );
    write(&program.join("Cargo.toml"), manifest.as_bytes());
    fs::copy(root().join("Cargo.lock"), program.join("Cargo.lock")).unwrap();

    let mut cargo = Cargo::build(&program);
    cargo.args(["--offline"]).run();
    let built = cargo.made.join("two-versions");
    let done = Command::new(&built).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&done.stdout), "0 0\n");

    let Ok(done) = Command::new("nm").arg(&built).output() else {
        say_skipped(format_args!("skipped: nm not found"));
        return;
    };
    let names = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(names.contains("rfdescent"), "no symbols in {}", built.display());
    let of_c: Vec<&str> = names.lines().filter(|line| line.contains(" rfd_")).collect();
    assert!(of_c.is_empty(), "functions of the C interface: {of_c:?}");
}
