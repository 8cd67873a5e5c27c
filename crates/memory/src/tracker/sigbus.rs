//! userfaultfd write protection answered by SIGBUS in the writing thread.
//!
//! The first write to a protected page costs a signal and a system call (2 to 5 µs); after that the
//! page is open and costs nothing. Works without privilege. One descriptor serves every slot of the
//! process.
//!
//! It also handles missing pages of a lazily filled image. Such a fault and one on a protected page
//! look alike; a page that is in place is taken for protected. A page that will never be in place
//! closes the memory, and the retried access raises SIGSEGV. A runtime makes a trap of that where
//! the guest may trap. Any other code gets zeros if the slot's user allows it
//! ([`crate::SlotConfig::checks_loss`]).
//!
//! Pages that may be missing are not protected at first. The first drain that finds one of them
//! written protects them. A guest that was thawed for one answer would otherwise pay a signal for
//! each page that it writes. Until then the private pages of the mapping are the written ones, and
//! the drain lists them ([`pagemap::private`]). As the list has its price, a later drain protects
//! them in any case ([`MAX_EMPTY_DRAINS`]). A kernel without that list protects all pages at once.
//!
//! May break it: a *system call* that writes a protected page fails with `EFAULT`, because the
//! kernel, not a thread, takes the fault. Slots whose memory system calls write use the scan
//! tracker instead ([`crate::HostAccess::Syscalls`]), or open the range first
//! ([`crate::Slot::open_range`]).
//!
//! Equal pages that the kernel merges (KSM) lose their protection. Every mapping of a slot opts out
//! when it is made. Setting `PR_SET_MEMORY_MERGE` while slots exist, or `MADV_MERGEABLE` on a
//! slot's memory, undoes that.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use afresh_sys::fault::{self, Fault, FaultCause, FaultHandler, FaultSignal, Registration};
use afresh_sys::planted::{self, Bug};
use afresh_sys::{
    Advice, Feature, Features, HUGE_PAGES, HUGE_SIZE, Interest, PAGE_SIZE, PageRange, Reservation,
    Uffd, pagemap,
};

use super::barrier::{Barrier, CopierCell, WriteBarrier};
use super::descriptor::SIGBUS;
use super::{DirtyPages, Tracker, TrackerKind};
use crate::TrackError;
use crate::image::{FaultOutcome, Missing};

/// Largest number of pages opened for one fault when writes run forward. A page opened in excess is
/// copied back needlessly until the write set evicts it, so the window stays small.
const MAX_WINDOW: usize = 16;

/// Pages to each side that are opened when opening just the page failed: the writer must continue,
/// and too many dirty pages are only slow.
const WIDE: usize = 256;

/// Drains that may find nothing written and leave the pages unprotected. Two resets come before the
/// first call of a thawed guest: when the instance is made, and when it enters its pool.
const MAX_EMPTY_DRAINS: u32 = 2;

/// The part that the fault handler reads.
struct Watch {
    uffd: &'static Uffd,
    memory: Arc<Reservation>,
    /// Page of `memory` that is page 0 of the slot, and its address.
    first: usize,
    base: usize,
    /// Pages under write protection or open; gaps between regions are in neither state.
    watched: DirtyPages,
    /// Blocks that are opened as a whole, counted from the one that contains `base`.
    huge: DirtyPages,
    /// The page that would continue the last fault's window, and that window's size.
    next: AtomicUsize,
    window: AtomicUsize,
    dirty: DirtyPages,
    missing: Option<Missing>,
    /// Whether parts with missing pages are not protected yet.
    unprotected: AtomicBool,
    copier: CopierCell,
    /// The page that was opened last, and how often it has faulted since with no other in between.
    again: AtomicUsize,
    repeats: AtomicUsize,
}

/// Maximum consecutive faults on a page that is already open. Threads that met it at the same time
/// come once each; a page that the kernel cannot bring back, from swap say, faults without end.
const MAX_REPEATS: usize = 10_000;

impl Watch {
    /// The huge page that contains `page`, counted from the one that contains `base`.
    fn huge_page_of(&self, page: usize) -> usize {
        (self.base % HUGE_SIZE / PAGE_SIZE + page) / HUGE_PAGES
    }

    /// The pages of a huge page; only for huge pages that begin at page 0 or later.
    fn pages_of(&self, huge: usize) -> PageRange {
        PageRange::new(
            (huge * HUGE_PAGES).saturating_sub(self.base % HUGE_SIZE / PAGE_SIZE),
            HUGE_PAGES,
        )
    }

    /// Whether `page` is in a part that is not protected yet.
    fn is_unprotected(&self, page: usize) -> bool {
        self.unprotected.load(Ordering::Acquire)
            && self.missing.as_ref().is_some_and(|missing| missing.contains(page))
    }

    /// Whether opening `page` does not help.
    fn turns_in_a_circle(&self, page: usize) -> bool {
        let is_open = self.dirty.contains(page) || self.is_unprotected(page);
        if self.again.swap(page, Ordering::Relaxed) != page || !is_open {
            self.repeats.store(0, Ordering::Relaxed);
            return false;
        }
        self.repeats.fetch_add(1, Ordering::Relaxed) >= MAX_REPEATS
    }

    /// Whether an access to closed memory got zeros, because it cannot become a trap.
    fn stand_in(&self, page: usize, instruction: usize) -> bool {
        let closed = self.missing.as_ref().filter(|missing| missing.may_stand_in());
        closed.is_some_and(|missing| {
            self.watched.contains(page)
                && !fault::traps(instruction)
                && missing.stand_in(|distance| self.watched.run_around(page, distance))
        })
    }

    fn set_protection(&self, range: PageRange, protect: bool) -> Result<(), TrackError> {
        let start = (self.base + range.byte_start()) as *const u8;
        if !range.is_empty() {
            self.uffd.write_protect(start, range.byte_len(), protect)?;
        }
        Ok(())
    }

    /// Makes the pages of a window resident in one call, where writes run forward. They are in the
    /// write set, so the next reset would write to them anyway.
    fn populate(&self, range: PageRange) {
        let range = PageRange::new(self.first + range.start, range.len);
        // Only saves faults: without it each page faults once.
        let _ = self.memory.advise(range, Advice::PopulateWrite);
    }

    /// Opens a range and marks it; `false` when the kernel refused.
    fn lift(&self, range: PageRange) -> bool {
        self.copier.keep(range);
        // Marked before it is opened: a thread that sees the page open finds it in the set.
        let left = usize::from(planted::is_in_handler(Bug::Mark) && range.len > 1);
        self.dirty.mark(PageRange::new(range.start, range.len - left));
        let start = (self.base + range.byte_start()) as *const u8;
        self.uffd.write_protect(start, range.byte_len(), false).is_ok()
    }

    /// Opens the protected pages around `page`.
    fn lift_widely(&self, page: usize) -> bool {
        let around = self.watched.run_around(page, WIDE);
        let protected = |page: &usize| !self.is_unprotected(*page);
        let before = (around.start..page).rev().take_while(protected).count();
        let after = (page..around.end()).take_while(protected).count();
        self.lift(PageRange::new(page - before, before + after))
    }
}

impl FaultHandler for Watch {
    fn answers(&self, signal: FaultSignal) -> bool {
        signal == FaultSignal::Bus
            || self.missing.as_ref().is_some_and(|missing| missing.gives_stand_ins())
    }

    fn on_fault(&self, fault: &Fault) -> bool {
        let page = (fault.address - self.base) / PAGE_SIZE;
        if fault.cause == FaultCause::Protected {
            return self.stand_in(page, fault.instruction);
        }
        if fault.cause != FaultCause::Unavailable || !self.watched.contains(page) {
            return false;
        }
        if self
            .missing
            .as_ref()
            .is_some_and(|missing| missing.answer(page) != FaultOutcome::Present)
        {
            return true;
        }
        if self.turns_in_a_circle(page) {
            return false;
        }
        if self.is_unprotected(page) {
            // It arrived after the fault.
            return true;
        }
        let huge = self.huge_page_of(page);
        if self.huge.contains(huge) {
            return self.lift(self.pages_of(huge)) || self.lift_widely(page);
        }
        let window = if self.next.load(Ordering::Relaxed) == page {
            (self.window.load(Ordering::Relaxed) * 2).min(MAX_WINDOW)
        } else {
            1
        };
        // The kernel lifts no protection from a range with a part that is not protected.
        let single = |page| {
            self.watched.contains(page)
                && !self.huge.contains(self.huge_page_of(page))
                && !self.is_unprotected(page)
        };
        let len = (1..window).take_while(|i| single(page + i)).count() + 1;
        let range = PageRange::new(page, len);
        self.window.store(window, Ordering::Relaxed);
        self.next.store(range.end(), Ordering::Relaxed);
        if !self.lift(range) {
            return self.lift_widely(page);
        }
        if len > 1 && self.missing.is_none() {
            self.populate(range);
        }
        true
    }
}

impl Barrier for Watch {
    fn protect(&self, range: PageRange) -> Result<(), TrackError> {
        self.set_protection(range, true)
    }

    fn copier(&self) -> &CopierCell {
        &self.copier
    }
}

/// Notices writes through SIGBUS.
pub(super) struct Sigbus {
    watch: Arc<Watch>,
    /// Watched parts that were never protected. Their private pages are the written ones.
    unprotected: Vec<PageRange>,
    /// Drains that found nothing written there.
    empty_drains: u32,
    _registration: Registration,
}

impl Sigbus {
    pub(super) fn new(
        memory: &Arc<Reservation>,
        first: usize,
        capacity: usize,
        missing: Option<Missing>,
    ) -> Result<Self, TrackError> {
        let base = memory.page_ptr(first);
        let watch = Arc::new(Watch {
            uffd: SIGBUS.get()?,
            memory: memory.clone(),
            first,
            base: base as usize,
            watched: DirtyPages::new(capacity),
            huge: DirtyPages::new(capacity / HUGE_PAGES + 2),
            next: AtomicUsize::new(usize::MAX),
            window: AtomicUsize::new(1),
            dirty: DirtyPages::new(capacity),
            missing,
            unprotected: AtomicBool::new(false),
            copier: CopierCell::default(),
            again: AtomicUsize::new(usize::MAX),
            repeats: AtomicUsize::new(0),
        });
        let registration = fault::register(base, capacity * PAGE_SIZE, watch.clone())?;
        Ok(Self { watch, unprotected: Vec::new(), empty_drains: 0, _registration: registration })
    }

    /// Registers the parts of `range` that may have missing pages without protecting them, and
    /// protects the others.
    fn register_unprotected(&mut self, range: PageRange) -> Result<(), TrackError> {
        let parts: Vec<PageRange> =
            self.watch.missing.iter().flat_map(|missing| missing.within(range)).collect();
        let mut next = range.start;
        for part in &parts {
            self.register(PageRange::new(next, part.start - next))?;
            let start = (self.watch.base + part.byte_start()) as *const u8;
            self.watch.uffd.register(start, part.byte_len(), Interest::MISSING)?;
            next = part.end();
        }
        self.register(PageRange::new(next, range.end() - next))?;
        if !parts.is_empty() {
            self.unprotected.extend(parts);
            self.watch.unprotected.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Whether nothing was written to the parts that are not protected, so that they can stay as
    /// they are. Only the first drains query the kernel.
    fn may_stay_unprotected(&mut self) -> Result<bool, TrackError> {
        if self.empty_drains == MAX_EMPTY_DRAINS {
            return Ok(false);
        }
        for part in &self.unprotected {
            let start = (self.watch.base + part.byte_start()) as *const u8;
            let mut written = Vec::new();
            pagemap::private(start, part.len, |run| written.push(run))?;
            if !planted::but_last(Bug::Private, &written).is_empty() {
                return Ok(false);
            }
        }
        self.empty_drains += 1;
        Ok(true)
    }

    /// Protects what [`Self::register_unprotected`] did not, and marks its private pages instead.
    fn protect_rest(&mut self) -> Result<(), TrackError> {
        while let Some(part) = self.unprotected.last().copied() {
            let start = (self.watch.base + part.byte_start()) as *const u8;
            let mut written = Vec::new();
            pagemap::private(start, part.len, |run| written.push(run))?;
            let interest = Interest { missing: true, ..Interest::WRITES };
            self.watch.uffd.register(start, part.byte_len(), interest)?;
            let mut next = part.start;
            for run in planted::but_last(Bug::Private, &written) {
                let run = PageRange::new(part.start + run.start, run.len);
                self.watch.dirty.mark(run);
                self.protect(PageRange::new(next, run.start - next), true)?;
                next = run.end();
            }
            self.protect(PageRange::new(next, part.end() - next), true)?;
            self.unprotected.pop();
        }
        self.watch.unprotected.store(false, Ordering::Release);
        Ok(())
    }

    /// Registers and protects pages.
    fn register(&self, range: PageRange) -> Result<(), TrackError> {
        if range.is_empty() {
            return Ok(());
        }
        let start = (self.watch.base + range.byte_start()) as *const u8;
        self.watch.uffd.register(start, range.byte_len(), Interest::WRITES)?;
        for part in self.watch.missing.iter().flat_map(|missing| missing.within(range)) {
            let start = (self.watch.base + part.byte_start()) as *const u8;
            let interest = Interest { missing: true, ..Interest::WRITES };
            self.watch.uffd.register(start, part.byte_len(), interest)?;
        }
        self.protect(range, true)
    }

    fn protect(&self, range: PageRange, protect: bool) -> Result<(), TrackError> {
        self.watch.set_protection(range, protect)
    }

    /// Answers for pages from now on, if they were `registered`.
    fn admit(
        &self,
        range: PageRange,
        registered: Result<(), TrackError>,
    ) -> Result<(), TrackError> {
        if registered.is_err() {
            // Nothing answers for pages that are registered and not watched. Fails where none is.
            let start = (self.watch.base + range.byte_start()) as *const u8;
            let _ = self.watch.uffd.unregister(start, range.byte_len());
            return registered;
        }
        self.watch.watched.mark(range);
        Ok(())
    }
}

// SAFETY: `Watch` marks watched pages before it opens them, and the userfaultfd reports the first
// write to every other page that is protected. Parts that are not protected are private mappings of
// an image, which a write gives a private page: the drain marks those, while no guest runs, before
// it protects the others. A drain that finds none of them leaves the parts as they are, and a later
// one lists them again. Only a drain, or a method that protects the others first, lets a page join
// the write set. `DirtyPages` drains in order, each page once.
unsafe impl Tracker for Sigbus {
    fn kind(&self) -> TrackerKind {
        TrackerKind::UffdSigbus
    }

    fn failure(&self) -> Option<String> {
        self.watch.missing.as_ref()?.failure()
    }

    fn watch(&mut self, range: PageRange) -> Result<(), TrackError> {
        let lists_private_pages = Features::host().has(Feature::PagemapScan);
        let registered = match self.watch.missing.is_some() && lists_private_pages {
            true => self.register_unprotected(range),
            false => self.register(range),
        };
        self.admit(range, registered)
    }

    fn rearm(&mut self, range: PageRange) -> Result<(), TrackError> {
        self.protect_rest()?;
        let registered = self.register(range);
        self.admit(range, registered)
    }

    fn drain(&mut self, written: &mut Vec<PageRange>) -> Result<(), TrackError> {
        if !self.unprotected.is_empty() && !self.may_stay_unprotected()? {
            self.protect_rest()?;
        }
        if !self.watch.dirty.is_empty() {
            self.watch.dirty.drain(written);
            self.watch.next.store(usize::MAX, Ordering::Relaxed);
        }
        Ok(())
    }

    fn arm(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        self.protect_rest()?;
        pages.iter().try_for_each(|range| self.protect(*range, true))
    }

    fn open(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        self.protect_rest()?;
        pages.iter().try_for_each(|range| self.protect(*range, false))
    }

    fn barrier(&self) -> Option<WriteBarrier> {
        Some(WriteBarrier::new(self.watch.clone()))
    }

    fn watches_huge_pages(&self) -> bool {
        true
    }

    fn by_huge_page(&mut self, huge: PageRange, on: bool) {
        let huge = PageRange::new(self.watch.huge_page_of(huge.start), 1);
        if on {
            self.watch.huge.mark(huge);
        } else {
            self.watch.huge.clear(huge);
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    use afresh_sys::{Memfd, Protection};

    use super::*;

    const CHILD: &str = "AFRESH_TEST_LOST_PAGE";
    const NAME: &str =
        "tracker::sigbus::tests::a_page_that_is_lost_ends_the_process_and_does_not_hang_it";
    /// The child's exit status for a skipped test.
    const SKIPPED: i32 = 9;

    /// Touches a page that no retry restores: past the end of its file, which the kernel reports as
    /// it reports a page that it cannot read from swap, or poisoned.
    fn touch_a_lost_page(poisoned: bool) -> Result<std::convert::Infallible, TrackError> {
        let all = PageRange::new(0, 2);
        let file = Memfd::new(c"afresh-test")?;
        file.set_len(if poisoned { 2 } else { 1 } * PAGE_SIZE)?;
        let memory = Arc::new(Reservation::new(2)?);
        memory.map_private(all, Protection::ReadWrite, &file, 0)?;
        let mut tracker = Sigbus::new(&memory, 0, 2, None)?;
        tracker.watch(all)?;
        let (first, second) = (memory.page_ptr(0), memory.page_ptr(1));
        // SAFETY: inside the mapping; the tracker opens it.
        unsafe { first.write_volatile(1) };
        let lost = if poisoned { first } else { second };
        if poisoned {
            // SAFETY: the page is this process's own, a private copy.
            let done = unsafe { libc::madvise(lost.cast(), PAGE_SIZE, libc::MADV_HWPOISON) };
            if done != 0 {
                println!("MADV_HWPOISON: {}", std::io::Error::last_os_error());
                std::process::exit(SKIPPED);
            }
        }
        // SAFETY: the fault is the purpose.
        unsafe { lost.write_volatile(1) };
        println!("a page that is lost was written");
        std::process::exit(3);
    }

    #[test]
    fn a_page_that_is_lost_ends_the_process_and_does_not_hang_it() {
        if let Ok(how) = std::env::var(CHILD) {
            let Err(error) = touch_a_lost_page(how == "poisoned");
            println!("{error}");
            std::process::exit(SKIPPED);
        }
        for how in ["past the end", "poisoned"] {
            let mut child = afresh_sys::test_command(NAME)
                .env(CHILD, how)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let started = Instant::now();
            let status = loop {
                match child.try_wait().unwrap() {
                    Some(status) => break status,
                    None if started.elapsed() > Duration::from_secs(60) => {
                        child.kill().unwrap();
                        panic!("{how}: the access is retried without end");
                    }
                    None => std::thread::sleep(Duration::from_millis(5)),
                }
            };
            if status.code() == Some(SKIPPED) {
                println!("SKIPPED: {how}: unavailable here");
                continue;
            }
            assert_eq!(status.signal(), Some(libc::SIGBUS), "{how}: {status}");
        }
    }
}
