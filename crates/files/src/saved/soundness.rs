//! Whether a tree that was read from bytes is one.
//!
//! Promises: every name leads to a file, every file but held ones has a name, and directories form
//! a tree. Names are counted, and the cost is added up.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::nodes::inode::Body;
use crate::nodes::name::Name;
use crate::nodes::node::{Kind, Node};
use crate::saved::description::{TreeError, damaged};
use crate::trees::tree::{Tree, cost, name_cost};

impl Tree {
    /// Checks that it is a tree, counts names, notes the directory of each file, and adds up the
    /// cost.
    pub(crate) fn check(&mut self) -> Result<(), TreeError> {
        let mut links: BTreeMap<Node, (u32, Option<(Node, Name)>)> = BTreeMap::new();
        let mut seen = BTreeSet::from([Self::ROOT]);
        let mut ahead = vec![Self::ROOT];
        let mut names = 0;
        // Directories of hosts that are shown as they are there.
        let mut untouched = BTreeSet::new();
        while let Some(at) = ahead.pop() {
            let inode = self.inode(at)?;
            let Body::Directory(inside) = &inode.body else {
                return Err(damaged("a directory's inode has another kind"));
            };
            let mut below = 0;
            for (name, entry) in inside.entries.iter() {
                names += if entry.paid { name_cost(&name.0) } else { 0 };
                let here = self.nodes.get(&entry.node);
                let kind = match here {
                    Some(inode) => inode.kind(),
                    // Host files are taken as they are; only changed directories are followed.
                    None if self.lower.layers.is_known(entry.node) => entry.kind,
                    None => return Err(damaged("a name leads to nothing")),
                };
                if kind != entry.kind {
                    return Err(damaged("a name has another kind than its file"));
                }
                if kind == Kind::Directory {
                    below += 1;
                    if !seen.insert(entry.node) {
                        return Err(damaged("a directory has two names"));
                    }
                    links.entry(entry.node).or_default().1 = Some((at, name.clone()));
                    if let Some(inode) = here {
                        match &inode.body {
                            Body::Directory(d) if self.lower.layers.mounted(d.parent) == at => {}
                            _ => {
                                return Err(damaged("a directory's parent differs from its entry"));
                            }
                        }
                        ahead.push(entry.node);
                    } else {
                        // A directory that was moved is the tree's own.
                        if self.lower.layers.parent(entry.node) != Some(at) {
                            return Err(damaged("a host directory is in another than on its host"));
                        }
                        untouched.insert(entry.node);
                    }
                } else {
                    let (count, only) = links.entry(entry.node).or_default();
                    *count += 1;
                    *only = (*count == 1).then(|| (at, name.clone()));
                }
            }
            links.entry(at).or_default().0 = 2 + below;
        }
        let all: Vec<Node> = self.nodes.iter().map(|(node, _)| *node).collect();
        self.check_loops(&all, &untouched)?;
        let (mut bytes, mut files) = (names, 0_u64);
        for node in all {
            let (count, name) = links.remove(&node).unwrap_or_default();
            if count == 0 && self.held.get(&node).is_none() {
                return Err(damaged("a file has no name, and is not held"));
            }
            let inode = self.nodes.get(&node).ok_or_else(|| damaged("a file is missing"))?;
            if count == 0
                && let Body::Directory(inside) = &inode.body
                && !inside.entries.is_empty()
            {
                return Err(damaged("a directory that was removed is not empty"));
            }
            if inode.paid {
                bytes += cost(inode);
                files += 1;
            } else if let Body::File(content) = &inode.body
                && content.paid > 0
            {
                return Err(damaged("a file that was not paid for has pages"));
            }
            // A file of the layers stays shared with them, and knows its directory.
            let below = self.lower.nodes.get(&node);
            let shared = below.is_some_and(|below| Arc::ptr_eq(below, inode));
            if (inode.links != count || (!shared && inode.name != name))
                && let Some(inode) = self.nodes.get_mut(&node)
            {
                let inode = Arc::make_mut(inode);
                (inode.links, inode.name) = (count, name);
            }
        }
        (self.bytes, self.files) = (bytes, files);
        Ok(())
    }
}

impl Tree {
    /// Refuses directories that are within themselves. `own` are the files that the tree has
    /// itself, and `untouched` the host directories that it shows unchanged. Returns the steps from
    /// a directory to its parent that it took: at most one for each directory.
    fn check_loops(&self, own: &[Node], untouched: &BTreeSet<Node>) -> Result<usize, TreeError> {
        let within = || damaged("a directory is within itself");
        // The first walk that came by each directory. A later one has nothing new above it.
        let mut walked = BTreeMap::from([(Self::ROOT, usize::MAX)]);
        let (mut hosts, mut steps) = (BTreeSet::new(), 0);
        for (walk, &node) in own.iter().enumerate() {
            // Files of hosts are changed together with the directories above them, so none of those
            // is untouched.
            let mut above = self.lower.layers.parent(node);
            while let Some(directory) = above.filter(|above| self.nodes.get(above).is_none()) {
                if !hosts.insert(directory) {
                    break;
                }
                if untouched.contains(&directory) {
                    return Err(within());
                }
                steps += 1;
                above = self.lower.layers.parent(directory).filter(|next| *next != directory);
            }
            let mut at = node;
            while let Some(Body::Directory(inside)) = self.nodes.get(&at).map(|inode| &inode.body) {
                match walked.entry(at) {
                    Entry::Vacant(place) => drop(place.insert(walk)),
                    Entry::Occupied(first) if *first.get() == walk => return Err(within()),
                    Entry::Occupied(_) => break,
                }
                steps += 1;
                at = self.lower.layers.mounted(inside.parent);
            }
        }
        Ok(steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Budget, New, Time};

    const DIRECTORIES: u64 = 200_000;

    /// A tree of directories, each in an earlier one.
    fn directories(parent: impl Fn(usize) -> usize) -> (Tree, Vec<Node>) {
        let mut tree = Tree::new(Budget { bytes: 1 << 30, files: 2 * DIRECTORIES });
        let mut made = vec![Tree::ROOT];
        for number in 1..=DIRECTORIES as usize {
            let (above, name) = (made[parent(number)], number.to_string());
            let now = Time::default();
            made.push(tree.create(above, name.as_bytes(), New::Directory, 0o755, now).unwrap());
        }
        (tree, made)
    }

    #[test]
    fn loops_are_looked_for_in_one_step_for_each_directory() {
        let shapes: [fn(usize) -> usize; 3] = [|_| 0, |number| number - 1, |number| number / 2];
        for parent in shapes {
            let (mut tree, mut made) = directories(parent);
            let untouched = BTreeSet::new();
            for _ in 0..2 {
                let steps = tree.check_loops(&made, &untouched).unwrap();
                assert_eq!(steps, DIRECTORIES as usize);
                made.reverse();
            }
            // The first one is in the last one now, or in itself.
            let last = made[if parent(9) == 0 { 1 } else { DIRECTORIES as usize }];
            let inode = Arc::make_mut(tree.nodes.get_mut(&made[1]).unwrap());
            let Body::Directory(inside) = &mut inode.body else { panic!("it is a directory") };
            inside.parent = last;
            assert!(tree.check_loops(&made, &untouched).is_err());
            assert!(tree.check_loops(&[last], &untouched).is_err());
        }
    }
}
