//! `start`: from a snapshot alone to the first answer of the warm JavaScript guest, compared with
//! the ways that fetch everything first, and with warming it anew.
//!
//! Each run does the work of a new process: an engine, the snapshot opened, a guest, one call. The
//! compiled module comes from a cache in every case.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use afresh_pager::images::{ImageClient, ImageServer};
use afresh_pager::vmm::Listener;
use afresh_pager::{Options as RestoreOptions, Recorder};
#[cfg(feature = "remote")]
use afresh_store::Encoding;
#[cfg(feature = "remote")]
use afresh_store::remote::{Remote, RetryPolicy};
use afresh_store::{Snapshot, Store};
use afresh_wasm::{
    Engine, EngineConfig, Frozen, Guest, GuestOptions, SnapshotOptions, Warm, WarmUp,
};

use crate::row::{Contestant, Options, Sink, contest};

/// Name of the snapshots that the benchmark makes.
pub(crate) const NAME: &str = "start";
/// The same, stored as it is where the other is compressed.
#[cfg(feature = "remote")]
const RAW: &str = "start-raw";
/// Without a working set.
const PLAIN: &str = "start-plain";

fn engine(cache: &Path) -> anyhow::Result<Engine> {
    let cache = Some(cache.to_owned());
    Ok(Engine::new(EngineConfig { timeouts: false, cache, ..EngineConfig::default() })?)
}

/// The first answer of a guest. Neither the reset behind it nor the end of the guest is a part of
/// the start.
pub(crate) struct FirstAnswer {
    pub(crate) bytes: Vec<u8>,
    /// The time at which the answer was there.
    pub(crate) at: Instant,
    /// The snapshot, unless the guest was warmed.
    pub(crate) frozen: Option<Frozen>,
    /// The guest, which lives until the answer is checked.
    warm: Warm,
}

impl FirstAnswer {
    fn of(warm: Warm, frozen: Option<Frozen>, input: &[u8]) -> anyhow::Result<Self> {
        let entry = warm.bytes_entry("handle")?;
        let mut lease = warm.lease()?;
        let bytes = lease.call_bytes(&entry, input)?;
        let at = Instant::now();
        drop(lease);
        Ok(Self { bytes, at, frozen, warm })
    }
}

/// One answer of a thawed guest.
fn answer(cache: &Path, frozen: Frozen, input: &[u8]) -> anyhow::Result<FirstAnswer> {
    let warm = Warm::thaw(&engine(cache)?, &GuestOptions::default(), &frozen)?;
    FirstAnswer::of(warm, Some(frozen), input)
}

/// Opened and called while the rest is fetched.
pub(crate) fn lazily(
    cache: &Path,
    snapshot: Snapshot,
    input: &[u8],
) -> anyhow::Result<FirstAnswer> {
    answer(cache, Frozen::load(snapshot, &RestoreOptions::default())?, input)
}

/// As [`lazily`], with the memory of an image server.
pub(crate) fn shared(
    cache: &Path,
    snapshot: Snapshot,
    socket: &Path,
    input: &[u8],
) -> anyhow::Result<FirstAnswer> {
    let client = ImageClient::new(socket, |error| eprintln!("image server: {error}"));
    let options = RestoreOptions { images: Some(Arc::new(client)), ..RestoreOptions::default() };
    answer(cache, Frozen::load(snapshot, &options)?, input)
}

/// An image server with the memory of a snapshot, in a thread that ends with the process.
pub(crate) fn serve_image(socket: &Path, snapshot: &Snapshot) -> anyhow::Result<()> {
    /// More than the snapshot takes.
    const BUDGET: usize = 1 << 30;
    let server = ImageServer::new(Listener::bind(socket)?, BUDGET, |event| {
        eprintln!("image server: {event:?}");
    });
    server.add(snapshot).map_err(|error| anyhow::anyhow!("{error}"))?;
    std::thread::spawn(move || server.serve(&AtomicBool::new(false)));
    Ok(())
}

/// Fetched whole, then called.
fn wholly(cache: &Path, snapshot: Snapshot, input: &[u8]) -> anyhow::Result<FirstAnswer> {
    let frozen = Frozen::load(snapshot, &RestoreOptions::default())?;
    frozen.memory().wait(Duration::from_secs(60))?;
    answer(cache, frozen, input)
}

/// Not out of a snapshot at all.
fn warmed(cache: &Path, wasm: &[u8], input: &[u8]) -> anyhow::Result<FirstAnswer> {
    let warm = Guest::new(&engine(cache)?, wasm)?.warm(WarmUp::new().call("warm", &[]))?;
    FirstAnswer::of(warm, None, input)
}

/// Saves the guest twice, with the working set of one request and without.
pub(crate) fn prepare(
    wasm: &[u8],
    cache: &Path,
    store: &Store,
    input: &[u8],
) -> anyhow::Result<Vec<u8>> {
    let first = warmed(cache, wasm, input)?;
    crate::js::answered(&first.bytes)?;
    let frozen = first.warm.freeze()?;
    frozen.save(store, PLAIN, &SnapshotOptions::default())?;
    // Fills the cache, so that recording meets no module pages.
    drop(lazily(cache, store.load(PLAIN)?, input)?);
    let recorded = Frozen::record(store.load(PLAIN)?)?;
    let memory = recorded.memory().clone();
    let recording = answer(cache, recorded, input)?;
    let mut recorder = Recorder::new();
    recorder.add(&memory.touched());
    drop(recording);
    let with = SnapshotOptions { working_set: recorder.pages(1.0), ..SnapshotOptions::default() };
    frozen.save(store, NAME, &with)?;
    Ok(first.bytes)
}

/// A contestant that is timed up to its first answer.
fn contestant<'a>(
    strategy: &'static str,
    expected: &'a [u8],
    mut run: impl FnMut() -> anyhow::Result<FirstAnswer> + 'a,
) -> Contestant<'a> {
    let mut once = move || {
        let started = Instant::now();
        let first = run()?;
        let took = first.at - started;
        anyhow::ensure!(first.bytes == expected, "{strategy} answers otherwise");
        Ok(took)
    };
    Contestant::timed(strategy, move |n| (0..n).map(|_| once()).sum())
}

/// The contest on the byte-handling guest in `wasm`, warmed by its export `warm`. Snapshots and
/// caches are made in `dir`; with `remote`, a URL, they are opened there too.
///
/// # Errors
/// The first that any contestant meets, or answers that differ.
pub fn start(
    wasm: &[u8],
    input: &[u8],
    dir: &Path,
    remote: Option<&str>,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let cache = &dir.join("cache");
    let path = &dir.join("store");
    let store = &Store::create(path)?;
    let expected = &prepare(wasm, cache, store, input)?;
    let open = |name: &str| anyhow::Ok(Store::open(path)?.load(name)?);
    let socket = &dir.join("images.sock");
    serve_image(socket, &open(NAME)?)?;
    let field = vec![
        contestant("lazy", expected, || lazily(cache, open(NAME)?, input)),
        contestant("shared", expected, || shared(cache, open(NAME)?, socket, input)),
        contestant("lazy-unrecorded", expected, || lazily(cache, open(PLAIN)?, input)),
        contestant("whole", expected, || wholly(cache, open(PLAIN)?, input)),
        contestant("warm-up", expected, || warmed(cache, wasm, input)),
    ];
    contest("start", "js/file", options, field, sink)?;
    match remote {
        None => Ok(()),
        #[cfg(feature = "remote")]
        Some(url) => in_remote(url, store, cache, dir, expected, input, options, sink),
        #[cfg(not(feature = "remote"))]
        Some(url) => {
            anyhow::bail!("{url}: this build cannot open remotes; enable the feature `remote`")
        }
    }
}

/// The same snapshots, opened where they are on a server.
#[cfg(feature = "remote")]
#[allow(clippy::too_many_arguments, reason = "options of `start`")]
fn in_remote(
    url: &str,
    store: &Store,
    cache: &Path,
    dir: &Path,
    expected: &[u8],
    input: &[u8],
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let there = Remote::open(url, RetryPolicy::default())?;
    for (name, encoding) in [(NAME, Encoding::Zstd), (RAW, Encoding::Raw)] {
        there.push(store, &store.load(NAME)?, name, encoding, &mut |_| {})?;
    }
    let connect = || {
        let remote = Remote::open(url, RetryPolicy::default())?;
        remote.prepare();
        anyhow::Ok(remote)
    };
    let pulled = &dir.join("pulled");
    let field = vec![
        contestant("lazy", expected, || lazily(cache, connect()?.load(NAME)?, input)),
        contestant("lazy-raw", expected, || lazily(cache, connect()?.load(RAW)?, input)),
        contestant("whole", expected, || wholly(cache, connect()?.load(NAME)?, input)),
        contestant("pull-first", expected, || {
            let local = Store::create(pulled)?;
            connect()?.pull(&local, NAME, NAME, Encoding::Raw, &mut |_| {})?;
            let answered = lazily(cache, local.load(NAME)?, input)?;
            std::fs::remove_dir_all(pulled)?;
            Ok(answered)
        }),
    ];
    contest("start", "js/remote", options, field, sink)
}
