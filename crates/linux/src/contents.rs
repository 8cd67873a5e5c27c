//! What mapped files hold, in a memory file of the guest's host, which its processes map copy-on-write.
//!
//! A page that a program does not touch costs it nothing then, and one that it only reads is shared by all its processes. Written into
//! private memory, each page cost a fault before anybody asked for it: two thirds of what a large library took to load.
//!
//! Promises: a process shows what the file held when its bytes were first mapped, whatever becomes of the file; memory that no
//! process shows any more is given back; and what lies here beside a guest's own memory keeps to a budget. May break it: whoever
//! lets go of [`Shown`] before the mapping is gone, for its pages become zero.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use afresh_files::{FileVersion, Node, Refused, Tree};
use afresh_memory::PageRange;
use afresh_sys::{Memfd, PAGE_SIZE};
use rustix::io::Errno;

use crate::ranges::Ranges;

const PAGE: u64 = PAGE_SIZE as u64;
/// Bytes that are copied at a time.
const AT_ONCE: u64 = 256 << 10;
/// Files that are remembered.
const KNOWN: usize = 4096;

/// The memory file of a guest, and what lies where in it.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    place: Option<Arc<Place>>,
    /// Where the next file begins.
    end: u64,
    known: BTreeMap<Node, Known>,
}

/// The memory file.
#[derive(Debug)]
struct Place {
    file: Memfd,
    /// Bytes in it.
    holds: AtomicU64,
}

#[derive(Debug)]
struct Known {
    /// The file as it is here.
    version: FileVersion,
    lies: Weak<Lies>,
}

/// Where a file's bytes lie.
#[derive(Debug)]
struct Lies {
    place: Arc<Place>,
    range: Range<u64>,
    /// What of them is there.
    filled: Mutex<Ranges>,
}

impl Lies {
    /// Brings a part of the file; whether there was room.
    fn fill(&self, tree: &Tree, node: Node, part: &Range<u64>, most: u64) -> Result<bool, Refused> {
        let bytes = part.end - part.start;
        let before = self.place.holds.fetch_add(bytes, Ordering::Relaxed);
        let fits = before.saturating_add(bytes) <= most;
        let filled = if fits { self.copy(tree, node, part) } else { Ok(false) };
        if !matches!(filled, Ok(true)) {
            self.give_back(part, bytes);
        }
        filled
    }

    fn copy(&self, tree: &Tree, node: Node, part: &Range<u64>) -> Result<bool, Refused> {
        let mut buffer = Vec::new();
        for at in part.clone().step_by(AT_ONCE as usize) {
            buffer.resize((part.end - at).min(AT_ONCE) as usize, 0);
            let read = tree.read(node, at, &mut buffer)?;
            let to = (self.range.start + at) as usize;
            if self.place.file.write_at(&buffer[..read], to).is_err() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Gives the memory of a part of the file back, in which so many bytes were counted.
    fn give_back(&self, part: &Range<u64>, bytes: u64) {
        let first = (self.range.start + part.start) / PAGE;
        let pages = PageRange::new(first as usize, ((part.end - part.start) / PAGE) as usize);
        // Refused, it keeps its memory, which counts until the guest ends.
        if self.place.file.punch_hole(pages).is_ok() {
            self.place.holds.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

impl Drop for Lies {
    fn drop(&mut self) {
        let filled = self.filled.get_mut().unwrap_or_else(PoisonError::into_inner);
        let bytes = filled.iter().map(|range| range.end - range.start).sum();
        self.give_back(&(0..self.range.end - self.range.start), bytes);
    }
}

/// Bytes of a file that a mapping shows.
#[derive(Clone, Debug)]
pub(crate) struct Shown {
    lies: Arc<Lies>,
    /// Where they begin in the file.
    offset: u64,
}

/// Two are equal when they are the same bytes of the same file.
impl PartialEq for Shown {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.lies, &other.lies) && self.offset == other.offset
    }
}

impl Eq for Shown {}

impl Shown {
    /// The memory file.
    pub(crate) fn file(&self) -> std::os::fd::BorrowedFd<'_> {
        self.lies.place.file.as_fd()
    }

    /// The call that maps `len` bytes of it at `start`; `descriptor` is the memory file's in the process.
    pub(crate) fn order(&self, start: u64, len: u64, protection: u64, descriptor: u64) -> [u64; 7] {
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let at = self.lies.range.start + self.offset;
        [libc::SYS_mmap as u64, start, len, protection, flags as u64, descriptor, at]
    }
}

impl Contents {
    /// The part of a guest's memory limit that may lie here besides: one of so many.
    pub(crate) const SHARE: u64 = 4;

    /// The bytes of a file from `offset` on, which begins a page, as a mapping shows them: so many, whole pages, at most `len` and as
    /// many as the file has. `None` where there is no room beside `most` bytes, or no memory file to be had.
    ///
    /// # Errors
    /// Why the file cannot be read.
    pub(crate) fn show(
        &mut self,
        tree: &Tree,
        node: Node,
        offset: u64,
        len: u64,
        most: u64,
    ) -> Result<Option<(Shown, u64)>, Errno> {
        let size = tree.stat(node)?.size;
        let (end, size) = (offset.saturating_add(len).min(size), size.next_multiple_of(PAGE));
        if offset >= end {
            return Ok(None);
        }
        let wanted = offset..end.next_multiple_of(PAGE);
        let Some(lies) = self.lies(tree, node, size) else { return Ok(None) };
        let mut filled = lies.filled.lock().unwrap_or_else(PoisonError::into_inner);
        let mut missing = Ranges::default();
        missing.insert(wanted.clone());
        filled.within(wanted.clone()).into_iter().for_each(|there| missing.remove(there));
        for part in missing.iter() {
            if !lies.fill(tree, node, &part, most)? {
                return Ok(None);
            }
            filled.insert(part);
        }
        drop(filled);
        Ok(Some((Shown { lies, offset }, wanted.end - wanted.start)))
    }

    /// Where a file of `size` bytes lies, as it is now.
    fn lies(&mut self, tree: &Tree, node: Node, size: u64) -> Option<Arc<Lies>> {
        if let Some(known) = self.known.get(&node)
            && tree.is_version(node, &known.version)
            && let Some(lies) = known.lies.upgrade()
        {
            return Some(lies);
        }
        let place = match &self.place {
            Some(place) => place.clone(),
            None => {
                let file = Memfd::new(c"afresh-contents").ok()?;
                let place = Arc::new(Place { file, holds: AtomicU64::new(0) });
                self.place.insert(place).clone()
            }
        };
        let range = self.end..self.end.checked_add(size).filter(|end| *end < i64::MAX as u64)?;
        place.file.set_len(range.end as usize).ok()?;
        self.end = range.end;
        let lies = Arc::new(Lies { place, range, filled: Mutex::default() });
        if self.known.len() >= KNOWN {
            self.known.retain(|_, known| known.lies.strong_count() > 0);
        }
        if self.known.len() < KNOWN {
            let version = tree.version(node).ok()?;
            self.known.insert(node, Known { version, lies: Arc::downgrade(&lies) });
        }
        Some(lies)
    }
}

/// Where a process shows contents.
#[derive(Clone, Debug, Default)]
pub(crate) struct Showing {
    /// Start to end, and what is shown from the start on; no two overlap.
    map: BTreeMap<u64, (u64, Shown)>,
}

impl Showing {
    pub(crate) fn insert(&mut self, range: Range<u64>, shown: Shown) {
        self.remove(range.clone());
        self.map.insert(range.start, (range.end, shown));
    }

    pub(crate) fn remove(&mut self, range: Range<u64>) {
        while let Some((&start, (end, _))) = self.map.range(..range.end).next_back() {
            if *end <= range.start {
                break;
            }
            let Some((end, shown)) = self.map.remove(&start) else { break };
            if end > range.end {
                let offset = shown.offset + (range.end - start);
                self.map.insert(range.end, (end, Shown { offset, ..shown.clone() }));
            }
            if start < range.start {
                self.map.insert(start, (range.start, shown));
            }
        }
    }

    /// The parts of `range` that show contents, in order.
    pub(crate) fn within(&self, range: Range<u64>) -> Vec<(Range<u64>, Shown)> {
        let parts = self.map.range(..range.end).rev();
        let parts = parts.take_while(|(_, (end, _))| *end > range.start);
        let mut parts: Vec<_> = parts
            .map(|(&start, (end, shown))| {
                let part = start.max(range.start)..(*end).min(range.end);
                let offset = shown.offset + (part.start - start);
                (part, Shown { offset, ..shown.clone() })
            })
            .collect();
        parts.reverse();
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use afresh_files::{Budget, Time};

    fn tree(pages: u64) -> (Tree, Node) {
        let mut tree = Tree::new(Budget::default());
        let bytes = vec![1; (pages * PAGE) as usize];
        tree.write_path("/a", &bytes, Time::default()).unwrap();
        let node = tree.find("/a").unwrap();
        (tree, node)
    }

    fn holds(contents: &Contents) -> u64 {
        contents.place.as_ref().unwrap().holds.load(Ordering::Relaxed)
    }

    #[test]
    fn bytes_of_a_file_lie_there_once_as_long_as_somebody_shows_them() {
        let ((tree, node), mut contents) = (tree(8), Contents::default());
        let mut show = |tree: &Tree, from: u64, len: u64| {
            contents.show(tree, node, from * PAGE, len * PAGE, u64::MAX).unwrap().unwrap()
        };
        let (whole, len) = show(&tree, 0, 20);
        assert_eq!(len, 8 * PAGE, "as many pages as the file has");
        let (part, _) = show(&tree, 2, 3);
        assert!(Arc::ptr_eq(&whole.lies, &part.lies));
        // A file that was changed is another.
        let mut later = tree.clone();
        later.write(node, 0, b"new", Time::default()).unwrap();
        let (other, _) = show(&later, 0, 1);
        assert!(!Arc::ptr_eq(&whole.lies, &other.lies));
        assert_eq!(holds(&contents), 9 * PAGE);
        drop((whole, other));
        assert_eq!(holds(&contents), 8 * PAGE);
        drop(part);
        assert_eq!(holds(&contents), 0);
    }

    #[test]
    fn what_is_over_the_budget_is_not_there_and_costs_nothing() {
        let ((tree, node), mut contents) = (tree(8), Contents::default());
        let kept = contents.show(&tree, node, 0, PAGE, 4 * PAGE).unwrap();
        assert!(kept.is_some());
        assert!(contents.show(&tree, node, 0, 8 * PAGE, 4 * PAGE).unwrap().is_none());
        assert!(contents.show(&tree, node, 8 * PAGE, PAGE, 4 * PAGE).unwrap().is_none());
        assert_eq!(holds(&contents), PAGE);
        // What was refused is not taken for what is there.
        let (whole, _) = contents.show(&tree, node, 0, 8 * PAGE, 8 * PAGE).unwrap().unwrap();
        let mut bytes = vec![0; 8 * PAGE_SIZE];
        rustix::io::pread(whole.file(), &mut bytes, whole.lies.range.start).unwrap();
        assert_eq!(bytes, [1; 8 * PAGE_SIZE]);
        drop((kept, whole));
        assert_eq!(holds(&contents), 0);
    }

    #[test]
    fn where_contents_show_is_what_was_put_in() {
        let ((tree, node), mut contents) = (tree(8), Contents::default());
        let (shown, _) = contents.show(&tree, node, 0, 8 * PAGE, u64::MAX).unwrap().unwrap();
        let mut showing = Showing::default();
        showing.insert(10 * PAGE..18 * PAGE, shown.clone());
        showing.remove(12 * PAGE..14 * PAGE);
        showing.insert(16 * PAGE..17 * PAGE, Shown { offset: 0, ..shown });
        let parts = showing.within(11 * PAGE..18 * PAGE);
        let parts: Vec<_> = parts
            .into_iter()
            .map(|(range, shown)| [range.start, range.end, shown.offset].map(|n| n / PAGE))
            .collect();
        assert_eq!(parts, [[11, 12, 1], [14, 16, 4], [16, 17, 0], [17, 18, 7]]);
    }
}
