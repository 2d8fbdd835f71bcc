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

/// As scripts/build-ptx computes it: FNV-1a, of 64 bits.
fn sources_hash(kernels: &Path) -> String {
    let mut found = Vec::new();
    sources(kernels, &mut found);
    let name = |path: &PathBuf| path.strip_prefix(kernels).unwrap().to_str().unwrap().replace('\\', "/");
    let mut named: Vec<(String, PathBuf)> = found.into_iter().map(|path| (name(&path), path)).collect();
    named.sort();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for (name, path) in named {
        let text = fs::read(path).unwrap();
        let text = text.into_iter().filter(|&byte| byte != b'\r');
        for byte in name.into_bytes().into_iter().chain([0]).chain(text).chain([0]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
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
