//! The admission of new sandboxes: how many a tenant may have.
//!
//! Promises: no tenant has more sandboxes on this server than its limit. In a fleet the limit is for all hosts, and paused
//! sandboxes count. Hosts that admit at the same moment may exceed it together, by as much as [`Ledger::elsewhere`] is late.
//! A sandbox that the ledger has no more does not count.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hyper::StatusCode;

#[cfg(doc)]
use super::ledger::Ledger;
use super::record::SandboxRecord;
use super::registry::{Sandboxes, lock, to_its_end};
use super::sandbox::Sandbox;
use crate::error_response::ErrorResponse;

const TOO_MANY: StatusCode = StatusCode::TOO_MANY_REQUESTS;

impl Sandboxes {
    /// Takes new sandboxes in, all of them or none.
    pub(super) async fn admit(
        self: &Arc<Self>,
        new: Vec<Arc<Sandbox>>,
    ) -> Result<(), ErrorResponse> {
        if let Err(refusal) = self.take_in(&new, None) {
            let Some(first) = new.first().filter(|_| refusal.status == TOO_MANY) else {
                return Err(refusal);
            };
            // The counts of other hosts are late by a moment: the ledger decides.
            let known =
                self.ledger.sandboxes_of(&first.tenant, self.config.max_sandboxes + 1).await?;
            self.take_in(&new, Some(&known))?;
        }
        let this = self.clone();
        to_its_end(async move {
            let entered = this.ledger.enter(&new).await;
            if entered.is_err() {
                for sandbox in &new {
                    lock(&this.all).remove(&sandbox.id);
                    // Their entries are removed; no client has learnt of the others.
                    let _ = this.ledger.gone(sandbox).await;
                }
            }
            entered
        })
        .await
    }

    /// Takes new sandboxes in if their tenant may have them. `known` are the tenant's sandboxes in the ledger; without them the
    /// counts of the fleet are used.
    fn take_in(
        &self,
        new: &[Arc<Sandbox>],
        known: Option<&[SandboxRecord]>,
    ) -> Result<(), ErrorResponse> {
        let Some(first) = new.first() else { return Ok(()) };
        let mut all = lock(&self.all);
        if self.ending.load(Ordering::Relaxed) {
            let message = "this server is ending, and makes no sandbox; try again";
            return Err(ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, message));
        }
        // A call of one that was killed may run on, with all of its memory.
        let killed = lock(&self.killed);
        let own = all.iter().map(|(id, sandbox)| (id, &sandbox.tenant)).chain(killed.iter());
        let own = own.filter(|(_, tenant)| **tenant == first.tenant).map(|(id, _)| id.as_str());
        let here = own.clone().count();
        let elsewhere = match known {
            None => self.ledger.elsewhere(&first.tenant, own),
            Some(known) => {
                let here = |id: &String| all.contains_key(id) || killed.contains_key(id);
                Some(known.iter().filter(|record| !here(&record.id)).count())
            }
        };
        let most = self.config.max_sandboxes;
        let own = elsewhere.map_or(usize::MAX, |elsewhere| here + elsewhere);
        if own.saturating_add(new.len()) > most {
            let message = format!(
                "a tenant may have {most} sandboxes, paused ones included, and has {own}; kill some"
            );
            return Err(ErrorResponse::busy(TOO_MANY, message));
        }
        drop(killed);
        all.extend(new.iter().map(|sandbox| (sandbox.id.clone(), sandbox.clone())));
        Ok(())
    }
}
