//! What tests and benchmarks of the C library share.
#![allow(dead_code)] // each of them uses a part

use std::fmt::Arguments;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

#[path = "../../src/abi_version.rs"]
mod abi_version;

/// The repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The name that programs look for when they start.
pub fn soname() -> String {
    format!("librfdescent.so.{}", abi_version::RFD_ABI_VERSION)
}

/// Straight to stderr: the test runner shows what passing tests print only when asked.
pub fn say_skipped(what: Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{what}");
}

/// A call of cargo in a folder, in the profile of this test and with what has been compiled for it.
pub struct Cargo {
    command: Command,
    /// Where it leaves what it makes.
    pub made: PathBuf,
}

impl Cargo {
    pub fn build(folder: &Path) -> Self {
        let test = std::env::current_exe().unwrap();
        let made = test.parent().and_then(Path::parent).unwrap().to_path_buf();
        let mut command = Command::new(env!("CARGO"));
        command.arg("build").arg("--target-dir").arg(made.parent().unwrap()).current_dir(folder);
        if made.ends_with("release") {
            command.arg("--release");
        }
        Self { command, made }
    }

    pub fn args<'a>(&mut self, args: impl IntoIterator<Item = &'a str>) -> &mut Self {
        self.command.args(args);
        self
    }

    pub fn run(&mut self) {
        let done = self.command.output().unwrap_or_else(|error| panic!("{:?}: {error}", self.command));
        assert!(done.status.success(), "{:?}:\n{}", self.command, String::from_utf8_lossy(&done.stderr));
    }
}

/// The shared library in the profile and with the features of this test. Cargo builds a library for
/// integration tests only if Rust can link with it, so this asks for it; where it has been built already that
/// takes a moment.
pub fn shared_library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let mut cargo = Cargo::build(root());
        cargo.args(["-p", "rfdescent-capi", "--lib", "--locked", "--no-default-features"]);
        for (on, feature) in [(cfg!(feature = "cuda"), "cuda"), (cfg!(feature = "shim"), "shim")] {
            if on {
                cargo.args(["--features", feature]);
            }
        }
        cargo.run();
        cargo.made.join("librfdescent.so")
    })
}
