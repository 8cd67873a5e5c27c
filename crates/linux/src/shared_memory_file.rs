//! The memory file of a live file, and its mappings in host processes.
//!
//! Promises: a hole of the file takes no memory and reads as zeros. May break it: a host that keeps
//! memory files elsewhere than in its page cache.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use afresh_memory::PageRange;
use afresh_sys::{Memfd, PAGE_SIZE, SysError};
use rustix::fs::{SeekFrom, seek};
use rustix::io::{Errno, pread};

use crate::platform::PlatformError;
use crate::ranges::Ranges;

pub(crate) const PAGE: u64 = PAGE_SIZE as u64;
/// Shared mappings end at this offset of their file at most. Bytes beyond it need no memory.
pub(crate) const MAX_OFFSET: u64 = i64::MAX as u64 / 2;
/// Maximum length of a range whose pages are looked at one by one.
const MAX_PAGEWISE: u64 = 1 << 20;

pub(crate) fn failed(error: SysError) -> PlatformError {
    PlatformError::kernel("writing shared memory", std::io::Error::from_raw_os_error(error.errno))
}

/// The memory of a live file, which shared mappings show.
#[derive(Debug)]
pub(crate) struct SharedFile(pub(crate) Memfd);

impl SharedFile {
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Reads `out.len()` bytes from `offset` on; beyond the end they are zero.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), PlatformError> {
        let mut done = 0;
        while done < out.len() {
            match pread(&self.0, &mut out[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(error) => return Err(PlatformError::kernel("reading shared memory", error)),
            }
        }
        out[done..].fill(0);
        Ok(())
    }

    /// The next part from `from` on that takes memory.
    fn next_data(&self, from: u64) -> Result<Option<Range<u64>>, PlatformError> {
        let failed = |error| PlatformError::kernel("looking for shared memory", error);
        let start = match seek(&self.0, SeekFrom::Data(from)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        Ok(Some(start..seek(&self.0, SeekFrom::Hole(start)).map_err(failed)?))
    }

    /// Where the next data or hole of a file of `size` bytes begins; `ENXIO` from its end on.
    pub(crate) fn seek(&self, offset: u64, size: u64, is_data: bool) -> Result<u64, Errno> {
        if offset >= size {
            return Err(Errno::NXIO);
        }
        let found = match is_data {
            true => seek(&self.0, SeekFrom::Data(offset))?,
            false => seek(&self.0, SeekFrom::Hole(offset)).unwrap_or(offset),
        };
        match is_data && found >= size {
            true => Err(Errno::NXIO),
            false => Ok(found.min(size)),
        }
    }

    /// Bytes of the pages of `range` that take memory. A short range takes a call for each such
    /// page. A long one takes two calls for each part, and the kernel may look at the whole of the
    /// last part for its end.
    pub(crate) fn resident_within(&self, range: Range<u64>) -> Result<u64, PlatformError> {
        let end = range.end.min(MAX_OFFSET).next_multiple_of(PAGE);
        let start = (range.start / PAGE * PAGE).min(end);
        let bytes = |part: Range<u64>| part.end - part.start;
        if end - start > MAX_PAGEWISE {
            return Ok(self.data_within(start..end)?.into_iter().map(bytes).sum());
        }
        let holes: u64 = self.holes(start..end)?.iter().map(bytes).sum();
        Ok(end - start - holes)
    }

    /// All parts that take memory, in whole pages.
    pub(crate) fn data(&self) -> Result<Vec<Range<u64>>, PlatformError> {
        self.data_within(0..u64::MAX)
    }

    /// The parts of `range`, whole pages, that take memory.
    pub(crate) fn data_within(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, PlatformError> {
        let (mut parts, mut from) = (Vec::new(), range.start);
        while from < range.end
            && let Some(part) = self.next_data(from)?.filter(|part| part.start < range.end)
        {
            from = part.end;
            // The last part ends with the file.
            parts.push(part.start..part.end.next_multiple_of(PAGE).min(range.end));
        }
        Ok(parts)
    }

    /// The pages of `range` that take no memory. The work is proportional to the range: the kernel
    /// would find the end of a part by a walk over all of it.
    pub(crate) fn holes(&self, range: Range<u64>) -> Result<Ranges, PlatformError> {
        let mut holes = Ranges::default();
        let mut at = range.start / PAGE * PAGE;
        let end = range.end.min(MAX_OFFSET).next_multiple_of(PAGE);
        while at < end {
            let data = match seek(&self.0, SeekFrom::Data(at)) {
                Ok(data) => data.min(end),
                Err(Errno::NXIO) => end,
                Err(error) => {
                    return Err(PlatformError::kernel("looking for shared memory", error));
                }
            };
            holes.insert(at..data);
            at = data.saturating_add(PAGE);
        }
        Ok(holes)
    }

    /// Releases the memory of all parts that are not in `stored`.
    pub(crate) fn release_all_but(&self, stored: &[Range<u64>]) -> Result<(), PlatformError> {
        let mut gone = Ranges::default();
        self.data()?.into_iter().for_each(|part| gone.insert(part));
        stored.iter().for_each(|part| gone.remove(part.clone()));
        for part in gone.iter() {
            let pages = (part.start / PAGE) as usize..(part.end / PAGE) as usize;
            self.0.punch_hole(PageRange::new(pages.start, pages.len())).map_err(failed)?;
        }
        Ok(())
    }
}

/// A shared mapping of a live file in a host process.
#[derive(Clone, Debug)]
pub(crate) struct LiveMapping {
    pub(crate) range: Range<u64>,
    pub(crate) protection: u64,
    /// The offset in the file of the first address.
    pub(crate) offset: u64,
    pub(crate) memory: Arc<SharedFile>,
}

impl PartialEq for LiveMapping {
    fn eq(&self, other: &Self) -> bool {
        self.range == other.range
            && (self.protection, self.offset) == (other.protection, other.offset)
            && Arc::ptr_eq(&self.memory, &other.memory)
    }
}

impl Eq for LiveMapping {}

impl LiveMapping {
    /// The call that makes it; `descriptor` is the memory file's in the process.
    pub(crate) fn order(&self, descriptor: u64) -> [u64; 7] {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let Range { start, end } = self.range;
        let number = libc::SYS_mmap as u64;
        [number, start, end - start, self.protection, flags as u64, descriptor, self.offset]
    }

    /// The part of it at `range`.
    pub(crate) fn part(&self, range: Range<u64>) -> Self {
        Self { offset: self.offset + (range.start - self.range.start), range, ..self.clone() }
    }

    pub(crate) fn overlaps(&self, range: &Range<u64>) -> bool {
        self.range.start < range.end && range.start < self.range.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_counted_in_short_and_long_ranges() {
        let pages = 4 * MAX_PAGEWISE / PAGE;
        let memory = Memfd::new(c"test").unwrap();
        memory.set_len((pages * PAGE) as usize).unwrap();
        for page in [0, 1, 5, pages / 2, pages - 1] {
            memory.write_at(&[1; PAGE_SIZE], (page * PAGE) as usize).unwrap();
        }
        let file = SharedFile(memory);
        let resident = |start: u64, end: u64| file.resident_within(start..end).unwrap() / PAGE;
        assert_eq!(resident(0, u64::MAX), 5);
        assert_eq!(resident(PAGE, pages * PAGE), 4);
        assert_eq!(resident(PAGE + 9, pages / 2 * PAGE), 2);
        assert_eq!(resident(PAGE, pages / 2 * PAGE + 1), 3);
        assert_eq!((resident(0, 2 * PAGE), resident(2 * PAGE, 6 * PAGE)), (2, 1));
        assert_eq!(resident(pages * PAGE, u64::MAX), 0);
    }
}
