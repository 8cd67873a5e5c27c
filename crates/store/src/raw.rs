//! Raw memory images, page `n` at byte `4096 n`: what other monitors and debuggers read and write.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use afresh_sys::{PAGE_SIZE, PageRange, file};

use crate::temporary::new_file;
use crate::{OpenError, Origin, Pages, SaveError, Snapshot};

/// Pages written at a time.
const BATCH: usize = 256;

/// A raw memory image in a file, to be saved. A partial last page is padded with zeros.
#[derive(Debug)]
pub struct FilePages {
    file: File,
    len: u64,
    occupied: Vec<PageRange>,
}

impl FilePages {
    /// Opens the file at `path`, and finds its holes, which hold zeros and are not read.
    ///
    /// # Errors
    /// [`OpenError::Io`], also for anything but a regular file.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let io = |e| OpenError::io(path, e);
        let file = File::open(path).map_err(io)?;
        let meta = file.metadata().map_err(io)?;
        if !meta.is_file() {
            let why = "not a regular file";
            return Err(io(io::Error::new(io::ErrorKind::InvalidInput, why)));
        }
        let page = PAGE_SIZE as u64;
        let mut occupied: Vec<PageRange> = Vec::new();
        let mut at = 0;
        while let Some(data) = file::next_data(file.as_fd(), at)
            .map_err(|e| io(io::Error::from_raw_os_error(e.errno)))?
        {
            let (start, end) = ((data.start / page) as usize, data.end.div_ceil(page) as usize);
            match occupied.last_mut() {
                // A file system with smaller blocks can have two runs in one page.
                Some(last) if start <= last.end() => last.len = last.len.max(end - last.start),
                _ => occupied.push(PageRange::new(start, end - start)),
            }
            at = data.end;
        }
        Ok(Self { file, len: meta.len(), occupied })
    }
}

impl Pages for FilePages {
    fn pages(&self) -> usize {
        self.len.div_ceil(PAGE_SIZE as u64) as usize
    }

    fn occupied(&self) -> Vec<PageRange> {
        let all = PageRange::new(0, self.pages());
        self.occupied.iter().filter_map(|range| range.intersect(all)).collect()
    }

    fn read(&self, first: usize, out: &mut [u8]) -> io::Result<()> {
        let offset = (first * PAGE_SIZE) as u64;
        let inside = self.len.saturating_sub(offset).min(out.len() as u64) as usize;
        self.file.read_exact_at(&mut out[..inside], offset)?;
        out[inside..].fill(0);
        Ok(())
    }
}

impl Snapshot {
    /// Writes the memory to a new file at `path`: a raw image with holes where pages are zero.
    /// Every page is checked on the way; `progress` receives the number of pages done. The file
    /// appears when it is whole.
    ///
    /// # Errors
    /// [`SaveError::Io`] when `path` exists or cannot be written, [`SaveError::Open`] when pages are
    /// damaged.
    pub fn export_memory(
        &self,
        path: &Path,
        progress: &mut dyn FnMut(usize),
    ) -> Result<(), SaveError> {
        new_file(path, |file| {
            let io = |e| SaveError::io(path, e);
            file.set_len(self.pages() as u64 * PAGE_SIZE as u64).map_err(io)?;
            let mut buffer = vec![0; BATCH * PAGE_SIZE];
            for run in self.map().runs().iter().filter(|run| run.origin != Origin::Zero) {
                for first in (run.pages.start..run.pages.end()).step_by(BATCH) {
                    let pages = BATCH.min(run.pages.end() - first);
                    let part = &mut buffer[..pages * PAGE_SIZE];
                    self.read(first, part)?;
                    file.write_all_at(part, first as u64 * PAGE_SIZE as u64).map_err(io)?;
                    progress(first + pages);
                }
            }
            progress(self.pages());
            Ok(())
        })
    }

    /// Writes the guest's own state to a new file at `path`.
    ///
    /// # Errors
    /// [`SaveError::Io`] when `path` exists or cannot be written.
    pub fn export_state(&self, path: &Path) -> Result<(), SaveError> {
        new_file(path, |file| {
            file.write_all_at(self.state(), 0).map_err(|e| SaveError::io(path, e))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_not_read_and_a_partial_page_is_padded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memory");
        let file = File::create(&path).unwrap();
        file.write_all_at(&[7; 10], 0).unwrap();
        file.write_all_at(&[9; 10], 400 * PAGE_SIZE as u64).unwrap();
        let pages = FilePages::open(&path).unwrap();
        assert_eq!(pages.pages(), 401);
        let occupied = pages.occupied();
        for page in [0, 400] {
            assert!(occupied.iter().any(|r| r.start <= page && page < r.end()), "{occupied:?}");
        }
        if occupied.len() == 1 {
            println!("SKIPPED: this file system keeps no holes");
        }
        let mut out = vec![1; PAGE_SIZE];
        pages.read(400, &mut out).unwrap();
        assert!(out[..10] == [9; 10] && out[10..].iter().all(|b| *b == 0));
        assert!(FilePages::open(dir.path()).is_err());
    }
}
