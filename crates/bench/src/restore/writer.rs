//! The ways to write memory that the tables of saves compare, with their times.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use afresh_store::MemoryPages;
use afresh_sys::{PAGE_SIZE, PageRange};
use anyhow::Result;

use super::report::Sample;
use super::run::processor_time;

/// Pages of the small delta.
pub(super) const DELTA_PAGES: usize = 256;

/// A way to write, with its results.
pub(super) struct Writer {
    pub(super) name: &'static str,
    pub(super) samples: Vec<Sample>,
}

impl Writer {
    pub(super) fn new(name: &'static str) -> Self {
        Self { name, samples: Vec::new() }
    }

    pub(super) fn time<T>(&mut self, write: impl FnOnce() -> Result<T>) -> Result<T> {
        let (start, cpu) = (Instant::now(), processor_time());
        let written = write()?;
        let total = start.elapsed().as_secs_f64() * 1e3;
        let cpu = processor_time() - cpu;
        self.samples.push(Sample {
            total,
            first_1000: total,
            release: total,
            cpu,
            ..Sample::default()
        });
        Ok(written)
    }
}

pub(super) fn write_and_sync(path: &Path, memory: &[u8]) -> Result<()> {
    let mut file = File::create(path)?;
    memory.chunks(1 << 20).try_for_each(|piece| file.write_all(piece))?;
    Ok(file.sync_all()?)
}

/// Every page at a distance of `step`, as a tracker would report them.
pub(super) fn change(memory: &mut MemoryPages, step: usize) -> Vec<PageRange> {
    let pages = memory.0.len() / PAGE_SIZE;
    let changed: Vec<_> = (0..pages).step_by(step).map(|p| PageRange::new(p, 1)).collect();
    for range in &changed {
        memory.0[range.byte_start() + 100] ^= 0xff;
    }
    changed
}
