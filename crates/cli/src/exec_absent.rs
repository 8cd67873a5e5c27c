//! `afresh exec` in a build without Linux programs: an error with the reason.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Args;

use crate::{Settings, require_programs};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The options, the program and its arguments: all of them are ignored.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

pub(crate) fn run(_: &Arguments, _: &Settings) -> anyhow::Result<ExitCode> {
    require_programs("exec")?;
    anyhow::bail!("exec: this build of afresh has no Linux programs")
}
