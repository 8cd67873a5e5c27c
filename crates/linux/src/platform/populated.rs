//! Populated pages of a guest process, from its page map, so that reserved memory costs nothing.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use afresh_sys::pagemap;

use super::PlatformError;
use super::process::Process;
use super::segments::{Segment, Segments};
use super::stub::GUEST;
use super::working_set::WorkingSet;
use crate::ranges::Ranges;

const PAGE: u64 = afresh_sys::PAGE_SIZE as u64;
/// Present in memory, or swapped out.
const HELD: u64 = 3 << 62;
/// A page of a file, or shared.
const FILE: u64 = 1 << 61;
/// Pages of one query.
const BATCH_PAGES: u64 = 1 << 15;

fn failed(error: std::io::Error) -> PlatformError {
    PlatformError::kernel("reading the guest's page map", error)
}

impl Process {
    /// The parts of `range` that hold pages. Other parts are zero in anonymous memory, and have the
    /// file's content in a mapping of a file.
    pub(crate) fn populated(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, PlatformError> {
        self.pages(range, |entry| entry & HELD != 0)
    }

    /// The parts of `range` with private pages: the rest is zero, or equals the image.
    pub(crate) fn private(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, PlatformError> {
        let mut own = Vec::new();
        match pagemap::own_pages(&self.page_map()?, range.clone(), |run| own.push(run)) {
            Ok(()) => Ok(own),
            // An older kernel's map does not distinguish zero pages that were only read.
            Err(error) if error.errno == libc::ENOTTY => {
                self.pages(range, |entry| entry & HELD != 0 && entry & FILE == 0)
            }
            Err(error) => Err(failed(std::io::Error::from_raw_os_error(error.errno))),
        }
    }

    fn page_map(&self) -> Result<File, PlatformError> {
        File::open(format!("/proc/{}/pagemap", self.id())).map_err(failed)
    }

    /// The private pages in `range` and the mapped pages of files in each of `parts`. `None` if the
    /// kernel is too old to list the former.
    pub(super) fn own_and_file_pages(
        &self,
        range: Range<u64>,
        parts: impl Iterator<Item = Range<u64>>,
    ) -> Result<Option<(Ranges, Ranges)>, PlatformError> {
        let map = self.page_map()?;
        let (mut own, mut of_files) = (Ranges::default(), Ranges::default());
        match pagemap::own_pages(&map, range, |run| own.insert(run)) {
            Ok(()) => {}
            Err(error) if error.errno == libc::ENOTTY => return Ok(None),
            Err(error) => return Err(failed(std::io::Error::from_raw_os_error(error.errno))),
        }
        for part in parts {
            let found = pages_of(&map, part, |entry| entry & HELD != 0 && entry & FILE != 0)?;
            found.into_iter().for_each(|run| of_files.insert(run));
        }
        Ok(Some((own, of_files)))
    }

    fn pages(
        &self,
        range: Range<u64>,
        wanted: impl Fn(u64) -> bool,
    ) -> Result<Vec<Range<u64>>, PlatformError> {
        pages_of(&self.page_map()?, range, wanted)
    }

    /// The pages of `segments` that the guest has touched since the process was made, apart from
    /// `changed` mappings. `None` if the kernel does not list them.
    pub(crate) fn touched(
        &self,
        segments: &Segments,
        changed: &Ranges,
    ) -> Result<Option<WorkingSet>, PlatformError> {
        let readable = segments.iter().filter(|segment| segment.allows(libc::PROT_READ));
        let found = self.own_and_file_pages(GUEST, readable.map(Segment::range))?;
        let Some((own, read)) = found else { return Ok(None) };
        let mut set = WorkingSet { written: Ranges::default(), read };
        let writable = segments.iter().filter(|segment| segment.allows(libc::PROT_WRITE));
        let parts = writable.flat_map(|segment| own.within(segment.range()));
        parts.for_each(|part| set.written.insert(part));
        for part in changed.iter() {
            set.written.remove(part.clone());
            set.read.remove(part);
        }
        Ok(Some(set))
    }
}

/// The parts of `range` whose entries in the page map `map` are `wanted`.
fn pages_of(
    map: &File,
    range: Range<u64>,
    wanted: impl Fn(u64) -> bool,
) -> Result<Vec<Range<u64>>, PlatformError> {
    let mut found: Vec<Range<u64>> = Vec::new();
    let mut entries = Vec::new();
    for first in (range.start..range.end).step_by((BATCH_PAGES * PAGE) as usize) {
        let count = ((range.end - first) / PAGE).min(BATCH_PAGES);
        entries.resize(8 * count as usize, 0);
        map.read_exact_at(&mut entries, first / PAGE * 8).map_err(failed)?;
        for (page, entry) in (0..count).zip(entries.chunks_exact(8)) {
            // All the bits are in the last byte.
            if !wanted(u64::from(entry[7]) << 56) {
                continue;
            }
            let start = first + page * PAGE;
            match found.last_mut() {
                Some(last) if last.end == start => last.end += PAGE,
                _ => found.push(start..start + PAGE),
            }
        }
    }
    Ok(found)
}
