//! `afresh snapshot` and `afresh fork`: a warm guest, or what a call made of it, becomes a snapshot.

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use afresh_memory::{PAGE_SIZE, PageRange};
use afresh_pager::Recorder;
use afresh_store::{Encoding, Sha256, Snapshot, Store, archive};
use afresh_wasm::{Frozen, Output, SaveWith, Warm};
use anyhow::{Context, bail};
use clap::Args;
use indicatif::BinaryBytes;
use serde_json::json;

use crate::guest::{GuestArguments, Ready};
use crate::keys::ProtectArguments;
use crate::output::{Format, say, spinner};
use crate::place::{LATEST, Place, Reference};
use crate::request::{CallArguments, Request};
use crate::scratch::Scratch;
use crate::store::EncodingArgument;

#[derive(Debug, Args)]
pub(crate) struct SnapshotArguments {
    #[command(flatten)]
    guest: GuestArguments,
    /// Where to: PLACE[@NAME]; a directory is made if it is missing.
    #[arg(long, value_name = "PLACE[@NAME]")]
    to: Reference,
    /// Calls to learn the working set from, each from the warm state: a function with its arguments, or a
    /// handler of bytes with its input. What they touch is read first when the snapshot is opened.
    #[arg(long, value_name = "F[:ARGS]|F=INPUT")]
    record: Vec<String>,
    /// How pages are stored: raw ones are faster to open here, compressed ones travel well.
    #[arg(long, value_enum, default_value = "raw")]
    encoding: EncodingArgument,
    #[command(flatten)]
    protect: ProtectArguments,
}

#[derive(Debug, Args)]
pub(crate) struct ForkArguments {
    #[command(flatten)]
    guest: GuestArguments,
    /// Where the state after the call goes: PLACE[@NAME]. In the directory of the snapshot that the
    /// guest came from, only what the call changed is stored.
    #[arg(long, value_name = "PLACE[@NAME]")]
    to: Reference,
    #[command(flatten)]
    protect: ProtectArguments,
    #[command(flatten)]
    call: CallArguments,
}

/// The name to save under. A file has one snapshot, which needs no other.
fn target(to: &Reference) -> anyhow::Result<&str> {
    anyhow::ensure!(
        to.name.is_none() || !matches!(to.place, Place::File(_)),
        "{} holds one snapshot: give no name",
        to.place
    );
    to.target(LATEST)
}

/// Saves a frozen guest where `to` says.
fn save(frozen: &Frozen, to: &Reference, with: &SaveWith) -> anyhow::Result<(Sha256, Snapshot)> {
    let name = target(to)?;
    match &to.place {
        Place::Store(_) => {
            let store = to.place.create()?;
            let id = frozen.save(&store, name, with)?;
            Ok((id, store.load_id(id)?))
        }
        Place::Remote(_) => {
            let remote = to.place.remote()?;
            let scratch = Scratch::new(None)?;
            let store = Store::create(scratch.path())?;
            let snapshot = store.load_id(frozen.save(&store, name, with)?)?;
            let id = remote.push(&store, &snapshot, name, with.encoding, &mut |_| {})?;
            Ok((id, snapshot))
        }
        Place::File(path) => {
            let scratch = Scratch::new(None)?;
            let store = Store::create(scratch.path())?;
            let id = frozen.save(&store, LATEST, with)?;
            let snapshot = store.load_id(id)?;
            archive::export(&snapshot, path, Some(LATEST))?;
            Ok((id, snapshot))
        }
    }
}

/// The pages that `calls` touch, each in a guest of its own that starts warm.
fn record(
    guest: &GuestArguments,
    frozen: &Frozen,
    calls: &[String],
) -> anyhow::Result<Vec<PageRange>> {
    let scratch = Scratch::new(None)?;
    let store = Store::create(scratch.path())?;
    frozen.save(&store, "recorded", &SaveWith::default())?;
    let snapshot = store.load("recorded")?;
    let mut recorder = Recorder::new();
    for call in calls {
        let frozen = Frozen::record(snapshot.clone())?;
        let warm = guest.thaw_module(&frozen, Output::Discard)?;
        let request = recorded(&warm, call)?;
        request.ask(&mut warm.lease()?).with_context(|| format!("recording {call}"))?;
        recorder.add(&frozen.memory().touched());
    }
    // Whatever one of them touches: the caller chose what is worth it. The module is only read to be
    // compiled, and that takes longer than fetching it.
    let module = frozen.module_pages().end();
    let after = |run: PageRange| {
        let start = run.start.max(module);
        (start < run.end()).then(|| PageRange::new(start, run.end() - start))
    };
    Ok(recorder.pages(0.0).into_iter().filter_map(after).collect())
}

/// The request that an argument of `--record` means.
fn recorded(warm: &Warm, call: &str) -> anyhow::Result<Request> {
    match (call.find('='), call.find(':')) {
        (Some(at), colon) if colon.is_none_or(|colon| at < colon) => {
            Request::bytes(warm, &call[..at], call.as_bytes()[at + 1..].to_vec())
        }
        (_, Some(at)) => {
            let texts: Vec<String> = call[at + 1..].split(',').map(str::to_owned).collect();
            Request::values(warm, &call[..at], &texts)
        }
        _ => Request::values(warm, call, &[]),
    }
}

/// Says what was saved.
fn report(
    verb: &str,
    to: &Reference,
    (id, snapshot): &(Sha256, Snapshot),
    started: Instant,
    format: Format,
) -> anyhow::Result<()> {
    let seconds = started.elapsed().as_secs_f64();
    let found = snapshot.inspect();
    let memory = (found.pages * PAGE_SIZE) as u64;
    let stored: u64 = found.layers.iter().map(|layer| layer.bytes).sum();
    match format {
        Format::Json => say!(
            "{}",
            json!({
                "id": id.to_string(), "place": to.place.to_string(), "name": to.name(),
                "memory_bytes": memory, "stored_bytes": stored, "layers": found.layers.len(),
                "working_set_pages": found.working_set_pages, "seconds": seconds,
            })
        )?,
        Format::Text => say!(
            "{verb} {to}: {} of memory and code, {} stored in {} layers, {} pages in the working set, in \
             {seconds:.2} s\n{id}",
            BinaryBytes(memory),
            BinaryBytes(stored),
            found.layers.len(),
            found.working_set_pages,
        )?,
    }
    Ok(())
}

pub(crate) fn snapshot(arguments: &SnapshotArguments, format: Format) -> anyhow::Result<ExitCode> {
    target(&arguments.to)?;
    let frozen = match arguments.guest.open(Output::Inherit)?.ready {
        Ready::Module(warm) => warm.freeze()?,
        Ready::Component(_) => bail!(
            "a component starts from its module each time: there is no warm state to keep; run the \
             component itself"
        ),
        Ready::Sandbox(_) => bail!("micro-VMs cannot be saved yet"),
    };
    let started = Instant::now();
    let bar = spinner("saving");
    let encoding: Encoding = arguments.encoding.into();
    let mut with = SaveWith { encoding, ..SaveWith::default() };
    arguments.protect.apply(&mut with)?;
    if !arguments.record.is_empty() {
        with.working_set = record(&arguments.guest, &frozen, &arguments.record)?;
    }
    let saved = save(&frozen, &arguments.to, &with)?;
    bar.finish_and_clear();
    report("saved", &arguments.to, &saved, started, format)?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn fork(arguments: &ForkArguments, format: Format) -> anyhow::Result<ExitCode> {
    target(&arguments.to)?;
    let opened = arguments.guest.open(Output::Inherit)?;
    let Ready::Module(warm) = opened.ready else {
        bail!("only core modules can be forked after a call")
    };
    let request = arguments.call.request(&warm)?;
    let mut lease = warm.lease()?;
    let answer = request.ask(&mut lease)?;
    match format {
        Format::Text => answer.print(&mut std::io::stdout())?,
        Format::Json => writeln!(std::io::stdout(), "{}", json!({"result": answer.json()}))?,
    }
    let frozen = lease.freeze()?;
    drop(lease);
    let started = Instant::now();
    let parent = opened
        .thawed
        .filter(|thawed| {
            matches!(&thawed.reference.place, Place::Store(_))
                && thawed.reference.place == arguments.to.place
                // The pages of a guest that has shrunk are no delta.
                && frozen.memory().pages().pages() >= thawed.snapshot.pages()
        })
        .map(|thawed| thawed.snapshot);
    let mut with = SaveWith { parent, ..SaveWith::default() };
    arguments.protect.apply(&mut with)?;
    let saved = save(&frozen, &arguments.to, &with)?;
    report("forked to", &arguments.to, &saved, started, format)?;
    Ok(ExitCode::SUCCESS)
}
