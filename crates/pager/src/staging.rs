//! Memory to read into before pages are put in place: slots handed out without a lock, for signal
//! handlers take them too.

use std::sync::atomic::{AtomicU64, Ordering};

use afresh_sys::{Advice, PageRange, Protection, Reservation, SysError};

/// Number of slots; more threads than that wait for one another.
const SLOTS: usize = 32;

/// A pool of equal pieces of anonymous memory.
#[derive(Debug)]
pub(crate) struct Staging {
    memory: Reservation,
    slot_pages: usize,
    /// A bit for each slot in use.
    used: AtomicU64,
}

/// A slot, given back when dropped.
pub(crate) struct Slot<'a> {
    pool: &'a Staging,
    number: usize,
}

impl Staging {
    /// Slots of `slot_pages` pages each.
    pub(crate) fn new(slot_pages: usize) -> Result<Self, SysError> {
        let pages = slot_pages * SLOTS;
        let memory = Reservation::new(pages)?;
        let all = PageRange::new(0, pages);
        memory.map_anonymous(all, Protection::ReadWrite)?;
        // Pages that are moved one by one must not be parts of a huge one, which would be split.
        memory.advise(all, Advice::NoHugePage)?;
        Ok(Self { memory, slot_pages, used: AtomicU64::new(0) })
    }

    /// Pages in a slot.
    pub(crate) fn slot_pages(&self) -> usize {
        self.slot_pages
    }

    /// Takes a slot, giving way until one is free. Its holder gives it back after one read and one
    /// system call.
    pub(crate) fn take(&self) -> Slot<'_> {
        loop {
            let used = self.used.load(Ordering::Relaxed);
            let number = (!used).trailing_zeros() as usize;
            if number >= SLOTS {
                std::thread::yield_now();
                continue;
            }
            let taken = used | 1 << number;
            let swap =
                self.used.compare_exchange_weak(used, taken, Ordering::Acquire, Ordering::Relaxed);
            if swap.is_ok() {
                return Slot { pool: self, number };
            }
        }
    }
}

impl Slot<'_> {
    /// The slot's memory, `slot_pages` pages.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.pool.memory.page_ptr(self.number * self.pool.slot_pages)
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.pool.used.fetch_and(!(1 << self.number), Ordering::Release);
    }
}
