//! The pool: clean, dirty and absent memory, its owners, and the rules between them.
//!
//! ```text
//!              take                     give                 zero (inline, or in the background)
//!   clean ------------> lent ------------------------> dirty -------------------------> clean
//!     ^                                                  |
//!     +---- populate ---- absent <------- trim ----------+
//! ```
//!
//! Promises: a taken frame is zero, regardless of its last holder's writes, and whether the zeroing
//! thread runs, is starved or has stopped; a page is in one place at any time, and [`Pool::usage`]
//! adds up; running out of memory is an error.
//!
//! May break it: a holder that keeps a mapping of a frame it gave back. [`crate::Lease`] cannot.
//!
//! NUMA: there is one set of lists. A pool per node, each with its memory bound (`mbind` on the
//! window before anything is populated), is the seam for more; the choice among them belongs in
//! [`crate::ZeroSource`].

#[cfg(all(test, not(miri)))]
mod fork_tests;
mod report;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use afresh_sys::{Call, PAGE_SIZE, PageRange, Reservation, SysError};

use crate::buddy::Buddy;
use crate::frame::{Block, CleanFrame, DirtyFrame, Frame, Order};
use crate::handoff::{Handoff, Outcome, SLOTS};
use crate::store::Store;
use crate::zeroer::Zeroer;
use crate::{Background, NewPoolError, PoolOptions, TakeError};

/// Maximum pages of a pool: the range of page numbers in a block, with a margin.
const MOST_PAGES: usize = 1 << 31;

/// Pause while the zeroing thread has the last free block, and how many of them before memory
/// counts as used up. A process that was stopped has paused once.
const PAUSE: Duration = Duration::from_micros(50);
const MAX_PAUSES: usize = 2500;

/// The free lists. Everything here is changed under one lock, held for tens of nanoseconds, without
/// allocation or system call, so that a fault handler may take it.
#[derive(Debug)]
struct Lists {
    clean: Buddy,
    dirty: Buddy,
    absent: Buddy,
    lent: usize,
    /// Absent blocks that are being populated, or free ones being released, outside the lock.
    moving: usize,
}

/// State shared with the zeroing thread.
#[derive(Debug)]
pub(crate) struct PoolState {
    pub(crate) store: Store,
    pub(crate) handoff: Handoff,
}

/// Counts since the pool was made; none of them is reset.
#[derive(Debug, Default)]
struct Counters {
    inline: AtomicU64,
    populated: AtomicU64,
    trimmed: AtomicU64,
    lost: AtomicUsize,
}

/// The largest block that goes to the zeroing thread in one piece: 2 MiB, and more in large pools,
/// so that half the thread's slots hold all of the pool; 64 MiB at most.
fn piece(limit: usize) -> Order {
    Order::fitting(limit / (SLOTS / 2)).clamp(Order::HUGE, Order::new(14))
}

/// A pool of zeroed physical memory.
#[derive(Debug)]
pub struct Pool {
    id: u32,
    limit: usize,
    total: usize,
    /// Largest block handed to the zeroing thread.
    piece: Order,
    check_zero: bool,
    shared: Arc<PoolState>,
    lists: Mutex<Lists>,
    counters: Counters,
    background: Option<(Background, Zeroer)>,
    /// Set while the background thread must leave blocks alone; see [`Pool::pause`].
    paused: AtomicBool,
}

impl Pool {
    /// Makes a pool; no memory is taken until frames are.
    ///
    /// # Errors
    /// A limit that is too small or too large, or a refusal of the kernel.
    pub fn new(options: PoolOptions) -> Result<Arc<Self>, NewPoolError> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let huge = Order::HUGE.pages();
        if options.limit < huge || options.limit > MOST_PAGES {
            return Err(NewPoolError::Limit(options.limit));
        }
        let limit = options.limit.next_multiple_of(huge);
        // A starved zeroing thread may hold one block: that much more exists than may be lent, so
        // that the thread never delays a taker.
        let piece = piece(limit);
        let total = limit + if options.background.is_some() { piece.pages() } else { 0 };
        let shared = Arc::new(PoolState {
            store: Store::new(total, options.page_kind)?,
            handoff: Handoff::new(),
        });
        let mut absent = Buddy::new(total);
        for start in (0..total).step_by(huge) {
            absent.give(Block::new(start, Order::HUGE));
        }
        let background = match options.background {
            Some(background) => {
                let zeroer = Zeroer::start(shared.clone(), background.clone())
                    .map_err(NewPoolError::Thread)?;
                Some((background, zeroer))
            }
            None => None,
        };
        Ok(Arc::new(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            limit,
            total,
            piece,
            check_zero: options.check_zero,
            shared,
            lists: Mutex::new(Lists {
                clean: Buddy::new(total),
                dirty: Buddy::new(total),
                absent,
                lent: 0,
                moving: 0,
            }),
            counters: Counters::default(),
            background,
            paused: AtomicBool::new(false),
        }))
    }

    /// In a forked child another thread of the parent may have held the lock: callers check first
    /// ([`Store::check`]).
    fn lists(&self) -> MutexGuard<'_, Lists> {
        // A panic under the lock is an assertion about the lists; the panicking thread does not use
        // them afterwards, and every other must continue.
        let mut lists = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
        self.harvest(&mut lists);
        lists
    }

    /// Whether this process is a child of the one that made the pool.
    fn is_of_parent(&self) -> bool {
        self.shared.store.check().is_err()
    }

    fn harvest(&self, lists: &mut Lists) {
        self.shared.handoff.harvest(|block, outcome| match outcome {
            Outcome::Clean => lists.clean.give(block),
            Outcome::Dirty => lists.dirty.give(block),
            Outcome::Absent => lists.absent.give(block),
        });
    }

    /// The smallest frame that can be mapped by itself: a page, or 2 MiB on reserved huge pages.
    #[must_use]
    pub fn min_mappable_order(&self) -> Order {
        self.shared.store.min_mappable_order()
    }

    /// Maps pages of a frame, from its page `skip` on, over `range` of a reservation. The holder
    /// must unmap them, or remove the access, before the frame is returned. A forked child does not
    /// inherit the mapping.
    ///
    /// # Errors
    /// When the kernel refuses; `EINVAL` for pages outside the frame, and for a range that is no
    /// multiple of [`Pool::min_mappable_order`]. Nothing of the frame is accessible in the range
    /// then.
    ///
    /// # Panics
    /// If the frame is of another pool.
    pub fn map(
        &self,
        frame: &DirtyFrame,
        skip: usize,
        memory: &Reservation,
        range: PageRange,
    ) -> Result<(), SysError> {
        assert_eq!(frame.pool, self.id, "a frame of another pool");
        let least = self.min_mappable_order().pages();
        let inside = skip.checked_add(range.len).is_some_and(|end| end <= frame.pages());
        if !inside || !range.len.is_multiple_of(least) || !skip.is_multiple_of(least) {
            return Err(SysError::invalid(Call::Map));
        }
        self.shared.store.map(memory, range, frame.block.start as usize + skip)
    }

    /// Address of a frame in the pool's own mapping, at which its holder may use it directly, with
    /// no mapping at all. Valid until the frame is returned or the pool is dropped; a forked child
    /// does not have it.
    #[must_use]
    pub fn address(&self, frame: &DirtyFrame) -> *mut u8 {
        assert_eq!(frame.pool, self.id, "a frame of another pool");
        self.shared.store.address(frame.block)
    }

    /// Hands a frame over as a plain address, for allocators; [`Pool::reclaim`] is the way back.
    #[must_use = "a frame that is not reclaimed is lost to the pool"]
    pub fn lend(&self, frame: DirtyFrame) -> *mut u8 {
        self.address(&frame)
    }

    /// Whether an address is in the pool's own mapping.
    #[must_use]
    pub fn holds(&self, address: *const u8) -> bool {
        self.shared.store.page_of(address).is_some()
    }

    /// The frame behind an address that [`Pool::lend`] returned.
    ///
    /// # Safety
    /// The frame must have been lent by this pool with this `order`, and not been reclaimed since;
    /// the address must not be used any more.
    ///
    /// # Panics
    /// If the address is not in the pool.
    pub unsafe fn reclaim(&self, address: *mut u8, order: Order) -> DirtyFrame {
        let page = self.shared.store.page_of(address).expect("an address of this pool");
        Frame::new(Block::new(page, order), self.id)
    }

    /// Zeroes pages of a frame in place; `range` counts from its start. The frame stays dirty.
    ///
    /// # Panics
    /// If the range is not inside the frame.
    pub fn zero(&self, frame: &mut DirtyFrame, range: PageRange) {
        assert!(range.end() <= frame.pages(), "{range:?} outside a frame of {}", frame.pages());
        assert_eq!(frame.pool, self.id, "a frame of another pool");
        self.shared.store.zero_pages(frame.block.start as usize + range.start, range.len);
    }

    /// Whether page `page` of a frame is zero. For a holder that has ended all writing.
    ///
    /// # Panics
    /// If the page is not inside the frame.
    #[must_use]
    pub fn page_is_zero(&self, frame: &DirtyFrame, page: usize) -> bool {
        assert!(page < frame.pages(), "page {page} outside a frame of {}", frame.pages());
        assert_eq!(frame.pool, self.id, "a frame of another pool");
        self.shared.store.is_zero(Block::new(frame.block.start as usize + page, Order::PAGE))
    }

    /// Takes a zero frame of exactly `order`.
    ///
    /// # Errors
    /// As [`Pool::take_between`].
    pub fn take(&self, order: Order) -> Result<CleanFrame, TakeError> {
        self.take_between(order, order)
    }

    /// Takes a zero frame of at least `smallest` and at most `largest`.
    ///
    /// Clean memory comes first, then dirty memory zeroed here and now, then new memory from the
    /// kernel.
    ///
    /// # Errors
    /// [`TakeError::Limit`] at the pool's limit, [`TakeError::Headroom`] and [`TakeError::System`]
    /// when the host is short.
    pub fn take_between(&self, smallest: Order, largest: Order) -> Result<CleanFrame, TakeError> {
        let largest = largest.max(smallest);
        match self.take_resident(smallest, largest) {
            Err(TakeError::Fragmented { .. }) => self.take_new(smallest, largest),
            other => other,
        }
    }

    /// As [`Pool::take_between`], but only of memory the pool has already: no system call is made
    /// and nothing is allocated, so a fault handler may call it.
    ///
    /// # Errors
    /// [`TakeError::Limit`], or [`TakeError::Fragmented`] when no free block is large enough.
    pub fn take_resident(&self, smallest: Order, largest: Order) -> Result<CleanFrame, TakeError> {
        self.shared.store.check()?;
        let wanted = smallest.pages();
        let (block, clean) = {
            let mut lists = self.lists();
            let allowed = self.limit - lists.lent;
            if allowed < wanted {
                return Err(TakeError::Limit { lent: lists.lent, limit: self.limit, wanted });
            }
            let largest = largest.min(Order::fitting(allowed));
            let (block, clean) = match lists.clean.take_between(smallest, largest) {
                Some(block) => (block, true),
                None => (self.take_dirty(&mut lists, smallest, largest)?, false),
            };
            lists.lent += block.pages();
            (block, clean)
        };
        Ok(self.hand_out(block, clean))
    }

    /// Takes the very pages at `file_page`, if they are free and resident, zero; for a holder that
    /// has a mapping of them left. Memory that must be zeroed first is taken only when the pool has
    /// nothing clean of that order. Makes no system call and allocates nothing.
    #[must_use]
    pub fn take_at(&self, file_page: usize, order: Order) -> Option<CleanFrame> {
        let exists =
            file_page.is_multiple_of(order.pages()) && file_page + order.pages() <= self.total;
        if !exists || self.is_of_parent() {
            return None;
        }
        let wanted = Block::new(file_page, order);
        let clean = {
            let mut lists = self.lists();
            if self.limit - lists.lent < wanted.pages() {
                return None;
            }
            let clean = lists.clean.take_at(wanted).is_some();
            if !clean {
                if lists.clean.largest().is_some_and(|largest| largest >= order) {
                    return None;
                }
                lists.dirty.take_at(wanted)?;
            }
            lists.lent += wanted.pages();
            clean
        };
        Some(self.hand_out(wanted, clean))
    }

    fn take_dirty(
        &self,
        lists: &mut Lists,
        smallest: Order,
        largest: Order,
    ) -> Result<Block, TakeError> {
        if let Some(block) = lists.dirty.take_between(smallest, largest) {
            return Ok(block);
        }
        // Blocks that the zeroing thread has not begun count as dirty; together they may merge.
        while let Some(block) = self.shared.handoff.reclaim(Order::PAGE) {
            lists.dirty.give(block);
        }
        let block = lists.dirty.take_between(smallest, largest);
        block.ok_or(TakeError::Fragmented { wanted: smallest.pages() })
    }

    /// The one way out of the pool: zeroes blocks that are not clean, and checks those marked
    /// clean.
    fn hand_out(&self, block: Block, clean: bool) -> CleanFrame {
        if !clean {
            self.shared.store.zero_hot(block);
            self.counters.inline.fetch_add(block.pages() as u64, Ordering::Relaxed);
        }
        if self.check_zero {
            assert!(self.shared.store.is_zero(block), "{block:?} is not zero at hand-out");
        }
        Frame::new(block, self.id)
    }

    /// Takes memory from the kernel.
    fn take_new(&self, smallest: Order, largest: Order) -> Result<CleanFrame, TakeError> {
        let absent = {
            let mut lists = self.lists();
            let least = smallest.max(Order::HUGE);
            let most = largest.min(Order::fitting(self.limit - lists.lent)).max(least);
            let absent = lists.absent.take_between(least, most);
            lists.moving += absent.map_or(0, Block::pages);
            absent
        };
        let Some(absent) = absent else {
            // Everything is resident, but in pieces. Clean memory is dirty memory too: together
            // they merge where neither does alone.
            self.forget_clean();
            return self.take_patiently(smallest, largest);
        };
        let result = self.shared.store.populate(absent);
        let mut lists = self.lists();
        lists.moving -= absent.pages();
        if let Err(error) = result {
            lists.absent.give(absent);
            return Err(error);
        }
        self.counters.populated.fetch_add(absent.pages() as u64, Ordering::Relaxed);
        lists.clean.give(absent);
        // Others may have taken memory in the meantime.
        let (allowed, wanted) = (self.limit - lists.lent, smallest.pages());
        if allowed < wanted {
            return Err(TakeError::Limit { lent: lists.lent, limit: self.limit, wanted });
        }
        // Taken under the same lock, so that no other taker gets it first.
        let order = largest.min(Order::fitting(allowed)).min(absent.order);
        let taken = lists.clean.take_at(Block::new(absent.start as usize, order));
        let block = taken.ok_or(TakeError::Fragmented { wanted })?;
        lists.lent += block.pages();
        drop(lists);
        Ok(self.hand_out(block, true))
    }

    /// Takes resident memory, waiting a little for a block in the zeroing thread's hands: it may
    /// separate two free halves.
    fn take_patiently(&self, smallest: Order, largest: Order) -> Result<CleanFrame, TakeError> {
        for _ in 0..MAX_PAUSES {
            match self.take_resident(smallest, largest) {
                Err(TakeError::Fragmented { .. }) if self.shared.handoff.pages() > 0 => {
                    std::thread::sleep(PAUSE);
                    self.forget_clean();
                }
                other => return other,
            }
        }
        self.take_resident(smallest, largest)
    }

    /// Moves all clean memory to the dirty list.
    fn forget_clean(&self) {
        let mut lists = self.lists();
        while let Some(block) = lists.clean.take_between(Order::PAGE, Order::MAX) {
            lists.dirty.give(block);
        }
    }

    /// Gives back a frame that was used.
    pub fn give(&self, frame: DirtyFrame) {
        self.give_all([frame]);
    }

    /// Gives back frames that were used. In a forked child the frames are the parent's, and nothing
    /// happens.
    pub fn give_all(&self, frames: impl IntoIterator<Item = DirtyFrame>) {
        if self.is_of_parent() {
            return;
        }
        let mut lists = self.lists();
        for frame in frames {
            assert_eq!(frame.pool, self.id, "a frame of another pool");
            lists.lent -= frame.pages();
            lists.dirty.give(frame.block);
        }
        let wake = self.feed(&mut lists);
        drop(lists);
        if wake && let Some((_, zeroer)) = &self.background {
            zeroer.wake();
        }
    }

    /// Returns unused frames, which are still clean. In a forked child nothing happens.
    pub fn give_unused(&self, frames: impl IntoIterator<Item = CleanFrame>) {
        if self.is_of_parent() {
            return;
        }
        let mut lists = self.lists();
        for frame in frames {
            assert_eq!(frame.pool, self.id, "a frame of another pool");
            lists.lent -= frame.pages();
            lists.clean.give(frame.block);
        }
    }

    /// Offers dirty blocks to the zeroing thread up to the high watermark; whether to wake it.
    fn feed(&self, lists: &mut Lists) -> bool {
        let Some((background, _)) = &self.background else { return false };
        if self.paused.load(Ordering::Relaxed) {
            return false;
        }
        let handoff = &self.shared.handoff;
        while lists.clean.free_pages() + handoff.pages() < background.high {
            let Some(block) = lists.dirty.take_between(Order::PAGE, self.piece) else { break };
            if let Err(block) = handoff.offer(block) {
                lists.dirty.give(block);
                break;
            }
        }
        handoff.has_offers() && lists.clean.free_pages() < background.low
    }

    /// Makes sure that `pages` pages are free and resident, clean or dirty, by taking memory from
    /// the kernel; so that [`Pool::take_resident`] finds some.
    ///
    /// # Errors
    /// As [`Pool::take_between`].
    pub fn prefill(&self, pages: usize) -> Result<(), TakeError> {
        self.shared.store.check()?;
        let mut taken = Vec::new();
        let mut have = 0;
        let result = loop {
            let resident = {
                let lists = self.lists();
                lists.clean.free_pages() + lists.dirty.free_pages() + self.shared.handoff.pages()
            };
            if have + resident >= pages {
                break Ok(());
            }
            let missing = pages - have - resident;
            let largest = Order::fitting(missing.next_multiple_of(Order::HUGE.pages()));
            match self.take_new(Order::HUGE, largest) {
                Ok(frame) => {
                    have += frame.pages();
                    taken.push(frame);
                }
                Err(error) => break Err(error),
            }
        };
        self.give_unused(taken);
        result
    }

    /// Gives free memory back to the kernel until at most `keep` pages are free and resident; whole
    /// 2 MiB blocks only. Returns the number of released pages, which is 0 in a forked child.
    pub fn trim(&self, keep: usize) -> usize {
        if self.is_of_parent() {
            return 0;
        }
        let mut given = 0;
        loop {
            let block = {
                let mut lists = self.lists();
                while let Some(block) = self.shared.handoff.reclaim(Order::PAGE) {
                    lists.dirty.give(block);
                }
                let free = lists.clean.free_pages() + lists.dirty.free_pages();
                let Some(excess) = free.checked_sub(keep) else { break };
                if excess < Order::HUGE.pages() {
                    break;
                }
                let most = Order::fitting(excess);
                let block = lists
                    .dirty
                    .take_between(Order::HUGE, most)
                    .or_else(|| lists.clean.take_between(Order::HUGE, most));
                let Some(block) = block else { break };
                lists.moving += block.pages();
                block
            };
            let result = self.shared.store.punch(block);
            let mut lists = self.lists();
            lists.moving -= block.pages();
            if result.is_err() {
                lists.dirty.give(block);
                break;
            }
            lists.absent.give(block);
            given += block.pages();
        }
        self.counters.trimmed.fetch_add(given as u64, Ordering::Relaxed);
        given
    }

    /// Stops (`true`) or restarts (`false`) background zeroing; takers zero inline in the meantime.
    pub fn pause(&self, pause: bool) {
        self.paused.store(pause, Ordering::Relaxed);
        if self.is_of_parent() {
            return;
        }
        let mut lists = self.lists();
        if pause {
            while let Some(block) = self.shared.handoff.reclaim(Order::PAGE) {
                lists.dirty.give(block);
            }
            return;
        }
        let wake = self.feed(&mut lists);
        drop(lists);
        if wake && let Some((_, zeroer)) = &self.background {
            zeroer.wake();
        }
    }

    /// Takes pages out of circulation permanently, because they may still be mapped.
    pub fn quarantine(&self, frame: DirtyFrame) {
        self.counters.lost.fetch_add(frame.pages(), Ordering::Relaxed);
    }

    /// Bytes of memory the pool holds now, by the kernel's count.
    #[must_use]
    pub fn resident_bytes(&self) -> usize {
        self.shared.store.file().resident_bytes()
    }

    /// Maximum bytes that may be lent.
    #[must_use]
    pub fn limit_bytes(&self) -> usize {
        self.limit * PAGE_SIZE
    }
}
