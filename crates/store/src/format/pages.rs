//! Where the pages of a snapshot come from.

use std::io;

use afresh_sys::{PAGE_SIZE, PageRange};

/// Memory to save, by page.
///
/// It must not change while it is saved: an image is immutable, a live slot must be paused. Pages
/// are read more than once, and by several threads.
pub trait Pages: Sync {
    /// Number of pages in the index space, zero ones included.
    fn pages(&self) -> usize;

    /// The pages that may hold something other than zeros, in order and without overlap. Reporting
    /// too many costs time, reporting too few loses data.
    fn occupied(&self) -> Vec<PageRange>;

    /// Reads whole pages from `first` on; `out.len()` is a multiple of the page size.
    ///
    /// # Errors
    /// Any that the source has.
    fn read(&self, first: usize, out: &mut [u8]) -> io::Result<()>;
}

/// Pages in a byte vector. The last one is padded with zeros.
#[derive(Clone, Debug, Default)]
pub struct MemoryPages(pub Vec<u8>);

impl Pages for MemoryPages {
    fn pages(&self) -> usize {
        self.0.len().div_ceil(PAGE_SIZE)
    }

    fn occupied(&self) -> Vec<PageRange> {
        if self.0.is_empty() { Vec::new() } else { vec![PageRange::new(0, self.pages())] }
    }

    fn read(&self, first: usize, out: &mut [u8]) -> io::Result<()> {
        let from = (first * PAGE_SIZE).min(self.0.len());
        let to = (from + out.len()).min(self.0.len());
        out[..to - from].copy_from_slice(&self.0[from..to]);
        out[to - from..].fill(0);
        Ok(())
    }
}
