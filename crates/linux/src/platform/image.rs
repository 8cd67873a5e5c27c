//! The image of a warm guest: the bytes of everything it had mapped, in a sealed memory file.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use afresh_sys::{Memfd, PAGE_SIZE as PAGE, SysError};

use super::PlatformError;

/// A mapping of the warm guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// First address.
    pub(crate) start: u64,
    /// Length in bytes, whole pages.
    pub(crate) len: u64,
    /// Protection, as `mmap` takes it.
    pub(crate) protection: u64,
    /// Where its bytes lie in the file.
    pub(crate) offset: u64,
}

impl Segment {
    pub(crate) fn range(&self) -> Range<u64> {
        self.start..self.start + self.len
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.protection & libc::PROT_WRITE as u64 != 0
    }

    /// The call that maps it, in a process whose descriptor 1 is the file.
    pub(crate) fn order(&self) -> [u64; 7] {
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
        [libc::SYS_mmap as u64, self.start, self.len, self.protection, flags as u64, 1, self.offset]
    }
}

/// A sealed file and what of it is mapped where. Segments are sorted and do not overlap; the bytes of neighbours are
/// neighbours in the file.
#[derive(Debug)]
pub(crate) struct Image {
    file: Memfd,
    segments: Vec<Segment>,
    len: u64,
}

/// Bytes read at a time.
const CHUNK: usize = 1 << 20;

impl Image {
    /// Reads `mappings` (start, length, protection; sorted) by `read` and seals them.
    ///
    /// Pages of zeros are not stored.
    pub(crate) fn build(
        mappings: impl IntoIterator<Item = (u64, u64, u64)>,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), PlatformError>,
    ) -> Result<Self, PlatformError> {
        let file = Memfd::new(c"afresh-linux-image").map_err(refused)?;
        let mut segments = Vec::new();
        let mut len = 0;
        for (start, size, protection) in mappings {
            segments.push(Segment { start, len: size, protection, offset: len });
            len += size;
        }
        file.set_len(len as usize).map_err(refused)?;
        let mut chunk = vec![0; CHUNK];
        for segment in &segments {
            let mut done = 0;
            while done < segment.len {
                let n = (segment.len - done).min(CHUNK as u64) as usize;
                read(segment.start + done, &mut chunk[..n])?;
                let base = (segment.offset + done) as usize;
                // Runs of pages that hold anything.
                let full =
                    |page: usize| chunk[page * PAGE..(page + 1) * PAGE].iter().any(|&b| b != 0);
                let mut page = 0;
                while page < n / PAGE {
                    let first = page;
                    while page < n / PAGE && full(page) {
                        page += 1;
                    }
                    file.write_at(&chunk[first * PAGE..page * PAGE], base + first * PAGE)
                        .map_err(refused)?;
                    page += usize::from(page == first);
                }
                done += n as u64;
            }
        }
        file.seal().map_err(refused)?;
        Ok(Self { file, segments, len })
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Bytes that were mapped.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Bytes that take memory.
    pub(crate) fn resident(&self) -> u64 {
        self.file.resident_bytes() as u64
    }

    /// The parts of segments in `range`: address, length, protection, offset.
    pub(crate) fn within(&self, range: Range<u64>) -> impl Iterator<Item = Segment> + '_ {
        let first = self.segments.partition_point(|s| s.start + s.len <= range.start);
        let end = range.end;
        self.segments[first..].iter().take_while(move |s| s.start < end).map(move |s| {
            let start = s.start.max(range.start);
            Segment {
                start,
                len: (s.start + s.len).min(end) - start,
                protection: s.protection,
                offset: s.offset + (start - s.start),
            }
        })
    }

    /// Reads `out.len()` bytes of the file at `offset`.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), PlatformError> {
        let mut done = 0;
        while done < out.len() {
            match rustix::io::pread(&self.file, &mut out[done..], offset + done as u64) {
                Ok(0) => {
                    let error = io::Error::from(io::ErrorKind::UnexpectedEof);
                    return Err(PlatformError::kernel("reading the image", error));
                }
                Ok(n) => done += n,
                Err(error) => return Err(PlatformError::kernel("reading the image", error)),
            }
        }
        Ok(())
    }
}

fn refused(error: SysError) -> PlatformError {
    PlatformError::kernel(error.call.name(), io::Error::from_raw_os_error(error.errno))
}
