//! `afresh run`: warm a guest, or take a warm one out of a snapshot, and call it, each time from the warm
//! state.

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use afresh_wasm::{Output, WarmReport};
use clap::Args;
use serde_json::json;

use crate::guest::{GuestArguments, Ready};
use crate::output::Format;
use crate::request::{Answer, CallArguments};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    guest: GuestArguments,
    /// How many times to call.
    #[arg(short = 'n', long, default_value_t = 1)]
    repeat: u64,
    /// Print what warming found and what the calls cost, to standard error.
    #[arg(long)]
    report: bool,
    #[command(flatten)]
    call: CallArguments,
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
    let opened = arguments.guest.open(Output::Inherit)?;
    match opened.ready {
        Ready::Module(warm) => {
            if arguments.report {
                print_report(warm.report());
            }
            let request = arguments.call.request(&warm)?;
            for _ in 0..arguments.repeat {
                let started = Instant::now();
                let mut lease = warm.lease()?;
                let answer = request.ask(&mut lease)?;
                drop(lease);
                let pages = warm.pool_stats().resident_bytes / afresh_memory::PAGE_SIZE;
                show(&answer, started, Some(pages))?;
            }
        }
        Ready::Component(warm) => {
            let call = &arguments.call;
            for _ in 0..arguments.repeat {
                let started = Instant::now();
                let answer = warm.lease()?.call_text(&call.call, &call.arguments)?;
                show(&Answer::Bytes(answer.into_bytes()), started, None)?;
            }
        }
        Ready::Sandbox(mut sandbox) => {
            let input = arguments.call.bytes()?;
            for _ in 0..arguments.repeat {
                let started = Instant::now();
                let answer = sandbox.run(&input)?;
                show(&Answer::Bytes(answer), started, None)?;
            }
        }
    }
    if arguments.report && !times.is_empty() {
        if let Some(thawed) = &opened.thawed {
            thawed.report();
        }
        let first = times[0];
        times.sort_by(f64::total_cmp);
        eprintln!(
            "{} calls, each from the warm state: first {first:.2} us, median {:.2} us, fastest {:.2} us, slowest {:.2} us",
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
