//! Raw memory images, page `n` at byte `4096 n`: what other monitors and debuggers read and write.

use std::fs::File;
use std::io;
#[cfg(unix)]
use std::os::fd::AsFd;
#[cfg(windows)]
use std::os::windows::io::AsHandle;
use std::path::Path;

use afresh_sys::{PAGE_SIZE, PageRange, file};

use crate::disk::os::{FileExt, NO_WAIT, OpenOptionsExt, block_size};
use crate::disk::temporary::new_file;
use crate::{OpenError, Origin, Pages, SaveError, Snapshot};

/// Pages written at a time.
const BATCH: usize = 256;

/// A raw memory image in a file, to be saved. A partial last page is padded with zeros.
#[derive(Debug)]
pub struct FilePages {
    file: File,
    len: u64,
    occupied: Vec<PageRange>,
    /// Bytes where data begins or ends.
    bounds: Vec<u64>,
    /// Bytes of a block, by the file system.
    block: u64,
}

impl FilePages {
    /// Opens the file at `path`, and finds its holes, which hold zeros and are not read.
    ///
    /// # Errors
    /// [`OpenError::Io`], also for anything but a regular file.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let io = |e| OpenError::io(path, e);
        let file = File::options().read(true).custom_flags(NO_WAIT).open(path).map_err(io)?;
        let meta = file.metadata().map_err(io)?;
        if !meta.is_file() {
            let why = "not a regular file";
            return Err(io(io::Error::new(io::ErrorKind::InvalidInput, why)));
        }
        let page = PAGE_SIZE as u64;
        let (mut occupied, mut bounds) = (Vec::<PageRange>::new(), Vec::new());
        let mut at = 0;
        #[cfg(unix)]
        let borrowed = file.as_fd();
        #[cfg(windows)]
        let borrowed = file.as_handle();
        while let Some(data) =
            file::next_data(borrowed, at).map_err(|e| io(io::Error::from_raw_os_error(e.errno)))?
        {
            bounds.extend([data.start, data.end]);
            let (start, end) = ((data.start / page) as usize, data.end.div_ceil(page) as usize);
            match occupied.last_mut() {
                // A file system with smaller blocks can have two runs in one page.
                Some(last) if start <= last.end() => last.len = last.len.max(end - last.start),
                _ => occupied.push(PageRange::new(start, end - start)),
            }
            at = data.end;
        }
        Ok(Self { file, len: meta.len(), occupied, bounds, block: block_size(&meta) })
    }
}

/// The reason why the holes of a file do not show its unchanged pages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiffError {
    /// Another length than the parent's memory.
    #[error(
        "the file has {len} bytes and the parent {parent}: a diff is as long as the memory of its parent"
    )]
    Length {
        /// Of the file.
        len: u64,
        /// Of the memory of the parent.
        parent: u64,
    },
    /// No hole at all.
    #[error(
        "the file has no holes: it is a whole memory image, or was copied without its holes; import it without --diff"
    )]
    NoHoles,
    /// Holes are larger than pages.
    #[error(
        "the file system keeps holes in units of {unit} bytes, so pages of zeros that were never written cannot be told \
         from written ones: write the diff to ext4, XFS, Btrfs or tmpfs"
    )]
    Coarse {
        /// Bytes of a unit.
        unit: u64,
    },
}

impl FilePages {
    /// The pages of a diff, which has holes where its memory is as in a parent of `parent` pages.
    fn difference(&self, parent: usize) -> Result<Vec<PageRange>, DiffError> {
        let expected = (parent * PAGE_SIZE) as u64;
        if self.len != expected {
            return Err(DiffError::Length { len: self.len, parent: expected });
        }
        let pages = self.occupied();
        if pages == [PageRange::new(0, parent)] {
            return Err(DiffError::NoHoles);
        }
        // A file system with larger blocks may still keep smaller holes: then one of the bounds
        // shows it.
        let bounds = self.bounds.iter().filter(|bound| **bound != self.len);
        let aligned = bounds.fold(0, |all, bound| all | bound).trailing_zeros();
        if self.block > PAGE_SIZE as u64 && aligned >= self.block.trailing_zeros() {
            return Err(DiffError::Coarse { unit: self.block });
        }
        Ok(pages)
    }
}

/// A memory image over its parent: holes stand for pages of the parent.
#[derive(Debug)]
pub struct DiffPages<'a> {
    file: FilePages,
    parent: &'a Snapshot,
    changed: Vec<PageRange>,
}

impl<'a> DiffPages<'a> {
    /// The image in `file` over `parent`.
    ///
    /// # Errors
    /// [`DiffError`] if the holes of the file do not show its unchanged pages.
    pub fn new(file: FilePages, parent: &'a Snapshot) -> Result<Self, DiffError> {
        let changed = file.difference(parent.pages())?;
        Ok(Self { file, parent, changed })
    }

    /// The pages that the file has.
    #[must_use]
    pub fn changed(&self) -> &[PageRange] {
        &self.changed
    }
}

impl Pages for DiffPages<'_> {
    fn pages(&self) -> usize {
        self.parent.pages()
    }

    fn occupied(&self) -> Vec<PageRange> {
        PageRange::merge([self.parent.occupied(), self.changed.clone()].concat())
    }

    fn read(&self, first: usize, out: &mut [u8]) -> io::Result<()> {
        let wanted = PageRange::new(first, out.len() / PAGE_SIZE);
        let from = self.changed.partition_point(|run| run.end() <= wanted.start);
        let parts: Vec<PageRange> =
            self.changed[from..].iter().map_while(|run| run.intersect(wanted)).collect();
        if parts != [wanted] {
            self.parent.read(first, out).map_err(io::Error::other)?;
        }
        for part in parts {
            let at = (part.start - first) * PAGE_SIZE;
            self.file.read(part.start, &mut out[at..at + part.byte_len()])?;
        }
        Ok(())
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
    /// Every page is checked. `progress` receives the number of written pages. The file appears
    /// once it is complete.
    ///
    /// # Errors
    /// [`SaveError::Io`] when `path` exists or cannot be written, [`SaveError::Open`] when pages
    /// are damaged.
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

    #[test]
    fn a_diff_has_the_length_of_its_parent_and_small_holes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memory");
        let file = File::create(&path).unwrap();
        file.set_len(100 * PAGE_SIZE as u64).unwrap();
        file.write_all_at(&[7; PAGE_SIZE], 33 * PAGE_SIZE as u64).unwrap();
        let mut pages = FilePages::open(&path).unwrap();
        if pages.occupied().len() != 1 || pages.occupied()[0].len != 1 {
            return println!("SKIPPED: this file system keeps no small holes");
        }
        assert_eq!(pages.difference(100), Ok(vec![PageRange::new(33, 1)]));
        assert!(matches!(pages.difference(99), Err(DiffError::Length { .. })));
        // A page that begins at an odd number shows that the blocks are not larger than pages.
        pages.block = 128 << 10;
        assert!(pages.difference(100).is_ok());
        pages.bounds = vec![0, 128 << 10];
        assert_eq!(pages.difference(100), Err(DiffError::Coarse { unit: 128 << 10 }));
        pages.occupied = vec![PageRange::new(0, 100)];
        assert_eq!(pages.difference(100), Err(DiffError::NoHoles));
    }
}
