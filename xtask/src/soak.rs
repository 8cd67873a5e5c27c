//! `cargo xtask soak`: warm guests against plain wasmtime, for as long as it is told to.

use std::process::Command;

use anyhow::Result;

use crate::command::{cargo, run};
use crate::host;

/// `cargo xtask soak`; the program knows the arguments.
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    // Built together with its tests, so that the dependencies are those of all tests, and there already.
    run(cargo().current_dir(host::repository()).args([
        "test",
        "--workspace",
        "--all-features",
        "--locked",
        "--no-run",
        "--test",
        "suites",
    ]))?;
    let folder = host::target_folder();
    run(Command::new(folder.join("debug/afresh-proof"))
        .arg("--keep")
        .arg(folder.join("soak"))
        .args(arguments))
}
