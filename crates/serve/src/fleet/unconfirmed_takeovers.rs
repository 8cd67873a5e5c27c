//! Sandboxes that this host noted as its own, and does not hold: their making or taking had no
//! answer, or ended in between.
//!
//! Promises: each is released by this host, which then owns no entry without holding the sandbox.
//! It stays in doubt until its entry was read back and released. No calls of it were undone by
//! this, since this host has answered none. One that is taken again meanwhile is kept. May break
//! it: more than [`MAX_UNFINISHED`] at a time; the others are swept when this host ends.

use super::Fleet;
use super::clock::now;
use super::nats::{self, NatsError};
use super::owned_index::{SweptEntry, UNREADABLE_PAUSE};
use super::policy::MonotonicTime;
use crate::lock::lock;

/// Maximum sandboxes that are remembered.
const MAX_UNFINISHED: usize = 65_536;
/// Sandboxes that are released in one turn of the watch.
const MAX_RELEASES: usize = 64;

/// Notes a sandbox as unfinished when it is dropped, unless the work was finished.
pub(super) struct TakeGuard<'a> {
    fleet: &'a Fleet,
    id: &'a str,
    finished: bool,
}

impl<'a> TakeGuard<'a> {
    pub(super) fn new(fleet: &'a Fleet, id: &'a str) -> Self {
        Self { fleet, id, finished: false }
    }

    /// The entry does not name this host, or this host holds the sandbox.
    pub(super) fn finish(mut self) {
        self.finished = true;
        lock(&self.fleet.unfinished).remove(self.id);
    }
}

impl Drop for TakeGuard<'_> {
    fn drop(&mut self) {
        if !self.finished {
            self.fleet.note_unfinished(self.id);
        }
    }
}

impl Fleet {
    /// The entry of a sandbox may name this host, which does not hold it.
    pub(super) fn note_unfinished(&self, id: &str) {
        let mut unfinished = lock(&self.unfinished);
        if unfinished.len() < MAX_UNFINISHED {
            unfinished.insert(id.to_owned(), now());
        }
    }

    /// Whether the entry of a sandbox may name this host, which does not hold it.
    pub(super) fn is_unfinished(&self, id: &str) -> bool {
        lock(&self.unfinished).contains_key(id)
    }

    /// Releases unfinished sandboxes.
    pub(super) async fn release_unfinished(&self) {
        let at = now();
        let mut all: Vec<(MonotonicTime, String)> = lock(&self.unfinished)
            .iter()
            .filter(|(_, due)| **due <= at)
            .map(|(id, due)| (*due, id.clone()))
            .collect();
        // One that failed comes last.
        all.sort_unstable();
        for (_, id) in all.into_iter().take(MAX_RELEASES) {
            // Nothing else takes the sandbox.
            let _turn = self.turn(&id).lock().await;
            let is_held = || Some(self.host()?.sandboxes()?.has(&id));
            if !self.is_unfinished(&id) || is_held() == Some(true) {
                continue;
            }
            let released = self.release_own(&id).await;
            let pause = match &released {
                Ok(SweptEntry::Released | SweptEntry::Other) => {
                    lock(&self.unfinished).remove(&id);
                    continue;
                }
                Ok(SweptEntry::Unreadable) => UNREADABLE_PAUSE,
                Ok(_) => self.parameters.renewal(),
                Err(error) => {
                    tracing::debug!(%error, id, "a sandbox is released later");
                    self.parameters.renewal()
                }
            };
            if let Some(due) = lock(&self.unfinished).get_mut(&id) {
                *due = now() + pause;
            }
            if released.is_err_and(|error| error.concerns_all()) {
                // NATS is asked once in a turn while it does not answer.
                return;
            }
        }
    }

    async fn release_own(&self, id: &str) -> Result<SweptEntry, NatsError> {
        let life = self.life();
        match nats::find(&self.links.hosts, &self.note_key(id)).await? {
            Some(note) => self.sweep_note(&life, note).await,
            // The entry is changed after the note is there.
            None => Ok(SweptEntry::Other),
        }
    }
}
