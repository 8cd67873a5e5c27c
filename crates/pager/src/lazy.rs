//! Lazy filling by userfaultfd: pages stay missing until they are touched or streamed.
//!
//! The memory is divided into *windows*. Each is missing, being filled, or present. A thread that
//! needs a window claims it with one compare-and-swap and fills it; other threads wait for the
//! word. So a faulting thread, a handler thread and any number of streaming threads work side by
//! side, and every page is put in place once.
//!
//! Promises: a page is seen only after all of it is in place. When filling fails or takes too
//! long, the memory is closed ([`Control`]) before anyone is woken; it never reads as zero.
//!
//! May break it: a signal handler installed over ours that does not chain (see
//! `afresh_sys::fault`); a system call that touches a missing page, which gets `EFAULT`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use afresh_memory::Inserter;
use afresh_sys::errno::{EAGAIN, EBUSY, EEXIST, EINVAL};
use afresh_sys::fault::{Fault, FaultCause, FaultHandler, FaultSignal};
use afresh_sys::{Call, HUGE_PAGES, PAGE_SIZE, PageRange, Reservation, SysError, Uffd, futex};

use crate::control::Control;
use crate::staging::Staging;
use crate::wait_budget::WaitBudget;
use crate::{PageSource, SourceError};

const MISSING: u32 = 0;
const FILLING: u32 = 1;
/// Being filled, and a thread sleeps on the word.
const AWAITED: u32 = 2;
const PRESENT: u32 = 3;

/// Interval at which a thread requests a window again that another thread is to fill.
const ASKING: Duration = Duration::from_millis(5);
/// Interval at which a thread checks for a window that is being filled.
const AWAITING: Duration = Duration::from_millis(50);

/// The state of a window at first. A `claimed` one is filled by the coordinator.
pub(crate) fn first_state(missing: bool, claimed: bool) -> u32 {
    match (missing, claimed) {
        (false, _) => PRESENT,
        (true, true) => FILLING,
        (true, false) => MISSING,
    }
}

/// How pages are put in place.
#[derive(Debug)]
pub(crate) enum Fill {
    /// Read into staged pages and copied.
    Copy,
    /// Read into staged pages and moved.
    Move,
    /// Read into staged pages and put through the inserter of a lazily filled image.
    Insert(Arc<Inserter>),
}

/// Where huge pages are read to.
#[derive(Debug)]
pub(crate) enum HugePageTarget {
    /// Slots that are used again and again.
    Pool(Staging),
    /// A range as large as the target. Each of its huge pages is used once. Moving a huge page away
    /// leaves an empty page table behind, and the next fault there would get small pages.
    Once(Reservation),
}

/// The state of one lazily filled memory.
pub(crate) struct LazyMemory {
    pub(crate) control: Arc<Control>,
    pub(crate) source: Arc<dyn PageSource>,
    /// Images have none: their slots see to faults.
    pub(crate) uffd: Option<Uffd>,
    /// The memory that is filled; images have none.
    pub(crate) target: Option<Arc<Reservation>>,
    pub(crate) range: PageRange,
    /// Pages filled on a fault.
    pub(crate) window: usize,
    /// Windows filled together when a server thread is asked for one of them, at most.
    pub(crate) around: usize,
    pub(crate) fill: Fill,
    /// Slots of one window, for faults.
    pub(crate) small: Option<Staging>,
    /// Room for a huge page, for streaming.
    pub(crate) huge: Option<HugePageTarget>,
    /// A futex word a window.
    pub(crate) states: Box<[AtomicU32]>,
    /// Windows not yet present.
    pub(crate) remaining: AtomicUsize,
    /// Next huge page to stream; past the end when nothing streams.
    pub(crate) next_hugepage: AtomicUsize,
    /// Windows that faulting threads wait for and a server thread fills; a bit each.
    pub(crate) wanted: Box<[AtomicU64]>,
    /// Futex word: counts wishes, to wake the server.
    pub(crate) bell: AtomicU32,
    /// Number of the fault that the handler thread is answering; 0 when idle.
    pub(crate) busy: AtomicU64,
    /// Set when everything is wanted although nothing streams.
    pub(crate) rush: AtomicBool,
    /// Whether the thread that answers a fault may read the source itself.
    pub(crate) inline: bool,
    /// Windows of the working set that the coordinator fills first. They were claimed for it.
    pub(crate) set: Box<[usize]>,
}

/// Puts those of the pages from `first` on in place that the working set has not.
pub(crate) fn put_missing(
    inserter: &Inserter,
    first: usize,
    content: &[u8],
) -> Result<(), SourceError> {
    let pages = content.len() / PAGE_SIZE;
    let mut at = 0;
    while at < pages {
        let there = inserter.has(first + at);
        let run = (at..pages).take_while(|page| inserter.has(first + page) == there).count();
        if !there {
            inserter.put(first + at, &content[at * PAGE_SIZE..(at + run) * PAGE_SIZE])?;
        }
        at += run;
    }
    Ok(())
}

impl LazyMemory {
    /// Number of huge pages that streaming goes through.
    fn hugepages(&self) -> usize {
        self.range.len.div_ceil(HUGE_PAGES)
    }

    fn windows_of(&self, pages: PageRange) -> std::ops::Range<usize> {
        pages.start / self.window..pages.end().div_ceil(self.window)
    }

    /// Pages of window `window`, relative to the range.
    pub(crate) fn pages_of(&self, window: usize) -> PageRange {
        let start = window * self.window;
        PageRange::new(start, self.window.min(self.range.len - start))
    }

    /// Address of a page of the target; null without one.
    fn address(&self, page: usize) -> *mut u8 {
        self.target
            .as_ref()
            .map_or(std::ptr::null_mut(), |target| target.page_ptr(self.range.start + page))
    }

    fn claim(&self, window: usize) -> bool {
        self.states[window]
            .compare_exchange(MISSING, FILLING, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    fn publish(&self, window: usize) {
        let before = self.states[window].swap(PRESENT, Ordering::AcqRel);
        // Without inline filling, threads sleep on missing windows too, uncounted.
        if before == AWAITED || !self.inline {
            futex::wake_all(&self.states[window]);
        }
        self.remaining.fetch_sub(1, Ordering::AcqRel);
    }

    /// As [`LazyMemory::publish`], for a window that was never missing, so that threads sleep on it
    /// only where they have noted that.
    pub(crate) fn publish_claimed(&self, window: usize) {
        if self.states[window].swap(PRESENT, Ordering::AcqRel) == AWAITED {
            futex::wake_all(&self.states[window]);
        }
        self.remaining.fetch_sub(1, Ordering::AcqRel);
    }

    /// Puts claimed pages in place. Takes no lock and allocates nothing if the source does not.
    pub(crate) fn fill(&self, pages: PageRange) -> Result<(), SourceError> {
        let uffd = match (&self.fill, &self.uffd) {
            (Fill::Insert(inserter), _) => return self.fill_image(inserter, pages),
            (_, Some(uffd)) => uffd,
            (_, None) => return Err(SysError::new(Call::UffdFill, EINVAL).into()),
        };
        match &self.fill {
            Fill::Insert(_) => Ok(()),
            Fill::Copy | Fill::Move => {
                let _slot;
                let staged = match (&self.small, &self.huge) {
                    (Some(pool), _) if pages.len <= self.window => {
                        _slot = pool.take();
                        _slot.ptr()
                    }
                    (_, Some(HugePageTarget::Pool(pool))) => {
                        _slot = pool.take();
                        _slot.ptr()
                    }
                    (_, Some(HugePageTarget::Once(range))) => range.page_ptr(pages.start),
                    (_, None) => return Err(SysError::new(Call::UffdFill, EINVAL).into()),
                };
                // SAFETY: the slot is ours until it is dropped, and has room for the pages that
                // `fill` reads: a window, or a huge page. A range that is used once is ours where
                // we have claimed the target's pages.
                unsafe { self.source.read(pages.start, staged, pages.len) }?;
                let base = self.address(pages.start) as usize;
                self.place(pages, |at, len| {
                    // SAFETY: stays inside the staged pages, as `at` stays inside `pages`.
                    let from = unsafe { staged.add(at as usize - base) };
                    if matches!(self.fill, Fill::Move) {
                        // SAFETY: staged pages are anonymous memory that only we use.
                        match unsafe { uffd.take(at, from, len) } {
                            // A page that something has pinned can be copied; before Linux 6.8
                            // nothing is moved.
                            Err(e) if matches!(e.errno, EBUSY | EINVAL) => {}
                            other => return other,
                        }
                    }
                    // SAFETY: as above.
                    unsafe { uffd.copy(at, from, len) }
                })
            }
        }
    }

    /// Reads claimed pages of an image, each group whole and checked, and then shows them.
    fn fill_image(&self, inserter: &Inserter, pages: PageRange) -> Result<(), SourceError> {
        if self.source.is_distant() && pages.len > self.window {
            // One request, whatever its size. Only the pager's own threads come here.
            let mut buffer = vec![0u8; pages.byte_len()];
            // SAFETY: the buffer is ours, and has the length of the read.
            unsafe { self.source.read(pages.start, buffer.as_mut_ptr(), pages.len) }?;
            return put_missing(inserter, pages.start, &buffer);
        }
        let Some(pool) = &self.small else {
            return Err(SysError::new(Call::UffdFill, EINVAL).into());
        };
        let slot = pool.take();
        for first in (pages.start..pages.end()).step_by(pool.slot_pages()) {
            let len = pool.slot_pages().min(pages.end() - first);
            // SAFETY: the slot is ours until it is dropped, and has room for so many pages.
            unsafe { self.source.read(first, slot.ptr(), len) }?;
            // SAFETY: as above; `read` has written all of them.
            let staged = unsafe { std::slice::from_raw_parts(slot.ptr(), len * PAGE_SIZE) };
            put_missing(inserter, first, staged)?;
        }
        Ok(())
    }

    /// Calls `step` until all of `pages` is in place; it returns the bytes it placed.
    fn place(
        &self,
        pages: PageRange,
        step: impl Fn(*mut u8, usize) -> Result<usize, SysError>,
    ) -> Result<(), SourceError> {
        let (mut done, len) = (0, pages.byte_len());
        let mut tries = 0;
        while done < len {
            // SAFETY: inside the target range, since `done < len`.
            let at = unsafe { self.address(pages.start).add(done) };
            match step(at, len - done) {
                Ok(0) => tries += 1,
                Ok(placed) => done += placed,
                // The page is there: the guest threw it away before, and touched it again.
                Err(e) if e.errno == EEXIST => done += PAGE_SIZE,
                // The address space is being changed by another thread.
                Err(e) if e.errno == EAGAIN => {
                    tries += 1;
                    std::thread::yield_now();
                }
                Err(e) => return Err(e.into()),
            }
            if tries > 100_000 {
                return Err(SysError::new(Call::UffdFill, EAGAIN).into());
            }
        }
        Ok(())
    }

    /// Fills a window that this thread has claimed, or fails the restore.
    fn fill_claimed(&self, window: usize) -> bool {
        self.fill_from(window, window + 1).is_some()
    }

    /// Fills window `from`, which this thread has claimed, together with those after it that are
    /// missing too, as far as `limit`. Returns the first that was left, or `None` after failing the
    /// restore.
    fn fill_from(&self, from: usize, limit: usize) -> Option<usize> {
        let mut until = from + 1;
        while until < limit && self.claim(until) {
            until += 1;
        }
        let first = self.pages_of(from).start;
        let pages = PageRange::new(first, self.pages_of(until - 1).end() - first);
        if let Err(error) = self.fill(pages) {
            self.control.fail(&error);
            return None;
        }
        (from..until).for_each(|window| self.publish(window));
        Some(until)
    }

    /// Fills every missing window of huge page `hugepage`, whole if none was there.
    pub(crate) fn fill_hugepage(&self, hugepage: usize) -> bool {
        let start = hugepage * HUGE_PAGES;
        let hugepage = PageRange::new(start, HUGE_PAGES.min(self.range.len - start));
        let windows = self.windows_of(hugepage);
        if let Fill::Insert(inserter) = &self.fill
            && self.source.is_distant()
        {
            return self.fill_at_once(inserter, windows);
        }
        let mut from = windows.start;
        while from < windows.end {
            if !self.claim(from) {
                from += 1;
                continue;
            }
            match self.fill_from(from, windows.end) {
                Some(until) => from = until,
                None => return false,
            }
        }
        true
    }

    /// Fills those of `windows` that are missing with a single read, for the inserter of an image.
    fn fill_at_once(&self, inserter: &Inserter, windows: std::ops::Range<usize>) -> bool {
        let claimed: Vec<usize> = windows.filter(|window| self.claim(*window)).collect();
        let (Some(first), Some(last)) = (claimed.first(), claimed.last()) else { return true };
        let start = self.pages_of(*first).start;
        let pages = PageRange::new(start, self.pages_of(*last).end() - start);
        let mut buffer = vec![0u8; pages.byte_len()];
        // SAFETY: the buffer is ours, and has the length of the read.
        let read = unsafe { self.source.read(pages.start, buffer.as_mut_ptr(), pages.len) };
        let result = read.and_then(|()| {
            // Adjacent pages go in one call.
            for run in claimed.chunk_by(|a, b| a + 1 == *b) {
                let (from, to) = (self.pages_of(run[0]), self.pages_of(run[run.len() - 1]));
                let bytes = (from.start - start) * PAGE_SIZE..(to.end() - start) * PAGE_SIZE;
                put_missing(inserter, from.start, &buffer[bytes])?;
            }
            Ok(())
        });
        match result {
            Ok(()) => {
                claimed.into_iter().for_each(|window| self.publish(window));
                true
            }
            Err(error) => {
                self.control.fail(&error);
                false
            }
        }
    }

    /// Streams the next huge page; `false` after the last one or a failure.
    pub(crate) fn stream_next(&self) -> bool {
        let hugepage = self.next_hugepage.fetch_add(1, Ordering::AcqRel);
        if hugepage >= self.hugepages() {
            // Stays past the end without ever wrapping.
            self.next_hugepage.store(self.hugepages(), Ordering::Release);
            return false;
        }
        !self.control.has_failed() && self.fill_hugepage(hugepage)
    }

    /// Streams until nothing is left or the restore is stopped.
    pub(crate) fn stream(&self) {
        loop {
            if self.control.stop.load(Ordering::Acquire) || !self.stream_next() {
                return;
            }
        }
    }

    /// Makes window `window` present: fills it, or waits for the thread that does. `false` once the
    /// restore has failed.
    pub(crate) fn ensure(&self, window: usize, inline: bool) -> bool {
        let word = &self.states[window];
        let mut budget = WaitBudget::new(self.control.timeout);
        let mut helped = false;
        loop {
            if self.control.has_failed() {
                return false;
            }
            let waited = match word.load(Ordering::Acquire) {
                PRESENT => return true,
                MISSING if inline => {
                    if self.claim(window) {
                        return self.fill_claimed(window);
                    }
                    continue;
                }
                MISSING => {
                    self.wanted[window / 64].fetch_or(1 << (window % 64), Ordering::AcqRel);
                    self.bell.fetch_add(1, Ordering::AcqRel);
                    futex::wake_all(&self.bell);
                    budget.step(ASKING, |step| futex::wait(word, MISSING, step))
                }
                FILLING => {
                    // Somebody streams this huge page: rather than sleep, stream the next one.
                    if inline && !helped && self.huge.is_some() {
                        helped = true;
                        if self.stream_next() {
                            continue;
                        }
                    }
                    let _ = word.compare_exchange(
                        FILLING,
                        AWAITED,
                        Ordering::AcqRel,
                        Ordering::Acquire,
                    );
                    continue;
                }
                state => budget.step(AWAITING, |step| futex::wait(word, state, step)),
            };
            if waited.is_none() {
                self.control.fail_stuck();
                return false;
            }
        }
    }

    /// Fills the windows that faulting threads wait for. Returns whether there were any.
    pub(crate) fn serve(&self) -> bool {
        let mut any = false;
        for (n, word) in self.wanted.iter().enumerate() {
            let mut bits = if word.load(Ordering::Acquire) == 0 {
                continue;
            } else {
                word.swap(0, Ordering::AcqRel)
            };
            while bits != 0 {
                let window = n * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                any = true;
                let limit = ((window / self.around + 1) * self.around).min(self.states.len());
                if self.claim(window) && self.fill_from(window, limit).is_none() {
                    return true;
                }
            }
        }
        any
    }

    /// Makes every page of `pages`, relative to the range, present. `inline` says whether this
    /// thread may read the source, and so hang with it.
    pub(crate) fn resolve(&self, pages: PageRange, inline: bool) -> bool {
        let windows = self.windows_of(pages);
        // Images take any number of windows at once; other memory is staged one by one.
        let at_once = inline && matches!(self.fill, Fill::Insert(_));
        let mut at = windows.start;
        while at < windows.end {
            if at_once && !self.control.has_failed() && self.claim(at) {
                // Pages around it come along, as with a request to a server thread.
                let group = (at / self.around + 1) * self.around;
                match self.fill_from(at, windows.end.max(group).min(self.states.len())) {
                    Some(until) => at = until,
                    None => return false,
                }
            } else if self.ensure(at, inline) {
                at += 1;
            } else {
                return false;
            }
        }
        true
    }

    /// The pages of all present windows.
    pub(crate) fn present(&self) -> Vec<PageRange> {
        let mut ranges: Vec<PageRange> = Vec::new();
        for (window, state) in self.states.iter().enumerate() {
            if state.load(Ordering::Acquire) != PRESENT {
                continue;
            }
            let pages = self.pages_of(window);
            match ranges.last_mut() {
                Some(last) if last.end() == pages.start => last.len += pages.len,
                _ => ranges.push(pages),
            }
        }
        ranges
    }

    /// A fault on a present window: a thread filled it just now, or the guest has discarded the
    /// page, which then reads as zero like any memory that was discarded away.
    fn refill(&self, page: usize) -> bool {
        let Some(uffd) = &self.uffd else { return true };
        let at = self.address(page);
        match uffd.zero(at, PAGE_SIZE) {
            Ok(_) => true,
            Err(e) if e.errno == EEXIST || e.errno == EAGAIN => true,
            Err(e) => {
                self.control.fail(&e.into());
                false
            }
        }
    }

    /// Answers a fault at `address`; `false` once the restore has failed.
    pub(crate) fn answer(&self, address: usize) -> bool {
        self.answer_page((address - self.address(0) as usize) / PAGE_SIZE)
    }

    /// Answers a fault on a page of the range; `false` once the restore has failed.
    pub(crate) fn answer_page(&self, page: usize) -> bool {
        self.control.faults.fetch_add(1, Ordering::Relaxed);
        let window = page / self.window;
        if self.states[window].load(Ordering::Acquire) == PRESENT {
            self.refill(page)
        } else {
            self.ensure(window, self.inline)
        }
    }
}

impl LazyMemory {
    /// Ends reporting of missing pages and wakes threads that sleep in the kernel. A second call
    /// does nothing.
    pub(crate) fn release(&self) {
        if let Some(uffd) = &self.uffd {
            // Fails only when the range is not registered any more, which is what is wanted.
            let _ = uffd.unregister(self.address(0), self.range.byte_len());
        }
    }

    /// Wakes the thread that sleeps for the page at `address`, if it does still.
    pub(crate) fn wake(&self, address: usize) {
        let page = (address & !(PAGE_SIZE - 1)) as *const u8;
        if let Some(uffd) = &self.uffd {
            // Fails only for a range that is no multiple of a page.
            let _ = uffd.wake(page, PAGE_SIZE);
        }
    }
}

impl FaultHandler for LazyMemory {
    fn answers(&self, signal: FaultSignal) -> bool {
        // Once the memory is closed, accesses raise SIGSEGV, which is for the guest's own handler.
        signal == FaultSignal::Bus
    }

    fn on_fault(&self, fault: &Fault) -> bool {
        // A page whose content the hardware lost is not missing, and filling cannot bring it back.
        if fault.cause != FaultCause::Unavailable {
            return false;
        }
        // After a failure the retry raises SIGSEGV, unless access could not be taken away: then
        // this signal passes to the handler that ends the guest.
        self.answer(fault.address) || self.control.is_closed()
    }
}
