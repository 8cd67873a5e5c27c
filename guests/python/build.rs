//! Gives the Python guest the stack that its interpreter needs.

fn main() {
    // Imports nest several hundred Rust frames deep; the linker's default of 1 MiB overflows.
    println!("cargo::rustc-link-arg-cdylib=-zstack-size=8388608");
    println!("cargo::rerun-if-changed=build.rs");
}
