//! Putting a tree over layers.

use std::sync::Arc;

use crate::error::{LayerError, Refused};
use crate::layers::item::names_of;
use crate::layers::layer::Layer;
use crate::layers::stack::{Layers, Part};
use crate::nodes::inode::{Body, Directory, Entry};
use crate::nodes::name::check_name;
use crate::nodes::node::{Kind, Node, Time};
use crate::trees::changeset::Changeset;
use crate::trees::lower_layers::LowerLayers;
use crate::trees::tree::{New, Tree};

impl Tree {
    /// Puts the tree over a layer: its contents are visible at `at`, a path of this tree, whose
    /// directories are made. Where a layer that was added before has the same name, directories are
    /// joined and everything else is replaced. The contents of layers do not count towards the
    /// budget.
    ///
    /// # Errors
    /// [`LayerError::Bad`] for a tree that was changed already, and for an archive whose names
    /// contradict each other.
    pub fn with_layer(mut self, at: impl AsRef<[u8]>, layer: &Layer) -> Result<Self, LayerError> {
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
        let mut layers = self.lower.layers.clone();
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
        self.lower = Arc::new(LowerLayers::bare(layers));
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
        self.lower = Arc::new(LowerLayers::new(self.nodes.clone(), self.next, layers));
    }

    /// The directory at a path of a layer, made where it is missing.
    fn directory_at(&mut self, path: &[u8]) -> Result<Node, Refused> {
        let (mut at, mut unlimited) = (Self::ROOT, u64::MAX);
        for name in names_of(path) {
            at = self.directory_in(at, name, &mut unlimited)?;
        }
        Ok(at)
    }

    /// The directory with a name, made where it is missing. `steps` pays for the names that a link
    /// leads through.
    pub(crate) fn directory_in(
        &mut self,
        at: Node,
        name: &[u8],
        steps: &mut u64,
    ) -> Result<Node, Refused> {
        check_name(name)?;
        match self.entry(at, name)? {
            Some((node, Kind::Directory)) => Ok(node),
            // As a system does that unpacks an image: within the tree.
            Some((node, Kind::Link)) => {
                let target = self.read_link(node)?;
                let found = self.walk_to(at, &target, steps)?;
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
