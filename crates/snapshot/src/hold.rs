//! A reference to a state of a tree, with its content.
//!
//! Promises: the content stays available after the state was dropped from the tree; a transient
//! state leaves the tree with its last hold. May break it: nothing in safe code.

use crate::Frozen;
use crate::tree::{SnapshotId, Tree};

/// A hold on a state of a tree. A branch holds the state that it stands on.
#[derive(Debug)]
pub struct StateHold<S> {
    tree: Tree<S>,
    id: SnapshotId,
    frozen: Frozen<S>,
}

impl<S> StateHold<S> {
    /// The hold that `tree` has counted.
    pub(crate) fn new(tree: Tree<S>, id: SnapshotId, frozen: Frozen<S>) -> Self {
        Self { tree, id, frozen }
    }

    /// The state.
    #[must_use]
    pub fn id(&self) -> SnapshotId {
        self.id
    }

    /// Its content, also after it was dropped from the tree.
    #[must_use]
    pub fn frozen(&self) -> &Frozen<S> {
        &self.frozen
    }
}

impl<S: Clone> Clone for StateHold<S> {
    fn clone(&self) -> Self {
        self.tree.retain(self.id);
        Self::new(self.tree.clone(), self.id, self.frozen.clone())
    }
}

impl<S> Drop for StateHold<S> {
    fn drop(&mut self) {
        self.tree.release(self.id);
    }
}
