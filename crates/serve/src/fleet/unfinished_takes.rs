//! Sandboxes that this host noted as its own, and does not hold: their making or taking had no
//! answer, or ended in between.
//!
//! Promises: each is released by this host, which then owns no entry without holding the sandbox.
//! One that is taken again meanwhile is kept. May break it: more than [`MAX_UNFINISHED`] at a time;
//! the others are swept when this host ends.

use std::collections::BTreeSet;

use super::Fleet;
use super::nats::{self, NatsError};
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
            unfinished.insert(id.to_owned());
        }
    }

    /// Releases unfinished sandboxes.
    pub(super) async fn release_unfinished(&self) {
        let all: BTreeSet<String> =
            lock(&self.unfinished).iter().take(MAX_RELEASES).cloned().collect();
        for id in all {
            // Nothing else takes the sandbox.
            let _turn = self.turn(&id).lock().await;
            let is_held = || Some(self.host()?.sandboxes()?.has(&id));
            if !lock(&self.unfinished).contains(&id) || is_held() == Some(true) {
                continue;
            }
            match self.release_own(&id).await {
                Ok(()) => {
                    lock(&self.unfinished).remove(&id);
                }
                Err(error) => {
                    tracing::debug!(%error, id, "a sandbox is released later");
                    // NATS is asked once in a turn while it does not answer.
                    return;
                }
            }
        }
    }

    async fn release_own(&self, id: &str) -> Result<(), NatsError> {
        let life = self.life();
        match nats::find(&self.links.hosts, &self.note_key(id)).await? {
            Some(note) => self.sweep_note(&life, note).await,
            // The entry is changed after the note is there.
            None => Ok(()),
        }
    }
}
