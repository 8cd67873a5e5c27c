//! A cache of host files for all guests of this process: mapped libraries and programs are shared.
//!
//! Promises: a file is taken for a cached one only if its device, number, length and times are the
//! same, and were not set just now; the cache takes at most a sixteenth of the memory of the host
//! or control group, mapped or not, but 128 MiB in any case and at most 1 GiB; no release takes
//! bytes that a guest or an image shows. May break it: a program that changes a host file without
//! changing its times; a guest would see the old content.

use std::collections::HashMap;
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

static SHELF: PerProcess<Mutex<HostFileCache>> = PerProcess::new(Mutex::default);

/// Maximum bytes of the cache on this host, found once.
fn max_bytes() -> u64 {
    static MAX_BYTES: InheritedCell<u64> = InheritedCell::new();
    let found = || memory_size().map_or(0, |size| size / MEMORY_SHARE);
    *MAX_BYTES.get_or_make(|| found().clamp(MIN_CACHE_BYTES, MAX_CACHE_BYTES))
}

#[derive(Default)]
struct HostFileCache {
    place: Option<Arc<CacheFile>>,
    /// By whether it is the twin of the file.
    files: HashMap<(HostFile, bool), HostFileEntry>,
    /// Twins of files, or that they have none.
    twins: HashMap<HostFile, Option<Arc<TextTwin>>>,
    /// Counts requests.
    asked: u64,
}

struct HostFileEntry {
    lies: Arc<CachedFile>,
    /// The time of its last use.
    asked: u64,
}

impl HostFileCache {
    /// The cached file, with room for `more` bytes of it.
    fn lies(
        &mut self,
        host_file: HostFile,
        more: u64,
        twin: Option<Arc<TextTwin>>,
    ) -> Option<Arc<CachedFile>> {
        let file = (host_file, twin.is_some());
        self.asked += 1;
        let asked = self.asked;
        if let Some(kept) = self.files.get_mut(&file) {
            kept.asked = asked;
        }
        let place = match &self.place {
            Some(place) => place.clone(),
            None => self.place.insert(CacheFile::new()?).clone(),
        };
        while place.holds().saturating_add(more) > max_bytes() {
            // Unused files, the longest unused one first.
            let idle = self
                .files
                .iter()
                .filter(|(other, kept)| **other != file && Arc::strong_count(&kept.lies) == 1);
            let oldest = idle.min_by_key(|(_, kept)| kept.asked).map(|(file, _)| *file);
            self.files.remove(&oldest?);
        }
        if let Some(kept) = self.files.get(&file) {
            return Some(kept.lies.clone());
        }
        let lies = place.room(host_file.size().next_multiple_of(PAGE_SIZE as u64), twin)?;
        self.files.insert(file, HostFileEntry { lies: lies.clone(), asked });
        Some(lies)
    }

    /// Takes out files that no guest and no image shows, with half of the bytes of all such files
    /// or a little more, the longest unused one first. Returns them with the sum of their bytes.
    fn take_unused(&mut self) -> (Vec<Arc<CachedFile>>, u64) {
        let unused = self.files.iter().filter(|(_, kept)| Arc::strong_count(&kept.lies) == 1);
        let mut unused: Vec<_> =
            unused.map(|(file, kept)| (kept.asked, *file, kept.lies.bytes())).collect();
        unused.sort_unstable_by_key(|(asked, ..)| *asked);
        let wanted = unused.iter().map(|(.., bytes)| bytes).sum::<u64>().div_ceil(2);
        let (mut taken, mut released) = (Vec::new(), 0);
        for (_, file, bytes) in unused {
            if released >= wanted {
                break;
            }
            released += bytes;
            taken.extend(self.files.remove(&file).map(|kept| kept.lies));
        }
        (taken, released)
    }
}

/// Bytes of host files in the cache that all guests of this process share, shown by a guest or not.
#[must_use]
pub fn cached_file_bytes() -> u64 {
    let shelf = SHELF.get().lock().unwrap_or_else(PoisonError::into_inner);
    shelf.place.as_ref().map_or(0, |place| place.holds())
}

/// Releases half of those cached bytes that no guest and no snapshot shows, or a little more, and
/// returns their number. A guest that maps the files again reads them from the host.
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
        let mut shelf = shelf();
        if shelf.twins.len() >= MAX_TWINS {
            shelf.twins.clear();
        }
        shelf.twins.insert(file, found.clone());
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
    let lies = {
        let mut shelf = SHELF.get().lock().unwrap_or_else(PoisonError::into_inner);
        shelf.lies(file, wanted.end - wanted.start, twin.cloned())
    };
    let Some(lies) = lies else { return Ok(None) };
    // A change during the read has changed the times by its end.
    lies.show((tree, node), wanted, max_bytes(), &|| tree.host_file(node) == Some(file))
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
        let kept = shelf.lies(file("Cargo.toml"), PAGE, None).unwrap();
        drop(shelf.lies(file("src/lib.rs"), PAGE, None).unwrap());
        assert!(
            shelf.lies(file("src/subprocess.rs"), max_bytes() + 1, None).is_none(),
            "there is never so much room"
        );
        assert!(shelf.files.contains_key(&(file("Cargo.toml"), false)), "it is shown");
        assert!(!shelf.files.contains_key(&(file("src/lib.rs"), false)));
        drop(kept);
    }

    #[test]
    fn a_release_takes_half_of_the_bytes_that_no_guest_shows() {
        let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let tree = over(here);
        let mut shelf = HostFileCache::default();
        let mut filled = |path: &str| {
            let node = tree.find(path).unwrap();
            let file = tree.host_file(node).unwrap();
            let lies = shelf.lies(file, PAGE, None).unwrap();
            lies.show((&tree, node), 0..PAGE, u64::MAX, &|| true).unwrap().unwrap().0
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
