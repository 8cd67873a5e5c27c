//! Operations of a slot on the guest process: pages of the image by number are memory at addresses
//! there.

use afresh_memory::{Image, PAGE_SIZE, PageRange, Remote};

use crate::platform::{
    Continuation, MappedImage, PlatformError, Process, Segment, Segments, StubCommands,
};

const PAGE: u64 = PAGE_SIZE as u64;

/// The process, while it waits for orders, and where in it the pages are.
pub(crate) struct SubprocessMemory<'a> {
    pub(crate) process: &'a mut Process,
    pub(crate) segments: &'a Segments,
    /// Whether every mapping still shows the image that the slot returns to, or has shown since the
    /// process started.
    pub(crate) plain: bool,
}

impl SubprocessMemory<'_> {
    fn parts(&self, pages: &[PageRange]) -> Vec<Segment> {
        pages.iter().flat_map(|run| self.segments.showing(*run)).collect()
    }
}

impl Remote for SubprocessMemory<'_> {
    type Error = PlatformError;

    fn watched(&self) -> Vec<PageRange> {
        self.segments.writable()
    }

    fn drain(&mut self, written: &mut Vec<PageRange>) -> Result<(), PlatformError> {
        for address in self.process.drain()? {
            written.extend(self.segments.within(address..address + PAGE).map(|part| part.pages()));
        }
        Ok(())
    }

    fn arm(&mut self, pages: &[PageRange]) -> Result<(), PlatformError> {
        let parts = self.parts(pages);
        parts.into_iter().try_for_each(|part| self.process.protect(part.range()))
    }

    fn open(&mut self, pages: &[PageRange]) -> Result<(), PlatformError> {
        let parts = self.parts(pages);
        parts.into_iter().try_for_each(|part| self.process.unprotect(part.range()))
    }

    fn renew(&mut self, image: &Image, pages: &[PageRange]) -> Result<(), PlatformError> {
        let parts = self.parts(pages);
        if !self.plain {
            return self.process.show(&MappedImage::new(image)?, &parts);
        }
        let advise = libc::MADV_DONTNEED as u64;
        let order =
            |part: &Segment| [libc::SYS_madvise as u64, part.start, part.len, advise, 0, 0, 0];
        let calls = parts.iter().map(order).collect();
        self.process
            .execute(&StubCommands { calls, ..StubCommands::default() }, Continuation::Ask)?;
        parts.into_iter().try_for_each(|part| self.process.protect(part.range()))
    }

    fn read(&mut self, pages: &[PageRange], out: &mut [u8]) -> Result<(), PlatformError> {
        let parts = self.parts(pages);
        let ranges: Vec<_> = parts.iter().map(|part| (part.start, part.len as usize)).collect();
        if ranges.iter().map(|(_, len)| len).sum::<usize>() == out.len() {
            return read_all(self.process, &ranges, out);
        }
        // Unmapped pages are zero.
        out.fill(0);
        let mut at = 0;
        for run in pages {
            for part in self.segments.showing(*run) {
                let (offset, len) =
                    ((part.page as usize - run.start) * PAGE_SIZE, part.len as usize);
                let out = &mut out[at + offset..][..len];
                read_all(self.process, &[(part.start, len)], out)?;
            }
            at += run.byte_len();
        }
        Ok(())
    }
}

/// Reads memory that is mapped: ranges (start, length), one after the other.
pub(crate) fn read_all(
    process: &Process,
    ranges: &[(u64, usize)],
    out: &mut [u8],
) -> Result<(), PlatformError> {
    if process.read_ranges(ranges, out)? {
        return Ok(());
    }
    let error = std::io::Error::from_raw_os_error(libc::EFAULT);
    Err(PlatformError::kernel("reading the guest's memory", error))
}
