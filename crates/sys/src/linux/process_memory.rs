//! The memory of another process, for reading: which pages it has, and their bytes.
//!
//! Promises: everything is of the process that a [`Peer`] stands for, even if its PID is reused:
//! the files in `/proc` are opened once, belong to the address space that they were opened for, and
//! are used only if the peer still had its PID afterwards.
//!
//! May break it: a process that changes its mappings meanwhile. A read of memory that is not mapped
//! fails.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;

use super::pagemap;
use super::socket::Peer;
use crate::PAGE_SIZE;

/// Entries of `pagemap` read at a time.
const BATCH: usize = 512;

/// The memory of another process.
#[derive(Debug)]
pub struct ProcessMemory {
    pid: u32,
    pagemap: File,
    memory: File,
    smaps: File,
}

/// The mapping of a range of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappingKind {
    /// Whether all of it is registered with a userfaultfd for missing pages.
    pub watched: bool,
    /// Whether a part of it is shared, so that its pages can exist without being mapped.
    pub shared: bool,
}

impl ProcessMemory {
    /// The memory of `peer`.
    ///
    /// # Errors
    /// `ESRCH` where it has ended; `EACCES` or `EPERM` without the right to trace it: another
    /// user's process without `CAP_SYS_PTRACE`, or any but a child where Yama restricts tracing.
    pub fn open(peer: &Peer) -> io::Result<Self> {
        let pid = pid_of(peer)?;
        let file = |name: &str| {
            File::open(format!("/proc/{pid}/{name}")).map_err(|error| {
                let why = match error.raw_os_error() {
                    Some(libc::EACCES | libc::EPERM) => {
                        "; run this process as the same user, or give it CAP_SYS_PTRACE"
                    }
                    _ => "",
                };
                let text = format!("/proc/{pid}/{name}: {error}{why}");
                io::Error::new(error.kind(), text)
            })
        };
        let this =
            Self { pid, pagemap: file("pagemap")?, memory: file("mem")?, smaps: file("smaps")? };
        // The number was not reused before the files were open.
        if pid_of(peer)? != pid {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(this)
    }

    /// Its PID.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// How `ranges` are mapped. The kernel walks all page tables of the process for it. The ranges
    /// are sorted, and read once along the mappings.
    ///
    /// # Errors
    /// `EFAULT` where a part of them is not mapped.
    pub fn mapping_kind(&self, ranges: &mut [Range<usize>]) -> io::Result<MappingKind> {
        let mut file = &self.smaps;
        file.seek(SeekFrom::Start(0))?;
        let mut kind = MappingKind { watched: true, shared: false };
        let mut wanted = SortedRanges::new(ranges);
        let mut left = wanted.byte_len();
        let mut inside = false;
        for line in BufReader::new(file).lines() {
            let line = line?;
            if let Some((start, end)) = addresses(&line) {
                let bytes = wanted.take_common(start..end);
                inside = bytes > 0;
                left = left.checked_sub(bytes).ok_or_else(|| {
                    io::Error::other("the mappings of the process changed while they were read")
                })?;
            } else if let (Some(flags), true) = (line.strip_prefix("VmFlags:"), inside) {
                kind.watched &= flags.split_whitespace().any(|flag| flag == "um");
                kind.shared |= flags.split_whitespace().any(|flag| flag == "sh");
            }
        }
        if left > 0 { Err(io::Error::from_raw_os_error(libc::EFAULT)) } else { Ok(kind) }
    }

    /// Calls `found` with each run of addresses in `range` that has pages, in memory or swapped
    /// out, in order.
    ///
    /// # Errors
    /// An error of `PAGEMAP_SCAN`, or of reading `pagemap` before Linux 6.7.
    pub fn present(
        &self,
        range: Range<usize>,
        mut found: impl FnMut(Range<usize>),
    ) -> io::Result<()> {
        let addresses = range.start as u64..range.end as u64;
        let mut some = |run: Range<u64>| found(run.start as usize..run.end as usize);
        match pagemap::present(&self.pagemap, addresses, &mut some) {
            Err(error) if error.errno == libc::ENOTTY => self.read_pagemap(range, &mut found),
            other => other.map_err(io::Error::other),
        }
    }

    /// As [`ProcessMemory::present`], from the entries of each page.
    fn read_pagemap(
        &self,
        range: Range<usize>,
        found: &mut dyn FnMut(Range<usize>),
    ) -> io::Result<()> {
        const PRESENT_OR_SWAPPED: u64 = 3 << 62;
        let mut entries = [0; BATCH * 8];
        for start in range.clone().step_by(BATCH * PAGE_SIZE) {
            let pages = BATCH.min((range.end - start) / PAGE_SIZE);
            let entries = &mut entries[..pages * 8];
            self.pagemap.read_exact_at(entries, (start / PAGE_SIZE * 8) as u64)?;
            for (number, entry) in entries.as_chunks::<8>().0.iter().enumerate() {
                if u64::from_ne_bytes(*entry) & PRESENT_OR_SWAPPED != 0 {
                    let page = start + number * PAGE_SIZE;
                    found(page..page + PAGE_SIZE);
                }
            }
        }
        Ok(())
    }

    /// Writes to `protected` whether each page from `address` on is write-protected by a
    /// userfaultfd. A page that was discarded is not.
    ///
    /// # Errors
    /// An error of reading `pagemap`.
    pub fn write_protected(&self, address: usize, protected: &mut [bool]) -> io::Result<()> {
        const UFFD_WP: u64 = 1 << 57;
        let mut entries = [0; BATCH * 8];
        for (number, part) in protected.chunks_mut(BATCH).enumerate() {
            let entries = &mut entries[..part.len() * 8];
            let first = address / PAGE_SIZE + number * BATCH;
            self.pagemap.read_exact_at(entries, (first * 8) as u64)?;
            for (entry, protected) in entries.as_chunks::<8>().0.iter().zip(part) {
                *protected = u64::from_ne_bytes(*entry) & UFFD_WP != 0;
            }
        }
        Ok(())
    }

    /// Reads from `address` on. Pages that are swapped out are brought back. The call does not wait
    /// for the pager of a missing page.
    ///
    /// # Errors
    /// `EIO` for memory that is not mapped or is missing.
    pub fn read(&self, address: usize, out: &mut [u8]) -> io::Result<()> {
        self.memory.read_exact_at(out, address as u64)
    }
}

/// Ranges in order, which are compared with mappings in order. Each range and each mapping is read
/// once, however many there are.
struct SortedRanges<'a> {
    ranges: &'a [Range<usize>],
    /// The first range with bytes behind the last mapping.
    next: usize,
    /// The end of the mappings that were compared.
    compared: usize,
}

impl<'a> SortedRanges<'a> {
    /// Sorts `ranges`, and joins those that overlap.
    fn new(ranges: &'a mut [Range<usize>]) -> Self {
        ranges.sort_unstable_by_key(|range| range.start);
        let mut count = 0;
        for at in 0..ranges.len() {
            let range = ranges[at].clone();
            match ranges[..count].last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => {
                    ranges[count] = range;
                    count += 1;
                }
            }
        }
        Self { ranges: &ranges[..count], next: 0, compared: 0 }
    }

    fn byte_len(&self) -> usize {
        self.ranges.iter().map(ExactSizeIterator::len).sum()
    }

    /// The number of bytes that the ranges have in common with a mapping, without those of earlier
    /// mappings. The kernel lists mappings in order. One that the process has joined or moved
    /// during the read may begin before the end of the one before.
    fn take_common(&mut self, mapping: Range<usize>) -> usize {
        let mapping = mapping.start.max(self.compared)..mapping.end;
        self.compared = self.compared.max(mapping.end);
        let mut bytes = 0;
        while let Some(range) = self.ranges.get(self.next)
            && range.start < mapping.end
        {
            bytes += range.end.min(mapping.end).saturating_sub(range.start.max(mapping.start));
            if range.end > mapping.end {
                break;
            }
            self.next += 1;
        }
        bytes
    }
}

/// The addresses that a line of `smaps` begins with, if it begins a mapping.
fn addresses(line: &str) -> Option<(usize, usize)> {
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    Some((address(start)?, address(end)?))
}

/// The PID of a process that has not ended.
fn pid_of(peer: &Peer) -> io::Result<u32> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", peer.as_fd().as_raw_fd()))?;
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:")).map(str::trim);
    // -1 for a process that has ended, 0 for one in a PID namespace that is not visible here.
    let pid = pid.and_then(|text| text.parse::<u32>().ok()).filter(|pid| *pid > 0);
    pid.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::{Interest, PageRange, Protection, Reservation, Uffd, UffdMode};

    #[test]
    fn a_process_has_the_pages_that_it_touched() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let memory = ProcessMemory::open(&Peer::of(&ours).unwrap()).unwrap();
        assert_eq!(memory.pid(), std::process::id());
        let own = Reservation::new(700).unwrap();
        own.map_anonymous(PageRange::new(0, 700), Protection::ReadWrite).unwrap();
        own.advise(PageRange::new(0, 700), crate::Advice::NoHugePage).unwrap();
        for page in [3, 4, 520, 699] {
            // SAFETY: inside the reservation, which is mapped.
            unsafe { own.page_ptr(page).write_volatile(page as u8) };
        }
        let start = own.page_ptr(0) as usize;
        let range = start..start + 700 * PAGE_SIZE;
        let mut entries = Vec::new();
        memory.read_pagemap(range.clone(), &mut |run| entries.push(run)).unwrap();
        let mut scanned = Vec::new();
        memory.present(range.clone(), |run| scanned.push(run)).unwrap();
        for found in [entries, scanned] {
            let pages: Vec<usize> = found
                .iter()
                .flat_map(|run| run.clone().step_by(PAGE_SIZE))
                .map(|address| (address - start) / PAGE_SIZE)
                .collect();
            assert_eq!(pages, [3, 4, 520, 699]);
        }
        let mut page = [0; PAGE_SIZE];
        memory.read(start + 4 * PAGE_SIZE, &mut page).unwrap();
        assert_eq!(page[0], 4);
        assert!(!memory.mapping_kind(&mut [range.clone()]).unwrap().watched);
        let Ok(uffd) = Uffd::open(UffdMode::Events) else { return };
        uffd.register(own.page_ptr(0), 700 * PAGE_SIZE, Interest::MISSING).unwrap();
        let kind = MappingKind { watched: true, shared: false };
        assert_eq!(memory.mapping_kind(&mut [range.clone()]).unwrap(), kind);
        // A part that is not registered, and a part that is not mapped.
        uffd.unregister(own.page_ptr(699), PAGE_SIZE).unwrap();
        assert!(!memory.mapping_kind(&mut [range.clone()]).unwrap().watched);
        assert!(memory.mapping_kind(&mut [range, 0..PAGE_SIZE]).is_err());
    }

    #[test]
    fn each_range_is_compared_with_the_mappings_around_it_alone() {
        const COUNT: usize = 30_000;
        // As many mappings as ranges, and the ranges in the worst order.
        let mut ranges: Vec<_> = (0..COUNT).rev().map(|at| at * 10 + 5..at * 10 + 12).collect();
        ranges.extend([3..4, 3..5, 7..8]);
        let mut wanted = SortedRanges::new(&mut ranges);
        assert_eq!(wanted.byte_len(), 2 + COUNT * 7);
        let (mut found, mut steps) = (0, 0);
        for at in 0..COUNT {
            let before = wanted.next;
            found += wanted.take_common(at * 10..at * 10 + 9);
            steps += wanted.next - before;
        }
        // Bytes 9 of each ten are in no mapping, and 0 and 1 of the last range behind all.
        assert_eq!(found, 2 + COUNT * 6 - 2);
        assert!(steps <= COUNT + 1, "{steps}");
        assert_eq!(SortedRanges::new(&mut []).take_common(0..10), 0);
    }

    #[test]
    fn a_mapping_that_grew_during_the_read_counts_once() {
        let mut ranges = [0..20, 30..40];
        let mut wanted = SortedRanges::new(&mut ranges);
        let mut left = wanted.byte_len();
        // The second and third mapping were joined with earlier ones. The fourth is within one.
        for (mapping, bytes) in [(0..10, 10), (5..15, 5), (0..35, 10), (31..33, 0), (34..50, 5)] {
            let found = wanted.take_common(mapping.clone());
            assert_eq!(found, bytes, "{mapping:?}");
            left -= found;
        }
        assert_eq!(left, 0);
        // A mapping of the wrong order has no bytes.
        assert_eq!(
            SortedRanges::new(&mut [0..20, 30..40]).take_common(Range { start: 10, end: 5 }),
            0
        );
    }
}
