//! Blocks on their way to the zeroing thread and back, without a lock.
//!
//! The thread runs at idle priority and may be off the processor while anything else runs. If it
//! could hold a lock then, every taker of memory would wait with it. So blocks change hands through
//! slots, each one atomic word:
//!
//! ```text
//!   EMPTY --offer--> DIRTY --claim--> BUSY --finish--> DONE(clean | absent | dirty) --harvest--> EMPTY
//!                      \--reclaim--> EMPTY
//! ```
//!
//! Offer, reclaim and harvest are called under the pool's lock, claim and finish by the thread.
//! A thread that is starved or dead keeps at most the one block it had claimed; every other can be
//! reclaimed.

use crate::frame::{Block, Order};
use crate::sync::{AtomicU64, AtomicUsize, Ordering};

/// Slots of a hand-over.
pub(crate) const SLOTS: usize = 128;

const EMPTY: u64 = 0;
const DIRTY: u64 = 1;
const BUSY: u64 = 2;
const DONE_CLEAN: u64 = 3;
const DONE_ABSENT: u64 = 4;
const DONE_DIRTY: u64 = 5;

/// The result of the thread for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Zeroed.
    Clean,
    /// Its memory went back to the kernel.
    Absent,
    /// Unchanged: the thread was stopped on the way.
    Dirty,
}

fn pack(state: u64, block: Block) -> u64 {
    u64::from(block.start) << 32 | (block.order.index() as u64) << 8 | state
}

fn unpack(word: u64) -> (u64, Block) {
    let order = Order::new((word >> 8) as u8);
    (word & 0xff, Block { start: (word >> 32) as u32, order })
}

/// A block claimed by the thread, and the slot it must be finished in.
#[derive(Debug)]
#[must_use]
pub(crate) struct Claim {
    slot: usize,
    pub(crate) block: Block,
}

#[derive(Debug)]
pub(crate) struct Handoff<const N: usize = SLOTS> {
    slots: [AtomicU64; N],
    /// Slots in state DIRTY or about to be; a hint that saves walking the slots.
    offered: AtomicUsize,
    /// Slots in a DONE state, or about to be.
    done: AtomicUsize,
    /// Pages in all slots. Changed under the pool's lock only.
    pages: AtomicUsize,
}

impl<const N: usize> Handoff<N> {
    pub(crate) fn new() -> Self {
        Self {
            slots: std::array::from_fn(|_| AtomicU64::new(EMPTY)),
            offered: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            pages: AtomicUsize::new(0),
        }
    }

    /// Pages on their way.
    pub(crate) fn pages(&self) -> usize {
        self.pages.load(Ordering::Relaxed)
    }

    /// Whether a block waits to be claimed.
    pub(crate) fn has_offers(&self) -> bool {
        self.offered.load(Ordering::SeqCst) > 0
    }

    /// Offers a block; gives it back when every slot is taken.
    pub(crate) fn offer(&self, block: Block) -> Result<(), Block> {
        // Only holders of the lock fill empty slots, so a load is enough.
        let Some(slot) = self.slots.iter().find(|slot| slot.load(Ordering::Relaxed) == EMPTY)
        else {
            return Err(block);
        };
        self.pages.fetch_add(block.pages(), Ordering::Relaxed);
        self.offered.fetch_add(1, Ordering::SeqCst);
        // Release: the thread that claims it must see what the last holder wrote, before it zeroes.
        slot.store(pack(DIRTY, block), Ordering::Release);
        Ok(())
    }

    /// Takes an offered block of at least `least` back from the queue.
    pub(crate) fn reclaim(&self, least: Order) -> Option<Block> {
        if !self.has_offers() {
            return None;
        }
        self.slots.iter().find_map(|slot| {
            let word = slot.load(Ordering::Relaxed);
            let (state, block) = unpack(word);
            if state != DIRTY || block.order < least {
                return None;
            }
            slot.compare_exchange(word, EMPTY, Ordering::Acquire, Ordering::Relaxed).ok()?;
            self.offered.fetch_sub(1, Ordering::SeqCst);
            self.pages.fetch_sub(block.pages(), Ordering::Relaxed);
            Some(block)
        })
    }

    /// Collects the blocks that the thread has finished.
    pub(crate) fn harvest(&self, mut each: impl FnMut(Block, Outcome)) {
        if self.done.load(Ordering::Acquire) == 0 {
            return;
        }
        for slot in &self.slots {
            // Acquire: the zeroes must be visible to the block's next owner.
            let (state, block) = unpack(slot.load(Ordering::Acquire));
            let outcome = match state {
                DONE_CLEAN => Outcome::Clean,
                DONE_ABSENT => Outcome::Absent,
                DONE_DIRTY => Outcome::Dirty,
                _ => continue,
            };
            slot.store(EMPTY, Ordering::Relaxed);
            self.done.fetch_sub(1, Ordering::Relaxed);
            self.pages.fetch_sub(block.pages(), Ordering::Relaxed);
            each(block, outcome);
        }
    }

    /// Claims a block to work on; for the thread.
    pub(crate) fn claim(&self) -> Option<Claim> {
        if !self.has_offers() {
            return None;
        }
        self.slots.iter().enumerate().find_map(|(at, slot)| {
            let word = slot.load(Ordering::Relaxed);
            let (state, block) = unpack(word);
            if state != DIRTY {
                return None;
            }
            slot.compare_exchange(word, pack(BUSY, block), Ordering::Acquire, Ordering::Relaxed)
                .ok()?;
            self.offered.fetch_sub(1, Ordering::SeqCst);
            Some(Claim { slot: at, block })
        })
    }

    /// Returns a claimed block with its outcome.
    pub(crate) fn finish(&self, claim: Claim, outcome: Outcome) {
        let state = match outcome {
            Outcome::Clean => DONE_CLEAN,
            Outcome::Absent => DONE_ABSENT,
            Outcome::Dirty => DONE_DIRTY,
        };
        // The count rises first, so that harvesting never takes it below zero.
        self.done.fetch_add(1, Ordering::Relaxed);
        self.slots[claim.slot].store(pack(state, claim.block), Ordering::Release);
    }
}
