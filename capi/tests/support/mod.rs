//! What tests and benchmarks of the C library share.

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

/// The shared library in the profile and with the features of this test. Cargo builds a library for
/// integration tests only if Rust can link with it, so this asks for it; where it has been built already that
/// takes a moment.
pub fn shared_library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let profile = test.parent().and_then(Path::parent).unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "-p", "rfdescent-capi", "--lib", "--locked", "--no-default-features"]);
        cargo.arg("--target-dir").arg(profile.parent().unwrap()).current_dir(root());
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        for (on, feature) in [(cfg!(feature = "cuda"), "cuda"), (cfg!(feature = "shim"), "shim")] {
            if on {
                cargo.args(["--features", feature]);
            }
        }
        let done = cargo.output().unwrap_or_else(|error| panic!("{cargo:?}: {error}"));
        assert!(done.status.success(), "{cargo:?}:\n{}", String::from_utf8_lossy(&done.stderr));
        profile.join("librfdescent.so")
    })
}
