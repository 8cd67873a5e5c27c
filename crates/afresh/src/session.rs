//! Sessions: a live guest whose calls continue from one another, on a tree of states.
//!
//! Promises: each state holds memory and everything else of the guest bit for bit as they were when it was frozen. A
//! checkpoint, a rollback and a fork cost only their changes, however large the guest and however long the tree's
//! history is; relatives share every page that they have in common. A call that was cut short (a trap, a time limit,
//! a panic of a host function) leaves a session that refuses calls until it is rolled back. No two forks, and no two
//! tries after a rollback, draw the same random numbers, where the guest takes entropy as leases give it.
//!
//! A guest's file tree is part of every state. May break it: state outside the guest, in host
//! functions, host directories and sockets. WASI's streams start anew after each rollback.

use afresh_snapshot::{Branch, BranchError, Difference, SnapshotId, SnapshotInfo, Tree};

#[cfg(any(feature = "wasm", feature = "linux"))]
use afresh_files::FileDifference;

use crate::call::Entry;
use crate::error::describe_error;
use crate::guest::Backend;
#[cfg(feature = "remote")]
use crate::known_meanings::KnownMeanings;
use crate::lease::Instance;
#[cfg(any(feature = "vm", feature = "linux"))]
use crate::pooled::Leased;
#[cfg(any(feature = "wasm", feature = "linux"))]
use crate::session_files::SessionFiles;
use crate::session_turns::Saving;
use crate::{
    Answer, Call, CallError, Cause, Guest, Lease, LeaseError, Reference, SaveError, SaveOptions,
    Saved, SessionError,
};

/// A state in the tree of a session: by its id or its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Checkpoint<'a> {
    /// By id.
    Id(SnapshotId),
    /// By name: the nearest on the way from where the session stands to the root, or the only one elsewhere.
    Name(&'a str),
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

/// The live guest, and where it stands.
pub(crate) enum SessionBackend {
    #[cfg(feature = "wasm")]
    Module(Box<Branch<afresh_wasm::Session>>),
    #[cfg(feature = "vm")]
    Machine(Box<Branch<afresh_vm::Sandbox>>),
    #[cfg(feature = "linux")]
    Program(Box<Branch<afresh_linux::Instance>>),
}

/// Does the same with the branch of either kind.
macro_rules! each {
    ($line:expr, $branch:ident => $body:expr) => {
        match $line {
            #[cfg(feature = "wasm")]
            SessionBackend::Module($branch) => $body,
            #[cfg(feature = "vm")]
            SessionBackend::Machine($branch) => $body,
            #[cfg(feature = "linux")]
            SessionBackend::Program($branch) => $body,
        }
    };
}

/// Whether calls may be made.
pub(crate) enum State {
    Ready,
    /// A call is under way; without a caller, a panic ended the last one.
    Calling,
    Failed(String),
}

/// A live guest whose calls see one another's effects, and that can return to any of its states.
///
/// Every method that runs or moves the guest takes `&mut self`, so two calls at the same time on one session do not
/// compile. Relatives are separate sessions: each can run in a separate thread.
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
/// The guest's file tree ([`Options::files`](crate::Options::files)) and its open files there are part of every
/// state, and so are the files and descriptors of a Linux program. State of host functions, host directories and
/// sockets are not. WASI streams belong to the live session: they start anew in each state that it moves to, and a
/// guest that has files of a host directory open cannot be checkpointed.
pub struct Session {
    pub(crate) guest: Guest,
    pub(crate) line: SessionBackend,
    pub(crate) state: State,
    /// Names in remotes that it was saved under before.
    #[cfg(feature = "remote")]
    pub(crate) known: KnownMeanings,
    /// Where it is saved turn by turn.
    pub(crate) saving: Option<Box<Saving>>,
    /// The state that was kept for the last turn, or for a delta.
    pub(crate) passing: Option<SnapshotId>,
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
            each!(&mut self.line, branch => branch.abandon());
        }
    }
}

/// The error of a branch that did not move.
pub(crate) fn unmoved<E: std::error::Error + Send + Sync + 'static>(
    error: BranchError<E>,
) -> SessionError {
    match error {
        BranchError::Tree(error) => SessionError::Tree(error),
        other => SessionError::State(other.into()),
    }
}

/// The session's own instance on lease, made now if there was none.
fn lend<'a>(guest: &'a Guest, line: &'a mut SessionBackend) -> Result<Lease<'a>, LeaseError> {
    let instance = match line {
        #[cfg(feature = "wasm")]
        SessionBackend::Module(branch) => {
            let session = branch.guest_mut().map_err(|e| LeaseError::Instance(e.into()))?;
            Instance::Module(session.lease())
        }
        #[cfg(feature = "vm")]
        SessionBackend::Machine(branch) => {
            let sandbox = branch.guest_mut().map_err(|e| LeaseError::Instance(e.into()))?;
            Instance::Machine(Leased::Own(sandbox))
        }
        #[cfg(feature = "linux")]
        SessionBackend::Program(branch) => {
            let program = branch.guest_mut().map_err(|e| LeaseError::Instance(e.into()))?;
            Instance::Program(Leased::Own(program))
        }
    };
    Ok(Lease { guest, instance })
}

impl Session {
    pub(crate) fn begin(guest: &Guest) -> Result<Self, SessionError> {
        let line = match &guest.inner().ready {
            #[cfg(feature = "wasm")]
            Backend::Module(warm) => {
                let root = warm.root().map_err(|e| SessionError::State(e.into()))?;
                SessionBackend::Module(Box::new(Branch::from_state(
                    &Tree::new(),
                    warm.clone(),
                    root,
                )))
            }
            #[cfg(feature = "wasm")]
            Backend::Component(_) => {
                return Err(SessionError::Guest(
                    "a component runs every call in a new instance; a core module or a micro-VM has them",
                ));
            }
            #[cfg(feature = "vm")]
            Backend::Machine(machines) => {
                let (home, root) = (machines.pristine.clone(), machines.pristine.state());
                SessionBackend::Machine(Box::new(Branch::from_state(&Tree::new(), home, root)))
            }
            #[cfg(feature = "linux")]
            Backend::Program(programs) => {
                let (home, root) = (programs.pristine.home(), programs.pristine.state());
                SessionBackend::Program(Box::new(Branch::from_state(&Tree::new(), home, root)))
            }
        };
        Ok(Self {
            guest: guest.clone(),
            line,
            state: State::Ready,
            #[cfg(feature = "remote")]
            known: KnownMeanings::default(),
            saving: None,
            passing: None,
        })
    }

    pub(crate) fn check(&self) -> Result<(), SessionError> {
        let why = match &self.state {
            State::Ready => return Ok(()),
            State::Calling => "a call of it was ended by a panic".to_owned(),
            State::Failed(why) => why.clone(),
        };
        Err(SessionError::Failed { why })
    }

    /// Why the session refuses calls, if it does: its last call was cut short. It can be rolled back.
    #[must_use]
    pub fn failed(&self) -> Option<String> {
        match self.check() {
            Err(SessionError::Failed { why }) => Some(why),
            _ => None,
        }
    }

    /// Uses the instance through a lease, for typed calls, memory and host state. Its effects stay; when `run`
    /// returns an error of a call that had begun, the session has failed.
    ///
    /// # Errors
    /// [`SessionError::Call`] as `run` returns, [`SessionError::Failed`].
    pub fn with<R>(
        &mut self,
        run: impl FnOnce(&mut Lease<'_>) -> Result<R, CallError>,
    ) -> Result<R, SessionError> {
        self.check()?;
        let mut lease = lend(&self.guest, &mut self.line).map_err(CallError::from)?;
        // Stays when `run` unwinds.
        self.state = State::Calling;
        let result = run(&mut lease);
        drop(lease);
        self.state = match &result {
            Ok(_) | Err(CallError::Request { .. }) => State::Ready,
            Err(error) => State::Failed(describe_error(error)),
        };
        Ok(result?)
    }

    /// Time until the next event in a Linux program, as [`Lease::due`]; `None` if calls are refused.
    #[cfg(feature = "linux")]
    #[must_use]
    pub fn due(&self) -> Option<std::time::Duration> {
        match (&self.line, &self.state) {
            (SessionBackend::Program(branch), State::Ready) => match branch.guest() {
                Some(guest) => guest.due(),
                None => branch.base().state.due(),
            },
            _ => None,
        }
    }

    /// Calls a handler that takes bytes and gives bytes.
    ///
    /// # Errors
    /// [`SessionError::Call`], [`SessionError::Failed`].
    pub fn call<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
    ) -> Result<Vec<u8>, SessionError> {
        let callee = function.into();
        self.with(|lease| lease.call(callee, input))
    }

    /// Makes any call.
    ///
    /// # Errors
    /// As [`Session::call`].
    pub fn ask(&mut self, call: &Call) -> Result<Answer, SessionError> {
        self.with(|lease| lease.ask(call))
    }

    /// Freezes the present state, as a child of the one that the session stands on, and stands on it from then on.
    /// The cost follows the writes since that one. Names need not be unique.
    ///
    /// # Errors
    /// [`SessionError::State`] when the state cannot be kept: the guest has files open, or holds references to
    /// objects of the host. [`SessionError::Failed`].
    pub fn checkpoint(&mut self, name: impl Into<String>) -> Result<SnapshotId, SessionError> {
        self.check()?;
        each!(&mut self.line, branch => {
            let id = branch.checkpoint().map_err(unmoved)?;
            branch.tree().name(id, name)?;
            Ok(id)
        })
    }

    /// Goes to any state of the tree: back, forward or across, also after the session failed. State that was not
    /// frozen is lost. The cost follows the differences and the writes. An instance that cannot be relied on, or not
    /// be brought there in place, is replaced by a new one.
    ///
    /// # Errors
    /// [`SessionError::Tree`], with nothing changed. [`SessionError::State`] when a new instance cannot be
    /// made; the session has failed then, and can be rolled back once there is room.
    pub fn rollback<'c>(
        &mut self,
        to: impl Into<Checkpoint<'c>>,
    ) -> Result<SnapshotId, SessionError> {
        let id = self.find(to.into())?;
        let unwound = matches!(self.state, State::Calling);
        let moved = each!(&mut self.line, branch => {
            branch.tree().get(id)?;
            if unwound {
                branch.abandon();
            }
            branch.rollback(id).map_err(unmoved)
        });
        self.state = match &moved {
            Err(error) => {
                State::Failed(format!("it could not be rolled back: {}", describe_error(error)))
            }
            Ok(()) => State::Ready,
        };
        moved.map(|()| id)
    }

    /// `count` sessions that start from the present state, on the same tree. If the session was called since
    /// its last checkpoint, that state becomes one, without a name. A fork's instance is made by its first
    /// call, so one that is never called costs next to nothing.
    ///
    /// # Errors
    /// As [`Session::checkpoint`].
    pub fn fork(&mut self, count: usize) -> Result<Vec<Session>, SessionError> {
        self.check()?;
        let guest = self.guest.clone();
        let fork = |line| {
            let (guest, state) = (guest.clone(), State::Ready);
            Session {
                guest,
                line,
                state,
                #[cfg(feature = "remote")]
                known: KnownMeanings::default(),
                saving: None,
                passing: None,
            }
        };
        // It also belongs to them.
        self.passing = None;
        match &mut self.line {
            #[cfg(feature = "wasm")]
            SessionBackend::Module(branch) => {
                let id = branch.current().map_err(unmoved)?;
                let forks =
                    (0..count).map(|_| branch.fork(id).map(Box::new).map(SessionBackend::Module));
                forks.map(|line| line.map(fork).map_err(unmoved)).collect()
            }
            #[cfg(feature = "vm")]
            SessionBackend::Machine(branch) => {
                let id = branch.current().map_err(unmoved)?;
                let forks =
                    (0..count).map(|_| branch.fork(id).map(Box::new).map(SessionBackend::Machine));
                forks.map(|line| line.map(fork).map_err(unmoved)).collect()
            }
            #[cfg(feature = "linux")]
            SessionBackend::Program(branch) => {
                let id = branch.current().map_err(unmoved)?;
                let forks =
                    (0..count).map(|_| branch.fork(id).map(Box::new).map(SessionBackend::Program));
                forks.map(|line| line.map(fork).map_err(unmoved)).collect()
            }
        }
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
        each!(&self.line, branch => Ok(branch.tree().diff(one, two)?))
    }

    /// The differences between the files of two states: which paths, and how many bytes.
    ///
    /// # Errors
    /// [`SessionError::Tree`]; [`SessionError::State`] when a layer of the tree cannot be read.
    #[cfg(any(feature = "wasm", feature = "linux"))]
    pub fn diff_files<'c>(
        &self,
        one: impl Into<Checkpoint<'c>>,
        two: impl Into<Checkpoint<'c>>,
    ) -> Result<FileDifference, SessionError> {
        let (one, two) = (self.find(one.into())?, self.find(two.into())?);
        match &self.line {
            #[cfg(feature = "wasm")]
            SessionBackend::Module(branch) => {
                let (one, two) = (branch.tree().get(one)?, branch.tree().get(two)?);
                one.state.diff_files(&two.state).map_err(|e| SessionError::State(e.into()))
            }
            #[cfg(feature = "vm")]
            SessionBackend::Machine(_) => Ok(FileDifference::default()),
            #[cfg(feature = "linux")]
            SessionBackend::Program(branch) => {
                let (one, two) = (branch.tree().get(one)?, branch.tree().get(two)?);
                let (one, two) = (one.state.files(), two.state.files());
                one.diff(two).map_err(|e| SessionError::State(e.into()))
            }
        }
    }

    /// The session's files, to be read and written from outside, between two calls.
    ///
    /// # Errors
    /// [`SessionError::NoFiles`] for a guest without a file tree ([`Options::files`](crate::Options::files)),
    /// [`SessionError::Failed`].
    #[cfg(any(feature = "wasm", feature = "linux"))]
    pub fn files(&mut self) -> Result<SessionFiles<'_>, SessionError> {
        self.check()?;
        match &mut self.line {
            #[cfg(feature = "wasm")]
            SessionBackend::Module(branch) => SessionFiles::of(branch),
            #[cfg(feature = "vm")]
            SessionBackend::Machine(_) => Err(SessionError::NoFiles(
                "a micro-VM has no file tree; a Wasm module can have one",
            )),
            #[cfg(feature = "linux")]
            SessionBackend::Program(branch) => Ok(SessionFiles::of_program(branch)),
        }
    }

    /// Drops a checkpoint: its children become its parent's, and pages that only it stored are freed. Sessions
    /// that stand on it are not disturbed.
    ///
    /// # Errors
    /// [`SessionError::Tree`].
    pub fn drop_checkpoint<'c>(
        &mut self,
        checkpoint: impl Into<Checkpoint<'c>>,
    ) -> Result<(), SessionError> {
        let id = self.find(checkpoint.into())?;
        each!(&mut self.line, branch => branch.drop_snapshot(id).map_err(unmoved))
    }

    /// Every state of the tree that this session and its relatives share, oldest first; the first is the
    /// guest's warm state, unless it was dropped.
    #[must_use]
    pub fn tree(&self) -> Vec<SnapshotInfo> {
        each!(&self.line, branch => branch.tree().list())
    }

    /// The state that the session stands on: its last checkpoint, or the target of its last rollback, or the origin
    /// of its fork.
    #[must_use]
    pub fn at(&self) -> SnapshotId {
        each!(&self.line, branch => branch.at())
    }

    /// The guest it is a session of.
    #[must_use]
    pub fn guest(&self) -> &Guest {
        &self.guest
    }

    /// The state that `text` means to a user: by its id, as [`Session::tree`] lists it, or else by its name, as
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
            Checkpoint::Name(name) => {
                each!(&self.line, branch => Ok(branch.find(name)?))
            }
        }
    }

    /// Saves the present state as a snapshot, which [`open`](crate::open) takes out again. In the directory of the
    /// snapshot that the guest came out of, only changes are stored.
    ///
    /// # Errors
    /// As [`Lease::save`], and [`SaveError::Freeze`] for a session that failed.
    pub fn save(&mut self, to: &Reference, options: &SaveOptions) -> Result<Saved, SaveError> {
        let freeze = |cause: Cause| SaveError::Freeze(cause);
        self.check().map_err(|error| freeze(error.into()))?;
        let mut lease = lend(&self.guest, &mut self.line).map_err(|error| freeze(error.into()))?;
        let saved = lease.save(to, options)?;
        drop(lease);
        #[cfg(feature = "remote")]
        self.known.saved(to, saved.id)?;
        Ok(saved)
    }
}
