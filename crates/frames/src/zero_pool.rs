//! Private zero memory prepared ahead of time: populated by a background thread, supplied by moving
//! page tables.
//!
//! Frames of a [`crate::Pool`] are pages of a shared file, which not every user can take: memory
//! that is discarded with `madvise`, write-protected by its user's userfaultfd or copied by `fork`
//! must be private and anonymous. A zero pool keeps such memory populated, in huge pages where the
//! host has them, and moves it into place with one `mremap`. From then on it is the receiver's,
//! with no tie to the zero pool, and goes back to the kernel like any other.
//!
//! Promises: moved memory comes straight from the kernel, so it is zero and unused.
//! Memory that is not ready is left to the kernel's faults: a zero pool never blocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use afresh_sys::{
    Advice, HUGE_PAGES, HUGE_SIZE, PAGE_SIZE, PageRange, Protection, Reservation, SysError, Worker,
    ZeroPageSource, host,
};

use crate::{Lease, NewPoolError, TakeError, ZeroSource};

/// Pages from one huge page to the next. The pages between are not mapped, so each huge page is a
/// separate mapping, and moving one never waits for the fault that populates another.
const STRIDE: usize = 2 * HUGE_PAGES;
/// Huge pages populated between two questions to the host.
const BATCH: usize = 16;
/// Memory that the zero pool always leaves free.
const HEADROOM: u64 = 64 << 20;
/// Time between two looks for huge pages to populate while some are being taken.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Looks without work before the thread sleeps until woken.
const IDLE_POLLS: u32 = 8;
/// Time before the thread tries again after the host had no memory to spare.
const LOW_MEMORY_INTERVAL: Duration = Duration::from_millis(500);

const EMPTY: u8 = 0;
const FILLING: u8 = 1;
const READY: u8 = 2;
const TAKING: u8 = 3;

/// A source of private zero memory.
#[derive(Debug)]
pub struct ZeroPool {
    shared: Arc<ZeroPoolState>,
    thread: Option<Worker>,
}

#[derive(Debug)]
struct ZeroPoolState {
    memory: Reservation,
    hugepages: Box<[AtomicU8]>,
    stop: AtomicBool,
    asleep: AtomicBool,
    cpu_ns: AtomicU64,
}

impl ZeroPool {
    /// Makes a zero pool that keeps `pages` pages (rounded up to 2 MiB) ready. They are populated
    /// by a thread at idle priority; [`ZeroPool::ready`] returns its progress.
    ///
    /// # Errors
    /// When address space or a thread is unavailable.
    pub fn new(pages: usize) -> Result<Self, NewPoolError> {
        let pages = pages.max(1).next_multiple_of(HUGE_PAGES);
        let memory = Reservation::aligned(pages / HUGE_PAGES * STRIDE, HUGE_SIZE)?;
        for hugepage in 0..pages / HUGE_PAGES {
            let place = place_of(hugepage);
            memory.map_anonymous(place, Protection::ReadWrite)?;
            // Refused where the kernel was built without huge pages; small ones do too.
            let _ = memory.advise(place, Advice::HugePage);
        }
        let shared = Arc::new(ZeroPoolState {
            memory,
            hugepages: (0..pages / HUGE_PAGES).map(|_| AtomicU8::new(EMPTY)).collect(),
            stop: false.into(),
            asleep: false.into(),
            cpu_ns: 0.into(),
        });
        let state = shared.clone();
        let thread = Worker::start("afresh-zeropool", move || run(&state));
        let thread = thread.map_err(NewPoolError::Thread)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Pages ready to be moved.
    #[must_use]
    pub fn ready(&self) -> usize {
        let ready = |hugepage: &&AtomicU8| hugepage.load(Ordering::Relaxed) == READY;
        self.shared.hugepages.iter().filter(ready).count() * HUGE_PAGES
    }

    /// Pages it keeps ready when it has had the time.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.shared.hugepages.len() * HUGE_PAGES
    }

    /// Processor time the thread has used.
    #[must_use]
    pub fn cpu_time(&self) -> Duration {
        Duration::from_nanos(self.shared.cpu_ns.load(Ordering::Relaxed))
    }

    /// Makes `range` of `memory` accessible private zero memory, as much of it as is ready moved
    /// from the zero pool. Returns the pages moved; the others are the kernel's to fill at first
    /// touch. Whole 2 MiB of address space are moved only, so `memory` should be aligned to that.
    ///
    /// # Errors
    /// When the kernel refuses a mapping; the range is in an unknown state then.
    pub fn extend(&self, memory: &Reservation, range: PageRange) -> Result<usize, TakeError> {
        memory.map_anonymous(range, Protection::ReadWrite)?;
        Ok(self.move_into(memory, range)?)
    }

    /// Moves ready pages to the 2 MiB of address space in `range`, in order; returns the number of
    /// pages moved.
    fn move_into(&self, memory: &Reservation, range: PageRange) -> Result<usize, SysError> {
        let base = memory.base().as_ptr() as usize / PAGE_SIZE;
        let mut at = (base + range.start).next_multiple_of(HUGE_PAGES) - base;
        let mut moved = 0;
        while at + HUGE_PAGES <= range.end() {
            let Some(hugepage) = self.shared.claim() else { break };
            let result = memory.take_pages(at, &self.shared.memory, place_of(hugepage));
            // Nothing should have moved after a failure, but that is not certain; populating pages
            // that are still there does no harm.
            self.shared.set(hugepage, EMPTY);
            if result.is_err() {
                memory.map_anonymous(PageRange::new(at, HUGE_PAGES), Protection::ReadWrite)?;
                break;
            }
            at += HUGE_PAGES;
            moved += HUGE_PAGES;
        }
        if moved > 0 {
            self.wake();
        }
        Ok(moved)
    }

    fn wake(&self) {
        if self.shared.asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = &self.thread
        {
            thread.unpark();
        }
    }
}

impl ZeroSource for ZeroPool {
    /// Pages that are not ready come from the kernel, by its rules for overcommitment.
    fn fill(&self, memory: &Reservation, range: PageRange) -> Result<Lease, TakeError> {
        self.extend(memory, range)?;
        Ok(Lease::of_kernel(range))
    }
}

// SAFETY: a huge page is claimed by one taker, holds the kernel's zeros and those of
// `populate_one`, and is moved by `mremap`, which leaves the zero pool no access to it.
unsafe impl ZeroPageSource for ZeroPool {
    fn supply(&self, memory: &Reservation, range: PageRange) -> Result<usize, SysError> {
        self.move_into(memory, range)
    }
}

impl Drop for ZeroPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.unpark();
            thread.join();
        }
    }
}

impl ZeroPoolState {
    /// Claims a huge page that is ready.
    fn claim(&self) -> Option<usize> {
        let claim = |hugepage: &AtomicU8| {
            // Acquire: the population must be over before the pages move.
            hugepage.compare_exchange(READY, TAKING, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        self.hugepages.iter().position(claim)
    }

    fn set(&self, hugepage: usize, state: u8) {
        // A taker stores EMPTY and then looks whether the thread is asleep; the thread stores that
        // and then looks for EMPTY. One of them must see the other's store, which release and
        // acquire do not promise.
        self.hugepages[hugepage].store(state, Ordering::SeqCst);
    }

    fn has_empty(&self) -> bool {
        self.hugepages.iter().any(|hugepage| hugepage.load(Ordering::SeqCst) == EMPTY)
    }

    /// Populates empty huge pages, as many as the host has memory to spare for; `false` when it has
    /// too little, or nothing was left to do. The host's headroom is read once for a batch: reading
    /// it costs about the same as populating a huge page.
    fn populate_some(&self) -> bool {
        let spare = host::memory_headroom().map_or(u64::MAX, |free| free.saturating_sub(HEADROOM));
        let hugepages = usize::try_from(spare / HUGE_SIZE as u64).unwrap_or(BATCH).min(BATCH);
        hugepages > 0
            && (0..hugepages).all(|_| !self.stop.load(Ordering::Relaxed) && self.populate_one())
    }

    /// Populates one empty huge page; `false` without one.
    fn populate_one(&self) -> bool {
        let fill = |hugepage: &AtomicU8| {
            hugepage.compare_exchange(EMPTY, FILLING, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let Some(at) = self.hugepages.iter().position(fill) else { return false };
        // By faults and not by `MADV_POPULATE_WRITE`, which would hold the lock of the whole
        // address space while the kernel zeroes: a fault locks this mapping only.
        for page in place_of(at).start..place_of(at).end() {
            // SAFETY: the zero pool's memory is mapped writable, and the huge page is ours until it
            // is READY.
            unsafe { self.memory.page_ptr(page).write_volatile(0) };
        }
        self.set(at, READY);
        true
    }
}

/// The pages of a huge page in the zero pool.
fn place_of(hugepage: usize) -> PageRange {
    PageRange::new(hugepage * STRIDE, HUGE_PAGES)
}

fn run(zero_pool: &ZeroPoolState) {
    // Where a sandbox forbids it, the thread runs at normal priority.
    let _ = host::run_when_idle();
    let stopped = || zero_pool.stop.load(Ordering::SeqCst);
    while !stopped() {
        while zero_pool.has_empty() && zero_pool.populate_some() {}
        zero_pool.cpu_ns.store(host::thread_cpu_time().as_nanos() as u64, Ordering::Relaxed);
        if zero_pool.has_empty() && !stopped() {
            thread::park_timeout(LOW_MEMORY_INTERVAL);
            continue;
        }
        for _ in 0..IDLE_POLLS {
            if zero_pool.has_empty() || stopped() {
                break;
            }
            thread::park_timeout(POLL_INTERVAL);
        }
        zero_pool.asleep.store(true, Ordering::SeqCst);
        if !zero_pool.has_empty() && !stopped() {
            thread::park();
        }
        zero_pool.asleep.store(false, Ordering::SeqCst);
    }
}
