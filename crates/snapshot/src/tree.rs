//! The states of a family of guests, with parents and names.
//!
//! Promises: an id names one state for ever and is never used again; dropping a state hands its
//! children to its parent and leaves every other state as it was. May break it: nothing in safe code.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use afresh_memory::{Image, ImageError};

use crate::Frozen;

/// Names one state of one tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SnapshotId(u64);

impl std::fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "s{}", self.0)
    }
}

/// Why a tree refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TreeError {
    /// The state was dropped, or belongs to another tree.
    #[error("snapshot {0} is not in this tree: it was dropped or belongs to another one")]
    Unknown(SnapshotId),
    /// Compacting a state failed; it stays as it was.
    #[error(transparent)]
    Image(#[from] ImageError),
}

/// What a tree knows about a state.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotInfo {
    /// The state.
    pub id: SnapshotId,
    /// The state it was made from, or the nearest of its ancestors that was not dropped.
    pub parent: Option<SnapshotId>,
    /// The states made from it.
    pub children: Vec<SnapshotId>,
    /// Its name, if it was given one.
    pub name: Option<String>,
    /// Pages it stores or shares; all others are zero.
    pub stored_pages: usize,
    /// Pages in which it differs from its parent.
    pub own_pages: usize,
}

#[derive(Debug)]
struct Node {
    frozen: Frozen,
    parent: Option<SnapshotId>,
    children: Vec<SnapshotId>,
    name: Option<String>,
}

#[derive(Debug, Default)]
struct Nodes {
    nodes: HashMap<SnapshotId, Node>,
    next: u64,
}

/// A tree of snapshots; a clone is the same tree.
#[derive(Debug, Clone)]
pub struct Tree {
    nodes: Arc<Mutex<Nodes>>,
    /// Pieces of storage a state may be spread over before it is compacted.
    budget: usize,
}

/// Pieces of storage a state may be spread over unless said otherwise: what a fork can map in about
/// a millisecond.
const BUDGET: usize = 1024;

impl Default for Tree {
    fn default() -> Self {
        Self::with_budget(BUDGET)
    }
}

impl Tree {
    /// An empty tree.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty tree that compacts states spread over more than `budget` pieces of storage. A smaller
    /// budget makes forks and restores of long histories cheaper, and sharing less.
    #[must_use]
    pub fn with_budget(budget: usize) -> Self {
        Self { nodes: Arc::default(), budget: budget.max(1) }
    }

    fn lock(&self) -> MutexGuard<'_, Nodes> {
        // Nothing under the lock panics half-way through a change.
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether `image` is over the budget.
    pub(crate) fn is_spread(&self, image: &Image) -> bool {
        image.fragments() > self.budget
    }

    /// Adds a state. A parent that was dropped meanwhile leaves it without one.
    pub fn insert(&self, frozen: Frozen, parent: Option<SnapshotId>) -> SnapshotId {
        let mut tree = self.lock();
        let id = SnapshotId(tree.next);
        tree.next += 1;
        let parent = parent.filter(|parent| tree.nodes.contains_key(parent));
        if let Some(node) = parent.and_then(|parent| tree.nodes.get_mut(&parent)) {
            node.children.push(id);
        }
        tree.nodes.insert(id, Node { frozen, parent, children: Vec::new(), name: None });
        id
    }

    /// A state.
    ///
    /// # Errors
    /// [`TreeError::Unknown`].
    pub fn get(&self, id: SnapshotId) -> Result<Frozen, TreeError> {
        self.lock().nodes.get(&id).map(|node| node.frozen.clone()).ok_or(TreeError::Unknown(id))
    }

    /// Gives a state a name, replacing an earlier one. Names need not be unique.
    ///
    /// # Errors
    /// [`TreeError::Unknown`].
    pub fn name(&self, id: SnapshotId, name: impl Into<String>) -> Result<(), TreeError> {
        let mut tree = self.lock();
        let node = tree.nodes.get_mut(&id).ok_or(TreeError::Unknown(id))?;
        node.name = Some(name.into());
        Ok(())
    }

    /// Drops a state: its children become its parent's. What only it stored is freed.
    ///
    /// # Errors
    /// [`TreeError::Unknown`].
    pub fn drop_snapshot(&self, id: SnapshotId) -> Result<(), TreeError> {
        let mut tree = self.lock();
        let node = tree.nodes.remove(&id).ok_or(TreeError::Unknown(id))?;
        for child in &node.children {
            if let Some(child) = tree.nodes.get_mut(child) {
                child.parent = node.parent;
            }
        }
        if let Some(parent) = node.parent.and_then(|parent| tree.nodes.get_mut(&parent)) {
            parent.children.retain(|child| *child != id);
            parent.children.extend(&node.children);
        }
        Ok(())
    }

    /// What is known about every state, oldest first.
    #[must_use]
    pub fn list(&self) -> Vec<SnapshotInfo> {
        let tree = self.lock();
        let mut list: Vec<SnapshotInfo> = tree
            .nodes
            .iter()
            .map(|(id, node)| {
                let image = &node.frozen.image;
                let parent = node.parent.and_then(|parent| tree.nodes.get(&parent));
                let own_pages = match parent {
                    None => image.stored_pages(),
                    Some(parent) => {
                        let differing = parent.frozen.image.differing(image);
                        differing.iter().map(|range| range.len).sum()
                    }
                };
                SnapshotInfo {
                    id: *id,
                    parent: node.parent,
                    children: node.children.clone(),
                    name: node.name.clone(),
                    stored_pages: image.stored_pages(),
                    own_pages,
                }
            })
            .collect();
        list.sort_by_key(|info| info.id);
        list
    }

    /// How many states there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().nodes.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Compacts every state that is spread over more pieces of storage than the budget allows.
    /// Returns how many were. A compacted state no longer shares pages with its relatives.
    ///
    /// # Errors
    /// [`TreeError::Image`] when memory ran out; states compacted before stay so.
    pub fn compact(&self) -> Result<usize, TreeError> {
        let spread: Vec<(SnapshotId, Image)> = {
            let tree = self.lock();
            let images = tree.nodes.iter().map(|(id, node)| (*id, node.frozen.image.clone()));
            images.filter(|(_, image)| self.is_spread(image)).collect()
        };
        for (id, image) in &spread {
            let compacted = image.compact()?;
            if let Some(node) = self.lock().nodes.get_mut(id) {
                node.frozen.image = compacted;
            }
        }
        Ok(spread.len())
    }
}
