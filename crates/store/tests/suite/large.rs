//! Memories of many batches, which one pass writes and several threads check.

use std::fs::{self, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};

use crate::support::{self, PAGE, bytes, options, store};
use afresh_store::{Encoding, LayerError, MemoryPages, OpenError, Pages, Role, SaveError, archive};
use afresh_sys::PageRange;

/// Enough pages that a layer of them is checked by more than one thread.
const PAGES: usize = 12_000;

/// Whether page `n` of the memory is zero, and the page that it is a duplicate of.
fn origin(n: usize) -> Option<usize> {
    match n {
        _ if n % 7 == 3 || (4000..4600).contains(&n) => None,
        _ if n.is_multiple_of(97) => Some(1),
        _ => Some(n),
    }
}

fn memory() -> MemoryPages {
    let mut memory = vec![0; PAGES * PAGE];
    for (n, page) in memory.chunks_exact_mut(PAGE).enumerate() {
        if let Some(origin) = origin(n) {
            page.chunks_exact_mut(8).enumerate().for_each(|(at, word)| {
                let value = ((origin * 512 + at) as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                word.copy_from_slice(&value.to_le_bytes());
            });
        }
    }
    MemoryPages(memory)
}

#[test]
fn distinct_pages_are_stored_in_order_across_batches() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let memory = memory();
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        let mut save = options();
        save.options.encoding = encoding;
        store.save("a", &memory, &save).unwrap();
        let snapshot = store.load("a").unwrap();
        snapshot.verify().unwrap();
        assert!(bytes(&snapshot) == memory.0, "{encoding:?}");
        // Page 0 is the first with the content of page 1.
        let stored: Vec<usize> =
            (0..PAGES).filter(|n| *n == 0 || (*n != 1 && origin(*n) == Some(*n))).collect();
        let layer = &snapshot.layers()[0];
        assert_eq!(layer.stored(), stored.len() as u64);
        if encoding == Encoding::Raw {
            let blob = fs::read(store.blob_path(layer.digest())).unwrap();
            for (n, page) in stored.iter().zip(blob.chunks_exact(PAGE)) {
                assert!(page == &memory.0[n * PAGE..][..PAGE], "page {n}");
            }
        }
    }
}

#[test]
fn a_working_set_of_short_and_long_runs_is_read_run_by_run() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let memory = memory();
    // One page, two, some tens, and more than are read at a time; zeros and duplicates among them.
    let scattered = (0..3000).step_by(19).map(|n| PageRange::new(n, 1 + n % 5));
    let longer = (3100..3900).step_by(80).map(|n| PageRange::new(n, 70));
    let set: Vec<_> = scattered
        .chain(longer)
        .chain([PageRange::new(3990, 1500), PageRange::new(6000, 63), PageRange::new(6100, 1)])
        .collect();
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        let mut save = options();
        save.options.encoding = encoding;
        save.options.working_set = set.clone();
        store.save("a", &memory, &save).unwrap();
        let snapshot = store.load("a").unwrap();
        assert_eq!(snapshot.working_set(), set);
        let (mut pages, mut last) = (0, 0);
        let read = |range: PageRange, content: &[u8]| {
            assert!(range.start >= last, "{range:?} after {last}");
            assert!(content == &memory.0[range.byte_start()..][..range.byte_len()], "{range:?}");
            (pages, last) = (pages + range.len, range.end());
            Ok::<(), OpenError>(())
        };
        snapshot.read_working_set(read).unwrap();
        assert_eq!(pages, set.iter().map(|run| run.len).sum::<usize>());
    }
}

#[test]
fn a_delta_of_scattered_pages_holds_them_alone() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut memory = memory();
    store.save("a", &memory, &options()).unwrap();
    let changed: Vec<_> = (0..PAGES).step_by(10).map(|n| PageRange::new(n, 2)).collect();
    for range in &changed {
        memory.0[range.byte_start() + 5] ^= 0x55;
    }
    let mut delta = options();
    delta.options.parent = Some(store.load("a").unwrap());
    delta.options.changed = Some(changed.clone());
    store.save("b", &memory, &delta).unwrap();
    let snapshot = store.load("b").unwrap();
    snapshot.verify().unwrap();
    assert!(bytes(&snapshot) == memory.0);
    let stored = snapshot.layers()[1].stored();
    assert!((1..=changed.len() as u64).contains(&stored), "{stored} pages");
}

#[test]
fn damage_anywhere_in_a_large_layer_is_found_and_stays_found() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("a", &memory(), &options()).unwrap();
    let layer = &store.load("a").unwrap().layers()[0].digest();
    let path = store.blob_path(*layer);
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let stored = store.load("a").unwrap().layers()[0].stored();
    for page in [0, 15, 16, stored / 2, stored - 1] {
        let (at, mut byte) = (page * PAGE as u64 + 77, [0]);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
        let snapshot = store.load("a").unwrap();
        for _ in 0..2 {
            match snapshot.verify().unwrap_err() {
                OpenError::Layer { source: LayerError::Group { first, end }, .. } => {
                    assert!((first..end).contains(&page), "{first}..{end} for {page}");
                }
                other => panic!("page {page}: {other}"),
            }
        }
        file.write_all_at(&byte, at).unwrap();
        // Neither a damaged nor a whole group is remembered as the other.
        snapshot.verify().unwrap();
    }
}

/// A large memory in which few pages are not zero. One of them may fail to be read.
struct SparsePages {
    pages: usize,
    failing: Option<usize>,
}

impl SparsePages {
    /// Distance of the pages that are not zero.
    const STEP: usize = 1000;
}

impl Pages for SparsePages {
    fn pages(&self) -> usize {
        self.pages
    }

    fn occupied(&self) -> Vec<PageRange> {
        vec![PageRange::new(0, self.pages)]
    }

    fn read(&self, first: usize, out: &mut [u8]) -> io::Result<()> {
        out.fill(0);
        for (page, out) in (first..).zip(out.chunks_exact_mut(PAGE)) {
            if self.failing == Some(page) {
                return Err(io::Error::other("this page is lost"));
            }
            if page.is_multiple_of(Self::STEP) {
                out[..8].copy_from_slice(&(page as u64 + 1).to_le_bytes());
            }
        }
        Ok(())
    }
}

#[test]
fn a_large_base_is_several_layers_and_equal_in_a_store_and_an_archive() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(&dir.path().join("store"));
    let memory = SparsePages { pages: 40_000, failing: None };
    let id = store.save("a", &memory, &options()).unwrap();
    let snapshot = store.load("a").unwrap();
    snapshot.verify().unwrap();
    let layers: Vec<_> =
        snapshot.layers().iter().map(|layer| (layer.role(), layer.stored())).collect();
    assert_eq!(layers, [(Role::Base, 21), (Role::Delta, 19)]);
    let read = |page: usize| {
        let mut out = [1; PAGE];
        snapshot.read(page, &mut out).unwrap();
        assert!(out[8..].iter().all(|byte| *byte == 0));
        u64::from_le_bytes(out[..8].try_into().unwrap()) as usize
    };
    for page in (0..40_000).step_by(SparsePages::STEP) {
        assert_eq!((read(page), read(page + 1)), (page + 1, 0));
    }
    // The upper layer hides nothing, so it names no page of zeros.
    assert_eq!(Pages::occupied(&snapshot).iter().map(|run| run.len).sum::<usize>(), 40);

    let path = dir.path().join("archive");
    archive::save(&path, None, &memory, &options()).unwrap();
    assert_eq!(archive::open(&path).unwrap().id(), id);
}

#[test]
fn a_large_save_that_fails_reports_its_cause_and_leaves_no_blob() {
    for failing in [5_000, 35_000] {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let memory = SparsePages { pages: 40_000, failing: Some(failing) };
        let error = store.save("a", &memory, &options()).unwrap_err();
        assert!(
            matches!(&error, SaveError::Source(cause) if cause.to_string() == "this page is lost")
        );
        assert!(store.load("a").is_err());
        assert_eq!(fs::read_dir(dir.path().join("blobs/sha256")).unwrap().count(), 0);
    }
}

#[test]
fn a_delta_of_compared_pages_reads_nothing_of_its_parent() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("a", &support::memory(&[1, 2, 3]), &options()).unwrap();
    let parent = store.load("a").unwrap();
    let path = store.blob_path(parent.layers()[0].digest());
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().write_all_at(b"damage", 0).unwrap();

    let memory = support::memory(&[1, 7, 3]);
    let mut delta = options();
    delta.options.parent = Some(parent);
    delta.options.changed = Some(vec![PageRange::new(1, 1)]);
    assert!(matches!(store.save("b", &memory, &delta).unwrap_err(), SaveError::Open(_)));
    delta.options.compared = true;
    store.save("b", &memory, &delta).unwrap();
    assert_eq!(store.load("b").unwrap().layers()[1].stored(), 1);
}
