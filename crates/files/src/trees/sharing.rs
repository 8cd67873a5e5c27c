//! The memory that trees share with their clones.

use std::sync::Arc;

use crate::nodes::content::{Content, cost};
use crate::nodes::inode::{Body, Entry, Inode};
use crate::nodes::map::Map;
use crate::nodes::name::Name;
use crate::trees::tree::{NODE_COST, Tree, name_cost};

impl Tree {
    /// Bytes of memory of this tree that it does not share with `other`, a relative of it. As in
    /// [`Tree::used`], contents of layers do not count. Pages of the same content that were written
    /// apart count. The cost is proportional to what is not shared.
    #[must_use]
    pub fn unshared_bytes(&self, other: &Self) -> u64 {
        let differing = self.nodes.differing(&other.nodes, Arc::ptr_eq).into_iter();
        let own = differing.filter_map(|(_, own, other)| Some((own?, other)));
        own.fold(0, |sum: u64, (own, other)| {
            sum.saturating_add(unshared(own, other.map(|inode| &**inode)))
        })
    }
}

fn unshared(own: &Inode, other: Option<&Inode>) -> u64 {
    let body = match (&own.body, other.map(|inode| &inode.body)) {
        (Body::File(own), Some(Body::File(other))) => unshared_pages(own, other),
        (Body::File(own), _) => own.paid,
        (Body::Directory(own), Some(Body::Directory(other))) => {
            unshared_names(&own.entries, &other.entries)
        }
        (Body::Directory(own), _) => unshared_names(&own.entries, &Map::default()),
        (Body::Link(target), _) => target.len() as u64,
        (Body::Device(_), _) => 0,
    };
    NODE_COST + own.attributes.cost() + body
}

fn unshared_pages(own: &Content, other: &Content) -> u64 {
    let differing = own.pages.differing(&other.pages, Arc::ptr_eq).into_iter();
    differing.filter_map(|(_, own, _)| own).map(|page| cost(page.len())).sum()
}

fn unshared_names(own: &Map<Name, Entry>, other: &Map<Name, Entry>) -> u64 {
    let differing = own.differing(other, |own, other| own.node == other.node);
    let own = differing.into_iter().filter_map(|(name, own, _)| own.map(|entry| (name, entry)));
    own.filter(|(_, entry)| entry.paid).map(|(name, _)| name_cost(&name.0)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Budget, Time};

    const NOW: Time = Time { seconds: 0, nanos: 0 };
    const BYTES: u64 = 1 << 20;
    /// The costs of files and names.
    const SLACK: u64 = 4 << 10;

    fn check(bytes: u64, expected: u64) {
        assert!((expected..=expected + SLACK).contains(&bytes), "{bytes} of {expected}");
    }

    #[test]
    fn pages_that_a_clone_has_written_count_even_with_the_same_bytes() {
        let empty = Tree::new(Budget { bytes: 1 << 30, files: 1 << 10 });
        let mut one = empty.clone();
        let content = vec![1; BYTES as usize];
        one.write_path("/a", &content, NOW).unwrap();
        one.write_path("/b", &content, NOW).unwrap();
        assert_eq!(one.unshared_bytes(&one.clone()), 0);
        check(empty.unshared_bytes(&one), 0);
        check(one.unshared_bytes(&empty), 2 * BYTES);
        assert!(one.unshared_bytes(&empty) >= one.used().bytes);
        let mut two = one.clone();
        two.write_path("/a", &content, NOW).unwrap();
        check(two.unshared_bytes(&one), BYTES);
        check(one.unshared_bytes(&two), BYTES);
        two.remove_path("/b", NOW).unwrap();
        check(one.unshared_bytes(&two), 2 * BYTES);
        check(two.unshared_bytes(&one), BYTES);
    }
}
