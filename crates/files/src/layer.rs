//! Read-only layers below a tree: a host directory, a zip, a tar, an OCI image.
//!
//! Promises: a layer is never written; no layer leads outside itself; claims of an archive are
//! checked against limits before memory is reserved for it. May break it: changes to a host
//! directory while trees are over it (names and attributes stay as first seen, contents do not).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::archive::Archive;
use crate::changeset::Changeset;
use crate::content::Content;
use crate::error::{LayerError, Refused};
use crate::host::{HOST, HostDirectory, HostFile};
use crate::node::{Body, Directory, Entry, Inode, Kind, Node, Time};
use crate::tree::{Ground, New, Tree, check_name};
use crate::{OciImage, tar, zip};

/// Limits of archive contents, checked before use. For those from strangers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerLimits {
    /// Bytes, unpacked.
    pub bytes: u64,
    /// Files, directories and links.
    pub files: u64,
}

impl Default for LayerLimits {
    /// 8 GiB in a million files.
    fn default() -> Self {
        Self { bytes: 8 << 30, files: 1 << 20 }
    }
}

/// A read-only source of files below a tree.
#[derive(Debug)]
pub struct Layer {
    pub(crate) parts: Vec<Part>,
}

#[derive(Clone, Debug)]
pub(crate) enum Part {
    Host(Arc<HostDirectory>),
    Archive(Arc<Archive>),
}

impl Layer {
    /// Opens `path`: the layout of an OCI image, another directory, a zip, or a tar, compressed or
    /// not.
    ///
    /// # Errors
    /// [`LayerError`].
    pub fn open(path: impl AsRef<Path>, limits: &LayerLimits) -> Result<Self, LayerError> {
        let path = path.as_ref();
        if path.join("oci-layout").is_file() {
            Self::image(path, limits)
        } else if path.is_dir() {
            Self::directory(path)
        } else if zip::is_zip(path)? {
            Self::zip(path, limits)
        } else {
            Self::tar(path, limits)
        }
    }

    /// A host directory. It is read on demand, and never left through a link: its symbolic links
    /// are resolved within the tree. Only files, directories and links are shown.
    ///
    /// # Errors
    /// [`LayerError::Read`].
    pub fn directory(path: impl AsRef<Path>) -> Result<Self, LayerError> {
        let host = HostDirectory::open(path.as_ref())?;
        Ok(Self { parts: vec![Part::Host(Arc::new(host))] })
    }

    /// A directory `below` the directory `top`, as [`Layer::directory`]. No symbolic link is
    /// followed on the way from `top`, so that a path from a stranger leads nowhere else.
    ///
    /// # Errors
    /// [`LayerError::Read`].
    pub fn subdirectory(
        top: impl AsRef<Path>,
        below: impl AsRef<Path>,
    ) -> Result<Self, LayerError> {
        let host = HostDirectory::open(top.as_ref())?.subdirectory(below.as_ref())?;
        Ok(Self { parts: vec![Part::Host(Arc::new(host))] })
    }

    /// A zip. Files are unpacked on first read, and cached with the layer.
    ///
    /// # Errors
    /// [`LayerError`].
    pub fn zip(path: impl AsRef<Path>, limits: &LayerLimits) -> Result<Self, LayerError> {
        let archive = zip::open(path.as_ref(), limits)?;
        Ok(Self { parts: vec![Part::Archive(Arc::new(archive))] })
    }

    /// A tar, plain or compressed with gzip or zstd; a compressed one is unpacked to a temporary
    /// file first.
    ///
    /// # Errors
    /// [`LayerError`].
    pub fn tar(path: impl AsRef<Path>, limits: &LayerLimits) -> Result<Self, LayerError> {
        let archive = tar::open(path.as_ref(), limits)?;
        Ok(Self { parts: vec![Part::Archive(Arc::new(archive))] })
    }

    /// One host file under a name. It is opened once, and read when the guest reads.
    ///
    /// # Errors
    /// [`LayerError`]: `path` is not a readable file.
    pub fn file(path: impl AsRef<Path>, name: impl AsRef<[u8]>) -> Result<Self, LayerError> {
        let archive = Archive::file(path.as_ref(), name.as_ref())?;
        Ok(Self { parts: vec![Part::Archive(Arc::new(archive))] })
    }

    /// Names the content of the layer uniquely: by a package and its version, or by a digest. Trees
    /// are distinguished by it, so the layer is not read for that. A snapshot of a guest whose
    /// files are over such layers alone does not contain them, but needs the layers again. The
    /// caller guarantees that every layer with this name has the same bytes. Host directories have
    /// no fixed content, so this does not change them.
    #[must_use]
    pub fn known_as(mut self, what: impl Into<String>) -> Self {
        let what = what.into();
        for part in &mut self.parts {
            if let Part::Archive(archive) = part
                && let Some(archive) = Arc::get_mut(archive)
            {
                archive.known_as = Some(what.clone());
            }
        }
        self
    }

    /// An OCI image in a directory of the OCI layout: the layers of its only image, or of the one
    /// for this machine.
    ///
    /// # Errors
    /// [`LayerError`].
    pub fn image(path: impl AsRef<Path>, limits: &LayerLimits) -> Result<Self, LayerError> {
        Ok(OciImage::open(path, None, limits)?.layer)
    }
}

/// Where the bytes of a file below are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Host(Node),
    Archive { layer: u32, file: u32 },
}

/// All layers of a tree.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layers {
    pub(crate) parts: Vec<Part>,
    /// Directories of hosts' that a directory of the tree stands for.
    mounted: BTreeMap<Node, Node>,
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

    /// The directory of a file in a layer.
    pub(crate) fn parent(&self, node: Node) -> Option<Node> {
        Some(self.mounted(self.host(node)?.parent(node)?))
    }

    /// The directory of the tree that a host directory is mounted as, or the node itself.
    pub(crate) fn mounted(&self, node: Node) -> Node {
        self.mounted.get(&node).copied().unwrap_or(node)
    }

    /// The host file that has exactly `content`.
    pub(crate) fn on_host(&self, content: &Content) -> Option<HostFile> {
        let under = content.under.as_ref().filter(|under| under.len == content.size)?;
        let Source::Host(node) = under.source else { return None };
        let file = self.host(node)?.on_host(node)?;
        (content.pages.is_empty() && file.size() == content.size).then_some(file)
    }

    /// Whether a host directory has shown a file of that number.
    pub(crate) fn is_known(&self, node: Node) -> bool {
        self.host(node).is_some_and(|host| host.parent(node).is_some())
    }

    /// The path of a host file, below its directory.
    pub(crate) fn path(&self, node: Node) -> Option<std::path::PathBuf> {
        self.host(node)?.path(node).ok()
    }

    /// Makes a host's file known that has that number and path.
    pub(crate) fn enter(&self, node: Node, path: &Path) -> Result<(), Refused> {
        match self.host(node).ok_or(Refused::Missing)?.enter(path)? == node {
            true => Ok(()),
            false => Err(Refused::Invalid),
        }
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

    /// The next position from `at` on that is not in a hole, as far as the source records holes.
    pub(crate) fn next_data(&self, source: Source, at: u64) -> Option<u64> {
        match source {
            Source::Host(node) => self.host(node)?.next_data(node, at),
            Source::Archive { layer, file } => match self.parts.get(layer as usize) {
                Some(Part::Archive(archive)) => archive.next_data(file, at),
                _ => None,
            },
        }
    }

    pub(crate) fn read(&self, source: Source, at: u64, out: &mut [u8]) -> Result<(), Refused> {
        match source {
            Source::Host(node) => self.host(node).ok_or(Refused::Missing)?.read(node, at, out),
            Source::Archive { layer, file } => match self.parts.get(layer as usize) {
                Some(Part::Archive(archive)) => archive.read(file, at, out),
                _ => Err(Refused::Missing),
            },
        }
    }
}

/// One item of an archive: the file at a path, or its removal.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) path: Vec<u8>,
    pub(crate) what: EntryKind,
    pub(crate) mode: u32,
    pub(crate) time: Time,
}

impl Item {
    /// Its length.
    pub(crate) fn bytes(&self) -> u64 {
        if let EntryKind::File(_, bytes) = self.what { bytes } else { 0 }
    }
}

#[derive(Clone, Debug)]
pub(crate) enum EntryKind {
    /// By number in the archive, and how long it is.
    File(u32, u64),
    Directory,
    Link(Vec<u8>),
    /// A hard link to a path of this archive or of one below it.
    Same(Vec<u8>),
    /// A device or a pipe, which is not shown. It replaces the file that layers below have there.
    Skipped,
    /// Removes the file or the directory that layers below have there.
    Gone,
    /// Removes the entries that layers below have in this directory.
    Empty,
}

/// The names of a path in a layer.
pub(crate) fn names_of(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|b| *b == b'/').filter(|name| !name.is_empty() && *name != b".")
}

impl Tree {
    /// Puts the tree over a layer: its contents are visible at `at`, a path of this tree, whose
    /// directories are made. Where a layer that was added before has the same name, directories are
    /// joined and everything else is replaced. The contents of layers do not count towards the
    /// budget.
    ///
    /// # Errors
    /// [`LayerError::Bad`] for a tree that was changed already, and for an archive whose names
    /// contradict each other.
    pub fn over(mut self, at: impl AsRef<[u8]>, layer: &Layer) -> Result<Self, LayerError> {
        let said = || String::from_utf8_lossy(at.as_ref()).into_owned();
        let bad = |why: String| LayerError::Bad { path: said(), why };
        if self.bytes != 0 || self.files != 0 || !self.held.is_empty() {
            return Err(bad("layers are put below a tree before anything is written to it".into()));
        }
        // The numbers that the layer's files get must not be paid for.
        let budget = std::mem::replace(
            &mut self.budget,
            crate::Budget { bytes: u64::MAX / 2, files: u64::MAX / 2 },
        );
        let mut layers = self.ground.layers.clone();
        let top = self.directory_at(at.as_ref()).map_err(|e| bad(e.to_string()))?;
        let mut changes = Changeset::new(top);
        // The first layer of an image has the limit of all of them.
        let limits = layer.parts.iter().map(|part| match part {
            Part::Archive(archive) => archive.max_nodes,
            Part::Host(_) => 0,
        });
        let (most, before) = (limits.max().unwrap_or_default(), self.nodes.len() as u64);
        for part in &layer.parts {
            let number = layers.parts.len() as u32;
            match part {
                Part::Host(host) => {
                    let host = Arc::new(host.numbered(number));
                    layers.parts.push(Part::Host(host.clone()));
                    self.share(layers.clone());
                    self.join(&mut layers, top, host.root()).map_err(|e| bad(e.to_string()))?;
                }
                Part::Archive(archive) => {
                    layers.parts.push(Part::Archive(archive.clone()));
                    self.share(layers.clone());
                    changes.next_layer(number);
                    for item in &archive.items {
                        changes.apply(&mut self, item).map_err(|error| LayerError::Bad {
                            path: archive.name.clone(),
                            why: format!("{}: {error}", String::from_utf8_lossy(&item.path)),
                        })?;
                        // A path makes directories that are no items.
                        if (self.nodes.len() as u64).saturating_sub(before) > most {
                            let (path, what) = (archive.name.clone(), "files");
                            return Err(LayerError::Limit { path, what, most });
                        }
                    }
                }
            }
        }
        self.settle_ground(layers);
        self.budget = budget;
        Ok(self)
    }

    fn share(&mut self, layers: Layers) {
        self.ground = Arc::new(Ground::bare(layers));
    }

    /// Makes everything that is there the layers' own.
    fn settle_ground(&mut self, layers: Layers) {
        let all: Vec<Node> = self.nodes.iter().map(|(node, _)| *node).collect();
        for node in all {
            if let Some(inode) = self.nodes.get_mut(&node) {
                let inode = Arc::make_mut(inode);
                inode.paid = false;
                if let Body::Directory(inside) = &mut inode.body {
                    inside.unpay();
                }
            }
        }
        (self.bytes, self.files) = (0, 0);
        self.ground = Arc::new(Ground::new(self.nodes.clone(), self.next, layers));
    }

    /// The directory at a path of a layer, made where it is missing.
    fn directory_at(&mut self, path: &[u8]) -> Result<Node, Refused> {
        let mut at = Self::ROOT;
        for name in names_of(path) {
            at = self.directory_in(at, name)?;
        }
        Ok(at)
    }

    pub(crate) fn directory_in(&mut self, at: Node, name: &[u8]) -> Result<Node, Refused> {
        check_name(name)?;
        match self.entry(at, name)? {
            Some((node, Kind::Directory)) => Ok(node),
            // As a system does that unpacks an image: within the tree.
            Some((node, Kind::Link)) => {
                let target = self.read_link(node)?;
                let found = self.walk_to(at, &target)?;
                match self.stat(found)?.kind {
                    Kind::Directory => Ok(found),
                    _ => Err(Refused::NotDirectory),
                }
            }
            Some(_) => Err(Refused::NotDirectory),
            None => self.create(at, name, New::Directory, 0o755, Time::default()),
        }
    }

    /// Adds the entries of a host directory to a directory of the tree.
    fn join(&mut self, layers: &mut Layers, at: Node, host: Node) -> Result<(), Refused> {
        layers.mounted.insert(host, at);
        self.share(layers.clone());
        let Body::Directory(below) = self.inode(host)?.body.clone() else {
            return Err(Refused::NotDirectory);
        };
        if self.list(at)?.is_empty() {
            let entries = below.entries.clone();
            let count = entries.iter().filter(|(_, e)| e.kind == Kind::Directory).count();
            self.own_for_layer(at)?.entries = entries;
            self.set_links(at, 2 + count as u32);
            return Ok(());
        }
        for (name, entry) in below.entries.iter() {
            match self.entry(at, &name.0)? {
                Some((node, Kind::Directory)) if entry.kind == Kind::Directory => {
                    self.join(layers, node, entry.node)?;
                }
                there => {
                    if there.is_some() {
                        self.clear_name(at, &name.0)?;
                    }
                    self.own_for_layer(at)?.entries.insert(name.clone(), *entry);
                    let more = u32::from(entry.kind == Kind::Directory);
                    self.set_links(at, self.stat(at)?.links + more);
                }
            }
        }
        Ok(())
    }

    fn set_links(&mut self, node: Node, links: u32) {
        if let Some(inode) = self.nodes.get_mut(&node) {
            Arc::make_mut(inode).links = links;
        }
    }

    /// Removes the file with the name, if it exists.
    pub(crate) fn clear_name(&mut self, at: Node, name: &[u8]) -> Result<(), Refused> {
        let Some((node, kind)) = self.entry(at, name)? else { return Ok(()) };
        if kind != Kind::Directory {
            return self.remove_file(at, name, Time::default());
        }
        self.clear(node)?;
        self.remove_directory(at, name, Time::default())
    }

    /// Removes everything in a directory.
    pub(crate) fn clear(&mut self, top: Node) -> Result<(), Refused> {
        // The directories that are being emptied, each with its remaining entries.
        let mut ahead = vec![(top, self.list(top)?)];
        while let Some((at, mut left)) = ahead.pop() {
            let Some(entry) = left.pop() else { continue };
            let mut below = Vec::new();
            if entry.kind == Kind::Directory {
                below = self.list(entry.node)?;
            }
            if !below.is_empty() {
                let node = entry.node;
                left.push(entry);
                ahead.extend([(at, left), (node, below)]);
                continue;
            }
            match entry.kind {
                Kind::Directory => self.remove_directory(at, &entry.name, Time::default())?,
                _ => self.remove_file(at, &entry.name, Time::default())?,
            }
            ahead.push((at, left));
        }
        Ok(())
    }
}

impl Directory {
    /// Makes every name one that was not paid for.
    fn unpay(&mut self) {
        let paid: Vec<_> =
            self.entries.iter().filter(|(_, e)| e.paid).map(|(n, e)| (n.clone(), *e)).collect();
        for (name, entry) in paid {
            self.entries.insert(name, Entry { paid: false, ..entry });
        }
    }
}
