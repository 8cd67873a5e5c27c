//! Freezes the memory of a VMM at a point in time, which is saved while the guest runs on.
//!
//! [`Service::prepare`] write-protects all pages while the guest runs, and opens each page again that the guest writes
//! to. [`Service::freeze`], for which the guest is paused, protects only the pages that are open by then. A write after
//! that waits until its page is copied.
//!
//! Promises: the image is of the moment of the freeze, whole, or has failed. A pause takes time in proportion to the
//! pages that were written since `prepare`.
//!
//! May break it: a guest that runs during the freeze.

use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use afresh_sys::errno::{EAGAIN, EINVAL, ENOENT, ESRCH};
use afresh_sys::planted::{self, Bug};
use afresh_sys::{Interest, PAGE_SIZE, PageRange, ProcessMemory, SysError};

use super::VmmError;
use super::fill::{Attempts, Postponed};
use super::memory::check;
use super::pages::Pages;
use super::service::Service;
use super::vm::RequestError;
use super::watch::{Loss, Watch};

/// Pages protected without letting go of the lock: a fraction of a millisecond.
const CHUNK: usize = 512;
/// Passes over the pages that were written during a pass.
const MAX_PASSES: usize = 5;
/// Open pages that a freeze protects in a fraction of a millisecond.
const FEW_PAGES: usize = 64;
/// Attempts while the VMM changes its mappings, and time between two.
const MAX_ATTEMPTS: u32 = 20_000;
const PAUSE: Duration = Duration::from_micros(50);

impl Service<'_> {
    /// Protects all pages, while the guest runs. Returns the number of pages written since, which a freeze still has
    /// to protect.
    pub(super) fn prepare(&self) -> Result<usize, RequestError> {
        if self.mappings.iter().any(|mapping| mapping.unit != 1) {
            return Err(RequestError::HugePages);
        }
        let frozen = self.lock().watch.as_ref().map(Watch::is_frozen);
        if frozen == Some(true) {
            return Err(RequestError::Frozen);
        }
        if frozen.is_none() {
            self.begin_watch()?;
        }
        let mut open = usize::MAX;
        for _ in 0..MAX_PASSES {
            for (number, mapping) in self.mappings.iter().enumerate() {
                for start in (0..mapping.pages).step_by(CHUNK) {
                    let chunk = PageRange::new(start, CHUNK.min(mapping.pages - start));
                    self.retry(|pages| self.protect(pages, number, chunk, true))?;
                }
            }
            let before = open;
            open = self.lock().watch.as_ref().map_or(0, Watch::open_pages);
            if open <= FEW_PAGES || open >= before {
                break;
            }
        }
        Ok(open)
    }

    fn begin_watch(&self) -> Result<(), RequestError> {
        let process = ProcessMemory::open(&self.process).map_err(RequestError::Process)?;
        if check(self, &process)? {
            return Err(RequestError::SharedMemory);
        }
        let mut pages = self.lock();
        for (number, mapping) in self.mappings.iter().enumerate() {
            let base = pages.address(number, 0) as *const u8;
            let interest = Interest { missing: true, write_protect: true, minor: false };
            self.uffd
                .register(base, mapping.pages * PAGE_SIZE, interest)
                .map_err(RequestError::Protect)?;
        }
        self.protects.store(true, Ordering::Release);
        let sizes = self.mappings.iter().map(|mapping| mapping.pages);
        pages.begin_watch(Watch::new(process, sizes, self.budget.as_ref()));
        Ok(())
    }

    /// Calls `work` under the lock, and again while the VMM changes its mappings.
    fn retry<T>(
        &self,
        mut work: impl FnMut(&mut Pages) -> Result<T, SysError>,
    ) -> Result<T, RequestError> {
        let mut attempts = 0;
        loop {
            if self.is_over() {
                return Err(RequestError::Ended(None));
            }
            match work(&mut self.lock()) {
                Err(error) if error.errno == EAGAIN && attempts < MAX_ATTEMPTS => attempts += 1,
                other => return other.map_err(RequestError::Protect),
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Protects the open pages among `chunk`. With `looks`, pages that were discarded silently are found too.
    fn protect(
        &self,
        pages: &mut Pages,
        mapping: usize,
        chunk: PageRange,
        looks: bool,
    ) -> Result<(), SysError> {
        let base = pages.address(mapping, 0);
        let Some(watch) = &mut pages.watch else { return Ok(()) };
        for run in watch.open_runs(mapping, chunk) {
            let start = base + run.start * PAGE_SIZE;
            self.uffd.write_protect(start as *const u8, run.byte_len(), true)?;
            let mut present = vec![false; if looks { run.len } else { 0 }];
            if looks {
                let note = |found: std::ops::Range<usize>| {
                    let first = (found.start - start) / PAGE_SIZE;
                    present[first..first + found.len() / PAGE_SIZE].fill(true);
                };
                let found = watch.process.present(start..start + run.byte_len(), note);
                found.map_err(|error| {
                    let errno = error.raw_os_error().unwrap_or(EINVAL);
                    SysError::new(afresh_sys::Call::PagemapScan, errno)
                })?;
            }
            watch.close(mapping, run, looks.then_some(&present));
        }
        Ok(())
    }

    /// Freezes the memory of a guest that is paused. Returns how long that took.
    pub(super) fn freeze(&self) -> Result<Duration, RequestError> {
        let started = Instant::now();
        let frozen = self.lock().watch.as_ref().map(Watch::is_frozen);
        match frozen {
            None => drop(self.prepare()?),
            Some(true) => return Err(RequestError::Frozen),
            Some(false) => {}
        }
        self.retry(|pages| {
            for (number, mapping) in self.mappings.iter().enumerate() {
                self.protect(pages, number, PageRange::new(0, mapping.pages), false)?;
            }
            if let Some(watch) = &mut pages.watch {
                watch.freeze();
            }
            Ok(())
        })?;
        Ok(started.elapsed())
    }

    /// Gives the frozen image up, if there is one, and lifts the protection.
    pub(super) fn thaw(&self) {
        if self.lock().watch.take().is_none() {
            return;
        }
        for (number, mapping) in self.mappings.iter().enumerate() {
            for start in (0..mapping.pages).step_by(CHUNK) {
                let pages = self.lock();
                // Prepared again by another client.
                if pages.watch.is_some() {
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
            if let Some(watch) = &mut pages.watch {
                watch.keep((mapping, page), address);
            }
            match self.uffd.write_protect(address as *const u8, PAGE_SIZE, false) {
                Err(error) if error.errno == EAGAIN => {}
                // Not mapped any more, or the VMM has ended: both have events.
                Err(error) if [ENOENT, ESRCH].contains(&error.errno) => break,
                other => return Ok(other?),
            }
            drop(pages);
            attempts.wait(Postponed::Changing)?;
        }
        Ok(())
    }

    /// Reads pages of the frozen image `id` that the process has, from `address` on.
    pub(super) fn read_frozen(
        &self,
        (id, process): (u64, &ProcessMemory),
        address: usize,
        out: &mut [u8],
    ) -> io::Result<()> {
        let mut protected = vec![false; out.len() / PAGE_SIZE];
        let whole = process.read(address, out).is_ok();
        // A page that is protected after it was read has not changed since the freeze.
        process.write_protected(address, &mut protected)?;
        let pages = self.lock();
        let watch = pages.watch.as_ref().filter(|watch| watch.id == id);
        let watch = watch.ok_or_else(|| io::Error::other(Loss::Thawed))?;
        if let Some(loss) = watch.loss() {
            return Err(io::Error::other(loss));
        }
        for (number, bytes) in out.chunks_exact_mut(PAGE_SIZE).enumerate() {
            let at = address + number * PAGE_SIZE;
            if let Some(copy) = watch.copy_of(at) {
                bytes.copy_from_slice(copy);
                continue;
            }
            if !whole {
                // A page of the run was discarded. Under the lock none is opened.
                process.read(at, bytes).map_err(|_| io::Error::other(Loss::Discarded))?;
                process.write_protected(at, &mut protected[number..=number])?;
            }
            if !protected[number] && !planted::is(Bug::Torn) {
                return Err(io::Error::other(Loss::Discarded));
            }
        }
        Ok(())
    }
}
