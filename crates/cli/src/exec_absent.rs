//! `afresh exec` in a build without Linux programs: an error with the reason.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Args;

use crate::Settings;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

pub(crate) fn run(arguments: &Arguments, _: &Settings) -> anyhow::Result<ExitCode> {
    let program = arguments.words.iter().find(|word| *word != "--").cloned().unwrap_or_default();
    let reason = afresh::Kind::Program.missing_reason().unwrap_or_default();
    anyhow::bail!("cannot run {}: {reason}", program.display())
}
