//! `cargo xtask miri`: the engine's bookkeeping in the interpreter, over the pretend kernel of
//! `sys`.
//!
//! It finds undefined behaviour that no test on hardware can: a pointer that is used outside its
//! allocation, a race, a read of uninitialised memory. Miri comes with the nightly toolchain, which
//! is installed when it is missing; a host without it prints the reason, and skips.

use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Result, bail};

use crate::command::{find, run, succeeds};
use crate::host;

/// The arguments that choose the tests: those of the packages that reach memory by raw pointers.
const TESTS: [&[&str]; 3] = [
    &["-p", "afresh-memory", "--lib"],
    &["-p", "afresh-memory", "--test", "simulated_tracker"],
    &["-p", "afresh-frames", "--lib"],
];

/// `cargo xtask miri`
pub(crate) fn main(arguments: &[String]) -> Result<ExitCode> {
    if let Some(argument) = arguments.first() {
        bail!("unknown argument {argument:?}; usage: cargo xtask miri");
    }
    install()?;
    all().map(|()| ExitCode::SUCCESS)
}

fn nightly() -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo"]);
    command
}

/// Makes sure that Miri is installed.
pub(crate) fn install() -> Result<()> {
    if find("rustup").is_none() {
        bail!("Miri needs rustup, which brings the nightly toolchain; install rustup first");
    }
    if !succeeds(nightly().args(["miri", "--version"])) {
        run(Command::new("rustup").args([
            "toolchain",
            "install",
            "nightly",
            "--profile",
            "minimal",
            "--component",
            "miri",
            "--component",
            "rust-src",
        ]))?;
    }
    // The standard library for Miri; with `CI` set it installs missing parts without a question.
    run(nightly().args(["miri", "setup"]).env("CI", "1"))
}

/// Runs the tests. Miri is there.
pub(crate) fn all() -> Result<()> {
    for tests in TESTS {
        let start = Instant::now();
        let mut command = nightly();
        command
            .current_dir(host::repository())
            .args(["miri", "test", "--locked", "--quiet"])
            .args(tests)
            .env("CARGO_TARGET_DIR", host::target_folder().join("miri"))
            // The suites read the processor's features and the time.
            .env("MIRIFLAGS", "-Zmiri-disable-isolation")
            .env_remove("RUSTUP_TOOLCHAIN")
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO_ENCODED_RUSTFLAGS");
        run(&mut command)?;
        println!("miri {}: {:.0} s", tests.join(" "), start.elapsed().as_secs_f64());
    }
    Ok(())
}
