//! Makes the device code: machine code where an nvcc is found, else the PTX that comes with the crate serves
//! alone. For tests also the kernels as CPU code.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Architectures that get machine code of their own; the last one also PTX, for newer GPUs.
const ARCHITECTURES: [&str; 7] = ["75", "80", "86", "89", "90", "100", "120"];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=kernels");
    println!("cargo:rustc-check-cfg=cfg(rfd_fatbin)");
    println!("cargo:rerun-if-env-changed=RFDESCENT_NO_NVCC");
    if env::var_os("CARGO_FEATURE_CUDA").is_some() {
        fatbin();
    }
    if env::var_os("CARGO_FEATURE_SHIM").is_some() {
        shim();
    }
}

/// Compiles a fat binary, or leaves a note why there is none. Never an error: the PTX does everything too.
fn fatbin() {
    if env::var_os("RFDESCENT_NO_NVCC").is_some_and(|value| value != "0" && !value.is_empty()) {
        return;
    }
    for variable in ["NVCC", "CUDA_HOME", "CUDA_PATH", "PATH", "VIRTUAL_ENV"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    let Some(nvcc) = find_nvcc() else { return };
    println!("cargo:rerun-if-changed={}", nvcc.display());
    let output = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("rfd_step.fatbin");
    // Without contraction, and by default without flush to zero and with IEEE division and square root: a
    // step has the same bits everywhere.
    let mut command = Command::new(&nvcc);
    command.args(["--fatbin", "--fmad=false", "-std=c++17", "-O3", "kernels/rfd_step.cu", "-o"]).arg(&output);
    // Each kernel's 29 KB of parameters lie in the file as zeros: 19 MB as they are, 1.6 MB compressed.
    command.arg("-Xfatbin=-compress-all");
    for architecture in supported(&nvcc) {
        command.arg(format!("-gencode=arch=compute_{architecture},code=sm_{architecture}"));
    }
    if let Some(includes) = pip_includes(&nvcc) {
        command.arg("-I").arg(includes);
    }
    match command.output() {
        Ok(done) if done.status.success() => println!("cargo:rustc-cfg=rfd_fatbin"),
        Ok(done) => println!(
            "cargo:warning={} could not compile the kernels, so their PTX is used (RFDESCENT_NO_NVCC=1 silences this): {}",
            nvcc.display(),
            String::from_utf8_lossy(&done.stderr).lines().take(5).collect::<Vec<_>>().join(" | ")
        ),
        Err(error) => println!("cargo:warning={}: {error}; the kernels' PTX is used", nvcc.display()),
    }
}

/// Those of the architectures that this nvcc knows.
fn supported(nvcc: &Path) -> Vec<&'static str> {
    let known =
        Command::new(nvcc).arg("--list-gpu-arch").output().map(|done| done.stdout).unwrap_or_default();
    let known = String::from_utf8_lossy(&known).into_owned();
    ARCHITECTURES
        .into_iter()
        .filter(|architecture| known.lines().any(|line| line.trim() == format!("compute_{architecture}")))
        .collect()
}

/// From `NVCC`, a toolkit's folder, the search path, or pip's wheels, in this order.
fn find_nvcc() -> Option<PathBuf> {
    let name = if cfg!(windows) { "nvcc.exe" } else { "nvcc" };
    let named = env::var_os("NVCC").map(PathBuf::from);
    let toolkits = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .filter_map(env::var_os)
        .map(|folder| PathBuf::from(folder).join("bin").join(name));
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).map(|folder| folder.join(name)).collect::<Vec<_>>();
    named.into_iter().chain(toolkits).chain(on_path).find(|nvcc| nvcc.is_file()).or_else(pip_nvcc)
}

/// In the packages of the Python that is in use.
fn pip_nvcc() -> Option<PathBuf> {
    let script =
        "import site, sysconfig; print('\\n'.join({sysconfig.get_path('purelib'), *site.getsitepackages()}))";
    let done = Command::new("python3").args(["-c", script]).output().ok()?;
    let folders = String::from_utf8_lossy(&done.stdout).into_owned();
    folders.lines().map(|folder| Path::new(folder).join("nvidia/cu13/bin/nvcc")).find(|nvcc| nvcc.is_file())
}

/// The headers beside an nvcc of pip's wheels, which it does not look for itself.
fn pip_includes(nvcc: &Path) -> Option<PathBuf> {
    let includes = nvcc.parent()?.parent()?.join("include");
    includes.is_dir().then_some(includes)
}

/// The kernels as C++ for the CPU, for tests.
#[cfg(feature = "shim")]
fn shim() {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++20")
        .opt_level(2)
        .pic(true)
        // Those worth reading are shown where the shim's own Makefile builds it.
        .warnings(false)
        // As on a device: every operation rounded on its own. Memory is addressed by number, in any format.
        // Fibers jump between stacks, which the hardened longjmp forbids.
        .flag("-ffp-contract=off")
        .flag("-fno-strict-aliasing")
        .flag("-U_FORTIFY_SOURCE")
        .flag("-Wno-unknown-pragmas")
        .flag("-pthread")
        .files(["kernels/shim/kernels.cpp", "kernels/shim/block.cpp"]);
    if let Err(error) = build.try_compile("rfd_shim") {
        println!(
            "cargo:error=the feature `shim` compiles the kernels for the CPU and needs g++ or clang++ with C++20 (Debian: \
             apt-get install g++; Fedora: dnf install gcc-c++): {error}"
        );
        std::process::exit(1);
    }
}

#[cfg(not(feature = "shim"))]
fn shim() {}
