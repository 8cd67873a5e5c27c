//! Sets `linux_guests` and `vm_guests`: the features `linux` and `vm`, on a target that has such
//! guests. On arm64 Linux the feature `vm` selects nothing, so the command of afresh builds there
//! with the same features: docs/platforms.md. Sets `shared_images` where the pager has image
//! servers.

use std::env::{var, var_os};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |key: &str, value: &str| var(key).is_ok_and(|set| set == value);
    let on_linux = is("CARGO_CFG_TARGET_OS", "linux");
    let on_x86_64 = is("CARGO_CFG_TARGET_ARCH", "x86_64");
    let on_arm64 = is("CARGO_CFG_TARGET_ARCH", "aarch64");
    for (name, feature, is_able) in [
        ("linux_guests", "CARGO_FEATURE_LINUX", on_linux && (on_x86_64 || on_arm64)),
        ("vm_guests", "CARGO_FEATURE_VM", on_linux && on_x86_64),
    ] {
        println!("cargo::rustc-check-cfg=cfg({name})");
        if is_able && var_os(feature).is_some() {
            println!("cargo::rustc-cfg={name}");
        }
    }
    println!("cargo::rustc-check-cfg=cfg(shared_images)");
    println!("cargo::rerun-if-env-changed=AFRESH_PORTABLE");
    if is("CARGO_CFG_TARGET_OS", "linux") && !is("AFRESH_PORTABLE", "1") {
        println!("cargo::rustc-cfg=shared_images");
    }
}
