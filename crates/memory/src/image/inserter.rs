//! How content gets into the file of a lazily filled image.
//!
//! Slots map that file while it is filled, and every page in its page cache can be read there by
//! any thread, by the kernel, and by forked children. So a page enters the page cache whole: it is
//! staged elsewhere, checked, and then inserted by userfaultfd's COPY, which copies into a private
//! kernel page before it is visible. Nothing ever stores into the file's memory.
//!
//! Promises: a page that can be seen is whole, and never changes afterwards. While the inserter
//! stands, the kernel puts no page there by itself: the mapping is registered for missing pages,
//! which also keeps huge pages from being made over holes.
//!
//! May break it: nothing outside; the file's descriptor is nowhere else. A page that comes there
//! some other way is noticed when its own content comes (`EEXIST`), and fails the image.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use afresh_sys::errno::{EAGAIN, EEXIST, EINVAL, ESRCH};
use afresh_sys::planted::{self, Bug};
use afresh_sys::{
    Advice, Call, HUGE_PAGES, HUGE_SIZE, Interest, PAGE_SIZE, PageRange, Protection, Reservation,
    SysError, Uffd, fork::Epoch,
};

use super::Backing;
use super::arrived_pages::ArrivedPages;
use crate::ImageError;
use crate::tracker::descriptor::SIGBUS;

/// Attempts of a copy that the kernel deferred.
const MAX_ATTEMPTS: usize = 100_000;

/// Makes a [`super::Filler`], and puts its content in place.
#[derive(Debug)]
pub struct Inserter {
    /// A shared mapping of the whole file.
    memory: Reservation,
    /// The userfaultfd that `memory` is registered with. Without it the file is not visible
    /// elsewhere before it is complete, and content is stored into `memory`.
    uffd: Option<&'static Uffd>,
    arrived: Arc<ArrivedPages>,
    /// Pages that are stored or being stored, a bit each; empty where the kernel reports that.
    claimed: Box<[AtomicU64]>,
    made: Epoch,
}

impl Inserter {
    /// A file of `end` pages without content, its inserter, and the record of its pages.
    pub(super) fn open(
        end: usize,
        filled: Vec<PageRange>,
    ) -> Result<(Backing, Inserter, Arc<ArrivedPages>), ImageError> {
        planted::prepare();
        // Huge pages of the file are huge pages of the address space, as `collapse` needs it.
        let align = if end < HUGE_PAGES { PAGE_SIZE } else { HUGE_SIZE };
        let memory = Reservation::aligned(end, align)?;
        let backing = Backing::unfilled(end)?;
        let all = PageRange::new(0, end);
        let (file, start) = backing.file();
        memory.map_shared(all, Protection::ReadWrite, file, start)?;
        // A forked child inherits both mappings without their userfaultfd, and can dump core.
        memory.advise(all, Advice::DontDump)?;
        backing.leave_out_of_dumps()?;
        let uffd = SIGBUS.get().ok().filter(|uffd| {
            // Before the first page, so that the kernel inserts none itself. Reading a page too
            // early through the view is a fault then, and not a page of zeros.
            let starts = [memory.page_ptr(0), backing.page_ptr(0).cast_mut()];
            let register = |start| uffd.register(start, all.byte_len(), Interest::MISSING);
            let both = starts.into_iter().all(|start| register(start).is_ok());
            if !both {
                // Pages are stored through the mapping then, which must not report them. Fails
                // where it does not.
                let _ = uffd.unregister(starts[0], all.byte_len());
            }
            both
        });
        let words = if uffd.is_some() { 0 } else { end.div_ceil(64) };
        let claimed = (0..words).map(|_| AtomicU64::new(0)).collect();
        let arrived = Arc::new(ArrivedPages::new(end, filled));
        Ok((
            backing,
            Inserter { memory, uffd, arrived: arrived.clone(), claimed, made: Epoch::now() },
            arrived,
        ))
    }

    /// Whether pages can be filled while slots use the image. Otherwise slots wait for all of them.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.uffd.is_some()
    }

    /// Pages that can be filled: from the image's first to its last stored one.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.memory.pages()
    }

    /// The pages that the filler answers for, in order. No other page will be requested.
    #[must_use]
    pub fn filled(&self) -> &[PageRange] {
        self.arrived.filled()
    }

    /// Whether `page` is in place.
    #[must_use]
    pub fn has(&self, page: usize) -> bool {
        self.arrived.has(page)
    }

    /// Puts the whole pages `content` in place from page `first` on. Each page is put once. It may
    /// be called in a signal handler.
    ///
    /// The content is visible afterwards, so check it first.
    ///
    /// # Errors
    /// `EEXIST` for a page that is already present, `EINVAL` for pages outside the image or parts
    /// of pages, `ESRCH` in a child of the process that made the image; otherwise the kernel's
    /// error. Pages filled before the error stay.
    pub fn put(&self, first: usize, content: &[u8]) -> Result<(), SysError> {
        let pages = PageRange::new(first, content.len() / PAGE_SIZE);
        let fits = first.checked_add(pages.len).is_some_and(|end| end <= self.pages());
        if !fits || !content.len().is_multiple_of(PAGE_SIZE) {
            return Err(SysError::new(Call::UffdFill, EINVAL));
        }
        let lost = planted::is_in_handler(Bug::Lazy) && pages.len == 1;
        let content: &[u8] = if lost { &[0; PAGE_SIZE] } else { content };
        match self.uffd {
            Some(uffd) => self.insert(uffd, pages, content),
            None => self.store(pages, content),
        }
    }

    /// The huge pages of the image that the filler answers for as a whole, in order.
    #[must_use]
    pub fn whole_huge_pages(&self) -> Vec<usize> {
        let whole = |run: &PageRange| run.start.div_ceil(HUGE_PAGES)..run.end() / HUGE_PAGES;
        self.filled().iter().flat_map(whole).collect()
    }

    /// Moves the content of huge page `number` to a folio of 2 MiB. All of its pages must be in
    /// place. Accesses to them wait during the move.
    ///
    /// # Errors
    /// `EAGAIN` where a page has not arrived or is in use. `EINVAL` where the kernel makes no such
    /// folios, and where the huge page has no page any more, as that of a dropped image. `EBUSY`
    /// where only some of its pages are there, and userfaultfd reports missing ones. `ENOMEM` where
    /// no 2 MiB of memory are free together. `ESRCH` in a child of the process that made the image.
    /// The content is where it was.
    pub fn collapse(&self, number: usize) -> Result<(), SysError> {
        let pages = PageRange::new(number * HUGE_PAGES, HUGE_PAGES);
        if !self.made.is_current() {
            return Err(SysError::new(Call::Advise, ESRCH));
        }
        if !self.arrived.has_all(pages) {
            return Err(SysError::new(Call::Advise, EAGAIN));
        }
        self.memory.advise(pages, Advice::Collapse)
    }

    /// Frees the memory of all pages, once no image has them. A forked child may still have one:
    /// then the memory goes with the file.
    pub(super) fn free(&self) {
        if self.made.is_current() {
            // Nothing reads these pages again, so an error costs memory, never content.
            let _ = self.memory.advise(PageRange::new(0, self.pages()), Advice::Remove);
        }
    }

    /// Has the kernel insert whole pages.
    fn insert(&self, uffd: &Uffd, pages: PageRange, content: &[u8]) -> Result<(), SysError> {
        let (mut done, mut tries) = (0, 0);
        while done < content.len() {
            // SAFETY: inside the inserter, which has the size of the image; inside `content`.
            let (to, from) = unsafe {
                (self.memory.page_ptr(pages.start).add(done), content.as_ptr().add(done))
            };
            // SAFETY: `from` is readable for the rest of `content`. The target is a missing part of
            // our own mapping: the kernel refuses pages that are there.
            match unsafe { uffd.copy(to, from, content.len() - done) } {
                Ok(placed) if placed > 0 => {
                    let new = PageRange::new(pages.start + done / PAGE_SIZE, placed / PAGE_SIZE);
                    self.arrived.note(new);
                    done += placed;
                }
                Err(error) if error.errno != EAGAIN => return Err(error),
                // The address space is being changed by another thread.
                _ if tries < MAX_ATTEMPTS => {
                    tries += 1;
                    std::thread::yield_now();
                }
                _ => return Err(SysError::new(Call::UffdFill, EAGAIN)),
            }
        }
        Ok(())
    }

    /// Stores pages that become visible only when all of them are present.
    fn store(&self, pages: PageRange, content: &[u8]) -> Result<(), SysError> {
        for (page, bytes) in (pages.start..).zip(content.chunks_exact(PAGE_SIZE)) {
            let bit = 1 << (page % 64);
            if self.claimed[page / 64].fetch_or(bit, Ordering::AcqRel) & bit != 0 {
                return Err(SysError::new(Call::UffdFill, EEXIST));
            }
            let from = bytes.as_ptr();
            // SAFETY: inside the inserter, and claimed, so there is no other writer of the page.
            // There is no reader either: slots map the file when it is complete, and the image's
            // own view is read only where a page was noted, which this one was not yet.
            unsafe { self.memory.page_ptr(page).copy_from_nonoverlapping(from, PAGE_SIZE) };
            self.arrived.note(PageRange::new(page, 1));
        }
        Ok(())
    }
}
