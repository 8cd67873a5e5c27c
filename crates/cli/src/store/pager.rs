//! `afresh pager`: serves the memory of a snapshot to virtual machine monitors.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use afresh::pager::vmm::{Listener, Served, VmmError, VmmOptions, serve};
use afresh::pager::{PageSource, SnapshotSource};
use anyhow::Context;
use clap::Args;
use serde_json::json;

use crate::Settings;
use crate::output::{Format, say};
use afresh::Reference;

/// Time before the next attempt after `accept` failed.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Snapshot: PLACE[@NAME].
    snapshot: Reference,
    /// Unix socket to listen on, the path of the VMM's `uffd` memory backend.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Fill pages only when they are touched, without prefetching the rest.
    #[arg(long)]
    on_demand: bool,
    /// Number of pages filled per fault, 1 to 512.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=512))]
    window: u16,
    /// Serve one VMM, and exit when it exits.
    #[arg(long)]
    once: bool,
    /// Directory that caches the pages of a remote snapshot.
    ///
    /// Processes can share it.
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let format = settings.output;
    let mut options = settings.open.clone();
    if let Some(dir) = &arguments.cache {
        options = options.cache_pages(dir);
    }
    let source = SnapshotSource::new(arguments.snapshot.load(&options)?);
    // Signals are watched before the socket exists, so that it is always removed.
    let stop = afresh_sys::termination::watch()?;
    let listener = Listener::bind(&arguments.socket)?;
    eprintln!(
        "afresh: {} pages of {} on {}",
        source.pages(),
        arguments.snapshot,
        arguments.socket.display()
    );
    if arguments.once {
        let stream = listener.accept(stop).context("waiting for a VMM")?;
        let Some(stream) = stream else { return Ok(ExitCode::SUCCESS) };
        let served = one(arguments, &source, &stream, stop);
        return Ok(if report(1, &served, settings.output) {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        });
    }
    std::thread::scope(|scope| {
        let mut number = 0;
        loop {
            let stream = match listener.accept(stop) {
                Ok(Some(stream)) => stream,
                Ok(None) => return Ok(ExitCode::SUCCESS),
                Err(error) => {
                    // For example, no descriptors are left. The VMMs that are served need this
                    // process.
                    eprintln!("afresh: waiting for a VMM: {error}");
                    std::thread::sleep(PAUSE);
                    continue;
                }
            };
            number += 1;
            let source = &source;
            let work = move || {
                report(number, &one(arguments, source, &stream, stop), format);
            };
            let thread = std::thread::Builder::new().name(format!("vmm-{number}"));
            if let Err(error) = thread.spawn_scoped(scope, work) {
                // The stream is closed, so this VMM fails. The others continue.
                eprintln!("afresh: VMM {number}: starting a thread: {error}");
            }
        }
    })
}

fn one(
    arguments: &Arguments,
    source: &SnapshotSource,
    stream: &UnixStream,
    stop: &AtomicBool,
) -> Result<Served, VmmError> {
    let mut options = VmmOptions::new(stop);
    options.stream = !arguments.on_demand;
    options.window = arguments.window.into();
    serve(stream, source, &options)
}

/// Prints the result of serving a VMM. Returns whether it succeeded.
fn report(number: usize, served: &Result<Served, VmmError>, format: Format) -> bool {
    let printed = match (served, format) {
        (Ok(served), Format::Json) => say!(
            "{}",
            json!({
                "vmm": number, "faults": served.faults, "pages": served.pages,
                "zeroed": served.zeroed, "removals": served.removals,
            })
        ),
        (Ok(served), Format::Text) => say!(
            "VMM {number}: {} faults answered, {} pages filled, {} zeroed after {} discards",
            served.faults,
            served.pages,
            served.zeroed,
            served.removals
        ),
        (Err(error), _) => {
            eprintln!("afresh: VMM {number}: {error}");
            Ok(())
        }
    };
    served.is_ok() && printed.is_ok()
}
