//! The live guest of a sandbox: calls that continue from one another, and the tree of its states.
//!
//! Promises: two operations at the same time are refused by name, never mixed. A session that was
//! closed drops its guest with the last operation that uses it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};
use std::time::{Duration, Instant};

use afresh::linux::InboundConnection;
use afresh::snapshot::SnapshotId;
use afresh::{CallError, Kind, SaveOptions};
use afresh_interpreter::{Commands, Request, proceed};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::call::{Call, CallState, Stop};
use crate::error::Failure;
use crate::outcome::{Outcome, Parties, Setup, evaluate};
use crate::reply::Reply;
use crate::threads;
use crate::warm::{Warm, no_interpreter, reference};

/// Maximum time of a wait for the next event in a program.
const MAX_WAIT: Duration = Duration::from_millis(50);
/// Time between two looks at what may end a wait.
const TICK: Duration = Duration::from_millis(5);

/// A state of the tree: by its id, as text, or by its name.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum StateRef {
    Id(String),
    Name(String),
}

/// A live guest.
pub(crate) struct Session {
    live: Mutex<Option<afresh::Session>>,
    /// Whether the thread that uses the live guest must drop it.
    closing: AtomicBool,
    warm: Arc<Warm>,
    setup: RwLock<Arc<Setup>>,
    stop: Stop,
    pub(crate) commands: Commands,
    connections: Mutex<Connections>,
}

/// Connections into a Linux program, by numbers.
#[derive(Default)]
struct Connections {
    next: u32,
    all: HashMap<u32, InboundConnection>,
}

/// A call of an interpreter.
pub(crate) struct Evaluation<'a> {
    /// The kind of the request.
    pub(crate) what: u8,
    pub(crate) code: &'a str,
    pub(crate) name: &'a str,
    /// An array in CBOR.
    pub(crate) arguments: Option<&'a [u8]>,
    pub(crate) streams: bool,
}

fn refused(error: afresh::SessionError) -> Failure {
    Failure::session(&error)
}

impl Session {
    pub(crate) fn new(session: afresh::Session, warm: Arc<Warm>, setup: Setup) -> Self {
        Self {
            live: Mutex::new(Some(session)),
            closing: AtomicBool::new(false),
            warm,
            setup: RwLock::new(Arc::new(setup)),
            stop: Stop::default(),
            commands: Commands::default(),
            connections: Mutex::default(),
        }
    }

    fn is_linux(&self) -> bool {
        self.warm.guest.kind() == Kind::Program
    }

    /// Refuses sandboxes that are not of Linux programs.
    pub(crate) fn check_linux(&self) -> Result<(), Failure> {
        match self.is_linux() {
            true => Ok(()),
            false => Err(Failure::sandbox(
                "this sandbox has no processes, as its guest is Wasm: `linux` and `image` make those that do",
            )),
        }
    }

    fn setup(&self) -> Arc<Setup> {
        self.setup.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Begins a call, which is not ended by a stop from before.
    pub(crate) fn begin(&self) {
        self.stop.clear();
        if self.closing.load(Ordering::Acquire) {
            self.stop.set();
        }
    }

    /// Stops the call that is under way.
    pub(crate) fn stop(&self) {
        self.stop.set();
    }

    /// Stops the call that is under way, and refuses others. The guest is dropped with it.
    pub(crate) fn begin_close(&self) {
        self.closing.store(true, Ordering::Release);
        self.stop.set();
    }

    /// Drops the live guest of a session that was closed, unless another thread uses it: that
    /// thread does then.
    fn drop_closed(&self) -> bool {
        if !self.closing.load(Ordering::Acquire) {
            return false;
        }
        let live = match self.live.try_lock() {
            Ok(mut live) => live.take(),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().take(),
            Err(TryLockError::WouldBlock) => return false,
        };
        drop(live);
        true
    }

    /// Uses the live guest.
    pub(crate) fn with<R>(
        &self,
        run: impl FnOnce(&mut afresh::Session) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        let mut live = match self.live.try_lock() {
            Ok(live) => live,
            // The session itself knows that it failed.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(Failure::busy()),
        };
        let result = match &mut *live {
            Some(session) if !self.closing.load(Ordering::Acquire) => run(session),
            _ => Err(Failure::sandbox("this sandbox is closed")),
        };
        drop(live);
        // It may have been closed during the call.
        self.drop_closed();
        result
    }

    /// Evaluates code.
    pub(crate) fn run(&self, call: &Arc<Call>, given: &Evaluation<'_>) -> Result<Reply, Failure> {
        let form = self.warm.interpreter.as_ref().ok_or_else(no_interpreter)?.form;
        let setup = self.setup();
        let request = setup.request(given.what, given.code, given.name, given.arguments, form);
        Ok(self.invoke(call, &setup, None, given.streams, request)?.into_reply())
    }

    /// Calls a handler of bytes.
    pub(crate) fn call(
        &self,
        call: &Arc<Call>,
        export: &str,
        input: &[u8],
    ) -> Result<Reply, Failure> {
        self.warm.check_call()?;
        self.invoke(call, &self.setup(), Some(export), false, Request::plain(input))?.into_bytes()
    }

    fn invoke(
        &self,
        call: &Arc<Call>,
        setup: &Setup,
        export: Option<&str>,
        streams: bool,
        request: Request,
    ) -> Result<Outcome, Failure> {
        let commands = self.is_linux().then(|| self.commands.clone());
        self.with(|session| {
            self.begin();
            let looked_up;
            let handler = match export {
                None => &self.warm.interpreter.as_ref().ok_or_else(no_interpreter)?.handler,
                Some(export) => {
                    looked_up =
                        self.warm.guest.function(export).map_err(|error| Failure::call(&error))?;
                    &looked_up
                }
            };
            let mut outcome = None;
            let done = session.with(|lease| {
                let memory = setup.limits.memory.and_then(|memory| u64::try_from(memory).ok());
                if let (Some(program), Some(memory)) = (lease.as_program(), memory) {
                    program.limit_memory(memory).map_err(|error| CallError::Host {
                        function: "the guest".to_owned(),
                        source: error.into(),
                    })?;
                }
                let parties = Parties { call, session: self.stop.clone(), streams, commands };
                let found = evaluate(lease, handler, setup, parties, request, true);
                let failed = found.failure();
                outcome = Some(found);
                failed.map_or(Ok(()), |error| Err(error.into()))
            });
            match (outcome, done) {
                (Some(outcome), _) => Ok(outcome),
                (None, Err(error)) => Err(refused(error)),
                (None, Ok(())) => Err(Failure::sandbox("the guest was not called")),
            }
        })
    }

    /// Offers other functions from the next call on.
    pub(crate) fn offer(&self, tools: &[String]) {
        let setup = Setup::new(self.setup().limits.clone(), tools);
        *self.setup.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(setup);
    }

    /// Why it refuses calls, if it does.
    pub(crate) fn failed(&self) -> Result<Option<String>, Failure> {
        self.with(|session| Ok(session.failed()))
    }

    /// Keeps the present state under a name.
    pub(crate) fn checkpoint(&self, name: &str) -> Result<String, Failure> {
        self.with(|session| session.checkpoint(name).map(|id| id.to_string()).map_err(refused))
    }

    /// Goes to a state.
    pub(crate) fn rollback(&self, to: &StateRef) -> Result<String, Failure> {
        let moved = self.with(|session| {
            let to = find(session, to)?;
            session.rollback(to.of()).map(|id| id.to_string()).map_err(refused)
        });
        self.commands.moved();
        moved
    }

    /// Sessions that start from the present state.
    pub(crate) fn fork(&self, count: usize) -> Result<Vec<Self>, Failure> {
        let forks = self.with(|session| session.fork(count).map_err(refused))?;
        let setup = self.setup();
        let fork = |session| {
            let fork = Self::new(session, Arc::clone(&self.warm), (*setup).clone());
            Self { commands: self.commands.fork(), ..fork }
        };
        Ok(forks.into_iter().map(fork).collect())
    }

    /// The differences of two states.
    pub(crate) fn diff(&self, one: &StateRef, two: &StateRef) -> Result<Value, Failure> {
        self.with(|session| {
            let (one, two) = (find(session, one)?, find(session, two)?);
            let found = session.diff(one.of(), two.of()).map_err(refused)?;
            Ok(json!({ "pages": found.pages, "bytes": found.bytes, "state": found.state }))
        })
    }

    /// Forgets a state.
    pub(crate) fn drop_state(&self, which: &StateRef) -> Result<(), Failure> {
        self.with(|session| {
            let which = find(session, which)?;
            session.drop_checkpoint(which.of()).map_err(refused)
        })
    }

    /// Every state of the tree, and the one that it stands on.
    pub(crate) fn tree(&self) -> Result<Value, Failure> {
        self.with(|session| {
            let states = session.tree().into_iter().map(|info| {
                json!({
                    "id": info.id.to_string(),
                    "parent": info.parent.map(|id| id.to_string()),
                    "name": info.name,
                    "storedPages": info.stored_pages,
                    "ownPages": info.own_pages,
                    "ownBytes": info.own_bytes,
                })
            });
            Ok(json!({ "states": states.collect::<Vec<_>>(), "at": session.at().to_string() }))
        })
    }

    /// Saves the changes since it was last saved there; returns the id of the saved state.
    pub(crate) fn save(&self, to: &str) -> Result<String, Failure> {
        let to = reference(to)?;
        self.with(|session| {
            let saved = session.save_turn(&to, &SaveOptions::new());
            Ok(saved.map_err(|error| Failure::save(&error))?.id.to_string())
        })
    }

    /// The changes since a state.
    pub(crate) fn delta(&self, since: &StateRef) -> Result<Vec<u8>, Failure> {
        self.with(|session| {
            let since = find(session, since)?;
            session.delta(since.of()).map_err(refused)
        })
    }

    /// Goes to the state that a delta makes of the present one.
    pub(crate) fn apply(&self, delta: &[u8]) -> Result<String, Failure> {
        let moved =
            self.with(|session| session.apply(delta).map(|id| id.to_string()).map_err(refused));
        self.commands.moved();
        moved
    }

    /// All bytes of a file.
    pub(crate) fn read_file(&self, path: &str) -> Result<Vec<u8>, Failure> {
        self.with(|session| session.files().and_then(|files| files.read(path)).map_err(refused))
    }

    /// Writes a whole file.
    pub(crate) fn write_file(&self, path: &str, bytes: &[u8]) -> Result<(), Failure> {
        self.with(|session| {
            session.files().and_then(|mut files| files.write(path, bytes)).map_err(refused)
        })
    }

    /// The names in a directory, in order.
    pub(crate) fn list_files(&self, path: &str) -> Result<Vec<String>, Failure> {
        self.with(|session| {
            let listed = session.files().and_then(|files| files.list(path)).map_err(refused)?;
            let name = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
            Ok(listed.iter().map(|entry| name(&entry.name)).collect())
        })
    }

    /// Makes a directory, with those above it that are missing.
    pub(crate) fn make_directory(&self, path: &str) -> Result<(), Failure> {
        self.with(|session| {
            session.files().and_then(|mut files| files.make_directory(path)).map_err(refused)
        })
    }

    /// The kind of a file, its size and its mode; null where no file exists.
    pub(crate) fn stat_file(&self, path: &str) -> Result<Value, Failure> {
        use afresh::SessionError::Files;
        use afresh::files::{Kind, Refused::Missing};
        self.with(|session| match session.files().and_then(|files| files.stat(path)) {
            Ok(stat) => {
                let kind = match stat.kind {
                    Kind::File => "file",
                    Kind::Directory => "directory",
                    Kind::Link => "link",
                    _ => "other",
                };
                Ok(json!({ "kind": kind, "size": stat.size, "mode": stat.mode }))
            }
            Err(Files { source: Missing, .. }) => Ok(Value::Null),
            Err(error) => Err(refused(error)),
        })
    }

    /// Removes a file, or a directory with everything in it.
    pub(crate) fn remove_file(&self, path: &str) -> Result<(), Failure> {
        self.with(|session| {
            session.files().and_then(|mut files| files.remove(path)).map_err(refused)
        })
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connection(&self, number: u32) -> Result<InboundConnection, Failure> {
        let found = self.connections().all.get(&number).copied();
        found.ok_or_else(|| Failure::sandbox("the connection into the sandbox is closed"))
    }

    /// Connects to the listener on a port within the sandbox; returns the connection's number, or
    /// `None` without one.
    pub(crate) fn dial(&self, port: u16) -> Result<Option<u32>, Failure> {
        self.check_linux()?;
        let dialed = self.with(|live| live.with(|lease| Ok(lease.dial(port)?)).map_err(refused))?;
        Ok(dialed.map(|connection| {
            let mut connections = self.connections();
            let number = connections.next;
            connections.next = number.wrapping_add(1);
            connections.all.insert(number, connection);
            number
        }))
    }

    /// Passes bytes on, and takes at most `room` bytes: how many were passed on, the bytes, and
    /// whether it has ended.
    pub(crate) fn exchange(
        &self,
        number: u32,
        bytes: &[u8],
        room: usize,
    ) -> Result<Reply, Failure> {
        let connection = self.connection(number)?;
        let done = self.with(|live| {
            live.with(|lease| Ok(lease.exchange(connection, bytes, room)?)).map_err(refused)
        })?;
        Ok(Reply { json: json!({ "taken": done.taken, "ended": done.ended }), bytes: done.given })
    }

    /// Closes a connection.
    pub(crate) fn hang_up(&self, number: u32) -> Result<(), Failure> {
        let Some(connection) = self.connections().all.remove(&number) else { return Ok(()) };
        self.with(|live| live.with(|lease| Ok(lease.hang_up(connection, true)?)).map_err(refused))
    }

    /// Lets background work run for a slice of time, once its next event is due, or waits `wait`
    /// without one. Returns whether something may still happen by itself. `moved` is whether bytes
    /// of a connection have passed since the last slice, so that a program may run though no event
    /// is due.
    pub(crate) fn drive(&self, call: &Call, wait: Duration, moved: bool) -> Result<bool, Failure> {
        self.check_linux()?;
        let wait = wait.min(MAX_WAIT);
        let stops = vec![call.stop.clone(), self.stop.clone()];
        self.with(|live| {
            if stops.iter().any(Stop::is_set) {
                return Err(Failure::stopped("the wait was stopped by its host"));
            }
            let due = if moved { Some(Duration::ZERO) } else { live.due() };
            let Some(due) = due else { return Ok(false) };
            if !sleep(due.min(wait), &stops) || due > wait {
                return Ok(true);
            }
            live.with(
                |lease| Ok(proceed(lease, CallState::slice(stops, self.commands.clone())).0?),
            )
            .map_err(refused)?;
            Ok(live.due().is_some())
        })
    }
}

/// A state that was found.
enum StateKey<'a> {
    Id(SnapshotId),
    Name(&'a str),
}

impl StateKey<'_> {
    fn of(&self) -> afresh::Checkpoint<'_> {
        match self {
            Self::Id(id) => afresh::Checkpoint::Id(*id),
            Self::Name(name) => afresh::Checkpoint::Name(name),
        }
    }
}

/// Looks a state up, which JavaScript names by text.
fn find<'a>(session: &afresh::Session, which: &'a StateRef) -> Result<StateKey<'a>, Failure> {
    match which {
        StateRef::Name(name) => Ok(StateKey::Name(name)),
        StateRef::Id(text) => session
            .tree()
            .into_iter()
            .find(|info| info.id.to_string() == *text)
            .map(|info| StateKey::Id(info.id))
            .ok_or_else(|| {
                Failure::sandbox(format!("the state {text} is not in the tree of this sandbox"))
            }),
    }
}

/// Sleeps; `false` if that was stopped.
fn sleep(length: Duration, stops: &[Stop]) -> bool {
    let until = Instant::now() + length;
    threads::wait(|| {
        loop {
            if stops.iter().any(Stop::is_set) {
                return false;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            std::thread::sleep(left.min(TICK));
        }
    })
}
