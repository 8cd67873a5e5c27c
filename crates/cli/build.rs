//! Sets `linux_guests` and `vm_guests`: the features `linux` and `vm`, on a target that has such
//! guests. On arm64 Linux both features select nothing, so the command of afresh builds there with
//! the same features: docs/platforms.md.

use std::env::{var, var_os};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |key: &str, value: &str| var(key).is_ok_and(|set| set == value);
    let able = is("CARGO_CFG_TARGET_OS", "linux") && is("CARGO_CFG_TARGET_ARCH", "x86_64");
    for (name, feature) in
        [("linux_guests", "CARGO_FEATURE_LINUX"), ("vm_guests", "CARGO_FEATURE_VM")]
    {
        println!("cargo::rustc-check-cfg=cfg({name})");
        if able && var_os(feature).is_some() {
            println!("cargo::rustc-cfg={name}");
        }
    }
}
