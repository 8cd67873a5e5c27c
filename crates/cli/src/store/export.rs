//! `afresh export`: writes the memory of a snapshot to a raw image.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use afresh::memory::PAGE_SIZE;
use clap::Args;
use indicatif::BinaryBytes;
use serde_json::json;

use crate::Settings;
use crate::output::{Format, bytes, say};
use afresh::Reference;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Snapshot: PLACE[@NAME].
    snapshot: Reference,
    /// File to create, with holes for zero pages. It must not exist.
    file: PathBuf,
    /// Write the guest state (registers, devices) to this file, which must not exist.
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let snapshot = arguments.snapshot.load(&settings.open)?;
    let memory = (snapshot.pages() * PAGE_SIZE) as u64;
    let bar = bytes("exporting", memory);
    let started = Instant::now();
    snapshot.export_memory(&arguments.file, &mut |pages| {
        bar.set_position((pages * PAGE_SIZE) as u64)
    })?;
    if let Some(path) = &arguments.state {
        snapshot.export_state(path)?;
    }
    let seconds = started.elapsed().as_secs_f64();
    bar.finish_and_clear();
    let rate = memory as f64 / seconds / f64::from(1 << 20);
    match settings.output {
        Format::Json => say!(
            "{}",
            json!({
                "id": snapshot.id().to_string(), "memory_bytes": memory, "seconds": seconds,
                "mib_per_s": rate,
            })
        )?,
        Format::Text => say!(
            "exported {} to {}: {} in {seconds:.2} s, {rate:.1} MiB/s",
            arguments.snapshot,
            arguments.file.display(),
            BinaryBytes(memory),
        )?,
    }
    Ok(ExitCode::SUCCESS)
}
