//! Links every sample as a static position-independent executable without the C library.

fn main() {
    for argument in [
        "-nostartfiles",
        "-nostdlib",
        "-static-pie",
        "-Wl,--no-dynamic-linker",
        "-Wl,-z,max-page-size=4096",
        "-Wl,-z,noexecstack",
        "-Wl,--build-id=none",
    ] {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
    // zlib as libz-sys builds it from its bundled sources. Only the archive is used: the crate
    // itself needs the standard library.
    if let Ok(root) = std::env::var("DEP_Z_ROOT") {
        println!("cargo::rustc-link-search=native={root}/lib");
        println!("cargo::rustc-link-search=native={root}/build");
    }
    println!("cargo::rerun-if-changed=build.rs");
}
