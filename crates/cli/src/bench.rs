//! `afresh bench`: tables of figures, each beside its rivals in the same run.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use afresh_bench::{Options, Row, arena, js, steady, wasm};
use anyhow::Context;
use clap::{Args, Subcommand};
use serde_json::json;

use crate::output::Format;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    table: Table,
}

#[derive(Debug, Args)]
struct Common {
    /// A rough look, within a minute.
    #[arg(long)]
    quick: bool,
    /// Only rows whose case or strategy contains this.
    #[arg(long)]
    filter: Option<String>,
}

impl Common {
    fn options(&self) -> Options {
        let options = if self.quick { Options::quick() } else { Options::full() };
        Options { filter: self.filter.clone(), ..options }
    }
}

#[derive(Debug, Subcommand)]
enum Table {
    /// Pristine calls of Wasm guests, beside wasmtime's own best configurations.
    Wasm {
        #[command(flatten)]
        common: Common,
        /// A module of your own instead of the built-in ones.
        #[arg(long, requires = "call")]
        module: Option<PathBuf>,
        /// Its export to call: without arguments or results, or with --input.
        #[arg(long)]
        call: Option<String>,
        /// Bytes for a guest that handles bytes, warmed by its export `warm`.
        #[arg(long)]
        input: Option<String>,
        /// The JavaScript guest for `js/request`.
        #[arg(long, default_value = "target/guests/js.wasm")]
        js: PathBuf,
    },
    /// Dirtying and resetting a plain slot.
    Arena {
        #[command(flatten)]
        common: Common,
    },
    /// Micro-VMs: call and reset, by memory size and dirty pages.
    Vm {
        #[command(flatten)]
        common: Common,
        /// The `dirty` sample guest.
        #[arg(long, default_value = "target/guests/vm/dirty")]
        guest: PathBuf,
    },
    /// Makes N calls of the small module and nothing else, for strace to look at.
    #[command(hide = true)]
    Steady {
        /// How many.
        calls: u64,
        /// Of which function.
        #[arg(default_value = steady::DIRTYING)]
        function: String,
    },
}

/// Prints rows as they come.
fn printer(format: Format) -> impl FnMut(&Row) {
    let mut last = String::new();
    move |row| {
        let mut out = std::io::stdout().lock();
        // Nobody reads on: nothing to report to.
        let _ = match format {
            Format::Json => writeln!(out, "{}", row.json()),
            Format::Text => {
                if last != row.case {
                    last.clone_from(&row.case);
                    let _ = writeln!(
                        out,
                        "\n{:<18} {:<28} {:>3} {:>12} {:>12} {:>12}",
                        row.case, "strategy", "thr", "median us", "min us", "p99 us"
                    );
                }
                writeln!(
                    out,
                    "{:<18} {:<28} {:>3} {:>12.3} {:>12.3} {:>12.3}",
                    "", row.strategy, row.threads, row.median, row.min, row.p99
                )
            }
        };
    }
}

fn steady_state(format: Format) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("finding this program")?;
    let steady = steady::measure(&program, &["bench", "steady"])?;
    match format {
        Format::Json => println!(
            "{}",
            json!({
                "table": "steady", "case": "small/scatter64", "calls": steady.calls,
                "faults": steady.faults, "system_calls": steady.system_calls,
            })
        ),
        Format::Text => println!(
            "\nsteady state: {} calls of small/scatter64 took {} page faults and {} system calls",
            steady.calls,
            steady.faults,
            steady.system_calls.map_or("an unknown number of".to_owned(), |n| n.to_string()),
        ),
    }
    Ok(())
}

pub(crate) fn run(arguments: &Arguments, format: Format) -> anyhow::Result<ExitCode> {
    let mut print = printer(format);
    match &arguments.table {
        Table::Wasm { common, module, call, input, js: js_guest } => {
            let options = common.options();
            if let (Some(path), Some(call)) = (module, call) {
                let bytes = std::fs::read(path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                let stem = path.file_stem().unwrap_or_default().to_string_lossy();
                let case = format!("{stem}/{call}");
                match input {
                    Some(input) => {
                        js::request(&bytes, &case, input.as_bytes(), &options, &mut print)?
                    }
                    None => wasm::module(&bytes, call, &case, &options, &mut print)?,
                }
                return Ok(ExitCode::SUCCESS);
            }
            wasm::all(&options, &mut print)?;
            match std::fs::read(js_guest) {
                Ok(bytes) => js::request(&bytes, "js/request", js::REQUEST, &options, &mut print)?,
                Err(error) => eprintln!(
                    "js/request left out: {}: {error}; `cargo xtask guests --only js` builds it",
                    js_guest.display()
                ),
            }
            steady_state(format)?;
        }
        Table::Arena { common } => arena::all(&common.options(), &mut print)?,
        Table::Vm { common, guest } => {
            let elf = std::fs::read(guest).with_context(|| {
                format!("cannot read {}; `cargo xtask guests --only vm` builds it", guest.display())
            })?;
            let mut options = afresh_vm::bench::BenchOptions::default();
            options.filter = common.filter.clone();
            afresh_vm::bench::run(&elf, &options, &mut std::io::stdout())?;
        }
        Table::Steady { calls, function } => {
            steady::run(*calls, function)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
