//! Freezes the memory of a VMM at a point in time, which is saved while the guest runs on.
//!
//! [`Service::prepare`] write-protects all pages while the guest runs, and opens each page again
//! that the guest writes to. [`Service::freeze`], for which the guest is paused, protects only the
//! pages that are open by then. A write after that waits until its page is copied.
//!
//! Promises: the image is of the moment of the freeze, whole, or has failed. A pause takes time in
//! proportion to the pages that were written since `prepare`. A request acts on the watch that it
//! names, whatever other clients do: a freeze or a snapshot whose watch is over fails.
//!
//! May break it: a guest that runs during the freeze.

use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use afresh_sys::errno::{EAGAIN, ENOENT, ESRCH};
use afresh_sys::planted::{self, Bug};
use afresh_sys::{Interest, PAGE_SIZE, PageRange, ProcessMemory};

use super::VmmError;
use super::fill::{Attempts, PostponeReason};
use super::memory;
use super::pages::Pages;
use super::request_error::RequestError;
use super::service::Service;
use super::watch::Watch;
use super::watch_end::{LossReason, WatchEnd, WatchId};

/// Pages protected without letting go of the lock: a fraction of a millisecond.
const CHUNK: usize = 512;
/// Passes over the pages that were written during a pass.
const MAX_PASSES: usize = 5;
/// Open pages that a freeze protects in a fraction of a millisecond.
const FEW_PAGES: usize = 64;
/// Attempts while the VMM changes its mappings, and time between two.
const MAX_ATTEMPTS: u32 = 20_000;
const PAUSE: Duration = Duration::from_micros(50);

/// A memory that is write-protected while its guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PreparedMemory {
    /// The watch, which a freeze names.
    pub watch: WatchId,
    /// Pages that the guest has written to since, which a freeze still has to protect.
    pub open: usize,
}

/// A memory that is frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FrozenMemory {
    /// The watch, which a snapshot names.
    pub watch: WatchId,
    /// Duration of the freeze.
    pub took: Duration,
}

impl Service<'_> {
    /// Protects all pages, while the guest runs. Joins a watch that is not frozen.
    pub(super) fn prepare(&self) -> Result<PreparedMemory, RequestError> {
        let (watch, begun) = self.begin_watch()?;
        let open = self.or_end(watch, begun, self.protect_written(watch))?;
        Ok(PreparedMemory { watch, open })
    }

    /// Freezes the memory of a guest that is paused: the watch of this number, or one that is
    /// joined or begun.
    pub(super) fn freeze(&self, watch: Option<WatchId>) -> Result<FrozenMemory, RequestError> {
        let started = Instant::now();
        let (watch, begun) = match watch {
            Some(watch) => (watch, false),
            None => self.begin_watch()?,
        };
        let freeze = || {
            // Begun here, or by another client whose request still works on it.
            if !self.lock().watches.unfrozen(watch)?.is_prepared() {
                self.protect_written(watch)?;
            }
            self.retry(|pages| {
                for (number, mapping) in self.mappings.iter().enumerate() {
                    let all = PageRange::new(0, mapping.pages);
                    self.protect(pages, watch, (number, all), false)?;
                }
                pages.watches.unfrozen(watch)?.freeze();
                Ok(())
            })
        };
        self.or_end(watch, begun, freeze())?;
        Ok(FrozenMemory { watch, took: started.elapsed() })
    }

    /// `result`. A watch that the failed request has `begun` is over, unless another client has
    /// frozen it.
    fn or_end<T>(
        &self,
        watch: WatchId,
        begun: bool,
        result: Result<T, RequestError>,
    ) -> Result<T, RequestError> {
        if begun && result.is_err() {
            let mut pages = self.lock();
            let ended = pages.watches.unfrozen(watch).is_ok()
                && pages.watches.end(watch, WatchEnd::Unprotected);
            drop(pages);
            if ended {
                self.lift_protection();
            }
        }
        result
    }

    /// Protects all pages, and those again that the guest writes to. Returns the number of pages
    /// written since.
    fn protect_written(&self, watch: WatchId) -> Result<usize, RequestError> {
        let mut open = usize::MAX;
        for _ in 0..MAX_PASSES {
            for (number, mapping) in self.mappings.iter().enumerate() {
                for start in (0..mapping.pages).step_by(CHUNK) {
                    let chunk = PageRange::new(start, CHUNK.min(mapping.pages - start));
                    self.retry(|pages| {
                        if !pages.watches.unfrozen(watch)?.is_prepared() {
                            adopt(pages, watch, (number, chunk))?;
                        }
                        self.protect(pages, watch, (number, chunk), true)
                    })?;
                }
            }
            let before = open;
            let mut pages = self.lock();
            let protected = pages.watches.unfrozen(watch)?;
            protected.note_prepared();
            open = protected.open_pages();
            drop(pages);
            if open <= FEW_PAGES || open >= before {
                break;
            }
        }
        Ok(open)
    }

    /// Begins a watch, or joins the present one. Returns whether it was begun.
    fn begin_watch(&self) -> Result<(WatchId, bool), RequestError> {
        if self.mappings.iter().any(|mapping| mapping.unit != 1) {
            return Err(RequestError::HugePages);
        }
        if let Some(watch) = self.join_watch(&self.lock())? {
            return Ok((watch, false));
        }
        let (process, shared) = memory::open(self)?;
        if shared {
            return Err(RequestError::SharedMemory);
        }
        let mut pages = self.lock();
        // Since the first look another client may have begun one, frozen it, or detached the VMM.
        if let Some(watch) = self.join_watch(&pages)? {
            return Ok((watch, false));
        }
        let sizes = self.mappings.iter().map(|mapping| mapping.pages);
        let watch = Watch::new(process, sizes, self.budget.as_ref())?;
        for (number, mapping) in self.mappings.iter().enumerate() {
            let base = pages.address(number, 0) as *const u8;
            let interest = Interest { missing: true, write_protect: true, minor: false };
            self.uffd
                .register(base, mapping.pages * PAGE_SIZE, interest)
                .map_err(RequestError::Protect)?;
        }
        self.protects.store(true, Ordering::Release);
        let id = watch.id;
        pages.begin_watch(watch);
        Ok((id, true))
    }

    /// The present watch, which another one must not replace.
    fn join_watch(&self, pages: &Pages) -> Result<Option<WatchId>, RequestError> {
        // Set under this lock. The memory is about to be unregistered.
        if self.detaching.load(Ordering::Acquire) {
            return Err(RequestError::Detached);
        }
        match pages.watches.live() {
            Some(watch) if watch.is_frozen() => Err(RequestError::Frozen(watch.id)),
            watch => Ok(watch.map(|watch| watch.id)),
        }
    }

    /// Calls `work` under the lock, and again while the VMM changes its mappings.
    fn retry<T>(
        &self,
        mut work: impl FnMut(&mut Pages) -> Result<T, RequestError>,
    ) -> Result<T, RequestError> {
        let mut attempts = 0;
        loop {
            if self.is_over() {
                // The threads end with a detached VMM as well, before it counts as such.
                let detaching = self.detaching.load(Ordering::Acquire);
                return Err(if detaching {
                    RequestError::Detached
                } else {
                    RequestError::Ended(None)
                });
            }
            match work(&mut self.lock()) {
                Err(RequestError::Protect(error))
                    if error.errno == EAGAIN && attempts < MAX_ATTEMPTS =>
                {
                    attempts += 1;
                }
                other => return other,
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Protects the open pages of a watch among `chunk`. With `looks`, pages that were discarded
    /// silently are found as well.
    ///
    /// Another client can end or freeze the watch between two calls, so each looks it up.
    /// Protecting pages again after the freeze would hide the writes to them.
    fn protect(
        &self,
        pages: &mut Pages,
        watch: WatchId,
        (mapping, chunk): (usize, PageRange),
        looks: bool,
    ) -> Result<(), RequestError> {
        let base = pages.address(mapping, 0);
        let watch = pages.watches.unfrozen(watch)?;
        for run in watch.open_runs(mapping, chunk) {
            let start = base + run.start * PAGE_SIZE;
            self.uffd
                .write_protect(start as *const u8, run.byte_len(), true)
                .map_err(RequestError::Protect)?;
            let mut present = vec![false; if looks { run.len } else { 0 }];
            if looks {
                let note = |found: std::ops::Range<usize>| {
                    let first = (found.start - start) / PAGE_SIZE;
                    present[first..first + found.len() / PAGE_SIZE].fill(true);
                };
                let found = watch.process.present(start..start + run.byte_len(), note);
                found.map_err(RequestError::Process)?;
            }
            watch.close(mapping, run, looks.then_some(&present));
        }
        Ok(())
    }

    /// Ends the watch of this number, if it lives, and lifts its protection. Returns whether it
    /// did.
    pub(super) fn end_watch(&self, watch: WatchId, why: WatchEnd) -> bool {
        let ended = self.lock().watches.end(watch, why);
        if ended {
            self.lift_protection();
        }
        ended
    }

    /// Lifts the protection of a watch that is over.
    fn lift_protection(&self) {
        for (number, mapping) in self.mappings.iter().enumerate() {
            for start in (0..mapping.pages).step_by(CHUNK) {
                let pages = self.lock();
                // Another client has begun one, which takes every page in place for open.
                if pages.watches.live().is_some() {
                    return;
                }
                let len = CHUNK.min(mapping.pages - start) * PAGE_SIZE;
                // A page that stays protected is opened by its next write.
                let at = pages.address(number, start) as *const u8;
                let _ = self.uffd.write_protect(at, len, false);
            }
        }
    }

    /// Opens a page for writing, if it is protected. Waiters are woken.
    pub(super) fn open_page(&self, mapping: usize, page: usize) -> Result<(), VmmError> {
        if !self.protects.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut attempts = Attempts::default();
        while !self.is_over() {
            let mut pages = self.lock();
            let address = pages.address(mapping, page);
            if let Some(watch) = pages.watches.live_mut() {
                watch.keep((mapping, page), address);
            }
            match self.uffd.write_protect(address as *const u8, PAGE_SIZE, false) {
                Err(error) if error.errno == EAGAIN => {}
                // Not mapped any more, or the VMM has ended: both have events.
                Err(error) if [ENOENT, ESRCH].contains(&error.errno) => break,
                other => return Ok(other?),
            }
            drop(pages);
            attempts.wait(PostponeReason::Changing)?;
        }
        Ok(())
    }

    /// Reads pages of the frozen image `id` that the process has, from `address` on.
    pub(super) fn read_frozen(
        &self,
        (id, process): (WatchId, &ProcessMemory),
        address: usize,
        out: &mut [u8],
    ) -> io::Result<()> {
        let mut protected = vec![false; out.len() / PAGE_SIZE];
        let whole = process.read(address, out).is_ok();
        // A page that is protected after it was read has not changed since the freeze.
        process.write_protected(address, &mut protected)?;
        let mut pages = self.lock();
        // Then the protection is lifted, which loses no page.
        if self.is_over() {
            return Err(io::Error::other(RequestError::Ended(None)));
        }
        let watch = pages.watches.frozen(id).map_err(io::Error::other)?;
        for (number, bytes) in out.chunks_exact_mut(PAGE_SIZE).enumerate() {
            let at = address + number * PAGE_SIZE;
            if let Some(copy) = watch.copy_of(at) {
                bytes.copy_from_slice(copy);
                continue;
            }
            if !whole {
                // A page of the run was discarded. Under the lock none is opened.
                if process.read(at, bytes).is_err() {
                    return Err(io::Error::other(watch.lose(LossReason::Discarded)));
                }
                process.write_protected(at, &mut protected[number..=number])?;
            }
            if !protected[number] && !planted::is(Bug::Torn) {
                return Err(io::Error::other(watch.lose(LossReason::Discarded)));
            }
        }
        Ok(())
    }
}

/// Notes the pages of a watch that the VMM had before its handshake.
///
/// No other page is in place while its state is missing or filling: [`Service::lock`] is held from
/// the call that puts a page in place until its state is
/// [`Page::Present`](super::pages::Page::Present), also where the kernel has filled only a part of
/// a range. So a guest cannot write to a page before its state shows the page.
fn adopt(
    pages: &mut Pages,
    watch: WatchId,
    (mapping, chunk): (usize, PageRange),
) -> Result<(), RequestError> {
    let start = pages.address(mapping, chunk.start);
    let mut found = Vec::new();
    let note = |run: std::ops::Range<usize>| {
        let first = chunk.start + (run.start - start) / PAGE_SIZE;
        found.push(PageRange::new(first, run.len() / PAGE_SIZE));
    };
    let process = &pages.watches.unfrozen(watch)?.process;
    process.present(start..start + chunk.byte_len(), note).map_err(RequestError::Process)?;
    for run in found {
        pages.adopt(mapping, run);
    }
    Ok(())
}
