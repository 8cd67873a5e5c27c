//! `cargo xtask demo`: builds the JavaScript guest and the command, and lets the command show itself.

use std::process::Command;

use anyhow::Result;

use crate::{command, guests, host};

/// Runs the demonstration; further arguments go to `afresh demo`.
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    let js = guests::named("js")?;
    guests::build(js)?;
    let root = host::repository();
    let mut build = command::cargo();
    build.current_dir(&root).args(["build", "--release", "--package", "afresh-cli"]);
    command::run(&mut build)?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(root.join("target"), Into::into);
    let mut demo = Command::new(target.join("release/afresh"));
    demo.arg("demo").arg("--js").arg(guests::path(js)).args(arguments);
    command::run(&mut demo)
}
