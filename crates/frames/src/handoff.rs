//! Blocks on their way to the zeroing thread and back, without a lock.
//!
//! The thread runs at idle priority and may be held off the processor for as long as anything else
//! runs. If it could hold a lock meanwhile, so would everybody who takes memory. So blocks change
//! hands through slots, each one atomic word:
//!
//! ```text
//!   EMPTY --offer--> DIRTY --claim--> BUSY --finish--> DONE(clean | absent | dirty) --harvest--> EMPTY
//!                      \--reclaim--> EMPTY
//! ```
//!
//! Offer, reclaim and harvest are called under the pool's lock, claim and finish by the thread.
//! A thread that is starved or dead keeps at most the one block it had claimed; every other can be
//! reclaimed.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::frame::{Block, Order};

const SLOTS: usize = 128;

const EMPTY: u64 = 0;
const DIRTY: u64 = 1;
const BUSY: u64 = 2;
const DONE_CLEAN: u64 = 3;
const DONE_ABSENT: u64 = 4;
const DONE_DIRTY: u64 = 5;

/// What the thread made of a block.
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
pub(crate) struct Handoff {
    slots: [AtomicU64; SLOTS],
    /// Slots in state DIRTY or about to be; a hint that saves walking the slots.
    offered: AtomicUsize,
    /// Slots in a DONE state, or about to be.
    done: AtomicUsize,
    /// Pages in all slots. Changed under the pool's lock only.
    pages: AtomicUsize,
}

impl Handoff {
    pub(crate) fn new() -> Self {
        Self {
            slots: [const { AtomicU64::new(EMPTY) }; SLOTS],
            offered: 0.into(),
            done: 0.into(),
            pages: 0.into(),
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

    /// Collects what the thread has finished.
    pub(crate) fn harvest(&self, mut each: impl FnMut(Block, Outcome)) {
        if self.done.load(Ordering::Acquire) == 0 {
            return;
        }
        for slot in &self.slots {
            // Acquire: the zeroes must be visible to whoever the block goes to.
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

    /// Puts a claimed block down with what became of it.
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn a_block_that_was_not_claimed_can_be_reclaimed_and_a_claimed_one_can_not() {
        let handoff = Handoff::new();
        let block = Block::new(512, Order::HUGE);
        handoff.offer(block).unwrap();
        assert_eq!(handoff.reclaim(Order::new(10)), None);
        assert_eq!(handoff.reclaim(Order::PAGE), Some(block));
        handoff.offer(block).unwrap();
        let claim = handoff.claim().unwrap();
        assert_eq!(handoff.reclaim(Order::PAGE), None);
        assert_eq!(handoff.pages(), 512);
        handoff.finish(claim, Outcome::Clean);
        let mut got = Vec::new();
        handoff.harvest(|block, outcome| got.push((block, outcome)));
        assert_eq!(got, [(block, Outcome::Clean)]);
        assert_eq!(handoff.pages(), 0);
    }

    #[test]
    fn a_full_queue_gives_the_block_back() {
        let handoff = Handoff::new();
        for page in 0..SLOTS {
            handoff.offer(Block::new(page, Order::PAGE)).unwrap();
        }
        let more = Block::new(SLOTS, Order::PAGE);
        assert_eq!(handoff.offer(more), Err(more));
    }

    #[test]
    fn under_contention_every_block_is_in_one_place_at_a_time() {
        let blocks = if cfg!(miri) { 8 } else { 64 };
        let rounds = if cfg!(miri) { 30 } else { 20_000 };
        let handoff = Handoff::new();
        let stop = AtomicBool::new(false);
        let lock = Mutex::new((0..blocks).map(|p| Block::new(p, Order::PAGE)).collect::<Vec<_>>());
        // One word a block: who owns it now. A second owner is a failed exchange.
        let owned: Vec<AtomicBool> = (0..blocks).map(|_| AtomicBool::new(false)).collect();
        let own = |block: Block, from: bool| {
            let word = &owned[block.start as usize];
            assert!(
                word.compare_exchange(from, !from, Ordering::Relaxed, Ordering::Relaxed).is_ok(),
                "{block:?} has two owners"
            );
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    if let Some(claim) = handoff.claim() {
                        own(claim.block, false);
                        own(claim.block, true);
                        handoff.finish(claim, Outcome::Clean);
                    } else {
                        std::thread::yield_now();
                    }
                }
            });
            let users: Vec<_> = (0..2)
                .map(|user| {
                    let (lock, handoff, own) = (&lock, &handoff, &own);
                    scope.spawn(move || {
                        for round in 0..rounds {
                            let mut free = lock.lock().unwrap();
                            handoff.harvest(|block, _| free.push(block));
                            if (round + user) % 3 == 0 {
                                free.extend(handoff.reclaim(Order::PAGE));
                            }
                            let mine = free.pop();
                            drop(free);
                            if let Some(block) = mine {
                                own(block, false);
                                own(block, true);
                                let _guard = lock.lock().unwrap();
                                handoff.offer(block).unwrap();
                            }
                        }
                    })
                })
                .collect();
            for user in users {
                user.join().unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
        let mut free = lock.into_inner().unwrap();
        handoff.harvest(|block, _| free.push(block));
        while let Some(block) = handoff.reclaim(Order::PAGE) {
            free.push(block);
        }
        free.sort();
        let all: Vec<_> = (0..blocks).map(|p| Block::new(p, Order::PAGE)).collect();
        assert_eq!(free, all);
        assert_eq!(handoff.pages(), 0);
    }
}
