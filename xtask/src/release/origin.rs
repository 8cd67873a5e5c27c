//! The package and the commit that a release is made of.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::command::output;
use crate::host;

/// The crate with the command.
pub(super) const PACKAGE: &str = "afresh-cli";

/// Seconds since 1970 of the last commit, which all packages have as their time;
/// `SOURCE_DATE_EPOCH` overrides it.
pub(super) fn time() -> Result<String> {
    if let Ok(time) = std::env::var("SOURCE_DATE_EPOCH") {
        ensure!(time.parse::<u64>().is_ok(), "SOURCE_DATE_EPOCH is {time:?}, not a number");
        return Ok(time);
    }
    let mut git = Command::new("git");
    git.current_dir(host::repository()).args(["log", "-1", "--format=%ct"]);
    output(&mut git).context("without git, SOURCE_DATE_EPOCH has to be set")
}
