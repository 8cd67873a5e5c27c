//! Host directories as they were when a tree over them was first saved: all visible files, as an
//! archive.
//!
//! Promises: the first caller has every host directory read, once for all relatives of the tree.
//! From then on all of them see that result, and once the bytes are kept (`stored_layers`), the
//! stored bytes. Putting a tree over that costs time for its changes only. May break it: a host
//! process that removes a file that a guest has looked up, or the directory of one, before its
//! bytes were kept. Then saving fails, and names the file or directory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::error::Refused;
use crate::layers::archive::{Archive, StoredFile};
use crate::layers::host::{HOST, HostDirectory};
use crate::layers::stack::{Layers, Part};
use crate::nodes::inode::{Body, Entry, Inode};
use crate::nodes::map::Map;
use crate::nodes::node::{Kind, Node};
use crate::nodes::source::Source;
use crate::trees::lower_layers::{CapturedLayers, LowerLayers};
use crate::trees::tree::Tree;

impl CapturedLayers {
    /// All that the layers of a tree show, before anything is changed.
    fn of(tree: &Tree) -> Result<Self, Refused> {
        let layers = &tree.lower.layers;
        layers.hosts().for_each(HostDirectory::stop_following);
        let clean = tree.blank();
        let mut files = vec![Vec::new(); layers.parts.len()];
        let mut found: Map<Node, Arc<Inode>> = Map::default();
        let mut differing = BTreeMap::new();
        let mut ahead = vec![Tree::ROOT];
        while let Some(node) = ahead.pop() {
            if found.get(&node).is_some() {
                continue;
            }
            let inode = match clean.inode(node) {
                // It was removed after its directory had been listed. No guest has looked at it,
                // and none can.
                Err(Refused::Missing) if node.0 & HOST != 0 => {
                    refuse_lost(layers, node)?;
                    differing.insert(node, None);
                    continue;
                }
                inode => inode?,
            };
            if inode.kind() != Kind::Directory {
                refuse_lost(layers, node)?;
            }
            match &inode.body {
                Body::Directory(inside) => ahead.extend(inside.entries.iter().map(|(_, e)| e.node)),
                Body::File(content) => {
                    if let Some(Source::Host(source)) = content.under.as_ref().map(|u| u.source)
                        && let Some(files) = files.get_mut(layer(source))
                    {
                        files.push(source);
                    }
                }
                Body::Link(_) | Body::Device(_) => {}
            }
            found.insert(node, inode);
        }
        files.iter_mut().for_each(|files| files.sort_unstable());
        let parts = layers.parts.iter().zip(&files).map(|(part, files)| match part {
            Part::Archive(archive) => Ok(Part::Archive(archive.clone())),
            Part::Host(host) => {
                let stored = files.iter().map(|node| {
                    let len = layers.len(Source::Host(*node))?;
                    Ok(StoredFile::Kept(0, len))
                });
                let stored = stored.collect::<Result<Vec<_>, Refused>>()?;
                Ok(Part::Archive(Arc::new(Archive::captured(host.clone(), files.clone(), stored))))
            }
        });
        let parts = parts.collect::<Result<Vec<_>, Refused>>()?;
        differing.extend(replaced(&found));
        let mut this = Self { lower: Arc::default(), files, differing };
        let mut nodes = Map::default();
        for (node, inode) in found.iter() {
            nodes.insert(*node, Arc::new(this.translated(layers, inode)?));
        }
        let lower = LowerLayers::new(nodes, tree.lower.next, Layers::of(parts));
        this.lower = Arc::new(lower);
        Ok(this)
    }

    /// A file in its form over the captured layers.
    fn translated(&self, layers: &Layers, inode: &Inode) -> Result<Inode, Refused> {
        let mut inode = inode.clone();
        if let Some((above, _)) = &mut inode.name {
            *above = layers.mounted(*above);
        }
        match &mut inode.body {
            Body::File(content) => {
                if let Some(under) = &mut content.under
                    && let Source::Host(node) = under.source
                {
                    let layer = layer(node);
                    let files = self.files.get(layer).ok_or(Refused::Missing)?;
                    let file = files.binary_search(&node).map_err(|_| Refused::Missing)?;
                    under.source = Source::Archive { layer: layer as u32, file: file as u32 };
                }
            }
            Body::Directory(inside) => {
                inside.parent = layers.mounted(inside.parent);
                if !self.differing.is_empty() {
                    let found = |entry: &Entry| self.differing.get(&entry.node).copied();
                    let differing = inside.entries.iter();
                    let differing = differing.filter_map(|(n, e)| Some((n.clone(), *e, found(e)?)));
                    for (name, entry, kind) in differing.collect::<Vec<_>>() {
                        inode.links -= u32::from(entry.kind == Kind::Directory);
                        inode.links += u32::from(kind == Some(Kind::Directory));
                        match kind {
                            Some(kind) => inside.entries.insert(name, Entry { kind, ..entry }),
                            None => inside.entries.remove(&*name.0),
                        };
                    }
                }
            }
            Body::Link(_) | Body::Device(_) => {}
        }
        Ok(inode)
    }

    fn directory(&self, node: Node) -> Option<&crate::nodes::inode::Directory> {
        match &self.lower.nodes.get(&node)?.body {
            Body::Directory(inside) => Some(inside),
            _ => None,
        }
    }
}

/// Refuses to save a tree without the files that a guest has used in a directory.
fn refuse_lost(layers: &Layers, directory: Node) -> Result<(), Refused> {
    match layers.lost_directory(directory) {
        Some(path) => Err(Refused::Layer(format!(
            "{}: the host has removed or replaced this directory, of which a guest used files",
            path.display()
        ))),
        None => Ok(()),
    }
}

/// The kinds of files that differ from those in the lists of their directories.
fn replaced(found: &Map<Node, Arc<Inode>>) -> BTreeMap<Node, Option<Kind>> {
    let mut replaced = BTreeMap::new();
    for (_, inode) in found.iter() {
        let Body::Directory(inside) = &inode.body else { continue };
        for (_, entry) in inside.entries.iter() {
            let kind = found.get(&entry.node).map(|inode| inode.kind());
            if kind.is_some_and(|kind| kind != entry.kind) {
                replaced.insert(entry.node, kind);
            }
        }
    }
    replaced
}

/// The number of the layer that a host's file is in.
fn layer(node: Node) -> usize {
    ((node.0 & !HOST) >> 48) as usize
}

impl Tree {
    /// The same tree over the contents of its host directories at the first call for it or a
    /// relative. A tree without host directories is returned unchanged.
    ///
    /// # Errors
    /// [`Refused::Layer`] when a host directory cannot be read, with the path.
    pub fn capture_host_directories(&self) -> Result<Self, Refused> {
        let layers = &self.lower.layers;
        if !layers.parts.iter().any(|part| matches!(part, Part::Host(_))) {
            return Ok(self.clone());
        }
        let all = match self.lower.captured.get() {
            Some(all) => all,
            None => {
                let all = Arc::new(CapturedLayers::of(self)?);
                // Two concurrent callers get the same result, because every looked-up file is
                // cached.
                self.lower.captured.get_or_init(|| all)
            }
        };
        let mut new =
            Self { nodes: all.lower.nodes.clone(), lower: all.lower.clone(), ..self.clone() };
        // Names that lead elsewhere now, their former targets, and nodes with a new name.
        let (mut loose, mut named) = (Vec::new(), BTreeSet::new());
        let below = |node: Node| {
            let entries = all.directory(node).map(|inside| inside.entries.clone());
            entries.unwrap_or_default()
        };
        for (node, _, now) in self.lower.nodes.differing(&self.nodes, Arc::ptr_eq) {
            let Some(inode) = now else {
                new.nodes.remove(node);
                loose.extend(below(*node).iter().map(|(_, entry)| entry.node));
                continue;
            };
            let inode = all.translated(layers, inode)?;
            if let Body::Directory(inside) = &inode.body {
                for (_, was, is) in below(*node).differing(&inside.entries, |a, b| a.node == b.node)
                {
                    loose.extend(was.map(|entry| entry.node));
                    named.extend(is.map(|entry| entry.node));
                }
            }
            new.nodes.insert(*node, Arc::new(inode));
        }
        // A file that lost a name, has no other, and is not held is removed, with its contents. A
        // host file has only one name there; the tree itself tracks removed files of archives.
        while let Some(node) = loose.pop() {
            let kept = named.contains(&node) || self.held.get(&node).is_some();
            if !kept && node.0 & HOST != 0 && new.nodes.remove(&node).is_some() {
                loose.extend(below(node).iter().map(|(_, entry)| entry.node));
            }
        }
        Ok(new)
    }
}
