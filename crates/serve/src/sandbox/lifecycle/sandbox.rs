//! One sandbox: a session that is live or saved, and its record.
//!
//! Promises: calls of one sandbox run one after another. Each piece of code begins on a new
//! checkpoint; one that is cut short is undone by going back there. Background work that is cut
//! short is undone to the end of the last call. A sandbox that is saved comes back with the next
//! call, lazily.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use afresh::{Session, SessionError};
use afresh_interpreter::{
    Answer as Outcome, AnswerTooLong, COMMAND, Language, Request, Thrown, Tools, evaluate,
};
use hyper::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error_response::ErrorResponse;
use crate::failure::describe;
use crate::lock::lock;
use crate::sandbox::agent::commands::Commands;
use crate::sandbox::agent::connect::ConnectError;
use crate::sandbox::agent::output_router::{MAX_ANSWER_BYTES, OutputRouter};
use crate::sandbox::agent::watchers::Watchers;
use crate::sandbox::catalog::base_state::BaseState;
use crate::sandbox::catalog::template::Warm;
#[cfg(linux_guests)]
use crate::sandbox::connections::connection_audit::connection_log;
use crate::sandbox::connections::network::SandboxNetwork;
use crate::sandbox::http::session_error::refused;
use crate::sandbox::lifecycle::refused_work::RefusedWork;
use crate::sandbox::lifecycle::undo_point::{Operation, UndoPoint};
use crate::sandbox::records::creation_key::CreationKey;
use crate::sandbox::records::record::{SandboxRecord, SandboxSettings, milliseconds, saved_name};
use crate::sandbox::records::store::{StoreEntry, StoredSandbox};
use crate::sandbox::tenants::charge::Charge;
use crate::sandbox::tenants::usage::Usage;

/// Maximum calls that wait for one sandbox.
const MAX_WAITING_CALLS: usize = 64;
/// Maximum connections among them. Visitors of a public port leave room for the owner's calls.
const MAX_WAITING_CONNECTIONS: usize = MAX_WAITING_CALLS / 2;

/// Whether the guest lives in this process.
pub(crate) enum Residency {
    Live(Box<Session>),
    /// In the store.
    Saved,
    /// Left to the other hosts of a fleet.
    Moved,
    Gone,
}

impl Residency {
    /// The answer to a client that waited for a sandbox that left.
    pub(crate) fn absent(&self, id: &str) -> ErrorResponse {
        match self {
            Self::Moved => ErrorResponse::busy(
                StatusCode::SERVICE_UNAVAILABLE,
                "the sandbox is on its way to another host; try again",
            ),
            _ => Sandbox::not_found(id),
        }
    }
}

/// Sandboxes that were forked from one another. Each has a clone until it is dropped.
#[derive(Clone, Default)]
pub(crate) struct ForkGroup(Arc<()>);

impl ForkGroup {
    /// Whether another clone exists.
    fn has_others(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// When a sandbox ends, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lifetime {
    /// By the monotonic clock, so that a step of the wall clock ends no sandbox early or late.
    pub(crate) ends: Instant,
    pub(crate) used: Instant,
    pub(crate) paused: bool,
    pub(crate) pause_at_end: bool,
}

/// Room in the line of a sandbox.
pub(crate) struct WaitPermit {
    _call: OwnedSemaphorePermit,
    _connection: Option<OwnedSemaphorePermit>,
}

/// A sandbox.
pub(crate) struct Sandbox {
    pub(crate) id: String,
    pub(crate) tenant: Arc<str>,
    pub(crate) template: String,
    /// The template that it has on this server, once it has run here.
    pub(crate) warm: OnceLock<Arc<Warm>>,
    /// The token that its clients show in addition to its id.
    pub(crate) token: String,
    pub(crate) settings: SandboxSettings,
    /// Its rules for connections, which begin as those in its settings.
    pub(crate) network: SandboxNetwork,
    pub(crate) started: SystemTime,
    pub(crate) life: Arc<tokio::sync::Mutex<Residency>>,
    times: Mutex<Lifetime>,
    /// It has named checkpoints.
    pub(crate) has_checkpoints: AtomicBool,
    /// Its forks, and the sandbox that it was forked from.
    fork_group: Mutex<ForkGroup>,
    /// The number of hosts that were lost with it, and calls with them.
    pub(crate) generation: u64,
    /// Pieces of code that were run.
    pub(crate) runs: AtomicU64,
    /// There is something of it in the store.
    pub(crate) saved: AtomicBool,
    /// The sweep is ending or saving it.
    pub(crate) sweeping: AtomicBool,
    /// Calls that wait for those before them.
    waiting: Arc<Semaphore>,
    /// Connections among them.
    waiting_connections: Arc<Semaphore>,
    pub(crate) mark: Mutex<UndoPoint>,
    pub(crate) commands: Arc<Commands>,
    pub(crate) refused_work: RefusedWork,
    /// It was killed: a call that runs ends soon.
    pub(crate) killed: AtomicBool,
    /// It was killed, and has no record any more.
    pub(crate) record_removed: AtomicBool,
    /// Its measured use of the host.
    pub(crate) usage: Usage,
    /// The bytes that count in budgets.
    pub(crate) charge: Charge,
    /// Directories that clients watch.
    pub(crate) watchers: Watchers,
    /// The log of its connections, once it has run.
    #[cfg(linux_guests)]
    connections: OnceLock<afresh::linux::ConnectionLog>,
    /// Whether something in it went on by itself when it was saved.
    pub(crate) goes_on: AtomicBool,
    /// The state that it began in, if that is known.
    pub(crate) base: Option<BaseState>,
    /// The next resume drops the memory of its saved state.
    restarts: AtomicBool,
    /// The first state of its tree is a saved one, and not the state that it began in.
    first_is_saved: AtomicBool,
    /// Its saved state has the second of its two names.
    pub(crate) second_name: AtomicBool,
    /// The key of the request that made it. Its forks have none.
    pub(crate) key: Option<CreationKey>,
    /// Its standing in the store of sandboxes.
    pub(crate) standing: StoreEntry,
}

impl StoredSandbox for Sandbox {
    fn id(&self) -> &str {
        &self.id
    }

    fn is_saved(&self) -> bool {
        self.saved.load(Ordering::Relaxed)
    }

    fn is_killed(&self) -> bool {
        self.killed.load(Ordering::Acquire)
    }

    fn saved_name(&self) -> String {
        saved_name(&self.id, self.second_name.load(Ordering::Relaxed))
    }

    #[cfg(feature = "fleet")]
    fn record(&self) -> SandboxRecord {
        Self::record(self)
    }

    fn entry(&self) -> &StoreEntry {
        &self.standing
    }
}

impl Lifetime {
    /// The end by the wall clock as it is now.
    pub(crate) fn ends_at(&self) -> SystemTime {
        let now = Instant::now();
        match self.ends.checked_duration_since(now) {
            Some(left) => SystemTime::now() + left,
            None => SystemTime::now() - (now - self.ends),
        }
    }
}

/// The moment that is `milliseconds` after 1970 by the wall clock as it is now. A moment in the
/// past is now.
fn moment(milliseconds: u64) -> Instant {
    let left = time(milliseconds).duration_since(SystemTime::now()).unwrap_or_default();
    let now = Instant::now();
    now.checked_add(left).unwrap_or(now)
}

fn time(milliseconds: u64) -> SystemTime {
    UNIX_EPOCH.checked_add(Duration::from_millis(milliseconds)).unwrap_or(UNIX_EPOCH)
}

impl Sandbox {
    /// The log of its connections to the outside.
    #[cfg(linux_guests)]
    pub(crate) fn connection_log(
        &self,
        audit: Option<&Arc<crate::audit::AuditLog>>,
    ) -> &afresh::linux::ConnectionLog {
        self.connections.get_or_init(|| connection_log(audit, &self.tenant, &self.id))
    }

    /// The owner of its connections: limits of the process have a share for each tenant.
    #[cfg(linux_guests)]
    pub(crate) fn connection_owner(&self) -> afresh::linux::ConnectionOwner {
        afresh::linux::ConnectionOwner::new(self.tenant.clone())
    }

    pub(crate) fn new(
        id: String,
        token: String,
        (tenant, template): (Arc<str>, String),
        settings: SandboxSettings,
        life: Residency,
        times: Lifetime,
    ) -> Self {
        Self {
            id,
            tenant,
            template,
            warm: OnceLock::new(),
            token,
            network: SandboxNetwork::new(settings.network.clone()),
            settings,
            started: SystemTime::now(),
            life: Arc::new(tokio::sync::Mutex::new(life)),
            times: Mutex::new(times),
            has_checkpoints: AtomicBool::new(false),
            fork_group: Mutex::default(),
            generation: 0,
            runs: AtomicU64::new(0),
            saved: AtomicBool::new(false),
            sweeping: AtomicBool::new(false),
            waiting: Arc::new(Semaphore::new(MAX_WAITING_CALLS)),
            waiting_connections: Arc::new(Semaphore::new(MAX_WAITING_CONNECTIONS)),
            mark: Mutex::default(),
            commands: Arc::default(),
            refused_work: RefusedWork::default(),
            killed: AtomicBool::new(false),
            record_removed: AtomicBool::new(false),
            usage: Usage::default(),
            charge: Charge::default(),
            watchers: Watchers::default(),
            #[cfg(linux_guests)]
            connections: OnceLock::new(),
            goes_on: AtomicBool::new(false),
            base: None,
            restarts: AtomicBool::new(false),
            first_is_saved: AtomicBool::new(false),
            second_name: AtomicBool::new(false),
            key: None,
            standing: StoreEntry::default(),
        }
    }

    /// One that an earlier process has saved.
    pub(crate) fn recorded(record: SandboxRecord) -> Self {
        let times = Lifetime {
            ends: moment(record.ends),
            used: Instant::now(),
            paused: record.paused,
            pause_at_end: record.pause_at_end,
        };
        let of = (record.tenant.into(), record.template);
        let mut this =
            Self::new(record.id, record.token, of, record.settings, Residency::Saved, times);
        this.started = time(record.started);
        this.generation = record.generation;
        this.runs = AtomicU64::new(record.runs);
        this.saved = AtomicBool::new(true);
        this.goes_on = AtomicBool::new(record.goes_on);
        this.charge = Charge::saved(record.memory, record.stored);
        (this.base, this.key) = (record.base, record.key);
        this.second_name = AtomicBool::new(record.second_name);
        this.set_restarts(record.restarts);
        this
    }

    /// Its settings as they are now.
    pub(crate) fn present_settings(&self) -> SandboxSettings {
        SandboxSettings { network: (*self.network.rules()).clone(), ..self.settings.clone() }
    }

    /// The record of the sandbox, without its pages.
    pub(crate) fn record(&self) -> SandboxRecord {
        let times = *self.lifetime();
        SandboxRecord {
            id: self.id.clone(),
            tenant: self.tenant.to_string(),
            template: self.template.clone(),
            token: self.token.clone(),
            settings: self.present_settings(),
            started: milliseconds(self.started),
            ends: milliseconds(times.ends_at()),
            noted: milliseconds(SystemTime::now()),
            paused: times.paused,
            pause_at_end: times.pause_at_end,
            generation: self.generation,
            runs: self.runs.load(Ordering::Relaxed),
            goes_on: self.goes_on.load(Ordering::Relaxed),
            stored: self.charge.stored(),
            memory: self.charge.measured(),
            base: self.base.clone(),
            restarts: self.restarts(),
            second_name: self.second_name.load(Ordering::Relaxed),
            key: self.key.clone(),
        }
    }

    /// Whether the next resume drops the memory of its saved state.
    pub(crate) fn restarts(&self) -> bool {
        self.restarts.load(Ordering::Relaxed)
    }

    pub(crate) fn set_restarts(&self, restarts: bool) {
        self.restarts.store(restarts, Ordering::Relaxed);
    }

    /// Whether the first state of its tree is a saved one, and not the state that it began in.
    pub(crate) fn first_is_saved(&self) -> bool {
        self.first_is_saved.load(Ordering::Relaxed)
    }

    pub(crate) fn set_first_is_saved(&self, is_saved: bool) {
        self.first_is_saved.store(is_saved, Ordering::Relaxed);
    }

    /// Whether its time ended with a pause that no server has recorded: its state is in the store
    /// alone.
    pub(crate) fn is_overdue(&self) -> bool {
        let times = *self.lifetime();
        !times.paused
            && times.pause_at_end
            && times.ends <= Instant::now()
            && self.life.try_lock().is_ok_and(|life| matches!(*life, Residency::Saved))
    }

    /// Whether more than its present state is kept: it has checkpoints, or relatives that live.
    /// Such a sandbox stays in memory.
    pub(crate) fn is_branched(&self) -> bool {
        self.has_checkpoints.load(Ordering::Relaxed) || lock(&self.fork_group).has_others()
    }

    /// Its family, for forks of it.
    pub(crate) fn fork_group(&self) -> ForkGroup {
        lock(&self.fork_group).clone()
    }

    /// It is a fork in this family.
    pub(crate) fn join(&self, fork_group: &ForkGroup) {
        *lock(&self.fork_group) = fork_group.clone();
    }

    /// It has a new guest, without checkpoints and relatives.
    pub(crate) fn leave_fork_group(&self) {
        self.has_checkpoints.store(false, Ordering::Relaxed);
        *lock(&self.fork_group) = ForkGroup::default();
    }

    /// Ends its commands and watchers for their clients, since the guest is saved or replaced.
    pub(crate) fn end_programs(&self, why: &str) {
        let why = ConnectError::new("unavailable", why);
        self.commands.end(&why);
        self.watchers.end(&why);
    }

    /// Ends the streams of its commands and watchers for their clients.
    pub(crate) fn end_streams(&self, why: &ConnectError) {
        self.commands.dismiss(why);
        self.watchers.end(why);
    }

    /// Notes whether a session has named checkpoints.
    pub(crate) fn note_checkpoints(&self, session: &Session) {
        let has = session.tree().iter().any(|state| state.name.is_some());
        self.has_checkpoints.store(has, Ordering::Relaxed);
    }

    /// Takes a session back to a state of its tree, and ends its commands for their clients.
    pub(crate) fn roll_back(
        &self,
        session: &mut Session,
        to: afresh::SnapshotId,
        why: &ConnectError,
    ) -> Result<afresh::SnapshotId, ErrorResponse> {
        let at = session.rollback(to);
        self.note_checkpoints(session);
        let at = at.map_err(|error| refused(&error))?;
        self.forget_marks(why);
        Ok(at)
    }

    /// Its session is at another state: no later call is undone to a mark before, and its commands
    /// end for their clients.
    pub(crate) fn forget_marks(&self, why: &ConnectError) {
        // It holds a state that no budget counts any more.
        *lock(&self.mark) = UndoPoint::default();
        self.commands.rolled_back(None, why);
    }

    /// Room in the line of those that wait for this sandbox.
    pub(crate) fn wait(&self, kind: Operation) -> Result<WaitPermit, ErrorResponse> {
        let enter = |line: &Arc<Semaphore>, most: usize, what: &str| {
            line.clone().try_acquire_owned().map_err(|_| {
                let message = format!("{most} {what} wait for this sandbox already; try again");
                ErrorResponse::busy(StatusCode::TOO_MANY_REQUESTS, message)
            })
        };
        let connection = match kind {
            #[cfg(linux_guests)]
            Operation::Connection => {
                Some(enter(&self.waiting_connections, MAX_WAITING_CONNECTIONS, "connections")?)
            }
            _ => None,
        };
        let call = enter(&self.waiting, MAX_WAITING_CALLS, "calls")?;
        Ok(WaitPermit { _call: call, _connection: connection })
    }

    /// Whether a call of it may still wait for a processor.
    pub(crate) fn waits_until(&self, deadline: Instant) -> bool {
        Instant::now() < deadline && !self.killed.load(Ordering::Relaxed)
    }

    pub(crate) fn lifetime(&self) -> MutexGuard<'_, Lifetime> {
        lock(&self.times)
    }

    /// Whether clients see it as paused: it was paused, or its life is over and its state is in the
    /// store alone.
    pub(crate) fn is_paused(&self) -> bool {
        self.lifetime().paused || self.is_overdue()
    }

    /// The answer of the E2B edge for a sandbox that does not run, which its clients expect.
    pub(crate) fn not_running(id: &str) -> ErrorResponse {
        let mut response = ErrorResponse::new(StatusCode::BAD_GATEWAY, "The sandbox was not found");
        response.sandbox = Some(id.into());
        response
    }

    pub(crate) fn not_found(id: &str) -> ErrorResponse {
        ErrorResponse::new(StatusCode::NOT_FOUND, format!("the sandbox {id} was not found"))
    }
}

/// Runs something in a session: what is wanted, and its source. Output is passed to `router` at
/// once. A call that is cut short is undone, and reported as an error of the code. `mark` is then
/// where the call began.
pub(crate) fn run(
    session: &mut Session,
    language: &Language,
    (what, source): (u8, &str),
    mark: &mut UndoPoint,
    router: &mut OutputRouter,
) -> Result<Outcome, ErrorResponse> {
    mark.set_mark(session, false)?;
    let form = language.form;
    let request = Request::new(form, what, &Tools::default(), source, "<code>", None);
    let answered = session.with(|lease| {
        router.exchange(lease)?;
        let done = evaluate(lease, form.function(), request, std::mem::take(router));
        *router = done.listener;
        router.note_cost(done.cost);
        let answer = AnswerTooLong::separate(done.answer, MAX_ANSWER_BYTES)?;
        router.exchange(lease)?;
        Ok(answer)
    });
    router.finish();
    match answered {
        Ok(Err(AnswerTooLong { bytes, .. })) => {
            let message = format!("its value has {bytes} bytes, and may have {MAX_ANSWER_BYTES}");
            let name = "AnswerTooLarge".to_owned();
            Ok(Outcome::Threw(Thrown { name, message, trace: None }))
        }
        Ok(Ok(answer)) => Outcome::read(&answer).map_err(|damaged| {
            ErrorResponse::new(StatusCode::INTERNAL_SERVER_ERROR, damaged.to_string())
        }),
        Err(error) if session.failed().is_some() => {
            mark.undo(session, router)?;
            tracing::info!(why = describe(&error), "a call was cut short, and undone");
            Ok(cut_short(&error, router.is_late()))
        }
        Err(error) => Err(refused(&error)),
    }
}

/// Asks the guest's half of commands for something.
pub(crate) fn command(
    session: &mut Session,
    language: &Language,
    wanted: &serde_json::Value,
    mark: &mut UndoPoint,
    router: &mut OutputRouter,
) -> Result<Outcome, ErrorResponse> {
    router.begin(Vec::new());
    run(session, language, (COMMAND, &wanted.to_string()), mark, router)
}

/// Lets background work run for a slice of time. One that is cut short takes the session back to
/// where its last call ended.
#[cfg(linux_guests)]
pub(crate) fn run_slice(
    session: &mut Session,
    mark: &mut UndoPoint,
    router: &mut OutputRouter,
) -> Result<(), ErrorResponse> {
    if !mark.is_after_call() {
        mark.set_mark(session, true)?;
    }
    router.begin(Vec::new());
    let went = session.with(|lease| {
        router.exchange(lease)?;
        let (went, hearing) = afresh_interpreter::proceed(lease, std::mem::take(router));
        *router = hearing;
        went?;
        router.exchange(lease)?;
        Ok(())
    });
    match went {
        Err(_) if session.failed().is_some() => {
            mark.undo(session, router)?;
            let message = "background work was cut short, and undone";
            Err(ErrorResponse::new(StatusCode::CONFLICT, message))
        }
        went => went.map_err(|error| refused(&error)),
    }
}

/// Nothing runs in the background.
#[cfg(not(linux_guests))]
pub(crate) fn run_slice(
    _: &mut Session,
    _: &mut UndoPoint,
    _: &mut OutputRouter,
) -> Result<(), ErrorResponse> {
    Ok(())
}

/// Time until the next event in a session, if one is due.
pub(crate) fn next_event(session: &Session) -> Option<Duration> {
    #[cfg(linux_guests)]
    return session.due();
    #[cfg(not(linux_guests))]
    {
        let _ = session;
        None
    }
}

/// A call that was cut short, as an error of the code.
fn cut_short(error: &SessionError, late: bool) -> Outcome {
    let name = match error {
        SessionError::Call(
            afresh::CallError::Timeout { .. } | afresh::CallError::CpuTime { .. },
        ) => "TimeoutError",
        _ if late => "TimeoutError",
        _ => "GuestError",
    };
    let message = format!("{}; the code was undone", describe(error));
    Outcome::Threw(Thrown { name: name.to_owned(), message, trace: None })
}
