//! The folio sizes of a file in the page cache: they decide the cost of a mapping.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use crate::{Advice, HUGE_PAGES, HUGE_SIZE, PAGE_SIZE, PageRange, Protection, Reservation};

/// Pages of a file by the size of the folio that holds them, in KiB; 0 for pages not in the cache.
pub type Folios = BTreeMap<usize, usize>;

const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;
const COMPOUND_HEAD: u64 = 1 << 15;
const COMPOUND_TAIL: u64 = 1 << 16;
/// Frames whose flags are read at once.
const BATCH: u64 = HUGE_PAGES as u64;

/// The parts of `range`, a view of a file, that the page cache holds.
fn cached(view: &Reservation, range: PageRange) -> Vec<PageRange> {
    match view.resident_pages(range) {
        0 => Vec::new(),
        n if n == range.len => vec![range],
        _ => {
            let half = range.len / 2;
            let mut runs = cached(view, PageRange::new(range.start, half));
            runs.extend(cached(view, PageRange::new(range.start + half, range.len - half)));
            runs
        }
    }
}

/// Counts the pages `range` of `file` by the size of their folio. `None` where this process may not
/// see page frames (`CAP_SYS_ADMIN`), or may not look at the file. Reads nothing from disk.
#[must_use]
pub fn of(file: impl AsFd, range: PageRange) -> Option<Folios> {
    let pages = range.len;
    if pages == 0 {
        return Some(Folios::new());
    }
    let flags_file = File::open("/proc/kpageflags").ok()?;
    let pagemap = File::open("/proc/self/pagemap").ok()?;
    let all = PageRange::new(0, pages);
    let view = Reservation::aligned(pages, HUGE_SIZE).ok()?;
    view.map_file(all, Protection::Read, file.as_fd(), range.start).ok()?;
    // Only cached pages: a page that is read in for the census would be counted as well.
    for run in cached(&view, all) {
        view.advise(run, Advice::PopulateRead).ok()?;
    }
    let mut entries = vec![0; pages * 8];
    let first = view.base().as_ptr() as usize / PAGE_SIZE * 8;
    pagemap.read_exact_at(&mut entries, first as u64).ok()?;
    let word = |bytes: &[u8]| {
        let mut word = [0; 8];
        word.copy_from_slice(bytes);
        u64::from_le_bytes(word)
    };
    // Frames of one folio follow one another, so flags are read in batches.
    let mut batch = (u64::MAX, vec![0; BATCH as usize * 8]);
    let mut flags = |frame: u64| {
        if frame / BATCH != batch.0 {
            let got = flags_file.read_at(&mut batch.1, frame / BATCH * BATCH * 8).ok()?;
            batch.1[got..].fill(0);
            batch.0 = frame / BATCH;
        }
        let at = (frame % BATCH) as usize * 8;
        Some(word(&batch.1[at..at + 8]))
    };
    let mut counts = Folios::new();
    let mut sizes: BTreeMap<u64, usize> = BTreeMap::new();
    for entry in entries.chunks_exact(8).map(word) {
        if entry & PRESENT == 0 {
            *counts.entry(0).or_default() += 1;
            continue;
        }
        let frame = entry & FRAME;
        if frame == 0 {
            return None;
        }
        // A tail does not show its head: walk to the head, then to the end. Folios are aligned to
        // their size, so a walk is short and each folio is walked once.
        let mut head = frame;
        while flags(head)? & COMPOUND_TAIL != 0 {
            head -= 1;
        }
        let size = match sizes.get(&head) {
            Some(size) => *size,
            None => {
                let mut end = head + 1;
                if flags(head)? & COMPOUND_HEAD != 0 {
                    while flags(end)? & COMPOUND_TAIL != 0 {
                        end += 1;
                    }
                }
                let size = (end - head) as usize;
                sizes.insert(head, size);
                size
            }
        };
        *counts.entry(size * PAGE_SIZE / 1024).or_default() += 1;
    }
    Some(counts)
}
