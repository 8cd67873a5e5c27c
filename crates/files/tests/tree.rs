//! A tree on its own: open files and their positions, limits of a budget, costs of a copy.

use afresh_files::{Access, Budget, Refused, Time, Tree, Walk, Whence};

const NOW: Time = Time { seconds: 1, nanos: 2 };

#[test]
fn positions_holes_and_listings_go_with_the_open_file() {
    let mut tree = Tree::new(Budget::default());
    let node = tree.write_path("/f", b"", NOW).unwrap();
    let mut open = tree.open(node, Access::both()).unwrap();
    assert_eq!(open.seek(&tree, Whence::Start, 100_000), Ok(100_000));
    assert_eq!(open.write(&mut tree, b"end", NOW), Ok(3));
    assert!(tree.used().bytes < 4000, "a hole takes nothing");
    assert_eq!(open.seek(&tree, Whence::Data, 5), Ok(98_304));
    assert_eq!(open.seek(&tree, Whence::Hole, 5), Ok(5));
    assert_eq!(open.seek(&tree, Whence::Hole, 100_001), Ok(100_003));
    assert_eq!(open.seek(&tree, Whence::End, -100_004), Err(Refused::Invalid));

    for index in 0..10 {
        tree.write_path(format!("/d/{index}"), b"", NOW).unwrap();
    }
    let node = tree.find("/d").unwrap();
    let mut listing = tree.open(node, Access::reading()).unwrap();
    let first: Vec<_> = listing.entries(&tree, 0).unwrap().take(5).collect();
    let (cookie, _) = first[4].clone();
    tree.remove_path("/d/0", NOW).unwrap();
    tree.write_path("/d/00", b"", NOW).unwrap();
    let mut copy = listing.clone();
    for open in [&mut listing, &mut copy] {
        let rest: Vec<String> = open
            .entries(&tree, cookie)
            .unwrap()
            .map(|(_, entry)| String::from_utf8_lossy(&entry.name).into_owned())
            .collect();
        assert_eq!(rest, ["3", "4", "5", "6", "7", "8", "9"]);
    }
    for index in 0..1000 {
        tree.write_path(format!("/many/{index:04}"), b"", NOW).unwrap();
    }
    let node = tree.find("/many").unwrap();
    let mut listing = tree.open(node, Access::reading()).unwrap();
    let (mut from, mut names) = (0, Vec::new());
    loop {
        let batch: Vec<_> = listing.entries(&tree, from).unwrap().collect();
        let Some((last, _)) = batch.last() else { break };
        from = *last;
        names.extend(
            batch.iter().map(|(_, entry)| String::from_utf8_lossy(&entry.name).into_owned()),
        );
        tree.remove_path(format!("/many/{}", names[names.len() / 2]), NOW).unwrap();
    }
    let mut expected = vec![".".to_owned(), "..".to_owned()];
    expected.extend((0..1000).map(|index| format!("{index:04}")));
    assert_eq!(names, expected, "what is removed behind the reader displaces nothing");
}

#[test]
fn a_budget_bounds_stored_bytes_and_refunds_removed_ones() {
    let mut tree = Tree::new(Budget { bytes: 100_000, files: 20 });
    assert_eq!(tree.write_path("/big", &[1; 200_000], NOW), Err(Refused::Full));
    assert_eq!(tree.used(), Budget { bytes: 0, files: 0 }, "nothing is left of it");
    let node = tree.write_path("/big", &[1; 90_000], NOW).unwrap();
    assert!(tree.write(node, 90_000, &[1; 90_000], NOW).unwrap() < 10_000);
    assert_eq!(
        tree.write(node, 0, &[2; 90_000], NOW),
        Ok(90_000),
        "what is there can be written again"
    );
    // Single bytes far apart pay for whole pages.
    tree.set_size(node, 0, NOW).unwrap();
    let mut written = 0;
    while tree.write(node, written * 4096, b"x", NOW).is_ok() {
        written += 1;
    }
    assert!(written < 100_000 / 256, "{written}");
    tree.remove_path("/big", NOW).unwrap();
    for index in 0..18 {
        tree.write_path(format!("/{index}"), b"", NOW).unwrap();
    }
    while tree.write_path(format!("/n{}", tree.used().files), b"", NOW).is_ok() {}
    assert_eq!(tree.used().files, 20);
    // Names of one file are paid for as well.
    let node = tree.find("/1").unwrap();
    let mut names = 0;
    while tree.link(node, Tree::ROOT, format!("name-{names}").as_bytes(), NOW).is_ok() {
        names += 1;
    }
    assert!(names > 10 && names < 100_000 / 64, "{names}");
}

#[test]
fn a_copy_of_a_large_tree_costs_no_more_than_of_a_small_one() {
    let mut tree = Tree::new(Budget { bytes: 1 << 30, files: 1 << 20 });
    for index in 0..20_000 {
        tree.write_path(format!("/d{}/f{index}", index % 100), &[1; 100], NOW).unwrap();
    }
    // Ten thousand copies of two megabytes and more each would not be quick.
    let copies: Vec<Tree> = (0..100_000).map(|_| tree.clone()).collect();
    assert_eq!(copies.len(), 100_000);
    let mut changed = tree.clone();
    changed.write_path("/d7/f7", b"one", NOW).unwrap();
    let found = tree.diff(&changed).unwrap();
    assert_eq!(found.changes.len(), 1);
    assert_eq!(copies[7].diff(&tree).unwrap().changes.len(), 0);
}

#[test]
fn a_walk_may_be_kept_to_directories_that_their_owner_may_search() {
    let mut tree = Tree::new(Budget::default());
    tree.make_directories("/a/b", NOW).unwrap();
    tree.write_path("/a/b/file", b"", NOW).unwrap();
    let closed = tree.walk(b"/a/b", Walk::new(Tree::ROOT)).unwrap().node().unwrap();
    tree.set_mode(closed, 0o677, NOW).unwrap();
    let how = Walk::new(Tree::ROOT).searching();
    for path in [&b"/a/b/file"[..], b"/a/b/none", b"/a/b/../b", b"/a/./b/file"] {
        assert_eq!(tree.walk(path, how), Err(Refused::Denied), "{path:?}");
        assert!(tree.walk(path, Walk::new(Tree::ROOT)).is_ok());
    }
    assert_eq!(tree.walk(b"/a/b", how).unwrap().node(), Ok(closed));
    assert_eq!(
        tree.walk(b"b/file", Walk::new(tree.parent(closed).unwrap()).searching()),
        Err(Refused::Denied)
    );
    tree.set_mode(closed, 0o100, NOW).unwrap();
    assert!(tree.walk(b"/a/b/file", how).is_ok());
}
