//! The live guest of a sandbox: calls that continue from one another, and the tree of its states.
//!
//! Promises: two calls at the same time are refused by name, never mixed; Python's lock is released
//! during every session operation. In a child of a fork, a session that a thread of the parent was
//! using is closed; closing or dropping any session of the parent there waits for nothing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use afresh::memory::{InheritedMutex, fork};
use afresh::snapshot::SnapshotId;
use afresh::{CallError, Kind, SaveOptions, SessionError as Refused};
use afresh_interpreter::{Commands, Request};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use crate::call::Stop;
use crate::error::{self, BusyError, SaveError, SessionError};
use crate::exit;
use crate::outcome::{Callables, Outcome, Setup, evaluate};
use crate::program::call_timeout;
use crate::signals;
use crate::unlocked::Unlocked;
use crate::warm::{Warm, no_interpreter, reference};

/// A state in the tree of a sandbox.
#[pyclass(frozen, eq, hash, module = "afresh._native")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Checkpoint {
    id: SnapshotId,
}

#[pymethods]
impl Checkpoint {
    /// Its number, as the tree shows it.
    fn __str__(&self) -> String {
        self.id.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<checkpoint {}>", self.id)
    }
}

/// A state by itself or by its name.
enum CheckpointKey {
    Id(SnapshotId),
    Name(String),
}

impl CheckpointKey {
    fn of(state: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(checkpoint) = state.cast::<Checkpoint>() {
            return Ok(Self::Id(checkpoint.get().id));
        }
        state.extract().map(Self::Name).map_err(|_| {
            let kind =
                state.get_type().name().map_or_else(|_| "another".into(), |name| name.to_string());
            PyTypeError::new_err(format!("a state is a checkpoint or its name (str), not {kind}"))
        })
    }
}

impl<'a> From<&'a CheckpointKey> for afresh::Checkpoint<'a> {
    fn from(which: &'a CheckpointKey) -> Self {
        match which {
            CheckpointKey::Id(id) => Self::Id(*id),
            CheckpointKey::Name(name) => Self::Name(name),
        }
    }
}

/// A live guest.
#[pyclass(frozen, module = "afresh._native")]
pub(crate) struct Session {
    live: Unlocked<InheritedMutex<Option<afresh::Session>>>,
    /// The process that made it.
    generation: u32,
    /// Whether the thread that uses the live guest must drop it.
    closing: AtomicBool,
    warm: Py<Warm>,
    setup: RwLock<Arc<Setup>>,
    /// The dispatcher of this session alone, as the garbage collector must count it.
    dispatch: Mutex<Option<Py<PyAny>>>,
    stop: Stop,
    commands: Commands,
}

/// The description of a state: id, parent, name, pages stored, own pages, own bytes.
type StateSummary = (Checkpoint, Option<Checkpoint>, Option<String>, usize, usize, usize);

/// The description of a difference: pages, bytes, runs of pages, whether other state differs.
type MemoryDifference = (usize, usize, Vec<(usize, usize, usize)>, bool);

impl Session {
    pub(crate) fn new(
        session: afresh::Session,
        warm: Py<Warm>,
        setup: Setup,
        dispatch: Option<Py<PyAny>>,
    ) -> Self {
        Self {
            live: Unlocked::new(InheritedMutex::new(Some(session))),
            generation: fork::generation(),
            closing: AtomicBool::new(false),
            warm,
            setup: RwLock::new(Arc::new(setup)),
            dispatch: Mutex::new(dispatch),
            stop: Stop::default(),
            commands: Commands::default(),
        }
    }

    /// Whether its guest is a Linux program.
    pub(crate) fn is_linux(&self) -> bool {
        self.warm.get().guest.kind() == Kind::Program
    }

    /// The commands that run in it.
    pub(crate) fn commands(&self) -> &Commands {
        &self.commands
    }

    /// Begins a call, which is not ended by a stop from before.
    pub(crate) fn begin(&self) {
        self.stop.clear();
        if self.closing.load(Ordering::Acquire) {
            self.stop.set();
        }
    }

    /// The flags that end a call.
    pub(crate) fn stops(&self, stopper: Option<&Bound<'_, Stopper>>) -> [Stop; 2] {
        [self.stop.clone(), stopper.map(|stopper| stopper.get().flag()).unwrap_or_default()]
    }

    /// Evaluates code; `what` is a request kind of the guest. `timeout` replaces the time limit of
    /// the sandbox.
    #[allow(clippy::too_many_arguments, reason = "called for the Python half only")]
    pub(crate) fn evaluate<'py>(
        &self,
        py: Python<'py>,
        what: u8,
        code: &str,
        name: &str,
        arguments: Option<&[u8]>,
        sink: Option<Py<PyAny>>,
        stopper: Option<&Bound<'py, Stopper>>,
        timeout: Option<Duration>,
    ) -> PyResult<Outcome> {
        let form = self.warm.get().interpreter.as_ref().ok_or_else(no_interpreter)?.form;
        let request = self.setup().request(what, code, name, arguments, form);
        let stop = stopper.map(|stopper| stopper.get().flag());
        self.invoke(py, None, sink, stop, timeout, request)
    }

    fn dispatch(&self) -> MutexGuard<'_, Option<Py<PyAny>>> {
        self.dispatch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the live guest of a session that was closed, unless another thread uses it: that
    /// thread does then. Returns whether it was dropped.
    fn drop_closed(&self) -> bool {
        if !self.closing.load(Ordering::Acquire) {
            return false;
        }
        let Some(mut live) = self.live.try_lock() else { return false };
        let session = live.take();
        drop(live);
        drop(session);
        true
    }

    fn setup(&self) -> Arc<Setup> {
        self.setup.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Uses the live guest without Python's lock.
    pub(crate) fn with<R: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&mut afresh::Session) -> PyResult<R> + Send,
    ) -> PyResult<R> {
        exit::detach(py, || {
            // After a panic under the lock, the session itself knows that it failed.
            let Some(mut live) = self.live.try_lock() else {
                return Err(BusyError::new_err(
                    "another call is under way in this sandbox: wait for it, stop it, or fork the sandbox",
                ));
            };
            let closing = self.closing.load(Ordering::Acquire);
            let result = match &mut *live {
                Some(session) if !closing => run(session),
                None if !closing && self.generation != fork::generation() => {
                    Err(SessionError::new_err(
                        "a thread of the parent process was using this sandbox at the fork: make a new one in the child",
                    ))
                }
                _ => Err(SessionError::new_err("this sandbox is closed")),
            };
            drop(live);
            // Another thread or a tool may have closed it during the call.
            self.drop_closed();
            result
        })
    }

    fn invoke(
        &self,
        py: Python<'_>,
        export: Option<&str>,
        sink: Option<Py<PyAny>>,
        stop: Option<Stop>,
        timeout: Option<Duration>,
        request: Request,
    ) -> PyResult<Outcome> {
        let linux = self.is_linux();
        if !linux {
            signals::check()?;
        }
        let warm = self.warm.get();
        let setup = match timeout {
            Some(timeout) => Arc::new(self.setup().with_timeout(timeout)),
            None => self.setup(),
        };
        let dispatch = self.dispatch().as_ref().map(|dispatch| dispatch.clone_ref(py));
        let commands = linux.then(|| self.commands.clone());
        let callables = Callables { sink, dispatch, commands };
        self.with(py, |session| {
            self.begin();
            let stops = [self.stop.clone(), stop.unwrap_or_default()];
            let looked_up;
            let handler = match export {
                None => &warm.interpreter.as_ref().ok_or_else(no_interpreter)?.handler,
                Some(export) => {
                    looked_up =
                        warm.guest.function(export).map_err(|error| error::of_call(&error))?;
                    &looked_up
                }
            };
            let mut outcome = None;
            let memory = u64::try_from(setup.limits.memory).unwrap_or(u64::MAX);
            let done = session.with(|lease| {
                if let Some(program) = lease.as_program().filter(|_| memory != u64::MAX) {
                    program.limit_memory(memory).map_err(|error| CallError::Host {
                        function: "the guest".to_owned(),
                        source: error.into(),
                    })?;
                }
                let (found, whole) =
                    evaluate(lease, handler, &setup, callables, stops, request, true);
                self.commands.charge(&found.cost);
                let failed = found.failure();
                outcome = Some(found);
                match (whole, failed) {
                    (false, Some(error)) => Err(error.into()),
                    _ => Ok(()),
                }
            });
            match (outcome, done) {
                (Some(outcome), _) => Ok(outcome),
                (None, Err(error)) => Err(error::of_session(&error)),
                (None, Ok(())) => Err(SessionError::new_err("the guest was not called")),
            }
        })
    }
}

fn checkpoint(id: SnapshotId) -> Checkpoint {
    Checkpoint { id }
}

fn refused(error: Refused) -> PyErr {
    error::of_session(&error)
}

/// Stops calls that it was given to.
#[pyclass(frozen, module = "afresh._native")]
pub(crate) struct Stopper {
    stop: Stop,
}

impl Stopper {
    /// The flag that it sets.
    pub(crate) fn flag(&self) -> Stop {
        self.stop.clone()
    }
}

#[pymethods]
impl Stopper {
    #[new]
    fn new() -> Self {
        Self { stop: Stop::default() }
    }

    /// From any thread, once and for all.
    fn stop(&self) {
        self.stop.set();
    }
}

#[pymethods]
impl Session {
    /// Evaluates code; `what` is a request kind of the guest, `arguments` an array from `encode`.
    /// `timeout` replaces the time limit of the sandbox.
    #[pyo3(signature = (what, code, name, arguments, sink, stopper, exact, timeout = None))]
    #[allow(clippy::too_many_arguments, reason = "called by the Python half only")]
    fn run<'py>(
        &self,
        py: Python<'py>,
        what: u8,
        code: &str,
        name: &str,
        arguments: Option<&[u8]>,
        sink: Option<Py<PyAny>>,
        stopper: Option<&Bound<'py, Stopper>>,
        exact: bool,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let timeout = call_timeout(timeout)?;
        self.evaluate(py, what, code, name, arguments, sink, stopper, timeout)?
            .into_python(py, exact)
    }

    /// Calls a handler of bytes. `timeout` replaces the time limit of the sandbox.
    #[pyo3(signature = (export, input, stopper, timeout = None))]
    fn call<'py>(
        &self,
        py: Python<'py>,
        export: &str,
        input: &[u8],
        stopper: Option<&Bound<'py, Stopper>>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        self.warm.get().check_call()?;
        let stop = stopper.map(|stopper| stopper.get().flag());
        let timeout = call_timeout(timeout)?;
        let outcome = self.invoke(py, Some(export), None, stop, timeout, Request::plain(input))?;
        Ok(PyBytes::new(py, &outcome.into_bytes()?))
    }

    /// Maximum seconds of a call.
    #[getter]
    fn timeout(&self) -> Option<f64> {
        self.setup().limits.timeout.map(|timeout| timeout.as_secs_f64())
    }

    /// Maximum bytes kept of each stream.
    #[getter]
    fn output_limit(&self) -> usize {
        self.setup().limits.output
    }

    /// Offers other functions from the next call on.
    #[pyo3(signature = (tools, dispatch))]
    fn offer(&self, tools: Vec<String>, dispatch: Option<Py<PyAny>>) -> PyResult<()> {
        let setup = Setup::new(self.setup().limits.clone(), &tools);
        // The former one is dropped without the mutex: it may run any code.
        let former = std::mem::replace(&mut *self.dispatch(), dispatch);
        drop(former);
        *self.setup.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(setup);
        Ok(())
    }

    /// Stops the call that is under way, from any thread.
    fn stop(&self) {
        self.stop.set();
    }

    /// Why it refuses calls, if it does.
    fn failed(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.with(py, |session| Ok(session.failed()))
    }

    /// Keeps the present state under a name.
    fn checkpoint(&self, py: Python<'_>, name: &str) -> PyResult<Checkpoint> {
        self.with(py, |session| session.checkpoint(name).map(checkpoint).map_err(refused))
    }

    /// Goes to a state.
    fn rollback(&self, py: Python<'_>, to: &Bound<'_, PyAny>) -> PyResult<Checkpoint> {
        let to = CheckpointKey::of(to)?;
        let moved = self.with(py, |session| session.rollback(&to).map(checkpoint).map_err(refused));
        self.commands.moved();
        moved
    }

    /// Sessions that start from the present state.
    fn fork(&self, py: Python<'_>, count: usize) -> PyResult<Vec<Self>> {
        let forks = self.with(py, |session| session.fork(count).map_err(refused))?;
        let fork = |session| {
            let dispatch = self.dispatch().as_ref().map(|dispatch| dispatch.clone_ref(py));
            let warm = self.warm.clone_ref(py);
            let fork = Self::new(session, warm, (*self.setup()).clone(), dispatch);
            Self { commands: self.commands.fork(), ..fork }
        };
        Ok(forks.into_iter().map(fork).collect())
    }

    /// The differences of two states.
    fn diff(
        &self,
        py: Python<'_>,
        one: &Bound<'_, PyAny>,
        two: &Bound<'_, PyAny>,
    ) -> PyResult<MemoryDifference> {
        let (one, two) = (CheckpointKey::of(one)?, CheckpointKey::of(two)?);
        self.with(py, |session| {
            let found = session.diff(&one, &two).map_err(refused)?;
            let runs = found.ranges.iter().map(|(memory, run)| (*memory, run.start, run.len));
            Ok((found.pages, found.bytes, runs.collect(), found.state))
        })
    }

    /// Forgets a state.
    fn drop(&self, py: Python<'_>, which: &Bound<'_, PyAny>) -> PyResult<()> {
        let which = CheckpointKey::of(which)?;
        self.with(py, |session| session.drop_checkpoint(&which).map_err(refused))
    }

    /// Every state of the tree.
    fn tree(&self, py: Python<'_>) -> PyResult<Vec<StateSummary>> {
        self.with(py, |session| {
            let told = session.tree().into_iter().map(|info| {
                (
                    checkpoint(info.id),
                    info.parent.map(checkpoint),
                    info.name,
                    info.stored_pages,
                    info.own_pages,
                    info.own_bytes,
                )
            });
            Ok(told.collect())
        })
    }

    /// The state that it stands on.
    fn at(&self, py: Python<'_>) -> PyResult<Checkpoint> {
        self.with(py, |session| Ok(checkpoint(session.at())))
    }

    /// Saves the changes since it was last saved there; returns the id of the saved state.
    fn save(&self, py: Python<'_>, to: &str) -> PyResult<String> {
        let to = reference(to)?;
        self.with(py, |session| {
            let saved = session.save_turn(&to, &SaveOptions::new());
            Ok(saved.map_err(|error| error::raise::<SaveError>(&error))?.id.to_string())
        })
    }

    /// The changes since a state.
    fn delta<'py>(
        &self,
        py: Python<'py>,
        since: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let since = CheckpointKey::of(since)?;
        let delta = self.with(py, |session| session.delta(&since).map_err(refused))?;
        Ok(PyBytes::new(py, &delta))
    }

    /// Goes to the state that a delta makes of the present one.
    fn apply(&self, py: Python<'_>, delta: &[u8]) -> PyResult<Checkpoint> {
        let moved = self.with(py, |session| session.apply(delta).map(checkpoint).map_err(refused));
        self.commands.moved();
        moved
    }

    /// All bytes of a file.
    fn read_file<'py>(&self, py: Python<'py>, path: &str) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.with(py, |session| {
            session.files().and_then(|files| files.read(path)).map_err(refused)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Writes a whole file.
    fn write_file(&self, py: Python<'_>, path: &str, bytes: &[u8]) -> PyResult<()> {
        self.with(py, |session| {
            session.files().and_then(|mut files| files.write(path, bytes)).map_err(refused)
        })
    }

    /// The names in a directory, in order.
    fn list_files(&self, py: Python<'_>, path: &str) -> PyResult<Vec<String>> {
        self.with(py, |session| {
            let listed = session.files().and_then(|files| files.list(path)).map_err(refused)?;
            let name = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
            Ok(listed.iter().map(|entry| name(&entry.name)).collect())
        })
    }

    /// Makes a directory, with those above it that are missing.
    fn make_directory(&self, py: Python<'_>, path: &str) -> PyResult<()> {
        self.with(py, |session| {
            session.files().and_then(|mut files| files.make_directory(path)).map_err(refused)
        })
    }

    /// The kind of a file (`file`, `directory`, `link` or `other`), its size and its mode; `None`
    /// where no file exists.
    fn stat_file(&self, py: Python<'_>, path: &str) -> PyResult<Option<(&'static str, u64, u32)>> {
        use afresh::files::{Kind, Refused::Missing};
        self.with(py, |session| match session.files().and_then(|files| files.stat(path)) {
            Ok(stat) => {
                let kind = match stat.kind {
                    Kind::File => "file",
                    Kind::Directory => "directory",
                    Kind::Link => "link",
                    _ => "other",
                };
                Ok(Some((kind, stat.size, stat.mode)))
            }
            Err(Refused::Files { source: Missing, .. }) => Ok(None),
            Err(error) => Err(refused(error)),
        })
    }

    /// Removes a file, or a directory with everything in it.
    fn remove_file(&self, py: Python<'_>, path: &str) -> PyResult<()> {
        self.with(py, |session| {
            session.files().and_then(|mut files| files.remove(path)).map_err(refused)
        })
    }

    /// Closes the session and stops a call that is under way. Waits for that call, unless it is in
    /// a tool or in a handler of a signal: that may be the caller.
    fn close(&self, py: Python<'_>) {
        self.closing.store(true, Ordering::Release);
        self.stop.set();
        // It is refused on other threads at the end of the interpreter, which frees everything.
        let _refused = exit::detach(py, || {
            while !self.drop_closed() && !self.stop.is_in_tool() {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        });
    }

    /// Shows the garbage collector the tools, which may refer to this session again.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // A mutex that is locked belongs to a call, whose own reference keeps the tools.
        match self.dispatch.try_lock() {
            Ok(dispatch) => visit.call(&*dispatch),
            Err(_) => Ok(()),
        }
    }

    fn __clear__(&self) {
        if let Ok(mut dispatch) = self.dispatch.try_lock() {
            let tools = dispatch.take();
            drop(dispatch);
            drop(tools);
        }
    }
}
