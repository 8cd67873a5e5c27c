//! Charges of tenants for the blobs of their saved states.

use std::collections::HashMap;
use std::sync::Arc;

use afresh::{Cause, Sha256, Store};

use crate::lock::lock;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::records::store::{SnapshotRecord, StoredSandbox};
use crate::sandbox::tenants::stored_blobs::{StoredState, blobs_of};

impl Sandboxes {
    /// The charge of a state in the store, which its tenant has from now on.
    pub(crate) fn charge_state(
        &self,
        tenant: &Arc<str>,
        store: &Store,
        state: Sha256,
    ) -> Result<StoredState, Cause> {
        let templates = self.templates.all();
        let mut blobs = blobs_of(store, state)?;
        blobs.retain(|blob| !templates.iter().any(|warm| warm.blobs.contains(&blob.digest)));
        Ok(match self.ledger.releases() {
            true => StoredState::alone(&blobs),
            false => self.stored_blobs.charge(tenant, blobs),
        })
    }

    /// Charges the states that the server before has saved.
    pub(crate) fn charge_known(
        &self,
        store: &Store,
        snapshots: &[SnapshotRecord],
    ) -> Result<(), Cause> {
        let ids: HashMap<String, Sha256> =
            store.tags()?.into_iter().map(|tag| (tag.name, tag.id)).collect();
        // A fleet has most of its states elsewhere, and their records have the sizes. A state that
        // is not there or cannot be read keeps the size that it was recorded with.
        let charge = |tenant: &Arc<str>, name: &str| {
            let id = ids.get(name).filter(|_| !self.ledger.releases())?;
            let charged = self.charge_state(tenant, store, *id);
            charged.inspect_err(|error| tracing::error!(name, %error, "a state has no size")).ok()
        };
        for sandbox in lock(&self.all).values() {
            if let Some(state) = charge(&sandbox.tenant, &sandbox.saved_name()) {
                sandbox.charge.store(state);
            }
        }
        for record in snapshots {
            let state = charge(&record.tenant.as_str().into(), &format!("snap-{}", record.id));
            let state = state.unwrap_or_else(|| StoredState::of_size(record.stored));
            self.quota.add_known(record, state);
        }
        Ok(())
    }
}
