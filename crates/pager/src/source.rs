//! Where pages come from.

#[cfg(all(target_os = "linux", not(afresh_portable)))]
use std::os::fd::{AsFd, BorrowedFd};

#[cfg(all(target_os = "linux", not(afresh_portable)))]
use afresh_store::Origin;
use afresh_store::{Pages, Snapshot};
#[cfg(all(target_os = "linux", not(afresh_portable)))]
use afresh_sys::Memfd;
use afresh_sys::{PAGE_SIZE, PageRange};

use crate::SourceError;

/// A run of pages that can be mapped at once.
#[cfg(all(target_os = "linux", not(afresh_portable)))]
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The pages.
    pub pages: PageRange,
    /// The file to map them from, and the page of it that is the first; `None` where the pages are
    /// zero.
    pub file: Option<(BorrowedFd<'a>, usize)>,
}

/// Takes pages that a source brings by itself: which they are, and their bytes.
pub type PageSink<'a> = dyn FnMut(PageRange, &[u8]) -> Result<(), SourceError> + 'a;

/// Delivers the pages of a memory. Its content never changes.
///
/// A reader trusts no range of a source: ranges outside the memory are left out or refused.
pub trait PageSource: Send + Sync {
    /// Number of pages.
    fn pages(&self) -> usize;

    /// The pages that may hold something other than zeros, in order and without overlap.
    fn occupied(&self) -> Vec<PageRange> {
        vec![PageRange::new(0, self.pages())]
    }

    /// Writes `pages` pages from `first` on to `to`. May block until the pages are there.
    ///
    /// # Safety
    /// `to` must point at writable memory for `pages` pages, which no one else uses during the
    /// call.
    ///
    /// # Errors
    /// [`SourceError`]; nothing that was written may be used then.
    unsafe fn read(&self, first: usize, to: *mut u8, pages: usize) -> Result<(), SourceError>;

    /// Whether [`PageSource::read`] may be called in a signal handler: it allocates nothing, takes
    /// no lock, and answers as fast as a local disk.
    fn signal_safe(&self) -> bool {
        false
    }

    /// Whether reads answer as fast as a local disk, so that a thread that needs a page may read
    /// it, outside of signal handlers. Other sources are read by threads that may hang, and the
    /// wait for them is limited.
    fn is_near(&self) -> bool {
        self.signal_safe()
    }

    /// Whether every read costs a round trip, so that it pays to read what is there already with
    /// the rest.
    fn is_distant(&self) -> bool {
        false
    }

    /// The pages as mappable runs, in order and without gaps, or `None` when they cannot be mapped
    /// or were not checked.
    #[cfg(all(target_os = "linux", not(afresh_portable)))]
    fn pieces(&self) -> Option<Vec<Piece<'_>>> {
        None
    }

    /// Whether the answer of [`PageSource::pieces`] is still that of the time when the source was
    /// made, by length and time of change of the file. Asked before mapped pages are taken
    /// permanently.
    ///
    /// # Errors
    /// [`SourceError::Changed`].
    fn check_unchanged(&self) -> Result<(), SourceError> {
        Ok(())
    }

    /// Whether the pages are held in memory, as a memfd does, so that userfaultfd's CONTINUE and
    /// plain mappings never read a disk.
    #[cfg(all(target_os = "linux", not(afresh_portable)))]
    fn held_memfd(&self) -> Option<&Memfd> {
        None
    }

    /// The pages that runs are known to touch first, in address order.
    fn working_set(&self) -> Vec<PageRange> {
        Vec::new()
    }

    /// Reads the working set and hands it on run by run, in address order, each page once. The
    /// pages that it passes on were checked.
    ///
    /// # Errors
    /// As for [`PageSource::read`], and those of `take`.
    fn read_working_set(&self, take: &mut PageSink<'_>) -> Result<(), SourceError> {
        /// Pages read at a time.
        const PART: usize = 64;
        let mut buffer = Vec::new();
        for run in self.working_set() {
            for first in (run.start..run.end()).step_by(PART) {
                let part = PageRange::new(first, PART.min(run.end() - first));
                buffer.resize(part.byte_len(), 0);
                // SAFETY: the buffer is ours, and has the length of the part.
                unsafe { self.read(part.start, buffer.as_mut_ptr(), part.len) }?;
                take(part, &buffer)?;
            }
        }
        Ok(())
    }

    /// The snapshot whose pages these are, which a later state of the memory can be a difference
    /// to.
    fn snapshot(&self) -> Option<&Snapshot> {
        None
    }

    /// Where a compact copy of the working set is: its pages one after the other, from this page of
    /// the file on.
    #[cfg(all(target_os = "linux", not(afresh_portable)))]
    fn working_set_file(&self) -> Option<(BorrowedFd<'_>, usize)> {
        None
    }
}

/// The pages of a snapshot; each group is checked against its digest when it is first read.
#[derive(Debug)]
pub struct SnapshotSource {
    snapshot: Snapshot,
    #[cfg_attr(
        not(all(target_os = "linux", not(afresh_portable))),
        allow(dead_code, reason = "for mappings")
    )]
    checked: bool,
}

impl SnapshotSource {
    /// Pages are checked when they are read; nothing is mapped, since a mapping cannot be checked
    /// at each use.
    #[must_use]
    pub fn new(snapshot: Snapshot) -> Self {
        Self { snapshot, checked: false }
    }

    /// Checks every page now, so that the files can be mapped. They must not change afterwards.
    ///
    /// # Errors
    /// The first damaged layer.
    pub fn checked(snapshot: Snapshot) -> Result<Self, SourceError> {
        snapshot.verify()?;
        Ok(Self { snapshot, checked: true })
    }
}

impl PageSource for SnapshotSource {
    fn pages(&self) -> usize {
        self.snapshot.pages()
    }

    fn occupied(&self) -> Vec<PageRange> {
        Pages::occupied(&self.snapshot)
    }

    fn is_near(&self) -> bool {
        !self.snapshot.is_distant()
    }

    fn is_distant(&self) -> bool {
        self.snapshot.is_distant()
    }

    unsafe fn read(&self, first: usize, to: *mut u8, pages: usize) -> Result<(), SourceError> {
        // SAFETY: the caller vouches for the memory and its exclusive use during the call; any byte
        // pattern is a valid `u8`, and fresh mappings are initialised to zero.
        let out = unsafe { std::slice::from_raw_parts_mut(to, pages * PAGE_SIZE) };
        Ok(self.snapshot.read(first, out)?)
    }

    #[cfg(all(target_os = "linux", not(afresh_portable)))]
    fn pieces(&self) -> Option<Vec<Piece<'_>>> {
        if !self.checked {
            return None;
        }
        let mut pieces = Vec::with_capacity(self.snapshot.map().runs().len());
        for run in self.snapshot.map().runs() {
            let file = match run.origin {
                Origin::Zero => None,
                Origin::Layer { layer, stored } => {
                    let (file, start) = self.snapshot.layers()[layer].file()?;
                    Some((file.as_fd(), (start + stored) as usize))
                }
                // Made when they are read.
                Origin::Turn { .. } => return None,
            };
            pieces.push(Piece { pages: run.pages, file });
        }
        Some(pieces)
    }

    fn snapshot(&self) -> Option<&Snapshot> {
        Some(&self.snapshot)
    }

    fn check_unchanged(&self) -> Result<(), SourceError> {
        Ok(self.snapshot.layers().iter().try_for_each(|layer| layer.check_unchanged())?)
    }

    fn working_set(&self) -> Vec<PageRange> {
        self.snapshot.working_set()
    }

    fn read_working_set(&self, take: &mut PageSink<'_>) -> Result<(), SourceError> {
        self.snapshot.read_working_set(take)
    }
}
