//! `bench arena`: dirtying pages of a plain 4 MiB slot and resetting it, by every strategy; and the
//! first run of a new slot of 16 MiB of zero memory, all written, with a zero pool to come from and
//! without.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh_frames::ZeroPool;
use afresh_memory::{
    Features, HostAccess, Image, ImageBuilder, PAGE_SIZE, Slot, SlotConfig, Strategy,
};

use crate::row::{Contestant, Options, Sink, contest};

/// Pages of the slot.
const PAGES: usize = 1024;

/// All strategies at 1, 16, 64 and 256 dirty pages.
///
/// # Errors
/// The first that any contestant meets.
pub fn all(options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let mut builder = ImageBuilder::new(PAGES);
    builder.segment(0, &vec![7; PAGES / 2 * PAGE_SIZE])?;
    let image = builder.build()?;
    for dirty in [1, 16, 64, 256] {
        let case = format!("4MiB/{dirty}");
        let mut slots = Vec::new();
        for strategy in std::iter::once(Strategy::Auto).chain(Strategy::FORCED) {
            if strategy.choose(Features::host(), HostAccess::Threads).is_err() {
                continue;
            }
            let config = SlotConfig { strategy, ..SlotConfig::default() };
            slots.push((strategy.to_string(), RefCell::new(Slot::new(&image, config)?)));
        }
        let touch = |slot: &Slot| {
            for n in 0..dirty {
                let page = n * (PAGES / dirty);
                // SAFETY: the page is in the slot, which only this contestant uses.
                unsafe { slot.base().add(page * PAGE_SIZE).write_volatile(1) };
            }
        };
        let mut field: Vec<Contestant<'_>> = Vec::new();
        for (name, slot) in &slots {
            field.push(Contestant::new(name, || {
                let mut slot = slot.borrow_mut();
                touch(&slot);
                slot.reset()?;
                Ok(())
            }));
        }
        contest("arena", &case, options, field, sink)?;
        for (name, slot) in &slots {
            let found = slot.borrow_mut().verify()?;
            anyhow::ensure!(found.is_empty(), "{case} {name}: {} pages differ", found.len());
        }
    }
    first(options, sink)
}

/// Pages of the slot that is new for every run.
const ZERO: usize = 4096;

/// Making a slot, its first run, which writes every page, and its first reset.
fn first(options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let image = Image::zero(ZERO);
    let zero_pool = Arc::new(ZeroPool::new(ZERO)?);
    let run = |pooled: bool| -> anyhow::Result<Duration> {
        let waited = Instant::now();
        while pooled && zero_pool.ready() < ZERO && waited.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(Duration::from_micros(100));
        }
        let mut config = SlotConfig::default();
        if pooled {
            config.zero_source = Some(zero_pool.clone());
            config.zero_pages_at_start = ZERO;
        }
        let started = Instant::now();
        let mut slot = Slot::new(&image, config)?;
        for page in 0..ZERO {
            // SAFETY: the page is in the slot, which only this run uses.
            unsafe { slot.base().add(page * PAGE_SIZE).write_volatile(1) };
        }
        slot.reset()?;
        let time = started.elapsed();
        let found = slot.verify()?;
        anyhow::ensure!(found.is_empty(), "a new slot: {} pages differ", found.len());
        Ok(time)
    };
    let field = [("auto", true), ("auto without zero pool", false)].map(|(name, pooled)| {
        Contestant::timed(name, move |runs| (0..runs).map(|_| run(pooled)).sum())
    });
    contest("arena", "16MiB/first", options, field.into(), sink)
}
