//! Sessions: a live guest whose calls continue from one another, on a tree of states.
//!
//! Promises: each state holds memory and everything else of the guest bit for bit as they were when
//! it was frozen. A checkpoint, a rollback and a fork cost only their changes, however large the
//! guest and however long the tree's history is; relatives share every page that they have in
//! common. A call that was cut short (a trap, a time limit, a panic of a host function) leaves a
//! session that refuses calls until it is rolled back. No two forks, and no two tries after a
//! rollback, draw the same random numbers, where the guest takes entropy as leases give it.
//!
//! A guest's file tree is part of every state. May break it: state outside the guest, in host
//! functions, host directories and sockets. WASI's streams start anew after each rollback.

use std::any::Any;

use afresh_files::FileDifference;
use afresh_snapshot::{Difference, SnapshotId, SnapshotInfo};
use afresh_store::ReplacedName;

use super::backend::{SessionBackend, WarmGuest, dispatch};
use super::call::Entry;
use super::saved_names::SavedNames;
use super::session_files::SessionFiles;
use super::session_turns::TurnWriter;
use super::{
    Answer, Call, CallError, CallOptions, Guest, Lease, LeaseError, Mark, SaveError, SaveOptions,
    SavedSnapshot, SessionError,
};
use crate::{Cause, Reference, describe_error};

/// A state in the tree of a session: by its id, its name or a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Checkpoint<'a> {
    /// By id.
    Id(SnapshotId),
    /// By name: the nearest on the way from where the session stands to the root, or the only one
    /// elsewhere.
    Name(&'a str),
    /// The state of a mark. A rollback finds it also when it was dropped.
    Mark(&'a Mark),
}

impl From<SnapshotId> for Checkpoint<'_> {
    fn from(id: SnapshotId) -> Self {
        Self::Id(id)
    }
}

impl<'a> From<&'a str> for Checkpoint<'a> {
    fn from(name: &'a str) -> Self {
        Self::Name(name)
    }
}

impl<'a> From<&'a Mark> for Checkpoint<'a> {
    fn from(mark: &'a Mark) -> Self {
        Self::Mark(mark)
    }
}

/// Whether calls may be made.
pub(crate) enum State {
    Ready,
    /// A call is under way; without a caller, a panic ended the last one.
    Calling,
    Failed(String),
}

/// A live guest whose calls see each other's effects, and that can return to any of its states.
///
/// Every method that runs or moves the guest takes `&mut self`, so two calls at the same time on
/// one session do not compile. Relatives are separate sessions: each can run in a separate thread.
///
/// ```compile_fail
/// # fn two(session: &mut afresh::Session) {
/// std::thread::scope(|scope| {
///     scope.spawn(|| session.call("one", b""));
///     scope.spawn(|| session.call("two", b""));
/// });
/// # }
/// ```
///
/// The guest's file tree ([`Options::files`](crate::Options::files)) and its open files there are
/// part of every state, and so are the files and descriptors of a Linux program. State of host
/// functions, host directories and sockets are not. WASI streams belong to the live session: they
/// start anew in each state that it moves to, and a guest that has files of a host directory open
/// cannot be checkpointed.
pub struct Session {
    pub(crate) guest: Guest,
    /// The live guest, and its state in the tree.
    pub(crate) backend: Box<dyn SessionBackend>,
    pub(crate) state: State,
    /// Names in remotes that it was saved under before.
    pub(crate) saved_names: SavedNames,
    /// Where it is saved turn by turn.
    pub(crate) saving: Option<Box<TurnWriter>>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("guest", &self.guest)
            .field("at", &self.at())
            .finish_non_exhaustive()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if matches!(self.state, State::Calling) {
            // Its relatives cannot use it either.
            self.backend.abandon();
        }
    }
}

/// The session's own instance on lease, made now if there was none.
fn lend<'a>(
    guest: &'a Guest,
    backend: &'a mut dyn SessionBackend,
) -> Result<Lease<'a>, LeaseError> {
    Ok(Lease::new(guest, backend.lend()?))
}

/// The nearest state on the way from `id` to the root that stays until it is dropped.
fn nearest_checkpoint(all: &[SnapshotInfo], id: SnapshotId) -> Option<SnapshotId> {
    let find = |id| all.iter().find(|state| state.id == id);
    let mut at = find(id);
    while let Some(state) = at.filter(|state| state.transient) {
        at = state.parent.and_then(find);
    }
    at.map(|state| state.id)
}

/// The reason why a call was cut short, if `error` is that of a call that had begun.
fn cut_short(error: &dyn Any) -> Option<String> {
    let call = match error.downcast_ref() {
        Some(SessionError::Call(error)) => Some(error),
        _ => error.downcast_ref::<CallError>(),
    };
    call.filter(|error| error.is_cut_short()).map(|error| describe_error(error))
}

impl Session {
    pub(crate) fn begin(guest: &Guest) -> Result<Self, SessionError> {
        let backend = dispatch!(Backend, &guest.inner().backend, warm => warm.begin_session()?);
        Ok(Self::on(guest.clone(), backend))
    }

    /// A session over a backend of its guest.
    fn on(guest: Guest, backend: Box<dyn SessionBackend>) -> Self {
        Self {
            guest,
            backend,
            state: State::Ready,
            saved_names: SavedNames::default(),
            saving: None,
        }
    }

    /// The instance, as a lease.
    pub(super) fn lend(&mut self) -> Result<Lease<'_>, LeaseError> {
        lend(&self.guest, &mut *self.backend)
    }

    pub(crate) fn check(&self) -> Result<(), SessionError> {
        let why = match &self.state {
            State::Ready => return Ok(()),
            State::Calling => "a call of it was ended by a panic".to_owned(),
            State::Failed(why) => why.clone(),
        };
        Err(SessionError::Failed { why })
    }

    /// The reason if the session refuses calls, because its last call was cut short. It can be
    /// rolled back.
    #[must_use]
    pub fn failed(&self) -> Option<String> {
        match self.check() {
            Err(SessionError::Failed { why }) => Some(why),
            _ => None,
        }
    }

    /// Uses the instance through a lease, for typed calls, memory and host state. Its effects stay.
    ///
    /// `run` may fail with any error that a [`SessionError`] converts into. If it fails and a call
    /// through the lease was cut short, or if its error is that of a call that had begun, the
    /// session has failed. Other errors do not change it.
    ///
    /// ```
    /// # #[cfg(feature = "wasm")]
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use afresh::{Call, Guest, Options};
    /// # let wasm = wat::parse_str(r#"(module (memory 1)
    /// #   (func (export "next") (result i32)
    /// #     (i32.store (i32.const 0) (i32.add (i32.load (i32.const 0)) (i32.const 1)))
    /// #     (i32.load (i32.const 0))))"#)?;
    /// # let guest = Guest::from_bytes("counter", &wasm, &Options::new())?;
    /// #[derive(Debug, thiserror::Error)]
    /// enum MyError {
    ///     #[error("the answer is too small")]
    ///     TooSmall,
    ///     #[error(transparent)]
    ///     Session(#[from] afresh::SessionError),
    /// }
    ///
    /// let mut session = guest.session()?;
    /// let result = session.with(|lease| {
    ///     let answer = lease.invoke(&Call::text("next", [""; 0])).map_err(afresh::SessionError::from)?;
    ///     if answer.text() == "1" { Err(MyError::TooSmall) } else { Ok(()) }
    /// });
    /// assert!(matches!(result, Err(MyError::TooSmall)));
    /// assert!(session.failed().is_none()); // the call itself was complete
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "wasm"))]
    /// # fn main() {}
    /// ```
    ///
    /// # Errors
    /// As `run` returns, and [`SessionError::Failed`] or a [`LeaseError`] before it is called.
    pub fn with<R, E>(&mut self, run: impl FnOnce(&mut Lease<'_>) -> Result<R, E>) -> Result<R, E>
    where
        E: From<SessionError> + 'static,
    {
        self.check()?;
        let lent = lend(&self.guest, &mut *self.backend).map_err(CallError::from);
        let mut lease = lent.map_err(SessionError::from)?;
        // Stays when `run` unwinds.
        self.state = State::Calling;
        let result = run(&mut lease);
        // The caller may know more about the reason than the guest.
        let reason = result.as_ref().err().and_then(|error| cut_short(error));
        let failure = reason.or_else(|| lease.failed().map(str::to_owned));
        drop(lease);
        self.state = failure.map_or(State::Ready, State::Failed);
        result
    }

    /// Time until the next event in a Linux program, as [`Lease::due`]; `None` if calls are
    /// refused.
    #[must_use]
    pub fn due(&self) -> Option<std::time::Duration> {
        match &self.state {
            State::Ready => self.backend.next_event(),
            _ => None,
        }
    }

    /// Bytes of memory that the processes of a Linux program have written since the state that the
    /// session stands on, which no state of [`Session::tree`] has yet. A page of that state that
    /// was written again counts, because it is a copy. Shared memory does not count, and files are
    /// in [`Session::file_memory`]. 0 for other kinds of guests. The cost is one read of `/proc`
    /// for each process of the program.
    #[must_use]
    pub fn written_memory(&self) -> u64 {
        self.backend.written_memory()
    }

    /// Bytes of memory for the session's files as they are now, without the contents of the layers
    /// that its tree begins with. 0 for a guest without a file tree.
    #[must_use]
    pub fn file_memory(&self) -> u64 {
        self.backend.file_memory()
    }

    /// Bytes of memory for the files of a checkpoint that the session's files as they are now do
    /// not share, or that another checkpoint does not. 0 for a guest without a file tree.
    ///
    /// # Errors
    /// [`SessionError::Tree`].
    pub fn unshared_files<'c>(
        &self,
        one: impl Into<Checkpoint<'c>>,
        other: Option<Checkpoint<'c>>,
    ) -> Result<u64, SessionError> {
        let other = other.map(|other| self.find(other)).transpose()?;
        self.backend.unshared_files(self.find(one.into())?, other)
    }

    /// Calls a handler that takes and returns bytes.
    ///
    /// # Errors
    /// [`SessionError::Call`], [`SessionError::Failed`].
    pub fn call<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
    ) -> Result<Vec<u8>, SessionError> {
        let callee = function.into();
        self.with(|lease| Ok(lease.call(callee, input)?))
    }

    /// As [`Session::call`], with options of this call.
    ///
    /// # Errors
    /// As [`Session::call`].
    pub fn call_with<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
        options: &CallOptions,
    ) -> Result<Vec<u8>, SessionError> {
        let callee = function.into();
        self.with(|lease| Ok(lease.call_with(callee, input, options)?))
    }

    /// Makes any call.
    ///
    /// # Errors
    /// As [`Session::call`].
    pub fn invoke(&mut self, call: &Call) -> Result<Answer, SessionError> {
        self.with(|lease| Ok(lease.invoke(call)?))
    }

    /// As [`Session::invoke`], with options of this call.
    ///
    /// # Errors
    /// As [`Session::call`].
    pub fn invoke_with(
        &mut self,
        call: &Call,
        options: &CallOptions,
    ) -> Result<Answer, SessionError> {
        self.with(|lease| Ok(lease.invoke_with(call, options)?))
    }

    /// Freezes the present state as a child of the one that the session stands on, and stands on
    /// the new state. The cost follows the writes since the last one. Names need not be unique.
    ///
    /// # Errors
    /// [`SessionError::State`] when the state cannot be kept: the guest has files open, or holds
    /// references to objects of the host. [`SessionError::Failed`].
    pub fn checkpoint(&mut self, name: impl Into<String>) -> Result<SnapshotId, SessionError> {
        self.check()?;
        self.backend.checkpoint(name.into())
    }

    /// Moves to any state of the tree, also after the session failed. State that was not frozen is
    /// lost. The cost follows the differences and the writes. An instance in an unknown state, or
    /// that cannot be moved in place, is replaced by a new one.
    ///
    /// # Errors
    /// [`SessionError::Tree`], with nothing changed. [`SessionError::State`] when a new instance
    /// cannot be made; the session has failed then, and can be rolled back once there is room.
    pub fn rollback<'c>(
        &mut self,
        to: impl Into<Checkpoint<'c>>,
    ) -> Result<SnapshotId, SessionError> {
        let unwound = matches!(self.state, State::Calling);
        let moved = match to.into() {
            Checkpoint::Mark(mark) => self.backend.rollback_to(mark, unwound),
            other => self.backend.rollback(self.find(other)?, unwound),
        };
        self.state = match &moved {
            // Nothing was changed.
            Err(SessionError::Tree(_)) => return moved.map(|()| self.backend.at()),
            Err(error) => {
                State::Failed(format!("it could not be rolled back: {}", describe_error(error)))
            }
            Ok(()) => State::Ready,
        };
        moved.map(|()| self.backend.at())
    }

    /// Marks the present state, to return to it by [`Session::rollback`]. If the session was called
    /// since its last checkpoint, that state becomes one of the tree, without a name. It leaves the
    /// tree once the mark is dropped and no session stands on it.
    ///
    /// # Errors
    /// As [`Session::checkpoint`].
    pub fn mark(&mut self) -> Result<Mark, SessionError> {
        self.check()?;
        self.backend.mark()
    }

    /// `count` sessions that start from the present state, on the same tree. If the session was
    /// called since its last checkpoint, that state becomes one of the tree, without a name. It
    /// leaves the tree once no session stands on it. A fork's instance is made by its first call,
    /// so one that is never called costs next to nothing.
    ///
    /// # Errors
    /// As [`Session::checkpoint`].
    pub fn fork(&mut self, count: usize) -> Result<Vec<Session>, SessionError> {
        self.check()?;
        let id = self.backend.current()?;
        let fork = |_| Ok(Self::on(self.guest.clone(), self.backend.fork(id)?));
        (0..count).map(fork).collect()
    }

    /// The difference of two states: which pages, how many bytes, and whether other state differs.
    ///
    /// # Errors
    /// [`SessionError::Tree`].
    pub fn diff<'c>(
        &self,
        one: impl Into<Checkpoint<'c>>,
        two: impl Into<Checkpoint<'c>>,
    ) -> Result<Difference, SessionError> {
        let (one, two) = (self.find(one.into())?, self.find(two.into())?);
        self.backend.diff(one, two)
    }

    /// The differences between the files of two states: which paths, and how many bytes.
    ///
    /// # Errors
    /// [`SessionError::Tree`]; [`SessionError::State`] when a layer of the tree cannot be read.
    pub fn diff_files<'c>(
        &self,
        one: impl Into<Checkpoint<'c>>,
        two: impl Into<Checkpoint<'c>>,
    ) -> Result<FileDifference, SessionError> {
        let (one, two) = (self.find(one.into())?, self.find(two.into())?);
        self.backend.diff_files(one, two)
    }

    /// The session's files, for reads and writes between two calls.
    ///
    /// # Errors
    /// [`SessionError::NoFiles`] for a guest without a file tree
    /// ([`Options::files`](crate::Options::files)), [`SessionError::Failed`].
    pub fn files(&mut self) -> Result<SessionFiles<'_>, SessionError> {
        self.check()?;
        self.backend.files()
    }

    /// Drops a checkpoint: its children become its parent's, and the pages that no other state
    /// shares are freed. Sessions that stand on it are not affected.
    ///
    /// # Errors
    /// [`SessionError::Tree`].
    pub fn drop_checkpoint<'c>(
        &mut self,
        checkpoint: impl Into<Checkpoint<'c>>,
    ) -> Result<(), SessionError> {
        let id = self.find(checkpoint.into())?;
        self.backend.drop_snapshot(id)
    }

    /// Every state of the tree that this session and its relatives share, oldest first. The first
    /// is the guest's warm state, unless it was dropped.
    #[must_use]
    pub fn tree(&self) -> Vec<SnapshotInfo> {
        self.backend.list()
    }

    /// The states that stay until they are dropped, as [`Session::tree`] lists them with others.
    /// The parent of each is the nearest of them.
    #[must_use]
    pub fn checkpoints(&self) -> Vec<SnapshotInfo> {
        let all = self.tree();
        let mut kept: Vec<SnapshotInfo> =
            all.iter().filter(|state| !state.transient).cloned().collect();
        for state in &mut kept {
            state.parent = state.parent.and_then(|parent| nearest_checkpoint(&all, parent));
        }
        let parents: Vec<_> = kept.iter().map(|state| (state.id, state.parent)).collect();
        for state in &mut kept {
            let children = parents.iter().filter(|(_, parent)| *parent == Some(state.id));
            state.children = children.map(|(id, _)| *id).collect();
        }
        kept
    }

    /// The nearest of [`Session::checkpoints`] on the way from where the session stands to the
    /// root.
    #[must_use]
    pub fn last_checkpoint(&self) -> Option<SnapshotId> {
        nearest_checkpoint(&self.tree(), self.at())
    }

    /// The state that the session stands on: its last checkpoint or mark, the target of its last
    /// rollback, or the state that it was last saved or forked in. Once the session has dropped
    /// that state, it is the nearest ancestor that is left.
    #[must_use]
    pub fn at(&self) -> SnapshotId {
        self.backend.nearest_state().unwrap_or_else(|| self.backend.at())
    }

    /// The guest of this session.
    #[must_use]
    pub fn guest(&self) -> &Guest {
        &self.guest
    }

    /// Finds a state by its id, as [`Session::tree`] lists it, or else by its name, as
    /// [`Checkpoint::Name`].
    ///
    /// # Errors
    /// [`SessionError::Tree`].
    pub fn find_state(&self, text: &str) -> Result<SnapshotId, SessionError> {
        let by_id = self.tree().into_iter().find(|state| state.id.to_string() == text);
        by_id.map_or_else(|| self.find(Checkpoint::Name(text)), |state| Ok(state.id))
    }

    pub(crate) fn find(&self, checkpoint: Checkpoint<'_>) -> Result<SnapshotId, SessionError> {
        match checkpoint {
            Checkpoint::Id(id) => Ok(id),
            Checkpoint::Name(name) => self.backend.find(name),
            Checkpoint::Mark(mark) => Ok(mark.id()),
        }
    }

    /// Saves the present state as a snapshot for [`open`](crate::open). In the directory of the
    /// snapshot from which the guest was opened, only changes are stored.
    ///
    /// It replaces the name if it exists, also turns of another session. [`Session::save_turn`]
    /// replaces no save of another writer.
    ///
    /// # Errors
    /// As [`Lease::save`], and [`SaveError::Freeze`] for a session that failed.
    pub fn save(
        &mut self,
        to: &Reference,
        options: &SaveOptions,
    ) -> Result<SavedSnapshot, SaveError> {
        let freeze = |cause: Cause| SaveError::Freeze(cause);
        self.check().map_err(|error| freeze(error.into()))?;
        let mut lease = self.lend().map_err(|error| freeze(error.into()))?;
        let saved = lease.save(to, options)?;
        drop(lease);
        self.note_save(to, saved.id)?;
        Ok(saved)
    }

    /// The meaning of a name that a turn of the session replaces.
    pub(super) fn replaced(&self, to: &Reference) -> ReplacedName<'_> {
        let origin = self.guest.origin();
        let origin = origin
            .filter(|it| it.reference.place() == to.place() && it.reference.name() == to.name());
        let known = self.saved_names.target(to);
        known.or(origin.map(|it| ReplacedName::Snapshot(&it.snapshot))).unwrap_or(ReplacedName::Any)
    }
}
