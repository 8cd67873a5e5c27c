//! `afresh push` and `afresh pull`: snapshots between a directory and a remote.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use afresh_store::remote::Progress;
use afresh_store::{Sha256, archive};
use anyhow::Context;
use clap::Args;
use indicatif::BinaryBytes;
use serde_json::json;

use super::EncodingArgument;
use crate::output::{Format, bytes, say};
use crate::place::{LATEST, Place, Reference};

#[derive(Debug, Args)]
pub(crate) struct PushArguments {
    /// The snapshot: DIR[@NAME].
    from: Reference,
    /// Where to: URL[@NAME], by default with the same name.
    to: Reference,
    /// How pages are stored there.
    #[arg(long, value_enum, default_value = "zstd")]
    encoding: EncodingArgument,
}

#[derive(Debug, Args)]
pub(crate) struct PullArguments {
    /// The snapshot: URL[@NAME].
    from: Reference,
    /// Where to: DIR[@NAME], by default with the same name; made if it is missing.
    to: Reference,
    /// How pages are stored here: raw ones can be mapped.
    #[arg(long, value_enum, default_value = "raw")]
    encoding: EncodingArgument,
}

/// The name to copy to: the one given, else the source's, else `latest` for a source named by digest.
fn target<'a>(from: &'a Reference, to: &'a Reference) -> anyhow::Result<&'a str> {
    to.target(Some(from.name()).filter(|name| !name.starts_with("sha256:")).unwrap_or(LATEST))
}

pub(crate) fn push(arguments: &PushArguments, format: Format) -> anyhow::Result<ExitCode> {
    let PushArguments { from, to, encoding } = arguments;
    let name = target(from, to)?;
    if let Place::File(path) = &to.place {
        let snapshot = from.load(None)?;
        let bytes = snapshot.inspect().layers.iter().map(|layer| layer.bytes).sum();
        return copy(("pushed", "pushing"), from, to, name, format, |progress| {
            archive::export(&snapshot, path, Some(name))?;
            progress(Progress { done: bytes, total: bytes });
            Ok(snapshot.id())
        });
    }
    let remote = to.place.remote()?;
    let store = from.place.store()?;
    let snapshot = from.load(None)?;
    let verb = ("pushed", "pushing");
    copy(verb, from, to, name, format, |progress| {
        Ok(remote.push(&store, &snapshot, name, (*encoding).into(), progress)?)
    })
}

pub(crate) fn pull(arguments: &PullArguments, format: Format) -> anyhow::Result<ExitCode> {
    let PullArguments { from, to, encoding } = arguments;
    let name = target(from, to)?;
    if let Place::File(path) = &from.place {
        let store = to.place.create()?;
        return copy(("pulled", "pulling"), from, to, name, format, |progress| {
            let id = archive::import(path, &store, name)?;
            let bytes = store.load_id(id)?.inspect().layers.iter().map(|layer| layer.bytes).sum();
            progress(Progress { done: bytes, total: bytes });
            Ok(id)
        });
    }
    let remote = from.place.remote()?;
    let store = to.place.create()?;
    let verb = ("pulled", "pulling");
    copy(verb, from, to, name, format, |progress| {
        Ok(remote.pull(&store, from.name(), name, (*encoding).into(), progress)?)
    })
}

/// Runs `work` under a progress bar, and says what was copied at which rate.
fn copy(
    (done, doing): (&str, &str),
    from: &Reference,
    to: &Reference,
    name: &str,
    format: Format,
    work: impl FnOnce(&mut dyn FnMut(Progress)) -> anyhow::Result<Sha256>,
) -> anyhow::Result<ExitCode> {
    // Until the first bytes go, layers are compressed or answers awaited.
    let bar = bytes("preparing", 0);
    bar.enable_steady_tick(Duration::from_millis(120));
    let mut begun = false;
    let started = Instant::now();
    let id = work(&mut |progress| {
        if !std::mem::replace(&mut begun, true) {
            bar.set_message(format!("{doing} {name}"));
        }
        bar.set_length(progress.total);
        bar.set_position(progress.done);
    })
    .with_context(|| format!("copying {from} to {}@{name}", to.place))?;
    let seconds = started.elapsed().as_secs_f64();
    let copied = bar.position();
    bar.finish_and_clear();
    let rate = copied as f64 / seconds / f64::from(1 << 20);
    match format {
        Format::Json => say!(
            "{}",
            json!({
                "id": id.to_string(), "place": to.place.to_string(), "name": name,
                "bytes": copied, "seconds": seconds, "mib_per_s": rate,
            })
        )?,
        Format::Text => say!(
            "{done} {from} to {}@{name}: {} in {seconds:.2} s, {rate:.1} MiB/s, what was there already counted\n\
             {id}",
            to.place,
            BinaryBytes(copied),
        )?,
    }
    Ok(ExitCode::SUCCESS)
}
