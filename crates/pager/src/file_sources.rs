//! Files of pages as sources.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::SystemTime;

use afresh_sys::{Memfd, PAGE_SIZE, PageRange, file};

use crate::{PageSource, Piece, SourceError};

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
