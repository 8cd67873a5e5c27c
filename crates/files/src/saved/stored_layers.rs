//! Layers as bytes that are stored once, however often a tree over them is saved.
//!
//! Promises: a tree over stored layers is the same as over the original layers, file for file, and
//! accepts the output of [`Tree::saved`] for trees over those. Data from elsewhere is checked as a
//! tree's bytes are; file contents are read on demand. May break it: a source that serves other
//! bytes than those stored.

use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::Refused;
use crate::layers::archive::{Archive, StoredFile};
use crate::layers::layer_bytes::LayerBytes;
use crate::layers::stack::{Layers, Part};
use crate::nodes::content::PAGE;
use crate::nodes::map::Map;
use crate::saved::description::{SavedDescription, SavedNode, TreeError, damaged};
use crate::saved::footprint;
use crate::saved::wire::Loader;
use crate::trees::lower_layers::LowerLayers;
use crate::trees::tree::{Budget, Tree};

/// The form that is written here.
const FORM: u32 = 1;
/// Pages that are read at a time.
const BATCH: u64 = 256;

/// The layers of a tree, to be written.
#[derive(Debug)]
pub struct StoredLayers {
    description: Vec<u8>,
    pages: u64,
    layers: Layers,
    /// Whether the bytes can no longer change, even if host directories do.
    fixed: bool,
}

#[derive(Serialize, Deserialize)]
struct SavedLayer {
    form: u32,
    next: u64,
    parts: Vec<StoredPart>,
    nodes: Vec<(u64, SavedNode)>,
}

#[derive(Serialize, Deserialize)]
struct StoredPart {
    identity: String,
    /// Lengths of its files; each begins at a page boundary.
    files: Vec<u64>,
}

impl StoredLayers {
    /// Everything but the bytes of files.
    #[must_use]
    pub fn description(&self) -> &[u8] {
        &self.description
    }

    /// Pages that the bytes of all files take.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Passes the bytes of all files to `each` with their first page; the last page of a file may
    /// be short.
    ///
    /// # Errors
    /// [`Refused::Layer`] when a layer cannot be read, and any error of `each`.
    pub fn read<E: From<Refused>>(
        &self,
        mut each: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut page = 0;
        let mut buffer = Vec::new();
        for archive in archives(&self.layers) {
            for (file, stored) in (0..).zip(&archive.files) {
                let mut at = 0;
                while at < stored.len() {
                    let len = (stored.len() - at).min(BATCH * PAGE as u64) as usize;
                    buffer.resize(len, 0);
                    archive.read(file, None, at, &mut buffer)?;
                    each(page, &buffer)?;
                    at += len as u64;
                    page += len.div_ceil(PAGE) as u64;
                }
            }
        }
        Ok(())
    }

    /// Makes every tree over these layers read the host directories among them from the stored
    /// bytes: `bytes` has the pages that [`StoredLayers::read`] gave. Returns whether all of them
    /// do. If it returns false, another caller has stored them at the same time, perhaps with other
    /// bytes, and those count: keep the layers anew.
    #[must_use]
    pub fn settle(&self, bytes: &Arc<dyn LayerBytes>) -> bool {
        let (mut page, mut settled) = (0, true);
        for archive in archives(&self.layers) {
            let mut begins = HashMap::new();
            let host = archive.host();
            for (file, stored) in archive.files.iter().enumerate() {
                if let Some((_, nodes)) = host {
                    begins.insert(nodes[file], page * PAGE as u64);
                }
                page += stored.len().div_ceil(PAGE as u64);
            }
            if let Some((host, _)) = host {
                settled &= host.keep(bytes.clone(), begins);
            }
        }
        settled || self.fixed
    }
}

fn archives(layers: &Layers) -> impl Iterator<Item = &Arc<Archive>> {
    layers.parts.iter().filter_map(|part| match part {
        Part::Archive(archive) => Some(archive),
        Part::Host(_) => None,
    })
}

impl Tree {
    /// The layers below the tree, ready to be stored. Host directories are as they were when the
    /// tree or a relative was first [captured](Tree::capture_host_directories).
    ///
    /// # Errors
    /// [`TreeError::Layer`] when a layer cannot be read.
    pub fn stored_layers(&self) -> Result<StoredLayers, TreeError> {
        let tree = self.capture_host_directories()?;
        let layers = &tree.lower.layers;
        let fixed = archives(layers).filter_map(|archive| archive.host()).all(|(h, _)| h.is_kept());
        let parts = layers.parts.iter().zip(archives(layers)).map(|(part, archive)| {
            Ok(StoredPart {
                identity: part.identity()?,
                files: archive.files.iter().map(StoredFile::len).collect(),
            })
        });
        let parts = parts.collect::<Result<Vec<_>, TreeError>>()?;
        let pages = parts.iter().flat_map(|part| &part.files).map(|len| len.div_ceil(PAGE as u64));
        let pages = pages.sum();
        // Over empty lower layers, so that every node is written in full.
        let bare = Self { lower: Arc::new(LowerLayers::bare(layers.clone())), ..tree.clone() };
        let nodes = tree.lower.nodes.iter().map(|(node, inode)| {
            (node.0, bare.saved_node(*node, inode, &mut Vec::new(), &mut Default::default()))
        });
        let kept = SavedLayer { form: FORM, next: tree.lower.next, parts, nodes: nodes.collect() };
        let description = postcard::to_allocvec(&kept).map_err(|e| damaged(e.to_string()))?;
        // Readers refuse more.
        footprint::charge_layers(&description)?;
        Ok(StoredLayers { description, pages, layers: layers.clone(), fixed })
    }

    /// A tree over stored layers, without changes. `bytes` has their `pages` pages.
    ///
    /// # Errors
    /// [`TreeError`] for a description from a stranger that is damaged.
    pub fn with_stored_layers(
        budget: Budget,
        description: &[u8],
        pages: u64,
        bytes: &Arc<dyn LayerBytes>,
    ) -> Result<Self, TreeError> {
        let _charge = footprint::charge_layers(description)?;
        let (kept, rest): (SavedLayer, _) =
            postcard::take_from_bytes(description).map_err(|e| damaged(e.to_string()))?;
        if !rest.is_empty() || kept.form != FORM {
            return Err(damaged("its layers are of a form that is not known"));
        }
        let mut layers = Layers::default();
        let mut first: u64 = 0;
        for part in kept.parts {
            let mut files = Vec::with_capacity(part.files.len());
            for len in part.files {
                files.push(StoredFile::Kept(first.saturating_mul(PAGE as u64), len));
                first = first.saturating_add(len.div_ceil(PAGE as u64));
            }
            let archive = Archive::from_store(part.identity, files, bytes.clone());
            layers.parts.push(Part::Archive(Arc::new(archive)));
        }
        if first != pages {
            return Err(damaged("its layers have another number of pages than stated"));
        }
        let lower = Arc::new(LowerLayers::bare(layers.clone()));
        let (nodes, held) = (Map::default(), Map::default());
        let base = Self { nodes, held, next: 0, bytes: 0, files: 0, budget, lower };
        let (tree, pages, attributes) = (base.clone(), [].iter(), Default::default());
        let (numbers, owners) = (None, Default::default());
        let loader = Loader { base: &base, tree, pages, attributes, numbers, owners };
        let mut tree = loader.load(SavedDescription::of_layers(kept.next, kept.nodes))?;
        if tree.used() != (Budget { bytes: 0, files: 0 }) {
            return Err(damaged("its layers have what was paid for"));
        }
        tree.budget = budget;
        tree.lower = Arc::new(LowerLayers::new(tree.nodes.clone(), tree.next, layers));
        Ok(tree)
    }
}
