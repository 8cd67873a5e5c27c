//! `afresh run`: warm a guest, or load a snapshot, and call it, each time from the warm state.

use std::io::Write;
use std::process::ExitCode;
#[cfg(linux_guests)]
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

#[cfg(linux_guests)]
use afresh::{Answer, OutputSource, OutputStream};
use afresh::{CallError, Guest, Kind, Origin};
use clap::Args;
use serde_json::json;

use crate::Settings;
use crate::guest::GuestArguments;
use crate::output::{self, Format, message};
use crate::request::{self, CallArguments};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Number of calls.
    #[arg(short = 'n', long, default_value_t = 1)]
    repeat: u64,
    /// Print the results of the warm-up and the duration of the calls to standard error.
    #[arg(long)]
    report: bool,
    #[command(flatten)]
    call: CallArguments,
    #[command(flatten)]
    guest: GuestArguments,
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let request = arguments.call.read()?;
    #[cfg(feature = "serve")]
    if let Some(asked) = crate::handler::HandlerRequest::open(&arguments.guest, &request, settings)?
    {
        return asked.run(arguments.repeat, arguments.report, settings.output);
    }
    // A single call can read the standard input of this process; several would compete for it.
    let command = request.command(arguments.repeat == 1, true);
    let guest = arguments.guest.open(&arguments.guest.options(settings, command)?)?;
    if arguments.report {
        report_warming(&guest);
    }
    let call = request.call(&guest)?;
    let mut times = Vec::new();
    // Not locked: a command writes to it as well.
    let mut out = std::io::stdout();
    for _ in 0..arguments.repeat {
        let started = Instant::now();
        #[cfg(linux_guests)]
        let asked = match guest.kind() {
            Kind::Program => match ask_program(&guest, &request)? {
                (output, Ok(())) => {
                    if output.is_empty() {
                        request.note_unread_input();
                    }
                    Ok(Answer::Bytes(output))
                }
                (output, Err(error)) => match error.exit() {
                    Some(exit) => return pass_on(exit.code, &output, ""),
                    None => Err(error),
                },
            },
            _ => guest.invoke(&call),
        };
        #[cfg(not(linux_guests))]
        let asked = guest.invoke(&call);
        if let Some(exit) = asked.as_ref().err().and_then(CallError::exit) {
            return pass_on(exit.code, exit.output, exit.messages);
        }
        let answer = asked?;
        let us = started.elapsed().as_secs_f64() * 1e6;
        times.push(us);
        match settings.output {
            Format::Text => request::print(&answer, &mut out)?,
            Format::Json => {
                let pages = (guest.kind() == Kind::Module)
                    .then(|| guest.pool_stats().resident_bytes / afresh::memory::PAGE_SIZE);
                let result = request::json(&answer);
                writeln!(out, "{}", json!({"result": result, "us": us, "write_set_pages": pages}))?;
            }
        }
    }
    #[cfg(linux_guests)]
    if arguments.report && guest.as_program().is_some() {
        report_program(&guest)?;
    }
    if arguments.report && !times.is_empty() {
        if let Some(origin) = guest.origin() {
            report_origin(origin);
        }
        output::times(times);
    }
    Ok(ExitCode::SUCCESS)
}

/// Calls a Linux program, and shows its messages meanwhile. Its input ends if it has no output,
/// because many programs first read all of their input.
#[cfg(linux_guests)]
fn ask_program(
    guest: &Guest,
    request: &request::Request<'_>,
) -> anyhow::Result<(Vec<u8>, Result<(), CallError>)> {
    let output = Arc::new(Mutex::new(Vec::new()));
    let sink = || {
        let output = Arc::clone(&output);
        move |from: OutputSource, piece: &[u8]| {
            match from.stream {
                OutputStream::Output => {
                    output.lock().unwrap_or_else(PoisonError::into_inner).extend(piece);
                }
                OutputStream::Error => drop(std::io::stderr().write_all(piece)),
                _ => {}
            }
            true
        }
    };
    let taken = || std::mem::take(&mut *output.lock().unwrap_or_else(PoisonError::into_inner));
    let input = request.program_input();
    let mut lease = guest.lease()?;
    let mut result = lease.call_streaming("", &input, sink());
    let mut answer = taken();
    if result.is_ok() && answer.is_empty() && !input.is_empty() && !guest.listens() {
        result = lease.call_streaming("", &[], sink());
        answer = taken();
    }
    Ok((answer, result))
}

/// Exits as the guest did: with its output and its exit code.
fn pass_on(code: i32, output: &[u8], messages: &str) -> anyhow::Result<ExitCode> {
    std::io::stdout().write_all(output)?;
    eprint!("{messages}");
    // The system keeps only the low byte of a code.
    Ok(ExitCode::from(code as u8))
}

/// Reports the cost of opening the snapshot.
fn report_origin(origin: &Origin) {
    let pages = origin.snapshot.pages();
    message!(
        "snapshot  {} opened in {:.1?}; {} faults fetched pages, {} of {pages} pages are present",
        origin.reference,
        origin.took,
        origin.memory.faults(),
        if origin.memory.pages().is_complete() {
            pages
        } else {
            origin.memory.touched().iter().map(|run| run.len).sum()
        },
    );
}

/// Reports the memory of a Linux program, and its system calls that are not served.
#[cfg(linux_guests)]
fn report_program(guest: &Guest) -> anyhow::Result<()> {
    let mut lease = guest.lease()?;
    let (Some(warm), Some(instance)) = (guest.as_program(), lease.as_program()) else {
        return Ok(());
    };
    let stats = instance.stats();
    message!(
        "image     {:.1} MiB, {:.1} MiB of it resident; the last reset copied {} KiB",
        stats.image as f64 / f64::from(1 << 20),
        stats.resident as f64 / f64::from(1 << 20),
        stats.copied >> 10
    );
    let mut unserved = warm.unserved().clone();
    for (number, count) in &stats.unserved {
        *unserved.entry(*number).or_default() += count;
    }
    for (number, count) in unserved {
        let times = output::counted(count, "time");
        message!("system call {number} is not served; the program made it {times}");
    }
    Ok(())
}

/// Reports the warm-up of a Wasm module.
#[cfg(feature = "wasm")]
fn report_warming(guest: &Guest) {
    let Some(report) = guest.as_module().map(afresh::wasm::Warm::report) else { return };
    message!("mode      {}", report.mode.name());
    if let Some(why) = &report.why_fresh {
        message!("          not reset: {why}");
    }
    message!("strategy  {}", report.strategy);
    message!(
        "memory    {:.1} MiB, {:.1} MiB of it stored in the image",
        report.memory_bytes as f64 / f64::from(1 << 20),
        report.image_bytes as f64 / f64::from(1 << 20)
    );
    message!("restores  {} globals, tables and segments", report.restored_items);
    message!(
        "entropy   {}",
        if report.reseeds {
            "fresh for every clone (afresh_reseed)"
        } else {
            "shared by all clones (no afresh_reseed export)"
        }
    );
    message!("compiled  in {:.0?}, warmed in {:.0?}", report.compile, report.warm_up);
}

#[cfg(not(feature = "wasm"))]
fn report_warming(_: &Guest) {}
