//! Set-up and checks for this repository, run as `cargo xtask COMMAND`.
//!
//! Every command installs what it needs and is missing, prints each external command before it runs
//! it, and names the one that failed. It depends on next to nothing, so that it compiles in seconds.

use std::process::ExitCode;

use anyhow::{Result, bail};

mod command;
mod guests;
mod host;
mod stamp;
mod wasm;

const USAGE: &str = "\
Usage: cargo xtask COMMAND

Commands:
  guests [--only NAME]   Build the guests (installing compilers and targets that are missing)
                         into target/guests; those whose inputs did not change are skipped.
                         NAME: component, js, python or sieve; may be repeated.
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(arguments: &[String]) -> Result<()> {
    match arguments.split_first().map(|(name, rest)| (name.as_str(), rest)) {
        Some(("guests", rest)) => guests::main(rest),
        Some(("help" | "--help" | "-h", _)) => {
            print!("{USAGE}");
            Ok(())
        }
        Some((other, _)) => bail!("unknown command {other:?}\n\n{USAGE}"),
        None => bail!("no command given\n\n{USAGE}"),
    }
}
