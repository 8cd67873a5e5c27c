//! `afresh completions` and `afresh man`: shell completions and manual pages, generated from the
//! arguments.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, CommandFactory};
use clap_complete::{Shell, generate};

#[derive(Debug, Args)]
pub(crate) struct CompletionArguments {
    /// Shell to generate completions for.
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArguments {
    /// Directory for one page per command, created if missing. Without it, the main page is written
    /// to standard output.
    dir: Option<PathBuf>,
}

pub(crate) fn completions(arguments: &CompletionArguments) -> anyhow::Result<ExitCode> {
    // Buffered: the generator would panic if the reader closes the output.
    let mut text = Vec::new();
    generate(arguments.shell, &mut crate::Cli::command(), "afresh", &mut text);
    std::io::stdout().write_all(&text)?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn man(arguments: &ManArguments) -> anyhow::Result<ExitCode> {
    let command = crate::Cli::command();
    match &arguments.dir {
        Some(dir) => {
            std::fs::create_dir_all(dir)
                .with_context(|| format!("cannot create {}", dir.display()))?;
            clap_mangen::generate_to(command, dir)
                .with_context(|| format!("cannot write to {}", dir.display()))?;
        }
        None => {
            let mut text = Vec::new();
            clap_mangen::Man::new(command).render(&mut text)?;
            std::io::stdout().write_all(&text)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
