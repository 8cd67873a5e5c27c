//! Where it is written which sandboxes and snapshots there are: in files of this server's own, or in the ledger that the hosts
//! of a fleet share.
//!
//! What it promises: what a client is told is written before. Of a fleet, besides: nothing is answered for a sandbox
//! that may be another host's by now, neither when a call begins nor when it ends.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg(feature = "fleet")]
use afresh::Reference;
use afresh::Saved;
use hyper::StatusCode;

use super::config::SandboxConfig;
use super::one::Sandbox;
use super::record::{Records, SandboxRecord, SnapshotRecord};
use super::template::kept;
use crate::failure::describe;
use crate::refusal::Refusal;

#[cfg(feature = "fleet")]
use crate::fleet::{Anchor, Fleet, State};
#[cfg(feature = "fleet")]
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// A difference of at most so many bytes is fetched whole: what it differs from is here already. Of a larger one pages are
/// fetched when they are touched.
#[cfg(feature = "fleet")]
const WHOLE: u64 = 16 << 20;

/// The books.
pub(super) enum Ledger {
    /// Of this server alone.
    Alone { sandboxes: Records, snapshots: Records, known: Mutex<BTreeMap<String, SnapshotRecord>> },
    /// Of a fleet.
    #[cfg(feature = "fleet")]
    Fleet(Arc<Fleet>),
}

/// How a sandbox stands in a fleet.
#[cfg(feature = "fleet")]
#[derive(Default)]
pub(super) struct Standing {
    /// Its entry, as this host knows it.
    pub(super) anchor: tokio::sync::Mutex<Option<Anchor>>,
    /// The lease it was held by was lost, and nobody has said yet whether it is this host's still.
    pub(super) doubt: AtomicBool,
    /// Where it is opened from, if not from this host's directory.
    pub(super) from: Mutex<Option<State>>,
}

/// A state that was saved, as the books are to name it.
#[derive(Clone, Default)]
pub(super) struct Kept {
    #[cfg(feature = "fleet")]
    state: Option<State>,
}

/// A snapshot, and where it is.
#[derive(Clone)]
pub(super) struct Known {
    pub(super) record: SnapshotRecord,
    pub(super) kept: Kept,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn internal(error: &(dyn std::error::Error + 'static)) -> Refusal {
    Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, describe(error))
}

impl Ledger {
    /// Books in files, and the sandboxes that are in them.
    pub(super) fn alone(
        config: &SandboxConfig,
    ) -> Result<(Self, Vec<SandboxRecord>), afresh::Cause> {
        let sandboxes = Records::open(config.dir.join("sandboxes"))?;
        let snapshots = Records::open(config.dir.join("records"))?;
        let all = sandboxes.all::<SandboxRecord>()?;
        let known = snapshots.all::<SnapshotRecord>()?.into_iter();
        let known = Mutex::new(known.map(|record| (record.id.clone(), record)).collect());
        Ok((Self::Alone { sandboxes, snapshots, known }, all))
    }

    /// An id for something new of a tenant.
    pub(super) fn id(&self, tenant: &str) -> Result<String, Refusal> {
        match self {
            Self::Alone { .. } => {
                let _ = tenant;
                super::registry::random(10)
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(_) => Fleet::id(tenant),
        }
    }

    /// Whether this server may answer for a sandbox now.
    pub(super) fn check(&self, sandbox: &Sandbox) -> Result<(), Refusal> {
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
                    return Err(Refusal::busy(StatusCode::SERVICE_UNAVAILABLE, why));
                }
                Ok(())
            }
        }
    }

    /// What is said of a sandbox that is not here, where that does not mean that there is none: a host that ends has left its sandboxes
    /// to the others.
    pub(super) fn absent(&self, id: &str) -> Option<Refusal> {
        match self {
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) if fleet.ends() => Some(super::one::Life::Moved.absent(id)),
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

    /// Writes new sandboxes down.
    pub(super) async fn enter(&self, new: &[std::sync::Arc<Sandbox>]) -> Result<(), Refusal> {
        match self {
            // In files there is what was saved.
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

    /// Brings a state to where all who may need it find it. Blocks.
    pub(super) fn keep(&self, dir: &Path, saved: &Saved) -> Result<Kept, Refusal> {
        match self {
            Self::Alone { .. } => {
                let _ = (dir, saved);
                Ok(Kept::default())
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => {
                let place: Reference =
                    kept(dir, "any").parse().map_err(|error| internal(&error))?;
                let store = place.place().store().map_err(|error| internal(&error))?;
                let own = saved.snapshot.layers().last().map_or(0, afresh::store::Layer::size);
                Ok(Kept { state: Some(fleet.send(&store, &saved.snapshot, own)?) })
            }
        }
    }

    /// Writes down that a sandbox is saved, and whether it is left to whoever wants it.
    pub(super) async fn saved(
        &self,
        sandbox: &std::sync::Arc<Sandbox>,
        saved: Option<Kept>,
        release: bool,
    ) -> Result<(), Refusal> {
        match self {
            Self::Alone { sandboxes, .. } => {
                let _ = (saved, release);
                let (records, sandbox) = (sandboxes.clone(), sandbox.clone());
                let put = move || {
                    records.put(&sandbox.id, &sandbox.record()).map_err(|error| internal(&error))
                };
                super::registry::blocking(put).await
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => {
                self.check(sandbox)?;
                let mut anchor = sandbox.standing.anchor.lock().await;
                let Some(anchor) = anchor.as_mut() else { return Err(Refusal::host()) };
                let state = saved.and_then(|kept| kept.state).or_else(|| anchor.state.clone());
                fleet.change(anchor, sandbox.record(), state, release).await
            }
        }
    }

    /// Whether a sandbox is written down, and what changes of it has to be, too.
    pub(super) fn has(&self, sandbox: &Sandbox) -> bool {
        match self {
            Self::Alone { .. } => sandbox.saved.load(std::sync::atomic::Ordering::Relaxed),
            #[cfg(feature = "fleet")]
            Self::Fleet(_) => true,
        }
    }

    /// Strikes a sandbox out.
    pub(super) async fn gone(&self, sandbox: &std::sync::Arc<Sandbox>) -> Result<(), Refusal> {
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

    /// What a saved sandbox is opened from. Blocks.
    pub(super) fn opened_from(&self, dir: &Path, sandbox: &Sandbox) -> Result<String, Refusal> {
        let name = format!("sandbox-{}", sandbox.id);
        match self {
            Self::Alone { .. } => Ok(kept(dir, &name)),
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => {
                let from = lock(&sandbox.standing.from).clone();
                let Some(state) = from else { return Ok(kept(dir, &name)) };
                let (place, here) = fetch(fleet, dir, &name, &state)?;
                if here {
                    *lock(&sandbox.standing.from) = None;
                }
                Ok(place)
            }
        }
    }

    /// What the next time of a sandbox is opened from was saved here.
    pub(super) fn saved_here(&self, sandbox: &Sandbox) {
        #[cfg(feature = "fleet")]
        {
            *lock(&sandbox.standing.from) = None;
        }
        #[cfg(not(feature = "fleet"))]
        let _ = sandbox;
    }

    /// What a snapshot is opened from. Blocks.
    pub(super) fn snapshot_from(&self, dir: &Path, known: &Known) -> Result<String, Refusal> {
        let name = format!("snap-{}", known.record.id);
        match (self, &known.kept) {
            #[cfg(feature = "fleet")]
            (Self::Fleet(fleet), Kept { state: Some(state) }) => {
                let there = kept(dir, &name).parse::<Reference>().ok();
                let there = there.and_then(|there| there.place().store().ok()?.resolve(&name).ok());
                match there {
                    Some(_) => Ok(kept(dir, &name)),
                    None => fetch(fleet, dir, &name, state).map(|(place, _)| place),
                }
            }
            _ => Ok(kept(dir, &name)),
        }
    }

    /// Takes a snapshot in. A name that another of the tenant had is its own from then on.
    pub(super) async fn name(&self, known: Known) -> Result<(), Refusal> {
        match self {
            Self::Alone { snapshots, known: all, .. } => {
                let record = known.record;
                snapshots.put(&record.id, &record).map_err(|error| internal(&error))?;
                let mut all = lock(all);
                for other in all.values_mut().filter(|other| other.tenant == record.tenant) {
                    let had = other.names.len();
                    other.names.retain(|name| !record.names.contains(name));
                    if other.names.len() != had {
                        snapshots.put(&other.id, other).map_err(|error| internal(&error))?;
                    }
                }
                all.insert(record.id.clone(), record);
                Ok(())
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => {
                let state = known.kept.state.as_ref().ok_or_else(Refusal::host)?;
                fleet.name(&known.record, state).await
            }
        }
    }

    /// Whether a name in the store is that of something that was saved for a server which was killed before it wrote it
    /// down: a snapshot, or the first save of a sandbox. Of a fleet's the others may know.
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
    ) -> Result<Option<Known>, Refusal> {
        match self {
            Self::Alone { known, .. } => {
                let all = lock(known);
                let own = |record: &&SnapshotRecord| record.tenant == tenant;
                let named = |record: &&SnapshotRecord| record.names.iter().any(|own| own == name);
                let by_id = all.get(name).filter(own);
                let found = by_id.or_else(|| all.values().filter(own).find(named)).cloned();
                Ok(found.map(|record| Known { record, kept: Kept::default() }))
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => {
                let found = fleet.snapshot(tenant, name).await?;
                Ok(found.map(|(record, state)| Known { record, kept: Kept { state: Some(state) } }))
            }
        }
    }

    /// The snapshots of a tenant.
    pub(super) async fn snapshots(&self, tenant: &str) -> Result<Vec<SnapshotRecord>, Refusal> {
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
    pub(super) async fn forget(&self, record: &SnapshotRecord) -> Result<(), Refusal> {
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
    pub(super) async fn sandboxes_of(&self, tenant: &str) -> Result<Vec<SandboxRecord>, Refusal> {
        match self {
            Self::Alone { .. } => {
                let _ = tenant;
                Ok(Vec::new())
            }
            #[cfg(feature = "fleet")]
            Self::Fleet(fleet) => fleet.sandboxes_of(tenant).await,
        }
    }

    /// Whether a sandbox that is paused is left to whichever host it is wanted on next.
    pub(super) fn releases(&self) -> bool {
        match self {
            Self::Alone { .. } => false,
            #[cfg(feature = "fleet")]
            Self::Fleet(_) => true,
        }
    }
}

/// Brings a state here, or says where it is; and whether it is here now.
#[cfg(feature = "fleet")]
fn fetch(fleet: &Fleet, dir: &Path, name: &str, state: &State) -> Result<(String, bool), Refusal> {
    if state.bytes > WHOLE {
        return Ok((fleet.place(state)?, false));
    }
    let here = kept(dir, name);
    let place: Reference = here.parse().map_err(|error| internal(&error))?;
    let store = place.place().create().map_err(|error| internal(&error))?;
    let from = fleet.store().ok_or_else(Refusal::host)?;
    let pulled = from.pull(&store, &state.digest, name, afresh::Encoding::Raw, &mut |_| {});
    pulled.map_err(|error| {
        tracing::error!(
            why = describe(&error),
            "a saved state does not come from the fleet's store"
        );
        Refusal::busy(
            StatusCode::SERVICE_UNAVAILABLE,
            "the fleet's store does not answer; try again",
        )
    })?;
    Ok((here, true))
}
