//! Extended attributes: values, limits, budget, copies and saved trees.

use afresh_files::{Budget, Layer, New, Node, Refused, Time, Tree};

const NOW: Time = Time { seconds: 1, nanos: 0 };
const NAME: &[u8] = b"user.name";

fn with_file(budget: Budget) -> (Tree, Node) {
    let mut tree = Tree::new(budget);
    let node = tree.create(Tree::ROOT, b"f", New::File, 0o644, Time::default()).unwrap();
    (tree, node)
}

fn value(tree: &Tree, node: Node) -> Option<Vec<u8>> {
    tree.attribute(node, NAME).unwrap().map(|value| value.to_vec())
}

#[test]
fn an_attribute_is_set_replaced_listed_and_removed() {
    let (mut tree, node) = with_file(Budget::default());
    let before = tree.used();
    assert_eq!(value(&tree, node), None);
    tree.set_attribute(node, NAME, Some(b"one"), NOW).unwrap();
    tree.set_attribute(node, b"user.a", Some(b""), NOW).unwrap();
    assert_eq!(tree.stat(node).unwrap().times.changed, NOW);
    let names = tree.attribute_names(node).unwrap();
    assert_eq!(
        names.iter().map(|name| name.to_vec()).collect::<Vec<_>>(),
        [b"user.a".to_vec(), NAME.to_vec()]
    );
    let paid = tree.used().bytes;
    tree.set_attribute(node, NAME, Some(b"longer"), NOW).unwrap();
    assert_eq!((value(&tree, node), tree.used().bytes), (Some(b"longer".to_vec()), paid + 3));
    tree.set_attribute(node, NAME, None, NOW).unwrap();
    tree.set_attribute(node, b"user.a", None, NOW).unwrap();
    assert_eq!((value(&tree, node), tree.used()), (None, before));
}

#[test]
fn attributes_stay_within_their_limits_and_the_budget() {
    let (mut tree, node) = with_file(Budget { bytes: 4096, files: 16 });
    let before = tree.clone();
    let long = [b'n'; 256];
    for (name, length, error) in [
        (&long[..], 0, Refused::Invalid),
        (b"", 0, Refused::Invalid),
        (b"user.\0", 0, Refused::Invalid),
        (NAME, (64 << 10) + 1, Refused::TooLarge),
        (NAME, 64 << 10, Refused::Full),
    ] {
        assert_eq!(tree.set_attribute(node, name, Some(&vec![0; length]), NOW), Err(error));
    }
    assert_eq!((&tree, tree.used()), (&before, before.used()));
    assert_eq!(tree.set_attribute(Node(99), NAME, None, NOW), Err(Refused::Missing));
    // The names of one file have a limit, too.
    let (mut tree, node) = with_file(Budget::default());
    let set = |tree: &mut Tree, number: u32| {
        tree.set_attribute(node, format!("user.{number:0>249}").as_bytes(), Some(b""), NOW)
    };
    let count = (0..1000).take_while(|number| set(&mut tree, *number).is_ok()).count();
    assert_eq!((count, set(&mut tree, 1001)), ((64 << 10) / 255, Err(Refused::Full)));
}

#[test]
fn copies_of_a_tree_have_their_own_attributes() {
    let (mut tree, node) = with_file(Budget::default());
    tree.set_attribute(node, NAME, Some(b"then"), NOW).unwrap();
    let checkpoint = tree.clone();
    tree.set_attribute(node, NAME, Some(b"now!"), NOW).unwrap();
    assert_ne!(tree, checkpoint);
    assert_eq!(value(&checkpoint, node), Some(b"then".to_vec()));
    assert!(!checkpoint.diff(&tree).unwrap().is_empty());
    tree = checkpoint.clone();
    assert_eq!(tree, checkpoint);
    // The last name takes attributes along, and refunds them.
    let mut empty = Tree::new(Budget::default());
    empty.write_path("/g", b"", NOW).unwrap();
    tree.remove_path("/f", NOW).unwrap();
    tree.write_path("/g", b"", NOW).unwrap();
    assert_eq!(tree.used(), empty.used());
}

#[test]
fn a_saved_tree_has_its_attributes_and_one_without_is_saved_as_before() {
    let (mut tree, node) = with_file(Budget::default());
    let plain = tree.saved().unwrap();
    assert_eq!(plain.description[0], 1, "the form without attributes");
    tree.set_attribute(node, NAME, Some(b"value"), NOW).unwrap();
    tree.set_attribute(Tree::ROOT, b"user.root", Some(b""), NOW).unwrap();
    let saved = tree.saved().unwrap();
    let restored = Tree::new(Budget::default()).restored(&saved).unwrap();
    assert_eq!((value(&restored, node), restored.used()), (Some(b"value".to_vec()), tree.used()));
    assert_eq!(restored.attribute_names(Tree::ROOT).unwrap().len(), 1);
    assert_eq!(restored.saved().unwrap(), saved);
    tree.set_attribute(node, NAME, None, NOW).unwrap();
    tree.set_attribute(Tree::ROOT, b"user.root", None, NOW).unwrap();
    assert_eq!(tree.saved().unwrap().description[0], 1);
}

#[test]
fn saved_attributes_that_no_file_can_have_are_refused() {
    let (mut tree, node) = with_file(Budget::default());
    tree.set_attribute(node, NAME, Some(b"value"), NOW).unwrap();
    let mut saved = tree.saved().unwrap();
    let good = saved.description.clone();
    let list = |file: u64, list: &[(&[u8], &[u8])]| postcard::to_allocvec(&[(file, list)]).unwrap();
    // A sequence of one item begins with its length.
    let list = |file, items: &[(&[u8], &[u8])]| [vec![1], list(file, items)].concat();
    let tail = list(node.0, &[(NAME, b"value")]);
    assert!(good.ends_with(&tail));
    let start = good.len() - tail.len();
    let long = vec![b'n'; 256];
    let large = vec![0; (64 << 10) + 1];
    for tail in [
        list(node.0, &[]),
        list(node.0 + 5, &[(NAME, b"")]),
        list(node.0, &[(b"", b"")]),
        list(node.0, &[(&long, b"")]),
        list(node.0, &[(b"a\0", b"")]),
        list(node.0, &[(NAME, &large)]),
        list(node.0, &[(NAME, b""), (NAME, b"")]),
        list(node.0, &[(b"b", b""), (b"a", b"")]),
        [list(node.0, &[(NAME, b"")]), vec![0]].concat(),
        vec![],
    ] {
        saved.description.truncate(start);
        saved.description.extend(&tail);
        let restored = Tree::new(Budget::default()).restored(&saved);
        assert!(restored.is_err(), "{tail:?}");
    }
}

#[test]
fn a_refused_attribute_of_a_file_in_a_layer_costs_nothing() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("f"), b"data").unwrap();
    let layer = Layer::directory(directory.path()).unwrap();
    // Room for the file or for its attribute, and for both.
    for (room, fits) in [(300, false), (4096, true)] {
        let tree =
            Tree::new(Budget { bytes: 1 << 20, files: 100 }).with_layer("/", &layer).unwrap();
        let used = tree.used();
        let bytes = used.bytes + room;
        let mut tree = tree.with_budget(Budget { bytes, files: 100 });
        let node = tree.find("/f").unwrap();
        for value in [&[b'v'; 400][..], &[b'v'; 100]] {
            let set = tree.set_attribute(node, NAME, Some(value), NOW);
            assert_eq!(set, if fits { Ok(()) } else { Err(Refused::Full) }, "{room}");
            assert_eq!(tree.used() == used, !fits, "{room}");
        }
        assert_eq!(value(&tree, node), fits.then(|| vec![b'v'; 100]));
    }
}
