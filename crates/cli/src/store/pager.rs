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

/// Before another attempt when no connection could be taken.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The snapshot: PLACE[@NAME].
    snapshot: Reference,
    /// The Unix socket to listen on, as a VMM's `uffd` memory backend names it.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Fill pages only when they are touched, and stream nothing ahead.
    #[arg(long)]
    on_demand: bool,
    /// Pages filled on a fault: 1 to 512.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=512))]
    window: u16,
    /// Serve one VMM, and end when it ends.
    #[arg(long)]
    once: bool,
    /// Directory for fetched pages of a remote snapshot; may be shared.
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
    // Watched before there is a socket to remove.
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
                    // Such as no descriptors left. The served VMMs need this process.
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
                // The stream is closed, so that VMM fails; the others continue.
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

/// Says how serving a VMM went; returns whether it went well.
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
