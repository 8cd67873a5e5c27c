//! `afresh run`: warm a guest and call it, each time from the warm state.

use std::io::{Read, Write};
use std::process::ExitCode;
use std::time::Instant;

use afresh_wasm::{Output, Val, WarmReport, parse_arguments, show_value};
use anyhow::Context;
use clap::Args;
use serde_json::{Value, json};

use crate::guest::{GuestArguments, Kind};
use crate::output::Format;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    guest: GuestArguments,
    /// The exported function to call.
    #[arg(long, value_name = "F", default_value = "_start")]
    call: String,
    /// Bytes for a guest that handles bytes: text, `@FILE`, or `-` for standard input.
    #[arg(long, value_name = "TEXT|@FILE|-")]
    input: Option<String>,
    /// How many times to call.
    #[arg(short = 'n', long, default_value_t = 1)]
    repeat: u64,
    /// Print what warming found and what the calls cost, to standard error.
    #[arg(long)]
    report: bool,
    /// Arguments of the function.
    #[arg(allow_hyphen_values = true, trailing_var_arg = true)]
    arguments: Vec<String>,
}

pub(crate) fn read_input(input: &str) -> anyhow::Result<Vec<u8>> {
    if input == "-" {
        let mut bytes = Vec::new();
        std::io::stdin().read_to_end(&mut bytes).context("reading standard input")?;
        return Ok(bytes);
    }
    match input.strip_prefix('@') {
        Some(path) => std::fs::read(path).with_context(|| format!("cannot read {path}")),
        None => Ok(input.as_bytes().to_vec()),
    }
}

/// What a guest answered.
enum Answer {
    Values(Vec<Val>),
    Bytes(Vec<u8>),
}

impl Answer {
    fn json(&self) -> Value {
        match self {
            Answer::Values(values) => values.iter().map(show_value).collect(),
            Answer::Bytes(bytes) => Value::String(String::from_utf8_lossy(bytes).into_owned()),
        }
    }

    fn print(&self, out: &mut dyn Write) -> std::io::Result<()> {
        match self {
            Answer::Values(values) => {
                for value in values {
                    writeln!(out, "{}", show_value(value))?;
                }
                Ok(())
            }
            Answer::Bytes(bytes) => {
                out.write_all(bytes)?;
                if bytes.last() == Some(&b'\n') { Ok(()) } else { writeln!(out) }
            }
        }
    }
}

pub(crate) fn run(arguments: &Arguments, format: Format) -> anyhow::Result<ExitCode> {
    let mut times = Vec::new();
    let mut out = std::io::stdout().lock();
    let mut show = |answer: &Answer, started: Instant, pages: Option<usize>| {
        let us = started.elapsed().as_secs_f64() * 1e6;
        times.push(us);
        match format {
            Format::Text => answer.print(&mut out),
            Format::Json => {
                let line = json!({"result": answer.json(), "us": us, "write_set_pages": pages});
                writeln!(out, "{line}")
            }
        }
    };
    match arguments.guest.read()? {
        Kind::Module(wasm) => {
            let warm = arguments.guest.warm(&wasm, Output::Inherit)?;
            if arguments.report {
                print_report(warm.report());
            }
            let input = arguments.input.as_deref().map(read_input).transpose()?;
            let bytes = input.as_ref().map(|_| warm.bytes_entry(&arguments.call)).transpose()?;
            let values = match input {
                None => {
                    let ty = warm.function_type(&arguments.call)?;
                    parse_arguments(&ty, &arguments.arguments)
                        .with_context(|| format!("calling {}", arguments.call))?
                }
                Some(_) => Vec::new(),
            };
            for _ in 0..arguments.repeat {
                let started = Instant::now();
                let mut lease = warm.lease()?;
                let answer = match (&bytes, &input) {
                    (Some(entry), Some(input)) => Answer::Bytes(lease.call_bytes(entry, input)?),
                    _ => Answer::Values(lease.call(&arguments.call, &values)?),
                };
                drop(lease);
                let pages = warm.pool_stats().resident_bytes / afresh_memory::PAGE_SIZE;
                show(&answer, started, Some(pages))?;
            }
        }
        Kind::Component(wasm) => {
            let warm = arguments.guest.component(&wasm, Output::Inherit)?;
            for _ in 0..arguments.repeat {
                let started = Instant::now();
                let answer = warm.lease()?.call_text(&arguments.call, &arguments.arguments)?;
                show(&Answer::Bytes(answer.into_bytes()), started, None)?;
            }
        }
        Kind::Elf(elf) => {
            let input = match &arguments.input {
                Some(input) => read_input(input)?,
                None => arguments.arguments.join(" ").into_bytes(),
            };
            let mut sandbox = arguments.guest.sandbox(&elf)?;
            for _ in 0..arguments.repeat {
                let started = Instant::now();
                let answer = sandbox.run(&input)?;
                show(&Answer::Bytes(answer), started, None)?;
            }
        }
    }
    if arguments.report && !times.is_empty() {
        times.sort_by(f64::total_cmp);
        eprintln!(
            "{} calls, each from the warm state: median {:.2} us, fastest {:.2} us, slowest {:.2} us",
            times.len(),
            times[times.len() / 2],
            times[0],
            times[times.len() - 1],
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Says how the guest was warmed.
pub(crate) fn print_report(report: &WarmReport) {
    eprintln!("mode      {}", report.mode.name());
    if let Some(why) = &report.why_fresh {
        eprintln!("          not reset: {why}");
    }
    eprintln!("strategy  {}", report.strategy);
    eprintln!(
        "memory    {:.1} MiB, of which the image stores {:.1} MiB",
        report.memory_bytes as f64 / f64::from(1 << 20),
        report.image_bytes as f64 / f64::from(1 << 20)
    );
    eprintln!("restores  {} globals, tables and segments", report.restored_items);
    eprintln!(
        "entropy   {}",
        if report.reseeds {
            "fresh for every clone (afresh_reseed)"
        } else {
            "clones share the warm state's (no afresh_reseed export)"
        }
    );
    eprintln!("compiled  in {:.0?}, warmed in {:.0?}", report.compile, report.warm_up);
}
