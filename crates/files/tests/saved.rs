//! Trees that are saved and restored: deep ones, moved ones, and descriptions that no writer makes.

use afresh_files::{Access, Budget, Layer, New, Refused, Rename, SavedTree, Time, Tree, TreeError};

const NOW: Time = Time { seconds: 0, nanos: 0 };

fn empty() -> Tree {
    Tree::new(Budget::default())
}

#[test]
fn deep_directories_are_restored() {
    let mut tree = empty();
    let mut at = Tree::ROOT;
    for _ in 0..5000 {
        at = tree.create(at, b"d", New::Directory, 0o755, NOW).unwrap();
    }
    tree.create(at, b"leaf", New::File, 0o644, NOW).unwrap();
    let mut again = empty().restored(&tree.saved().unwrap()).unwrap();
    for _ in 0..5000 {
        at = again.parent(at).unwrap();
    }
    assert_eq!(at, Tree::ROOT);
    assert_eq!(again.used(), tree.used());
    again.remove_path("d", NOW).unwrap();
    tree.remove_path("d", NOW).unwrap();
    assert_eq!(again.used(), tree.used());
}

#[test]
fn a_directory_is_read_from_any_position() {
    let mut tree = empty();
    tree.write_path("/a", b"", NOW).unwrap();
    let mut open = tree.open(Tree::ROOT, Access::reading()).unwrap();
    for position in [u64::MAX, 0, u64::MAX, u64::MAX - 1, 1 << 63, 3, u64::MAX] {
        let _ = open.entries(&tree, position).unwrap().count();
    }
}

/// The format of `SavedTree::description`, field by field, for descriptions that no writer makes.
mod description {
    use serde::Serialize;

    pub(super) type Times = [(i64, u32); 3];
    pub(super) type Entry = (Vec<u8>, Option<(u64, u32, bool)>);

    #[derive(Serialize)]
    pub(super) struct SavedDescription {
        pub(super) form: u32,
        pub(super) budget: (u64, u64),
        pub(super) next: u64,
        pub(super) layers: Vec<String>,
        pub(super) hosts: Vec<(u64, Vec<u8>)>,
        pub(super) nodes: Vec<(u64, Node)>,
        pub(super) gone: Vec<u64>,
        pub(super) held: Vec<(u64, u32)>,
        pub(super) pages: u64,
    }

    #[derive(Serialize)]
    pub(super) struct Node {
        pub(super) mode: u32,
        pub(super) times: Times,
        pub(super) paid: bool,
        pub(super) body: Body,
    }

    #[derive(Serialize)]
    pub(super) enum Body {
        #[allow(dead_code, reason = "it keeps the number of the next variant")]
        File,
        Directory {
            parent: u64,
            entries: Vec<Entry>,
        },
    }
}

#[test]
fn directories_within_themselves_are_refused() {
    use description::{Body, Node, SavedDescription};
    let directory = |parent, entries| Node {
        mode: 0o755,
        times: [(0, 0); 3],
        paid: true,
        body: Body::Directory { parent, entries },
    };
    let restored = |nodes: Vec<(u64, Node)>, held| {
        let saved = SavedDescription {
            form: 1,
            budget: (1 << 20, 1 << 10),
            next: 10,
            layers: Vec::new(),
            hosts: Vec::new(),
            nodes,
            gone: Vec::new(),
            held,
            pages: 0,
        };
        let description = postcard::to_allocvec(&saved).unwrap();
        empty().restored(&SavedTree::new(description, Vec::new()))
    };
    let root = Tree::ROOT.0;
    // A directory that was removed while it was open has the parent that it had.
    assert!(restored(vec![(5, directory(root, vec![]))], vec![(5, 1)]).is_ok());
    let within = |result: Result<Tree, TreeError>| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("within itself"), "{error}");
    };
    within(restored(vec![(5, directory(5, vec![]))], vec![(5, 1)]));
    let two = vec![(5, directory(6, vec![])), (6, directory(5, vec![]))];
    within(restored(two, vec![(5, 1), (6, 1)]));
}

#[test]
fn recorded_owners_are_restored_and_those_of_strangers_are_checked() {
    let host = tempfile::tempdir().unwrap();
    std::fs::write(host.path().join("file"), b"host").unwrap();
    let over = || {
        let below = Layer::directory(host.path()).unwrap();
        empty().with_layer("/host", &below).unwrap()
    };
    let mut tree = empty();
    let file = tree.write_path("/file", b"own", NOW).unwrap();
    let before = tree.saved().unwrap().description;
    tree.set_owner(file, Some([33, 44]), NOW).unwrap();
    let saved = tree.saved().unwrap();
    assert_eq!(empty().restored(&saved).unwrap().stat(file).unwrap().owner, Some([33, 44]));
    // The list of owners is last: a count of one, the file, user and group.
    let end = saved.description.len() - 4;
    assert_eq!(saved.description[end..], [1, file.0 as u8, 33, 44]);
    let changed = |last: &[u8]| {
        let description = [&saved.description[..end], last].concat();
        empty().restored(&SavedTree::new(description, saved.pages.clone()))
    };
    for (last, why) in [
        (&[1, 99, 33, 44][..], "of no file"),
        (&[2, 1, 33, 44, 1, 33, 44], "out of order"),
        (&[1, file.0 as u8, 255, 255, 255, 255, 15, 44], "no number"),
        (&[1, file.0 as u8, 33, 44, 0], "after its end"),
    ] {
        let error = changed(last).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    // A file without a recorded owner takes no bytes for it.
    tree.set_owner(file, None, NOW).unwrap();
    assert_eq!(tree.saved().unwrap().description, before);
    let mut tree = over();
    let file = tree.find("/host/file").unwrap();
    assert_eq!(tree.stat(file).unwrap().owner, None);
    tree.set_owner(file, Some([33, 44]), NOW).unwrap();
    let again = over().restored(&tree.saved().unwrap()).unwrap();
    assert_eq!(again.stat_path("/host/file").unwrap().owner, Some([33, 44]));
    assert_eq!(again.inode_number(again.find("/host/file").unwrap()), tree.inode_number(file));
}

#[test]
fn moved_host_directories_are_restored() {
    let host = tempfile::tempdir().unwrap();
    for path in ["a/b/c/file", "a/b/d/file", "e/f/file", "g/file"] {
        let path = host.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"host").unwrap();
    }
    let fresh = || {
        let below = Layer::directory(host.path()).unwrap();
        empty().with_layer("/", &below).unwrap().with_layer("/mnt", &below).unwrap()
    };
    let mut tree = fresh();
    let rename = |tree: &mut Tree, from: &str, to: &str, how| {
        let (from, to) = (from.rsplit_once('/').unwrap(), to.rsplit_once('/').unwrap());
        let (above, below) = (tree.find(from.0).unwrap(), tree.find(to.0).unwrap());
        tree.rename(above, from.1.as_bytes(), below, to.1.as_bytes(), how, NOW).unwrap();
    };
    rename(&mut tree, "/a/b/c", "/e/f/c", Rename::Replace);
    rename(&mut tree, "/e", "/a/b/e", Rename::Replace);
    rename(&mut tree, "/a/b/d", "/g", Rename::Exchange);
    rename(&mut tree, "/mnt/a/b", "/b", Rename::Replace);
    tree.write_path("/b/c/file", b"own", NOW).unwrap();
    tree.remove_path("/mnt/a", NOW).unwrap();
    let again = fresh().restored(&tree.saved().unwrap()).unwrap();
    assert_eq!(again.used(), tree.used());
    for path in ["/a/b/e/f/c/file", "/a/b/d/file", "/g/file", "/b/d/file", "/mnt/e/f/file"] {
        assert_eq!(again.read_path(path, 10).unwrap(), b"host", "{path}");
    }
    assert_eq!(again.read_path("/b/c/file", 10).unwrap(), b"own");
    assert_eq!(again.find("/mnt/a"), Err(Refused::Missing));
    // A directory that has only moved shows the untouched ones below it.
    let mut more = again.clone();
    rename(&mut more, "/mnt/e", "/moved", Rename::Replace);
    let again = fresh().restored(&more.saved().unwrap()).unwrap();
    assert_eq!(again.read_path("/moved/f/file", 10).unwrap(), b"host");
}
