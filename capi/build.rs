//! Names the shared library after the version of its C ABI.

#[path = "src/abi_version.rs"]
mod abi_version;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src/abi_version.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "linux") {
        let name = format!("librfdescent.so.{}", abi_version::RFD_ABI_VERSION);
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{name}");
    }
}
