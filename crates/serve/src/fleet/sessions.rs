//! The ledger of sandboxes: making, changing, taking and removing their entries.
//!
//! What it promises: every change names the revision that this host knows; a change whose answer was lost is found by
//! reading, and only what is still this host's is adopted. Pages are in the store before the entry names them.

use std::sync::Arc;

use bytes::Bytes;
use hyper::StatusCode;

use super::entry::{self, Anchor, Entry, State};
use super::links::{self, Found, LinkError};
use super::{Fleet, lock};
use crate::failure::describe;
use crate::refusal::Refusal;
use crate::sandbox::SandboxRecord;

/// Most sandboxes or snapshots of a tenant that are listed.
const LISTED: usize = 10_000;

/// What came of taking a sandbox.
pub(crate) enum Taken {
    /// It is this host's now.
    Ours(Box<Owned>),
    /// Another host has it.
    Theirs(String),
    /// There is none.
    Missing,
}

/// A sandbox of this host's.
pub(crate) struct Owned {
    pub(crate) record: SandboxRecord,
    pub(crate) anchor: Anchor,
    /// The life of this host that its entry names.
    pub(crate) life: String,
}

fn bytes(value: &impl serde::Serialize) -> Bytes {
    // Text and numbers.
    Bytes::from(serde_json::to_vec(value).unwrap_or_default())
}

fn read<T: serde::de::DeserializeOwned>(found: &Found) -> Result<T, Refusal> {
    serde_json::from_slice(&found.value).map_err(|error| {
        tracing::error!(%error, "an entry of the ledger is damaged");
        Refusal::host()
    })
}

fn not_here() -> Refusal {
    Refusal::busy(
        StatusCode::SERVICE_UNAVAILABLE,
        "this host is not sure that the sandbox is still its own; try again",
    )
}

impl Fleet {
    /// Whether this host may answer for what it has.
    pub(crate) fn check(&self) -> Result<(), Refusal> {
        if self.safe() { Ok(()) } else { Err(not_here()) }
    }

    /// An id for something of a tenant.
    pub(crate) fn id(tenant: &str) -> Result<String, Refusal> {
        let random = super::digits(8).map_err(|_| Refusal::host())?;
        Ok(entry::whose(tenant) + &random)
    }

    /// Enters a new sandbox.
    pub(crate) async fn enter(&self, record: SandboxRecord) -> Result<Anchor, Refusal> {
        self.check()?;
        let Some(key) = entry::key(&record.id) else { return Err(Refusal::host()) };
        let entry = Entry { owner: Some(self.life()), record, state: None };
        let revision = links::create(&self.links.sandboxes, &key, bytes(&entry)).await?;
        Ok(Anchor { revision, state: None })
    }

    async fn entry(&self, key: &str) -> Result<Option<(u64, Entry)>, Refusal> {
        match links::find(&self.links.sandboxes, key).await? {
            Some(found) => Ok(Some((found.revision, read(&found)?))),
            None => Ok(None),
        }
    }

    /// What the ledger says of a sandbox.
    pub(crate) async fn look_up(&self, id: &str) -> Result<Option<Entry>, Refusal> {
        let Some(key) = entry::key(id) else { return Ok(None) };
        Ok(self.entry(&key).await?.map(|(_, entry)| entry))
    }

    /// Changes the entry of a sandbox of this host's. `release` leaves it to whoever wants it.
    pub(crate) async fn change(
        &self,
        anchor: &mut Anchor,
        record: SandboxRecord,
        state: Option<State>,
        release: bool,
    ) -> Result<(), Refusal> {
        let Some(key) = entry::key(&record.id) else { return Err(Refusal::host()) };
        let entry = Entry { owner: (!release).then(|| self.life()), record, state };
        let changed = bytes(&entry);
        for _ in 0..2 {
            match links::update(&self.links.sandboxes, &key, changed.clone(), anchor.revision).await
            {
                Ok(revision) => {
                    *anchor = Anchor { revision, state: entry.state };
                    return Ok(());
                }
                Err(LinkError::Changed) => match self.entry(&key).await? {
                    // An earlier change of this host's whose answer was lost.
                    Some((revision, there))
                        if there.owner.as_deref().is_some_and(|o| self.ours(o)) =>
                    {
                        anchor.revision = revision;
                    }
                    Some((revision, there))
                        if release && there.owner.is_none() && there.state == entry.state =>
                    {
                        *anchor = Anchor { revision, state: there.state };
                        return Ok(());
                    }
                    _ => return Err(LinkError::Changed.into()),
                },
                Err(error) => return Err(error.into()),
            }
        }
        Err(LinkError::Changed.into())
    }

    /// Removes the entry of a sandbox of this host's.
    pub(crate) async fn erase(&self, id: &str, anchor: &Anchor) -> Result<(), Refusal> {
        let Some(key) = entry::key(id) else { return Ok(()) };
        let mut revision = anchor.revision;
        for _ in 0..2 {
            match links::remove(&self.links.sandboxes, &key, revision).await {
                Ok(()) => return Ok(()),
                Err(LinkError::Changed) => match self.entry(&key).await? {
                    None => return Ok(()),
                    Some((now, there)) if there.owner.as_deref().is_some_and(|o| self.ours(o)) => {
                        revision = now;
                    }
                    Some(_) => return Err(LinkError::Changed.into()),
                },
                Err(error) => return Err(error.into()),
            }
        }
        Err(LinkError::Changed.into())
    }

    /// Enters this host's new life as the owner of what its last one had, and gives that life; none if another host
    /// was faster.
    pub(crate) async fn keep(
        &self,
        anchor: &mut Anchor,
        record: SandboxRecord,
    ) -> Result<Option<String>, Refusal> {
        self.check()?;
        let life = self.life();
        let Some(key) = entry::key(&record.id) else { return Ok(None) };
        let Some((revision, there)) = self.entry(&key).await? else { return Ok(None) };
        if !there.owner.as_deref().is_some_and(|owner| self.ours(owner)) {
            return Ok(None);
        }
        let state = there.state;
        let entry = Entry { owner: Some(life.clone()), record, state: state.clone() };
        match links::update(&self.links.sandboxes, &key, bytes(&entry), revision).await {
            Ok(revision) => {
                *anchor = Anchor { revision, state };
                Ok(Some(life))
            }
            Err(LinkError::Changed) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether a life is one of this process.
    fn ours(&self, life: &str) -> bool {
        life.split_once('-').is_some_and(|(node, _)| node == self.node)
    }

    /// Whether nobody can answer for this owner's sandboxes any more.
    pub(super) async fn free(&self, owner: Option<&str>) -> bool {
        let Some(owner) = owner else { return true };
        if self.ours(owner) {
            // An earlier life of this process has nothing that this one has not.
            return owner != self.life();
        }
        if !self.is_over(owner) {
            self.suspect(owner);
            super::hold::look(self, owner).await;
        }
        self.is_over(owner)
    }

    /// Takes a sandbox that nobody has. One that another host has is told as such; one that was never saved is lost with
    /// the host that had it.
    pub(crate) async fn take(&self, id: &str) -> Result<Taken, Refusal> {
        let Some(key) = entry::key(id) else { return Ok(Taken::Missing) };
        self.check()?;
        if self.draining.load(std::sync::atomic::Ordering::Relaxed) {
            let why = "this host is ending, and takes no sandbox; try again";
            return Err(Refusal::busy(StatusCode::SERVICE_UNAVAILABLE, why));
        }
        let life = self.life();
        let Some((revision, entry)) = self.entry(&key).await? else { return Ok(Taken::Missing) };
        if entry.owner.as_deref() == Some(&life) {
            // Taken before, by a change whose answer was lost.
            let anchor = Anchor { revision, state: entry.state };
            return self.taken(&key, Owned { record: entry.record, anchor, life }).await;
        }
        if !self.free(entry.owner.as_deref()).await {
            return Ok(Taken::Theirs(entry.owner.unwrap_or_default()));
        }
        let ours = Entry { owner: Some(life.clone()), ..entry };
        let revision = links::update(&self.links.sandboxes, &key, bytes(&ours), revision).await?;
        self.counts.taken.inc();
        let anchor = Anchor { revision, state: ours.state };
        self.taken(&key, Owned { record: ours.record, anchor, life }).await
    }

    async fn taken(&self, key: &str, owned: Owned) -> Result<Taken, Refusal> {
        let Owned { record, anchor, .. } = &owned;
        let over = !record.paused
            && record.ends <= crate::sandbox::milliseconds(std::time::SystemTime::now());
        if anchor.state.is_none() || over {
            tracing::warn!(
                id = record.id,
                over,
                "a sandbox is gone: its time is over, or it was lost before it was ever saved"
            );
            self.counts.lost.inc();
            links::remove(&self.links.sandboxes, key, anchor.revision).await?;
            return Ok(Taken::Missing);
        }
        Ok(Taken::Ours(Box::new(owned)))
    }

    /// The entries of a tenant's sandboxes.
    pub(crate) async fn sandboxes_of(&self, tenant: &str) -> Result<Vec<SandboxRecord>, Refusal> {
        let filter = format!("{}.*", entry::whose(tenant));
        let found = links::all(&self.links.client, &self.links.sandboxes, &filter, LISTED).await?;
        let mut records = Vec::with_capacity(found.len());
        for found in found {
            let entry: Entry = read(&found)?;
            let lost = entry.state.is_none()
                && entry.owner.as_ref().is_some_and(|life| self.is_over(life));
            if entry.record.tenant == tenant && !lost {
                records.push(entry.record);
            }
        }
        Ok(records)
    }

    /// Sends a saved state to the store. Blocks.
    pub(crate) fn send(
        &self,
        local: &afresh::store::Store,
        snapshot: &afresh::Snapshot,
        own: u64,
    ) -> Result<State, Refusal> {
        let store = self.store.as_ref().ok_or_else(Refusal::host)?;
        let sent = store.keep(local, snapshot, afresh::Encoding::Raw, &mut |_| {});
        let id = sent.map_err(|error| {
            tracing::error!(
                why = describe(&error),
                "a sandbox cannot be saved in the fleet's store"
            );
            Refusal::busy(
                StatusCode::SERVICE_UNAVAILABLE,
                "the fleet's store does not answer; try again",
            )
        })?;
        Ok(State { digest: id.to_string(), bytes: own, by: self.life() })
    }

    /// The fleet's store.
    pub(crate) fn store(&self) -> Option<&afresh::store::remote::Remote> {
        self.store.as_ref()
    }

    /// The place that opens a saved state where it is.
    pub(crate) fn place(&self, state: &State) -> Result<String, Refusal> {
        let place = self.config.store.as_deref().ok_or_else(Refusal::host)?;
        let place = match place.contains("://") {
            true => place.to_owned(),
            false => format!(
                "file://{}",
                std::fs::canonicalize(place).map_err(|_| Refusal::host())?.display()
            ),
        };
        Ok(format!("{place}@{}", state.digest))
    }

    /// Where a sandbox was found.
    pub(super) fn found(&self, id: &str, life: &str) {
        // What was waited for in vain is not where it is.
        if self.is_over(life) {
            return;
        }
        let mut ways = lock(&self.ways);
        if ways.len() >= 65_536 {
            ways.clear();
        }
        ways.insert(id.to_owned(), life.to_owned());
    }

    /// One at a time takes a sandbox.
    pub(crate) fn turn(self: &Arc<Self>, id: &str) -> &tokio::sync::Mutex<()> {
        let sum: usize = id.bytes().map(usize::from).sum();
        &self.taking[sum % self.taking.len()]
    }
}
