//! How sandboxes end, and what is done for those that nobody calls: killing, sweeping, tidying, and saving all when the server ends.
//!
//! What it promises: one that was killed is gone for everybody at once, also while a call of it lasts; nothing that was saved is
//! removed while something names it.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use afresh::Reference;

use super::connect::Failed;
use super::ledger::internal;
use super::one::{Life, Sandbox};
use super::registry::{Sandboxes, blocking, lock};
use super::template::kept;
use crate::refusal::Refusal;

/// How long a client waits for the end of a sandbox that is being called.
const ENDING: Duration = Duration::from_secs(1);
/// Longer than a sandbox goes on by itself before others get their turn.
const SLICE: Duration = Duration::from_millis(200);
/// How often, and after how long each time, it is tried again to strike one out.
const TRIES: u32 = 720;
const LATER: Duration = Duration::from_secs(5);

/// A sandbox that is being killed, for as long as its end may take.
struct Killed {
    all: Arc<Mutex<HashSet<String>>>,
    id: String,
}

impl Killed {
    /// None if somebody kills it already.
    fn begin(all: &Arc<Mutex<HashSet<String>>>, id: &str) -> Option<Self> {
        let first = lock(all).insert(id.to_owned());
        first.then(|| Self { all: all.clone(), id: id.to_owned() })
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        lock(&self.all).remove(&self.id);
    }
}

/// Whether nobody calls a sandbox. One that goes on by itself just now is waited for.
async fn is_free(sandbox: &Sandbox) -> bool {
    match sandbox.commands.is_slicing() {
        true => tokio::time::timeout(SLICE, sandbox.life.lock()).await.is_ok(),
        false => sandbox.life.try_lock().is_ok(),
    }
}

impl Sandboxes {
    /// Ends a sandbox, and forgets it.
    pub(super) async fn kill(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<(), Refusal> {
        // Before it is missed anywhere, and until the ledger has no entry of it.
        let Some(killed) = Killed::begin(&self.killed, &sandbox.id) else {
            return Err(Sandbox::not_found(&sandbox.id));
        };
        if lock(&self.all).remove(&sandbox.id).is_none() {
            return Err(Sandbox::not_found(&sandbox.id));
        }
        let (this, sandbox) = (self.clone(), sandbox.clone());
        let ending = tokio::spawn(async move {
            *sandbox.life.clone().lock_owned().await = Life::Gone;
            sandbox.commands.end(&Failed::new("aborted", "the sandbox was killed"));
            let struck = this.strike(&sandbox).await;
            if struck.is_err() {
                tokio::spawn(this.strike_later(sandbox, killed));
            }
            struck
        });
        // Nobody finds it any more; a call that is under way may last, and is not waited for.
        match tokio::time::timeout(ENDING, ending).await {
            Ok(Ok(ended)) => ended,
            Ok(Err(error)) => Err(internal(&error)),
            Err(_) => Ok(()),
        }
    }

    /// Strikes what was killed out of the books, and then from the store.
    async fn strike(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<(), Refusal> {
        self.ledger.gone(sandbox).await?;
        let (this, name) = (self.clone(), format!("sandbox-{}", sandbox.id));
        blocking(move || {
            this.untag(&name);
            Ok(())
        })
        .await
    }

    /// The same, once whoever keeps the books answers again. Until then nobody takes it up from them here.
    async fn strike_later(self: Arc<Self>, sandbox: Arc<Sandbox>, _killed: Killed) {
        for _ in 0..TRIES {
            tokio::time::sleep(LATER).await;
            if self.strike(&sandbox).await.is_ok() {
                return;
            }
        }
        tracing::error!(id = sandbox.id, "a sandbox that was killed is still in the books");
    }

    /// Takes a name out of the store, if it is there.
    pub(super) fn untag(&self, name: &str) {
        let place: Result<Reference, _> = kept(&self.config.dir, name).parse();
        if let Ok(store) = place.map_err(drop).and_then(|r| r.place().store().map_err(drop)) {
            // A sandbox that was never saved has none.
            let _ = store.untag(name);
            self.litter.store(true, Ordering::Relaxed);
        }
    }

    /// Ends those whose time is over, and saves those that nobody has called for a while.
    pub(crate) async fn sweep(self: &Arc<Self>) {
        if !self.ledger.safe() {
            return;
        }
        let now = SystemTime::now();
        let all: Vec<_> = lock(&self.all).values().cloned().collect();
        for sandbox in all {
            let times = *sandbox.times();
            let over = times.ends <= now;
            let idle = times.used.elapsed() >= self.config.idle_timeout
                && !sandbox.branched.load(Ordering::Relaxed)
                && !sandbox.commands.is_driven()
                && !sandbox.commands.in_use();
            // One that is being called gets its turn later.
            let result = if times.paused || !(over || idle) || !is_free(&sandbox).await {
                Ok(())
            } else if over {
                match times.pause_at_end {
                    true => self.save(&sandbox, true, false).await,
                    false => self.kill(&sandbox).await,
                }
            } else if sandbox.life.try_lock().is_ok_and(|life| matches!(*life, Life::Live(_))) {
                self.save(&sandbox, false, false).await
            } else {
                Ok(())
            };
            if let Err(refusal) = result {
                tracing::warn!(id = sandbox.id, why = refusal.message, "not saved or ended");
            }
        }
        // Saves wait for it, but no end of a sandbox's time.
        tokio::spawn(self.clone().tidy());
    }

    /// Removes from the store what nothing names any more, once in a while. What is open stays readable.
    async fn tidy(self: Arc<Self>) {
        if lock(&self.tidied).elapsed() < self.config.tidy_interval
            || !self.litter.swap(false, Ordering::Relaxed)
        {
            return;
        }
        *lock(&self.tidied) = Instant::now();
        let this = self.clone();
        let tidied = blocking(move || {
            let place: Reference =
                kept(&this.config.dir, "any").parse().map_err(|error| internal(&error))?;
            let store = place.place().store().map_err(|error| internal(&error))?;
            store.gc().map_err(|error| internal(&error))
        });
        match tidied.await {
            Ok(gone) => tracing::debug!(files = gone.files, bytes = gone.bytes, "tidied"),
            Err(_) => self.litter.store(true, Ordering::Relaxed),
        }
    }

    /// Saves every live sandbox, when the server ends.
    pub(crate) async fn save_all(self: &Arc<Self>) {
        let all: Vec<_> = {
            let all = lock(&self.all);
            self.ending.store(true, Ordering::Relaxed);
            all.values().cloned().collect()
        };
        for sandbox in all {
            let paused = sandbox.times().paused;
            if let Err(refusal) = self.save(&sandbox, paused, true).await {
                tracing::error!(id = sandbox.id, why = refusal.message, "a sandbox is lost");
            }
        }
    }
}
