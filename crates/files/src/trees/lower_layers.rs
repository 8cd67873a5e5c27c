//! The files below a tree, before any change.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use crate::layers::stack::Layers;
use crate::nodes::inode::Inode;
use crate::nodes::map::Map;
use crate::nodes::node::{Kind, Node};

/// The files of the layers before any change, shared by all relatives.
#[derive(Debug, Default)]
pub(crate) struct LowerLayers {
    pub(crate) nodes: Map<Node, Arc<Inode>>,
    pub(crate) next: u64,
    pub(crate) layers: Layers,
    /// The same with host directories as they were found, once they were captured.
    pub(crate) captured: OnceLock<Arc<CapturedLayers>>,
}

impl LowerLayers {
    pub(crate) fn new(nodes: Map<Node, Arc<Inode>>, next: u64, layers: Layers) -> Self {
        Self { nodes, next, layers, captured: OnceLock::new() }
    }

    /// Layers that have shown nothing.
    pub(crate) fn bare(layers: Layers) -> Self {
        Self::new(Map::default(), 0, layers)
    }
}

/// Lower layers whose host directories are archives.
#[derive(Debug)]
pub(crate) struct CapturedLayers {
    pub(crate) lower: Arc<LowerLayers>,
    /// For each layer, its files by their numbers in the archive, sorted; empty for a layer that
    /// was an archive before.
    pub(crate) files: Vec<Vec<Node>>,
    /// Files that differ from the lists of their directories, because the host removed them after
    /// that (`None`), or replaced them by ones of these kinds.
    pub(crate) differing: BTreeMap<Node, Option<Kind>>,
}
