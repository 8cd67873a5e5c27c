//! The states of a family of guests, with parents and names.
//!
//! Promises: an id names one state and is never reused; dropping a state hands its children to its
//! parent and leaves every other state as it was; a transient state is dropped with its last hold.
//! May break it: nothing in safe code.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use afresh_memory::{Image, ImageError, InheritedMutex, InheritedMutexGuard, PAGE_SIZE, PageRange};

use crate::{Difference, Frozen};

/// Names one state of one tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SnapshotId {
    tree: u64,
    number: u64,
}

impl std::fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "s{}", self.number)
    }
}

/// Why a tree refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TreeError {
    /// The state was dropped, or belongs to another tree.
    #[error("snapshot {0} is not in this tree: it was dropped or belongs to another one")]
    Unknown(SnapshotId),
    /// No state has the name.
    #[error("this tree has no snapshot named {name:?}; it has {names}")]
    NoSuchName {
        /// The name asked for.
        name: String,
        /// The names there are.
        names: String,
    },
    /// Several states on other branches have the name, and none on this one.
    #[error("{name:?} names {ids} on other branches, and none on this one: give an id instead")]
    Ambiguous {
        /// The name asked for.
        name: String,
        /// The states.
        ids: String,
    },
    /// Compacting a state failed; it stays as it was.
    #[error(transparent)]
    Image(#[from] ImageError),
}

/// Properties of a state in a tree.
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
    /// It is dropped once nothing holds it.
    pub transient: bool,
    /// Pages of each of its memories, zero ones included.
    pub pages: Vec<usize>,
    /// Pages it stores or shares; all others are zero.
    pub stored_pages: usize,
    /// Pages in which it differs from its parent, with separate content.
    pub own_pages: usize,
    /// Bytes that those pages store: what dropping the state gives back when it has no children.
    pub own_bytes: usize,
}

#[derive(Debug)]
struct Node<S> {
    frozen: Frozen<S>,
    parent: Option<SnapshotId>,
    children: Vec<SnapshotId>,
    name: Option<String>,
    /// It is dropped with its last hold.
    transient: bool,
    holds: usize,
}

#[derive(Debug)]
struct Nodes<S> {
    nodes: HashMap<SnapshotId, Node<S>>,
}

impl<S> Nodes<S> {
    /// Removes a state, and hands its children to its parent.
    fn remove(&mut self, id: SnapshotId) -> Option<Node<S>> {
        let node = self.nodes.remove(&id)?;
        for child in &node.children {
            if let Some(child) = self.nodes.get_mut(child) {
                child.parent = node.parent;
            }
        }
        if let Some(parent) = node.parent.and_then(|parent| self.nodes.get_mut(&parent)) {
            parent.children.retain(|child| *child != id);
            parent.children.extend(&node.children);
        }
        Some(node)
    }
}

/// A tree of snapshots of guests with an `S` outside memory; a clone is the same tree.
#[derive(Debug)]
pub struct Tree<S> {
    /// No two trees of a process have the same.
    number: u64,
    /// Empty in a child of a fork, if a thread of its parent was changing it.
    nodes: Arc<InheritedMutex<Nodes<S>>>,
    /// The number of the next state. It stands outside of the lock, so that a child whose tree is
    /// empty uses no id again.
    next: Arc<AtomicU64>,
    /// Pieces of storage a state may be spread over before it is compacted.
    budget: usize,
}

/// Pieces of storage a state may be spread over unless said otherwise: what a fork can map in about
/// a millisecond.
const BUDGET: usize = 1024;

impl<S> Default for Nodes<S> {
    fn default() -> Self {
        Self { nodes: HashMap::new() }
    }
}

impl<S> Clone for Tree<S> {
    fn clone(&self) -> Self {
        let (nodes, next) = (self.nodes.clone(), self.next.clone());
        Self { number: self.number, nodes, next, budget: self.budget }
    }
}

impl<S> Default for Tree<S> {
    fn default() -> Self {
        Self::with_budget(BUDGET)
    }
}

impl<S> Tree<S> {
    /// An empty tree.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty tree that compacts states spread over more than `budget` pieces of storage. A
    /// smaller budget makes forks and restores of long histories cheaper, and sharing less.
    #[must_use]
    pub fn with_budget(budget: usize) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self {
            number,
            nodes: Arc::new(InheritedMutex::new(Nodes::default())),
            next: Arc::default(),
            budget: budget.max(1),
        }
    }

    fn lock(&self) -> InheritedMutexGuard<'_, Nodes<S>> {
        // Nothing under the lock panics half-way through a change.
        self.nodes.lock()
    }

    /// Whether `image` is over the budget.
    fn is_image_spread(&self, image: &Image) -> bool {
        // There are at most as many pieces as runs, which are faster to count.
        image.stored().nth(self.budget).is_some() && image.mapping_count() > self.budget
    }

    /// Whether a memory of `frozen` is over the budget.
    pub(crate) fn is_spread(&self, frozen: &Frozen<S>) -> bool {
        frozen.memories.iter().any(|image| self.is_image_spread(image))
    }

    /// The same state, with no memory over the budget.
    pub(crate) fn compacted(&self, frozen: &Frozen<S>) -> Result<Frozen<S>, ImageError>
    where
        S: Clone,
    {
        let compact = |image: &Image| match self.is_image_spread(image) {
            true => image.compact(),
            false => Ok(image.clone()),
        };
        let memories = frozen.memories.iter().map(compact).collect::<Result<_, _>>()?;
        Ok(Frozen { memories, state: frozen.state.clone() })
    }

    /// Adds a state. It has no parent if the parent was dropped since.
    pub fn insert(&self, frozen: Frozen<S>, parent: Option<SnapshotId>) -> SnapshotId {
        self.add(frozen, parent, false, 0)
    }

    /// Counts one more hold on a state that is still there, and returns its content.
    pub(crate) fn retain(&self, id: SnapshotId) -> Result<Frozen<S>, TreeError>
    where
        S: Clone,
    {
        let mut tree = self.lock();
        let node = tree.nodes.get_mut(&id).ok_or(TreeError::Unknown(id))?;
        node.holds += 1;
        Ok(node.frozen.clone())
    }

    /// Counts one hold less, and drops a transient state with the last one.
    pub(crate) fn release(&self, id: SnapshotId) {
        let mut tree = self.lock();
        let Some(node) = tree.nodes.get_mut(&id) else { return };
        node.holds = node.holds.saturating_sub(1);
        let dropped = match node.transient && node.holds == 0 {
            true => tree.remove(id),
            false => None,
        };
        // Freeing its pages takes a while, and others need not wait.
        drop(tree);
        drop(dropped);
    }

    /// Whether the id was given by this tree.
    pub(crate) fn has_given(&self, id: SnapshotId) -> bool {
        id.tree == self.number
    }

    /// As [`Tree::insert`], with so many holds.
    pub(crate) fn add(
        &self,
        frozen: Frozen<S>,
        parent: Option<SnapshotId>,
        transient: bool,
        holds: usize,
    ) -> SnapshotId {
        let mut tree = self.lock();
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let id = SnapshotId { tree: self.number, number };
        let parent = parent.filter(|parent| tree.nodes.contains_key(parent));
        if let Some(node) = parent.and_then(|parent| tree.nodes.get_mut(&parent)) {
            node.children.push(id);
        }
        let children = Vec::new();
        tree.nodes.insert(id, Node { frozen, parent, children, name: None, transient, holds });
        id
    }

    /// A state.
    ///
    /// # Errors
    /// [`TreeError::Unknown`].
    pub fn get(&self, id: SnapshotId) -> Result<Frozen<S>, TreeError>
    where
        S: Clone,
    {
        self.lock().nodes.get(&id).map(|node| node.frozen.clone()).ok_or(TreeError::Unknown(id))
    }

    /// Whether the state is in the tree.
    #[must_use]
    pub fn contains(&self, id: SnapshotId) -> bool {
        self.lock().nodes.contains_key(&id)
    }

    /// The state that `name` means from the state `from`: the nearest on the way from there to the
    /// root, or the only one elsewhere.
    ///
    /// # Errors
    /// [`TreeError::NoSuchName`], [`TreeError::Ambiguous`].
    pub fn find(&self, name: &str, from: SnapshotId) -> Result<SnapshotId, TreeError> {
        let tree = self.lock();
        let named = |node: &Node<S>| node.name.as_deref() == Some(name);
        let mut at = Some(from);
        while let Some((id, node)) = at.and_then(|id| Some((id, tree.nodes.get(&id)?))) {
            if named(node) {
                return Ok(id);
            }
            at = node.parent;
        }
        let mut ids: Vec<SnapshotId> =
            tree.nodes.iter().filter(|(_, node)| named(node)).map(|(id, _)| *id).collect();
        ids.sort_unstable();
        match &ids[..] {
            [only] => Ok(*only),
            [] => {
                let mut names: Vec<String> =
                    tree.nodes.values().filter_map(|node| node.name.clone()).collect();
                names.sort_unstable();
                names.dedup();
                let names = if names.is_empty() { "no names".to_owned() } else { names.join(", ") };
                Err(TreeError::NoSuchName { name: name.to_owned(), names })
            }
            several => {
                let ids: Vec<String> = several.iter().map(ToString::to_string).collect();
                Err(TreeError::Ambiguous { name: name.to_owned(), ids: ids.join(", ") })
            }
        }
    }

    /// In what two states differ. Costs reading the pages that are not stored in the same place.
    ///
    /// # Errors
    /// [`TreeError::Unknown`]; [`TreeError::Image`] when pages that are not there yet will never
    /// be.
    pub fn diff(&self, one: SnapshotId, two: SnapshotId) -> Result<Difference, TreeError>
    where
        S: Clone + PartialEq,
    {
        Ok(Difference::between(&self.get(one)?, &self.get(two)?)?)
    }

    /// Gives a state a name, replacing an earlier one, and keeps it until it is dropped. Names need
    /// not be unique.
    ///
    /// # Errors
    /// [`TreeError::Unknown`].
    pub fn name(&self, id: SnapshotId, name: impl Into<String>) -> Result<(), TreeError> {
        let mut tree = self.lock();
        let node = tree.nodes.get_mut(&id).ok_or(TreeError::Unknown(id))?;
        node.name = Some(name.into());
        node.transient = false;
        Ok(())
    }

    /// Drops a state: its children become its parent's, which is returned. Its storage is freed
    /// once no other state shares a page of it.
    ///
    /// # Errors
    /// [`TreeError::Unknown`].
    pub fn drop_snapshot(&self, id: SnapshotId) -> Result<Option<SnapshotId>, TreeError> {
        let mut tree = self.lock();
        let node = tree.remove(id).ok_or(TreeError::Unknown(id))?;
        let parent = node.parent;
        // Freeing its pages takes a while, and others need not wait.
        drop(tree);
        drop(node);
        Ok(parent)
    }

    /// Properties of every state, oldest first.
    #[must_use]
    pub fn list(&self) -> Vec<SnapshotInfo> {
        let tree = self.lock();
        let mut list: Vec<SnapshotInfo> = tree
            .nodes
            .iter()
            .map(|(id, node)| {
                let parent = node.parent.and_then(|parent| tree.nodes.get(&parent));
                let own_pages = match parent {
                    None => node.frozen.stored_pages(),
                    Some(parent) => own_pages(&parent.frozen, &node.frozen),
                };
                SnapshotInfo {
                    id: *id,
                    parent: node.parent,
                    children: node.children.clone(),
                    name: node.name.clone(),
                    transient: node.transient,
                    pages: node.frozen.memories.iter().map(Image::pages).collect(),
                    stored_pages: node.frozen.stored_pages(),
                    own_pages,
                    own_bytes: own_pages * PAGE_SIZE,
                }
            })
            .collect();
        list.sort_by_key(|info| info.id);
        list
    }

    /// Number of states.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().nodes.len()
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Compacts every state that is spread over more pieces of storage than the budget allows.
    /// Returns how many were. A compacted state no longer shares pages with its relatives.
    ///
    /// # Errors
    /// [`TreeError::Image`] when memory ran out; states compacted before stay so.
    pub fn compact(&self) -> Result<usize, TreeError>
    where
        S: Clone,
    {
        let spread: Vec<(SnapshotId, Frozen<S>)> = {
            let tree = self.lock();
            let states = tree.nodes.iter().map(|(id, node)| (*id, node.frozen.clone()));
            states.filter(|(_, frozen)| self.is_spread(frozen)).collect()
        };
        for (id, frozen) in &spread {
            let compacted = self.compacted(frozen)?;
            if let Some(node) = self.lock().nodes.get_mut(id) {
                node.frozen = compacted;
            }
        }
        Ok(spread.len())
    }
}

/// Pages that `child` stores otherwise than `parent`; a page that became zero takes nothing.
fn own_pages<S>(parent: &Frozen<S>, child: &Frozen<S>) -> usize {
    let own = |(index, image): (usize, &Image)| {
        let Some(before) = parent.memories.get(index) else { return image.stored_pages() };
        let stored: Vec<PageRange> = image.stored().collect();
        let inside = |range: &PageRange| -> usize {
            let first = stored.partition_point(|run| run.end() <= range.start);
            let parts = stored[first..].iter().map_while(|run| run.intersect(*range));
            parts.map(|part| part.len).sum()
        };
        before.differing(image).iter().map(inside).sum()
    };
    child.memories.iter().enumerate().map(own).sum()
}
