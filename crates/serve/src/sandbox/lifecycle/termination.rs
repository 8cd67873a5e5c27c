//! The end of sandboxes, and the care of idle ones: killing, sweeping, collecting garbage, and
//! saving all when the server ends.
//!
//! Promises: a killed sandbox is removed for all clients at once, also during a call. Its record is
//! removed before its client is answered, and no later save writes one. No saved state is removed
//! while an entry names it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use afresh::Reference;
use hyper::StatusCode;
use tokio::sync::OwnedMutexGuard;

use crate::concurrency::Permit;
use crate::deadline::deadline_after;
use crate::error_response::ErrorResponse;
use crate::failure::internal;
use crate::lock::lock;
use crate::sandbox::agent::connect::ConnectError;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::{Residency, Sandbox};
use crate::sandbox::lifecycle::saving::SaveMode;
use crate::sandbox::lifecycle::tasks::{blocking, to_its_end};
use crate::sandbox::lifecycle::undo_point::UndoPoint;
use crate::sandbox::records::record::state_reference;
use crate::sandbox::records::store::StoredSandbox;
use crate::sandbox::tenants::stored_blobs::StoredState;

/// Time for which a client waits for the end of a sandbox with a running call.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);
/// Longer than one slice of background work of a sandbox.
const SLICE_TIMEOUT: Duration = Duration::from_millis(200);
/// Maximum attempts to strike one out, and the time between them.
const MAX_REMOVAL_ATTEMPTS: u32 = 720;
const REMOVAL_RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Interval of memory measurements.
const MEASURE_INTERVAL: Duration = Duration::from_secs(1);
/// Time for which an ending server retries refused saves of its sandboxes.
const SAVE_ALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Minimum time that an ending server waits for the calls of one sandbox.
const MIN_CALL_END_TIMEOUT: Duration = Duration::from_secs(1);
/// A call waits for its client, a processor and a place again, each for at most its time limit. One
/// that has run for this many time limits is reported as a fault.
const OVERDUE_FACTOR: u32 = 10;
/// How long the sweep waits for a place: it has no client that retries.
const SAVE_PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);
const SAVE_RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// Time until a sandbox is swept again that could not be saved or ended.
const SWEEP_RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// A sandbox that is being killed, until its end is complete.
struct KillGuard {
    all: Arc<Mutex<HashMap<String, Arc<Sandbox>>>>,
    id: String,
}

impl KillGuard {
    /// `None` if it is being killed already.
    fn begin(
        all: &Arc<Mutex<HashMap<String, Arc<Sandbox>>>>,
        sandbox: &Arc<Sandbox>,
    ) -> Option<Self> {
        let id = sandbox.id.clone();
        match lock(all).entry(id.clone()) {
            Entry::Occupied(_) => return None,
            Entry::Vacant(place) => place.insert(sandbox.clone()),
        };
        Some(Self { all: all.clone(), id })
    }
}

impl Drop for KillGuard {
    fn drop(&mut self) {
        let removed = lock(&self.all).remove(&self.id);
        if let Some(sandbox) = removed {
            sandbox.charge.store(StoredState::default());
        }
    }
}

/// Drops the session of a sandbox once its calls have ended, on a thread for blocking work: the
/// process of the session is reset for a later one.
pub(crate) async fn end_session(sandbox: &Arc<Sandbox>, left: Residency) {
    let (mut life, own) = (sandbox.life.clone().lock_owned().await, sandbox.clone());
    let ended = blocking(move || {
        *life = left;
        *lock(&own.mark) = UndoPoint::default();
        Ok(())
    });
    // The life is replaced even if the reset panics, which the log has.
    let _ = ended.await;
}

/// Whether a sandbox is idle. A running slice of background work is waited for.
async fn is_free(sandbox: &Sandbox) -> bool {
    match sandbox.commands.is_slicing() {
        true => tokio::time::timeout(SLICE_TIMEOUT, sandbox.life.lock()).await.is_ok(),
        false => sandbox.life.try_lock().is_ok(),
    }
}

fn is_over(sandbox: &Sandbox) -> bool {
    sandbox.lifetime().ends <= Instant::now()
}

/// A sandbox in the sweep: it is being ended or saved.
struct SweepGuard(Arc<Sandbox>);

impl SweepGuard {
    /// None while that is under way.
    fn begin(sandbox: &Arc<Sandbox>) -> Option<Self> {
        (!sandbox.sweeping.swap(true, Ordering::Relaxed)).then(|| Self(sandbox.clone()))
    }
}

impl Drop for SweepGuard {
    fn drop(&mut self) {
        self.0.sweeping.store(false, Ordering::Relaxed);
    }
}

impl Sandboxes {
    /// Ends a sandbox of a tenant. A client that got an error repeats its request, which removes
    /// the entry of the killed sandbox if the ledger still has it.
    pub(crate) async fn kill_by_id(
        self: &Arc<Self>,
        tenant: &str,
        id: &str,
    ) -> Result<(), ErrorResponse> {
        let missing = match self.of(tenant, id) {
            Ok(sandbox) => return self.kill(&sandbox).await,
            Err(missing) => missing,
        };
        let is_left = |killed: &&Arc<Sandbox>| {
            *killed.tenant == *tenant && !killed.record_removed.load(Ordering::Acquire)
        };
        let Some(sandbox) = lock(&self.killed).get(id).filter(is_left).cloned() else {
            return Err(missing);
        };
        let this = self.clone();
        to_its_end(async move { this.remove_record(&sandbox).await }).await
    }

    /// Ends a sandbox, and forgets it. It has no record any more when this returns, even if a call
    /// of it still runs.
    pub(crate) async fn kill(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
    ) -> Result<(), ErrorResponse> {
        // Before it is missed anywhere, and until the ledger has no entry of it.
        let Some(killed) = KillGuard::begin(&self.killed, sandbox) else {
            return Err(Sandbox::not_found(&sandbox.id));
        };
        if lock(&self.all).remove(&sandbox.id).is_none() {
            return Err(Sandbox::not_found(&sandbox.id));
        }
        // With this code clients ask whether the sandbox runs. Before running work is cut short,
        // which would give its commands another reason.
        let why = "the sandbox was killed or reached its end of life";
        let why = ConnectError::new("unavailable", why);
        sandbox.commands.end(&why);
        sandbox.watchers.end(&why);
        // A call that runs notices it, and ends. An admission that is under way refuses it, and so
        // does each save that is under way.
        sandbox.killed.store(true, Ordering::Release);
        sandbox.charge.downloads.end();
        let (this, sandbox) = (self.clone(), sandbox.clone());
        let killing = async move {
            let record_removed = this.remove_record(&sandbox).await;
            let ending = tokio::spawn(this.end_killed(sandbox, killed, why));
            record_removed?;
            // No client finds it any more. A running call may last, and is not waited for.
            match tokio::time::timeout(KILL_TIMEOUT, ending).await {
                Ok(Err(error)) => Err(internal(&error)),
                Ok(Ok(())) | Err(_) => Ok(()),
            }
        };
        to_its_end(killing).await
    }

    /// Removes a killed sandbox from the ledger.
    async fn remove_record(&self, sandbox: &Sandbox) -> Result<(), ErrorResponse> {
        self.ledger.remove(sandbox).await?;
        sandbox.record_removed.store(true, Ordering::Release);
        Ok(())
    }

    /// Drops a killed sandbox once its calls have ended, and removes its state from the store once
    /// no entry names it. Until then this host does not take it from the ledger.
    async fn end_killed(
        self: Arc<Self>,
        sandbox: Arc<Sandbox>,
        killed: KillGuard,
        why: ConnectError,
    ) {
        end_session(&sandbox, Residency::Gone).await;
        // Also those that began after the first end.
        sandbox.charge.downloads.end();
        sandbox.commands.end(&why);
        sandbox.watchers.end(&why);
        if sandbox.record_removed.load(Ordering::Acquire) {
            self.untag_killed(&sandbox).await;
        } else {
            tokio::spawn(self.retry_removal(sandbox, killed));
        }
    }

    async fn untag_killed(self: &Arc<Self>, sandbox: &Sandbox) {
        let (this, name) = (self.clone(), sandbox.saved_name());
        let untagged = blocking(move || {
            this.untag(&name);
            Ok(())
        });
        // A failure is in the log, and the next server removes the state.
        let _ = untagged.await;
    }

    /// Strikes a killed sandbox out once the ledger answers again.
    async fn retry_removal(self: Arc<Self>, sandbox: Arc<Sandbox>, _killed: KillGuard) {
        for _ in 0..MAX_REMOVAL_ATTEMPTS {
            tokio::time::sleep(REMOVAL_RETRY_INTERVAL).await;
            if sandbox.record_removed.load(Ordering::Acquire)
                || self.remove_record(&sandbox).await.is_ok()
            {
                self.untag_killed(&sandbox).await;
                return;
            }
        }
        tracing::error!(id = sandbox.id, "a sandbox that was killed is still in the ledger");
    }

    /// Takes a name out of the store, if it is there.
    pub(crate) fn untag(&self, name: &str) {
        let place: Result<Reference, _> = state_reference(&self.config.dir, name).parse();
        if let Ok(store) = place.map_err(drop).and_then(|r| r.place().store().map_err(drop)) {
            // A sandbox that was never saved has none.
            let _ = store.untag(name);
            self.has_garbage.store(true, Ordering::Relaxed);
        }
    }

    /// Starts to end expired sandboxes and to save idle ones.
    pub(crate) fn sweep(self: &Arc<Self>) {
        self.measure_use();
        self.builds.expire();
        self.collect_templates();
        self.find_overdue_calls(self.config.call_timeout.saturating_mul(OVERDUE_FACTOR));
        if !self.ledger.is_owner() {
            return;
        }
        let all: Vec<_> = lock(&self.all).values().cloned().collect();
        for sandbox in all {
            if !sandbox.lifetime().paused
                && (is_over(&sandbox) || self.is_idle(&sandbox))
                && let Some(swept) = SweepGuard::begin(&sandbox)
            {
                tokio::spawn(self.clone().sweep_one(swept));
            }
        }
        tokio::spawn(self.clone().collect_garbage());
    }

    /// Measures memory and accounts for it once in a while, so that most admissions need not.
    fn measure_use(self: &Arc<Self>) {
        let mut measured = lock(&self.measured);
        if measured.elapsed() >= MEASURE_INTERVAL {
            *measured = Instant::now();
            let this = self.clone();
            tokio::task::spawn_blocking(move || {
                this.memory.measure();
                this.account_resource_use();
                this.accounts.write(false);
            });
        }
    }

    /// Whether a sandbox is idle, so that it can be saved: it does nothing and has no clients, or a
    /// budget refuses its background work.
    fn is_idle(&self, sandbox: &Sandbox) -> bool {
        let does_nothing = || {
            !sandbox.commands.is_driven()
                && !sandbox.commands.in_use()
                && !sandbox.watchers.has_streams()
        };
        sandbox.lifetime().used.elapsed() >= self.config.idle_timeout
            && !sandbox.is_branched()
            && (sandbox.refused_work.budget().is_some() || does_nothing())
    }

    /// Ends or saves one sandbox. The end of its lifetime waits for no save of another, unless it
    /// must be saved itself.
    async fn sweep_one(self: Arc<Self>, swept: SweepGuard) {
        let sandbox = &swept.0;
        // One that is being called gets its turn later.
        if !is_free(sandbox).await {
            return;
        }
        let pauses = sandbox.lifetime().pause_at_end;
        let result = if is_over(sandbox) && !pauses {
            let killed = self.kill(sandbox).await;
            let result = if killed.is_ok() { "ok" } else { "failed" };
            self.record_own("kill at the end of its life", sandbox, result, None);
            killed
        } else {
            let queue = if is_over(sandbox) { &self.pauses } else { &self.idle_saves };
            match queue.enter(&self.accounts, &sandbox.tenant, SAVE_PATIENCE).await {
                Ok(place) => self.save_swept(sandbox, pauses, place).await,
                Err(refusal) => Err(refusal),
            }
        };
        if let Err(refusal) = result {
            tracing::warn!(id = sandbox.id, why = refusal.message, "not saved or ended");
            // Each attempt writes the state again. No other sweep takes it until then.
            tokio::time::sleep(SWEEP_RETRY_INTERVAL).await;
        }
    }

    /// Saves an expired sandbox, or one that is still idle. One that is called meanwhile is left to
    /// the next sweep: those who hold a sandbox and wait for a place must not be waited for.
    async fn save_swept(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        pauses: bool,
        place: Permit,
    ) -> Result<(), ErrorResponse> {
        let life = tokio::time::timeout(SLICE_TIMEOUT, sandbox.life.clone().lock_owned()).await;
        let Ok(life) = life else { return Ok(()) };
        let pause = is_over(sandbox) && pauses;
        let is_live = matches!(*life, Residency::Live(_));
        if !(pause || is_live && self.is_idle(sandbox)) {
            return Ok(());
        }
        let files_only = pause && sandbox.settings.files_only && self.can_restart(sandbox).await?;
        let how = SaveMode { pause, files_only, ..SaveMode::default() };
        let saving = self.clone().save_now(sandbox.clone(), life, how);
        let saved = to_its_end(async move {
            let _place = place;
            saving.await
        });
        let saved = saved.await;
        if pause {
            let result = if saved.is_ok() { "ok" } else { "failed" };
            self.record_own("pause at the end of its life", sandbox, result, None);
        }
        saved
    }

    /// Whether a sandbox can lose its memory at its end. One that cannot keeps it, and is paused
    /// all the same.
    async fn can_restart(&self, sandbox: &Sandbox) -> Result<bool, ErrorResponse> {
        match self.base_guest(sandbox).await {
            Err(refusal) if refusal.status == StatusCode::BAD_REQUEST => {
                tracing::warn!(id = sandbox.id, why = refusal.message, "paused with its memory");
                Ok(false)
            }
            found => found.map(|_| true),
        }
    }

    /// Removes unreferenced objects from the store at intervals. Open ones stay readable.
    async fn collect_garbage(self: Arc<Self>) {
        if lock(&self.collected_at).elapsed() < self.config.gc_interval
            || !self.has_garbage.swap(false, Ordering::Relaxed)
        {
            return;
        }
        *lock(&self.collected_at) = Instant::now();
        let this = self.clone();
        let collecting = blocking(move || {
            let place: Reference = state_reference(&this.config.dir, "any")
                .parse()
                .map_err(|error| internal(&error))?;
            let store = place.place().store().map_err(|error| internal(&error))?;
            store.gc().map_err(|error| internal(&error))
        });
        match collecting.await {
            Ok(gone) => {
                tracing::debug!(files = gone.files, bytes = gone.bytes, "collected garbage")
            }
            Err(_) => self.has_garbage.store(true, Ordering::Relaxed),
        }
    }

    /// Saves every live sandbox, when the server ends; whether all of them are. A save that is
    /// refused for now is tried again: servers that the fleet agrees over may be away for a moment.
    pub(crate) async fn save_all(self: &Arc<Self>) -> bool {
        self.save_all_within(SAVE_ALL_TIMEOUT, self.config.call_timeout).await
    }

    /// The same with a limit for retries. Calls that still run may end within it or within the rest
    /// of `call_limit`, whichever is longer.
    pub(crate) async fn save_all_within(
        self: &Arc<Self>,
        limit: Duration,
        call_limit: Duration,
    ) -> bool {
        let mut all: Vec<_> = {
            let all = lock(&self.all);
            self.ending.store(true, Ordering::Relaxed);
            all.values().cloned().collect()
        };
        // A call that hangs delays no save of another sandbox.
        all.sort_by_cached_key(|sandbox| sandbox.life.try_lock().is_err());
        let calls_end = Instant::now() + limit;
        // Waits for calls take nothing from the time for retries.
        let mut until = calls_end;
        let mut complete = true;
        for sandbox in all {
            loop {
                let waiting = Instant::now();
                let life = Self::wait_for_calls(&sandbox, calls_end, call_limit).await;
                until += waiting.elapsed();
                let saved = match life {
                    Ok(life) => self.save_at_end(&sandbox, life).await,
                    Err(refusal) => Err(refusal),
                };
                let Err(refusal) = saved else { break };
                if !lock(&self.all).contains_key(&sandbox.id) {
                    // A client has paused or ended it since then, or another host has it: nothing
                    // is lost here.
                    break;
                }
                // A save of unknown outcome is made again without harm.
                if !(refusal.later || refusal.is_unknown()) || Instant::now() >= until {
                    tracing::error!(
                        id = sandbox.id,
                        why = refusal.message,
                        "a sandbox is not saved: its calls since the last save are lost"
                    );
                    complete = false;
                    break;
                }
                tokio::time::sleep(SAVE_RETRY_INTERVAL).await;
            }
        }
        self.remove_killed_records(until).await;
        complete
    }

    /// Sandboxes that are live, or are locked by a call or a save.
    pub(crate) fn count_unsaved(&self) -> usize {
        let is_unsaved = |sandbox: &&Arc<Sandbox>| {
            sandbox.life.try_lock().map_or(true, |life| matches!(*life, Residency::Live(_)))
        };
        lock(&self.all).values().filter(is_unsaved).count()
    }

    /// The life of a sandbox of an ending server, once its calls have ended. They have until
    /// `calls_end`, or until the one that runs reaches `call_limit`.
    async fn wait_for_calls(
        sandbox: &Sandbox,
        calls_end: Instant,
        call_limit: Duration,
    ) -> Result<OwnedMutexGuard<Residency>, ErrorResponse> {
        let left = |ran| call_limit.saturating_sub(ran);
        let rest = sandbox.commands.running_time().map_or(Duration::ZERO, left);
        // A call that reaches its limit takes a moment to end.
        let rest = rest.saturating_add(MIN_CALL_END_TIMEOUT);
        let until = calls_end.max(deadline_after(Instant::now(), rest));
        let locking = tokio::time::timeout_at(until.into(), sandbox.life.clone().lock_owned());
        locking.await.map_err(|_| {
            let message = "a call of the sandbox did not end in time";
            ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, message)
        })
    }

    /// Strikes out killed sandboxes that are in the ledger still, when the server ends: the next
    /// one, or another host, would have them again.
    async fn remove_killed_records(&self, until: Instant) {
        let left: Vec<_> = lock(&self.killed).values().cloned().collect();
        for sandbox in left {
            while !sandbox.record_removed.load(Ordering::Acquire) {
                let Err(refusal) = self.remove_record(&sandbox).await else { break };
                if Instant::now() >= until {
                    let (id, why) = (&sandbox.id, refusal.message);
                    tracing::error!(id, why, "a killed sandbox is in the ledger, and comes back");
                    break;
                }
                tokio::time::sleep(SAVE_RETRY_INTERVAL).await;
            }
        }
    }
}
