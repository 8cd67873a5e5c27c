//! All sandboxes of a server, with their tenants, sources, ends and places.
//!
//! Promises: a paused sandbox and its record are in the store before its client is answered. No
//! tenant exceeds its limit. Sandboxes that the directory has when a server starts are served
//! again.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use afresh::{Reference, Session};
use hyper::StatusCode;
use tokio::sync::OwnedMutexGuard;

use crate::audit::AuditLog;
use crate::concurrency::Permit;
use crate::cpu_time::{CpuTimer, memory_peak, take_outbound_bytes};
use crate::deadline::deadline_after;
use crate::error::ServeError;
use crate::error_response::ErrorResponse;
use crate::failure::internal;
use crate::lock::lock;
use crate::private_directory::open_private;
use crate::sandbox::catalog::base_guest::BaseGuest;
use crate::sandbox::catalog::builds::Builds;
use crate::sandbox::catalog::snapshots::OpenSnapshot;
use crate::sandbox::catalog::template::Warm;
use crate::sandbox::catalog::template_list::{RELOADED, TemplateList};
use crate::sandbox::config::SandboxConfig;
use crate::sandbox::http::session_error::refused;
use crate::sandbox::http::token_search::TokenSearch;
use crate::sandbox::lifecycle::key_turns::KeyTurns;
use crate::sandbox::lifecycle::random::random;
use crate::sandbox::lifecycle::sandbox::{Lifetime, Residency, Sandbox, next_event};
use crate::sandbox::lifecycle::tasks::{blocking, to_its_end};
use crate::sandbox::lifecycle::undo_point::Operation;
use crate::sandbox::records::directory::Directory;
use crate::sandbox::records::directory_store::DirectoryStore;
use crate::sandbox::records::record::{IMAGE, saved_id, saved_name, state_reference};
use crate::sandbox::records::remote_usage::RemoteUsage;
use crate::sandbox::records::store::{SandboxStore, max_listed};
use crate::sandbox::tenants::accounts::Accounts;
use crate::sandbox::tenants::cpu_scheduler::{CpuScheduler, CpuTurn};
use crate::sandbox::tenants::memory::Memory;
use crate::sandbox::tenants::processor_metrics::ProcessorMetrics;
use crate::sandbox::tenants::quota::Quota;
use crate::sandbox::tenants::stored_blobs::StoredBlobs;
use crate::sandbox::tenants::tenant_queue::TenantQueue;

/// All sandboxes of a server.
pub(crate) struct Sandboxes {
    pub(crate) config: SandboxConfig,
    /// Another in each server.
    pub(crate) boot: String,
    pub(crate) builds: Builds,
    pub(crate) templates: TemplateList,
    pub(crate) all: Mutex<HashMap<String, Arc<Sandbox>>>,
    /// Killed sandboxes that have not ended yet, which count in the budgets of their tenants. Their
    /// entries may still be in the ledger, from which they are not taken up.
    pub(crate) killed: Arc<Mutex<HashMap<String, Arc<Sandbox>>>>,
    /// The server ends: sandboxes made now would not be saved with the others. Changed under the
    /// lock of `all`.
    pub(crate) ending: AtomicBool,
    /// Whether a call has run for many times its time limit, so that something blocks it. As of the
    /// last sweep.
    pub(crate) has_overdue_calls: AtomicBool,
    /// Keys of requests that make sandboxes now.
    pub(crate) keys: Arc<KeyTurns>,
    /// Snapshots that are kept open, by their ids.
    pub(crate) opened: Mutex<HashMap<String, OpenSnapshot>>,
    pub(crate) ledger: Arc<dyn SandboxStore>,
    pub(crate) quota: Quota,
    /// What saved states of this server reach, by tenant.
    pub(crate) stored_blobs: StoredBlobs,
    pub(crate) remote_usage: RemoteUsage,
    /// Whether the store has unreferenced objects, and when it was last collected.
    pub(crate) has_garbage: AtomicBool,
    pub(crate) collected_at: Mutex<Instant>,
    pub(crate) audit: Option<Arc<AuditLog>>,
    /// The use and the budgets of tenants.
    pub(crate) accounts: Accounts,
    /// When holdings were last added to the totals.
    pub(crate) accounted: Mutex<Instant>,
    calls: TenantQueue,
    pub(crate) processors: Arc<CpuScheduler>,
    pub(crate) processor_metrics: ProcessorMetrics,
    pub(crate) memory: Arc<Memory>,
    pub(crate) measured: Mutex<Instant>,
    /// Saves of idle sandboxes, and pauses. They wait for disks and take memory.
    pub(crate) idle_saves: TenantQueue,
    pub(crate) pauses: TenantQueue,
    /// Snapshots that are fetched and opened.
    pub(crate) pulls: TenantQueue,
    /// Reads of the files of running programs.
    #[cfg(linux_guests)]
    pub(crate) views: TenantQueue,
    /// Searches of clients with signed URLs that name no sandbox.
    pub(crate) token_search: TokenSearch,
    /// Lists of sandboxes and snapshots that are read from the ledger of a fleet.
    lists: TenantQueue,
    directory: Mutex<Option<Directory>>,
}

/// Maximum saves of idle sandboxes, pauses, and pulls of snapshots at the same time.
const MAX_IDLE_SAVES: usize = 4;
const MAX_PAUSES: usize = 16;
const MAX_PULLS: usize = 16;
/// Maximum reads of the files of running programs at the same time. Each has a thread, and waits
/// for its program.
#[cfg(linux_guests)]
const MAX_VIEWS: usize = 16;

/// Maximum lists that are read from the ledger of a fleet at the same time. Each takes up to 64 KiB
/// of memory for each of its entries.
const MAX_LISTS: usize = 4;

/// Time for which a call waits for the one before until the log reports it.
const WAIT_WARNING: Duration = Duration::from_secs(10);

/// How long background work waits for a place: it has no client that retries.
const BACKGROUND_PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);

/// The life of a sandbox, once the calls before have ended. A long wait is in the log.
async fn live(sandbox: &Sandbox, kind: Operation) -> OwnedMutexGuard<Residency> {
    let locking = sandbox.life.clone().lock_owned();
    tokio::pin!(locking);
    let warning = async {
        tokio::time::sleep(WAIT_WARNING).await;
        if kind != Operation::Slice {
            let seconds = WAIT_WARNING.as_secs();
            tracing::warn!(id = sandbox.id, seconds, "a call waits for an earlier one that runs");
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        biased;
        life = &mut locking => life,
        () = warning => locking.await,
    }
}

impl Sandboxes {
    /// Opens every template, and finds saved sandboxes. Without a `ledger`, records are in the
    /// directory of this server.
    pub(crate) async fn open(
        config: &SandboxConfig,
        audit: Option<Arc<AuditLog>>,
        ledger: Option<Arc<dyn SandboxStore>>,
    ) -> Result<Arc<Self>, ServeError> {
        let config = config.clone();
        let opening = std::thread::Builder::new().name("afresh-open".to_owned());
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let failed = |source: afresh::Cause| ServeError::Sandboxes { source };
        let open = move || {
            let opened = Self::open_now(config, audit, ledger);
            drop(sender.send(opened.map(Arc::new)));
        };
        opening.spawn(open).map_err(|error| failed(error.into()))?;
        let opened = receiver.await.map_err(|error| failed(error.into()))?;
        opened.map_err(failed)
    }

    fn open_now(
        config: SandboxConfig,
        audit: Option<Arc<AuditLog>>,
        ledger: Option<Arc<dyn SandboxStore>>,
    ) -> Result<Self, afresh::Cause> {
        if config.templates.is_empty() {
            return Err("no template is named that sandboxes could be made from".into());
        }
        open_private(&config.dir)?;
        let boot = random(8).map_err(|refusal| refusal.message)?;
        let directory = Directory::lock(&config.dir)?;
        let ledger = match ledger {
            Some(ledger) => ledger,
            None => Arc::new(DirectoryStore::open(&config.dir)?),
        };
        let records = ledger.records(&config.dir)?;
        let accounts = Accounts::open(&config.dir, config.budgets.clone())?;
        let accounts = accounts.with_store(ledger.clone());
        let templates = config
            .templates
            .iter()
            .map(|template| Warm::open(&config, template, Some(&*ledger)).map(Arc::new));
        let templates = templates.collect::<Result<Vec<_>, _>>()?;
        // Objects that no sandbox, snapshot or template needs any more.
        let store = state_reference(&config.dir, "any").parse::<Reference>()?.place().store()?;
        let is_configured = |name: &str| config.templates.iter().any(|known| known.name == name);
        // The server before has opened images for builds, and templates at reloads.
        let is_image = |name: &str| {
            name.strip_prefix("template-")
                .is_some_and(|name| name.starts_with(IMAGE) && !is_configured(name))
        };
        let names: BTreeSet<String> =
            store.list()?.into_iter().map(|listed| listed.tag.name).collect();
        // A record may name a state that is not there: then the other one is the last of its kind.
        let is_last = |name: &str| {
            saved_id(name).is_some_and(|(id, second)| {
                records.iter().any(|record| record.id == id)
                    && !names.contains(&saved_name(id, !second))
            })
        };
        for name in &names {
            let is_left = is_image(name) || name.starts_with(RELOADED);
            if ledger.is_orphan(name) && !is_last(name) || is_left {
                store.untag(name)?;
            }
        }
        store.gc()?;
        let all = records.into_iter();
        let all = all.map(|record| (record.id.clone(), Arc::new(Sandbox::recorded(record))));
        let known_snapshots = ledger.known_snapshots();
        let quota = Quota::new(config.max_snapshots);
        let waiting = config.max_sandboxes;
        let this = Self {
            templates: TemplateList::new(templates),
            all: Mutex::new(all.collect()),
            killed: Arc::default(),
            ending: AtomicBool::new(false),
            has_overdue_calls: AtomicBool::new(false),
            keys: Arc::default(),
            opened: Mutex::new(HashMap::new()),
            ledger,
            quota,
            stored_blobs: StoredBlobs::default(),
            remote_usage: RemoteUsage::default(),
            has_garbage: AtomicBool::new(false),
            collected_at: Mutex::new(Instant::now()),
            audit,
            accounts,
            accounted: Mutex::new(Instant::now()),
            calls: TenantQueue::for_calls(config.max_running_calls, waiting),
            processors: CpuScheduler::new(config.max_computing_calls),
            processor_metrics: ProcessorMetrics::default(),
            memory: Arc::new(Memory::new(config.max_memory)),
            measured: Mutex::new(Instant::now()),
            // The sweep has one task for each sandbox.
            idle_saves: TenantQueue::new("save", MAX_IDLE_SAVES, usize::MAX),
            pauses: TenantQueue::new("save", MAX_PAUSES, usize::MAX),
            pulls: TenantQueue::new("pull of the snapshot", MAX_PULLS, waiting),
            #[cfg(linux_guests)]
            views: TenantQueue::new("read of the files", MAX_VIEWS, waiting),
            token_search: TokenSearch::default(),
            lists: TenantQueue::new("list", MAX_LISTS, waiting),
            directory: Mutex::new(Some(directory)),
            boot,
            builds: Builds::default(),
            config,
        };
        this.charge_known(&store, &known_snapshots)?;
        Ok(this)
    }

    /// Replaces the keys and the budgets, which may have room for refused work now.
    pub(crate) fn renew(self: &Arc<Self>, config: &SandboxConfig) {
        self.config.keys.renew(&config.keys);
        self.accounts.renew(&config.budgets);
        self.retry_refused_work();
    }

    /// Records an operation of the server itself, and why it was refused.
    pub(crate) fn record_own(
        &self,
        action: &str,
        sandbox: &Sandbox,
        result: &str,
        reason: Option<&str>,
    ) {
        if let Some(audit) = &self.audit {
            audit.write(serde_json::Map::from_iter([
                ("event".to_owned(), "end".into()),
                ("tenant".to_owned(), (&*sandbox.tenant).into()),
                ("key".to_owned(), "server".into()),
                ("action".to_owned(), action.into()),
                ("sandbox".to_owned(), sandbox.id.as_str().into()),
                ("result".to_owned(), result.into()),
                ("reason".to_owned(), reason.into()),
            ]));
        }
    }

    /// Leaves the directory to the next server. Nothing is changed there any more.
    pub(crate) fn release(&self) {
        self.account_resource_use();
        self.accounts.write(true);
        *lock(&self.directory) = None;
    }

    /// Looks for calls that have run for more than `limit`.
    pub(crate) fn find_overdue_calls(&self, limit: Duration) {
        self.has_overdue_calls.store(self.has_calls_past(limit), Ordering::Relaxed);
    }

    /// Whether a call has run for more than `limit`.
    pub(crate) fn has_calls_past(&self, limit: Duration) -> bool {
        let is_overdue = |sandbox: &Arc<Sandbox>| {
            sandbox.commands.running_time().is_some_and(|time| time > limit)
        };
        [&self.all, &*self.killed].into_iter().any(|all| lock(all).values().any(is_overdue))
    }

    /// Running calls, and their limit.
    #[cfg(feature = "fleet")]
    pub(crate) fn busy_calls(&self) -> (usize, usize) {
        self.calls.busy()
    }

    /// A sandbox of a tenant.
    pub(crate) fn of(&self, tenant: &str, id: &str) -> Result<Arc<Sandbox>, ErrorResponse> {
        let found = lock(&self.all).get(id).filter(|sandbox| *sandbox.tenant == *tenant).cloned();
        found.ok_or_else(|| self.moved(id).unwrap_or_else(|| Sandbox::not_found(id)))
    }

    /// The answer for a sandbox that is not here, where it may exist elsewhere: a server that
    /// leaves has left its sandboxes to other hosts.
    pub(crate) fn moved(&self, id: &str) -> Option<ErrorResponse> {
        self.ledger.is_leaving().then(|| Residency::Moved.absent(id))
    }

    /// A sandbox without a check of its tenant: for clients that show its token.
    pub(crate) fn any(&self, id: &str) -> Option<Arc<Sandbox>> {
        lock(&self.all).get(id).cloned()
    }

    /// The sandboxes of a tenant, oldest first.
    /// The second value is the number of entries that were not or cannot be read.
    pub(crate) async fn list(
        &self,
        tenant: &Arc<str>,
    ) -> Result<(Vec<Arc<Sandbox>>, usize), ErrorResponse> {
        let mut own: Vec<_> =
            lock(&self.all).values().filter(|sandbox| sandbox.tenant == *tenant).cloned().collect();
        let _place = self.list_place(tenant).await?;
        let known =
            self.ledger.sandboxes_of(tenant, max_listed(self.max_sandboxes(tenant))).await?;
        if known.omitted > 0 {
            let (tenant, omitted) = (&**tenant, known.omitted);
            tracing::warn!(tenant, omitted, "a list of sandboxes ends at its maximum");
        }
        let here: HashSet<String> = own.iter().map(|sandbox| sandbox.id.clone()).collect();
        let elsewhere = known.records.into_iter().filter(|record| !here.contains(&record.id));
        own.extend(elsewhere.map(|record| Arc::new(Sandbox::recorded(record))));
        own.sort_by(|one, two| (one.started, &one.id).cmp(&(two.started, &two.id)));
        Ok((own, known.unreadable.saturating_add(known.omitted)))
    }

    /// A place among the lists that are read from the ledger of a fleet. The lists of one server
    /// need none.
    pub(crate) async fn list_place(
        &self,
        tenant: &Arc<str>,
    ) -> Result<Option<Permit>, ErrorResponse> {
        if !self.ledger.releases() {
            return Ok(None);
        }
        let patience = self.config.call_timeout;
        self.lists.enter(&self.accounts, tenant, patience).await.map(Some)
    }

    /// A life that begins now.
    pub(crate) fn lifetime(&self, time: Duration, pause_at_end: bool) -> Lifetime {
        let now = Instant::now();
        let ends = deadline_after(now, time.min(self.config.timeout));
        Lifetime { ends, used: now, paused: false, pause_at_end }
    }

    /// Does something with a sandbox's session, which comes back from the store if it has to.
    pub(crate) async fn with<R: Send + 'static>(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        work: impl FnOnce(&mut Session) -> Result<R, ErrorResponse> + Send + 'static,
    ) -> Result<R, ErrorResponse> {
        self.turn(sandbox, Operation::Call, work).await
    }

    /// The same, in a turn of any kind.
    pub(crate) async fn turn<R: Send + 'static>(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        kind: Operation,
        work: impl FnOnce(&mut Session) -> Result<R, ErrorResponse> + Send + 'static,
    ) -> Result<R, ErrorResponse> {
        let waiting = sandbox.wait(kind)?;
        let mut life = live(sandbox, kind).await;
        // Only once it is this call's turn, so that many calls of one sandbox hold one place.
        let patience = match kind {
            Operation::Slice => BACKGROUND_PATIENCE,
            _ => self.config.call_timeout,
        };
        // The deadline of all waits: for a place, for a processor, and again after a restore.
        let deadline = deadline_after(Instant::now(), patience);
        self.accounts.check_call(&sandbox.tenant)?;
        if kind != Operation::Call {
            self.check_growth(sandbox)?;
        }
        let place = self.calls.enter(&self.accounts, &sandbox.tenant, patience).await?;
        drop(waiting);
        self.check_may_begin(sandbox, &life)?;
        // It may have been paused while this waited; only its client wakes it up.
        if kind != Operation::Slice && sandbox.lifetime().paused {
            let message = format!("the sandbox {} is paused; connect to it first", sandbox.id);
            return Err(ErrorResponse::new(StatusCode::CONFLICT, message));
        }
        let base = match &*life {
            Residency::Saved if kind != Operation::Slice => self.restart_source(sandbox).await?,
            _ => None,
        };
        let (this, sandbox) = (self.clone(), sandbox.clone());
        // Dropped with this future, if the client leaves before the end.
        let client = Arc::new(());
        let waiting_client = Arc::downgrade(&client);
        let done = blocking(move || {
            let _place = sandbox.commands.hold(place);
            this.take_processor(&sandbox, deadline, &waiting_client)?;
            // It may have waited for long.
            this.check_may_begin(&sandbox, &life)?;
            let wakes = kind != Operation::Slice;
            if wakes && matches!(*life, Residency::Saved) {
                let restored = tracing::debug_span!("resume")
                    .in_scope(|| this.restore(&sandbox, base.as_ref(), deadline));
                *life = Residency::Live(Box::new(restored?));
            }
            let used = || {
                if wakes {
                    sandbox.lifetime().used = Instant::now();
                }
            };
            used();
            let has_run = matches!(&*life, Residency::Live(_));
            sandbox.commands.begin_run();
            let result = match &mut *life {
                Residency::Live(session) => {
                    // Earlier bytes belong to other calls.
                    take_outbound_bytes();
                    let timer = CpuTimer::start();
                    sandbox.commands.with_turn(|turn| turn.settle(true));
                    let call = || tracing::debug_span!("call").in_scope(|| work(session));
                    #[cfg(linux_guests)]
                    let done = {
                        let log = sandbox.connection_log(this.audit.as_ref());
                        let call = || sandbox.network.within(|| log.within(call));
                        sandbox.connection_owner().within(call)
                    };
                    #[cfg(not(linux_guests))]
                    let done = call();
                    // The tenant chooses how much there is to compare.
                    sandbox.watchers.observe(session);
                    sandbox.commands.with_turn(|turn| turn.settle(false));
                    sandbox.charge.measure(session, kind);
                    let ran = timer.stop();
                    this.accounts.add_outbound(&sandbox.tenant, take_outbound_bytes());
                    sandbox.usage.ran(ran);
                    sandbox.commands.add_use(ran, memory_peak());
                    this.accounts.add_run(&sandbox.tenant, ran, kind == Operation::Call);
                    lock(&sandbox.mark).followed_by(kind);
                    this.schedule_background(&sandbox, next_event(session));
                    done
                }
                other => Err(other.absent(&sandbox.id)),
            };
            used();
            if sandbox.killed.load(Ordering::Relaxed) {
                return Err(Sandbox::not_running(&sandbox.id));
            }
            // Another host may have taken the sandbox during the call. Its state then lacks this
            // call. Otherwise the call has had its effect, and is not safe to repeat, unless it was
            // refused for its form.
            let is_refused = result.as_ref().is_err_and(|error| error.status.is_client_error());
            match this.ledger.check(&*sandbox) {
                Err(refusal) if !has_run => Err(refusal),
                Err(_) if !is_refused => Err(ErrorResponse::unknown_outcome()),
                _ => result,
            }
        });
        let done = done.await;
        drop(client);
        done
    }

    /// Refuses a call whose sandbox may be another host's, or whose server ends.
    fn check_may_begin(&self, sandbox: &Sandbox, life: &Residency) -> Result<(), ErrorResponse> {
        self.ledger.check(sandbox)?;
        self.check_not_ending(life)
    }

    /// Opens a saved sandbox; with `base` its memory is dropped. It waits for a processor until
    /// `deadline`, which the time of a fetch moves.
    fn restore(
        &self,
        sandbox: &Sandbox,
        base: Option<&BaseGuest>,
        deadline: Instant,
    ) -> Result<Session, ErrorResponse> {
        self.memory.admit_now(1)?;
        self.admit_resume(sandbox)?;
        let saved = self.open_saved(sandbox, deadline);
        sandbox.set_first_is_saved(true);
        let restored = match base {
            Some(base) => saved.and_then(|saved| self.restart_resumed(sandbox, base, saved)),
            // Its memory was no part of its charge any more, and cannot be dropped.
            None if sandbox.restarts() => saved.and_then(|saved| {
                self.admit_restarted(sandbox, &saved)?;
                Ok(saved)
            }),
            None => saved,
        };
        if restored.is_err() {
            sandbox.charge.release();
        }
        restored
    }

    fn open_saved(&self, sandbox: &Sandbox, deadline: Instant) -> Result<Session, ErrorResponse> {
        let warm = sandbox.warm.get_or_init(|| self.template_of_state(&sandbox.template));
        // The state may come from the store of a fleet: a wait for the network.
        sandbox.commands.with_turn(CpuTurn::rest);
        let began = Instant::now();
        let name = self.ledger.source(&self.config.dir, sandbox)?;
        // The fetch is no wait for a processor.
        let deadline = deadline_after(deadline, began.elapsed());
        let waits = || sandbox.waits_until(deadline);
        if sandbox.commands.with_turn(|turn| turn.resume(waits)) == Some(false) {
            return Err(self.no_processor(sandbox));
        }
        let guest = afresh::open(name, &warm.options).map_err(|error| internal(&error))?;
        guest.session().map_err(|error| refused(&error))
    }

    /// Resumes a paused sandbox for `time` from now, with its background work.
    pub(crate) async fn resume(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        time: Option<Duration>,
    ) -> Result<(), ErrorResponse> {
        let ends = time.map(|time| deadline_after(Instant::now(), time.min(self.config.timeout)));
        if sandbox.is_overdue() && sandbox.settings.files_only {
            // The sweep has not recorded its pause yet.
            sandbox.set_restarts(true);
            sandbox.charge.forget_measured();
        }
        {
            let mut times = sandbox.lifetime();
            let later = ends.filter(|ends| times.paused || *ends > times.ends);
            times.ends = later.unwrap_or(times.ends);
            times.used = Instant::now();
        }
        // After a pause that is under way, and not before it.
        let resumed = |times: &mut Lifetime| std::mem::replace(&mut times.paused, false);
        let was_paused = self.note(sandbox, resumed).await?;
        if was_paused && sandbox.goes_on.load(Ordering::Relaxed) {
            let (this, own) = (self.clone(), sandbox.clone());
            tokio::spawn(async move {
                if let Err(refusal) = this.with(&own, |_| Ok(())).await {
                    let why = refusal.message;
                    tracing::debug!(id = own.id, why, "continues with the next call");
                }
            });
        }
        Ok(())
    }

    /// Changes the times of a sandbox between two operations of it, and then its record.
    pub(crate) async fn note<R>(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        change: impl FnOnce(&mut Lifetime) -> R,
    ) -> Result<R, ErrorResponse> {
        if !self.ledger.has_record(&**sandbox) {
            return Ok(change(&mut sandbox.lifetime()));
        }
        let life = sandbox.life.clone().lock_owned().await;
        match &*life {
            Residency::Live(_) | Residency::Saved => {
                let result = change(&mut sandbox.lifetime());
                let (this, sandbox) = (self.clone(), sandbox.clone());
                let noted = async move {
                    let _life = life;
                    this.ledger.update(&*sandbox, sandbox.record(), None, false).await
                };
                to_its_end(noted).await?;
                Ok(result)
            }
            other => Err(other.absent(&sandbox.id)),
        }
    }
}
