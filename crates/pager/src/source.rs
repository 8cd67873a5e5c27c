//! Where pages come from.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::SystemTime;

use afresh_store::{Origin, Pages, Snapshot};
use afresh_sys::{Memfd, PAGE_SIZE, PageRange, file};

use crate::SourceError;

/// A run of pages that can be mapped at once.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The pages.
    pub pages: PageRange,
    /// The file to map them from, and the page of it that is the first; `None` where the pages are
    /// zero.
    pub file: Option<(BorrowedFd<'a>, usize)>,
}

/// Takes pages that a source brings by itself: which they are, and their bytes.
pub type Take<'a> = dyn FnMut(PageRange, &[u8]) -> Result<(), SourceError> + 'a;

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
    fn pieces(&self) -> Option<Vec<Piece<'_>>> {
        None
    }

    /// Whether the answer of [`PageSource::pieces`] is still that of the time when the source was
    /// made, by length and time of change of the file. Asked before mapped pages are taken for
    /// good.
    ///
    /// # Errors
    /// [`SourceError::Changed`].
    fn check_unchanged(&self) -> Result<(), SourceError> {
        Ok(())
    }

    /// Whether the pages are held in memory, as a memfd does, so that userfaultfd's CONTINUE and
    /// plain mappings never read a disk.
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
    fn read_working_set(&self, take: &mut Take<'_>) -> Result<(), SourceError> {
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
    fn working_set_file(&self) -> Option<(BorrowedFd<'_>, usize)> {
        None
    }
}

/// A plain file of pages, without digests.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    /// Length and time of the last change.
    state: (u64, Option<SystemTime>),
    pages: usize,
    set: Vec<PageRange>,
    set_file: Option<File>,
}

impl FileSource {
    /// The whole of `file`; a partial last page is left out.
    ///
    /// # Errors
    /// An I/O error of `stat`.
    pub fn new(file: File) -> Result<Self, SourceError> {
        let state = Self::state(&file)?;
        let pages = state.0 as usize / PAGE_SIZE;
        Ok(Self { file, state, pages, set: Vec::new(), set_file: None })
    }

    fn state(file: &File) -> Result<(u64, Option<SystemTime>), SourceError> {
        let metadata = file.metadata()?;
        // A file system without times leaves the length.
        Ok((metadata.len(), metadata.modified().ok()))
    }

    /// Adds a working set and the file that holds its compact copy.
    #[must_use]
    pub fn with_working_set(mut self, set: Vec<PageRange>, file: File) -> Self {
        self.set = set;
        self.set_file = Some(file);
        self
    }
}

impl PageSource for FileSource {
    fn pages(&self) -> usize {
        self.pages
    }

    unsafe fn read(&self, first: usize, to: *mut u8, pages: usize) -> Result<(), SourceError> {
        // SAFETY: the caller vouches for the memory.
        unsafe { file::read_into(self.file.as_fd(), to, pages * PAGE_SIZE, first * PAGE_SIZE) }?;
        Ok(())
    }

    fn signal_safe(&self) -> bool {
        true
    }

    fn pieces(&self) -> Option<Vec<Piece<'_>>> {
        let pages = PageRange::new(0, self.pages);
        Some(vec![Piece { pages, file: Some((self.file.as_fd(), 0)) }])
    }

    fn check_unchanged(&self) -> Result<(), SourceError> {
        if Self::state(&self.file)? == self.state { Ok(()) } else { Err(SourceError::Changed) }
    }

    fn working_set(&self) -> Vec<PageRange> {
        self.set.clone()
    }

    fn working_set_file(&self) -> Option<(BorrowedFd<'_>, usize)> {
        self.set_file.as_ref().map(|file| (file.as_fd(), 0))
    }
}

/// Pages that this host holds in memory already.
#[derive(Debug)]
pub struct MemfdSource {
    file: Arc<Memfd>,
    pages: usize,
}

impl MemfdSource {
    /// The first `pages` pages of a sealed memfd, or as many as it has.
    #[must_use]
    pub fn new(file: Arc<Memfd>, pages: usize) -> Self {
        // A page past the end of the file would be a SIGBUS at its first use. A file of unknown
        // length has none.
        let held = file.bytes() / PAGE_SIZE;
        Self { file, pages: pages.min(held) }
    }
}

impl PageSource for MemfdSource {
    fn pages(&self) -> usize {
        self.pages
    }

    unsafe fn read(&self, first: usize, to: *mut u8, pages: usize) -> Result<(), SourceError> {
        // SAFETY: the caller vouches for the memory.
        unsafe { file::read_into(self.file.as_fd(), to, pages * PAGE_SIZE, first * PAGE_SIZE) }?;
        Ok(())
    }

    fn signal_safe(&self) -> bool {
        true
    }

    fn pieces(&self) -> Option<Vec<Piece<'_>>> {
        let pages = PageRange::new(0, self.pages);
        Some(vec![Piece { pages, file: Some((self.file.as_fd(), 0)) }])
    }

    fn held_memfd(&self) -> Option<&Memfd> {
        Some(&self.file)
    }
}

/// The pages of a snapshot; each group is checked against its digest when it is first read.
#[derive(Debug)]
pub struct SnapshotSource {
    snapshot: Snapshot,
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

    fn read_working_set(&self, take: &mut Take<'_>) -> Result<(), SourceError> {
        self.snapshot.read_working_set(take)
    }
}
