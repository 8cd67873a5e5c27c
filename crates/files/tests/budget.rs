//! Allocations for files of guests and trees of strangers.

use std::fs::File;
use std::os::unix::fs::FileExt;

use afresh_budget::meter::{Meter, within};
use afresh_files::{
    Access, Budget, Change, Layer, LayerLimits, Refused, Rename, SavedTree, Time, Tree, TreeError,
    Whence,
};
use serde::Serialize;

#[global_allocator]
static METER: Meter = Meter;

const NOW: Time = Time { seconds: 0, nanos: 0 };
const MIB: usize = 1 << 20;
const LARGE: u64 = 256 << 30;

/// A tree over a host directory with a file of 256 GiB, which has four bytes and a hole.
fn over_a_sparse_file() -> (tempfile::TempDir, Tree) {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("large"), b"data").unwrap();
    let file = File::options().write(true).open(directory.path().join("large")).unwrap();
    file.set_len(LARGE).unwrap();
    let layer = Layer::directory(directory.path()).unwrap();
    let tree = Tree::new(Budget { bytes: 16 << 20, files: 100 }).with_layer("/", &layer).unwrap();
    (directory, tree)
}

#[test]
fn a_sparse_file_is_compared_in_bounded_memory() {
    let (_directory, tree) = over_a_sparse_file();
    let (mut cut, mut replaced) = (tree.clone(), tree.clone());
    let node = cut.find("/large").unwrap();
    cut.set_size(node, 2, NOW).unwrap();
    cut.set_size(node, LARGE, NOW).unwrap();
    let own = replaced.write_path("/own", b"data", NOW).unwrap();
    replaced.set_size(own, LARGE, NOW).unwrap();
    replaced.write(own, LARGE - 1, b"x", NOW).unwrap();
    replaced.rename(Tree::ROOT, b"own", Tree::ROOT, b"large", Rename::Replace, NOW).unwrap();
    for (other, differing) in [(cut, 2), (replaced, 1)] {
        let (found, _) = within(MIB, || tree.diff(&other).unwrap());
        let found: Vec<_> = found.changes.iter().map(|c| (&*c.path, c.change, c.bytes)).collect();
        assert_eq!(found, [(&b"/large"[..], Change::Changed, differing)]);
    }
}

#[test]
fn the_end_of_a_sparse_file_is_found_at_once() {
    let (_directory, mut tree) = over_a_sparse_file();
    let node = tree.find("/large").unwrap();
    let mut open = tree.open(node, Access::reading()).unwrap();
    assert_eq!(open.seek(&tree, Whence::Hole, 0), Ok(LARGE));
    tree.set_size(node, LARGE * 2, NOW).unwrap();
    tree.write(node, LARGE + 8192, b"x", NOW).unwrap();
    assert_eq!(open.seek(&tree, Whence::Hole, 1), Ok(LARGE));
    assert_eq!(open.seek(&tree, Whence::Data, LARGE as i64), Ok(LARGE + 8192));
}

#[test]
fn a_hole_beyond_the_budget_is_not_read_whole() {
    let mut tree = Tree::new(Budget { bytes: 16 << 20, files: 100 });
    let node = tree.write_path("/hole", b"data", NOW).unwrap();
    tree.set_size(node, 1 << 30, NOW).unwrap();
    let (read, peak) = within(MIB, || tree.read_path("/hole", 1 << 30));
    assert_eq!((read, peak < MIB), (Err(Refused::TooLarge), true));
    tree.set_size(node, 16 << 20, NOW).unwrap();
    assert_eq!(tree.read_path("/hole", 1 << 30).unwrap().len(), 16 << 20);
    // A budget that is spent or small still lets small files be read.
    let tree = tree.with_budget(Budget { bytes: 0, files: 0 });
    assert_eq!(tree.read_path("/hole", 1 << 30), Err(Refused::TooLarge));
}

#[test]
fn the_memory_for_a_whole_file_follows_what_it_stores() {
    for bytes in [64 << 20, 1 << 40] {
        let mut tree = Tree::new(Budget { bytes, files: 100 });
        let node = tree.write_path("/hole", b"data", NOW).unwrap();
        for size in [32 << 20, 1 << 30, 1 << 50] {
            tree.set_size(node, size, NOW).unwrap();
            let (read, peak) = within(MIB, || tree.read_path("/hole", u64::MAX));
            assert_eq!((read, peak < MIB), (Err(Refused::TooLarge), true), "{size} of {bytes}");
        }
        // A file that stores half of its bytes is read whole.
        tree.set_size(node, 0, NOW).unwrap();
        let stored = vec![1; 20 << 20];
        assert_eq!(tree.write(node, 0, &stored, NOW), Ok(stored.len()));
        tree.set_size(node, 40 << 20, NOW).unwrap();
        assert_eq!(tree.read_path("/hole", u64::MAX).unwrap().len(), 40 << 20);
        tree.set_size(node, (40 << 20) + 1, NOW).unwrap();
        assert_eq!(tree.read_path("/hole", u64::MAX), Err(Refused::TooLarge));
    }
}

/// The fields of a saved tree and of stored layers, in their order; a node can have any form.
fn tree_of<N: Serialize>(
    layers: &[u8],
    nodes: Vec<N>,
    gone: Vec<u64>,
    held: Vec<(u64, u32)>,
) -> Vec<u8> {
    let hosts: Vec<(u64, Vec<u8>)> = Vec::new();
    let rest = (1_u32, (1_u64, 1_u64), 10_u64);
    let mut bytes = postcard::to_allocvec(&rest).unwrap();
    bytes.extend_from_slice(layers);
    bytes.extend(postcard::to_allocvec(&(hosts, nodes, gone, held, 0_u64)).unwrap());
    bytes
}

#[test]
fn small_items_of_a_stranger_are_refused_before_they_are_decoded() {
    const ITEMS: usize = 16 << 20;
    let none: Vec<u8> = Vec::new();
    // Names without letters, files without bytes, layers without names: one to three bytes each.
    let names: Vec<(Vec<u8>, Option<u8>)> = vec![(Vec::new(), None); ITEMS];
    let directory = (5_u64, (0o755_u32, [(0_i64, 0_u32); 3], true, (1_u8, 0_u64, names)));
    let mut layers = postcard::to_allocvec(&(ITEMS as u64)).unwrap();
    layers.resize(layers.len() + ITEMS, 0);
    let descriptions = [
        tree_of(&[0], vec![directory], vec![], vec![]),
        tree_of(&layers, none.clone(), vec![], vec![]),
        tree_of(&[0], none.clone(), vec![1; ITEMS], vec![]),
        tree_of(&[0], none, vec![], vec![(1, 1); ITEMS]),
    ];
    let base = Tree::new(Budget::default());
    for description in descriptions {
        let saved = SavedTree::new(description, Vec::new());
        let (result, peak) = within(MIB, || base.restored(&saved));
        assert!(matches!(result, Err(TreeError::Exceeded(_))), "{result:?}");
        assert!(peak < MIB, "{peak}");
    }
}

/// A zip whose last record claims `entries` entries. There is one, and behind it a hole.
fn sparse_zip(entries: u64) -> tempfile::NamedTempFile {
    let (start, size) = (entries + 8, entries * 46);
    let len = start + size;
    let mut entry = b"PK\x01\x02".to_vec();
    entry.extend([0; 42]);
    // Its name has one byte.
    entry[28] = 1;
    entry.push(b'a');
    let mut end = b"PK\x06\x06".to_vec();
    end.extend(44_u64.to_le_bytes());
    end.extend([45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    for field in [entries, entries, size, start] {
        end.extend(field.to_le_bytes());
    }
    end.extend(b"PK\x06\x07\0\0\0\0");
    end.extend(len.to_le_bytes());
    end.extend([1, 0, 0, 0]);
    end.extend(b"PK\x05\x06\0\0\0\0");
    end.extend([0xff; 12]);
    end.extend([0, 0]);
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(len).unwrap();
    file.as_file().write_all_at(&entry, start).unwrap();
    file.as_file().write_all_at(&end, len).unwrap();
    file
}

#[test]
fn a_zip_is_refused_before_its_claimed_entries_are_allocated() {
    for entries in [1 << 19, 2_000_000_000] {
        let zip = sparse_zip(entries);
        let opened = || Layer::zip(zip.path(), &LayerLimits::default());
        let (refused, _) = within(MIB, opened);
        assert!(refused.is_err());
    }
}
