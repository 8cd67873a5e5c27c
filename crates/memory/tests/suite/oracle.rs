//! One property test drives every strategy: after any sequence of writes, growths, resets, image
//! switches, freezes and trims, a reset leaves every byte equal to a naive full copy.
#![cfg(not(miri))]

use crate::common;

use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use afresh_frames::ZeroPool;
use afresh_memory::{
    Features, HostAccess, Image, ImageBuilder, PAGE_SIZE, PageRange, Slot, SlotConfig, Strategy,
    TrackerKind,
};
use afresh_sys::planted::{self, Bug};
use proptest::prelude::*;

/// The naive model: plain vectors, copied whole.
struct Model {
    image: Vec<u8>,
    live: Vec<u8>,
}

impl Model {
    fn reset(&mut self) {
        self.live = self.image.clone();
    }
}

#[derive(Clone, Debug)]
enum Op {
    Write {
        page: usize,
        offset: usize,
        len: usize,
        byte: u8,
    },
    /// Every `step`th page of a range, from `threads` threads at once.
    Scatter {
        page: usize,
        count: usize,
        step: usize,
        byte: u8,
        threads: usize,
    },
    Grow {
        pages: usize,
    },
    Reset,
    Steady {
        page: usize,
        count: usize,
        runs: usize,
    },
    Switch {
        seed: u8,
    },
    Freeze,
    /// A capture that is copied while later operations run; completed at once every other time.
    Capture {
        prepare: bool,
        complete: bool,
    },
    Trim,
    Preload {
        page: usize,
        len: usize,
    },
    /// Grows by whole 2 MiB and writes `count` of the new pages, `step` apart, from one thread or
    /// two.
    GrowFar {
        blocks: usize,
        skip: usize,
        count: usize,
        step: usize,
        byte: u8,
        threads: usize,
    },
}

fn op() -> impl Strategy_ {
    prop_oneof![
        6 => (0..160usize, 0..PAGE_SIZE, 1..3 * PAGE_SIZE, any::<u8>())
            .prop_map(|(page, offset, len, byte)| Op::Write { page, offset, len, byte }),
        3 => (0..120usize, 1..80usize, 1..4usize, any::<u8>(), 1..3usize)
            .prop_map(|(page, count, step, byte, threads)| Op::Scatter { page, count, step, byte, threads }),
        2 => (1..24usize).prop_map(|pages| Op::Grow { pages }),
        6 => Just(Op::Reset),
        2 => (0..100usize, 1..40usize, 1..140usize)
            .prop_map(|(page, count, runs)| Op::Steady { page, count, runs }),
        1 => any::<u8>().prop_map(|seed| Op::Switch { seed }),
        1 => Just(Op::Freeze),
        2 => (any::<bool>(), any::<bool>())
            .prop_map(|(prepare, complete)| Op::Capture { prepare, complete }),
        1 => Just(Op::Trim),
        1 => (0..150usize, 1..20usize).prop_map(|(page, len)| Op::Preload { page, len }),
    ]
}

/// The same and growth by whole blocks, densely written or hardly at all.
fn far_op() -> impl Strategy_ {
    let dense = (1..4usize, 0..700usize, 1..1500usize, 1..4usize, any::<u8>(), 1..3usize);
    let sparse = (1..4usize, 0..1500usize, 0..6usize, 1..300usize, any::<u8>(), 1..3usize);
    let far = prop_oneof![dense, sparse].prop_map(|(blocks, skip, count, step, byte, threads)| {
        Op::GrowFar { blocks, skip, count, step, byte, threads }
    });
    prop_oneof![2 => op(), 1 => far]
}

// Two different things are called strategy here.
use proptest::strategy::Strategy as ProptestStrategy;
trait Strategy_: ProptestStrategy<Value = Op> {}
impl<T: ProptestStrategy<Value = Op>> Strategy_ for T {}

const CAPACITY: usize = 256;
/// Room for growth by some blocks of 512 pages.
const FAR: usize = 140 + 5 * 512;

/// The zero source in tests that use one.
static ZERO_POOL: LazyLock<Arc<ZeroPool>> =
    LazyLock::new(|| Arc::new(ZeroPool::new(16 * 512).unwrap()));

/// Gives the zero pool time to have `pages` ready; without them slots grow as if there were none.
fn wait_for(pages: usize) {
    let started = Instant::now();
    while ZERO_POOL.ready() < pages && started.elapsed() < Duration::from_millis(500) {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A sparse image with zero pages, a long run and some islands, different for each seed; every
/// third is filled only when its pages are needed.
fn image(seed: u8, regions: &[PageRange]) -> (Image, Vec<u8>) {
    let pages = regions.last().unwrap().end();
    let mut bytes = vec![0u8; pages * PAGE_SIZE];
    for (i, region) in regions.iter().enumerate() {
        for page in region.start..region.end() {
            let kind = (page * 7 + seed as usize + i) % 11;
            if kind < 5 {
                let fill = (page as u8).wrapping_mul(31) ^ seed;
                bytes[page * PAGE_SIZE + kind..(page + 1) * PAGE_SIZE - kind].fill(fill);
            }
        }
    }
    if seed % 3 == 2 {
        return (common::lazy_image(&bytes, &common::occupied(&bytes), Duration::ZERO).0, bytes);
    }
    let mut builder = ImageBuilder::new(pages);
    for region in regions {
        let range = region.byte_start()..region.byte_start() + region.byte_len();
        builder.segment(region.byte_start(), &bytes[range]).unwrap();
    }
    (builder.build().unwrap(), bytes)
}

fn writable(slot: &Slot, page: usize) -> bool {
    let last = slot.regions().len() - 1;
    slot.regions().iter().enumerate().any(|(i, r)| {
        let end = if i == last { slot.end() } else { r.end() };
        page >= r.start && page < end
    })
}

/// A slot whose memory several threads write.
struct SharedSlot<'a>(&'a Slot);
// SAFETY: the threads use only the slot's address, and write separate pages.
unsafe impl Send for SharedSlot<'_> {}

fn poke(slot: &Slot, page: usize, byte: u8) {
    // SAFETY: the callers checked that the page is accessible; racing writers write the same byte.
    unsafe { slot.base().add(page * PAGE_SIZE + 17).write_volatile(byte) };
}

fn compare(slot: &Slot, model: &[u8], context: &str) {
    for page in (0..slot.end()).filter(|p| writable(slot, *p)) {
        let mut live = vec![0; PAGE_SIZE];
        slot.read(page * PAGE_SIZE, &mut live).unwrap();
        let expected = &model[page * PAGE_SIZE..(page + 1) * PAGE_SIZE];
        assert!(live == expected, "{context}: page {page} differs from the model");
    }
}

fn run(strategy: Strategy, regions: &[PageRange], capacity: usize, at_start: usize, ops: &[Op]) {
    let (first, bytes) = image(1, regions);
    let config = SlotConfig {
        strategy,
        capacity: Some(capacity),
        regions: regions.to_vec(),
        // Small, so that it is reached; but blocks are larger.
        write_set_limit: if capacity == FAR { 2000 } else { 100 },
        zero_source: (capacity == FAR).then(|| ZERO_POOL.clone() as _),
        zero_pages_at_start: at_start,
        ..SlotConfig::default()
    };
    let mut slot = Slot::new(&first, config).unwrap();
    let mut model = Model { live: bytes.clone(), image: bytes };
    let mut captures = Vec::new();
    let mut preparation = None;
    for op in ops {
        match op {
            Op::Capture { prepare: true, .. } => {
                preparation = Some(slot.prepare_freeze().unwrap());
            }
            Op::Capture { prepare: false, complete } => {
                if let Some(preparation) = preparation.take().filter(|_| *complete) {
                    preparation.run().unwrap();
                }
                let frozen = slot.freeze_live().unwrap();
                if *complete {
                    frozen.complete().unwrap();
                }
                captures.push((frozen, model.live.clone(), slot.end()));
            }
            Op::Write { page, offset, len, byte } => {
                let at = page * PAGE_SIZE + offset;
                let data = vec![*byte; *len];
                if slot.write(at, &data).is_ok() {
                    model.live[at..at + len].copy_from_slice(&data);
                }
            }
            Op::Scatter { page, count, step, byte, threads } => {
                let pages: Vec<usize> = (0..*count)
                    .map(|i| page + i * step)
                    .filter(|p| *p < capacity && writable(&slot, *p))
                    .collect();
                for p in &pages {
                    model.live[p * PAGE_SIZE + 17] = *byte;
                }
                let base = slot.base() as usize;
                std::thread::scope(|scope| {
                    for t in 0..*threads {
                        let pages = &pages;
                        scope.spawn(move || {
                            for p in pages.iter().skip(t).step_by(*threads) {
                                let at = (base + p * PAGE_SIZE + 17) as *mut u8;
                                // SAFETY: accessible, and each page has one writer.
                                unsafe { at.write_volatile(*byte) };
                            }
                        });
                    }
                });
            }
            Op::Grow { pages } => {
                let end = slot.end() + pages;
                match slot.grow(end) {
                    Ok(()) => model.live.resize(end * PAGE_SIZE, 0),
                    Err(_) => assert!(end > capacity),
                }
            }
            Op::Reset => {
                slot.reset().unwrap();
                model.reset();
                assert_eq!(slot.end(), regions.last().unwrap().end());
                assert_eq!(slot.verify().unwrap(), []);
            }
            Op::Steady { page, count, runs } => {
                slot.reset().unwrap();
                model.reset();
                let pages: Vec<usize> =
                    (*page..page + count).filter(|p| writable(&slot, *p)).collect();
                for n in 0..*runs {
                    for p in &pages {
                        poke(&slot, *p, n as u8 | 1);
                    }
                    slot.reset().unwrap();
                }
                assert_eq!(slot.verify().unwrap(), []);
            }
            Op::Switch { seed } => {
                let (next, bytes) = image(*seed, regions);
                slot.set_image(&next, regions).unwrap();
                model = Model { live: bytes.clone(), image: bytes };
            }
            Op::Freeze => {
                let frozen = slot.freeze().unwrap();
                for page in (0..slot.end()).filter(|p| writable(&slot, *p)) {
                    let mut out = vec![0; PAGE_SIZE];
                    frozen.read(page * PAGE_SIZE, &mut out);
                    let expected = &model.live[page * PAGE_SIZE..(page + 1) * PAGE_SIZE];
                    assert!(out == expected, "frozen page {page} differs");
                }
            }
            Op::Trim => {
                slot.reset().unwrap();
                slot.trim().unwrap();
                model.reset();
            }
            Op::GrowFar { blocks, skip, count, step, byte, threads } => {
                let from = slot.end();
                let end = (from + blocks * 512).min(capacity);
                wait_for(blocks * 512);
                slot.grow(end).unwrap();
                model.live.resize(end * PAGE_SIZE, 0);
                let pages: Vec<usize> = (from + skip..end).step_by(*step).take(*count).collect();
                for p in &pages {
                    model.live[p * PAGE_SIZE + 17] = *byte;
                }
                std::thread::scope(|scope| {
                    for t in 0..*threads {
                        let (slot, pages) = (SharedSlot(&slot), &pages);
                        scope.spawn(move || {
                            let slot = slot;
                            pages
                                .iter()
                                .skip(t)
                                .step_by(*threads)
                                .for_each(|p| poke(slot.0, *p, *byte));
                        });
                    }
                });
            }
            Op::Preload { page, len } => slot.preload(&[PageRange::new(*page, *len)]).unwrap(),
        }
        compare(&slot, &model.live, &format!("after {op:?}"));
    }
    let last = slot.regions().len() - 1;
    let regions: Vec<PageRange> = slot.regions().to_vec();
    for (frozen, model, end) in captures {
        frozen.complete().unwrap();
        for (number, region) in regions.iter().enumerate() {
            let until = if number == last { end } else { region.end() };
            let bytes = region.byte_start()..until * PAGE_SIZE;
            let mut out = vec![0; bytes.len()];
            frozen.read(bytes.start, &mut out);
            assert!(out == model[bytes], "a capture differs from the model");
        }
    }
    slot.reset().unwrap();
    model.reset();
    compare(&slot, &model.live, "at the end");
    assert_eq!(slot.verify().unwrap(), []);
}

fn strategies() -> Vec<Strategy> {
    Strategy::FORCED
        .into_iter()
        .chain([Strategy::Auto])
        .filter(|s| match s.choose(Features::host(), HostAccess::Threads) {
            Ok(_) => true,
            Err(error) => {
                println!("SKIPPED: {s}: {error}");
                false
            }
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_strategy_restores_what_the_full_copy_restores(ops in prop::collection::vec(op(), 1..24)) {
        for strategy in strategies() {
            run(strategy, &[PageRange::new(0, 140)], CAPACITY, 0, &ops);
            let regions = [PageRange::new(2, 30), PageRange::new(40, 7), PageRange::new(90, 50)];
            run(strategy, &regions, CAPACITY, 0, &ops);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn zero_memory_from_a_source_is_restored_too(ops in prop::collection::vec(far_op(), 1..16)) {
        for strategy in strategies() {
            run(strategy, &[PageRange::new(0, 140)], FAR, 0, &ops);
            // The image itself has room for blocks.
            let regions = [PageRange::new(2, 30), PageRange::new(90, 50), PageRange::new(200, 1200)];
            run(strategy, &regions, FAR, 1024, &ops);
        }
    }
}

/// Sequences that each reach a part of the reset that a planted bug breaks. Random sequences may
/// miss it.
fn certain_sequences() -> [Vec<Op>; 3] {
    let write = |page, byte| Op::Write { page, offset: 5, len: 1, byte };
    [
        // A write that is learned, and then one that is copied back without a fault.
        vec![write(100, 1), Op::Reset, write(100, 2), Op::Reset],
        // Forward writes, for which the handler opens several pages at a time.
        vec![Op::Scatter { page: 100, count: 30, step: 1, byte: 3, threads: 1 }, Op::Reset],
        // A page that leaves the write set and is written again.
        vec![
            write(100, 1),
            Op::Reset,
            Op::Steady { page: 3, count: 1, runs: 140 },
            write(100, 2),
            Op::Reset,
        ],
    ]
}

#[test]
fn certain_sequences_are_restored_by_every_strategy() {
    for strategy in strategies() {
        for ops in certain_sequences() {
            run(strategy, &[PageRange::new(0, 140)], CAPACITY, 0, &ops);
        }
    }
}

#[test]
fn planted_bugs_of_trackers_are_caught() {
    let uffd = Strategy::WriteSet(Some(TrackerKind::UffdSigbus));
    if let Err(error) = uffd.choose(Features::host(), HostAccess::Threads) {
        println!("SKIPPED: planted bugs of the uffd tracker: {error}");
        return;
    }
    planted::must_be_caught(
        &[Bug::Mark, Bug::CopyBack, Bug::Learn, Bug::Rearm],
        &["oracle::certain_sequences_are_restored_by_every_strategy"],
    );
}
