//! `cargo xtask demo`: builds the JavaScript guest and a small `afresh-bench`, and runs its
//! demonstration.
//!
//! Small, because a new user waits for it with nothing built so far: Wasm guests and no more, in a
//! separate profile (`demo`, in the workspace's `Cargo.toml`).

use std::process::Command;

use anyhow::{Result, anyhow};

use crate::{command, guests, host};

/// Runs the demonstration; further arguments go to `afresh-bench demo`.
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    let js = guests::named("js")?;
    let mut build = command::cargo();
    build.current_dir(host::repository()).args(["build", "--locked", "--profile", "demo"]);
    build.args(["--package", "afresh-bench", "--no-default-features"]);
    // Side by side: each has long stretches in which one core has nothing to do.
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| guests::build(js));
        let command = command::run(&mut build);
        guest.join().map_err(|_| anyhow!("building the guest panicked"))??;
        command
    })?;
    let mut demo = Command::new(host::target_folder().join("demo/afresh-bench"));
    demo.arg("demo").arg("--js").arg(guests::path(js)).args(arguments);
    command::run(&mut demo)
}
