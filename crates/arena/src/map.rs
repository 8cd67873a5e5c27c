//! The view of an arena: the mapping of each huge page, and every change to it.
//!
//! All changes are made under one lock, by the owner or by a fault handler. The holder touches no
//! arena memory and, in a handler, allocates nothing; so a fault can always take it.
//!
//! Returned frames stay mapped, inaccessibly: the next cycle requests the same ones from the pool
//! and only lifts the protection. Other owners of the frames are safe from this view, and its owner
//! from them, because the hardware refuses every access.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use afresh_frames::{CleanFrame, DirtyFrame, Order, Pool, TakeError};
use afresh_sys::planted::{self, Bug};
use afresh_sys::{
    Advice, HUGE_PAGES, HUGE_SIZE, PAGE_SIZE, PageRange, Protection, Reservation, SysError,
    WithholdGuard, fault, fork, host, withhold_all,
};

use crate::density;
use crate::hugepage::{Backing, HugePage, Mapping, left_over};
use crate::window::Window;
use crate::{ArenaError, ArenaOptions, ArenaUsage};

/// Maximum consecutive faults of a thread in mapped memory before the fault is passed on. It faults
/// once when another thread was faster.
const MAX_ODD: usize = 64;
/// Threads that such faults are counted of at the same time.
const WATCHED_THREADS: usize = 64;

/// Consecutive faults of one thread, at one address, while no memory was returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RepeatedFaults {
    thread: i32,
    address: usize,
    epoch: usize,
}

/// Whether the pool may take memory from the kernel, which a fault handler must not wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Growth {
    Allowed,
    Forbidden,
}

/// The state under the lock.
#[derive(Debug)]
struct MapState {
    hugepages: Box<[HugePage]>,
    window: Window,
    /// Cycles so far, for the rhythm of looks at density.
    cycle: usize,
    /// The number of times that memory was returned, so that accesses to it fault again.
    epoch: usize,
    /// Faults in memory that is mapped and their number, each thread at the place that its number
    /// leads to.
    odd: Box<[(RepeatedFaults, usize)]>,
}

impl MapState {
    /// Counts a fault of the calling thread at `address`, where memory is mapped; whether it may
    /// try again. Any number of threads can meet in a huge page, but only an access that never
    /// succeeds faults again and again.
    fn may_retry(&mut self, address: usize) -> bool {
        let this = RepeatedFaults { thread: host::thread_id(), address, epoch: self.epoch };
        let (odd, faults) = &mut self.odd[this.thread as usize % WATCHED_THREADS];
        *faults = if *odd == this { *faults + 1 } else { 1 };
        *odd = this;
        *faults < MAX_ODD
    }
}

/// The mappings of an arena.
#[derive(Debug)]
pub(crate) struct View {
    memory: Arc<Reservation>,
    pool: Arc<Pool>,
    locked: Mutex<MapState>,
    /// Accessible pages.
    size: AtomicUsize,
    adapt: bool,
    faults: AtomicUsize,
    /// Set when memory stayed accessible that should not be: its content would be visible after
    /// growth.
    unclean: AtomicBool,
    /// The process that made it.
    generation: u32,
    /// Keeps the memory from children, and its addresses reserved there.
    _withheld: WithholdGuard,
}

impl View {
    pub(crate) fn new(pool: Arc<Pool>, options: ArenaOptions) -> Result<Self, SysError> {
        let max = options.max.max(1);
        let memory = Arc::new(Reservation::aligned(max, HUGE_SIZE)?);
        let withheld = withhold_all(&memory);
        let locked = MapState {
            hugepages: (0..max.div_ceil(HUGE_PAGES)).map(|_| HugePage::default()).collect(),
            window: Window::new(options.window),
            cycle: 0,
            epoch: 0,
            odd: vec![(RepeatedFaults::default(), 0); WATCHED_THREADS].into(),
        };
        Ok(Self {
            memory,
            pool,
            locked: Mutex::new(locked),
            size: 0.into(),
            adapt: options.adapt,
            faults: 0.into(),
            unclean: false.into(),
            generation: fork::generation(),
            _withheld: withheld,
        })
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.memory.base().as_ptr()
    }

    pub(crate) fn max_pages(&self) -> usize {
        self.memory.pages()
    }

    pub(crate) fn pages(&self) -> usize {
        self.size.load(Ordering::Relaxed)
    }

    pub(crate) fn faults(&self) -> usize {
        self.faults.load(Ordering::Relaxed)
    }

    /// Whether this is a child of the process that made the arena.
    pub(crate) fn is_of_parent(&self) -> bool {
        self.generation != fork::generation()
    }

    /// Refuses use of memory that is not this process's, or that may show old content.
    fn check(&self) -> Result<(), ArenaError> {
        if self.is_of_parent() {
            return Err(ArenaError::Forked);
        }
        if self.unclean.load(Ordering::Relaxed) { Err(ArenaError::Unclean) } else { Ok(()) }
    }

    /// Takes the arena out of use where `result` is an error.
    fn clean<T, E>(&self, result: Result<T, E>) -> Result<T, E> {
        if result.is_err() && !planted::is(Bug::Halfway) {
            self.unclean.store(true, Ordering::Relaxed);
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, MapState> {
        self.locked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn usage(&self) -> ArenaUsage {
        let mut holding = ArenaUsage::default();
        if self.is_of_parent() {
            return holding;
        }
        for hugepage in &self.lock().hugepages {
            match hugepage.backing {
                Backing::Nothing => {}
                Backing::Frame(_) => holding.frames += 1,
                Backing::Kernel => holding.kernel_huge_pages += 1,
            }
            holding.sparse_huge_pages += usize::from(hugepage.sparse);
        }
        holding
    }

    /// The accessible pages of all huge pages that are backed by anything.
    pub(crate) fn present(&self) -> Vec<PageRange> {
        if self.is_of_parent() {
            return Vec::new();
        }
        let (locked, size) = (self.lock(), self.pages());
        let backed =
            locked.hugepages.iter().enumerate().filter(|(_, hugepage)| !hugepage.is_empty());
        let pages = backed.map(|(at, _)| Self::visible(at, 1, size));
        pages.filter(|range| !range.is_empty()).collect()
    }

    /// The accessible pages of `len` huge pages from `hugepage` on, when the arena has `size`
    /// pages.
    fn visible(hugepage: usize, len: usize, size: usize) -> PageRange {
        let start = hugepage * HUGE_PAGES;
        PageRange::new(start, (len * HUGE_PAGES).min(size.saturating_sub(start)))
    }

    /// Makes the accessible part `size` pages long. New pages of a mapped huge page are mapped now;
    /// removed ones are unmapped, and their memory is returned or zeroed.
    pub(crate) fn set_pages(&self, size: usize) -> Result<(), ArenaError> {
        self.check()?;
        let mut locked = self.lock();
        let old = self.pages();
        if size > old {
            self.extend(&mut locked, old, size)?;
            self.size.store(size, Ordering::Relaxed);
            return Ok(());
        }
        self.size.store(size, Ordering::Relaxed);
        let edge = size.next_multiple_of(HUGE_PAGES);
        let cut = PageRange::new(size, old.min(edge).saturating_sub(size));
        let whole = self.unmap(&mut locked, PageRange::new(edge, old.saturating_sub(edge)), false);
        if !cut.is_empty() && !locked.hugepages[size / HUGE_PAGES].is_empty() {
            let closed = self.memory.map_anonymous(cut, Protection::None);
            let hugepage = &mut locked.hugepages[size / HUGE_PAGES];
            if let Some(mapping) = &mut hugepage.mapping {
                mapping.len = cut.start % HUGE_PAGES;
            }
            if let Backing::Frame(frame) = &mut hugepage.backing {
                self.pool.zero(frame, PageRange::new(cut.start % HUGE_PAGES, cut.len));
            }
            self.clean(closed)?;
        }
        whole
    }

    /// Maps the part that the last huge page gains when the arena grows from `old` to `new` pages.
    fn extend(&self, locked: &mut MapState, old: usize, new: usize) -> Result<(), ArenaError> {
        let edge = old.next_multiple_of(HUGE_PAGES).min(new);
        let gain = PageRange::new(old, edge - old);
        if gain.is_empty() {
            return Ok(());
        }
        let hugepage = &mut locked.hugepages[old / HUGE_PAGES];
        match &hugepage.backing {
            Backing::Nothing => {}
            Backing::Frame(frame) => {
                let file_page = frame.file_range().start;
                self.pool.map(frame, old % HUGE_PAGES, &self.memory, gain)?;
                hugepage.mapping = Some(Mapping { file_page, len: old % HUGE_PAGES + gain.len });
            }
            Backing::Kernel => self.map_small(gain)?,
        }
        Ok(())
    }

    /// Makes every huge page that `range` touches present.
    pub(crate) fn fill(&self, range: PageRange, growth: Growth) -> Result<(), ArenaError> {
        self.check()?;
        let end = range.end().div_ceil(HUGE_PAGES);
        let mut at = range.start / HUGE_PAGES;
        while at < end && !range.is_empty() {
            at += self.map_at(&mut self.lock(), at, end - at, growth)?;
        }
        Ok(())
    }

    /// Sees to it that faults find memory in the pool. This is best effort: memory that the pool
    /// lacks comes from the kernel.
    pub(crate) fn prefill(&self, pages: usize) -> Result<(), ArenaError> {
        match self.pool.prefill(pages) {
            Err(TakeError::Limit { .. } | TakeError::Fragmented { .. }) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Maps predictable touches beforehand, so that they raise no signal: the kernel's memory over
    /// sparse huge pages, which costs nothing until it is touched, and frames over the huge pages
    /// that had some in the last cycle, as far as the pool has them at hand.
    pub(crate) fn anticipate(&self, range: PageRange) -> Result<(), ArenaError> {
        if !self.adapt || range.is_empty() || self.is_of_parent() {
            return Ok(());
        }
        let mut locked = self.lock();
        let end = range.end().div_ceil(HUGE_PAGES);
        let mut at = range.start / HUGE_PAGES;
        while at < end {
            let hugepage = &locked.hugepages[at];
            if !hugepage.is_empty() || !(hugepage.sparse || hugepage.expected) {
                at += 1;
                continue;
            }
            let known = |c: &HugePage| c.sparse == hugepage.sparse && (c.sparse || c.expected);
            let run = locked.hugepages[at..end].iter().take_while(|c| known(c)).count();
            at += self.map_at(&mut locked, at, run, Growth::Forbidden)?;
        }
        Ok(())
    }

    /// Drops everything: the arena is empty afterwards.
    pub(crate) fn drop_all(&self) -> Result<(), ArenaError> {
        if self.is_of_parent() {
            return Err(ArenaError::Forked);
        }
        let mut locked = self.lock();
        let size = self.size.swap(0, Ordering::Relaxed);
        let look = self.adapt && density::is_time(locked.cycle);
        let result = self.unmap(&mut locked, PageRange::new(0, size), look);
        locked.cycle += 1;
        locked.window.reset();
        result
    }

    /// Maps memory at huge page `at` and up to `most - 1` empty ones after it. Returns how many
    /// huge pages from `at` on have memory now, at least one.
    ///
    /// With growth forbidden, nothing here allocates: it runs in a fault handler then.
    fn map_at(
        &self,
        locked: &mut MapState,
        at: usize,
        most: usize,
        growth: Growth,
    ) -> Result<usize, ArenaError> {
        let size = self.pages();
        let sparse = |hugepage: &HugePage| self.adapt && hugepage.sparse;
        let kind = sparse(&locked.hugepages[at]);
        let after = &locked.hugepages[at..size.div_ceil(HUGE_PAGES).min(at.saturating_add(most))];
        let run = after.iter().take_while(|c| c.is_empty() && sparse(c) == kind).count();
        if run == 0 {
            return Ok(1);
        }
        if kind {
            return self.map_kernel(locked, at, run, size);
        }
        let visible = Self::visible(at, run, size).len;
        if let Some((file_page, order)) = left_over(&locked.hugepages[at..at + run], visible)
            && let Some(frame) = self.pool.take_at(file_page, order)
        {
            return self.reopen(locked, at, frame, size);
        }
        let largest = Order::fitting(run * HUGE_PAGES);
        let taken = match growth {
            Growth::Allowed => self.pool.take_between(Order::HUGE, largest),
            Growth::Forbidden => self.pool.take_resident(Order::HUGE, largest),
        };
        let frame = match taken {
            Ok(frame) => frame,
            Err(_) if growth == Growth::Forbidden => return self.map_kernel(locked, at, 1, size),
            Err(error) => return Err(error.into()),
        };
        let frame = frame.used();
        let len = frame.pages() / HUGE_PAGES;
        let range = Self::visible(at, len, size);
        let start = frame.file_range().start;
        // In either case the earlier mapping there is invalid.
        locked.hugepages[at..at + len].iter_mut().for_each(|hugepage| hugepage.mapping = None);
        if let Err(error) = self.pool.map(&frame, 0, &self.memory, range) {
            // Pages may be mapped there, but none is accessible.
            self.pool.give(frame);
            return Err(error.into());
        }
        for (hugepage, place) in locked.hugepages[at..at + len].iter_mut().zip(0..) {
            let len = (range.len - place * HUGE_PAGES).min(HUGE_PAGES);
            hugepage.mapping = Some(Mapping { file_page: start + place * HUGE_PAGES, len });
        }
        Ok(Self::back(locked, at, frame))
    }

    /// Makes the left-over mapping of a frame that has come back accessible.
    fn reopen(
        &self,
        locked: &mut MapState,
        at: usize,
        frame: CleanFrame,
        size: usize,
    ) -> Result<usize, ArenaError> {
        let range = Self::visible(at, frame.pages() / HUGE_PAGES, size);
        if let Err(error) = self.memory.protect(range, Protection::ReadWrite) {
            // Part of it may be accessible: the frame is never given away.
            self.pool.quarantine(frame.used());
            self.unclean.store(true, Ordering::Relaxed);
            return Err(error.into());
        }
        Ok(Self::back(locked, at, frame.used()))
    }

    /// Notes that a frame backs the huge pages from `at` on; returns how many.
    fn back(locked: &mut MapState, at: usize, frame: DirtyFrame) -> usize {
        let len = frame.pages() / HUGE_PAGES;
        for (hugepage, piece) in locked.hugepages[at..].iter_mut().zip(frame.split(Order::HUGE)) {
            hugepage.backing = Backing::Frame(piece);
        }
        len
    }

    /// Maps the kernel's memory over `len` empty huge pages from `at` on.
    fn map_kernel(
        &self,
        locked: &mut MapState,
        at: usize,
        len: usize,
        size: usize,
    ) -> Result<usize, ArenaError> {
        self.map_small(Self::visible(at, len, size))?;
        for hugepage in &mut locked.hugepages[at..at + len] {
            hugepage.backing = Backing::Kernel;
            hugepage.mapping = None;
        }
        Ok(len)
    }

    /// Maps the kernel's memory in 4 KiB pages, for every huge page setting of the host.
    fn map_small(&self, range: PageRange) -> Result<(), SysError> {
        self.memory.map_anonymous(range, Protection::ReadWrite)?;
        self.clean(self.memory.advise(range, Advice::NoHugePage))
    }

    /// Unmaps the huge pages of `range` (which begins at a huge page) and gives their frames back.
    fn unmap(&self, locked: &mut MapState, range: PageRange, look: bool) -> Result<(), ArenaError> {
        locked.epoch += 1;
        let (first, end) = (range.start / HUGE_PAGES, range.end().div_ceil(HUGE_PAGES));
        if range.is_empty() || locked.hugepages[first..end].iter().all(HugePage::is_empty) {
            return Ok(());
        }
        let cycle = locked.cycle;
        let hugepages = &mut locked.hugepages[first..end];
        if look {
            for (hugepage, at) in hugepages.iter_mut().zip(first..) {
                if matches!(hugepage.backing, Backing::Kernel) && hugepage.sparse {
                    let visible = Self::visible(at, 1, range.end());
                    hugepage.sparse = !density::is_dense(self.memory.resident_pages(visible));
                }
            }
        }
        let unmapped = self.clean(self.close(hugepages, range));
        if look && unmapped.is_ok() {
            for hugepage in hugepages.iter_mut() {
                if let Backing::Frame(frame) = &hugepage.backing {
                    hugepage.sparse = density::frame_is_sparse(&self.pool, frame, cycle);
                }
            }
        }
        let mut frames = hugepages.iter_mut().filter_map(|hugepage| {
            match std::mem::take(&mut hugepage.backing) {
                Backing::Frame(frame) => Some(frame),
                Backing::Nothing | Backing::Kernel => None,
            }
        });
        match unmapped {
            Ok(()) => self.pool.give_all(frames),
            // Still mapped, so never to be lent again.
            Err(_) => frames.by_ref().for_each(|frame| self.pool.quarantine(frame)),
        }
        Ok(unmapped?)
    }
}

impl View {
    /// Makes `range` inaccessible. Mappings of frames stay, without access; the kernel's memory is
    /// dropped.
    fn close(&self, hugepages: &mut [HugePage], range: PageRange) -> Result<(), SysError> {
        let mut at = range.start;
        for run in hugepages.chunk_by_mut(|a, b| a.mapping.is_some() == b.mapping.is_some()) {
            let part = PageRange::new(at, (run.len() * HUGE_PAGES).min(range.end() - at));
            at += part.len;
            if run[0].mapping.is_none() && run.iter().all(HugePage::is_empty) {
                continue;
            }
            let kept =
                run[0].mapping.is_some() && self.memory.protect(part, Protection::None).is_ok();
            if !kept {
                self.memory.map_anonymous(part, Protection::None)?;
                run.iter_mut().for_each(|hugepage| hugepage.mapping = None);
            }
        }
        Ok(())
    }
}

impl fault::FaultHandler for View {
    fn answers(&self, signal: fault::FaultSignal) -> bool {
        // SIGBUS here is a failing memory module or a lost file, which no mapping cures.
        signal == fault::FaultSignal::Segv
    }

    fn on_fault(&self, fault: &fault::Fault) -> bool {
        if fault.signal != fault::FaultSignal::Segv || self.check().is_err() {
            return false;
        }
        let offset = fault.address.wrapping_sub(self.base() as usize);
        let page = offset / PAGE_SIZE;
        let mut locked = self.lock();
        if page >= self.pages() {
            return false;
        }
        let at = page / HUGE_PAGES;
        if !locked.hugepages[at].is_empty() {
            // Usually another thread was faster; an access that faults without end is not ours.
            return locked.may_retry(fault.address);
        }
        self.faults.fetch_add(1, Ordering::Relaxed);
        let most = locked.window.at(at);
        match self.map_at(&mut locked, at, most, Growth::Forbidden) {
            Ok(len) => {
                locked.window.mapped(at, len);
                true
            }
            Err(_) => false,
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use afresh_frames::PoolOptions;

    use super::*;

    #[test]
    fn a_child_waits_for_no_lock_of_its_parents_arena() {
        let pool = Pool::new(PoolOptions::inline(1024)).unwrap();
        let view = View::new(pool, ArenaOptions::on_touch(1024)).unwrap();
        view.set_pages(1).unwrap();
        view.fill(PageRange::new(0, 1), Growth::Allowed).unwrap();
        let held = view.lock();
        assert!(afresh_sys::child_passes(|| {
            view.usage() == ArenaUsage::default()
                && view.present().is_empty()
                && view.set_pages(2).is_err()
                && view.fill(PageRange::new(0, 1), Growth::Allowed).is_err()
                && view.anticipate(PageRange::new(0, 1)).is_ok()
                && view.drop_all().is_err()
        }));
        drop(held);
        assert!(!view.present().is_empty());
    }

    #[test]
    fn any_number_of_threads_meet_in_a_huge_page_and_one_that_never_succeeds_is_noticed() {
        let pool = Pool::new(PoolOptions::inline(1024)).unwrap();
        let view = View::new(pool, ArenaOptions::on_touch(1024)).unwrap();
        let address = view.base() as usize;
        std::thread::scope(|scope| {
            for _ in 0..4 * MAX_ODD {
                scope.spawn(|| assert!(view.lock().may_retry(address)));
            }
        });
        let retries = || (0..MAX_ODD).take_while(|_| view.lock().may_retry(address)).count();
        assert_eq!(retries(), MAX_ODD - 1);
        view.set_pages(1).unwrap();
        view.drop_all().unwrap();
        assert_eq!(retries(), MAX_ODD - 1, "memory that was given back faults again");
    }
}
