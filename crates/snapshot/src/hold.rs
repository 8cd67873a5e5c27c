//! A reference to a state of a tree, with its content.
//!
//! Promises: the content stays available after the state was dropped from the tree; a transient
//! state leaves the tree with its last hold. May break it: nothing in safe code.

use crate::Frozen;
use crate::tree::{SnapshotId, Tree, TreeError};

/// A hold on a state of a tree. A branch holds the state that it stands on.
#[derive(Debug)]
pub struct StateHold<S> {
    tree: Tree<S>,
    id: SnapshotId,
    frozen: Frozen<S>,
}

impl<S> StateHold<S> {
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

impl<S: Clone> Tree<S> {
    /// As [`Tree::insert`], with a hold on the state. A transient state is dropped with its last
    /// hold, unless it is given a name.
    pub fn insert_held(
        &self,
        frozen: Frozen<S>,
        parent: Option<SnapshotId>,
        transient: bool,
    ) -> StateHold<S> {
        let id = self.add(frozen.clone(), parent, transient, 1);
        StateHold { tree: self.clone(), id, frozen }
    }

    /// A hold on a state.
    ///
    /// # Errors
    /// [`TreeError::Unknown`].
    pub fn hold(&self, id: SnapshotId) -> Result<StateHold<S>, TreeError> {
        let frozen = self.retain(id)?;
        Ok(StateHold { tree: self.clone(), id, frozen })
    }
}

impl<S: Clone> Clone for StateHold<S> {
    fn clone(&self) -> Self {
        // The content is the hold's own where the state was dropped.
        let _ = self.tree.retain(self.id);
        Self { tree: self.tree.clone(), id: self.id, frozen: self.frozen.clone() }
    }
}

impl<S> Drop for StateHold<S> {
    fn drop(&mut self) {
        self.tree.release(self.id);
    }
}
