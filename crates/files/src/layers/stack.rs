//! All layers of a tree, read by source.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Refused;
use crate::layers::archive::Archive;
use crate::layers::host::{HOST, HostDirectory, HostFile};
use crate::layers::name_lookup::NameLookup;
use crate::nodes::content::Content;
use crate::nodes::inode::{Body, Inode};
use crate::nodes::node::Node;
use crate::nodes::source::{LowerBytes, Source, SourceVersion};

#[derive(Clone, Debug)]
pub(crate) enum Part {
    Host(Arc<HostDirectory>),
    Archive(Arc<Archive>),
}

/// All layers of a tree.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layers {
    pub(crate) parts: Vec<Part>,
    /// Directories of hosts' that a directory of the tree stands for.
    pub(crate) mounted: BTreeMap<Node, Node>,
}

impl Layers {
    /// Such as no directory of the tree stands for one of.
    pub(crate) fn of(parts: Vec<Part>) -> Self {
        Self { parts, mounted: BTreeMap::new() }
    }

    fn host(&self, node: Node) -> Option<&HostDirectory> {
        if node.0 & HOST == 0 {
            return None;
        }
        match self.parts.get(((node.0 & !HOST) >> 48) as usize) {
            Some(Part::Host(host)) => Some(host),
            _ => None,
        }
    }

    pub(crate) fn inode(&self, node: Node) -> Result<Arc<Inode>, Refused> {
        self.host(node).ok_or(Refused::Missing)?.inode(node)
    }

    /// Looks up `name` in a directory of a layer that need not be listed for it.
    pub(crate) fn lookup(
        &self,
        directory: Node,
        name: &[u8],
        search: bool,
    ) -> Result<NameLookup, Refused> {
        self.host(directory).ok_or(Refused::Missing)?.lookup(directory, name, search)
    }

    /// The directory above a directory of a layer that was not listed yet, and its name there.
    pub(crate) fn unlisted(&self, directory: Node) -> Option<(Node, Arc<[u8]>)> {
        let (above, name) = self.host(directory)?.unlisted(directory)?;
        Some((self.mounted(above), name))
    }

    /// The path of a directory that a host process has removed or replaced, after lookups have
    /// found names in it.
    pub(crate) fn lost_directory(&self, node: Node) -> Option<PathBuf> {
        self.host(node)?.lost_directory(node)
    }

    /// The directory of a file in a layer.
    pub(crate) fn parent(&self, node: Node) -> Option<Node> {
        Some(self.mounted(self.host(node)?.parent(node)?))
    }

    /// The directory of the tree that a host directory is mounted as, or the node itself.
    pub(crate) fn mounted(&self, node: Node) -> Node {
        self.mounted.get(&node).copied().unwrap_or(node)
    }

    /// The host file that has exactly `content`, which is open for reading, and its identity.
    pub(crate) fn open_on_host(&self, content: &Content) -> Option<(Arc<File>, HostFile)> {
        let under = content.under.as_ref().filter(|under| under.len == content.size)?;
        let Source::Host(node) = under.source else { return None };
        let found = self.host(node)?.open_on_host(node)?;
        let is_version = under.version.is_none_or(|version| found.1.version() == version);
        let is_whole = content.pages.is_empty() && found.1.size() == content.size;
        (is_whole && is_version).then_some(found)
    }

    /// Shows the present version of a host file.
    pub(crate) fn follow(&self, node: Node) {
        if let Some(host) = self.host(node) {
            host.follow(node);
        }
    }

    /// A host file, open, unless it was stored with a saved tree.
    pub(crate) fn open_present(&self, node: Node) -> Option<(Arc<File>, HostFile)> {
        self.host(node)?.open_on_host(node)
    }

    /// Whether a host file is read where a saved tree has stored it.
    pub(crate) fn is_kept(&self, node: Node) -> bool {
        self.host(node).is_some_and(HostDirectory::is_kept)
    }

    /// Whether the host lets this process read a file, if it is one of the host.
    pub(crate) fn is_readable(&self, node: Node) -> bool {
        self.host(node).is_none_or(|host| host.is_readable(node))
    }

    /// The host file that a file shows, if a guest has looked at it.
    pub(crate) fn seen_file(&self, node: Node) -> Option<HostFile> {
        self.host(node)?.seen_file(node)
    }

    /// Whether a directory of the tree is the top of a host directory.
    pub(crate) fn is_mount_point(&self, node: Node) -> bool {
        self.hosts().any(|host| self.mounted.get(&host.root()) == Some(&node))
    }

    /// Whether a host directory has shown a file of that number.
    pub(crate) fn is_known(&self, node: Node) -> bool {
        self.host(node).is_some_and(|host| host.parent(node).is_some())
    }

    /// The path of a host file, below its directory.
    pub(crate) fn path(&self, node: Node) -> Option<PathBuf> {
        self.host(node)?.path(node).ok()
    }

    /// Makes a host's file known that has that number and path.
    pub(crate) fn enter(&self, node: Node, path: &Path) -> Result<(), Refused> {
        match self.host(node).ok_or(Refused::Missing)?.enter(path)? == node {
            true => Ok(()),
            false => Err(Refused::Invalid),
        }
    }

    /// The inode number of a host file.
    pub(crate) fn inode_number(&self, node: Node) -> Option<u64> {
        Some(self.host(node)?.inode_number(node))
    }

    /// The inode number of a host file that a guest has seen.
    pub(crate) fn lasting_number(&self, node: Node) -> Option<u64> {
        self.host(node)?.lasting_number(node)
    }

    /// Gives a host file the inode number that it had in a saved tree.
    pub(crate) fn restore_number(&self, node: Node, number: u64) -> Result<(), Refused> {
        self.host(node).ok_or(Refused::Missing)?.restore_number(node, number)
    }

    /// The host directories among them.
    pub(crate) fn hosts(&self) -> impl Iterator<Item = &HostDirectory> {
        self.parts.iter().filter_map(|part| match part {
            Part::Host(host) => Some(&**host),
            Part::Archive(_) => None,
        })
    }

    /// Bytes that a source has.
    pub(crate) fn len(&self, source: Source) -> Result<u64, Refused> {
        match source {
            Source::Host(node) => match &self.inode(node)?.body {
                Body::File(content) => Ok(content.size),
                _ => Err(Refused::Invalid),
            },
            Source::Archive { layer, file } => match self.parts.get(layer as usize) {
                Some(Part::Archive(archive)) => archive.len(file).ok_or(Refused::Missing),
                _ => Err(Refused::Missing),
            },
        }
    }
}

impl LowerBytes for Layers {
    fn read(
        &self,
        source: Source,
        version: Option<SourceVersion>,
        at: u64,
        out: &mut [u8],
    ) -> Result<(), Refused> {
        match source {
            Source::Host(node) => {
                self.host(node).ok_or(Refused::Missing)?.read(node, version, at, out)
            }
            Source::Archive { layer, file } => match self.parts.get(layer as usize) {
                Some(Part::Archive(archive)) => archive.read(file, version, at, out),
                _ => Err(Refused::Missing),
            },
        }
    }

    fn next_data(&self, source: Source, at: u64) -> Option<u64> {
        match source {
            Source::Host(node) => self.host(node)?.next_data(node, at),
            Source::Archive { layer, file } => match self.parts.get(layer as usize) {
                Some(Part::Archive(archive)) => archive.next_data(file, at),
                _ => None,
            },
        }
    }
}
