//! `cargo xtask portable`: the library with Wasm guests compiles for macOS and Windows.
//!
//! No C is compiled for them, because a check links nothing: the compiler of C code in dependencies
//! is replaced by `true`.

use std::process::{Command, ExitCode};

use anyhow::{Result, bail};

use crate::command::{find, run};
use crate::host;

/// Targets other than Linux that must compile.
const TARGETS: [&str; 2] = ["aarch64-apple-darwin", "x86_64-pc-windows-gnu"];

/// `cargo xtask portable`
pub(crate) fn main(arguments: &[String]) -> Result<ExitCode> {
    if let Some(argument) = arguments.first() {
        bail!("unknown argument {argument:?}; usage: cargo xtask portable");
    }
    for target in TARGETS {
        check(target)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Compiles the library for `target`, without linking it.
fn check(target: &str) -> Result<()> {
    if find("rustup").is_some() {
        run(Command::new("rustup").args(["target", "add", target]))?;
    }
    let name = target.replace('-', "_");
    let mut cargo = Command::new("cargo");
    cargo
        .current_dir(host::repository())
        .args(["check", "--locked", "--target", target, "-p", "afresh"])
        .args(["--no-default-features", "--features", "wasm"])
        .env(format!("CC_{name}"), "true")
        .env(format!("AR_{name}"), "true")
        .env("CARGO_TARGET_DIR", host::target_folder().join("portable"));
    run(&mut cargo)
}
