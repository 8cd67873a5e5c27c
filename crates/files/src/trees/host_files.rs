//! Files of host directories, as a tree shows them: their numbers, identities and present versions.

use std::fs::File;
use std::sync::Arc;

use crate::error::Refused;
use crate::layers::host::HostFile;
use crate::nodes::inode::{Body, Inode};
use crate::nodes::node::{Kind, Node};
use crate::trees::held_file::HeldFile;
use crate::trees::tree::Tree;

impl Tree {
    /// The inode number of a file, as programs see it: of one in a host directory, the low 32 bits
    /// are those of its number on the host, if no other file was seen with this number before and
    /// the tree is not of an earlier form. No two files of a tree have one number.
    #[must_use]
    pub fn inode_number(&self, node: Node) -> u64 {
        self.lower.layers.inode_number(node).unwrap_or(node.0)
    }

    /// Gives a file of a host directory that the tree has not changed its present size and times.
    /// One that is held has them always.
    pub fn refresh(&self, node: Node) {
        if self.nodes.get(&node).is_none() && self.held_file(node).is_none() {
            self.lower.layers.follow(node);
        }
    }

    /// A file of a layer as it is now, for a copy.
    pub(crate) fn present_inode(&self, node: Node) -> Result<Arc<Inode>, Refused> {
        self.refresh(node);
        let inode = self.lower.layers.inode(node)?;
        let Some(held) = self.held_file(node) else { return Ok(inode) };
        let mut inode = Arc::unwrap_or_clone(inode);
        held.show(node, &mut inode);
        Ok(Arc::new(inode))
    }

    /// The host file that a file shows, open, if it is not read elsewhere.
    pub(crate) fn open_present(&self, node: Node) -> Option<Arc<HeldFile>> {
        let is_host_file = self.nodes.get(&node).is_none() && self.lower.layers.is_known(node);
        if !is_host_file || self.stat(node).ok()?.kind != Kind::File {
            return None;
        }
        HeldFile::new(self.lower.layers.open_present(node)?.0).map(Arc::new)
    }

    /// The host file that was opened as a file, unless the tree has changed that since, or a saved
    /// tree has stored it.
    pub(crate) fn held_file(&self, node: Node) -> Option<&HeldFile> {
        let file = self.held.get(&node)?.file.as_ref()?;
        let is_read = self.nodes.get(&node).is_none() && !self.lower.layers.is_kept(node);
        is_read.then_some(&**file)
    }

    /// Whether the bytes of a file can be read, as far as the host shows when it is opened.
    pub(crate) fn is_readable(&self, node: Node) -> bool {
        self.nodes.get(&node).is_some() || self.lower.layers.is_readable(node)
    }

    /// The host file that this file was when a guest last opened it or read it by its path, or
    /// first looked at it; `None` for other files, and before that.
    #[must_use]
    pub fn seen_host_file(&self, node: Node) -> Option<HostFile> {
        self.lower.layers.seen_file(node)
    }

    /// The host file with exactly the bytes of this one; `None` for any other.
    #[must_use]
    pub fn host_file(&self, node: Node) -> Option<HostFile> {
        self.open_host_file(node).map(|(_, identity)| identity)
    }

    /// That host file, open for reading, and its identity.
    #[must_use]
    pub fn open_host_file(&self, node: Node) -> Option<(Arc<File>, HostFile)> {
        match &self.inode(node).ok()?.body {
            Body::File(content) => self.lower.layers.open_on_host(content),
            _ => None,
        }
    }
}
