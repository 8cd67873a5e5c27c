//! Tests of live files without guests.

use super::*;

#[test]
fn after_a_reset_memory_has_the_bytes_of_the_file_and_no_other_pages() {
    let (mut tree, now) = (Tree::new(Budget::default()), Time::default());
    let node = tree.write_path("/a", b"first", now).unwrap();
    // Far more than could be compared.
    tree.set_size(node, 1 << 50, now).unwrap();
    tree.write(node, 9 * PAGE, &[7; 9], now).unwrap();
    let (mut files, live) = (SharedFiles::default(), BTreeSet::from([node]));
    files.restore(&tree, &live).unwrap();
    let memory = files.get(node).unwrap().clone();
    assert_eq!(memory.0.resident_bytes() as u64, 2 * PAGE);
    for page in [0, 3, 9, 20, 1 << 30] {
        memory.0.write_at(&[1; PAGE_SIZE], page * PAGE_SIZE).unwrap();
    }
    let mapped = BTreeMap::from([(node, Ranges::default())]);
    assert_eq!(files.unmapped_bytes(&mapped).unwrap(), 5 * PAGE);
    // The call has also written the file, and given it another size.
    let mut changed = tree.clone();
    files.publish(&mut changed, node, 0..u64::MAX, now).unwrap();
    changed.set_size(node, 5 * PAGE, now).unwrap();
    files.refresh(&changed, node).unwrap();
    assert!(files.differing(&changed).unwrap().is_none());
    assert!(files.differing(&tree).unwrap().is_some());
    files.restore(&tree, &live).unwrap();
    assert_eq!(files.differing(&tree).unwrap(), None);
    assert_eq!(memory.0.resident_bytes() as u64, 2 * PAGE);
    assert_eq!((memory.0.bytes(), files.nodes()), (1 << 50, live));
}

#[test]
fn a_count_after_a_change_is_that_of_a_new_count() {
    let (mut tree, now) = (Tree::new(Budget::default()), Time::default());
    let node = tree.write_path("/a", &[1; 4 * PAGE_SIZE], now).unwrap();
    tree.set_size(node, 64 * PAGE, now).unwrap();
    let mut files = SharedFiles::default();
    files.restore(&tree, &BTreeSet::from([node])).unwrap();
    let memory = files.get(node).unwrap().clone();
    let counted = |files: &mut SharedFiles, parts: &[(u64, u64)]| {
        let mut mapped = Ranges::default();
        parts.iter().for_each(|(start, end)| mapped.insert(start * PAGE..end * PAGE));
        // Each count continues from the one before.
        let whole = bytes_beside(memory.data().unwrap(), &mapped);
        let bytes = files.unmapped_bytes(&BTreeMap::from([(node, mapped)])).unwrap();
        assert_eq!(bytes, whole, "{parts:?}");
        bytes / PAGE
    };
    assert_eq!(counted(&mut files, &[(0, 64)]), 0);
    for page in [10, 11, 40] {
        memory.0.write_at(&[2; PAGE_SIZE], page * PAGE_SIZE).unwrap();
    }
    assert_eq!(counted(&mut files, &[(2, 11), (30, 50)]), 3);
    assert_eq!(counted(&mut files, &[]), 7);
    assert_eq!(counted(&mut files, &[(40, 41), (63, 64)]), 6);
    tree.write(node, 20 * PAGE, &[3; 2 * PAGE_SIZE], now).unwrap();
    files.refresh(&tree, node).unwrap();
    assert_eq!(counted(&mut files, &[(40, 41), (63, 64)]), 8);
    tree.set_size(node, 21 * PAGE + 9, now).unwrap();
    files.refresh(&tree, node).unwrap();
    assert_eq!(counted(&mut files, &[(0, 1)]), 7);
    // The end of a hole takes no memory.
    for size in [18 * PAGE + 5, 30 * PAGE + 5, 60 * PAGE] {
        tree.set_size(node, size, now).unwrap();
        files.refresh(&tree, node).unwrap();
    }
    assert_eq!(counted(&mut files, &[(0, 1)]), 5);
}

#[test]
fn only_pages_of_the_published_range_reach_the_tree() {
    let (mut tree, now) = (Tree::new(Budget::default()), Time::default());
    let node = tree.write_path("/a", &[0; 8 * PAGE_SIZE], now).unwrap();
    let mut files = SharedFiles::default();
    files.restore(&tree, &BTreeSet::from([node])).unwrap();
    let memory = files.get(node).unwrap().clone();
    for page in [1, 4, 7] {
        memory.0.write_at(&[1; PAGE_SIZE], page * PAGE_SIZE).unwrap();
    }
    files.publish(&mut tree, node, 4 * PAGE + 9..4 * PAGE + 10, now).unwrap();
    let mut bytes = vec![0; 8 * PAGE_SIZE];
    tree.read(node, 0, &mut bytes).unwrap();
    let written: Vec<_> = (0..8).filter(|page| bytes[page * PAGE_SIZE] == 1).collect();
    assert_eq!(written, [4]);
    files.read_over(node, 0, &mut bytes).unwrap();
    let read: Vec<_> = (0..8).filter(|page| bytes[page * PAGE_SIZE] == 1).collect();
    assert_eq!(read, [1, 4, 7]);
    // A change of other pages leaves the rest as guest processes wrote it.
    tree.write(node, 9 * PAGE, &[2; PAGE_SIZE], now).unwrap();
    let change = files.refresh(&tree, node).unwrap();
    assert!(change.filled.iter().eq(std::iter::once(9 * PAGE..10 * PAGE)));
    tree.set_size(node, 7 * PAGE, now).unwrap();
    let change = files.refresh(&tree, node).unwrap();
    let freed: Vec<_> = change.freed.iter().collect();
    assert_eq!(freed, [7 * PAGE..8 * PAGE, 9 * PAGE..10 * PAGE]);
    files.publish(&mut tree, node, 0..u64::MAX, now).unwrap();
    assert_eq!(files.differing(&tree).unwrap(), None);
}

#[test]
fn a_file_becomes_live_within_the_room_that_is_left() {
    let (mut tree, now) = (Tree::new(Budget::default()), Time::default());
    let node = tree.write_path("/a", &[1; 4 * PAGE_SIZE], now).unwrap();
    let mut mapped = Ranges::default();
    mapped.insert(PAGE..2 * PAGE);
    let add = |room| {
        let mut files = SharedFiles::default();
        files.add(&tree, node, true, &mapped, room * PAGE)
    };
    assert_eq!((add(2), add(3)), (Err(Errno::NOMEM), Ok(())));
}
