//! A cache of host files for all guests of this process: mapped libraries and programs are shared.
//!
//! Promises: a file is taken for a cached one only if its device, number, length and times are the
//! same, and were not set just now; the cache takes at most a sixteenth of the memory of the host
//! or control group, mapped or not, but 128 MiB in any case and at most 1 GiB; no release takes
//! bytes that a guest or an image shows; and a mapping of a guest holds the lock of the cache for a
//! bounded number of steps, whatever other guests have mapped. May break it: a program that changes
//! a host file without changing its times; a guest would see the old content.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use afresh_files::{HostFile, Node, Refused, Tree};
use afresh_sys::host::memory_size;
use afresh_sys::{InheritedCell, PAGE_SIZE, PerProcess};

use crate::file_cache::{CacheFile, CachedFile, MappedRange};
use crate::text_twin::TextTwin;

/// Maximum bytes of the cache on hosts with little and with much memory, and the share in between.
/// Node.js alone has 99 MB: where two interpreters do not fit together, each start of one copies
/// its file again.
const MIN_CACHE_BYTES: u64 = 128 << 20;
const MAX_CACHE_BYTES: u64 = 1 << 30;
const MEMORY_SHARE: u64 = 16;

/// Maximum files of the cache. Each takes memory of this process in addition to its bytes.
const MAX_CACHED_FILES: usize = 8192;
/// Maximum files that one mapping considers for eviction. Where they leave no room, the guest takes
/// the file into its own cache.
const MAX_EVICTION_SCAN: usize = 512;

static SHELF: PerProcess<Mutex<HostFileCache>> = PerProcess::new(Mutex::default);

/// Maximum bytes of the cache on this host, found once.
fn max_bytes() -> u64 {
    static MAX_BYTES: InheritedCell<u64> = InheritedCell::new();
    let found = || memory_size().map_or(0, |size| size / MEMORY_SHARE);
    *MAX_BYTES.get_or_make(|| found().clamp(MIN_CACHE_BYTES, MAX_CACHE_BYTES))
}

/// The limits of a cache.
#[derive(Clone, Copy)]
struct CacheLimits {
    bytes: u64,
    files: usize,
    eviction_scan: usize,
}

impl Default for CacheLimits {
    fn default() -> Self {
        let (files, eviction_scan) = (MAX_CACHED_FILES, MAX_EVICTION_SCAN);
        Self { bytes: max_bytes(), files, eviction_scan }
    }
}

/// A host file, and whether its bytes are those of its twin.
type CacheKey = (HostFile, bool);

/// The cache. All guests of this process wait for its lock, so that no call below it releases
/// memory, and a mapping looks at [`MAX_EVICTION_SCAN`] files at most. A release under memory
/// pressure ([`HostFileCache::take_unused`]) looks at all of them.
#[derive(Default)]
struct HostFileCache {
    limits: CacheLimits,
    place: Option<Arc<CacheFile>>,
    files: HashMap<CacheKey, HostFileEntry>,
    /// The files by the time of their last use.
    by_use: BTreeMap<u64, CacheKey>,
    /// Twins of files, or that they have none.
    twins: HashMap<HostFile, Option<Arc<TextTwin>>>,
    /// Counts requests.
    asked: u64,
}

struct HostFileEntry {
    cached: Arc<CachedFile>,
    /// The time of its last use.
    asked: u64,
}

/// Files that were taken out of the cache. The caller drops them without its lock, because the
/// kernel frees their pages then.
type EvictedFiles = Vec<Arc<CachedFile>>;

impl HostFileCache {
    /// The cached file, with room for `more` bytes of it, and files that made this room. `None`
    /// where the cache is full.
    fn cached_file(
        &mut self,
        host_file: HostFile,
        more: u64,
        twin: Option<Arc<TextTwin>>,
    ) -> (Option<Arc<CachedFile>>, EvictedFiles) {
        if more > self.limits.bytes {
            // No eviction makes so much room.
            return (None, Vec::new());
        }
        let key = (host_file, twin.is_some());
        let found = self.touch(&key);
        let Some(place) = self.place.clone().or_else(CacheFile::new) else {
            return (None, Vec::new());
        };
        self.place.get_or_insert_with(|| place.clone());
        let files = usize::from(found.is_none());
        let (has_room, evicted) = self.evict(&key, place.holds().saturating_add(more), files);
        if !has_room || found.is_some() {
            return (found.filter(|_| has_room), evicted);
        }
        let size = host_file.size().next_multiple_of(PAGE_SIZE as u64);
        let cached = place.room(size, twin);
        if let Some(cached) = &cached {
            // A file that was passed over has taken the last time.
            self.asked += 1;
            let entry = HostFileEntry { cached: cached.clone(), asked: self.asked };
            self.files.insert(key, entry);
            self.by_use.insert(self.asked, key);
        }
        (cached, evicted)
    }

    /// The file in the cache, which becomes the last used one.
    fn touch(&mut self, key: &CacheKey) -> Option<Arc<CachedFile>> {
        self.asked += 1;
        let entry = self.files.get_mut(key)?;
        self.by_use.remove(&entry.asked);
        entry.asked = self.asked;
        self.by_use.insert(entry.asked, *key);
        Some(entry.cached.clone())
    }

    /// Takes out unused files except `wanted`, the longest unused one first, until there is room
    /// for `bytes` bytes in all and `files` further files. Returns whether there is. Files that a
    /// guest or an image shows count as used now.
    fn evict(&mut self, wanted: &CacheKey, mut bytes: u64, files: usize) -> (bool, EvictedFiles) {
        let CacheLimits { bytes: max_bytes, files: max_files, eviction_scan } = self.limits;
        let mut evicted = Vec::new();
        for _ in 0..eviction_scan {
            if bytes <= max_bytes && self.files.len() + files <= max_files {
                break;
            }
            let Some((_, key)) = self.by_use.pop_first() else { break };
            let entry = self.files.get_mut(&key).expect("each file has its time of use");
            if key == *wanted || Arc::strong_count(&entry.cached) > 1 {
                self.asked += 1;
                entry.asked = self.asked;
                self.by_use.insert(self.asked, key);
                continue;
            }
            bytes = bytes.saturating_sub(entry.cached.bytes());
            evicted.extend(self.files.remove(&key).map(|entry| entry.cached));
        }
        (bytes <= max_bytes && self.files.len() + files <= max_files, evicted)
    }

    /// Takes out files that no guest and no image shows, with half of the bytes of all such files
    /// or a little more, the longest unused one first. Returns them with the sum of their bytes.
    fn take_unused(&mut self) -> (EvictedFiles, u64) {
        let unused = self.by_use.values().filter_map(|key| {
            let cached = &self.files.get(key)?.cached;
            (Arc::strong_count(cached) == 1).then(|| (*key, cached.bytes()))
        });
        let unused: Vec<_> = unused.collect();
        let wanted = unused.iter().map(|(_, bytes)| bytes).sum::<u64>().div_ceil(2);
        let (mut taken, mut released) = (Vec::new(), 0);
        for (key, bytes) in unused {
            if released >= wanted {
                break;
            }
            released += bytes;
            if let Some(entry) = self.files.remove(&key) {
                self.by_use.remove(&entry.asked);
                taken.push(entry.cached);
            }
        }
        (taken, released)
    }
}

/// Bytes of host files in the cache that all guests of this process share, whether a guest maps
/// them or not.
#[must_use]
pub fn cached_file_bytes() -> u64 {
    let shelf = SHELF.get().lock().unwrap_or_else(PoisonError::into_inner);
    shelf.place.as_ref().map_or(0, |place| place.holds())
}

/// Releases about half of the cached bytes that no guest and no snapshot uses, and returns their
/// number. A guest that maps the files again reads them from the host.
pub fn release_cached_files() -> u64 {
    let (unused, released) =
        SHELF.get().lock().unwrap_or_else(PoisonError::into_inner).take_unused();
    // The cache is not locked while the kernel frees their pages.
    drop(unused);
    released
}

/// Maximum files whose twins are remembered.
const MAX_TWINS: usize = 4096;

/// The twin of the text of a file, if it has one.
pub(crate) fn twin((tree, node): (&Tree, Node)) -> Option<Arc<TextTwin>> {
    let find = || {
        let read = |offset, len| {
            let mut bytes = vec![0; len];
            tree.read(node, offset, &mut bytes).ok().map(|_| bytes)
        };
        TextTwin::new(&read).map(Arc::new)
    };
    let Some(file) = tree.host_file(node).filter(HostFile::is_settled) else { return find() };
    let shelf = || SHELF.get().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = shelf().twins.get(&file) {
        return known.clone();
    }
    let found = find();
    // A change during the search has changed the times by its end.
    if tree.host_file(node) == Some(file) {
        let mut forgotten = HashMap::new();
        let mut shelf = shelf();
        if shelf.twins.len() >= MAX_TWINS {
            std::mem::swap(&mut shelf.twins, &mut forgotten);
        }
        shelf.twins.insert(file, found.clone());
        // The cache is not locked while the others are freed.
        drop(shelf);
    }
    found
}

/// The bytes of a file for a mapping, as [`FileCache::show`](crate::file_cache::FileCache::show)
/// returns them; `None` if it is not an unchanged host file, or the cache is full.
pub(crate) fn show(
    (tree, node): (&Tree, Node),
    wanted: Range<u64>,
    twin: Option<&Arc<TextTwin>>,
) -> Result<Option<(MappedRange, u64)>, Refused> {
    let Some(file) = tree.host_file(node).filter(HostFile::is_settled) else { return Ok(None) };
    let (cached, evicted) = {
        let mut shelf = SHELF.get().lock().unwrap_or_else(PoisonError::into_inner);
        shelf.cached_file(file, wanted.end - wanted.start, twin.cloned())
    };
    drop(evicted);
    let Some(cached) = cached else { return Ok(None) };
    // A change during the read has changed the times by its end.
    cached.show((tree, node), wanted, max_bytes(), &|| tree.host_file(node) == Some(file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use afresh_files::{Budget, Layer, Time};

    const PAGE: u64 = PAGE_SIZE as u64;

    fn over(directory: &std::path::Path) -> Tree {
        Tree::new(Budget::default()).with_layer("/", &Layer::directory(directory).unwrap()).unwrap()
    }

    fn mapped_range(tree: &Tree, path: &str) -> Option<MappedRange> {
        let node = tree.find(path).unwrap();
        show((tree, node), 0..PAGE, None).unwrap().map(|(shown, _)| shown)
    }

    #[test]
    fn a_host_file_is_cached_once_for_all_guests() {
        let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let (one, mut two) = (over(here), over(here));
        let (first, second) =
            (mapped_range(&one, "Cargo.toml").unwrap(), mapped_range(&two, "Cargo.toml"));
        assert_eq!(Some(first), second);
        // A file that a guest has changed is its own.
        let node = two.find("Cargo.toml").unwrap();
        two.write(node, 0, b"x", Time::default()).unwrap();
        assert!(mapped_range(&two, "Cargo.toml").is_none());
    }

    #[test]
    fn a_recently_changed_host_file_is_not_cached() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("new"), b"new").unwrap();
        assert!(mapped_range(&over(directory.path()), "new").is_none());
    }

    #[test]
    fn unmapped_files_make_room() {
        let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let tree = over(here);
        let file = |path: &str| tree.host_file(tree.find(path).unwrap()).unwrap();
        let mut shelf = HostFileCache::default();
        let node = tree.find("Cargo.toml").unwrap();
        let kept = shelf.cached_file(file("Cargo.toml"), PAGE, None).0.unwrap();
        let shown = kept.show((&tree, node), 0..PAGE, u64::MAX, &|| true).unwrap().unwrap().0;
        drop(kept);
        drop(shelf.cached_file(file("src/lib.rs"), PAGE, None));
        let has = |shelf: &HostFileCache, path| shelf.files.contains_key(&(file(path), false));
        for (bytes, evicts) in [(max_bytes() + 1, false), (max_bytes(), true)] {
            assert!(shelf.cached_file(file("src/subprocess.rs"), bytes, None).0.is_none());
            assert!(has(&shelf, "Cargo.toml"), "it is shown");
            assert_eq!(has(&shelf, "src/lib.rs"), !evicts, "there is never room for {bytes}");
        }
        drop(shown);
    }

    /// A tree with `files` host files of one page.
    fn many_files(files: usize) -> (tempfile::TempDir, Tree) {
        let directory = tempfile::tempdir().unwrap();
        for number in 0..files {
            std::fs::write(directory.path().join(format!("{number}")), [1; PAGE_SIZE]).unwrap();
        }
        let tree = over(directory.path());
        (directory, tree)
    }

    #[test]
    fn a_mapping_evicts_a_bounded_number_of_files_and_frees_none_of_them_under_the_lock() {
        let (_directory, tree) = many_files(40);
        let limits = CacheLimits { bytes: 30 * PAGE, files: 1000, eviction_scan: 8 };
        let mut shelf = HostFileCache { limits, ..HostFileCache::default() };
        let file = |number: usize| {
            let node = tree.find(format!("/{number}")).unwrap();
            (node, tree.host_file(node).unwrap())
        };
        let shown = |cached: &Arc<CachedFile>, node| {
            cached.show((&tree, node), 0..PAGE, u64::MAX, &|| true).unwrap().unwrap().0
        };
        for number in 0..30 {
            let (node, host_file) = file(number);
            let (cached, evicted) = shelf.cached_file(host_file, PAGE, None);
            assert!(evicted.is_empty());
            drop(shown(&cached.unwrap(), node));
        }
        let holds = |shelf: &HostFileCache| shelf.place.as_ref().unwrap().holds();
        // Room for 20 pages needs 20 evictions. A call makes 8.
        for left in [22, 14] {
            let (cached, evicted) = shelf.cached_file(file(30).1, 20 * PAGE, None);
            assert!(cached.is_none());
            assert_eq!((evicted.len(), shelf.files.len()), (8, left));
            assert_eq!(holds(&shelf), (left as u64 + 8) * PAGE, "the caller frees them");
            drop(evicted);
            assert_eq!(holds(&shelf), left as u64 * PAGE);
        }
        assert!(!shelf.files.contains_key(&(file(15).1, false)));
        assert!(shelf.files.contains_key(&(file(16).1, false)));
        let (cached, evicted) = shelf.cached_file(file(30).1, 20 * PAGE, None);
        assert!(cached.is_some());
        assert_eq!(evicted.len(), 4);
    }

    #[test]
    fn the_cache_has_a_bounded_number_of_files_and_keeps_those_in_use() {
        let (_directory, tree) = many_files(12);
        let file =
            |number: usize| tree.host_file(tree.find(format!("/{number}")).unwrap()).unwrap();
        let limits = CacheLimits { bytes: u64::MAX, files: 4, eviction_scan: 8 };
        let mut shelf = HostFileCache { limits, ..HostFileCache::default() };
        let kept: Vec<_> = (0..3).map(|n| shelf.cached_file(file(n), 0, None).0.unwrap()).collect();
        for number in 3..12 {
            assert!(shelf.cached_file(file(number), 0, None).0.is_some());
            assert_eq!((shelf.files.len(), shelf.by_use.len()), (4, 4));
        }
        assert!((0..3).all(|number| shelf.files.contains_key(&(file(number), false))));
        let other = shelf.cached_file(file(11), 0, None).0;
        assert!(shelf.cached_file(file(3), 0, None).0.is_none(), "all are in use");
        drop((kept, other));
        assert!(shelf.cached_file(file(3), 0, None).0.is_some());
    }

    #[test]
    fn a_release_takes_half_of_the_bytes_that_no_guest_shows() {
        let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let tree = over(here);
        let mut shelf = HostFileCache::default();
        let mut filled = |path: &str| {
            let node = tree.find(path).unwrap();
            let file = tree.host_file(node).unwrap();
            let (cached, _) = shelf.cached_file(file, PAGE, None);
            cached.unwrap().show((&tree, node), 0..PAGE, u64::MAX, &|| true).unwrap().unwrap().0
        };
        let shown = filled("Cargo.toml");
        // Unused from the first to the last.
        let paths = ["src/lib.rs", "src/warm.rs", "src/program.rs"];
        let images = paths.map(|path| filled(path).image(PAGE).unwrap());
        assert_eq!(shelf.take_unused().1, 0, "images show them");
        drop(images);
        let holds = |shelf: &HostFileCache| shelf.place.as_ref().unwrap().holds();
        let has = |shelf: &HostFileCache, path: &str| {
            let file = tree.host_file(tree.find(path).unwrap()).unwrap();
            shelf.files.contains_key(&(file, false))
        };
        for (left, released) in [(1, 2), (0, 1), (0, 0)] {
            let (unused, bytes) = shelf.take_unused();
            assert_eq!(bytes, released * PAGE);
            drop(unused);
            assert_eq!(holds(&shelf), (1 + left) * PAGE);
        }
        assert!(has(&shelf, "Cargo.toml"), "it is shown");
        assert!(paths.iter().all(|path| !has(&shelf, path)));
        drop(shown);
        assert_eq!(shelf.take_unused().1, PAGE);
        assert_eq!(holds(&shelf), 0);
    }
}
