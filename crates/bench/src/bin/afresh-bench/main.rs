//! The `afresh-bench` command: the figures of afresh and its rivals, measured in the same run.
//!
//! Rows are written to standard output, everything else to standard error. Exit codes: 0 success; 1
//! a benchmark failed; 2 wrong usage; 3 `compare` found a slower row.

mod demo;
mod output;
mod tables;

use std::path::PathBuf;
use std::process::ExitCode;

use afresh_bench::report::{self, Comparison, Report};
use clap::{Args, Parser, Subcommand};

use output::Format;

/// Run benchmarks, with rivals in the same run.
#[derive(Debug, Parser)]
#[command(name = "afresh-bench", version)]
struct Cli {
    /// Output format.
    #[arg(short = 'o', long = "output", value_enum, global = true, default_value = "text")]
    output: Format,
    /// Folder for compiled guests, which the tables of a report share.
    #[arg(long, global = true, hide = true, value_name = "DIR")]
    code_cache: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Table(Box<tables::Table>),
    /// Run every table and write one page of the results.
    Report(ReportArguments),
    /// Compare two reports, with exit code 3 if a row of the second one is slower.
    Compare {
        /// Directory of the earlier report.
        before: PathBuf,
        /// Directory of the later report.
        after: PathBuf,
    },
    /// Open a snapshot of the table `density`, answer once and wait for the end of the input.
    #[command(hide = true)]
    DensityProcess {
        /// Directory of the store and of the compiled module.
        directory: PathBuf,
        /// Socket of an image server.
        socket: Option<PathBuf>,
    },
    /// Plant a secret in a JavaScript engine, and show that a reset removes it.
    Demo(demo::Arguments),
}

#[derive(Debug, Args)]
struct ReportArguments {
    /// Directory for `index.html` and `report.json`.
    directory: PathBuf,
    /// Run rough versions of all tables, within four minutes.
    #[arg(long)]
    quick: bool,
    /// Run only these tables.
    #[arg(long, value_name = "TABLE,…", value_delimiter = ',')]
    only: Vec<String>,
    /// Command of afresh, which the table `serve` starts as a server.
    #[arg(long, value_name = "COMMAND")]
    afresh: Option<PathBuf>,
    /// Write the page of an earlier run again, without measuring.
    #[arg(long, conflicts_with_all = ["quick", "only", "afresh"])]
    redraw: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Some(folder) = &cli.code_cache {
        afresh_bench::code_cache::set_folder(folder);
    }
    let result = match &cli.command {
        Command::Table(table) => tables::run(table, cli.output),
        Command::Report(arguments) => write_report(arguments),
        Command::Compare { before, after } => compare(before, after),
        Command::DensityProcess { directory, socket } => {
            afresh_bench::density::process(directory, socket.as_deref()).map(|()| ExitCode::SUCCESS)
        }
        Command::Demo(arguments) => demo::run(arguments, cli.output),
    };
    result.unwrap_or_else(|error| {
        eprintln!("afresh-bench: {error:#}");
        ExitCode::FAILURE
    })
}

/// Measures all tables, or those that were chosen, and writes the page.
fn write_report(arguments: &ReportArguments) -> anyhow::Result<ExitCode> {
    let directory = &arguments.directory;
    let report = if arguments.redraw {
        Report::read(directory)?
    } else {
        let options = report::RunOptions {
            quick: arguments.quick,
            only: arguments.only.clone(),
            afresh: arguments.afresh.clone(),
        };
        std::fs::create_dir_all(directory)?;
        report::run(&std::env::current_exe()?, directory, &options)?
    };
    report.write(directory)?;
    let failed: Vec<&str> = report.failed().collect();
    println!("{}", directory.join("index.html").display());
    if !failed.is_empty() {
        eprintln!("afresh-bench: these tables failed: {}", failed.join(", "));
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the rows that changed between two reports.
fn compare(before: &std::path::Path, after: &std::path::Path) -> anyhow::Result<ExitCode> {
    let comparison = Comparison::new(&Report::read(before)?, &Report::read(after)?);
    output::say!("{comparison}")?;
    Ok(if comparison.has_slower() { ExitCode::from(3) } else { ExitCode::SUCCESS })
}
