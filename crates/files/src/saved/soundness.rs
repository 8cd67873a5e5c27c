//! Whether a tree that was read from bytes is one.
//!
//! Promises: every name leads to a file, every file but held ones has a name, and directories form
//! a tree. Names are counted, and the cost is added up.

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
                    None if self.ground.layers.is_known(entry.node) => entry.kind,
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
                            Body::Directory(d) if self.ground.layers.mounted(d.parent) == at => {}
                            _ => {
                                return Err(damaged("a directory's parent differs from its entry"));
                            }
                        }
                        ahead.push(entry.node);
                    } else {
                        // A directory that was moved is the tree's own.
                        if self.ground.layers.parent(entry.node) != Some(at) {
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
            let below = self.ground.nodes.get(&node);
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
    /// itself, and `untouched` the host directories that it shows unchanged.
    fn check_loops(&self, own: &[Node], untouched: &BTreeSet<Node>) -> Result<(), TreeError> {
        let within = || damaged("a directory is within itself");
        // Directories whose parents lead to the root, or to a directory that was removed.
        let mut settled = BTreeSet::from([Self::ROOT]);
        for &node in own {
            // Files of hosts are changed together with the directories above them, so none of those
            // is untouched.
            let mut above = self.ground.layers.parent(node);
            while let Some(directory) = above.filter(|above| self.nodes.get(above).is_none()) {
                if untouched.contains(&directory) {
                    return Err(within());
                }
                above = self.ground.layers.parent(directory).filter(|next| *next != directory);
            }
            let (mut at, mut path) = (node, BTreeSet::new());
            while !settled.contains(&at) {
                let parent = match self.nodes.get(&at).map(|inode| &inode.body) {
                    Some(Body::Directory(inside)) => self.ground.layers.mounted(inside.parent),
                    _ => break,
                };
                if !path.insert(at) {
                    return Err(within());
                }
                at = parent;
            }
            settled.append(&mut path);
        }
        Ok(())
    }
}
