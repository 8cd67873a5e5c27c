//! `afresh snapshot` and `afresh fork`: save a warm guest, or its state after a call.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use afresh::memory::PAGE_SIZE;
use afresh::{Guest, Reference, SaveOptions, SavedSnapshot};
use clap::Args;
use indicatif::BinaryBytes;
use serde_json::json;

use crate::Settings;
use crate::guest::{Command, GuestArguments};
#[cfg(feature = "seal")]
use crate::keys::ProtectArguments;
use crate::output::{Format, counted, message, say, spinner};
use crate::request::{self, CallArguments, recorded};
use crate::store::EncodingArgument;

#[derive(Debug, Args)]
pub(crate) struct SnapshotArguments {
    /// Destination: PLACE[@NAME].
    ///
    /// A missing directory is created.
    #[arg(long, value_name = "PLACE[@NAME]")]
    to: Reference,
    /// Make a call from the warm state and record its working set, which is read first when the
    /// snapshot is opened: a function with arguments, a byte handler with its input, or the input
    /// of a micro-VM.
    #[arg(long, value_name = "F[:ARGS]|F=INPUT|INPUT")]
    record: Vec<String>,
    /// Encoding of the pages: raw is faster to open, zstd is smaller.
    #[arg(long, value_enum, default_value = "raw")]
    encoding: EncodingArgument,
    #[cfg(feature = "seal")]
    #[command(flatten)]
    protect: ProtectArguments,
    /// Arguments of a Linux program.
    ///
    /// Arguments that begin with a dash follow `--`.
    #[arg(index = 2, allow_negative_numbers = true)]
    arguments: Vec<OsString>,
    #[command(flatten)]
    guest: GuestArguments,
}

#[derive(Debug, Args)]
pub(crate) struct ForkArguments {
    /// Destination of the state after the call: PLACE[@NAME].
    ///
    /// If the guest is a snapshot of the same directory, only the changed pages are stored.
    #[arg(long, value_name = "PLACE[@NAME]")]
    to: Reference,
    #[cfg(feature = "seal")]
    #[command(flatten)]
    protect: ProtectArguments,
    #[command(flatten)]
    call: CallArguments,
    #[command(flatten)]
    guest: GuestArguments,
}

/// Reports a saved snapshot.
fn report(
    verb: &str,
    to: &Reference,
    saved: &SavedSnapshot,
    started: Instant,
    format: Format,
) -> anyhow::Result<()> {
    let seconds = started.elapsed().as_secs_f64();
    let found = saved.snapshot.inspect();
    let memory = (found.pages * PAGE_SIZE) as u64;
    let stored: u64 = found.layers.iter().map(|layer| layer.bytes).sum();
    let id = &saved.id;
    if let Some(lacking) = saved.unrecorded {
        message!("afresh: no working set was recorded: that needs {lacking} (see `afresh doctor`)");
    }
    match format {
        Format::Json => say!(
            "{}",
            json!({
                "id": id.to_string(), "place": to.place().to_string(), "name": to.name(),
                "memory_bytes": memory, "stored_bytes": stored, "layers": found.layers.len(),
                "working_set_pages": found.working_set_pages, "seconds": seconds,
            })
        )?,
        Format::Text => say!(
            "{verb} {to}: {} of memory and code, {} stored in {}, {} in the working set, in \
             {seconds:.2} s\n{id}",
            BinaryBytes(memory),
            BinaryBytes(stored),
            counted(found.layers.len() as u64, "layer"),
            counted(found.working_set_pages as u64, "page"),
        )?,
    }
    Ok(())
}

/// Reports a saved state to standard error.
#[cfg(linux_guests)]
pub(crate) fn note(to: &Reference, saved: &SavedSnapshot, started: Instant) {
    let stored: u64 = saved.snapshot.inspect().layers.iter().map(|layer| layer.bytes).sum();
    let seconds = started.elapsed().as_secs_f64();
    message!("afresh: saved {to}: {} in {seconds:.2} s", BinaryBytes(stored));
}

pub(crate) fn snapshot(
    arguments: &SnapshotArguments,
    settings: &Settings,
) -> anyhow::Result<ExitCode> {
    Guest::check_target(&arguments.to)?;
    let command = Command { shown: true, arguments: &arguments.arguments, ..Command::default() };
    let guest = arguments.guest.open(&arguments.guest.options(settings, command)?)?;
    let started = Instant::now();
    let bar = spinner("saving");
    let mut options = SaveOptions::new().encoding(arguments.encoding.into());
    for call in &arguments.record {
        options = options.record(recorded(call, guest.kind()));
    }
    #[cfg(feature = "seal")]
    let options = arguments.protect.apply(options)?;
    let saved = guest.save(&arguments.to, &options)?;
    bar.finish_and_clear();
    report("saved", &arguments.to, &saved, started, settings.output)?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn fork(arguments: &ForkArguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    Guest::check_target(&arguments.to)?;
    let request = arguments.call.read()?;
    let options = arguments.guest.options(settings, request.command(true, true))?;
    let guest = arguments.guest.open(&options)?;
    let mut lease = guest.lease()?;
    let answer = lease.invoke(&request.call(&guest)?)?;
    match settings.output {
        Format::Text => request::print(&answer, &mut std::io::stdout())?,
        Format::Json => {
            writeln!(std::io::stdout(), "{}", json!({"result": request::json(&answer)}))?;
        }
    }
    let started = Instant::now();
    let options = SaveOptions::new();
    #[cfg(feature = "seal")]
    let options = arguments.protect.apply(options)?;
    let saved = lease.save(&arguments.to, &options)?;
    report("forked to", &arguments.to, &saved, started, settings.output)?;
    Ok(ExitCode::SUCCESS)
}
