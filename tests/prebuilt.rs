//! The device code that comes with the crate belongs to the kernels' sources.

use std::fs;
use std::path::{Path, PathBuf};

/// All sources of the kernels but the shim's.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if !path.ends_with("kernels/shim") {
                sources(&path, found);
            }
        } else if path.extension().is_some_and(|end| end == "cu" || end == "cuh" || end == "h") {
            found.push(path);
        }
    }
}

const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a, of 64 bits, without what a checkout on Windows adds to line ends.
fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    let bytes = bytes.iter().filter(|&&byte| byte != b'\r');
    bytes.fold(hash, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// As scripts/build-ptx computes it.
fn sources_hash(kernels: &Path) -> String {
    let mut found = Vec::new();
    sources(kernels, &mut found);
    let name = |path: &PathBuf| path.strip_prefix(kernels).unwrap().to_str().unwrap().replace('\\', "/");
    let mut named: Vec<(String, PathBuf)> = found.into_iter().map(|path| (name(&path), path)).collect();
    named.sort();
    let mut hash = FNV_START;
    for (name, path) in named {
        for part in [name.as_bytes(), b"\0", &fs::read(path).unwrap(), b"\0"] {
            hash = fnv(hash, part);
        }
    }
    format!("{hash:016x}")
}

#[test]
fn the_device_code_was_made_from_the_sources() {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let hash = sources_hash(&kernels);
    for file in fs::read_dir(kernels.join("prebuilt")).unwrap() {
        let file = file.unwrap().path();
        // Text, or a line of it before machine code.
        let content = fs::read(&file).unwrap();
        let line = content.split(|&byte| byte == b'\n').next().unwrap_or_default();
        let line = String::from_utf8_lossy(line);
        assert!(
            line.contains(&hash),
            "the kernels' sources have the hash {hash}, {} begins with\n  {line}\n\
             run scripts/build-ptx and commit the files",
            file.display()
        );
    }
}

#[test]
fn the_machine_code_was_made_from_the_ptx() {
    let prebuilt = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/prebuilt");
    let mut compared = 0;
    for file in fs::read_dir(&prebuilt).unwrap() {
        let file = file.unwrap().path();
        if file.extension().is_some_and(|end| end == "ptx") {
            continue;
        }
        let ptx = fs::read(file.with_extension("ptx")).unwrap();
        // All but the first line, which is another one where other parts have changed.
        let text = &ptx[ptx.iter().position(|&byte| byte == b'\n').unwrap() + 1..];
        let hash = fnv(FNV_START, text);
        let code = fs::read(&file).unwrap();
        let line = String::from_utf8_lossy(code.split(|&byte| byte == b'\n').next().unwrap_or_default());
        assert!(
            line.contains(&format!("PTX with hash {hash:016x};")),
            "the PTX beside it has the hash {hash:016x}, {} begins with\n  {line}\n\
             run scripts/build-ptx and commit the files",
            file.display()
        );
        compared += 1;
    }
    assert!(compared > 0, "no machine code in {}", prebuilt.display());
}
