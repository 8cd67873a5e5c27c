//! Snapshots of sandboxes, which others are made from: how they are kept, found and forgotten.
//!
//! Promises: a saved state without a record is removed from the store again, even if its client
//! disconnects; after a server was killed, when the next one starts. No host admits more than a
//! tenant may have. A new sandbox has the options of the present template, such as `net`, also if
//! its snapshot is open with those before a reload.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use afresh::{Guest, Reference, SaveOptions, SavedSnapshot};

use crate::error_response::ErrorResponse;
use crate::failure::internal;
use crate::lock::lock;
use crate::sandbox::catalog::template::Warm;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::lifecycle::tasks::{blocking, to_its_end};
use crate::sandbox::records::record::{
    BuiltTemplate, SnapshotRecord, milliseconds, state_reference,
};
use crate::sandbox::records::store::{StoredSnapshot, max_listed};
use crate::sandbox::request_body::unknown_fields::UnknownFields;
use crate::sandbox::tenants::cpu_scheduler::CpuTurn;
use crate::sandbox::tenants::entry_size::check_inherited;
use crate::sandbox::tenants::quota::SnapshotReservation;
use crate::sandbox::tenants::stored_blobs::StoredState;

/// Guests of snapshots that are kept open for the next sandbox.
const MAX_OPEN_SNAPSHOTS: usize = 32;

/// The guest of a snapshot that is kept open.
pub(crate) struct OpenSnapshot {
    guest: Guest,
    /// The template whose options it has. A reload replaces templates, and with them grants.
    template: Weak<Warm>,
}

impl OpenSnapshot {
    fn new(template: &Arc<Warm>, guest: Guest) -> Self {
        Self { guest, template: Arc::downgrade(template) }
    }

    /// Whether it has the options of this template.
    fn is_of(&self, template: &Arc<Warm>) -> bool {
        // No other template gets the address while this refers to it.
        std::ptr::eq(self.template.as_ptr(), Arc::as_ptr(template))
    }
}

/// Bytes of what a saved state changes in the state that it was made from.
pub(crate) fn last_layer(saved: &SavedSnapshot) -> u64 {
    saved.snapshot.layers().last().map_or(0, afresh::store::Layer::size)
}

/// The form in which a state is kept.
pub(crate) struct SnapshotOptions {
    /// Names that it is found by, in addition to its id.
    pub(crate) names: Vec<String>,
    pub(crate) built: Option<BuiltTemplate>,
    /// Variables of sandboxes made from it.
    pub(crate) envs: BTreeMap<String, String>,
    /// Where their commands start.
    pub(crate) directory: Option<String>,
    /// Their commands without a user run as `root`.
    pub(crate) root: bool,
}

impl SnapshotOptions {
    /// As sandboxes of the same kind as this one.
    pub(crate) fn of_sandbox(sandbox: &Sandbox, names: Vec<String>) -> Self {
        let settings = &sandbox.settings;
        let (envs, directory) = (settings.envs.clone(), settings.directory.clone());
        Self { names, built: None, envs, directory, root: settings.root }
    }
}

impl Sandboxes {
    /// Saves a sandbox's present state as something that others can be made from.
    pub(crate) async fn keep(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        options: SnapshotOptions,
    ) -> Result<SnapshotRecord, ErrorResponse> {
        let SnapshotOptions { names, built, envs, directory, root } = options;
        check_inherited(&envs, directory.as_deref())?;
        let record = SnapshotRecord {
            version: Default::default(),
            id: self.ledger.new_id(&sandbox.tenant)?,
            tenant: sandbox.tenant.to_string(),
            template: sandbox.template.clone(),
            sandbox: sandbox.id.clone(),
            names,
            envs,
            directory,
            root,
            built,
            stored: 0,
            base: sandbox.base.clone(),
            unknown: UnknownFields::default(),
        };
        // States after steps of builds, which their tenant does not see, make room.
        let room = loop {
            match self.admit_snapshot(&sandbox.tenant).await {
                Err(refusal) if refusal.is_of_tenant() => {
                    if !self.forget_oldest_layer(&sandbox.tenant).await? {
                        return Err(refusal);
                    }
                }
                admitted => break admitted?,
            }
        };
        // The limit of waiting calls applies.
        to_its_end(self.clone().save_snapshot_as(sandbox.clone(), record, room)).await
    }

    /// Room for one more snapshot of a tenant.
    async fn admit_snapshot(
        &self,
        tenant: &Arc<str>,
    ) -> Result<SnapshotReservation, ErrorResponse> {
        self.count_stored(tenant).await?;
        self.check_stored(tenant, 0, 0)?;
        self.quota.room(&*self.ledger, &self.accounts.of(tenant), tenant).await
    }

    /// Checks the budget of saved states for a snapshot with this charge.
    async fn admit_saved(
        self: &Arc<Self>,
        tenant: &Arc<str>,
        state: &StoredState,
    ) -> Result<(), ErrorResponse> {
        let refused = || {
            let bytes = state.own_bytes();
            let counted = if state.is_counted() { bytes } else { 0 };
            self.check_stored(tenant, counted, bytes)
        };
        while let Err(refusal) = refused() {
            if !refusal.is_of_tenant() || !self.forget_oldest_layer(tenant).await? {
                return Err(refusal);
            }
        }
        Ok(())
    }

    async fn save_snapshot_as(
        self: Arc<Self>,
        sandbox: Arc<Sandbox>,
        mut record: SnapshotRecord,
        room: SnapshotReservation,
    ) -> Result<SnapshotRecord, ErrorResponse> {
        let name = format!("snap-{}", record.id);
        let (this, to) = (self.clone(), state_reference(&self.config.dir, &name));
        let own = sandbox.clone();
        let saving = self.with(&sandbox, move |session| {
            let to: Reference = to.parse().map_err(|error| internal(&error))?;
            let saved = session.save(&to, &SaveOptions::new()).map_err(|e| internal(&e))?;
            let store = to.place().store().map_err(|error| internal(&error))?;
            let state = this.charge_state(&own.tenant, &store, saved.id);
            let state = state.map_err(|error| internal(&*error))?;
            // An upload to the store of a fleet waits for the network.
            own.commands.with_turn(CpuTurn::rest);
            let bytes = last_layer(&saved);
            Ok((this.ledger.save_state(&this.config.dir, &saved, bytes)?, state))
        });
        let named = match saving.await {
            Ok((kept, state)) => {
                record.stored = state.bytes();
                match self.admit_saved(&sandbox.tenant, &state).await {
                    Ok(()) => {
                        // The order of builds is that in which they are recorded.
                        if let Some(built) = &mut record.built {
                            built.made = milliseconds(SystemTime::now());
                        }
                        let snapshot = StoredSnapshot { record: record.clone(), kept };
                        self.ledger.create_snapshot(snapshot).await.map(|names| (names, state))
                    }
                    Err(refusal) => Err(refusal),
                }
            }
            Err(refusal) => Err(refusal),
        };
        let (named, state) = match named {
            Ok(named) => named,
            Err(refusal) => return Err(self.discard_snapshot(record, name, refusal).await),
        };
        record.names = named;
        room.fill(&record.id, state);
        Ok(record)
    }

    /// Removes the rest of a snapshot that was refused.
    async fn discard_snapshot(
        self: Arc<Self>,
        record: SnapshotRecord,
        name: String,
        refusal: ErrorResponse,
    ) -> ErrorResponse {
        // Half a record counts as none, and a state without one would never be removed.
        let _ = self.ledger.remove_snapshot(&record).await;
        let _ = blocking(move || {
            self.untag(&name);
            Ok(())
        })
        .await;
        refusal
    }

    /// A snapshot of a tenant, by its id or its name.
    pub(crate) async fn snapshot(
        &self,
        tenant: &str,
        name: &str,
    ) -> Result<Option<StoredSnapshot>, ErrorResponse> {
        self.ledger.snapshot(tenant, name).await
    }

    /// The snapshots of a tenant.
    pub(crate) async fn snapshots(
        &self,
        tenant: &Arc<str>,
    ) -> Result<Vec<SnapshotRecord>, ErrorResponse> {
        let _place = self.list_place(tenant).await?;
        self.ledger.snapshots(tenant, max_listed(self.config.max_snapshots)).await
    }

    /// Removes a snapshot. Sandboxes that were made from it keep their state.
    pub(crate) async fn forget(
        self: &Arc<Self>,
        record: SnapshotRecord,
    ) -> Result<(), ErrorResponse> {
        lock(&self.opened).remove(&record.id);
        let this = self.clone();
        to_its_end(async move {
            this.ledger.remove_snapshot(&record).await?;
            this.quota.recount(&record);
            blocking(move || {
                this.untag(&format!("snap-{}", record.id));
                Ok(())
            })
            .await
        })
        .await
    }

    /// The guest of a snapshot with the options of a template, opened once for these.
    pub(crate) fn snapshot_guest(
        &self,
        warm: &Arc<Warm>,
        known: &StoredSnapshot,
    ) -> Result<Guest, ErrorResponse> {
        let id = &known.record.id;
        if let Some(open) = lock(&self.opened).get(id).filter(|open| open.is_of(warm)) {
            return Ok(open.guest.clone());
        }
        let name = self.ledger.snapshot_source(&self.config.dir, known)?;
        let guest = afresh::open(name, &warm.options).map_err(|error| internal(&error))?;
        let mut opened = lock(&self.opened);
        if opened.len() >= MAX_OPEN_SNAPSHOTS {
            opened.clear();
        }
        opened.insert(id.clone(), OpenSnapshot::new(warm, guest.clone()));
        Ok(guest)
    }
}
