//! The promises of a slot with whole blocks of memory from a zero source.
#![cfg(not(miri))]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use afresh_frames::ZeroPool;
use afresh_memory::{
    Image, PAGE_SIZE, PageRange, Reservation, Slot, SlotConfig, Strategy, SysError, TrackerKind,
    ZeroPageSource,
};
use afresh_sys::{inject, usage};

/// Pages of a block.
pub(super) const BLOCK: usize = 512;
/// Pages that a slot has before it grows.
pub(super) const FIRST_PAGES: usize = 16;

/// A zero pool that can be shut, and counts the uses of its memory.
#[derive(Debug)]
pub(super) struct Gate {
    zero_pool: ZeroPool,
    pub(super) open: AtomicBool,
    used: AtomicUsize,
    wasted: AtomicUsize,
}

impl Gate {
    /// With `blocks` blocks ready.
    pub(super) fn new(blocks: usize) -> Arc<Self> {
        let zero_pool = ZeroPool::new(blocks * BLOCK).unwrap();
        let gate = Self { zero_pool, open: true.into(), used: 0.into(), wasted: 0.into() };
        gate.wait();
        Arc::new(gate)
    }

    fn wait(&self) {
        let started = Instant::now();
        while self.zero_pool.ready() < self.zero_pool.capacity() {
            assert!(started.elapsed() < Duration::from_secs(120), "the zero pool was starved");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn report_use(&self) -> (usize, usize) {
        (self.used.load(Ordering::Relaxed), self.wasted.load(Ordering::Relaxed))
    }
}

// SAFETY: moves nothing, or the same as the zero pool.
unsafe impl ZeroPageSource for Gate {
    fn supply(&self, memory: &Reservation, range: PageRange) -> Result<usize, SysError> {
        if self.open.load(Ordering::Relaxed) { self.zero_pool.supply(memory, range) } else { Ok(0) }
    }

    fn report_use(&self, used: usize, wasted: usize) {
        self.used.fetch_add(used, Ordering::Relaxed);
        self.wasted.fetch_add(wasted, Ordering::Relaxed);
    }
}

/// A slot that can grow by `blocks`, or `None` where no tracker here watches blocks.
pub(super) fn slot(gate: &Arc<Gate>, blocks: usize) -> Option<Slot> {
    let config = SlotConfig {
        capacity: Some(FIRST_PAGES + blocks * BLOCK),
        zero_source: Some(gate.clone()),
        ..SlotConfig::default()
    };
    let slot = Slot::new(&Image::zero(FIRST_PAGES), config).unwrap();
    if slot.choice().strategy == Strategy::WriteSet(Some(TrackerKind::UffdSigbus)) {
        return Some(slot);
    }
    println!("SKIPPED: blocks are watched by userfaultfd only; here: {}", slot.choice().reason);
    None
}

fn write(slot: &Slot, pages: impl Iterator<Item = usize>) {
    for page in pages {
        // SAFETY: the tests pass accessible pages of slots they own.
        unsafe { slot.base().add(page * PAGE_SIZE + 5).write_volatile(3) };
    }
}

/// Private memory of the slot in KiB, by the kernel's account.
fn held_kib(slot: &Slot) -> usize {
    let base = slot.base() as usize;
    let end = base + slot.capacity() * PAGE_SIZE;
    let (mut inside, mut held) = (false, 0);
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let mut words = line.split_whitespace();
        match (words.next().unwrap_or(""), words.next()) {
            ("Anonymous:", Some(kib)) if inside => held += kib.parse::<usize>().unwrap(),
            (range, _) => {
                let bounds = range.split_once('-').map(|(from, to)| {
                    (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16))
                });
                if let Some((Ok(from), Ok(to))) = bounds {
                    inside = from < end && to > base;
                }
            }
        }
    }
    held
}

fn faults(run: impl FnOnce()) -> u64 {
    let before = usage::faults().thread;
    run();
    usage::faults().thread - before
}

#[test]
fn growth_from_a_zero_source_costs_a_fault_a_block_and_none_from_then_on() {
    let gate = Gate::new(4);
    let Some(mut slot) = slot(&gate, 4) else { return };
    let end = FIRST_PAGES + 4 * BLOCK;
    for run in 0..40 {
        slot.grow(end).unwrap();
        let taken = faults(|| write(&slot, FIRST_PAGES..end));
        assert!(taken <= if run == 0 { 16 } else { 0 }, "{taken} faults in run {run}");
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);
        assert_eq!(slot.end(), FIRST_PAGES);
    }
    assert_eq!(gate.report_use(), (4 * BLOCK, 0));
}

#[test]
fn a_sparse_growth_gives_its_memory_back_at_the_first_reset() {
    let gate = Gate::new(4);
    let Some(mut slot) = slot(&gate, 4) else { return };
    let end = FIRST_PAGES + 4 * BLOCK;
    for _ in 0..3 {
        slot.grow(end).unwrap();
        write(&slot, [FIRST_PAGES, FIRST_PAGES + 700, FIRST_PAGES + 701].into_iter());
        slot.reset().unwrap();
        // Three pages, and the one that was opened ahead of a run of two.
        assert!(held_kib(&slot) <= 4 * 4, "{} KiB", held_kib(&slot));
        assert!(slot.write_set_len() <= 4);
        assert_eq!(slot.verify().unwrap(), []);
    }
    assert_eq!(gate.report_use(), (0, 4 * BLOCK), "asked again though it did not pay");
}

#[test]
fn dense_blocks_that_the_zero_pool_could_not_serve_are_served_when_it_can() {
    let gate = Gate::new(2);
    let Some(mut slot) = slot(&gate, 2) else { return };
    let end = FIRST_PAGES + 2 * BLOCK;
    gate.open.store(false, Ordering::Relaxed);
    slot.grow(end).unwrap();
    write(&slot, FIRST_PAGES..end);
    slot.reset().unwrap();
    gate.open.store(true, Ordering::Relaxed);
    for _ in 0..3 {
        slot.grow(end).unwrap();
        write(&slot, FIRST_PAGES..end);
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);
    }
    assert_eq!(gate.report_use(), (2 * BLOCK, 0));
}

#[test]
fn a_checkpoint_before_the_first_reset_keeps_what_it_froze() {
    let gate = Gate::new(2);
    let config = SlotConfig {
        zero_source: Some(gate.clone()),
        zero_pages_at_start: 2 * BLOCK,
        ..SlotConfig::default()
    };
    let mut slot = Slot::new(&Image::zero(2 * BLOCK), config).unwrap();
    slot.write(700 * PAGE_SIZE, b"kept").unwrap();
    slot.checkpoint().unwrap();
    slot.write(700 * PAGE_SIZE, b"lost").unwrap();
    slot.write(900 * PAGE_SIZE, b"lost").unwrap();
    slot.reset().unwrap();
    assert_eq!(slot.verify().unwrap(), []);
    let mut bytes = [0; 4];
    slot.read(700 * PAGE_SIZE, &mut bytes).unwrap();
    assert_eq!(&bytes, b"kept");
}

#[test]
fn a_slot_with_a_zero_source_is_correct_or_refused_after_any_failed_system_call() {
    let gate = Gate::new(2);
    for after in 0.. {
        gate.wait();
        let plan = inject::Plan { call: None, after, times: 1, errno: libc::ENOMEM };
        let (slot, fired) = inject::with(plan, || {
            let config = SlotConfig {
                capacity: Some(FIRST_PAGES + 2 * BLOCK),
                zero_source: Some(gate.clone()),
                ..SlotConfig::default()
            };
            let mut slot = Slot::new(&Image::zero(FIRST_PAGES), config).ok()?;
            for dense in [BLOCK, 3] {
                if slot.grow(FIRST_PAGES + 2 * BLOCK).is_ok() {
                    let _ = slot.write(FIRST_PAGES * PAGE_SIZE, &vec![9; dense * PAGE_SIZE]);
                }
                let _ = slot.reset();
            }
            let _ = slot.trim();
            Some(slot)
        });
        if let Some(mut slot) = slot.filter(|s| s.quarantined().is_none()) {
            slot.reset().unwrap();
            assert_eq!(slot.verify().unwrap(), [], "call {after} failed: {slot:?}");
        }
        if fired == 0 {
            assert!(after > 3, "too few system calls for a test");
            break;
        }
    }
}
