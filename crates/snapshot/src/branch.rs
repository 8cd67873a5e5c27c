//! A live guest on a tree.
//!
//! Promises: `snapshot`, `restore` and `fork` move the guest and the tree together; a failure leaves
//! the tree as it was. May break it: moving the guest behind the branch's back, by calling
//! [`Guest::switch`] through `guest_mut`; the next snapshot then has the wrong parent, though the
//! right content.

use crate::tree::{SnapshotId, Tree, TreeError};
use crate::{Frozen, Guest};

/// Why a branch could not move.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BranchError<E: std::error::Error + 'static> {
    /// The tree refused.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// The guest refused.
    #[error("the guest could not be frozen, moved or forked")]
    Guest(#[source] E),
}

/// A guest and the state that it stands on.
#[derive(Debug)]
pub struct Branch<G> {
    guest: G,
    tree: Tree,
    at: SnapshotId,
}

impl<G: Guest> Branch<G> {
    /// Plants a guest: its present state becomes a root of the tree.
    ///
    /// # Errors
    /// [`BranchError::Guest`].
    pub fn plant(tree: &Tree, mut guest: G) -> Result<Self, BranchError<G::Error>> {
        let frozen = guest.checkpoint().map_err(BranchError::Guest)?;
        let at = tree.insert(frozen, None);
        Ok(Self { guest, tree: tree.clone(), at })
    }

    /// Freezes the present state as a child of the one that the guest stands on. The guest then
    /// stands on the new one, and its resets return to it.
    ///
    /// # Errors
    /// [`BranchError`].
    pub fn snapshot(&mut self) -> Result<SnapshotId, BranchError<G::Error>> {
        let mut frozen = self.guest.checkpoint().map_err(BranchError::Guest)?;
        if self.tree.is_spread(&frozen.image) {
            let image = frozen.image.compact().map_err(TreeError::from)?;
            frozen = Frozen { image, ..frozen };
            // The guest moves to the compacted storage too, so that its next snapshot shares it.
            self.guest.switch(&frozen).map_err(BranchError::Guest)?;
        }
        self.at = self.tree.insert(frozen, Some(self.at));
        Ok(self.at)
    }

    /// Goes to any state of the tree: up, down or across. What was not frozen is lost.
    ///
    /// # Errors
    /// [`BranchError`].
    pub fn restore(&mut self, id: SnapshotId) -> Result<(), BranchError<G::Error>> {
        let frozen = self.tree.get(id)?;
        self.guest.switch(&frozen).map_err(BranchError::Guest)?;
        self.at = id;
        Ok(())
    }

    /// A new guest that stands on any state of the tree.
    ///
    /// # Errors
    /// [`BranchError`].
    pub fn fork(&self, id: SnapshotId) -> Result<Self, BranchError<G::Error>> {
        let frozen = self.tree.get(id)?;
        let guest = self.guest.fork(&frozen).map_err(BranchError::Guest)?;
        Ok(Self { guest, tree: self.tree.clone(), at: id })
    }

    /// The state the guest stands on. It may have been dropped since.
    pub fn at(&self) -> SnapshotId {
        self.at
    }

    /// The tree.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// The guest.
    pub fn guest(&self) -> &G {
        &self.guest
    }

    /// The guest, to run it.
    pub fn guest_mut(&mut self) -> &mut G {
        &mut self.guest
    }

    /// The guest, without its tree.
    pub fn into_guest(self) -> G {
        self.guest
    }
}
