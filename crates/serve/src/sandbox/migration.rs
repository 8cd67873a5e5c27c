//! Sandboxes that move between the hosts of a fleet: their templates, and how hosts take and release them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use afresh::{Encoding, Reference};
use futures_util::StreamExt;
use hyper::HeaderMap;

use super::config::{SandboxConfig, Template};
use super::connect::ConnectError;
use super::keys::same;
use super::ledger::Ledger;
use super::record::SandboxRecord;
use super::registry::{Sandboxes, lock};
use super::routes::TOKENS;
use super::sandbox::{Residency, Sandbox};
use crate::error_response::ErrorResponse;
use crate::fleet::{Fleet, TakeOutcome, no_template, template_of};

/// Entries that are settled at the same time.
const MAX_CONCURRENT_ENTRIES: usize = 64;

/// A fleet, seen from a thread that opens templates.
pub(super) struct FleetHandle {
    fleet: Arc<Fleet>,
    runtime: tokio::runtime::Handle,
}

impl FleetHandle {
    pub(super) fn new(fleet: &Arc<Fleet>) -> Self {
        Self { fleet: fleet.clone(), runtime: tokio::runtime::Handle::current() }
    }

    /// The fleet's ledger. Records that an earlier process kept here are not needed any more.
    pub(super) fn ledger(&self, config: &SandboxConfig) -> Result<Ledger, afresh::Cause> {
        if self.fleet.store().is_none() {
            return Err(
                "sandboxes of a fleet need a store that all its hosts see: give --store".into()
            );
        }
        let place: Reference = super::template::state_reference(&config.dir, "any").parse()?;
        if let Ok(store) = place.place().store() {
            for tag in store.tags()? {
                if tag.name.starts_with("sandbox-") || tag.name.starts_with("snap-") {
                    store.untag(&tag.name)?;
                }
            }
        }
        Ok(Ledger::Fleet(self.fleet.clone()))
    }

    /// Has a template be here under `kept`, the same as on all other hosts: fetched if one of them has made it, else made.
    pub(super) fn template(
        &self,
        template: &Template,
        library: Option<&str>,
        kept: &Reference,
        make: impl FnOnce() -> Result<(), afresh::Cause>,
    ) -> Result<String, afresh::Cause> {
        let guest = std::fs::read(&template.reference);
        let guest = guest.unwrap_or_else(|_| template.reference.clone().into_bytes());
        let how = format!(
            "{} {} {} {} {} {:?} {:?} {library:?}",
            env!("CARGO_PKG_VERSION"),
            template.language,
            template.linux,
            template.memory,
            template.files,
            template.warm,
            template.setup,
        );
        let parts: [&[u8]; 3] = [template.name.as_bytes(), &guest, how.as_bytes()];
        let from = self.fleet.store().ok_or("a fleet without a store has no templates")?;
        let pull = |digest: &str| -> Result<(), afresh::Cause> {
            let store = kept.place().create()?;
            from.pull(&store, digest, kept.name(), Encoding::Raw, &mut |_| {})?;
            Ok(())
        };
        if let Some(digest) = self.runtime.block_on(self.fleet.template(&parts))? {
            pull(&digest)?;
            return Ok(digest);
        }
        make()?;
        let store = kept.place().store()?;
        let own = from.keep(&store, &store.load(kept.name())?, Encoding::Raw, &mut |_| {})?;
        let digest = self.runtime.block_on(self.fleet.offer(&parts, &own.to_string()))?;
        if digest != own.to_string() {
            // Another host was faster, and all use its template.
            pull(&digest)?;
        }
        Ok(digest)
    }
}

impl Sandboxes {
    /// Whether this host may answer for a sandbox that is here.
    pub(crate) fn check(&self, id: &str) -> Result<(), ErrorResponse> {
        match self.any(id) {
            Some(sandbox) => self.ledger.check(&sandbox),
            None => Ok(()),
        }
    }

    /// Whether a request may have a sandbox come here: its key is the tenant's, or it shows the token of one that runs.
    pub(crate) fn may(&self, headers: &HeaderMap, record: &SandboxRecord, inside: bool) -> bool {
        if !inside {
            return self.config.keys.tenant(headers).is_ok_and(|tenant| *tenant == *record.tenant);
        }
        let shown = TOKENS.iter().filter_map(|name| headers.get(*name));
        !record.paused
            && shown.into_iter().any(|shown| same(shown.as_bytes(), record.token.as_bytes()))
    }

    /// Sources of sandboxes on this host: templates by name and by digest, and digests of snapshots.
    pub(crate) fn held_sources(&self) -> Vec<String> {
        let names = self.templates.iter().map(|template| template_of(&template.config.name));
        let templates = self.templates.iter().map(|template| template.digest.clone());
        let snapshots: Vec<String> = lock(&self.opened).keys().cloned().collect();
        names.chain(templates).chain(snapshots).collect()
    }

    /// The thing that a host should hold to make a sandbox of this template or snapshot.
    pub(crate) async fn held_for(
        &self,
        fleet: &Fleet,
        tenant: &str,
        name: &str,
    ) -> Result<String, ErrorResponse> {
        let named = self.templates.iter().find(|template| template.config.name == name);
        if let Some(named) = named {
            return Ok(named.digest.clone());
        }
        let snapshot = fleet.snapshot(tenant, name).await?;
        Ok(snapshot.map_or_else(|| self.templates[0].digest.clone(), |(record, _)| record.id))
    }

    /// Takes a sandbox without an owner; returns the life of its host, if it has one.
    pub(crate) async fn take(
        &self,
        fleet: &Arc<Fleet>,
        id: &str,
    ) -> Result<Option<String>, ErrorResponse> {
        let _turn = fleet.turn(id).lock().await;
        if self.has(id) {
            return Ok(None);
        }
        let able = |record: &SandboxRecord| match self.has_template(&record.template) {
            true => Ok(()),
            false => Err(no_template(&record.template)),
        };
        match fleet.take(id, able).await? {
            TakeOutcome::Theirs(life) => Ok(Some(life)),
            TakeOutcome::Missing => Ok(None),
            TakeOutcome::Ours(owned) => {
                let sandbox = Sandbox::recorded(owned.record);
                *lock(&sandbox.standing.from) = owned.anchor.state.clone();
                *sandbox.standing.anchor.lock().await = Some(owned.anchor);
                let mut all = lock(&self.all);
                // Under the lock that `doubt_all` takes after it gave the life up: one of the two sees the other.
                sandbox.standing.doubt.store(!fleet.lives(&owned.life), Ordering::Release);
                all.insert(id.to_owned(), Arc::new(sandbox));
                Ok(None)
            }
        }
    }

    /// The lease is lost: calls of these sandboxes are refused until their owner is known.
    pub(crate) fn doubt_all(&self) {
        for sandbox in lock(&self.all).values() {
            sandbox.standing.doubt.store(true, Ordering::Release);
        }
    }

    /// Enters doubtful sandboxes under this host's new life, and drops those that another host has taken.
    pub(crate) async fn settle(&self, fleet: &Arc<Fleet>) {
        let all: Vec<_> = lock(&self.all).values().cloned().collect();
        let doubtful = all.into_iter().filter(|one| one.standing.doubt.load(Ordering::Acquire));
        // Many at a time: thousands, one after another, could take longer than the new lease lasts.
        let settling = futures_util::stream::iter(doubtful);
        settling
            .for_each_concurrent(MAX_CONCURRENT_ENTRIES, |one| self.settle_one(fleet, one))
            .await;
    }

    async fn settle_one(&self, fleet: &Arc<Fleet>, sandbox: Arc<Sandbox>) {
        let mut anchor = sandbox.standing.anchor.lock().await;
        let kept = match anchor.as_mut() {
            Some(anchor) => fleet.keep(anchor, sandbox.record()).await,
            None => Ok(None),
        };
        drop(anchor);
        match kept {
            Ok(Some(life)) => {
                let _all = lock(&self.all);
                // As when one is taken: a life that was given up settles nothing.
                if fleet.lives(&life) {
                    sandbox.standing.doubt.store(false, Ordering::Release);
                }
            }
            Ok(None) => {
                tracing::warn!(id = sandbox.id, "another host has this sandbox now");
                lock(&self.all).remove(&sandbox.id);
                tokio::spawn(async move {
                    // A call that is under way ends first; its answer is refused.
                    *sandbox.life.lock().await = Residency::Moved;
                    let why = "another host has the sandbox now";
                    sandbox.commands.end(&ConnectError::new("unavailable", why));
                });
            }
            Err(refusal) => {
                tracing::warn!(id = sandbox.id, why = refusal.message, "still in doubt");
            }
        }
    }
}
