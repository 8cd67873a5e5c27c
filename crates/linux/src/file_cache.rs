//! A cache of mapped files, in a memory file that guest processes map copy-on-write.
//!
//! A page that a program does not touch costs it nothing then, and one that it only reads is shared
//! by all its processes. Written into private memory, each page cost a fault in advance: two thirds
//! of the loading time of a large library.
//!
//! Promises: a process shows the content that a file had when its bytes were first mapped,
//! regardless of later changes; memory without a process and without an image is released, except
//! memory that a fork of this process may use; and the cache keeps to a budget, in addition to a
//! guest's own memory. May break it: dropping a [`MappedRange`] before its mapping is removed,
//! because its pages become zero.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use afresh_files::{FileVersion, Node, Refused, Tree};
use afresh_memory::{BorrowedFile, FileOwner, Image, ImageError, PageRange};
use afresh_sys::fork::Epoch;
use afresh_sys::{Memfd, PAGE_SIZE};
use rustix::io::Errno;

use crate::host_file_cache;
use crate::host_files::HostFiles;
use crate::platform::PlatformError;
use crate::ranges::Ranges;
use crate::text_twin::TextTwin;
use crate::window_charge::{WindowBudget, WindowCharge};

const PAGE: u64 = PAGE_SIZE as u64;
/// Bytes that are copied at a time.
const CHUNK_SIZE: u64 = 256 << 10;
/// Maximum files that are remembered.
const MAX_FILES: usize = 4096;

/// The contents of the files that a guest has mapped: unchanged host files are in the cache that
/// all guests share, all others in the guest's memory file.
#[derive(Debug, Default)]
pub(crate) struct FileCache {
    place: Option<Arc<CacheFile>>,
    /// By whether it is the twin of the file.
    known: BTreeMap<(Node, bool), CacheEntry>,
    /// Twins of files, or that they have none.
    twins: BTreeMap<Node, (FileVersion, Option<Arc<TextTwin>>)>,
    /// Whether texts are mapped as their twins.
    pub(crate) shows_twins: bool,
    /// Memory of windows, which the budget of the cache contains.
    windows: WindowBudget,
    /// The files of the host that are mapped themselves, in a run that no state is frozen of.
    host_files: Option<HostFiles>,
}

#[derive(Debug)]
struct CacheEntry {
    /// The file as it is here.
    version: FileVersion,
    cached: Weak<CachedFile>,
}

/// A memory file.
#[derive(Debug)]
pub(crate) struct CacheFile {
    file: Memfd,
    /// Where the next of the files in it begins.
    end: Mutex<u64>,
    /// Bytes in it.
    holds: AtomicU64,
}

impl CacheFile {
    /// An empty one; `None` where the host has none to give.
    pub(crate) fn new() -> Option<Arc<Self>> {
        let file = Memfd::new(c"afresh-contents").ok()?;
        let (end, holds) = (Mutex::new(0), AtomicU64::new(0));
        Some(Arc::new(Self { file, end, holds }))
    }

    /// Bytes in it.
    pub(crate) fn holds(&self) -> u64 {
        self.holds.load(Ordering::Relaxed)
    }

    /// Room for a file of `size` bytes, whole pages, or for its `twin`.
    pub(crate) fn room(
        self: &Arc<Self>,
        size: u64,
        twin: Option<Arc<TextTwin>>,
    ) -> Option<Arc<CachedFile>> {
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        let range = *end..end.checked_add(size).filter(|end| *end < i64::MAX as u64)?;
        self.file.set_len(range.end as usize).ok()?;
        *end = range.end;
        let (place, filled, lent) = (self.clone(), Mutex::default(), BorrowedFile::default());
        Some(Arc::new(CachedFile { place, range, filled, lent, twin, made: Epoch::now() }))
    }
}

/// The cached bytes of a file.
#[derive(Debug)]
pub(crate) struct CachedFile {
    place: Arc<CacheFile>,
    range: Range<u64>,
    /// The parts that are filled.
    filled: Mutex<Ranges>,
    /// The parts that images show.
    lent: BorrowedFile,
    /// The twin, if it has the bytes of that.
    twin: Option<Arc<TextTwin>>,
    /// A process that was forked since has them as well, and neither takes them from the other.
    made: Epoch,
}

impl FileOwner for CachedFile {
    fn file(&self) -> &Memfd {
        &self.place.file
    }

    fn part(&self) -> PageRange {
        let Range { start, end } = self.range;
        PageRange::new((start / PAGE) as usize, ((end - start) / PAGE) as usize)
    }
}

impl CachedFile {
    /// Bytes that are filled.
    pub(crate) fn bytes(&self) -> u64 {
        let filled = self.filled.lock().unwrap_or_else(PoisonError::into_inner);
        filled.iter().map(|range| range.end - range.start).sum()
    }

    /// The bytes from `offset` on, as [`FileCache::show`] returns them. Pages that it loads count
    /// in `holds`.
    pub(crate) fn show(
        self: &Arc<Self>,
        (tree, node): (&Tree, Node),
        wanted: Range<u64>,
        most: u64,
        holds: &dyn Fn() -> bool,
    ) -> Result<Option<(MappedRange, u64)>, Refused> {
        let mut filled = self.filled.lock().unwrap_or_else(PoisonError::into_inner);
        let mut missing = Ranges::default();
        missing.insert(wanted.clone());
        filled.within(wanted.clone()).into_iter().for_each(|there| missing.remove(there));
        for part in missing.iter() {
            if !self.fill(tree, node, &part, most, holds)? {
                return Ok(None);
            }
            filled.insert(part);
        }
        let file = MappedFile::Cached(self.clone());
        let shown = MappedRange { file, offset: wanted.start };
        Ok(Some((shown, wanted.end - wanted.start)))
    }

    /// Brings a part of the file; whether there was room, and `holds`.
    fn fill(
        &self,
        tree: &Tree,
        node: Node,
        part: &Range<u64>,
        most: u64,
        holds: &dyn Fn() -> bool,
    ) -> Result<bool, Refused> {
        let bytes = part.end - part.start;
        let before = self.place.holds.fetch_add(bytes, Ordering::Relaxed);
        let fits = before.saturating_add(bytes) <= most;
        let filled = if fits { self.copy(tree, node, part) } else { Ok(false) };
        if matches!(filled, Ok(true)) && holds() {
            return filled;
        }
        self.give_back(part, bytes);
        filled.map(|_| false)
    }

    fn copy(&self, tree: &Tree, node: Node, part: &Range<u64>) -> Result<bool, Refused> {
        let mut buffer = Vec::new();
        for at in part.clone().step_by(CHUNK_SIZE as usize) {
            buffer.resize((part.end - at).min(CHUNK_SIZE) as usize, 0);
            let mut read = tree.read(node, at, &mut buffer)?;
            if let Some(twin) = &self.twin {
                // It may end behind the last byte of the file.
                buffer[read..].fill(0);
                read = buffer.len();
                twin.apply(at, &mut buffer);
            }
            let to = (self.range.start + at) as usize;
            if self.place.file.write_at(&buffer[..read], to).is_err() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Releases the memory of a part of the file, with `bytes` counted bytes.
    fn give_back(&self, part: &Range<u64>, bytes: u64) {
        if part.is_empty() || !self.made.is_current() {
            return;
        }
        let first = (self.range.start + part.start) / PAGE;
        let pages = PageRange::new(first as usize, ((part.end - part.start) / PAGE) as usize);
        // Refused, it keeps its memory, which counts until the place goes.
        if self.place.file.punch_hole(pages).is_ok() {
            self.place.holds.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

impl Drop for CachedFile {
    fn drop(&mut self) {
        let filled = self.filled.get_mut().unwrap_or_else(PoisonError::into_inner);
        let bytes = filled.iter().map(|range| range.end - range.start).sum();
        self.give_back(&(0..self.range.end - self.range.start), bytes);
    }
}

/// The file that a mapping shows.
#[derive(Clone, Debug)]
enum MappedFile {
    Cached(Arc<CachedFile>),
    /// The file of the host itself.
    Host(Arc<File>),
}

/// Bytes of a file that a mapping shows.
#[derive(Clone, Debug)]
pub(crate) struct MappedRange {
    file: MappedFile,
    /// Where they begin in the file.
    offset: u64,
}

/// Two are equal when they are the same bytes of the same file.
impl PartialEq for MappedRange {
    fn eq(&self, other: &Self) -> bool {
        let same = match (&self.file, &other.file) {
            (MappedFile::Cached(one), MappedFile::Cached(other)) => Arc::ptr_eq(one, other),
            (MappedFile::Host(one), MappedFile::Host(other)) => Arc::ptr_eq(one, other),
            _ => false,
        };
        same && self.offset == other.offset
    }
}

impl Eq for MappedRange {}

impl MappedRange {
    /// The same, `bytes` bytes further on.
    pub(crate) fn from(&self, bytes: u64) -> Self {
        Self { file: self.file.clone(), offset: self.offset + bytes }
    }

    /// The first `len` bytes, whole pages that a process shows, as an image that shares their
    /// memory.
    pub(crate) fn image(&self, len: u64) -> Result<Image, ImageError> {
        let MappedFile::Cached(cached) = &self.file else {
            return Err(ImageError::Filler(
                "a run without a frozen state maps host files".to_owned(),
            ));
        };
        let lender: Arc<dyn FileOwner> = cached.clone();
        let pages = PageRange::new((self.offset / PAGE) as usize, (len / PAGE) as usize);
        let wanted = self.offset..self.offset + len;
        let there = cached.filled.lock().unwrap_or_else(PoisonError::into_inner);
        if there.within(wanted.clone()).as_slice() != std::slice::from_ref(&wanted) {
            return Err(ImageError::Filler("a file's bytes are shown before they came".to_owned()));
        }
        // SAFETY: a filled range is written once before its use, and released after its last
        // reference.
        unsafe { cached.lent.image(&lender, pages) }
    }

    /// The memory file or the host file, for reading: a guest's process must not change what others
    /// show.
    pub(crate) fn file(&self) -> Result<BorrowedFd<'_>, PlatformError> {
        let failed =
            |error| PlatformError::kernel("opening a file of the cache", io::Error::other(error));
        match &self.file {
            MappedFile::Cached(cached) => cached.place.file.read_only().map_err(failed),
            MappedFile::Host(file) => Ok(file.as_fd()),
        }
    }

    /// Whether both are in one memory file, or of one host file.
    pub(crate) fn shares_file(&self, other: &Self) -> bool {
        match (&self.file, &other.file) {
            (MappedFile::Cached(one), MappedFile::Cached(other)) => {
                Arc::ptr_eq(&one.place, &other.place)
            }
            (MappedFile::Host(one), MappedFile::Host(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// The call that maps `len` bytes of it at `start`; `descriptor` is the file's in the process.
    pub(crate) fn order(&self, start: u64, len: u64, protection: u64, descriptor: u64) -> [u64; 7] {
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let at = match &self.file {
            MappedFile::Cached(cached) => cached.range.start + self.offset,
            MappedFile::Host(_) => self.offset,
        };
        [libc::SYS_mmap as u64, start, len, protection, flags as u64, descriptor, at]
    }
}

impl FileCache {
    /// The fraction of the memory limit that the cache may take in addition: one divided by this.
    pub(crate) const SHARE: u64 = 4;

    /// The bytes of a file from `offset` on, which begins a page, as a mapping contains them: whole
    /// pages, at most `len` bytes and at most the rest of the file. `None` if they do not fit
    /// within `most` bytes, or no memory file can be made. The twin of a text is shown if that is
    /// mapped whole, to be executed only.
    ///
    /// # Errors
    /// Why the file cannot be read.
    pub(crate) fn show(
        &mut self,
        tree: &Tree,
        node: Node,
        wanted: (u64, u64, u64),
        most: u64,
    ) -> Result<Option<(MappedRange, u64)>, Errno> {
        let (offset, len, protection) = wanted;
        let size = tree.stat(node)?.size;
        let end = offset.saturating_add(len).min(size);
        if offset >= end {
            return Ok(None);
        }
        let wanted = offset..end.next_multiple_of(PAGE);
        let access = protection as i32 & (libc::PROT_EXEC | libc::PROT_WRITE);
        let twin = if self.shows_twins && access == libc::PROT_EXEC {
            self.twin(tree, node).filter(|twin| twin.is_within(&wanted))
        } else {
            None
        };
        if let Some(host_files) = self.host_files.as_mut().filter(|_| twin.is_none())
            && let Some(file) = host_files.find(tree, node)
        {
            let shown = MappedRange { file: MappedFile::Host(file), offset: wanted.start };
            return Ok(Some((shown, wanted.end - wanted.start)));
        }
        if let Some(shared) = host_file_cache::show((tree, node), wanted.clone(), twin.as_ref())? {
            return Ok(Some(shared));
        }
        let most = most.saturating_sub(self.windows.bytes());
        match self.cached_file(tree, node, size.next_multiple_of(PAGE), twin) {
            Some(cached) => Ok(cached.show((tree, node), wanted, most, &|| true)?),
            None => Ok(None),
        }
    }

    /// Maps unchanged host files themselves, without a copy of their bytes. Mappings then show what
    /// the host writes to them, as in any process of the host, and no state of the guest can be
    /// frozen.
    pub(crate) fn map_host_files(&mut self) {
        self.host_files = Some(HostFiles::default());
    }

    /// Charges `charge` for a window of `bytes`, within a cache of at most `most` bytes. Returns
    /// whether there was room.
    pub(crate) fn charge_window(&self, charge: &mut WindowCharge, bytes: u64, most: u64) -> bool {
        let files = self.place.as_ref().map_or(0, |place| place.holds());
        let room = most.saturating_sub(files).saturating_sub(self.windows.bytes());
        charge.grow(&self.windows, bytes.next_multiple_of(PAGE), room)
    }

    /// The twin of a file in its present version.
    fn twin(&mut self, tree: &Tree, node: Node) -> Option<Arc<TextTwin>> {
        if let Some((version, twin)) = self.twins.get(&node)
            && tree.is_version(node, version)
        {
            return twin.clone();
        }
        let version = tree.version(node).ok()?;
        let twin = host_file_cache::twin((tree, node));
        if self.twins.len() >= MAX_FILES {
            self.twins.clear();
        }
        self.twins.insert(node, (version, twin.clone()));
        twin
    }

    /// The cached file of `size` bytes, in its present version, or its `twin`.
    fn cached_file(
        &mut self,
        tree: &Tree,
        node: Node,
        size: u64,
        twin: Option<Arc<TextTwin>>,
    ) -> Option<Arc<CachedFile>> {
        let key = (node, twin.is_some());
        if let Some(known) = self.known.get(&key)
            && tree.is_version(node, &known.version)
            && let Some(cached) = known.cached.upgrade()
        {
            return Some(cached);
        }
        let place = match &self.place {
            Some(place) => place.clone(),
            None => self.place.insert(CacheFile::new()?).clone(),
        };
        let cached = place.room(size, twin)?;
        if self.known.len() >= MAX_FILES {
            self.known.retain(|_, known| known.cached.strong_count() > 0);
        }
        if self.known.len() < MAX_FILES {
            let version = tree.version(node).ok()?;
            self.known.insert(key, CacheEntry { version, cached: Arc::downgrade(&cached) });
        }
        Some(cached)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use afresh_files::{Budget, Time};
    use afresh_sys::run_isolated;

    fn tree(pages: u64) -> (Tree, Node) {
        let mut tree = Tree::new(Budget::default());
        let bytes = vec![1; (pages * PAGE) as usize];
        tree.write_path("/a", &bytes, Time::default()).unwrap();
        let node = tree.find("/a").unwrap();
        (tree, node)
    }

    fn cached(shown: &MappedRange) -> &Arc<CachedFile> {
        match &shown.file {
            MappedFile::Cached(cached) => cached,
            MappedFile::Host(_) => unreachable!("no host files are mapped here"),
        }
    }

    fn holds(contents: &FileCache) -> u64 {
        contents.place.as_ref().unwrap().holds()
    }

    #[test]
    fn bytes_of_a_file_are_cached_once_while_they_are_mapped() {
        let ((tree, node), mut contents) = (tree(8), FileCache::default());
        let mut show = |tree: &Tree, from: u64, len: u64| {
            contents.show(tree, node, (from * PAGE, len * PAGE, 1), u64::MAX).unwrap().unwrap()
        };
        let (whole, len) = show(&tree, 0, 20);
        assert_eq!(len, 8 * PAGE, "as many pages as the file has");
        let (part, _) = show(&tree, 2, 3);
        assert!(Arc::ptr_eq(cached(&whole), cached(&part)));
        // A file that was changed is another.
        let mut later = tree.clone();
        later.write(node, 0, b"new", Time::default()).unwrap();
        let (other, _) = show(&later, 0, 1);
        assert!(!Arc::ptr_eq(cached(&whole), cached(&other)));
        assert_eq!(holds(&contents), 9 * PAGE);
        drop((whole, other));
        assert_eq!(holds(&contents), 8 * PAGE);
        drop(part);
        assert_eq!(holds(&contents), 0);
    }

    #[test]
    fn a_file_over_the_budget_is_not_cached_and_costs_nothing() {
        let ((tree, node), mut contents) = (tree(8), FileCache::default());
        let kept = contents.show(&tree, node, (0, PAGE, 1), 4 * PAGE).unwrap();
        assert!(kept.is_some());
        assert!(contents.show(&tree, node, (0, 8 * PAGE, 1), 4 * PAGE).unwrap().is_none());
        assert!(contents.show(&tree, node, (8 * PAGE, PAGE, 1), 4 * PAGE).unwrap().is_none());
        assert_eq!(holds(&contents), PAGE);
        // A refused range does not count as filled.
        let (whole, _) = contents.show(&tree, node, (0, 8 * PAGE, 1), 8 * PAGE).unwrap().unwrap();
        let mut bytes = vec![0; 8 * PAGE_SIZE];
        rustix::io::pread(whole.file().unwrap(), &mut bytes, cached(&whole).range.start).unwrap();
        assert_eq!(bytes, [1; 8 * PAGE_SIZE]);
        assert!(rustix::io::pwrite(whole.file().unwrap(), &bytes, 0).is_err());
        drop((kept, whole));
        assert_eq!(holds(&contents), 0);
    }

    #[test]
    fn an_image_shares_what_is_shown_and_keeps_it() {
        let ((tree, node), mut contents) = (tree(8), FileCache::default());
        let (shown, _) =
            contents.show(&tree, node, (2 * PAGE, 3 * PAGE, 1), u64::MAX).unwrap().unwrap();
        let image = shown.image(3 * PAGE).unwrap();
        let part = shown.from(PAGE).image(PAGE).unwrap();
        assert_eq!(image.page(1).unwrap().as_ptr(), part.page(0).unwrap().as_ptr());
        assert_eq!((image.pages(), image.page(2)), (3, Some(&[1; PAGE_SIZE])));
        assert!(shown.image(4 * PAGE).is_err(), "its last page was never read");
        drop((shown, part));
        assert_eq!(holds(&contents), 3 * PAGE);
        drop(image);
        assert_eq!(holds(&contents), 0);
    }

    #[test]
    fn neither_a_fork_of_the_process_nor_the_process_takes_from_the_other() {
        const NAME: &str =
            "file_cache::tests::neither_a_fork_of_the_process_nor_the_process_takes_from_the_other";
        run_isolated(NAME, || {
            let ((tree, node), mut contents) = (tree(8), FileCache::default());
            let (shown, _) =
                contents.show(&tree, node, (0, 8 * PAGE, 1), u64::MAX).unwrap().unwrap();
            let mut image = Some(shown.image(8 * PAGE).unwrap());
            drop((shown, contents));
            let whole = |image: &Option<Image>| {
                let page = |page| image.as_ref().and_then(|image| image.page(page));
                (0..8).all(|number| page(number) == Some(&[1; PAGE_SIZE]))
            };
            let child = forked(|| {
                image = None;
                true
            });
            assert!(ended_well(child) && whole(&image));

            let (mut told, mut tells) = std::io::pipe().unwrap();
            let child = forked(|| told.read_exact(&mut [0]).is_ok() && whole(&image));
            image = None;
            tells.write_all(&[1]).unwrap();
            assert!(ended_well(child) && image.is_none());
        });
    }

    /// A child that runs this, and exits with its result.
    fn forked(work: impl FnOnce() -> bool) -> libc::pid_t {
        // SAFETY: there is one thread, and the child uses nothing but the allocator, which the C
        // library's fork keeps whole.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let good = work();
            // SAFETY: ends the child and nothing else.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        child
    }

    fn ended_well(child: libc::pid_t) -> bool {
        let mut status = 0;
        // SAFETY: waits for a child of this process.
        unsafe { libc::waitpid(child, &mut status, 0) == child && status == 0 }
    }
}
