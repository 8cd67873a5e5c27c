//! Any bytes as a saved file tree, or as the layers of one: refused, or a tree that can be read,
//! changed and saved, and that comes back from the saved bytes as it was. Each takes memory in
//! proportion to its bytes.
//!
//! The first byte is `t` for a tree, or `l` for layers. A byte with the number of their pages
//! follows the latter.
#![no_main]

use std::collections::VecDeque;
use std::sync::Arc;

use afresh_budget::meter::{Meter, within};
use afresh_files::{Budget, Kind, LayerBytes, Refused, SavedTree, Time, Tree, Walk};
use afresh_fuzz::accepted;
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Bytes of memory for a byte of a tree: a directory is a few bytes, and an inode with a map.
const EACH: usize = 1024;
/// Memory for messages, and for reads of the target.
const ROOM: usize = 1 << 20;
/// Files that are looked at.
const MAX_FILES: usize = 256;

/// The pages of layers, all alike.
#[derive(Debug)]
struct Sevens;

impl LayerBytes for Sevens {
    fn read_at(&self, _: u64, out: &mut [u8]) -> Result<(), String> {
        out.fill(7);
        Ok(())
    }
}

/// Reads everything that the tree shows.
fn look(tree: &Tree) {
    let mut ahead = VecDeque::from([Tree::ROOT]);
    let mut bytes = vec![0; 8192];
    for _ in 0..MAX_FILES {
        let Some(node) = ahead.pop_front() else { return };
        let stat = tree.stat(node).expect("a name leads to a file");
        match stat.kind {
            Kind::Directory => {
                let listed = tree.list(node).expect("it is a directory");
                ahead.extend(listed.iter().map(|entry| entry.node));
                for entry in listed.iter().take(MAX_FILES) {
                    let found = tree.walk(&entry.name, Walk::beneath(node).follow(false));
                    let found = found.and_then(|place| place.node()).expect("it is listed");
                    assert_eq!(found, entry.node);
                }
                tree.parent(node).expect("it has a parent");
            }
            Kind::File => {
                for at in [0, stat.size.saturating_sub(100)] {
                    let len = tree.read(node, at, &mut bytes).expect("bytes can be read");
                    assert_eq!(len as u64, stat.size.saturating_sub(at).min(8192));
                }
            }
            Kind::Link => {
                tree.read_link(node).expect("a link has a target");
                let _ = tree.walk(b"link", Walk::new(node));
            }
            _ => {}
        }
    }
}

/// Changes the tree, within its budget.
fn change(tree: &mut Tree) {
    let now = Time::default();
    let before = tree.used();
    match tree.write_path("/new/file", &[1; 5000], now) {
        Ok(_) => {
            tree.remove_path("/new/file", now).expect("it was just made");
            assert!(tree.used().bytes <= before.bytes.max(tree.budget().bytes));
        }
        Err(Refused::Layer(error)) => panic!("{error}"),
        Err(_) => assert_eq!(tree.used(), before),
    }
    for entry in tree.list(Tree::ROOT).expect("there is a root").into_iter().take(8) {
        let _ = tree.remove_path(&entry.name, now);
    }
}

fuzz_target!(|data: &[u8]| {
    let (kind, data) = match data {
        [kind @ (b't' | b'l'), data @ ..] => (*kind, data),
        _ => return,
    };
    let most = data.len() * EACH + ROOM;
    let empty = Tree::new(Budget { bytes: 64 << 10, files: 64 });
    if kind == b't' {
        let read = || {
            let saved = SavedTree::from_bytes(data)?;
            empty.restored(&saved).map(|tree| (tree, saved.pages.len()))
        };
        let Some((mut tree, _)) = accepted(within(most, read).0) else { return };
        within(most, || look(&tree));
        let saved = tree.saved().expect("it was read from as many bytes");
        assert_eq!(empty.restored(&saved).expect("it was just saved"), tree);
        within(most, || change(&mut tree));
    } else {
        let [pages, description @ ..] = data else { return };
        let bytes: Arc<dyn LayerBytes> = Arc::new(Sevens);
        let budget = Budget { bytes: 64 << 10, files: 64 };
        let read = || Tree::with_stored_layers(budget, description, u64::from(*pages), &bytes);
        let Some(mut tree) = accepted(within(most, read).0) else { return };
        assert_eq!(tree.used(), Budget { bytes: 0, files: 0 });
        within(most, || look(&tree));
        within(most, || change(&mut tree));
        let saved = tree.saved().expect("the changes are few");
        let again = Tree::with_stored_layers(budget, description, u64::from(*pages), &bytes);
        again.expect("it was accepted").restored(&saved).expect("it was just saved");
    }
});
