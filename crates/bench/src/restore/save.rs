//! How fast snapshots are written.

use std::fs::File;
use std::io::Write;
use std::time::Instant;

use afresh_store::{Encoding, GuestBuild, MemoryPages, SaveOptions, Store};
use afresh_sys::{PAGE_SIZE, PageRange};
use anyhow::Result;
use serde_json::json;

use super::Options;
use super::corpus::{Scratch, pages_into};
use super::report::{Line, Sample};
use crate::Sink;

fn sample(start: Instant) -> Sample {
    let total = start.elapsed().as_secs_f64() * 1e3;
    Sample { total, first_1000: total, release: total, ..Sample::default() }
}

pub(super) fn run(options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let scratch = Scratch::new(&options.dir)?;
    let mut memory = MemoryPages(vec![0; options.mib << 20]);
    pages_into(0, &mut memory.0);
    let pages = memory.0.len() / PAGE_SIZE;
    let names = ["write+fsync", "snapshot", "snapshot-delta-1%"];
    let mut samples = vec![Vec::new(); names.len()];
    let mut save = SaveOptions::new(GuestBuild {
        kind: "bench".to_owned(),
        module: "none".to_owned(),
        engine: "none".to_owned(),
        cpu: Vec::new(),
    });
    save.encoding = Encoding::Raw;
    for _ in 0..options.rounds {
        let plain = scratch.path().join("plain");
        let start = Instant::now();
        let mut file = File::create(&plain)?;
        memory.0.chunks(1 << 20).try_for_each(|piece| file.write_all(piece))?;
        file.sync_all()?;
        samples[0].push(sample(start));
        std::fs::remove_file(plain)?;

        let dir = scratch.path().join("store");
        let store = Store::create(&dir)?;
        let start = Instant::now();
        store.save("whole", &memory, &save)?;
        samples[1].push(sample(start));

        let mut delta = save.clone();
        delta.parent = Some(store.load("whole")?);
        // Every hundredth page, as a tracker would report them.
        let changed: Vec<_> = (0..pages).step_by(100).map(|p| PageRange::new(p, 1)).collect();
        for range in &changed {
            memory.0[range.byte_start() + 100] ^= 0xff;
        }
        delta.changed = Some(changed);
        let start = Instant::now();
        store.save("delta", &memory, &delta)?;
        samples[2].push(sample(start));
        std::fs::remove_dir_all(dir)?;
    }
    for (name, these) in names.iter().zip(&samples) {
        let line = Line {
            table: "snapshot-write",
            case: "random-data",
            strategy: name,
            samples: these,
            rival: &samples[0],
            delays: None,
            extra: vec![("mib", json!(options.mib))],
        };
        sink(&line.row());
    }
    Ok(())
}
