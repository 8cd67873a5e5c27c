//! A session of any kind of guest: its branch in a tree of states.

use std::sync::Arc;
use std::time::Duration;

use afresh_files::{FileDifference, Tree as FileTree};
use afresh_pager::SnapshotMemory;
use afresh_snapshot::{
    Branch, BranchError, Difference, Frozen, Guest, GuestReserve, SnapshotId, SnapshotInfo,
    StateHold, Tree, TreeError,
};

use crate::guests::Mark;
use crate::guests::backend::{Backend, FrozenGuest, Instance};
use crate::guests::session_files::SessionFiles;
use crate::{Cause, LeaseError, Options, SessionError};

/// A guest that can be the live guest of a session.
pub(crate) trait SessionGuest: Guest + Sized + 'static {
    /// Its instance on lease.
    fn lend(&mut self) -> Instance<'_>;

    /// A state of the tree, frozen for snapshots. Shares the memory.
    fn freeze_state(
        warm: &Backend,
        state: &Frozen<Self::State>,
    ) -> Result<Box<dyn FrozenGuest>, Cause>;

    /// A state for the tree, out of its pages and the rest in the form of snapshots.
    fn thaw_state(
        warm: &Backend,
        memory: SnapshotMemory,
        state: &[u8],
        options: &Options,
    ) -> Result<Frozen<Self::State>, Cause>;

    /// The differences between the files of two states.
    fn diff_files(one: &Self::State, two: &Self::State) -> Result<FileDifference, SessionError>;

    /// The files of a session.
    fn files(branch: &mut Branch<Self>) -> Result<SessionFiles<'_>, SessionError>;

    /// Time until the next event in the guest.
    fn next_event(branch: &Branch<Self>) -> Option<Duration> {
        let _ = branch;
        None
    }

    /// The tree of the session as it is now.
    fn present_files(branch: &Branch<Self>) -> Option<FileTree> {
        let _ = branch;
        None
    }

    /// The tree of a state.
    fn state_files(state: &Self::State) -> Option<&FileTree> {
        let _ = state;
        None
    }

    /// Bytes of memory that it has written since the state that it stands on, where that is known.
    fn written_memory(&self) -> u64 {
        0
    }
}

/// The branch of a session, without the type of its guest.
pub(crate) trait SessionBackend: Send {
    /// The session's own instance on lease, made now if there was none.
    fn lend(&mut self) -> Result<Instance<'_>, LeaseError>;
    /// The state that it stands on.
    fn at(&self) -> SnapshotId;
    /// The nearest state that is left, from there towards the root.
    fn nearest_state(&self) -> Option<SnapshotId>;
    /// All states of the tree.
    fn list(&self) -> Vec<SnapshotInfo>;
    /// The nearest state of this name.
    fn find(&self, name: &str) -> Result<SnapshotId, SessionError>;
    /// Makes the present state one of the tree.
    fn checkpoint(&mut self, name: String) -> Result<SnapshotId, SessionError>;
    /// Makes the present state one of the tree, unless it is one.
    fn current(&mut self) -> Result<SnapshotId, SessionError>;
    /// Makes the present state one of the tree, unless it is one, and holds it.
    fn mark(&mut self) -> Result<Mark, SessionError>;
    /// Goes to a state. `unwound` says that the instance was abandoned by a panic.
    fn rollback(&mut self, to: SnapshotId, unwound: bool) -> Result<(), SessionError>;
    /// As [`SessionBackend::rollback`], also when the state of the mark was dropped.
    fn rollback_to(&mut self, mark: &Mark, unwound: bool) -> Result<(), SessionError>;
    /// Another branch from a state.
    fn fork(&self, from: SnapshotId) -> Result<Box<dyn SessionBackend>, SessionError>;
    /// The difference of two states.
    fn diff(&self, one: SnapshotId, two: SnapshotId) -> Result<Difference, SessionError>;
    /// The differences between the files of two states.
    fn diff_files(&self, one: SnapshotId, two: SnapshotId) -> Result<FileDifference, SessionError>;
    /// Drops a state.
    fn drop_snapshot(&mut self, id: SnapshotId) -> Result<(), SessionError>;
    /// Gives the instance up.
    fn abandon(&mut self);
    /// A state, frozen for snapshots.
    fn freeze(&self, id: SnapshotId, warm: &Backend) -> Result<Box<dyn FrozenGuest>, Cause>;
    /// Makes a state of these pages and the rest, as a child of the present one, for
    /// [`SessionBackend::rollback_to`]. It leaves the tree with its last hold.
    fn insert(
        &mut self,
        memory: SnapshotMemory,
        state: &[u8],
        warm: &Backend,
        options: &Options,
    ) -> Result<Mark, Cause>;
    /// The files.
    fn files(&mut self) -> Result<SessionFiles<'_>, SessionError>;
    /// Time until the next event in the guest.
    fn next_event(&self) -> Option<Duration>;
    /// Bytes of memory for the files of the present state, without those of layers below them.
    fn file_memory(&self) -> u64;
    /// Bytes of memory for the files of a state that another one does not share, or the present
    /// one.
    fn unshared_files(
        &self,
        one: SnapshotId,
        other: Option<SnapshotId>,
    ) -> Result<u64, SessionError>;
    /// Bytes of memory that the guest has written since the state that it stands on.
    fn written_memory(&self) -> u64;
}

/// The error of a branch that did not move.
pub(super) fn unmoved<E: std::error::Error + Send + Sync + 'static>(
    error: BranchError<E>,
) -> SessionError {
    match error {
        BranchError::Tree(error) => SessionError::Tree(error),
        other => SessionError::State(other.into()),
    }
}

/// A session on a new tree. It gets its guest from `reserve` if that has one.
pub(super) fn begin<G: SessionGuest>(
    template: G::Template,
    root: Frozen<G::State>,
    reserve: Option<Arc<dyn GuestReserve<G>>>,
) -> Box<dyn SessionBackend>
where
    Branch<G>: SessionBackend,
{
    let branch = Branch::<G>::from_state(&Tree::new(), template, root);
    Box::new(match reserve {
        Some(reserve) => branch.with_reserve(reserve),
        None => branch,
    })
}

impl<G> SessionBackend for Branch<G>
where
    G: SessionGuest + Send,
    G::Template: Send,
    G::State: Send + Sync,
{
    fn lend(&mut self) -> Result<Instance<'_>, LeaseError> {
        let guest = self.guest_mut().map_err(|error| LeaseError::Create(error.into()))?;
        Ok(guest.lend())
    }

    fn at(&self) -> SnapshotId {
        Self::at(self)
    }

    fn nearest_state(&self) -> Option<SnapshotId> {
        Self::nearest_state(self)
    }

    fn list(&self) -> Vec<SnapshotInfo> {
        self.tree().list()
    }

    fn find(&self, name: &str) -> Result<SnapshotId, SessionError> {
        Ok(Self::find(self, name)?)
    }

    fn checkpoint(&mut self, name: String) -> Result<SnapshotId, SessionError> {
        let id = Self::checkpoint(self).map_err(unmoved)?;
        self.tree().name(id, name)?;
        Ok(id)
    }

    fn current(&mut self) -> Result<SnapshotId, SessionError> {
        Self::current(self).map_err(unmoved)
    }

    fn mark(&mut self) -> Result<Mark, SessionError> {
        Self::mark(self).map(Mark::new).map_err(unmoved)
    }

    fn rollback(&mut self, to: SnapshotId, unwound: bool) -> Result<(), SessionError> {
        let mark = Mark::new(self.tree().hold(to)?);
        SessionBackend::rollback_to(self, &mark, unwound)
    }

    fn rollback_to(&mut self, mark: &Mark, unwound: bool) -> Result<(), SessionError> {
        let Some(hold) = mark.hold.downcast_ref::<StateHold<G::State>>() else {
            return Err(TreeError::Unknown(mark.id()).into());
        };
        if unwound {
            Self::abandon(self);
        }
        Self::rollback_to(self, hold).map_err(unmoved)
    }

    fn fork(&self, from: SnapshotId) -> Result<Box<dyn SessionBackend>, SessionError> {
        Ok(Box::new(Self::fork(self, from).map_err(unmoved)?))
    }

    fn diff(&self, one: SnapshotId, two: SnapshotId) -> Result<Difference, SessionError> {
        Ok(self.tree().diff(one, two)?)
    }

    fn diff_files(&self, one: SnapshotId, two: SnapshotId) -> Result<FileDifference, SessionError> {
        let (one, two) = (self.tree().get(one)?, self.tree().get(two)?);
        G::diff_files(&one.state, &two.state)
    }

    fn drop_snapshot(&mut self, id: SnapshotId) -> Result<(), SessionError> {
        Self::drop_snapshot(self, id).map_err(unmoved)
    }

    fn abandon(&mut self) {
        Self::abandon(self);
    }

    fn freeze(&self, id: SnapshotId, warm: &Backend) -> Result<Box<dyn FrozenGuest>, Cause> {
        G::freeze_state(warm, &self.tree().get(id)?)
    }

    fn insert(
        &mut self,
        memory: SnapshotMemory,
        state: &[u8],
        warm: &Backend,
        options: &Options,
    ) -> Result<Mark, Cause> {
        let state = G::thaw_state(warm, memory, state, options)?;
        Ok(Mark::new(self.tree().insert_held(state, Some(Self::at(self)), true)))
    }

    fn files(&mut self) -> Result<SessionFiles<'_>, SessionError> {
        G::files(self)
    }

    fn next_event(&self) -> Option<Duration> {
        G::next_event(self)
    }

    fn file_memory(&self) -> u64 {
        G::present_files(self).map_or(0, |tree| tree.used().bytes)
    }

    fn unshared_files(
        &self,
        one: SnapshotId,
        other: Option<SnapshotId>,
    ) -> Result<u64, SessionError> {
        let one = self.tree().get(one)?;
        let other = match other {
            Some(other) => G::state_files(&self.tree().get(other)?.state).cloned(),
            None => G::present_files(self),
        };
        Ok(G::state_files(&one.state)
            .zip(other)
            .map_or(0, |(one, other)| one.unshared_bytes(&other)))
    }

    fn written_memory(&self) -> u64 {
        self.guest().map_or(0, G::written_memory)
    }
}
