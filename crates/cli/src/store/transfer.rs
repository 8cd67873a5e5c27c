//! `afresh push` and `afresh pull`: copy snapshots between a directory and a remote.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use afresh::store::archive;
#[cfg(feature = "remote")]
use afresh::store::remote::Progress;
use afresh::{LATEST, Place, Reference, Sha256, Snapshot};
use anyhow::Context;
use clap::Args;
use indicatif::BinaryBytes;
use serde_json::json;

use super::EncodingArgument;
use crate::Settings;
use crate::output::{Format, bytes, say};

#[derive(Debug, Args)]
pub(crate) struct PushArguments {
    /// Snapshot: DIR[@NAME].
    from: Reference,
    /// Destination: URL[@NAME], by default with the same name.
    to: Reference,
    /// Encoding of the pages at the destination.
    #[arg(long, value_enum, default_value = "zstd")]
    encoding: EncodingArgument,
}

#[derive(Debug, Args)]
pub(crate) struct PullArguments {
    /// Snapshot: URL[@NAME].
    from: Reference,
    /// Destination: DIR[@NAME], by default with the same name. A missing directory is created.
    to: Reference,
    /// Encoding of the pages.
    ///
    /// Raw pages can be mapped.
    #[arg(long, value_enum, default_value = "raw")]
    encoding: EncodingArgument,
}

/// The name to copy to: the one given, else the source's, else `latest` for a source named by
/// digest.
fn target<'a>(from: &'a Reference, to: &'a Reference) -> anyhow::Result<&'a str> {
    let default = Some(from.name()).filter(|name| !name.starts_with("sha256:")).unwrap_or(LATEST);
    Ok(to.target(default)?)
}

pub(crate) fn push(arguments: &PushArguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let PushArguments { from, to, encoding } = arguments;
    if !matches!(to.place(), Place::File(_)) {
        // Only a directory can be pushed to a remote. This is checked before anything is fetched.
        from.place().store()?;
    }
    let found = from.find(&settings.open)?;
    let (from, snapshot) = (&found.reference, &found.snapshot);
    let job = Job { done: "pushed", doing: "pushing", from, to, name: target(from, to)? };
    if let Place::File(path) = to.place() {
        let bytes = snapshot.inspect().layers.iter().map(|layer| layer.bytes).sum();
        return job.run(settings, |progress| {
            archive::export(snapshot, path, Some(job.name))?;
            progress(bytes, bytes);
            Ok(snapshot.id())
        });
    }
    to_remote(&job, snapshot, *encoding, settings)
}

#[cfg(feature = "remote")]
fn to_remote(
    job: &Job<'_>,
    snapshot: &Snapshot,
    encoding: EncodingArgument,
    settings: &Settings,
) -> anyhow::Result<ExitCode> {
    let remote = job.to.place().remote()?;
    let store = job.from.place().store()?;
    job.run(settings, |progress| {
        let mut told = |at: Progress| progress(at.done, at.total);
        Ok(remote.push(&store, snapshot, job.name, encoding.into(), &mut told)?)
    })
}

#[cfg(not(feature = "remote"))]
fn to_remote(
    job: &Job<'_>,
    _: &Snapshot,
    _: EncodingArgument,
    _: &Settings,
) -> anyhow::Result<ExitCode> {
    Err(no_remote(job.to))
}

#[cfg(not(feature = "remote"))]
fn no_remote(reference: &Reference) -> anyhow::Error {
    afresh::OpenError::Feature { what: reference.to_string(), feature: "remote" }.into()
}

pub(crate) fn pull(arguments: &PullArguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let PullArguments { from, to, encoding } = arguments;
    if let Place::File(path) = from.place() {
        let job = Job { done: "pulled", doing: "pulling", from, to, name: target(from, to)? };
        let store = to.place().create()?;
        return job.run(settings, |progress| {
            let id = archive::import(path, &store, job.name)?;
            let bytes = store.load_id(id)?.inspect().layers.iter().map(|layer| layer.bytes).sum();
            progress(bytes, bytes);
            Ok(id)
        });
    }
    from_remote(from, to, *encoding, settings)
}

#[cfg(feature = "remote")]
fn from_remote(
    from: &Reference,
    to: &Reference,
    encoding: EncodingArgument,
    settings: &Settings,
) -> anyhow::Result<ExitCode> {
    let remote = from.place().remote()?;
    let job = Job { done: "pulled", doing: "pulling", from, to, name: target(from, to)? };
    let store = to.place().create()?;
    job.run(settings, |progress| {
        let mut told = |at: Progress| progress(at.done, at.total);
        let limits = &settings.limits;
        let name = from.name();
        Ok(remote.pull_within(limits, &store, name, job.name, encoding.into(), &mut told)?)
    })
}

#[cfg(not(feature = "remote"))]
fn from_remote(
    from: &Reference,
    _: &Reference,
    _: EncodingArgument,
    _: &Settings,
) -> anyhow::Result<ExitCode> {
    Err(no_remote(from))
}

/// A copy of one snapshot.
struct Job<'a> {
    done: &'static str,
    doing: &'static str,
    from: &'a Reference,
    to: &'a Reference,
    name: &'a str,
}

impl Job<'_> {
    /// Runs `work` under a progress bar, and prints the bytes and the rate. `work` reports the
    /// bytes done and the total.
    fn run(
        &self,
        settings: &Settings,
        work: impl FnOnce(&mut dyn FnMut(u64, u64)) -> anyhow::Result<Sha256>,
    ) -> anyhow::Result<ExitCode> {
        let Job { done, doing, from, to, name } = self;
        // Before the first bytes are sent, layers are compressed or responses awaited.
        let bar = bytes("preparing", 0);
        bar.enable_steady_tick(Duration::from_millis(120));
        let mut begun = false;
        let started = Instant::now();
        let id = work(&mut |done, total| {
            if !std::mem::replace(&mut begun, true) {
                bar.set_message(format!("{doing} {name}"));
            }
            bar.set_length(total);
            bar.set_position(done);
        })
        .with_context(|| format!("copying {from} to {}@{name}", to.place()))?;
        let seconds = started.elapsed().as_secs_f64();
        let copied = bar.position();
        bar.finish_and_clear();
        let rate = copied as f64 / seconds / f64::from(1 << 20);
        match settings.output {
            Format::Json => say!(
                "{}",
                json!({
                    "id": id.to_string(), "place": to.place().to_string(), "name": name,
                    "bytes": copied, "seconds": seconds, "mib_per_s": rate,
                })
            )?,
            Format::Text => say!(
                "{done} {from} to {}@{name}: {} in {seconds:.2} s, {rate:.1} MiB/s, \
                 including blobs that were there already\n{id}",
                to.place(),
                BinaryBytes(copied),
            )?,
        }
        Ok(ExitCode::SUCCESS)
    }
}
