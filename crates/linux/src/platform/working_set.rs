//! The working set of a frozen state: the pages that runs from it touch. Later processes of the
//! state get these pages when they are made, and take no page fault for each.
//!
//! The first two runs in new processes record their pages. Pages that both wrote are copied in each
//! new process before its guest runs. Other pages that both touched are mapped in the template,
//! whose page tables its children inherit.
//!
//! Promises: no byte that a guest reads depends on a working set, and no number of pages exceeds
//! [`MAX_WRITTEN`] or [`MAX_READ`]. A larger run adds nothing.

use std::ops::Range;

use super::memory_accounting::is_memory_accounted;
use super::segments::Segments;
use crate::ranges::Ranges;

const PAGE: u64 = afresh_sys::PAGE_SIZE as u64;
/// Runs that record their pages.
const RECORDED_RUNS: u8 = 2;
/// Maximum pages that are copied in each new process: 4 MiB.
const MAX_WRITTEN: u64 = 1024;
/// Maximum pages that a template maps: 64 MiB.
const MAX_READ: u64 = 16_384;
/// Maximum ranges that are copied in a new process: each is a call of its boot.
const MAX_RANGES: usize = 400;

/// The pages that runs have touched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WorkingSet {
    /// Writable pages that were written.
    pub(super) written: Ranges,
    /// Pages that were mapped and not written.
    pub(super) read: Ranges,
}

/// The working set of a state while runs record it.
#[derive(Debug, Default)]
pub(super) struct WorkingSetRecord {
    runs: u8,
    common: WorkingSet,
}

fn pages(ranges: &Ranges) -> u64 {
    ranges.iter().map(|range| (range.end - range.start) / PAGE).sum()
}

/// The parts that both sets have.
fn intersection(one: &Ranges, two: &Ranges) -> Ranges {
    let mut both = Ranges::default();
    one.iter().flat_map(|range| two.within(range)).for_each(|part| both.insert(part));
    both
}

impl WorkingSetRecord {
    /// Whether another run is to record its pages.
    pub(super) fn is_open(&self) -> bool {
        self.runs < RECORDED_RUNS
    }

    /// Adds the pages of a run.
    pub(super) fn add(&mut self, run: WorkingSet) {
        if !self.is_open() {
            return;
        }
        self.common = match self.runs {
            0 => run,
            _ => WorkingSet {
                written: intersection(&self.common.written, &run.written),
                read: intersection(&self.common.read, &run.read),
            },
        };
        self.runs += 1;
    }

    /// Forgets all pages permanently.
    pub(super) fn abandon(&mut self) {
        *self = Self { runs: RECORDED_RUNS, common: WorkingSet::default() };
    }

    /// The pages that all recorded runs have touched, once there are enough runs.
    pub(super) fn finished(&self) -> Option<&WorkingSet> {
        (!self.is_open()).then_some(&self.common)
    }
}

impl WorkingSet {
    pub(super) fn is_empty(&self) -> bool {
        self.written.is_empty() && self.read.is_empty()
    }

    /// The ranges to copy in a new process.
    pub(super) fn copied(&self) -> Vec<Range<u64>> {
        let few = pages(&self.written) <= MAX_WRITTEN;
        let ranges = self.written.iter().take(MAX_RANGES);
        if few { ranges.collect() } else { Vec::new() }
    }

    /// The calls that map pages in a template, at most `room`. A child inherits page tables of
    /// memory only if a page there is the template's own. So each segment gets one such page.
    pub(super) fn mapping_calls(&self, segments: &Segments, room: usize) -> Vec<[u64; 7]> {
        let mut calls: Vec<[u64; 7]> = Vec::new();
        // Where the host accounts memory strictly, it may refuse to make mappings writable.
        if pages(&self.read) > MAX_READ || is_memory_accounted() {
            return calls;
        }
        let advise = |range: &Range<u64>, advice: libc::c_int| {
            let len = range.end - range.start;
            [libc::SYS_madvise as u64, range.start, len, advice as u64, 0, 0, 0]
        };
        let readable = segments.iter().filter(|segment| segment.allows(libc::PROT_READ));
        for segment in readable {
            let parts = self.read.within(segment.range());
            let Some(first) = parts.first() else { continue };
            let own = first.start..first.start + PAGE;
            let protect = |protection: u64| {
                [libc::SYS_mprotect as u64, segment.start, segment.len, protection, 0, 0, 0]
            };
            let opened = segment.protection | libc::PROT_WRITE as u64;
            let is_writable = segment.allows(libc::PROT_WRITE);
            let mut these = Vec::new();
            these.extend((!is_writable).then(|| protect(opened)));
            these.push(advise(&own, libc::MADV_POPULATE_WRITE));
            these.extend((!is_writable).then(|| protect(segment.protection)));
            these.extend(parts.iter().map(|part| advise(part, libc::MADV_POPULATE_READ)));
            // The kernel maps pages around a read one. A copy of a page that is not mapped is
            // cheaper.
            let written = self.written.within(segment.range());
            these.extend(written.iter().map(|part| advise(part, libc::MADV_DONTNEED)));
            if calls.len() + these.len() > room {
                break;
            }
            calls.extend(these);
        }
        calls
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::segments::MappedMemory;

    /// The set with these pages, each part as its first page and the page behind it.
    fn run(written: &[(u64, u64)], read: &[(u64, u64)]) -> WorkingSet {
        let mut set = WorkingSet::default();
        written.iter().for_each(|(first, end)| set.written.insert(first * PAGE..end * PAGE));
        read.iter().for_each(|(first, end)| set.read.insert(first * PAGE..end * PAGE));
        set
    }

    #[test]
    fn a_working_set_has_the_pages_that_two_runs_touched() {
        let mut record = WorkingSetRecord::default();
        record.add(run(&[(10, 20), (30, 31)], &[(40, 50)]));
        assert!(record.is_open() && record.finished().is_none());
        record.add(run(&[(15, 16), (18, 31)], &[(35, 41), (49, 60)]));
        let common = run(&[(15, 16), (18, 20), (30, 31)], &[(40, 41), (49, 50)]);
        assert_eq!(record.finished(), Some(&common));
        record.add(run(&[], &[]));
        assert_eq!(record.finished(), Some(&common));
        record.abandon();
        assert_eq!(record.finished(), Some(&WorkingSet::default()));
    }

    #[test]
    fn pages_of_a_large_working_set_are_not_copied() {
        let at = |pages: u64| run(&[(10, 10 + pages)], &[]).copied();
        let whole = 10 * PAGE..(10 + MAX_WRITTEN) * PAGE;
        assert_eq!(at(MAX_WRITTEN), Vec::from_iter([whole]));
        assert_eq!(at(MAX_WRITTEN + 1), []);
        let scattered: Vec<_> = (10..1000).step_by(2).map(|page| (page, page + 1)).collect();
        assert_eq!(run(&scattered, &[]).copied().len(), MAX_RANGES);
    }

    #[test]
    fn a_template_maps_parts_of_its_own_segments_within_its_room() {
        let segment = |first: u64, protection: libc::c_int| MappedMemory {
            start: first * PAGE,
            len: 10 * PAGE,
            protection: protection as u64,
            reserved: false,
        };
        let read_only = segment(100, libc::PROT_READ | libc::PROT_EXEC);
        let writable = segment(200, libc::PROT_READ | libc::PROT_WRITE);
        let segments = Segments::default().place([read_only, writable, segment(300, 0)]);
        let set = run(&[(205, 206)], &[(95, 104), (201, 204), (207, 208), (301, 302), (400, 401)]);
        let calls = set.mapping_calls(&segments, 100);
        if is_memory_accounted() {
            return println!("SKIPPED: this host accounts memory strictly");
        }
        let (protect, advise) = (libc::SYS_mprotect as u64, libc::SYS_madvise as u64);
        let shown: Vec<_> = calls.iter().map(|c| (c[0], c[1] / PAGE, c[2] / PAGE, c[3])).collect();
        let write = libc::MADV_POPULATE_WRITE as u64;
        let read = libc::MADV_POPULATE_READ as u64;
        let expected = [
            (protect, 100, 10, 7),
            (advise, 100, 1, write),
            (protect, 100, 10, 5),
            (advise, 100, 4, read),
            (advise, 201, 1, write),
            (advise, 201, 3, read),
            (advise, 207, 1, read),
            (advise, 205, 1, libc::MADV_DONTNEED as u64),
        ];
        assert_eq!(shown, expected);
        assert_eq!(set.mapping_calls(&segments, 7), calls[..4]);
    }
}
