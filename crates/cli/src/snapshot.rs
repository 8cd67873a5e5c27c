//! `afresh snapshot` and `afresh fork`: a warm guest, or what a call made of it, becomes a snapshot.

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use afresh_memory::{Feature, Features, PAGE_SIZE, PageRange};
use afresh_pager::Recorder;
use afresh_store::seal::Access;
use afresh_store::{Encoding, Sha256, Snapshot, Store, archive};
use afresh_wasm::{Frozen, Output, SaveWith, Warm};
use anyhow::{Context, bail};
use clap::Args;
use indicatif::BinaryBytes;
use serde_json::json;

use crate::guest::{GuestArguments, Ready};
use crate::keys::ProtectArguments;
use crate::output::{Format, say, spinner};
use crate::place::{LATEST, Place, Reference, access};
use crate::request::{Answer, CallArguments, Request};
use crate::scratch::Scratch;
use crate::store::EncodingArgument;

#[derive(Debug, Args)]
pub(crate) struct SnapshotArguments {
    #[command(flatten)]
    guest: GuestArguments,
    /// Where to: PLACE[@NAME]; a directory is made if it is missing.
    #[arg(long, value_name = "PLACE[@NAME]")]
    to: Reference,
    /// Calls to learn the working set from, each from the warm state: a function with its arguments, a
    /// handler of bytes with its input, or the input of a micro-VM. What they touch is read first when the
    /// snapshot is opened.
    #[arg(long, value_name = "F[:ARGS]|F=INPUT|INPUT")]
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

/// A frozen guest of any kind.
enum Warmed {
    Module(Frozen),
    Sandbox(afresh_vm::Frozen),
}

impl Warmed {
    fn save(&self, store: &Store, name: &str, with: &SaveWith) -> anyhow::Result<Snapshot> {
        let id = match self {
            Self::Module(frozen) => frozen.save(store, name, with)?,
            Self::Sandbox(frozen) => frozen.save(store, name, with)?,
        };
        // A delta is sealed like its parent, with the key that opened that.
        let own = with.seal.clone().map(|key| Access::new().with_key(key));
        Ok(store.load_with(&id.to_string(), own.as_ref().unwrap_or_else(|| access()))?)
    }

    /// The pages that `calls` touch, each in a guest of its own that starts warm.
    fn record(&self, guest: &GuestArguments, calls: &[String]) -> anyhow::Result<Vec<PageRange>> {
        let needed = match self {
            Self::Module(_) => Feature::UffdSigbus,
            Self::Sandbox(_) => Feature::UffdKernel,
        };
        if !Features::host().has(needed) {
            eprintln!(
                "afresh: no working set: what the calls touch cannot be told without {} (see `afresh doctor`)",
                needed.name()
            );
            return Ok(Vec::new());
        }
        let scratch = Scratch::new(None)?;
        let store = Store::create(scratch.path())?;
        let snapshot = self.save(&store, "recorded", &SaveWith::default())?;
        let mut recorder = Recorder::new();
        for call in calls {
            let failed = || format!("recording {call}");
            match self {
                Self::Module(_) => {
                    let frozen = Frozen::record(snapshot.clone())?;
                    let warm = guest.thaw_module(&frozen, Output::Discard)?;
                    let request = recorded(&warm, call)?;
                    request.ask(&mut warm.lease()?).with_context(failed)?;
                    recorder.add(&frozen.memory().touched());
                }
                Self::Sandbox(_) => {
                    let frozen = afresh_vm::Frozen::record(snapshot.clone())?;
                    let mut sandbox = guest.thaw_sandbox(&frozen)?;
                    sandbox.run(call.as_bytes()).with_context(failed)?;
                    recorder.add(&frozen.memory().touched());
                }
            }
        }
        // Whatever one of them touches: the caller chose what is worth it. A module is only read to be
        // compiled, and that takes longer than fetching it.
        let skipped = match self {
            Self::Module(frozen) => frozen.module_pages().end(),
            Self::Sandbox(_) => 0,
        };
        let after = |run: PageRange| {
            let start = run.start.max(skipped);
            (start < run.end()).then(|| PageRange::new(start, run.end() - start))
        };
        Ok(recorder.pages(0.0).into_iter().filter_map(after).collect())
    }
}

/// Saves a frozen guest where `to` says.
fn save(frozen: &Warmed, to: &Reference, with: &SaveWith) -> anyhow::Result<(Sha256, Snapshot)> {
    let name = target(to)?;
    let scratch = || {
        let scratch = Scratch::new(None)?;
        anyhow::Ok((Store::create(scratch.path())?, scratch))
    };
    match &to.place {
        Place::Store(_) => {
            let snapshot = frozen.save(&to.place.create()?, name, with)?;
            Ok((snapshot.id(), snapshot))
        }
        Place::Remote(_) => {
            let remote = to.place.remote()?;
            let (store, _scratch) = scratch()?;
            let snapshot = frozen.save(&store, name, with)?;
            let id = remote.push(&store, &snapshot, name, with.encoding, &mut |_| {})?;
            Ok((id, snapshot))
        }
        Place::File(path) => {
            let (store, _scratch) = scratch()?;
            let snapshot = frozen.save(&store, LATEST, with)?;
            archive::export(&snapshot, path, Some(LATEST))?;
            Ok((snapshot.id(), snapshot))
        }
    }
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
        Ready::Module(warm) => Warmed::Module(warm.freeze()?),
        Ready::Component(_) => bail!(
            "a component starts from its module each time: there is no warm state to keep; run the \
             component itself"
        ),
        Ready::Sandbox(sandbox) => Warmed::Sandbox(sandbox.pristine().freeze()?),
    };
    let started = Instant::now();
    let bar = spinner("saving");
    let encoding: Encoding = arguments.encoding.into();
    let mut with = SaveWith { encoding, ..SaveWith::default() };
    arguments.protect.apply(&mut with)?;
    if !arguments.record.is_empty() {
        with.working_set = frozen.record(&arguments.guest, &arguments.record)?;
    }
    let saved = save(&frozen, &arguments.to, &with)?;
    bar.finish_and_clear();
    report("saved", &arguments.to, &saved, started, format)?;
    Ok(ExitCode::SUCCESS)
}

/// Calls the guest, prints the answer, and freezes what the call left.
fn call_and_freeze(ready: Ready, call: &CallArguments, format: Format) -> anyhow::Result<Warmed> {
    let print = |answer: &Answer| match format {
        Format::Text => answer.print(&mut std::io::stdout()),
        Format::Json => writeln!(std::io::stdout(), "{}", json!({"result": answer.json()})),
    };
    match ready {
        Ready::Module(warm) => {
            let request = call.request(&warm)?;
            let mut lease = warm.lease()?;
            print(&request.ask(&mut lease)?)?;
            Ok(Warmed::Module(lease.freeze()?))
        }
        Ready::Component(_) => {
            bail!("a component cannot be frozen after a call; a core module can")
        }
        Ready::Sandbox(mut sandbox) => {
            print(&Answer::Bytes(sandbox.call(&call.bytes()?)?))?;
            Ok(Warmed::Sandbox(sandbox.snapshot()?.freeze()?))
        }
    }
}

pub(crate) fn fork(arguments: &ForkArguments, format: Format) -> anyhow::Result<ExitCode> {
    target(&arguments.to)?;
    let opened = arguments.guest.open(Output::Inherit)?;
    let frozen = call_and_freeze(opened.ready, &arguments.call, format)?;
    let pages = match &frozen {
        Warmed::Module(frozen) => frozen.memory().pages().pages(),
        Warmed::Sandbox(frozen) => frozen.memory().pages().pages(),
    };
    let started = Instant::now();
    let parent = opened
        .thawed
        .filter(|thawed| {
            matches!(&thawed.reference.place, Place::Store(_))
                && thawed.reference.place == arguments.to.place
                // The pages of a guest that has shrunk are no delta.
                && pages >= thawed.snapshot.pages()
        })
        .map(|thawed| thawed.snapshot);
    let mut with = SaveWith { parent, ..SaveWith::default() };
    arguments.protect.apply(&mut with)?;
    let saved = save(&frozen, &arguments.to, &with)?;
    report("forked to", &arguments.to, &saved, started, format)?;
    Ok(ExitCode::SUCCESS)
}
