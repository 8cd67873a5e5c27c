//! Address space without mappings of files. A private mapping copies its source at once and
//! remembers it, so that discarding restores it; protection is not enforced.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::address_range::{AddressRange, commit, zero};
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

/// An owned range of address space.
#[derive(Debug)]
pub struct Reservation {
    base: NonNull<u8>,
    pages: usize,
    /// The file, and the page in it, that a page shows when it is discarded; zeros elsewhere.
    sources: Mutex<BTreeMap<usize, (Memfd, usize)>>,
    /// `None` where another value owns the memory.
    _owned: Option<AddressRange>,
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
        let bytes = pages.checked_mul(PAGE_SIZE).ok_or(SysError::new(Call::Map, libc::ENOMEM))?;
        let owned = AddressRange::new(bytes, align)?;
        Ok(Self { base: owned.base(), pages, sources: Mutex::default(), _owned: Some(owned) })
    }

    /// Wraps memory that another value owns.
    ///
    /// # Safety
    /// The range must stay allocated until the value is dropped.
    #[must_use]
    pub unsafe fn of_others(base: NonNull<u8>, pages: usize) -> Self {
        Self { base, pages, sources: Mutex::default(), _owned: None }
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

    /// Passes the gate of `call`, and returns the first address of `range`.
    fn enter(&self, range: PageRange, call: Call) -> Result<*mut u8, SysError> {
        inject::gate(call)?;
        if range.end() > self.pages {
            return Err(SysError::new(call, libc::EINVAL));
        }
        Ok(self.page_ptr(range.start))
    }

    /// The pages that show a file.
    fn sources(&self) -> MutexGuard<'_, BTreeMap<usize, (Memfd, usize)>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fresh zero memory.
    ///
    /// # Errors
    /// `EINVAL` outside the reservation.
    pub fn map_anonymous(&self, range: PageRange, _: Protection) -> Result<(), SysError> {
        let at = self.enter(range, Call::Map)?;
        let mut sources = self.sources();
        forget(&mut sources, range);
        // SAFETY: inside the reservation; nothing uses pages while they are mapped anew.
        unsafe { zero(at, range.byte_len()) }.map_err(|error| failed(Call::Map, &error))
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
        let at = self.enter(range, Call::Map)?;
        let mut sources = self.sources();
        forget(&mut sources, range);
        sources
            .extend((range.start..range.end()).zip((file_page..).map(|page| (file.clone(), page))));
        // SAFETY: inside the reservation; nothing uses pages while they are mapped anew.
        unsafe {
            commit(at, range.byte_len()).map_err(|error| failed(Call::Map, &error))?;
            file.copy_to(file_page * PAGE_SIZE, at, range.byte_len());
        }
        Ok(())
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

    /// Makes pages usable. Not enforced otherwise.
    ///
    /// # Errors
    /// `EINVAL` outside the reservation, and `ENOMEM`.
    pub fn protect(&self, range: PageRange, protection: Protection) -> Result<(), SysError> {
        let at = self.enter(range, Call::Protect)?;
        if protection == Protection::None {
            return Ok(());
        }
        // SAFETY: inside the reservation.
        unsafe { commit(at, range.byte_len()) }.map_err(|error| failed(Call::Protect, &error))
    }

    /// Discarding restores each page's source; other advice does nothing.
    ///
    /// # Errors
    /// `EINVAL` outside the reservation, and `ENOMEM`.
    pub fn advise(&self, range: PageRange, advice: Advice) -> Result<(), SysError> {
        let at = self.enter(range, Call::Advise)?;
        if advice != Advice::Discard {
            return Ok(());
        }
        let sources = self.sources();
        // SAFETY: inside the reservation; nothing uses pages while they are discarded.
        unsafe { zero(at, range.byte_len()) }.map_err(|error| failed(Call::Advise, &error))?;
        for (page, (file, from)) in sources.range(range.start..range.end()) {
            // SAFETY: as above, and made usable by `zero`.
            unsafe { file.copy_to(from * PAGE_SIZE, self.page_ptr(*page), PAGE_SIZE) };
        }
        Ok(())
    }

    /// Every page is resident.
    #[must_use]
    pub fn resident_pages(&self, range: PageRange) -> usize {
        range.len
    }
}

/// Pages of `range` show no file from now on.
fn forget(sources: &mut BTreeMap<usize, (Memfd, usize)>, range: PageRange) {
    if !sources.is_empty() {
        let mut rest = sources.split_off(&range.start);
        sources.append(&mut rest.split_off(&range.end()));
    }
}

/// An error of the system.
fn failed(call: Call, error: &std::io::Error) -> SysError {
    // Windows has other numbers.
    let errno = if cfg!(windows) { None } else { error.raw_os_error() };
    SysError::new(call, errno.unwrap_or(libc::ENOMEM))
}
