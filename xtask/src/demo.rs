//! `cargo xtask demo`: builds the JavaScript guest and the command, and lets the command show itself.

use std::process::Command;

use anyhow::Result;

use crate::{command, guests, host};

/// Runs the demonstration; further arguments go to `afresh demo`.
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    let js = guests::named("js")?;
    guests::build(js)?;
    let mut build = command::cargo();
    build.current_dir(host::repository()).args(["build", "--release", "--package", "afresh-cli"]);
    command::run(&mut build)?;
    let mut demo = Command::new(host::target_folder().join("release/afresh"));
    demo.arg("demo").arg("--js").arg(guests::path(js)).args(arguments);
    command::run(&mut demo)
}
