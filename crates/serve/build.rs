//! Sets `linux_guests`: the feature `linux`, on a target that has such guests. On arm64
//! Linux it selects nothing, so the command of afresh builds there with the same features:
//! docs/platforms.md.

use std::env::{var, var_os};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(linux_guests)");
    let is = |key: &str, value: &str| var(key).is_ok_and(|set| set == value);
    let able = is("CARGO_CFG_TARGET_OS", "linux") && is("CARGO_CFG_TARGET_ARCH", "x86_64");
    if able && var_os("CARGO_FEATURE_LINUX").is_some() {
        println!("cargo::rustc-cfg=linux_guests");
    }
}
