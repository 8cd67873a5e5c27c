//! Inode numbers of files in host directories, as programs see them.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use afresh_files::{Access, Budget, Layer, New, Node, SavedTree, Time, Tree};

const NOW: Time = Time { seconds: 0, nanos: 0 };

/// A host directory with files at these paths.
fn host(paths: &[&str]) -> tempfile::TempDir {
    let host = tempfile::tempdir().unwrap();
    for path in paths {
        let path = host.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"host").unwrap();
    }
    host
}

fn over(host: &Path) -> Tree {
    Tree::new(Budget::default()).with_layer("/", &Layer::directory(host).unwrap()).unwrap()
}

/// The number of a file, after programs have looked at it.
fn number(tree: &Tree, path: &str) -> u64 {
    let node = tree.find(path).unwrap();
    tree.stat(node).unwrap();
    tree.inode_number(node)
}

fn host_number(host: &Path, path: &str) -> u64 {
    std::fs::symlink_metadata(host.join(path)).unwrap().ino()
}

#[test]
fn files_have_the_low_half_of_their_numbers_on_the_host() {
    let host = host(&["a/b/file", "file"]);
    std::os::unix::fs::symlink("file", host.path().join("link")).unwrap();
    let tree = over(host.path());
    for path in ["a", "a/b", "a/b/file", "file", "link"] {
        let node = match path {
            "link" => tree.lookup(Tree::ROOT, b"link").unwrap(),
            path => tree.find(path).unwrap(),
        };
        tree.stat(node).unwrap();
        let (seen, real) = (tree.inode_number(node), host_number(host.path(), path));
        assert_eq!(seen as u32, real as u32, "{path}");
    }
}

#[test]
fn the_number_in_a_list_is_that_of_the_file() {
    let names: Vec<_> = (0..100).map(|number| format!("a/{number}")).collect();
    let host = host(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let tree = over(host.path());
    for entry in tree.list(tree.find("a").unwrap()).unwrap() {
        let listed = tree.inode_number(entry.node);
        tree.stat(entry.node).unwrap();
        assert_eq!(listed, tree.inode_number(entry.node));
    }
}

#[test]
fn no_two_files_have_the_same_number() {
    let host = host(&["a/one", "a/two", "b/one", "three"]);
    let layer = Layer::directory(host.path()).unwrap();
    let mut tree = over(host.path()).with_layer("/mnt", &layer).unwrap();
    for number in 0..50 {
        tree.write_path(format!("/own{number}"), b"own", NOW).unwrap();
    }
    let mut ahead = vec![Tree::ROOT];
    let (mut nodes, mut numbers) = (0, BTreeSet::new());
    while let Some(node) = ahead.pop() {
        tree.stat(node).unwrap();
        nodes += 1;
        numbers.insert(tree.inode_number(node));
        ahead.extend(tree.list(node).unwrap_or_default().iter().map(|entry| entry.node));
    }
    assert_eq!(nodes, 1 + 2 * 6 + 1 + 50);
    assert_eq!(numbers.len(), nodes);
}

/// Programs take files with one number for the same bytes, and each link may get other bytes.
#[test]
fn each_hard_link_has_another_number_which_stays() {
    let host = host(&["a/one"]);
    for other in ["two", "a/three"] {
        std::fs::hard_link(host.path().join("a/one"), host.path().join(other)).unwrap();
    }
    let mut tree = over(host.path());
    let paths = ["a/one", "two", "a/three"];
    let before = paths.map(|path| number(&tree, path));
    assert_eq!(before[0] as u32, host_number(host.path(), "a/one") as u32);
    assert_eq!(before.into_iter().collect::<BTreeSet<_>>().len(), 3);
    tree.write_path("/two", b"own", NOW).unwrap();
    std::fs::remove_file(host.path().join("a/one")).unwrap();
    std::fs::write(host.path().join("a/one"), b"another").unwrap();
    assert_eq!(paths.map(|path| number(&tree, path)), before);
    let again = over(host.path()).restored(&tree.saved().unwrap()).unwrap();
    assert_eq!(number(&again, "two"), before[1]);
}

#[test]
fn a_file_that_was_renamed_on_the_host_has_one_number_in_lists_and_attributes() {
    let host = host(&["a/one", "b/other"]);
    let tree = over(host.path());
    let before = number(&tree, "a/one");
    std::fs::rename(host.path().join("a/one"), host.path().join("b/two")).unwrap();
    let listed = tree.list(tree.find("b").unwrap()).unwrap();
    let two = listed.iter().find(|entry| &entry.name[..] == b"two").unwrap().node;
    let seen = tree.inode_number(two);
    assert_ne!(seen, before);
    tree.stat(two).unwrap();
    assert_eq!(tree.inode_number(two), seen);
}

#[test]
fn the_number_of_a_list_stays_when_another_file_gets_it_on_the_host() {
    let host = host(&["a/one", "b/other"]);
    let tree = over(host.path());
    let one = tree.list(tree.find("a").unwrap()).unwrap()[0].node;
    let seen = tree.inode_number(one);
    std::fs::rename(host.path().join("a/one"), host.path().join("b/two")).unwrap();
    assert_ne!(number(&tree, "b/two"), seen);
    assert_eq!(tree.inode_number(one), seen);
}

#[test]
fn a_changed_file_keeps_its_number_and_shares_it_with_no_later_file() {
    let host = host(&["a/other", "file"]);
    let mut tree = over(host.path());
    let before = number(&tree, "file");
    tree.write_path("/file", b"own", NOW).unwrap();
    assert_eq!(number(&tree, "file"), before);
    // The host gives the number of the file to another one.
    std::fs::hard_link(host.path().join("file"), host.path().join("a/later")).unwrap();
    std::fs::remove_file(host.path().join("file")).unwrap();
    assert_ne!(number(&tree, "a/later"), before);
    let saved = tree.saved();
    let again = || over(host.path());
    // Without the file on the host there is nothing below the changed one.
    assert!(again().restored(&saved.unwrap()).is_err());
    std::fs::write(host.path().join("file"), b"another").unwrap();
    let again = again().restored(&tree.saved().unwrap()).unwrap();
    assert_eq!(number(&again, "file"), before);
    assert_eq!(host_number(host.path(), "a/later") as u32, before as u32);
    assert_ne!(number(&again, "a/later"), before);
    assert_ne!(number(&again, "a/later"), number(&again, "a"));
}

#[test]
fn numbers_stay_when_a_tree_is_restored_after_the_host_has_replaced_files() {
    let host = host(&["a/changed", "a/open", "a/other"]);
    let mut tree = over(host.path());
    let open = tree.open(tree.find("a/open").unwrap(), Access::reading()).unwrap();
    tree.write_path("/a/changed", b"own", NOW).unwrap();
    tree.create(Tree::ROOT, b"own", New::File, 0o644, NOW).unwrap();
    let paths = ["a", "a/changed", "a/open", "own"];
    let before = paths.map(|path| number(&tree, path));
    let saved = tree.saved().unwrap();
    assert_eq!(saved, tree.saved().unwrap());
    for name in ["changed", "open"] {
        let path = host.path().join("a").join(name);
        std::fs::rename(&path, host.path().join(name)).unwrap();
        std::fs::write(path, b"new").unwrap();
    }
    let again = over(host.path()).restored(&saved).unwrap();
    assert_eq!(paths.map(|path| number(&again, path)), before);
    assert_eq!(again.inode_number(open.node), before[2]);
    // An unchanged file is the host's, as are its content and times.
    assert_eq!(number(&again, "a/other"), number(&tree, "a/other"));
    assert_eq!(again.saved().unwrap(), saved);
}

/// Numbers in a description, in place of those that it has at its end.
fn with_numbers(saved: &SavedTree, numbers: &[(u64, u64)], given: &[(u64, u64)]) -> SavedTree {
    let end = postcard::to_allocvec(numbers).unwrap();
    let mut description = saved.description.strip_suffix(&end[..]).unwrap().to_vec();
    description.extend(postcard::to_allocvec(given).unwrap());
    SavedTree::new(description, saved.pages.clone())
}

#[test]
fn numbers_that_no_file_of_the_layer_can_have_are_refused() {
    let host = host(&["file"]);
    let mut tree = over(host.path());
    let node = tree.find("file").unwrap();
    tree.write_path("/file", b"own", NOW).unwrap();
    let seen = tree.inode_number(node);
    let saved = tree.saved().unwrap();
    let restored = |given: &[(u64, u64)]| {
        over(host.path()).restored(&with_numbers(&saved, &[(node.0, seen)], given))
    };
    assert_eq!(number(&restored(&[(node.0, seen + 1)]).unwrap(), "file"), seen + 1);
    for number in [0, 1, 7, seen ^ 1 << 50, seen ^ 1 << 63, u64::MAX] {
        let error = restored(&[(node.0, number)]).unwrap_err().to_string();
        assert!(error.contains("an inode number"), "{error}");
    }
    assert!(restored(&[(node.0 ^ 1, seen)]).is_err());
    let error = restored(&[(node.0, seen), (node.0, seen + 1)]).unwrap_err().to_string();
    assert!(error.contains("out of order"), "{error}");
    assert!(restored(&[(Tree::ROOT.0, seen)]).is_err());
}

#[test]
fn files_of_a_tree_of_an_earlier_form_keep_the_numbers_of_their_paths() {
    let host = host(&["a/file", "changed"]);
    let mut tree = over(host.path());
    let node = tree.find("changed").unwrap();
    tree.write_path("/changed", b"own", NOW).unwrap();
    let saved = tree.saved().unwrap();
    // An earlier form ends before the attributes and the numbers.
    let ends = [(node.0, tree.inode_number(node))];
    let earlier = with_numbers(&saved, &ends, &[]);
    let mut description = earlier.description;
    assert_eq!(description.split_off(description.len() - 2), [0, 0]);
    assert_eq!(std::mem::replace(&mut description[0], 1), 3);
    let earlier = SavedTree::new(description, earlier.pages);
    let again = over(host.path()).restored(&earlier).unwrap();
    for path in ["a", "a/file", "changed"] {
        let Node(path_number) = again.find(path).unwrap();
        assert_eq!(number(&again, path), path_number, "{path}");
    }
    assert_eq!(again.saved().unwrap(), earlier);
}
