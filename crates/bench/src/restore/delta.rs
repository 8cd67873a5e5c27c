//! A delta of 256 pages of a large memory, in a store in memory: the time that a save takes without
//! the disk.

use std::path::Path;

use afresh_store::{MemoryPages, SaveRequest, Store};
use afresh_sys::PAGE_SIZE;
use anyhow::Result;
use serde_json::json;

use super::Options;
use super::corpus::{Scratch, pages_into};
use super::report::Line;
use super::writer::{DELTA_PAGES, Writer, change, write_and_sync};
use crate::Sink;

/// The memory of the micro-VM that the goal names, in MiB. Smaller runs have as much as their other
/// cases.
const MIB: usize = 950;
/// A file system without a disk.
const MEMORY_DIR: &str = "/dev/shm";
/// A save takes a few milliseconds, so more rounds cost little.
const MIN_ROUNDS: usize = 31;

/// Saves the delta, with the write of its pages alone as the rival.
pub(super) fn run(options: &Options, save: &SaveRequest, sink: &mut Sink<'_>) -> Result<()> {
    let scratch = match Scratch::new(Path::new(MEMORY_DIR)) {
        Ok(scratch) => scratch,
        Err(error) => {
            eprintln!("delta-in-memory left out: {MEMORY_DIR}: {error:#}");
            return Ok(());
        }
    };
    let is_full = !options.quick && options.mib >= Options::default().mib;
    let mib = if is_full { MIB } else { options.mib };
    let mut memory = MemoryPages(vec![0; mib << 20]);
    pages_into(0, &mut memory.0);
    let store = Store::create(scratch.path().join("store"))?;
    store.save("whole", &memory, save)?;
    let step = (memory.0.len() / PAGE_SIZE).div_ceil(DELTA_PAGES).max(1);
    let mut plain = Writer::new("write");
    let mut delta = Writer::new("snapshot-delta-256-pages");
    let file = scratch.path().join("plain");
    for _ in 0..options.rounds.max(MIN_ROUNDS) {
        let changed = change(&mut memory, step);
        let pages: Vec<u8> = changed
            .iter()
            .flat_map(|run| &memory.0[run.byte_start()..][..run.byte_len()])
            .copied()
            .collect();
        plain.time(|| write_and_sync(&file, &pages))?;
        let mut saving = save.clone();
        saving.options.parent = Some(store.load("whole")?);
        saving.options.changed = Some(changed);
        saving.options.compared = true;
        delta.time(|| Ok(store.save("delta", &memory, &saving)?))?;
    }
    for way in [&plain, &delta] {
        let line = Line {
            table: "snapshot-write",
            case: "delta-in-memory",
            strategy: way.name,
            samples: &way.samples,
            rival: &plain.samples,
            delays: None,
            extra: vec![("mib", json!(mib))],
        };
        sink(&line.row());
    }
    Ok(())
}
