//! The records of sandboxes and snapshots: in files of this server, or in the ledger that the hosts
//! of a fleet share.
//!
//! Promises: a record is written before its client is answered. In a fleet no call of a sandbox is answered
//! that another host may own by now, neither when it begins nor when it ends.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg(feature = "fleet")]
use afresh::Reference;
use afresh::Saved;
use hyper::StatusCode;

use super::config::SandboxConfig;
use super::record::{Records, SandboxRecord, SnapshotRecord};
use super::sandbox::Sandbox;
use super::template::state_reference;
use crate::error_response::ErrorResponse;
#[cfg(feature = "fleet")]
use crate::failure::{describe, is_disk_full};

#[cfg(feature = "fleet")]
use crate::fleet::{Anchor, Fleet, State};
#[cfg(feature = "fleet")]
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Maximum bytes of a difference that is fetched whole, since its base is here already. Pages of a larger one are
/// fetched when they are touched.
#[cfg(feature = "fleet")]
const MAX_WHOLE_FETCH_BYTES: u64 = 16 << 20;

/// The books.
pub(super) enum Ledger {
    /// The records of this server alone.
    Alone { sandboxes: Records, snapshots: Records, known: Mutex<BTreeMap<String, SnapshotRecord>> },
    /// Of a fleet.
    #[cfg(feature = "fleet")]
    Fleet(Arc<Fleet>),
}

/// How a sandbox stands in a fleet.
#[cfg(feature = "fleet")]
#[derive(Default)]
pub(super) struct FleetEntry {
    /// Its entry, as this host knows it.
    pub(super) anchor: tokio::sync::Mutex<Option<Anchor>>,
    /// The lease was lost, and the ledger has not confirmed yet that this host still owns the sandbox.
    pub(super) doubt: AtomicBool,
    /// Where it is opened from, if not from this host's directory.
    pub(super) from: Mutex<Option<State>>,
}

/// A saved state, as it should appear in the books.
#[derive(Clone, Default)]
pub(super) struct SavedState {
    #[cfg(feature = "fleet")]
    state: Option<State>,
}

/// A snapshot, and where it is.
#[derive(Clone)]
pub(super) struct StoredSnapshot {
    pub(super) record: SnapshotRecord,
    pub(super) kept: SavedState,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn internal(error: &(dyn std::error::Error + 'static)) -> ErrorResponse {
    ErrorResponse::logged(StatusCode::INTERNAL_SERVER_ERROR, error)
}

impl Ledger {
    /// Books in files, and the sandboxes that are in them.
    pub(super) fn alone(
        config: &SandboxConfig,
    ) -> Result<(Self, Vec<SandboxRecord>), afresh::Cause> {
        let sandboxes = Records::open(config.dir.join("sandboxes"))?;
        let snapshots = Records::open(config.dir.join("records"))?;
        let all = sandboxes.all::<SandboxRecord>()?;
        let mut found = snapshots.all::<SnapshotRecord>()?;
        // The states of steps are those of the server before, whose templates may have been others.
        for layer in found.extract_if(.., |record| record.is_layer()) {
            snapshots.remove(&layer.id)?;
        }
        let known = found.into_iter();
        let known = Mutex::new(known.map(|record| (record.id.clone(), record)).collect());
        Ok((Self::Alone { sandboxes, snapshots, known }, all))
    }

    /// An id for something new of a tenant.
    pub(super) fn id(&self, tenant: &str) -> Result<String, ErrorResponse> {
        match self {
            Self::Alone { .. } => {
                let _ = tenant;
                super::registry::random(10)
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(_) => Fleet::id(tenant),
        }
    }

    /// The snapshots that this server knows without a question.
    pub(super) fn known_snapshots(&self) -> Vec<SnapshotRecord> {
        match self {
            Self::Alone { known, .. } => lock(known).values().cloned().collect(),
            #[cfg(feature = "fleet")]
            Self::Fleet(_) => Vec::new(),
        }
    }

    /// Whether this server may answer for a sandbox now.
    pub(super) fn check(&self, sandbox: &Sandbox) -> Result<(), ErrorResponse> {
        match self {
            Self::Alone { .. } => {
                let _ = sandbox;
                Ok(())
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => {
                fleet.check()?;
                if sandbox.standing.doubt.load(Ordering::Acquire) {
                    let why =
                        "it is not known yet whether the sandbox moved to another host; try again";
                    return Err(ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, why));
                }
                Ok(())
            }
        }
    }

    /// The answer for a sandbox that is not here, where it may exist elsewhere: a host that ends has left its sandboxes
    /// to the others.
    pub(super) fn absent(&self, id: &str) -> Option<ErrorResponse> {
        match self {
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) if fleet.ends() => Some(super::sandbox::Residency::Moved.absent(id)),
            _ => {
                let _ = id;
                None
            }
        }
    }

    /// Whether idle sandboxes may be looked after: not by a host that may have lost them.
    pub(super) fn safe(&self) -> bool {
        match self {
            Self::Alone { .. } => true,
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => fleet.safe(),
        }
    }

    /// Sandboxes of a tenant that are in the books and not among `here`, which are those of this server, as far as this host knows:
    /// the changes of other hosts reach it a moment later. `None` while the fleet is not counted yet.
    pub(super) fn elsewhere<'a>(
        &self,
        tenant: &str,
        here: impl Iterator<Item = &'a str>,
    ) -> Option<usize> {
        match self {
            Self::Alone { .. } => {
                let _ = (tenant, here);
                Some(0)
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => fleet.tenants.elsewhere(tenant, here),
        }
    }

    /// Writes new sandboxes down.
    pub(super) async fn enter(&self, new: &[std::sync::Arc<Sandbox>]) -> Result<(), ErrorResponse> {
        match self {
            // The files have the saved state.
            Self::Alone { .. } => {
                let _ = new;
                Ok(())
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => {
                let entering = new.iter().map(|sandbox| async {
                    let anchor = fleet.enter(sandbox.record()).await?;
                    *sandbox.standing.anchor.lock().await = Some(anchor);
                    Ok(())
                });
                let entered = futures_util::future::join_all(entering).await;
                entered.into_iter().collect()
            }
        }
    }

    /// Stores a state where all hosts that may need it find it. Blocks.
    pub(super) fn keep(&self, dir: &Path, saved: &Saved) -> Result<SavedState, ErrorResponse> {
        match self {
            Self::Alone { .. } => {
                let _ = (dir, saved);
                Ok(SavedState::default())
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => {
                let place: Reference =
                    state_reference(dir, "any").parse().map_err(|error| internal(&error))?;
                let store = place.place().store().map_err(|error| internal(&error))?;
                let own = super::snapshots::own_bytes(saved);
                Ok(SavedState { state: Some(fleet.send(&store, &saved.snapshot, own)?) })
            }
        }
    }

    /// Writes the record of a saved sandbox down. `release` leaves it to any host.
    pub(super) async fn saved(
        &self,
        sandbox: &std::sync::Arc<Sandbox>,
        record: SandboxRecord,
        saved: Option<SavedState>,
        release: bool,
    ) -> Result<(), ErrorResponse> {
        match self {
            Self::Alone { sandboxes, .. } => {
                let _ = (saved, release);
                let (records, sandbox) = (sandboxes.clone(), sandbox.clone());
                let put = move || {
                    records.store_record(&sandbox.id, &record).map_err(|error| internal(&error))
                };
                super::registry::blocking(put).await
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => {
                let mut anchor = sandbox.standing.anchor.lock().await;
                let Some(anchor) = anchor.as_mut() else { return Err(ErrorResponse::host()) };
                // The guest may have ended: no later change may name an older state than this one.
                if let Some(state) = saved.and_then(|kept| kept.state) {
                    anchor.pending = Some(state);
                }
                self.check(sandbox)?;
                let state = anchor.pending.clone().or_else(|| anchor.state.clone());
                let changed = fleet.change(anchor, record, state, release).await;
                if changed.is_err() && release {
                    // The change may have been made, and another host may have taken the sandbox since.
                    sandbox.standing.doubt.store(true, std::sync::atomic::Ordering::Release);
                }
                changed
            }
        }
    }

    /// Whether a sandbox has a record, which must follow its changes.
    pub(super) fn has(&self, sandbox: &Sandbox) -> bool {
        match self {
            Self::Alone { .. } => sandbox.saved.load(std::sync::atomic::Ordering::Relaxed),
            #[cfg(feature = "fleet")]
            Self::Fleet(_) => true,
        }
    }

    /// Strikes a sandbox out.
    pub(super) async fn strike_out(
        &self,
        sandbox: &std::sync::Arc<Sandbox>,
    ) -> Result<(), ErrorResponse> {
        match self {
            Self::Alone { sandboxes, .. } => {
                let (records, id) = (sandboxes.clone(), sandbox.id.clone());
                super::registry::blocking(move || records.remove(&id).map_err(|e| internal(&e)))
                    .await
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => match &*sandbox.standing.anchor.lock().await {
                Some(anchor) => fleet.erase(&sandbox.id, anchor).await,
                None => Ok(()),
            },
        }
    }

    /// The source that a saved sandbox is opened from. Blocks.
    pub(super) fn opened_from(
        &self,
        dir: &Path,
        sandbox: &Sandbox,
    ) -> Result<String, ErrorResponse> {
        let name = format!("sandbox-{}", sandbox.id);
        match self {
            Self::Alone { .. } => Ok(state_reference(dir, &name)),
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => {
                let from = lock(&sandbox.standing.from).clone();
                let Some(state) = from else { return Ok(state_reference(dir, &name)) };
                let (place, here) = fetch(fleet, dir, &name, &state)?;
                if here {
                    *lock(&sandbox.standing.from) = None;
                }
                Ok(place)
            }
        }
    }

    /// The next open of the sandbox uses the state that was saved here.
    pub(super) fn saved_here(&self, sandbox: &Sandbox) {
        #[cfg(feature = "fleet")]
        {
            *lock(&sandbox.standing.from) = None;
        }
        #[cfg(not(feature = "fleet"))]
        let _ = sandbox;
    }

    /// The source that a snapshot is opened from. Blocks.
    pub(super) fn snapshot_from(
        &self,
        dir: &Path,
        known: &StoredSnapshot,
    ) -> Result<String, ErrorResponse> {
        let name = format!("snap-{}", known.record.id);
        match (self, &known.kept) {
            #[cfg(feature = "fleet")]
            (Self::Fleet(fleet), SavedState { state: Some(state) }) => {
                let there = state_reference(dir, &name).parse::<Reference>().ok();
                let there = there.and_then(|there| there.place().store().ok()?.resolve(&name).ok());
                match there {
                    Some(_) => Ok(state_reference(dir, &name)),
                    None => fetch(fleet, dir, &name, state).map(|(place, _)| place),
                }
            }
            _ => Ok(state_reference(dir, &name)),
        }
    }

    /// Takes a snapshot in. A name that another of the tenant had is its own from then on.
    pub(super) async fn name(&self, known: StoredSnapshot) -> Result<(), ErrorResponse> {
        match self {
            Self::Alone { snapshots, known: all, .. } => {
                let record = known.record;
                snapshots.store_record(&record.id, &record).map_err(|error| internal(&error))?;
                let mut all = lock(all);
                for other in all.values_mut().filter(|other| other.tenant == record.tenant) {
                    let had = other.names.len();
                    other.names.retain(|name| !record.names.contains(name));
                    if other.names.len() != had {
                        snapshots
                            .store_record(&other.id, other)
                            .map_err(|error| internal(&error))?;
                    }
                }
                all.insert(record.id.clone(), record);
                Ok(())
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => {
                let state = known.kept.state.as_ref().ok_or_else(ErrorResponse::host)?;
                fleet.name(&known.record, state).await
            }
        }
    }

    /// Whether a name in the store is that of something that was saved for a server which was killed before it wrote
    /// it down: a snapshot, or the first save of a sandbox. In a fleet, other hosts may know it.
    pub(super) fn has_lost(&self, name: &str) -> bool {
        match self {
            Self::Alone { sandboxes, snapshots, .. } => match name.split_once('-') {
                Some(("snap", id)) => !snapshots.has(id),
                Some(("sandbox", id)) => !sandboxes.has(id),
                _ => false,
            },
            #[cfg(feature = "fleet")]
            Self::Fleet(_) => false,
        }
    }

    /// A snapshot of a tenant, by its id or its name.
    pub(super) async fn snapshot(
        &self,
        tenant: &str,
        name: &str,
    ) -> Result<Option<StoredSnapshot>, ErrorResponse> {
        match self {
            Self::Alone { known, .. } => {
                let all = lock(known);
                let own = |record: &&SnapshotRecord| record.tenant == tenant;
                let named = |record: &&SnapshotRecord| record.names.iter().any(|own| own == name);
                let by_id = all.get(name).filter(own);
                let found = by_id.or_else(|| all.values().filter(own).find(named)).cloned();
                Ok(found.map(|record| StoredSnapshot { record, kept: SavedState::default() }))
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => {
                let found = fleet.snapshot(tenant, name).await?;
                Ok(found.map(|(record, state)| StoredSnapshot {
                    record,
                    kept: SavedState { state: Some(state) },
                }))
            }
        }
    }

    /// The snapshots of a tenant.
    pub(super) async fn snapshots(
        &self,
        tenant: &str,
    ) -> Result<Vec<SnapshotRecord>, ErrorResponse> {
        match self {
            Self::Alone { known, .. } => {
                let all = lock(known);
                Ok(all.values().filter(|record| record.tenant == tenant).cloned().collect())
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => fleet.snapshots(tenant).await,
        }
    }

    /// Forgets a snapshot.
    pub(super) async fn forget(&self, record: &SnapshotRecord) -> Result<(), ErrorResponse> {
        match self {
            Self::Alone { snapshots, known, .. } => {
                lock(known).remove(&record.id);
                let (records, id) = (snapshots.clone(), record.id.clone());
                super::registry::blocking(move || records.remove(&id).map_err(|e| internal(&e)))
                    .await
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => fleet.forget(record).await,
        }
    }

    /// The sandboxes of a tenant that are written down, those of other hosts among them.
    pub(super) async fn sandboxes_of(
        &self,
        tenant: &str,
        most: usize,
    ) -> Result<Vec<SandboxRecord>, ErrorResponse> {
        match self {
            Self::Alone { .. } => {
                let _ = (tenant, most);
                Ok(Vec::new())
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => fleet.sandboxes_of(tenant, most).await,
        }
    }

    /// Whether a paused sandbox is released for any host that needs it next.
    pub(super) fn releases(&self) -> bool {
        match self {
            Self::Alone { .. } => false,
            #[cfg(feature = "fleet")]
            Self::Fleet(_) => true,
        }
    }
}

/// Fetches a state if necessary; returns its place, and whether it is here now.
#[cfg(feature = "fleet")]
fn fetch(
    fleet: &Fleet,
    dir: &Path,
    name: &str,
    state: &State,
) -> Result<(String, bool), ErrorResponse> {
    if state.bytes > MAX_WHOLE_FETCH_BYTES {
        return Ok((fleet.place(state)?, false));
    }
    let here = state_reference(dir, name);
    let place: Reference = here.parse().map_err(|error| internal(&error))?;
    let store = place.place().create().map_err(|error| internal(&error))?;
    let from = fleet.store().ok_or_else(ErrorResponse::host)?;
    let pulled = from.pull(&store, &state.digest, name, afresh::Encoding::Raw, &mut |_| {});
    if let Err(error) = &pulled
        && is_disk_full(error)
    {
        // The sandbox needs no copy here: its pages come from the fleet's store.
        tracing::warn!(why = describe(error), "a saved state is opened where it is");
        return Ok((fleet.place(state)?, false));
    }
    pulled.map_err(|error| {
        tracing::error!(
            why = describe(&error),
            "a saved state does not come from the fleet's store"
        );
        ErrorResponse::busy(
            StatusCode::SERVICE_UNAVAILABLE,
            "the fleet's store does not answer; try again",
        )
    })?;
    Ok((here, true))
}
