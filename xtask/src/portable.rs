//! `cargo xtask portable`: the backend for systems other than Linux, as far as Linux can test it.
//!
//! It checks that `afresh` with Wasm guests compiles for macOS and Windows, and runs its tests over
//! that backend on this host. No C is compiled for the other systems, because a check links
//! nothing: the compiler of C code in dependencies is replaced by `true`.

use std::process::{Command, ExitCode};

use anyhow::{Result, bail};

use crate::command::{find, run};
use crate::host;

/// Targets other than Linux that must compile.
const TARGETS: [&str; 2] = ["aarch64-apple-darwin", "x86_64-pc-windows-gnu"];

/// `cargo xtask portable`
pub(crate) fn main(arguments: &[String]) -> Result<ExitCode> {
    let check_only = match arguments {
        [] => false,
        [only] if only == "--check" => true,
        [argument, ..] => {
            bail!("unknown argument {argument:?}; usage: cargo xtask portable [--check]")
        }
    };
    for target in TARGETS {
        check(target)?;
    }
    if !check_only {
        test()?;
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

/// Runs the tests of Wasm guests over the portable backend.
fn test() -> Result<()> {
    let mut cargo = Command::new("cargo");
    cargo
        .current_dir(host::repository())
        .args(["test", "--locked", "-p", "afresh-wasm", "--test", "portable"])
        .env("AFRESH_PORTABLE", "1")
        .env("CARGO_TARGET_DIR", host::target_folder().join("portable"));
    run(&mut cargo)
}
