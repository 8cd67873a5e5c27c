//! The `afresh` command: run, verify and measure warm guests, and explain the host.
//!
//! Exit codes: 0 success; 1 the guest or a file failed; 2 wrong usage; 3 a verification found a
//! difference. Results go to standard output, everything else to standard error.

mod bench;
mod demo;
mod doctor;
mod guest;
mod output;
mod run;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use output::Format;

/// Start every run from the same memory, and pay only for what the last run changed.
#[derive(Debug, Parser)]
#[command(name = "afresh", version, about)]
struct Cli {
    /// How results are printed.
    #[arg(short = 'o', long = "output", value_enum, global = true, default_value = "text")]
    output: Format,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Warm a guest and call it.
    Run(run::Arguments),
    /// Call a guest many times and prove that every call starts from the same state.
    Verify(verify::Arguments),
    /// Measure, beside rivals, in one run.
    Bench(bench::Arguments),
    /// Plant a secret in a warm JavaScript engine, find nothing of it, and see what that costs.
    Demo(demo::Arguments),
    /// What this host offers, what it costs here, and which strategy is chosen.
    Doctor(doctor::Arguments),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match &cli.command {
        Command::Run(arguments) => run::run(arguments, cli.output),
        Command::Verify(arguments) => verify::run(arguments, cli.output),
        Command::Bench(arguments) => bench::run(arguments, cli.output),
        Command::Demo(arguments) => demo::run(arguments, cli.output),
        Command::Doctor(arguments) => doctor::run(arguments, cli.output),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("afresh: {}", describe(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, without saying twice what a message already repeats of its cause.
fn describe(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}
