//! How fast snapshots are written, and the speed of the hash that bounds it.

use std::path::Path;

use afresh_store::{Encoding, GuestBuild, MemoryPages, SaveRequest, Sha256, Store};
use afresh_sys::PAGE_SIZE;
use anyhow::Result;
use serde_json::json;

use super::Options;
use super::corpus::{Scratch, pages_into};
use super::report::Line;
use super::writer::{DELTA_PAGES, Writer, change, write_and_sync};
use super::{delta, guest_delta, running};
use crate::Sink;

/// Hashes `memory` with `threads` threads, each a part of it. No save is faster, because its blobs
/// are named so.
fn hash(memory: &[u8], threads: usize) -> Result<()> {
    let part = memory.len().div_ceil(threads);
    std::thread::scope(|scope| {
        for part in memory.chunks(part) {
            scope.spawn(move || std::hint::black_box(Sha256::of(part)));
        }
    });
    Ok(())
}

/// Saves of guests that run, of twice the memory.
fn save_running(
    options: &Options,
    save: &SaveRequest,
    dir: &Path,
    sink: &mut Sink<'_>,
) -> Result<()> {
    let mut memory = MemoryPages(vec![0; (2 * options.mib) << 20]);
    pages_into(0, &mut memory.0);
    let pages = memory.0.len() / PAGE_SIZE;
    let store = Store::create(dir)?;
    store.save("whole", &memory, save)?;
    drop(memory);
    if options.wants("slot") {
        running::slot(&store, pages, options.rounds, save, sink)?;
    }
    if options.wants("vm") {
        running::vm(&store, pages, options.rounds, sink)?;
    }
    Ok(())
}

/// Runs the cases that `options` selects, each with all of its contestants.
pub(super) fn run(options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let scratch = Scratch::new(&options.dir)?;
    let mut save = SaveRequest::new(GuestBuild {
        kind: "bench".to_owned(),
        module: "none".to_owned(),
        engine: "none".to_owned(),
        cpu: Vec::new(),
    });
    save.options.encoding = Encoding::Raw;
    let cases =
        [&["random-data", "delta-in-memory", "slot", "vm"][..], &guest_delta::CASES].concat();
    if let Some(filter) = &options.filter
        && !cases.iter().any(|case| options.wants(case))
    {
        anyhow::bail!("no case of `save` contains `{filter}`: it has {}", cases.join(", "));
    }
    if options.wants("random-data") {
        save_whole(options, &save, scratch.path(), sink)?;
    }
    if options.wants("delta-in-memory") {
        delta::run(options, &save, sink)?;
    }
    guest_delta::run(options, sink)?;
    if options.wants("slot") || options.wants("vm") {
        save_running(options, &save, &scratch.path().join("running"), sink)?;
    }
    Ok(())
}

/// Whole snapshots of random data, and deltas on them.
fn save_whole(
    options: &Options,
    save: &SaveRequest,
    dir: &Path,
    sink: &mut Sink<'_>,
) -> Result<()> {
    let mut memory = MemoryPages(vec![0; options.mib << 20]);
    pages_into(0, &mut memory.0);
    let pages = memory.0.len() / PAGE_SIZE;
    let mut plain = Writer::new("write+fsync");
    let mut one = Writer::new("sha-256, 1 thread");
    let mut two = Writer::new("sha-256, 2 threads");
    let mut whole = Writer::new("snapshot");
    let mut hundredth = Writer::new("snapshot-delta-1%");
    let mut few = Writer::new("snapshot-delta-256-pages");
    let file = dir.join("plain");
    let dir = dir.join("store");
    for round in 0..options.rounds {
        // The first of the two uses up the cache of a disk, or its share of one. So they take
        // turns.
        if round % 2 == 0 {
            plain.time(|| write_and_sync(&file, &memory.0))?;
        }
        let store = Store::create(&dir)?;
        whole.time(|| Ok(store.save("whole", &memory, save)?))?;
        if round % 2 == 1 {
            plain.time(|| write_and_sync(&file, &memory.0))?;
        }
        std::fs::remove_file(&file)?;
        one.time(|| hash(&memory.0, 1))?;
        two.time(|| hash(&memory.0, 2))?;

        let mut delta = save.clone();
        delta.options.parent = Some(store.load("whole")?);
        delta.options.changed = Some(change(&mut memory, 100));
        hundredth.time(|| Ok(store.save("delta", &memory, &delta)?))?;

        delta.options.parent = Some(store.load("delta")?);
        delta.options.changed = Some(change(&mut memory, pages.div_ceil(DELTA_PAGES).max(1)));
        delta.options.compared = true;
        few.time(|| Ok(store.save("few", &memory, &delta)?))?;
        std::fs::remove_dir_all(&dir)?;
    }
    let gigabytes = |way: &Writer| {
        let best = way.samples.iter().map(|sample| sample.total).fold(f64::INFINITY, f64::min);
        json!((memory.0.len() as f64 / best / 1e6 * 100.0).round() / 100.0)
    };
    for way in [&plain, &one, &two, &whole, &hundredth, &few] {
        let line = Line {
            table: "snapshot-write",
            case: "random-data",
            strategy: way.name,
            samples: &way.samples,
            rival: &plain.samples,
            delays: None,
            extra: vec![("mib", json!(options.mib)), ("best_gb_s", gigabytes(way))],
        };
        sink(&line.row());
    }
    Ok(())
}
