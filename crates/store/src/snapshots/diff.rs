//! Which pages differ between two snapshots.

use afresh_sys::{PAGE_SIZE, PageRange};

use crate::{OpenError, Origin, Snapshot};

/// The difference of two snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Runs of pages that differ; a page past the end of one counts as zero there.
    pub pages: Vec<PageRange>,
    /// Whether the guest states differ.
    pub state: bool,
    /// Whether the guest builds differ.
    pub guest: bool,
}

impl Difference {
    /// Number of pages that differ.
    #[must_use]
    pub fn page_count(&self) -> usize {
        self.pages.iter().map(|range| range.len).sum()
    }
}

/// Compares two snapshots. Pages at the same place of the same layer are equal and not read, so the
/// comparison of relatives costs the pages that changed.
///
/// # Errors
/// [`OpenError`] when pages cannot be read or are damaged.
pub fn diff(a: &Snapshot, b: &Snapshot) -> Result<Difference, OpenError> {
    const BATCH: usize = 256;
    let pages = a.pages().max(b.pages());
    let mut differing: Vec<PageRange> = Vec::new();
    let (mut left, mut right) = (vec![0; BATCH * PAGE_SIZE], vec![0; BATCH * PAGE_SIZE]);
    for range in candidates(a, b, pages) {
        for first in (range.start..range.end()).step_by(BATCH) {
            let bytes = BATCH.min(range.end() - first) * PAGE_SIZE;
            a.read_padded(first, &mut left[..bytes])?;
            b.read_padded(first, &mut right[..bytes])?;
            let pairs = left[..bytes].chunks(PAGE_SIZE).zip(right[..bytes].chunks(PAGE_SIZE));
            for (n, _) in pairs.enumerate().filter(|(_, (l, r))| l != r) {
                match differing.last_mut() {
                    Some(last) if last.end() == first + n => last.len += 1,
                    _ => differing.push(PageRange::new(first + n, 1)),
                }
            }
        }
    }
    Ok(Difference {
        pages: differing,
        state: a.state() != b.state(),
        guest: a.guest() != b.guest(),
    })
}

/// The runs that the two maps take from different places.
fn candidates(a: &Snapshot, b: &Snapshot, pages: usize) -> Vec<PageRange> {
    let mut out: Vec<PageRange> = Vec::new();
    let mut at = 0;
    while at < pages {
        let (left, left_len) = origin(a, at, pages);
        let (right, right_len) = origin(b, at, pages);
        let len = left_len.min(right_len);
        if left != right {
            match out.last_mut() {
                Some(last) if last.end() == at => last.len += len,
                _ => out.push(PageRange::new(at, len)),
            }
        }
        at += len;
    }
    out
}

/// Where page `at` is, by content (`None` for zero), and how many pages from there on follow it.
fn origin(s: &Snapshot, at: usize, pages: usize) -> (Option<([u8; 32], u64)>, usize) {
    match s.map().within(PageRange::new(at, pages - at)).next() {
        None => (None, pages - at),
        Some(run) => match run.origin {
            Origin::Zero => (None, run.pages.len),
            Origin::Layer { layer, stored } => {
                (Some((*s.layers()[layer].root(), stored)), run.pages.len)
            }
            // The root of the last turn stands for the result of all of them.
            Origin::Turn { page } => {
                (s.turned_root().map(|root| (root, page as u64)), run.pages.len)
            }
        },
    }
}
