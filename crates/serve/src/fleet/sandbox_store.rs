//! The ledger of a fleet as the store of its sandboxes, and how this host takes sandboxes and
//! confirms that it owns them.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, UNIX_EPOCH};

use afresh::{Encoding, Reference, SavedSnapshot};
use async_trait::async_trait;
use futures_util::StreamExt;
use hyper::StatusCode;

use super::Fleet;
use super::placement_store::TakeOutcome;
use super::routing::no_template;
use crate::disk_full::is_disk_full;
use crate::error_response::ErrorResponse;
use crate::failure::{describe, internal};
use crate::lock::lock;
use crate::sandbox::records::store::{
    CreationKey, KeyState, NewEntry, RecordedSandboxes, SandboxHost, SandboxRecord, SandboxStore,
    SavedState, SnapshotRecord, State, StoredSandbox, StoredSnapshot, TenantUse, check_alive,
    state_reference,
};

/// Maximum bytes of a difference that is fetched whole, since its base is here already. Pages of a
/// larger one are fetched when they are touched.
const MAX_WHOLE_FETCH_BYTES: u64 = 16 << 20;
/// Entries that are settled at the same time.
const MAX_CONCURRENT_ENTRIES: usize = 64;

#[async_trait]
impl SandboxStore for Fleet {
    /// None: the ledger has them all. Names that an earlier process kept here are removed.
    fn records(&self, dir: &Path) -> Result<Vec<SandboxRecord>, afresh::Cause> {
        if self.store().is_none() {
            return Err(
                "sandboxes of a fleet need a store that all its hosts see: give --store".into()
            );
        }
        let place: Reference = state_reference(dir, "any").parse()?;
        if let Ok(store) = place.place().store() {
            for tag in store.tags()? {
                if tag.name.starts_with("sandbox-") || tag.name.starts_with("snap-") {
                    store.untag(&tag.name)?;
                }
            }
        }
        Ok(Vec::new())
    }

    fn new_id(&self, tenant: &str) -> Result<String, ErrorResponse> {
        Self::id(tenant)
    }

    fn template(
        &self,
        parts: &[&[u8]],
        kept: &Reference,
        make: &dyn Fn() -> Result<(), afresh::Cause>,
    ) -> Result<String, afresh::Cause> {
        let from = self.store().ok_or("a fleet without a store has no templates")?;
        let pull = |digest: &str| -> Result<(), afresh::Cause> {
            let store = kept.place().create()?;
            from.pull(&store, digest, kept.name(), Encoding::Raw, &mut |_| {})?;
            Ok(())
        };
        if let Some((digest, made)) = self.runtime.block_on(self.shared_template(parts))? {
            let made = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(made));
            tracing::info!(state = kept.name(), digest, %made, "uses a state that the fleet shares");
            pull(&digest)?;
            return Ok(digest);
        }
        make()?;
        let store = kept.place().store()?;
        let own = from.keep(&store, &store.load(kept.name())?, Encoding::Raw, &mut |_| {})?;
        let digest = self.runtime.block_on(self.offer(parts, &own.to_string()))?;
        if digest != own.to_string() {
            // Another host was faster, and all use its template.
            pull(&digest)?;
        }
        Ok(digest)
    }

    fn check(&self, sandbox: &dyn StoredSandbox) -> Result<(), ErrorResponse> {
        self.check_lease()?;
        if sandbox.entry().doubt.load(Ordering::Acquire) {
            let why = "it is not known yet whether the sandbox moved to another host; try again";
            return Err(ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, why));
        }
        Ok(())
    }

    fn is_owner(&self) -> bool {
        self.safe()
    }

    fn is_leaving(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    fn releases(&self) -> bool {
        true
    }

    fn elsewhere(&self, tenant: &str, here: &mut dyn Iterator<Item = &str>) -> Option<usize> {
        self.tenants.elsewhere(tenant, here)
    }

    fn use_elsewhere(&self, tenant: &str, window: u64) -> TenantUse {
        self.tenant_use(tenant, window)
    }

    async fn create(
        &self,
        sandbox: &dyn StoredSandbox,
        mut entry: NewEntry,
    ) -> Result<(), ErrorResponse> {
        let record = sandbox.record();
        let Some(key) = record.key.clone() else {
            *entry.owned_entry = Some(self.enter(record).await?);
            return Ok(());
        };
        let revision = self.claim(&record, &key).await?;
        match self.enter(record.clone()).await {
            Ok(owned_entry) => *entry.owned_entry = Some(owned_entry),
            Err(refusal) => {
                self.release_claim(&record).await;
                return Err(refusal);
            }
        }
        self.confirm_claim(&record, &key, revision).await
    }

    async fn key_state(
        &self,
        tenant: &str,
        key: &CreationKey,
    ) -> Result<Option<KeyState>, ErrorResponse> {
        self.state_of_key(tenant, key).await.map(Some)
    }

    fn save_state(
        &self,
        dir: &Path,
        saved: &SavedSnapshot,
        bytes: u64,
    ) -> Result<SavedState, ErrorResponse> {
        let place: Reference =
            state_reference(dir, "any").parse().map_err(|error| internal(&error))?;
        let store = place.place().store().map_err(|error| internal(&error))?;
        let state = Some(self.send(&store, &saved.snapshot, bytes)?);
        Ok(SavedState { state, ..SavedState::default() })
    }

    async fn update(
        &self,
        sandbox: &dyn StoredSandbox,
        record: SandboxRecord,
        saved: Option<SavedState>,
        release: bool,
    ) -> Result<(), ErrorResponse> {
        let mut owned_entry = sandbox.entry().owned_entry.lock().await;
        check_alive(sandbox)?;
        let Some(owned_entry) = owned_entry.as_mut() else { return Err(ErrorResponse::host()) };
        let SavedState { state: new, replaces_guest } = saved.unwrap_or_default();
        if new.is_some() && !replaces_guest {
            // The guest may have ended: no later change may name an older state than this one.
            owned_entry.pending = new.clone();
        }
        self.check(sandbox)?;
        let state =
            new.or_else(|| owned_entry.pending.clone()).or_else(|| owned_entry.state.clone());
        let changed = self.change(owned_entry, record, state, release).await;
        if changed.is_err() && release {
            // The change may have been made, and another host may have taken the sandbox since.
            sandbox.entry().doubt.store(true, Ordering::Release);
        }
        changed
    }

    fn has_record(&self, _: &dyn StoredSandbox) -> bool {
        true
    }

    async fn remove(&self, sandbox: &dyn StoredSandbox) -> Result<(), ErrorResponse> {
        match &*sandbox.entry().owned_entry.lock().await {
            Some(owned_entry) => {
                let erased = self.erase(sandbox.id(), owned_entry).await;
                if erased.is_err() && owned_entry.state.is_none() && owned_entry.pending.is_none() {
                    // One whose making failed is nowhere else.
                    self.note_unfinished(sandbox.id());
                }
                if erased.is_ok() {
                    self.release_claim(&sandbox.record()).await;
                }
                erased
            }
            None => Ok(()),
        }
    }

    fn source(&self, dir: &Path, sandbox: &dyn StoredSandbox) -> Result<String, ErrorResponse> {
        let name = sandbox.saved_name();
        let from = lock(&sandbox.entry().from).clone();
        let Some(state) = from else { return Ok(state_reference(dir, &name)) };
        let (place, is_here) = self.fetch(dir, &name, &state)?;
        if is_here {
            *lock(&sandbox.entry().from) = None;
        }
        Ok(place)
    }

    fn saved_here(&self, sandbox: &dyn StoredSandbox) {
        *lock(&sandbox.entry().from) = None;
    }

    async fn sandboxes_of(
        &self,
        tenant: &str,
        most: usize,
    ) -> Result<RecordedSandboxes, ErrorResponse> {
        self.entries_of(tenant, most).await
    }

    async fn create_snapshot(
        &self,
        snapshot: StoredSnapshot,
    ) -> Result<Vec<String>, ErrorResponse> {
        let state = snapshot.kept.state.as_ref().ok_or_else(ErrorResponse::host)?;
        self.enter_snapshot(&snapshot.record, state).await
    }

    async fn add_names(
        &self,
        record: &SnapshotRecord,
        names: &[String],
    ) -> Result<bool, ErrorResponse> {
        for name in names {
            if !self.add_name(record, name).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn remove_names(
        &self,
        record: &SnapshotRecord,
        names: &[String],
    ) -> Result<(), ErrorResponse> {
        for name in names {
            self.drop_name(record, name).await?;
        }
        Ok(())
    }

    async fn snapshot(
        &self,
        tenant: &str,
        name: &str,
    ) -> Result<Option<StoredSnapshot>, ErrorResponse> {
        let found = self.find_snapshot(tenant, name).await?;
        Ok(found.map(|(record, state)| StoredSnapshot {
            record,
            kept: SavedState { state: Some(state), ..SavedState::default() },
        }))
    }

    async fn snapshots(
        &self,
        tenant: &str,
        most: usize,
    ) -> Result<Vec<SnapshotRecord>, ErrorResponse> {
        self.snapshots_of(tenant, most).await
    }

    async fn remove_snapshot(&self, record: &SnapshotRecord) -> Result<(), ErrorResponse> {
        self.forget(record).await
    }

    fn snapshot_source(
        &self,
        dir: &Path,
        snapshot: &StoredSnapshot,
    ) -> Result<String, ErrorResponse> {
        let name = format!("snap-{}", snapshot.record.id);
        let here = state_reference(dir, &name);
        let Some(state) = &snapshot.kept.state else { return Ok(here) };
        let found = here.parse::<Reference>().ok();
        let found = found.and_then(|here| here.place().store().ok()?.resolve(&name).ok());
        match found {
            Some(_) => Ok(here),
            None => self.fetch(dir, &name, state).map(|(place, _)| place),
        }
    }
}

impl Fleet {
    /// Fetches a state if necessary; returns its place, and whether it is here now.
    fn fetch(
        &self,
        dir: &Path,
        name: &str,
        state: &State,
    ) -> Result<(String, bool), ErrorResponse> {
        if state.bytes > MAX_WHOLE_FETCH_BYTES {
            return Ok((self.place(state)?, false));
        }
        let here = state_reference(dir, name);
        let place: Reference = here.parse().map_err(|error| internal(&error))?;
        let store = place.place().create().map_err(|error| internal(&error))?;
        let from = self.store().ok_or_else(ErrorResponse::host)?;
        let pulled = from.pull(&store, &state.digest, name, Encoding::Raw, &mut |_| {});
        if let Err(error) = &pulled
            && is_disk_full(error)
        {
            // The sandbox needs no copy here: its pages come from the store of the fleet.
            tracing::warn!(why = describe(error), "a saved state is opened where it is");
            return Ok((self.place(state)?, false));
        }
        pulled.map_err(|error| {
            let why = describe(&error);
            tracing::error!(why, "a saved state does not come from the store of the fleet");
            ErrorResponse::busy(
                StatusCode::SERVICE_UNAVAILABLE,
                "the store of the fleet does not answer; try again",
            )
        })?;
        Ok((here, true))
    }

    /// Takes a sandbox without an owner to this host; returns the life of its host, if it has one.
    pub(crate) async fn take_here(
        &self,
        host: &dyn SandboxHost,
        id: &str,
    ) -> Result<Option<String>, ErrorResponse> {
        let _turn = self.turn(id).lock().await;
        if host.has(id) {
            return Ok(None);
        }
        let able = |record: &SandboxRecord| match host.has_template(&record.template) {
            true => Ok(()),
            false => Err(no_template(&record.template)),
        };
        match self.take(id, able).await? {
            TakeOutcome::Theirs(life) => Ok(Some(life)),
            TakeOutcome::Missing => Ok(None),
            TakeOutcome::Ours(owned) => {
                host.adopt(owned.record, owned.owned_entry, &|| self.is_alive(&owned.life));
                Ok(None)
            }
        }
    }

    /// Enters doubtful sandboxes under the new life of this host, and drops those that another host
    /// has taken.
    pub(super) async fn settle(&self, host: &dyn SandboxHost) {
        // Many at a time: thousands, one after another, could take longer than the new lease lasts.
        let settling = futures_util::stream::iter(host.doubtful());
        settling
            .for_each_concurrent(MAX_CONCURRENT_ENTRIES, |one| self.settle_one(host, one))
            .await;
    }

    async fn settle_one(&self, host: &dyn SandboxHost, sandbox: Arc<dyn StoredSandbox>) {
        let mut owned_entry = sandbox.entry().owned_entry.lock().await;
        let kept = match owned_entry.as_mut() {
            Some(owned_entry) => self.keep(owned_entry, sandbox.record()).await,
            None => Ok(None),
        };
        if let (Ok(None), Some(owned_entry)) = (&kept, owned_entry.as_ref()) {
            self.forget_owned(sandbox.id(), owned_entry.note).await;
        }
        drop(owned_entry);
        match kept {
            Ok(Some(life)) => host.confirm(&*sandbox, &|| self.is_alive(&life)),
            Ok(None) => {
                tracing::warn!(id = sandbox.id(), "another host has this sandbox now");
                host.give_up(sandbox.id());
            }
            Err(refusal) => {
                tracing::warn!(id = sandbox.id(), why = refusal.message, "still in doubt");
            }
        }
    }
}
