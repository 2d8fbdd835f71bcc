//! `include/rfdescent.h` is what cbindgen makes of `capi/src`, and the shared library exports its functions,
//! no less and no more. `RFDESCENT_WRITE_HEADER=1 cargo test --release -p rfdescent-capi --test header`
//! writes the header and the list anew.

use std::collections::BTreeSet;
use std::process::Command;

const FILES: [&str; 10] = [
    "abi_version.rs",
    "status.rs",
    "threads.rs",
    "buffer.rs",
    "model.rs",
    "fit.rs",
    "statistics.rs",
    "design.rs",
    "auto_fit.rs",
    "optimizer/mod.rs",
];

const INTRODUCTION: &str = "\
/*
 * rfdescent: Random Function Descent, an optimizer whose step sizes follow from the statistics of the cost.
 *
 * Rules that hold unless a function says otherwise:
 *
 * - Functions return an rfd_status. Anything but RFD_OK is an error, whose message rfd_last_error() has.
 *   Outputs are written only on success; what was an input is as it was.
 * - Handles (rfd_model, rfd_statistics, ...) are made by the library and freed by the caller, with the
 *   _destroy function of their kind, once. A handle must not be in use then. What a function is given by
 *   pointer is not kept after it returns.
 * - Structs begin with their size: set it to sizeof before the call, or use the _init function. So a program
 *   that was compiled with an older header runs with a newer library.
 * - Texts are UTF-8 and end with 0; names of files are whatever the system takes.
 * - Callbacks must not throw, longjmp or otherwise unwind into the library.
 * - Large tensors are worked on by the calling thread and by threads of the library, as many in all as there
 *   are processors, or as RAYON_NUM_THREADS or rfd_set_threads say. Results do not depend on their number.
 *
 * Made from capi/src by cbindgen: change it there.
 */";

mod support;
use support::{root, say_skipped, shared_library, soname};

fn writing() -> bool {
    std::env::var_os("RFDESCENT_WRITE_HEADER").is_some_and(|value| value == "1")
}

/// Compares with a file of the repository, or writes it.
fn compare(file: &str, expected: &str) {
    let path = root().join(file);
    if writing() {
        std::fs::write(&path, expected).unwrap();
        return;
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default().replace("\r\n", "\n");
    if let Some((line, (new, old))) =
        expected.lines().zip(found.lines()).enumerate().find(|(_, (new, old))| new != old)
    {
        panic!(
            "{file}:{}: has\n  {old}\nbut capi/src yields\n  {new}\nRFDESCENT_WRITE_HEADER=1 cargo test --release \
             -p rfdescent-capi --test header writes it anew",
            line + 1
        );
    }
    assert_eq!(expected.len(), found.len(), "{file} is cut off or has lines too many");
}

fn generate() -> String {
    let mut config = cbindgen::Config {
        language: cbindgen::Language::C,
        header: Some(INTRODUCTION.into()),
        include_guard: Some("RFDESCENT_H".into()),
        sys_includes: vec!["stddef.h".into(), "stdint.h".into()],
        no_includes: true,
        cpp_compat: true,
        usize_is_size_t: true,
        style: cbindgen::Style::Both,
        documentation_style: cbindgen::DocumentationStyle::Doxy,
        line_length: 100,
        tab_width: 4,
        ..cbindgen::Config::default()
    };
    config.function.args = cbindgen::Layout::Auto;
    let mut builder = cbindgen::Builder::new().with_config(config);
    for file in FILES {
        builder = builder.with_src(root().join("capi/src").join(file));
    }
    let mut header = Vec::new();
    builder.generate().expect("cbindgen understands capi/src").write(&mut header);
    String::from_utf8(header).unwrap()
}

#[test]
fn the_header_is_up_to_date() {
    compare("include/rfdescent.h", &generate());
}

/// Names that are declared in the header.
fn declared() -> BTreeSet<String> {
    let header = generate();
    let mut names = BTreeSet::new();
    for (at, _) in header.match_indices('(') {
        let name: String = header[..at]
            .chars()
            .rev()
            .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .collect();
        let declaration = header[..at].rsplit('\n').next().unwrap_or_default();
        let comment = declaration.trim_start().starts_with('*');
        if name.starts_with("rfd_") && !comment {
            names.insert(name);
        }
    }
    names
}

#[test]
fn the_shared_library_exports_the_listed_functions_only() {
    let list: String = declared().iter().map(|name| format!("{name}\n")).collect();
    compare("capi/tests/exported.txt", &list);

    if !cfg!(target_os = "linux") {
        say_skipped(format_args!("skipped: exported symbols are checked on Linux"));
        return;
    }
    let library = shared_library();
    let Ok(done) = Command::new("nm").args(["-D", "--defined-only"]).arg(library).output() else {
        say_skipped(format_args!("skipped: nm not found"));
        return;
    };
    assert!(done.status.success(), "nm {}: {}", library.display(), String::from_utf8_lossy(&done.stderr));
    let exported: BTreeSet<String> = String::from_utf8_lossy(&done.stdout)
        .lines()
        .filter_map(|line| line.split_whitespace().last().map(str::to_string))
        .collect();
    assert_eq!(exported, declared(), "exported and declared functions differ");

    let Ok(done) = Command::new("readelf").arg("-d").arg(library).output() else {
        say_skipped(format_args!("skipped: readelf not found, so the soname is not checked"));
        return;
    };
    let soname = soname();
    assert!(
        String::from_utf8_lossy(&done.stdout).contains(&format!("soname: [{soname}]")),
        "the soname is not {soname}"
    );
}

/// The fuzz target compiles these files as a module of its own, with what they need.
#[test]
fn the_sources_can_be_a_module() {
    let dependencies = |manifest: &str| -> BTreeSet<String> {
        let text = std::fs::read_to_string(root().join(manifest)).unwrap();
        let section = text.split("\n[dependencies]\n").nth(1).unwrap().split("\n[").next().unwrap();
        section.lines().filter_map(|line| Some(line.split_once(" = ")?.0.to_string())).collect()
    };
    let missing: Vec<_> =
        dependencies("capi/Cargo.toml").difference(&dependencies("fuzz/Cargo.toml")).cloned().collect();
    assert!(missing.is_empty(), "fuzz/Cargo.toml lacks {missing:?}, which capi/src needs");
    let mut folders = vec![root().join("capi/src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let at = text
                .lines()
                .position(|line| !line.trim_start().starts_with("//") && line.contains("crate::"));
            assert!(at.is_none(), "{}: line {}: say `super::`", path.display(), at.unwrap_or(0) + 1);
        }
    }
}
