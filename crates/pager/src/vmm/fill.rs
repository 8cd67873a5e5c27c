//! Fills the pages of a VMM: what the threads of a service do.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use afresh_sys::errno::{EAGAIN, EEXIST, ENOENT, ESRCH};
use afresh_sys::{PAGE_SIZE, PageRange, SysError};

use super::VmmError;
use super::handshake::Mapping;
use super::page::Page;
use super::pages::Job;
use super::service::Service;
use crate::SourceError;

/// Maximum retries of a fill of memory that is not registered.
const MAX_ATTEMPTS: u32 = 10_000;
/// Maximum attempts of a fill ahead of a VMM that changes its mappings, before it is postponed.
const MAX_AHEAD_ATTEMPTS: u32 = 200;
/// Time between two attempts.
const PAUSE: Duration = Duration::from_micros(50);
/// Interval of checks by an idle thread.
const TICK: Duration = Duration::from_millis(50);
/// Pages that are put in place without letting go of the lock: a fraction of a millisecond.
const FILL_BATCH: usize = 64;

impl Service<'_> {
    /// The loop of each thread until the service ends.
    pub(super) fn work(&self, can_stream: bool) {
        let batch = can_stream.then_some(self.sizes.batch);
        while let Some(job) = self.next(batch) {
            let result = catch_unwind(AssertUnwindSafe(|| match job {
                Job::Fault(mapping, page) => self.answer(mapping, page),
                Job::WorkingSet => self.fill_working_set(),
                Job::Stream(mapping, pages) => self.stream(mapping, pages),
            }));
            // A thread that unwinds would leave the guest waiting.
            let panicked =
                || Err(io::Error::other("a thread that fills pages has panicked").into());
            if let Err(error) = result.unwrap_or_else(|_| panicked()) {
                self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                self.end();
            }
        }
    }

    fn next(&self, batch: Option<usize>) -> Option<Job> {
        let mut pages = self.lock();
        while !self.is_over() {
            if let Some(job) = pages.next(&self.mappings, batch) {
                return Some(job);
            }
            let waited = self.bell.wait_timeout(pages, TICK);
            pages = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        None
    }

    /// Answers a fault: fills the window around it.
    fn answer(&self, mapping: usize, page: usize) -> Result<(), VmmError> {
        let of = self.mappings[mapping];
        let unit = PageRange::new(page / of.unit * of.unit, of.unit);
        let state = self.lock().look(mapping, page);
        match state {
            Page::Missing => {
                let claimed = self.lock().claim(mapping, self.window_around(of, page));
                self.read(mapping, &claimed, Urgency::Fault).map(drop)
            }
            // The thread that fills it wakes the guest, or sends it back here. But one who streams
            // from far away asks for much at a time, and little comes sooner: what comes second is
            // left out.
            Page::Filling if self.source.is_distant() => {
                let pages = self.window_around(of, page);
                let filling = self.lock().filling(mapping, pages);
                self.read(mapping, &filling, Urgency::Fault).map(drop)
            }
            Page::Filling => Ok(()),
            // Discarded, with an event or without one, or filled since the fault: zero, if it is
            // not there.
            Page::Present | Page::Removed => {
                self.open_page(mapping, page)?;
                self.zero(mapping, unit)
            }
            // Its faults end in the kernel.
            Page::Unmapped => Ok(()),
        }
    }

    /// The pages that a fault fills.
    fn window_around(&self, mapping: Mapping, page: usize) -> PageRange {
        let window = self.sizes.window.max(mapping.unit);
        let start = page / window * window;
        PageRange::new(start, window.min(mapping.pages - start))
    }

    /// Fills a missing unit that was filled or discarded before with zeros, and wakes its waiters.
    fn zero(&self, mapping: usize, unit: PageRange) -> Result<(), VmmError> {
        let mut attempts = Attempts::default();
        while !self.is_over() {
            let mut known = self.lock();
            let at = known.address(mapping, unit.start) as *mut u8;
            let result = match unit.len {
                1 => self.uffd.zero(at, PAGE_SIZE),
                // The kernel has no zero page for huge ones.
                _ => {
                    let zeros = vec![0; unit.byte_len()];
                    // SAFETY: the zeros have the length of the unit. `at` is an address in the VMM,
                    // which registered it with this descriptor for us to fill; the kernel refuses
                    // any other.
                    unsafe { self.uffd.copy(at, zeros.as_ptr(), zeros.len()) }
                }
            };
            match self.outcome(result)? {
                FillOutcome::Pages(_) => known.served.zeroed += unit.len,
                FillOutcome::Already => {}
                FillOutcome::Later(why) => {
                    drop(known);
                    attempts.wait(why)?;
                    continue;
                }
            }
            known.set(mapping, unit, Page::Present);
            drop(known);
            self.uffd.wake(at, unit.byte_len())?;
            break;
        }
        Ok(())
    }

    /// Puts the working set in place, from its compact copy.
    fn fill_working_set(&self) -> Result<(), VmmError> {
        let mut failed = None;
        let read = self.source.read_working_set(&mut |run, bytes| {
            for (number, mapping) in self.mappings.iter().enumerate() {
                let of_source = PageRange::new(mapping.offset, mapping.pages);
                let Some(inside) = run.intersect(of_source) else { continue };
                let units = mapping.inside_units(inside);
                let claimed = self.lock().claim(number, units);
                for part in claimed {
                    let from = part.start + mapping.offset - run.start;
                    let bytes = &bytes[from * PAGE_SIZE..(from + part.len) * PAGE_SIZE];
                    if let Err(error) = self.put(number, part, Some(bytes), Urgency::Fault) {
                        failed = Some(error);
                        return Err(SourceError::Changed);
                    }
                }
            }
            Ok(())
        });
        if let Some(error) = failed {
            return Err(error);
        }
        read?;
        self.lock().set_is_there();
        self.bell.notify_all();
        Ok(())
    }

    /// Fills the missing pages among `pages` of a mapping ahead of the guest. Those that a VMM in
    /// the middle of a change does not take soon are left for later, so that it holds no room of
    /// others.
    fn stream(&self, mapping: usize, pages: PageRange) -> Result<(), VmmError> {
        let Some(room) = self.stream_budget.take(pages.byte_len(), || self.is_over()) else {
            return Ok(());
        };
        let claimed = self.lock().claim(mapping, pages);
        let all = self.read(mapping, &claimed, Urgency::Ahead)?;
        drop(room);
        if !all {
            let mut known = self.lock();
            for run in claimed {
                known.give_up(mapping, run);
            }
            drop(known);
            self.bell.notify_all();
            std::thread::sleep(TICK);
        }
        Ok(())
    }

    /// Reads pages that are being filled, and puts those in place that still are. Returns whether
    /// all of them are done with.
    fn read(&self, mapping: usize, runs: &[PageRange], urgency: Urgency) -> Result<bool, VmmError> {
        let of = self.mappings[mapping];
        let mut stored: Vec<PageRange> = Vec::new();
        for run in runs {
            let mut at = run.start;
            for part in self.stored_in(of, *run) {
                if !self.put(mapping, PageRange::new(at, part.start - at), None, urgency)? {
                    return Ok(false);
                }
                at = part.end();
                stored.push(part);
            }
            if !self.put(mapping, PageRange::new(at, run.end() - at), None, urgency)? {
                return Ok(false);
            }
        }
        let (Some(first), Some(last)) = (stored.first(), stored.last()) else { return Ok(true) };
        let hull = PageRange::new(first.start, last.end() - first.start);
        // One request is cheaper than many, though it brings pages that are there already.
        let reads = if self.source.is_distant() { vec![hull] } else { stored.clone() };
        let mut buffer = Vec::new();
        for read in reads {
            buffer.resize(read.byte_len(), 0);
            let source = of.offset + read.start;
            // SAFETY: the buffer has room for so many pages and is ours alone.
            unsafe { self.source.read(source, buffer.as_mut_ptr(), read.len) }?;
            for part in stored.iter().filter_map(|part| part.intersect(read)) {
                let from = (part.start - read.start) * PAGE_SIZE;
                let bytes = &buffer[from..from + part.byte_len()];
                if !self.put(mapping, part, Some(bytes), urgency)? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// The parts of `pages` that the source may have something else in than zeros, in whole units.
    fn stored_in(&self, mapping: Mapping, pages: PageRange) -> Vec<PageRange> {
        let wanted = PageRange::new(mapping.offset + pages.start, pages.len);
        let first = self.occupied.partition_point(|run| run.end() <= wanted.start);
        let mut parts: Vec<PageRange> = Vec::new();
        for run in self.occupied[first..].iter().map_while(|run| run.intersect(wanted)) {
            let start = (run.start - mapping.offset) / mapping.unit * mapping.unit;
            let end = (run.end() - mapping.offset).next_multiple_of(mapping.unit).min(pages.end());
            match parts.last_mut() {
                Some(last) if last.end() >= start => last.len = last.len.max(end - last.start),
                _ => parts.push(PageRange::new(start, end - start)),
            }
        }
        parts
    }

    /// Puts claimed pages in place: `content`, or zeros. Pages discarded during the fill are left
    /// out. Returns whether all are done with: pages ahead of a VMM that is in the middle of a
    /// change are given up.
    fn put(
        &self,
        mapping: usize,
        pages: PageRange,
        content: Option<&[u8]>,
        urgency: Urgency,
    ) -> Result<bool, VmmError> {
        let mut at = pages.start;
        let mut attempts = Attempts::default();
        while at < pages.end() && !self.is_over() {
            let rest = PageRange::new(at, pages.end() - at);
            let from = (at - pages.start) * PAGE_SIZE;
            match self.put_some(mapping, rest, content.map(|bytes| &bytes[from..]))? {
                Ok(placed) => {
                    at += placed;
                    attempts = Attempts::default();
                }
                Err(_) if urgency == Urgency::Ahead && attempts.changing >= MAX_AHEAD_ATTEMPTS => {
                    return Ok(false);
                }
                Err(why) => attempts.wait(why)?,
            }
        }
        Ok(true)
    }

    /// Puts the first of `pages` in place that can be put there by one call; returns how many are
    /// done with, or why the VMM's events must be read first.
    fn put_some(
        &self,
        mapping: usize,
        pages: PageRange,
        content: Option<&[u8]>,
    ) -> Result<Result<usize, PostponeReason>, VmmError> {
        let of = self.mappings[mapping];
        let mut known = self.lock();
        let run = known.run(mapping, pages.start, pages.end());
        if known.state(mapping, run.start) != Page::Filling {
            known.request_again(mapping, run);
            self.bell.notify_all();
            return Ok(Ok(run.len));
        }
        let limit = run.len.min(FILL_BATCH.max(of.unit));
        let zero = |page: usize| content.is_none_or(|bytes| is_zero(page_of(bytes, page)));
        // The kernel has no zero page for huge ones.
        let zeros =
            if of.unit == 1 { (0..limit).take_while(|page| zero(*page)).count() } else { 0 };
        let to = known.address(mapping, run.start) as *mut u8;
        let result = match content {
            _ if zeros > 0 => self.uffd.zero(to, zeros * PAGE_SIZE),
            Some(bytes) if of.unit > 1 => {
                let cleared = |page: &usize| known.is_cleared(mapping, run.start + page);
                let mut unit;
                let bytes = match (0..of.unit).any(|page| cleared(&page)) {
                    true => {
                        unit = bytes[..of.unit * PAGE_SIZE].to_vec();
                        for page in (0..of.unit).filter(cleared) {
                            unit[page * PAGE_SIZE..(page + 1) * PAGE_SIZE].fill(0);
                        }
                        &unit
                    }
                    false => bytes,
                };
                // SAFETY: as below.
                unsafe { self.uffd.copy(to, bytes.as_ptr(), of.unit * PAGE_SIZE) }
            }
            Some(bytes) => {
                let len = (1..limit).take_while(|page| !zero(*page)).count() + 1;
                // SAFETY: the bytes are at least so many pages long. `to` is an address in the VMM,
                // which registered it with this descriptor for us to fill; the kernel refuses any
                // other.
                unsafe { self.uffd.copy(to, bytes.as_ptr(), len * PAGE_SIZE) }
            }
            None => {
                let zeros = vec![0; of.unit * PAGE_SIZE];
                // SAFETY: as above.
                unsafe { self.uffd.copy(to, zeros.as_ptr(), zeros.len()) }
            }
        };
        let placed = match self.outcome(result)? {
            FillOutcome::Pages(placed) => {
                known.served.pages += placed;
                known.served.empty += if zeros > 0 { placed } else { 0 };
                placed
            }
            // Counts as placed, so that the walk continues behind it.
            FillOutcome::Already => of.unit,
            FillOutcome::Later(why) => return Ok(Err(why)),
        };
        known.set(mapping, PageRange::new(run.start, placed.min(run.len)), Page::Present);
        Ok(Ok(placed))
    }

    /// The result of a fill.
    fn outcome(&self, result: Result<usize, SysError>) -> Result<FillOutcome, VmmError> {
        match result {
            Ok(bytes) => Ok(FillOutcome::Pages(bytes / PAGE_SIZE)),
            Err(error) if error.errno == EEXIST => Ok(FillOutcome::Already),
            // The VMM waits in a discard, or unmaps the range: its events come first.
            Err(error) if error.errno == EAGAIN => Ok(FillOutcome::Later(PostponeReason::Changing)),
            Err(error) if error.errno == ENOENT => {
                Ok(FillOutcome::Later(PostponeReason::Unregistered))
            }
            Err(error) if error.errno == ESRCH => {
                self.gone.store(true, Ordering::Release);
                self.end();
                Ok(FillOutcome::Later(PostponeReason::Changing))
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// The outcome of a fill.
enum FillOutcome {
    Pages(usize),
    /// The first page was there.
    Already,
    /// Events must be read first.
    Later(PostponeReason),
}

/// Why a page cannot be put in place yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PostponeReason {
    /// The VMM is changing its mappings, or has ended.
    Changing,
    /// The range is not registered, or is mapped no more.
    Unregistered,
}

/// The reason for which pages are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Urgency {
    /// The guest waits for them.
    Fault,
    /// They are filled ahead of the guest.
    Ahead,
}

/// Attempts at a fill that the kernel has refused.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    unregistered: u32,
    changing: u32,
}

impl Attempts {
    /// Waits a moment before the next attempt. There is no time limit while the VMM changes its
    /// mappings, even if it is stopped: its events arrive, or it ends. A range that was never
    /// registered stays so.
    pub(super) fn wait(&mut self, why: PostponeReason) -> Result<(), VmmError> {
        if why == PostponeReason::Changing {
            self.changing = self.changing.saturating_add(1);
        } else {
            self.unregistered += 1;
            if self.unregistered > MAX_ATTEMPTS {
                return Err(VmmError::Handshake("a mapping is not registered".to_owned()));
            }
        }
        std::thread::sleep(PAUSE);
        Ok(())
    }
}

/// Page `page` of some pages.
fn page_of(bytes: &[u8], page: usize) -> &[u8] {
    &bytes[page * PAGE_SIZE..(page + 1) * PAGE_SIZE]
}

/// Whether every byte is zero; stops at the first block that is not.
fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(64).all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
}
