//! A line of states on a tree, and the live guest at its end.
//!
//! Promises: `snapshot`, `restore` and `fork` move the guest and the tree together; a failure
//! leaves the tree as it was. A guest is made when it is first needed, so a branch without a run
//! costs no more than its state; when a relative has ended, its guest is moved there instead. A
//! guest that cannot be moved is replaced by a new one. A [`GuestReserve`] gets the guest of the
//! last relative, and has guests for the state that the branch was planted with. May break it:
//! moving the guest behind the branch's back, by calling [`Guest::switch`] through `guest_mut`; the
//! next snapshot then has the wrong parent, though the right content.

use std::sync::Arc;

use afresh_memory::InheritedMutex;

use crate::tree::{SnapshotId, Tree, TreeError};
use crate::{Frozen, Guest, StateHold};

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

/// Guests of branches that have ended, kept for their relatives.
const SPARES: usize = 8;

/// Guests that branches on other trees have left, for branches from the same state.
pub trait GuestReserve<G>: std::fmt::Debug + Send + Sync {
    /// A guest in that state, which is as a new one.
    fn take(&self) -> Option<G>;

    /// Takes a guest over from a branch that has ended.
    fn put(&self, guest: G);
}

/// A guest and the state that it stands on.
#[derive(Debug)]
pub struct Branch<G: Guest> {
    /// None until it is needed: it is in the state `at` then.
    guest: Option<G>,
    /// Shared by all relatives, in the states that their branches left them in.
    spares: Arc<InheritedMutex<Vec<G>>>,
    /// Guests for the state with this ID.
    reserve: Option<(SnapshotId, Arc<dyn GuestReserve<G>>)>,
    home: G::Template,
    tree: Tree<G::State>,
    at: StateHold<G::State>,
    /// The nearest ancestor of `at` that is left, once `at` was dropped by this branch.
    under: Option<StateHold<G::State>>,
    /// The guest was lent since it stood on `at`.
    moved: bool,
}

impl<G: Guest> Branch<G> {
    /// Plants a guest: its present state becomes a root of the tree.
    ///
    /// # Errors
    /// [`BranchError::Guest`].
    pub fn from_guest(tree: &Tree<G::State>, mut guest: G) -> Result<Self, BranchError<G::Error>> {
        let base = guest.checkpoint().map_err(BranchError::Guest)?;
        let mut this = Self::from_state(tree, guest.template(), base);
        this.guest = Some(guest);
        Ok(this)
    }

    /// Plants a state: it becomes a root of the tree, and the guest is made when it is first
    /// needed.
    pub fn from_state(tree: &Tree<G::State>, home: G::Template, base: Frozen<G::State>) -> Self {
        let at = tree.insert_held(base, None, false);
        let (tree, spares) = (tree.clone(), Arc::default());
        Self { guest: None, spares, reserve: None, home, tree, at, under: None, moved: false }
    }

    /// Gets guests for the present state from `reserve` where no relative has left one, and leaves
    /// it the guest of the last relative.
    #[must_use]
    pub fn with_reserve(mut self, reserve: Arc<dyn GuestReserve<G>>) -> Self {
        self.reserve = Some((self.at.id(), reserve));
        self
    }

    /// Freezes the present state as a child of the one that the guest stands on. The guest then
    /// stands on the new one, and its resets return to it.
    ///
    /// # Errors
    /// [`BranchError`].
    pub fn checkpoint(&mut self) -> Result<SnapshotId, BranchError<G::Error>> {
        self.freeze(false)
    }

    /// As [`Branch::checkpoint`]. A transient state leaves the tree once nothing holds it.
    fn freeze(&mut self, transient: bool) -> Result<SnapshotId, BranchError<G::Error>> {
        let frozen = match &mut self.guest {
            None => self.at.frozen().clone(),
            Some(guest) => {
                let mut frozen = guest.checkpoint().map_err(BranchError::Guest)?;
                if self.tree.is_spread(&frozen) {
                    frozen = self.tree.compacted(&frozen).map_err(TreeError::from)?;
                    // The guest moves to the compacted storage too, so that its next snapshot
                    // shares it.
                    guest.relocate(&frozen).map_err(BranchError::Guest)?;
                }
                frozen
            }
        };
        // The old state is released last: if it was transient, its parent gets the new one.
        self.at = self.tree.insert_held(frozen, self.nearest_state(), transient);
        self.under = None;
        self.moved = false;
        Ok(self.at.id())
    }

    /// The nearest state that is left, from the one that the guest stands on towards the root.
    /// `None` if another branch dropped them.
    pub fn nearest_state(&self) -> Option<SnapshotId> {
        let candidates = [Some(&self.at), self.under.as_ref()];
        candidates.into_iter().flatten().map(StateHold::id).find(|id| self.tree.contains(*id))
    }

    /// The state that `name` means here: the nearest on the way to the root, or the only one
    /// elsewhere.
    ///
    /// # Errors
    /// As [`Tree::find`].
    pub fn find(&self, name: &str) -> Result<SnapshotId, TreeError> {
        self.tree.find(name, self.nearest_state().unwrap_or(self.at.id()))
    }

    /// The state the guest is in: the one it stands on when it was not lent since and that was not
    /// dropped, and a new one otherwise. The new one leaves the tree once no branch stands on it
    /// and no [`StateHold`] is left.
    ///
    /// # Errors
    /// [`BranchError`].
    pub fn current(&mut self) -> Result<SnapshotId, BranchError<G::Error>> {
        match self.moved || !self.tree.contains(self.at.id()) {
            true => self.freeze(true),
            false => Ok(self.at.id()),
        }
    }

    /// As [`Branch::current`], with a hold, to which [`Branch::rollback_to`] returns.
    ///
    /// # Errors
    /// [`BranchError`].
    pub fn mark(&mut self) -> Result<StateHold<G::State>, BranchError<G::Error>> {
        self.current()?;
        Ok(self.at.clone())
    }

    /// Goes to any state of the tree: up, down or across. Changes that were not frozen are lost.
    ///
    /// # Errors
    /// [`BranchError`].
    pub fn rollback(&mut self, id: SnapshotId) -> Result<(), BranchError<G::Error>> {
        let to = self.tree.hold(id)?;
        self.go(to)
    }

    /// As [`Branch::rollback`], also when another branch has dropped the state. It is then in the
    /// tree again, with another id, while something holds it.
    ///
    /// # Errors
    /// [`BranchError::Tree`] when the hold is on a state of another tree; [`BranchError::Guest`].
    pub fn rollback_to(&mut self, hold: &StateHold<G::State>) -> Result<(), BranchError<G::Error>> {
        if !self.tree.has_given(hold.id()) {
            return Err(TreeError::Unknown(hold.id()).into());
        }
        let to = self.tree.hold(hold.id()).unwrap_or_else(|_| {
            self.tree.insert_held(hold.frozen().clone(), self.nearest_state(), true)
        });
        self.go(to)
    }

    /// Moves the guest to a state, and stands on it.
    fn go(&mut self, to: StateHold<G::State>) -> Result<(), BranchError<G::Error>> {
        if let Some(guest) = &mut self.guest
            && guest.switch(to.frozen()).is_err()
        {
            // The old guest cannot undo its changes; a new one has none.
            self.guest = None;
            self.guest = Some(G::make(&self.home, to.frozen()).map_err(BranchError::Guest)?);
        }
        self.at = to;
        self.under = None;
        self.moved = false;
        Ok(())
    }

    /// Drops the guest: what was not frozen is lost, and a new one is made in the state it stood on
    /// when it is next needed.
    pub fn abandon(&mut self) {
        self.guest = None;
        self.moved = false;
    }

    /// Another branch that stands on any state of the tree.
    ///
    /// # Errors
    /// [`BranchError::Tree`].
    pub fn fork(&self, id: SnapshotId) -> Result<Self, BranchError<G::Error>> {
        Ok(Self {
            guest: None,
            spares: self.spares.clone(),
            reserve: self.reserve.clone(),
            home: self.home.clone(),
            tree: self.tree.clone(),
            at: self.tree.hold(id)?,
            under: None,
            moved: false,
        })
    }

    /// As [`Tree::drop_snapshot`]. A guest that stands on the state stays as it is; its next one
    /// becomes a child of the nearest ancestor that is left.
    ///
    /// # Errors
    /// [`BranchError::Tree`].
    pub fn drop_snapshot(&mut self, id: SnapshotId) -> Result<(), BranchError<G::Error>> {
        let parent = self.tree.drop_snapshot(id)?;
        if self.at.id() == id || self.under.as_ref().is_some_and(|under| under.id() == id) {
            self.under = parent.and_then(|parent| self.tree.hold(parent).ok());
        }
        Ok(())
    }

    /// The state the guest stands on. It may have been dropped since.
    pub fn at(&self) -> SnapshotId {
        self.at.id()
    }

    /// The state that the guest stands on, also after it was dropped from the tree.
    pub fn base(&self) -> &Frozen<G::State> {
        self.at.frozen()
    }

    /// The tree.
    pub fn tree(&self) -> &Tree<G::State> {
        &self.tree
    }

    /// The guest, if it was needed before.
    pub fn guest(&self) -> Option<&G> {
        self.guest.as_ref()
    }

    /// The guest, to run it; made now if it was not needed before.
    ///
    /// # Errors
    /// [`BranchError::Guest`] when it cannot be made; the next time it is tried again.
    pub fn guest_mut(&mut self) -> Result<&mut G, BranchError<G::Error>> {
        let guest = match self.guest.take() {
            Some(guest) => guest,
            None => self.make().map_err(BranchError::Guest)?,
        };
        self.moved = true;
        Ok(self.guest.insert(guest))
    }

    /// A guest in the state `at`.
    fn make(&self) -> Result<G, G::Error> {
        let spare = self.spares.lock().pop();
        let spare = spare.or_else(|| {
            let (state, reserve) = self.reserve.as_ref()?;
            (*state == self.at.id()).then(|| reserve.take())?
        });
        if let Some(mut guest) = spare
            && guest.switch(self.at.frozen()).is_ok()
        {
            return Ok(guest);
        }
        G::make(&self.home, self.at.frozen())
    }
}

impl<G: Guest> Drop for Branch<G> {
    fn drop(&mut self) {
        // A guest whose user panics may be in the middle of something.
        let sound = self.guest.take().filter(|_| !std::thread::panicking());
        if let Some(guest) = sound {
            // A reserve that only this branch refers to has no later taker.
            if let Some((_, reserve)) = &self.reserve
                && Arc::strong_count(&self.spares) == 1
                && Arc::strong_count(reserve) > 1
            {
                return reserve.put(guest);
            }
            let mut spares = self.spares.lock();
            if spares.len() < SPARES {
                spares.push(guest);
            } else {
                drop(spares);
                drop(guest);
            }
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::sync::Mutex;

    use afresh_memory::{Image, Slot, SlotConfig};
    use afresh_sys::child_passes;

    use super::*;

    /// Guests in the state of an image.
    #[derive(Debug)]
    struct Reserve(Image, Mutex<Vec<Slot>>);

    impl GuestReserve<Slot> for Reserve {
        fn take(&self) -> Option<Slot> {
            self.1.lock().unwrap().pop()
        }

        fn put(&self, mut guest: Slot) {
            guest.switch(&self.0).unwrap();
            self.1.lock().unwrap().push(guest);
        }
    }

    #[test]
    fn the_last_relative_leaves_its_guest_to_branches_from_the_same_state() {
        let image = Image::zero(4);
        let reserve = Arc::new(Reserve(image.clone(), Mutex::default()));
        let begin = || {
            let mut slot = Slot::new(&image, SlotConfig::default()).unwrap();
            let base = Guest::checkpoint(&mut slot).unwrap();
            let branch = Branch::from_state(&Tree::new(), SlotConfig::default(), base);
            branch.with_reserve(reserve.clone())
        };
        let count = || reserve.1.lock().unwrap().len();
        let first = |branch: &mut Branch<Slot>| {
            let mut byte = [9];
            branch.guest_mut().unwrap().read(0, &mut byte).unwrap();
            byte[0]
        };
        let mut branch = begin();
        branch.guest_mut().unwrap().write(0, &[1]).unwrap();
        let mut relative = branch.fork(branch.at()).unwrap();
        drop(branch);
        assert_eq!(count(), 0, "its relative may need it");
        assert_eq!(first(&mut relative), 0);
        drop(relative);
        assert_eq!(count(), 1);
        let mut branch = begin();
        assert_eq!((first(&mut branch), count()), (0, 0));
        drop(begin());
        let mut other = begin();
        other.guest_mut().unwrap();
        drop(other);
        branch.guest_mut().unwrap().write(0, &[2]).unwrap();
        branch.checkpoint().unwrap();
        branch.abandon();
        // A guest in the reserve is in another state.
        assert_eq!((first(&mut branch), count()), (2, 1));
    }

    #[test]
    fn a_child_drops_and_moves_the_branches_of_its_parent_whose_locks_are_held() {
        let slot = Slot::new(&afresh_memory::Image::zero(4), SlotConfig::default()).unwrap();
        let tree = Tree::new();
        let branch = Branch::from_guest(&tree, slot).unwrap();
        let relative = branch.fork(branch.at()).unwrap();
        let spares = branch.spares.clone();
        let lock = spares.lock();
        let mut own = Some((branch, relative));
        assert!(child_passes(|| {
            let Some((branch, relative)) = own.take() else { return false };
            let known = branch.tree().contains(branch.at());
            drop((branch, relative));
            known && spares.lock().len() == 1
        }));
        drop(lock);
        drop(own);
    }
}
