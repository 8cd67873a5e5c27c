//! Address space that is heap memory. Private mappings copy their source at once and remember it,
//! so that discarding restores it; protection is not enforced.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use crate::{Call, Memfd, PAGE_SIZE, PageRange, SysError, inject};

/// Page protection, recorded nowhere here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Any access faults.
    None,
    /// Reads only.
    Read,
    /// Reads and writes.
    ReadWrite,
}

/// Advice to the kernel about a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Advice {
    /// Throw private pages away.
    Discard,
    /// Free the pages of a shared file.
    Remove,
    /// Fault every page in for reading.
    PopulateRead,
    /// Fault every page in for writing.
    PopulateWrite,
    /// Prefer huge pages.
    HugePage,
    /// Never use huge pages.
    NoHugePage,
    /// Make huge pages now.
    Collapse,
    /// Do not inherit across `fork`.
    DontFork,
    /// Inherit it again.
    DoFork,
    /// Leave it out of core dumps.
    DontDump,
}

/// An owned range of pretend address space.
#[derive(Debug)]
pub struct Reservation {
    base: NonNull<u8>,
    pages: usize,
    layout: Layout,
    owned: bool,
    /// Source of each page: a file and its page, or zero.
    sources: Mutex<Vec<Option<(Memfd, usize)>>>,
}

// SAFETY: the memory is owned by this value and reached through raw pointers only, whose users
// answer for races.
unsafe impl Send for Reservation {}
// SAFETY: as above.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Reserves `pages` pages.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new(pages: usize) -> Result<Self, SysError> {
        Self::aligned(pages, PAGE_SIZE)
    }

    /// Reserves aligned pages.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn aligned(pages: usize, align: usize) -> Result<Self, SysError> {
        inject::gate(Call::Map)?;
        let pages = pages.max(1);
        let nomem = SysError::new(Call::Map, libc::ENOMEM);
        let layout = Layout::from_size_align(pages * PAGE_SIZE, align).map_err(|_| nomem)?;
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(nomem)?;
        Ok(Self { base, pages, layout, owned: true, sources: Mutex::new(vec![None; pages]) })
    }

    /// Wraps memory that another value owns.
    ///
    /// # Safety
    /// The range must stay allocated until the value is dropped.
    #[must_use]
    pub unsafe fn of_others(base: NonNull<u8>, pages: usize) -> Self {
        let layout = Layout::new::<u8>();
        Self { base, pages, layout, owned: false, sources: Mutex::new(vec![None; pages]) }
    }

    /// The first address.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Address of a page.
    ///
    /// # Panics
    /// If `page` is outside.
    #[must_use]
    pub fn page_ptr(&self, page: usize) -> *mut u8 {
        assert!(page <= self.pages);
        // SAFETY: inside the allocation.
        unsafe { self.base.as_ptr().add(page * PAGE_SIZE) }
    }

    fn fill(
        &self,
        range: PageRange,
        call: Call,
        source: impl Fn(usize) -> Option<(Memfd, usize)>,
    ) -> Result<(), SysError> {
        inject::gate(call)?;
        if range.end() > self.pages {
            return Err(SysError::new(call, libc::EINVAL));
        }
        let mut sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        for page in range.start..range.end() {
            let from = source(page);
            let bytes = match &from {
                Some((file, at)) => file.read(at * PAGE_SIZE, PAGE_SIZE),
                None => vec![0; PAGE_SIZE],
            };
            sources[page] = from;
            // SAFETY: the page is inside the allocation, which is not used elsewhere during a
            // remap.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.page_ptr(page), PAGE_SIZE);
            }
        }
        Ok(())
    }

    /// Fresh zero memory.
    ///
    /// # Errors
    /// `EINVAL` outside the reservation.
    pub fn map_anonymous(&self, range: PageRange, _: Protection) -> Result<(), SysError> {
        self.fill(range, Call::Map, |_| None)
    }

    /// A private view of a file.
    ///
    /// # Errors
    /// `EINVAL` outside the reservation.
    pub fn map_private(
        &self,
        range: PageRange,
        _: Protection,
        file: &Memfd,
        file_page: usize,
    ) -> Result<(), SysError> {
        self.fill(range, Call::Map, |p| Some((file.clone(), file_page + p - range.start)))
    }

    /// A shared view of a file; here only of sealed ones, which never change.
    ///
    /// # Errors
    /// `EINVAL` outside the reservation.
    pub fn map_shared(
        &self,
        range: PageRange,
        protection: Protection,
        file: &Memfd,
        file_page: usize,
    ) -> Result<(), SysError> {
        self.map_private(range, protection, file, file_page)
    }

    /// Not enforced.
    ///
    /// # Errors
    /// Injected ones.
    pub fn protect(&self, _: PageRange, _: Protection) -> Result<(), SysError> {
        inject::gate(Call::Protect)
    }

    /// Discarding restores each page's source; other advice does nothing.
    ///
    /// # Errors
    /// `EINVAL` outside the reservation.
    pub fn advise(&self, range: PageRange, advice: Advice) -> Result<(), SysError> {
        if advice != Advice::Discard {
            return inject::gate(Call::Advise);
        }
        let sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.fill(range, Call::Advise, |p| sources[p].clone())
    }

    /// Every page is resident.
    #[must_use]
    pub fn resident_pages(&self, range: PageRange) -> usize {
        range.len
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        // SAFETY: allocated with this layout, and owned.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}
