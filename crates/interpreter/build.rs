//! Sets `linux_guests`: the feature `linux`, on a target that has such guests: docs/platforms.md.

use std::env::{var, var_os};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(linux_guests)");
    let is = |key: &str, value: &str| var(key).is_ok_and(|set| set == value);
    let processor = ["x86_64", "aarch64"].into_iter().any(|it| is("CARGO_CFG_TARGET_ARCH", it));
    if is("CARGO_CFG_TARGET_OS", "linux") && processor && var_os("CARGO_FEATURE_LINUX").is_some() {
        println!("cargo::rustc-cfg=linux_guests");
    }
}
