//! Files of host directories, as a tree shows them: their numbers, identities and present versions.

use std::fs::File;
use std::sync::Arc;

use crate::error::Refused;
use crate::layers::host::{HostFile, Occasion};
use crate::nodes::inode::Body;
use crate::nodes::node::Node;
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
    /// One that is held stays the same host file.
    pub fn refresh(&self, node: Node) {
        if self.nodes.get(&node).is_none() {
            let occasion = if self.is_held(node) { Occasion::Held } else { Occasion::Opened };
            self.lower.layers.follow(node, occasion);
        }
    }

    /// The host file that an unchanged file shows.
    pub(crate) fn shown_host_file(&self, node: Node) -> Option<HostFile> {
        self.nodes.get(&node).is_none().then(|| self.lower.layers.seen_file(node))?
    }

    /// Fails if a file that is held was opened as another host file, which was closed since then.
    pub(crate) fn check_same_file(&self, node: Node) -> Result<(), Refused> {
        if self.nodes.get(&node).is_some() {
            return Ok(());
        }
        let file = self.held.get(&node).and_then(|held| held.file);
        match file.is_none_or(|file| self.lower.layers.is_same_file(node, &file)) {
            true => Ok(()),
            false => {
                let path = self.lower.layers.path(node).unwrap_or_default();
                Err(Refused::ChangedOnHost(path.display().to_string()))
            }
        }
    }

    /// Whether the bytes of a file can be read, as far as the host shows when it is opened.
    pub(crate) fn is_readable(&self, node: Node) -> bool {
        self.nodes.get(&node).is_some() || self.lower.layers.is_readable(node)
    }

    /// The host file that this file was when a guest last opened it or read from it, or first
    /// looked at it, or changed it; `None` for other files, and before that.
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
