//! Files that a program of the host changes or replaces while trees are over their directory.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use afresh_files::{Access, Budget, Layer, Refused, Rename, Time, Tree};
use rustix::process::Uid;

const NOW: Time = Time { seconds: 0, nanos: 0 };

/// A host directory with `k/y`, and a tree over it that has looked at the file.
fn granted() -> (tempfile::TempDir, Tree) {
    let host = tempfile::tempdir().unwrap();
    std::fs::create_dir(host.path().join("k")).unwrap();
    std::fs::write(host.path().join("k/y"), "y\n").unwrap();
    let layer = Layer::directory(host.path()).unwrap();
    let tree = Tree::new(Budget::default()).with_layer("/g", &layer).unwrap();
    tree.stat_path("/g/k/y").unwrap();
    (host, tree)
}

fn overwrite(host: &Path) {
    std::fs::write(host.join("k/y"), "longer\n").unwrap();
}

fn replace(host: &Path) {
    std::fs::write(host.join("k/z"), "another\n").unwrap();
    std::fs::rename(host.join("k/z"), host.join("k/y")).unwrap();
}

#[test]
fn a_file_has_its_present_size_and_bytes_when_it_is_opened_or_read() {
    for (change, expected) in [(overwrite as fn(&Path), "longer\n"), (replace, "another\n")] {
        let (host, mut tree) = granted();
        let node = tree.find("/g/k/y").unwrap();
        // The file stays open between the reads.
        assert_eq!(tree.read_path("/g/k/y", 100).unwrap(), b"y\n");
        change(host.path());
        let mut open = tree.open(node, Access::reading()).unwrap();
        assert_eq!(tree.stat(node).unwrap().size, expected.len() as u64);
        let mut out = [0; 100];
        let len = open.read(&tree, &mut out).unwrap();
        assert_eq!(&out[..len], expected.as_bytes());
        tree.close(open);
        // A relative of the tree moves its directory.
        let mut moved = tree.clone();
        let above = moved.find("/g").unwrap();
        moved.rename(above, b"k", above, b"e", Rename::Replace, NOW).unwrap();
        change(host.path());
        assert_eq!(moved.read_path("/g/e/y", 100).unwrap(), expected.as_bytes());
    }
}

#[test]
fn parts_of_two_versions_are_never_one_file() {
    for change in [overwrite as fn(&Path), replace] {
        let (host, tree) = granted();
        let mut appended = tree.clone();
        let node = appended.find("/g/k/y").unwrap();
        appended.set_mode(node, 0o600, NOW).unwrap();
        change(host.path());
        let refused = appended.read_path("/g/k/y", 100);
        let Err(Refused::ChangedOnHost(path)) = refused else { panic!("{refused:?}") };
        assert!(path.ends_with("k/y"), "{path}");
        let refused = appended.write(node, 2, b"more", NOW);
        assert!(matches!(refused, Err(Refused::ChangedOnHost(_))), "{refused:?}");
        let found = tree.diff(&appended).unwrap();
        assert_eq!(
            found.changes.iter().map(|change| &*change.path).collect::<Vec<_>>(),
            [b"/g/k/y"]
        );
        // All bytes are new.
        appended.set_size(node, 0, NOW).unwrap();
        appended.write(node, 0, b"new", NOW).unwrap();
        assert_eq!(appended.read_path("/g/k/y", 100).unwrap(), b"new");
    }
}

#[test]
fn a_captured_directory_has_the_version_that_was_captured() {
    let (host, tree) = granted();
    overwrite(host.path());
    let captured = tree.capture_host_directories().unwrap();
    assert_eq!(captured.stat_path("/g/k/y").unwrap().size, 7);
    std::fs::write(host.path().join("k/y"), "much longer\n").unwrap();
    let later = tree.capture_host_directories().unwrap();
    assert_eq!(later.stat_path("/g/k/y").unwrap().size, 7);
    assert_eq!(tree.stat_path("/g/k/y").unwrap().size, 7);
}

#[test]
fn the_top_of_a_host_directory_keeps_its_name() {
    let (_host, mut tree) = granted();
    let (root, busy) = (Tree::ROOT, Err(Refused::Busy));
    tree.make_directories("/empty", NOW).unwrap();
    assert_eq!(tree.rename(root, b"g", root, b"h", Rename::Replace, NOW), busy);
    assert_eq!(tree.rename(root, b"empty", root, b"g", Rename::Exchange, NOW), busy);
    let top = tree.find("/g").unwrap();
    tree.remove_path("/g/k/y", NOW).unwrap();
    tree.remove_directory(top, b"k", NOW).unwrap();
    assert_eq!(tree.rename(root, b"empty", root, b"g", Rename::Replace, NOW), busy);
    assert_eq!(tree.remove_directory(root, b"g", NOW), busy);
}

#[test]
fn a_file_that_the_host_has_removed_is_no_difference() {
    let (host, tree) = granted();
    let mut moved = tree.clone();
    let above = moved.find("/g").unwrap();
    moved.list_path("/g/k").unwrap();
    std::fs::write(host.path().join("k/w"), "w").unwrap();
    moved.rename(above, b"k", above, b"e", Rename::Replace, NOW).unwrap();
    std::fs::remove_dir_all(host.path().join("k")).unwrap();
    let found = tree.diff(&moved).unwrap();
    let paths: Vec<_> = found.changes.iter().map(|change| &*change.path).collect();
    assert_eq!(paths, [&b"/g/e"[..], b"/g/e/y", b"/g/k", b"/g/k/y"]);
}

#[test]
fn a_file_that_the_process_may_not_read_does_not_open() {
    // Root may read all files, and a thread can become another user.
    let is_root = rustix::process::geteuid().is_root();
    let (host, mut tree) = granted();
    let secret = host.path().join("k/y");
    std::fs::set_permissions(&secret, PermissionsExt::from_mode(0o000)).unwrap();
    let node = tree.find("/g/k/y").unwrap();
    std::fs::set_permissions(host.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let test = || {
        if is_root {
            rustix::thread::set_thread_uid(Uid::from_raw(65534)).unwrap();
        }
        assert_eq!(tree.open(node, Access::reading()), Err(Refused::Denied));
        // Its attributes can be seen, and it can be replaced.
        let open = tree.open(node, Access::default()).unwrap();
        tree.close(open);
        tree.set_size(node, 0, NOW).unwrap();
        tree.open(node, Access::both()).unwrap();
    };
    std::thread::scope(|scope| scope.spawn(test).join()).unwrap();
}

#[test]
fn an_open_file_stays_the_host_file_that_was_opened() {
    fn remove(host: &Path) {
        std::fs::remove_file(host.join("k/y")).unwrap();
    }
    for change in [replace as fn(&Path), remove] {
        let (host, mut tree) = granted();
        std::fs::write(host.path().join("k/y"), "first second\n").unwrap();
        for number in 0..40 {
            std::fs::write(host.path().join(format!("k/{number}")), "x").unwrap();
        }
        let node = tree.find("/g/k/y").unwrap();
        let mut open = tree.open(node, Access::reading()).unwrap();
        let mut fork = tree.clone();
        let mut out = [0; 6];
        assert_eq!(open.read(&tree, &mut out), Ok(6));
        change(host.path());
        fork.release(node);
        if host.path().join("k/y").exists() {
            // A relative that has closed the file opens what its path names now.
            assert_eq!(fork.read_path("/g/k/y", 100).unwrap(), b"another\n");
        }
        // Others read many files meanwhile.
        for number in 0..40 {
            fork.read_path(format!("/g/k/{number}"), 100).unwrap();
        }
        assert_eq!(open.read(&tree, &mut out), Ok(6));
        assert_eq!(&out, b"second");
        assert_eq!(tree.stat(node).unwrap().size, 13);
    }
}

#[test]
fn an_open_file_grows_with_that_of_the_host() {
    let (host, mut tree) = granted();
    let node = tree.find("/g/k/y").unwrap();
    let mut open = tree.open(node, Access::reading()).unwrap();
    let mut out = [0; 100];
    assert_eq!(open.read(&tree, &mut out), Ok(2));
    let mut file = std::fs::File::options().append(true).open(host.path().join("k/y")).unwrap();
    std::io::Write::write_all(&mut file, b"more\n").unwrap();
    assert_eq!(tree.stat(node).unwrap().size, 7);
    assert_eq!(open.read(&tree, &mut out), Ok(5));
    tree.write(node, 7, b"guest\n", NOW).unwrap();
    assert_eq!(tree.read_path("/g/k/y", 100).unwrap(), b"y\nmore\nguest\n");
}

#[test]
fn a_change_by_one_relative_does_not_keep_others_from_new_versions() {
    let (host, tree) = granted();
    let mut other = tree.clone();
    other.set_mode(other.find("/g/k/y").unwrap(), 0o600, NOW).unwrap();
    drop(other);
    overwrite(host.path());
    assert_eq!(tree.read_path("/g/k/y", 100).unwrap(), b"longer\n");
}

#[test]
fn a_captured_file_that_has_changed_is_no_mixture() {
    let (host, tree) = granted();
    let captured = tree.capture_host_directories().unwrap();
    overwrite(host.path());
    for tree in [&captured, &tree] {
        let read = tree.read_path("/g/k/y", 100);
        assert!(matches!(read, Err(Refused::ChangedOnHost(_))), "{read:?}");
    }
}

#[test]
fn a_path_with_a_new_file_is_that_also_where_the_old_one_has_another_name() {
    let (host, mut tree) = granted();
    assert_eq!(tree.read_path("/g/k/y", 100).unwrap(), b"y\n");
    std::fs::rename(host.path().join("k/y"), host.path().join("k/y~")).unwrap();
    std::fs::write(host.path().join("k/y"), "new\n").unwrap();
    let node = tree.find("/g/k/y").unwrap();
    let mut open = tree.open(node, Access::reading()).unwrap();
    let mut out = [0; 100];
    let len = open.read(&tree, &mut out).unwrap();
    assert_eq!(&out[..len], b"new\n");
}
