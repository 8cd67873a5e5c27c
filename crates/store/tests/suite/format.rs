//! Promises of the format, against a plain byte vector.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::{PAGE, bytes, guest, memory, options, page, store};
use afresh_store::{
    CompactOptions, Encoding, GuestMismatch, LayerError, MemoryPages, OpenError, SaveError, Store,
    diff,
};
use afresh_sys::PageRange;
use proptest::prelude::*;

/// Every regular file of a store but its locks.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            out.extend(files(&path));
        } else if !name.starts_with('.') {
            out.push(path);
        }
    }
    out.sort();
    out
}

#[test]
fn zero_pages_and_duplicates_are_stored_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let memory = memory(&[0, 1, 2, 1, 1, 0, 0, 2, 3]);
    store.save("a", &memory, &options()).unwrap();
    let snapshot = store.load("a").unwrap();
    assert_eq!(bytes(&snapshot), memory.0);
    let seen = snapshot.inspect();
    assert_eq!(seen.layers[0].stored, 3);
    assert_eq!((seen.pages, seen.zero_pages, seen.shared_pages), (9, 3, 5));
    assert_eq!(snapshot.state(), b"registers");
}

#[test]
fn a_raw_layer_begins_with_its_pages_so_that_it_can_be_mapped() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let memory = memory(&[5, 6, 7]);
    store.save("a", &memory, &options()).unwrap();
    let snapshot = store.load("a").unwrap();
    let layer = fs::read(store.blob_path(snapshot.layers()[0].digest())).unwrap();
    assert_eq!(layer[..3 * PAGE], memory.0);
}

#[test]
fn a_delta_holds_only_what_changed_and_zero_hides_the_parent() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("a", &memory(&[1, 2, 3, 4, 5]), &options()).unwrap();
    let parent = store.load("a").unwrap();
    for changed in [None, Some(vec![PageRange::new(1, 1), PageRange::new(3, 3)])] {
        let mut delta = options();
        delta.options.parent = Some(parent.clone());
        delta.options.changed = changed;
        let memory = memory(&[1, 9, 3, 0, 5, 8]);
        store.save("b", &memory, &delta).unwrap();
        let child = store.load("b").unwrap();
        assert_eq!(bytes(&child), memory.0);
        assert_eq!(child.inspect().layers[1].stored, 2);
        assert_eq!(child.parent(), Some(parent.id().to_string().as_str()));
        let difference = diff(&parent, &child).unwrap();
        assert_eq!(
            difference.pages,
            [PageRange::new(1, 1), PageRange::new(3, 1), PageRange::new(5, 1)]
        );
        assert!(!difference.state && !difference.guest);
    }
    assert_eq!(bytes(&store.load("a").unwrap()), memory(&[1, 2, 3, 4, 5]).0);
}

#[test]
fn a_delta_on_a_larger_parent_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("a", &memory(&[1, 2, 3]), &options()).unwrap();
    let mut delta = options();
    delta.options.parent = Some(store.load("a").unwrap());
    let error = store.save("a", &memory(&[1]), &delta).unwrap_err();
    assert!(matches!(error, SaveError::Shrunk { pages: 1, parent: 3 }), "{error}");
}

#[test]
fn compaction_keeps_every_byte_and_gc_removes_what_nothing_names() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut seeds = vec![1, 2, 3, 4, 5, 6];
    store.save("a", &memory(&seeds), &options()).unwrap();
    for step in 0..4 {
        let mut delta = options();
        delta.options.parent = Some(store.load("a").unwrap());
        delta.options.working_set = vec![PageRange::new(2, 2)];
        seeds[step] = 50 + step as u8;
        store.save("a", &memory(&seeds), &delta).unwrap();
    }
    let deep = store.load("a").unwrap();
    assert_eq!(deep.layers().len(), 5);
    fs::write(store.root().join("blobs/sha256/.tmp-1-1"), b"left by a killed writer").unwrap();
    store.compact("a", &deep, &CompactOptions::default()).unwrap();
    let removed = store.gc().unwrap();
    // Five layers, four working sets, five configurations and manifests, one temporary file.
    assert_eq!((removed.files, removed.kept), (5 + 4 + 10 + 1, 4));
    let flat = store.load("a").unwrap();
    assert_eq!((flat.layers().len(), flat.working_set()), (1, vec![PageRange::new(2, 2)]));
    assert_eq!(bytes(&flat), memory(&seeds).0);
    // Files that are open stay readable.
    assert_eq!(bytes(&deep), memory(&seeds).0);
    assert_eq!(store.gc().unwrap().files, 0);
}

#[test]
fn a_working_set_is_a_compact_copy_in_address_order() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let memory = memory(&[1, 2, 0, 4, 5, 6, 7]);
    store.save("a", &memory, &options()).unwrap();
    let set = [PageRange::new(1, 2), PageRange::new(5, 1)];
    store.set_working_set("a", &store.load("a").unwrap(), &set).unwrap();
    let snapshot = store.load("a").unwrap();
    assert_eq!(snapshot.working_set(), set);
    assert_eq!(snapshot.inspect().layers[1].stored, 2);
    let mut copy = memory.0.clone();
    copy.fill(0xee);
    let read = |range: PageRange, pages: &[u8]| {
        copy[range.byte_start()..][..range.byte_len()].copy_from_slice(pages);
        Ok::<(), OpenError>(())
    };
    snapshot.read_working_set(read).unwrap();
    for range in set {
        let at = range.byte_start()..range.byte_start() + range.byte_len();
        assert_eq!(copy[at.clone()], memory.0[at]);
    }
    assert_eq!(snapshot.state(), b"registers");
}

#[test]
fn another_guest_build_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("a", &memory(&[1]), &options()).unwrap();
    let snapshot = store.load("a").unwrap();
    snapshot.check_guest(&guest()).unwrap();
    let mut here = guest();
    here.module = "blake3:beef".into();
    let error = snapshot.check_guest(&here).unwrap_err();
    assert!(matches!(error, OpenError::Guest(GuestMismatch::Module { .. })), "{error}");
}

#[test]
fn a_missing_name_lists_the_names_there_are() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("warm", &memory(&[1]), &options()).unwrap();
    let error = store.load("wram").unwrap_err().to_string();
    assert!(error.contains("wram") && error.contains("warm"), "{error}");
    assert!(matches!(store.tag("../x y", None), Err(SaveError::Name(_))));
    let other = tempfile::tempdir().unwrap();
    fs::write(other.path().join("thesis.tex"), b"mine").unwrap();
    assert!(Store::create(other.path()).is_err());
    assert!(matches!(Store::open(other.path()), Err(OpenError::NotALayout(_))));
}

#[test]
fn a_layer_of_a_later_version_is_refused_by_its_number() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("a", &memory(&[1]), &options()).unwrap();
    let path = store.blob_path(store.load("a").unwrap().layers()[0].digest());
    let mut layer = fs::read(&path).unwrap();
    let at = layer.len() - 192 + 8;
    layer[at] = 2;
    fs::remove_file(&path).unwrap();
    fs::write(&path, layer).unwrap();
    let error = store.load("a").unwrap_err();
    assert!(matches!(error, OpenError::Layer { source: LayerError::Version(2), .. }), "{error}");
}

/// Flips every bit of one byte in turn, everywhere: either an error comes, or what is read is what
/// was saved. Wrong memory, wrong state or a panic must never be the outcome.
#[test]
fn a_bit_flip_anywhere_is_noticed_before_use() {
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let first = memory(&[1, 0, 2]);
        let second = memory(&[1, 7, 2, 3]);
        let mut save = options();
        save.options.encoding = encoding;
        store.save("a", &first, &save).unwrap();
        save.options.parent = Some(store.load("a").unwrap());
        save.options.working_set = vec![PageRange::new(1, 1)];
        store.save("a", &second, &save).unwrap();
        let mut refused = 0;
        for path in files(dir.path()) {
            let original = fs::read(&path).unwrap();
            // Pages are sampled, everything else is flipped byte by byte.
            let pages = if original.len() > PAGE { original.len() / PAGE * PAGE } else { 0 };
            for at in (0..pages).step_by(509).chain(pages..original.len()) {
                let mut damaged = original.clone();
                damaged[at] ^= 1 << (at % 8);
                fs::remove_file(&path).unwrap();
                fs::write(&path, &damaged).unwrap();
                let outcome = store.load("a").and_then(|snapshot| {
                    let mut out = vec![0; snapshot.pages() * PAGE];
                    snapshot.read(0, &mut out)?;
                    snapshot.read_working_set(|range, page| {
                        assert_eq!(page, &second.0[range.byte_start()..][..range.byte_len()]);
                        Ok::<(), OpenError>(())
                    })?;
                    snapshot.check_guest(&guest())?;
                    Ok((out, snapshot.state().to_vec()))
                });
                match outcome {
                    Err(_) => refused += 1,
                    Ok((out, state)) => {
                        assert!(out == second.0, "{} at {at}", path.display());
                        assert_eq!(state, b"registers");
                    }
                }
            }
            fs::remove_file(&path).unwrap();
            fs::write(&path, &original).unwrap();
        }
        assert!(refused > 500, "only {refused} flips were refused");
        assert_eq!(bytes(&store.load("a").unwrap()), second.0);
    }
}

#[test]
fn a_layer_cut_short_anywhere_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("a", &memory(&[1, 2]), &options()).unwrap();
    let path = store.blob_path(store.load("a").unwrap().layers()[0].digest());
    let layer = fs::read(&path).unwrap();
    for len in (0..layer.len()).step_by(61).chain(layer.len() - 300..layer.len()) {
        fs::remove_file(&path).unwrap();
        fs::write(&path, &layer[..len]).unwrap();
        assert!(store.load("a").is_err(), "cut to {len}");
    }
}

fn seeds() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop_oneof![3 => Just(0u8), 2 => 1..4u8, 2 => any::<u8>()], 1..70)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Any contents, in any stack and encoding, read back whole and in parts.
    #[test]
    fn saved_contents_are_read_back(
        steps in prop::collection::vec((seeds(), any::<bool>()), 1..5),
        probe in (0..70usize, 1..20usize),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let mut parent = None;
        let mut content: Vec<u8> = Vec::new();
        for (seeds, compress) in &steps {
            // A delta never shrinks: pages of later steps replace those of earlier ones.
            let mut next = content.clone();
            next.resize(next.len().max(seeds.len() * PAGE), 0);
            for (n, seed) in seeds.iter().enumerate() {
                next[n * PAGE..(n + 1) * PAGE].copy_from_slice(&page(*seed));
            }
            content = next;
            let mut save = options();
            save.options.encoding = if *compress { Encoding::Zstd } else { Encoding::Raw };
            save.options.parent = parent.take();
            store.save("x", &MemoryPages(content.clone()), &save).unwrap();
            parent = Some(store.load("x").unwrap());
        }
        let snapshot = store.load("x").unwrap();
        // A part first, so that groups are verified by partial reads too.
        let pages = snapshot.pages();
        let (first, len) = (probe.0 % pages, probe.1.min(pages - probe.0 % pages));
        let mut part = vec![0; len * PAGE];
        snapshot.read(first, &mut part).unwrap();
        prop_assert!(part == content[first * PAGE..(first + len) * PAGE]);
        prop_assert!(bytes(&snapshot) == content);
        prop_assert!(snapshot.read(first, &mut vec![0; (pages + 1) * PAGE]).is_err());
        snapshot.verify().unwrap();
        store.compact("y", &snapshot, &CompactOptions::default()).unwrap();
        let flat = store.load("y").unwrap();
        prop_assert!(bytes(&flat) == content);
        prop_assert_eq!(diff(&flat, &snapshot).unwrap().page_count(), 0);
    }

    /// No byte string at the end of a blob makes the reader panic.
    #[test]
    fn a_hostile_tail_is_refused(
        tail in prop::collection::vec(any::<u8>(), 192..400),
        fields in prop::collection::vec((12..72usize, prop_oneof![Just(0u8), Just(255), any::<u8>()]), 0..12),
        keep in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        store.save("a", &memory(&[1, 2]), &options()).unwrap();
        let path = store.blob_path(store.load("a").unwrap().layers()[0].digest());
        let mut layer = fs::read(&path).unwrap();
        let original = layer.clone();
        let footer = layer.len() - 192;
        if !keep {
            let at = layer.len() - tail.len();
            layer[at..].copy_from_slice(&tail);
            layer[footer..footer + 8].copy_from_slice(b"AFRESHPG");
            layer[footer + 8..footer + 12].copy_from_slice(&1u32.to_le_bytes());
        }
        for (at, value) in fields {
            layer[footer + at] = value;
        }
        let changed = layer != original;
        fs::remove_file(&path).unwrap();
        fs::write(&path, layer).unwrap();
        prop_assert_eq!(store.load("a").is_err(), changed);
    }
}
