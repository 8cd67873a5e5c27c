//! The ledger of sandboxes: making, changing, taking and removing their entries.
//!
//! Promises: every change names the revision that this host knows; a change whose answer was lost
//! is found by reading, and adopted only where the entry still names this host. Pages are in the
//! store before the entry names them.

use bytes::Bytes;
use hyper::StatusCode;

use super::nats::{self, BucketEntry, NatsError};
use super::record::{self, Entry, OwnedEntry, State};
use super::unconfirmed_takeovers::TakeGuard;
use super::{Fleet, fencing};
use crate::disk_full::is_disk_full;
use crate::error_response::ErrorResponse;
use crate::failure::describe;
use crate::random::hex_digits;
use crate::sandbox::records::store::{
    RecordedSandboxes, SandboxRecord, UnknownFields, milliseconds,
};

/// The outcome of taking a sandbox.
pub(crate) enum TakeOutcome {
    /// It is this host's now.
    Ours(Box<OwnedSandbox>),
    /// Another host owns it.
    Theirs(String),
    /// It does not exist.
    Missing,
}

/// A sandbox of this host's.
pub(crate) struct OwnedSandbox {
    pub(crate) record: SandboxRecord,
    pub(crate) owned_entry: OwnedEntry,
    /// The life of this host that its entry names.
    pub(crate) life: String,
}

fn bytes(value: &impl serde::Serialize) -> Bytes {
    // Text and numbers.
    Bytes::from(serde_json::to_vec(value).unwrap_or_default())
}

fn read<T: serde::de::DeserializeOwned>(found: &BucketEntry) -> Result<T, ErrorResponse> {
    serde_json::from_slice(&found.value).map_err(|error| {
        tracing::error!(%error, "an entry of the ledger is damaged");
        ErrorResponse::host()
    })
}

fn not_here() -> ErrorResponse {
    ErrorResponse::busy(
        StatusCode::SERVICE_UNAVAILABLE,
        "this host is not sure that the sandbox is still its own; try again",
    )
}

/// Times that a host tries to keep a sandbox whose entry changes meanwhile.
const MAX_KEEP_ATTEMPTS: u32 = 3;
/// A name that no store has, which a probe asks for.
const PROBE_NAME: &str = "afresh-probe";

impl Fleet {
    /// Whether this host may answer for its sandboxes.
    pub(super) fn check_lease(&self) -> Result<(), ErrorResponse> {
        if self.safe() { Ok(()) } else { Err(not_here()) }
    }

    /// An id for something of a tenant.
    pub(crate) fn id(tenant: &str) -> Result<String, ErrorResponse> {
        let random = hex_digits(8).ok_or_else(ErrorResponse::host)?;
        Ok(record::tenant_prefix(tenant) + &random)
    }

    /// Enters a new sandbox.
    pub(crate) async fn enter(&self, record: SandboxRecord) -> Result<OwnedEntry, ErrorResponse> {
        self.check_lease()?;
        let Some(key) = record::key(&record.id) else { return Err(ErrorResponse::host()) };
        let life = self.life();
        let id = record.id.clone();
        let guard = TakeGuard::new(self, &id);
        let note = self.note_owned(&id, &life).await?;
        // A sweep that missed the entry has fenced its key.
        match self.create_entry(&key, record, life).await {
            Ok(revision) => {
                guard.finish();
                Ok(OwnedEntry::new(revision, note))
            }
            Err(error) => {
                // Without an answer the entry may be there: then the note is needed.
                if matches!(error, NatsError::Changed) {
                    self.forget_owned(&id, note).await;
                    guard.finish();
                }
                // A refused sandbox is removed, and its client has no id of it to look at.
                Err(error.repeatable().into())
            }
        }
    }

    pub(super) async fn create_entry(
        &self,
        key: &str,
        record: SandboxRecord,
        life: String,
    ) -> Result<u64, NatsError> {
        let entry = Entry::new(Some(life), record, None);
        fencing::create_unused(&self.links.sandboxes, key, bytes(&entry)).await
    }

    pub(super) async fn entry(&self, key: &str) -> Result<Option<(u64, Entry)>, ErrorResponse> {
        match nats::find(&self.links.sandboxes, key).await? {
            Some(found) => Ok(Some((found.revision, read(&found)?))),
            None => Ok(None),
        }
    }

    /// The entry of a sandbox.
    pub(crate) async fn look_up(&self, id: &str) -> Result<Option<Entry>, ErrorResponse> {
        let Some(key) = record::key(id) else { return Ok(None) };
        Ok(self.entry(&key).await?.map(|(_, entry)| entry))
    }

    /// Changes the entry of a sandbox of this host's. `release` leaves it without an owner.
    pub(crate) async fn change(
        &self,
        owned_entry: &mut OwnedEntry,
        record: SandboxRecord,
        state: Option<State>,
        release: bool,
    ) -> Result<(), ErrorResponse> {
        let id = record.id.clone();
        self.change_entry(owned_entry, record, state, release).await?;
        if release {
            self.forget_owned(&id, owned_entry.note).await;
        }
        Ok(())
    }

    async fn change_entry(
        &self,
        owned_entry: &mut OwnedEntry,
        record: SandboxRecord,
        state: Option<State>,
        release: bool,
    ) -> Result<(), ErrorResponse> {
        let Some(key) = record::key(&record.id) else { return Err(ErrorResponse::host()) };
        let owner = (!release).then(|| self.life());
        let entry =
            Entry { unknown: owned_entry.unknown.clone(), ..Entry::new(owner, record, state) };
        let changed = bytes(&entry);
        // As in a sweep: no host ends a sandbox without an owner.
        let SandboxRecord { paused, pause_at_end, ends, noted, .. } = entry.record;
        let ends_alone = release && !paused && !pause_at_end && noted != 0;
        let lifetime = ends_alone.then(|| ends.saturating_sub(noted));
        let sandboxes = &self.links.sandboxes;
        for _ in 0..2 {
            let value = changed.clone();
            match nats::update_for(sandboxes, &key, value, owned_entry.revision, lifetime).await {
                Ok(revision) => {
                    owned_entry.note_change(revision, entry.state);
                    return Ok(());
                }
                Err(NatsError::Changed) => match self.entry(&key).await? {
                    // An earlier change of this host without an answer.
                    Some((revision, there))
                        if there.owner.as_deref().is_some_and(|o| self.ours(o)) =>
                    {
                        owned_entry.revision = revision;
                    }
                    Some((revision, there))
                        if release && there.owner.is_none() && there.state == entry.state =>
                    {
                        owned_entry.note_change(revision, there.state);
                        return Ok(());
                    }
                    _ => return Err(NatsError::Changed.into()),
                },
                Err(error) => return Err(error.into()),
            }
        }
        Err(NatsError::Changed.into())
    }

    /// Removes the entry of a sandbox of this host's.
    pub(crate) async fn erase(
        &self,
        id: &str,
        owned_entry: &OwnedEntry,
    ) -> Result<(), ErrorResponse> {
        self.erase_entry(id, owned_entry).await?;
        self.forget_owned(id, owned_entry.note).await;
        Ok(())
    }

    async fn erase_entry(&self, id: &str, owned_entry: &OwnedEntry) -> Result<(), ErrorResponse> {
        let Some(key) = record::key(id) else { return Ok(()) };
        let mut revision = owned_entry.revision;
        for _ in 0..2 {
            match nats::remove(&self.links.sandboxes, &key, revision).await {
                Ok(()) => return Ok(()),
                Err(NatsError::Changed) => match self.entry(&key).await? {
                    None => return Ok(()),
                    Some((now, there)) if there.owner.as_deref().is_some_and(|o| self.ours(o)) => {
                        revision = now;
                    }
                    Some(_) => return Err(NatsError::Changed.into()),
                },
                Err(error) => return Err(error.into()),
            }
        }
        Err(NatsError::Changed.into())
    }

    /// Enters this host's new life as the owner of a sandbox of its last one, and returns that
    /// life; `None` if another host was faster.
    pub(crate) async fn keep(
        &self,
        owned_entry: &mut OwnedEntry,
        record: SandboxRecord,
    ) -> Result<Option<String>, ErrorResponse> {
        self.check_lease()?;
        let life = self.life();
        let Some(key) = record::key(&record.id) else { return Ok(None) };
        let mut note = None;
        for _ in 0..MAX_KEEP_ATTEMPTS {
            let found = self.entry(&key).await?;
            let is_ours = |there: &Entry| there.owner.as_deref().is_some_and(|of| self.ours(of));
            let Some((revision, there)) = found.filter(|(_, there)| is_ours(there)) else {
                if let Some(note) = note {
                    self.forget_owned(&record.id, note).await;
                }
                return Ok(None);
            };
            let note = match note {
                Some(note) => note,
                None => *note.insert(self.note_owned(&record.id, &life).await?),
            };
            let state = there.state;
            let (owner, record) = (Some(life.clone()), record.clone());
            let entry = Entry::new(owner, record, state.clone());
            let entry = Entry { unknown: there.unknown, ..entry };
            match nats::update(&self.links.sandboxes, &key, bytes(&entry), revision).await {
                Ok(revision) => {
                    // A state that is pending stays so.
                    (owned_entry.revision, owned_entry.note, owned_entry.state) =
                        (revision, note, state);
                    return Ok(Some(life));
                }
                // Another host has taken the sandbox, or the operator has sealed its entry.
                Err(NatsError::Changed) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(NatsError::Changed.into())
    }

    /// Whether a life is one of this process.
    pub(super) fn ours(&self, life: &str) -> bool {
        life.split_once('-').is_some_and(|(node, _)| node == self.node)
    }

    /// Whether this owner's lease is over, so that its sandboxes can be taken.
    pub(super) async fn free(&self, owner: Option<&str>) -> bool {
        let Some(owner) = owner else { return true };
        if self.ours(owner) {
            // An earlier life of this process has nothing that this one has not.
            return owner != self.life();
        }
        if !self.is_over(owner) {
            self.suspect(owner);
            super::lease_renewal::look(self, owner).await;
        }
        self.is_over(owner)
    }

    /// Takes a sandbox without an owner. One that was never saved is lost with
    /// its host.
    /// `able` refuses one that this host cannot run.
    pub(crate) async fn take(
        &self,
        id: &str,
        able: impl FnOnce(&SandboxRecord) -> Result<(), ErrorResponse>,
    ) -> Result<TakeOutcome, ErrorResponse> {
        let Some(key) = record::key(id) else { return Ok(TakeOutcome::Missing) };
        self.check_lease()?;
        if self.draining.load(std::sync::atomic::Ordering::Relaxed) {
            let why = "this host is ending, and takes no sandbox; try again";
            return Err(ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, why));
        }
        let life = self.life();
        let Some(found) = nats::find(&self.links.sandboxes, &key).await? else {
            return Ok(TakeOutcome::Missing);
        };
        let (revision, entry): (_, Entry) = (found.revision, read(&found)?);
        let again = entry.owner.as_deref() == Some(&life);
        if !again && !self.free(entry.owner.as_deref()).await {
            return Ok(TakeOutcome::Theirs(entry.owner.unwrap_or_default()));
        }
        able(&entry.record)?;
        // Also where this life is named already, by a change whose answer was lost: the entry may
        // be an old one, which a replica had that lags behind. Only a change of the revision that
        // was read proves that it is the present one.
        let mut ours = entry.taken_by(&life, again, found.time);
        let guard = TakeGuard::new(self, id);
        let note = self.note_owned(id, &life).await?;
        let taken = nats::update(&self.links.sandboxes, &key, bytes(&ours), revision).await;
        if let Err(NatsError::Changed) = &taken {
            self.forget_owned(id, note).await;
            guard.finish();
            return Err(NatsError::Changed.into());
        }
        // The request has not begun, and takes the sandbox again.
        let mut revision = taken.map_err(NatsError::repeatable)?;
        if !again {
            self.counts.taken.inc();
        }
        let mut over = !ours.record.paused && !self.adopt_time(&key, &mut ours).await?;
        if over && ours.record.pause_at_end && ours.state.is_some() {
            // No host was there to pause it in time.
            (ours.record.paused, over) = (true, false);
            if ours.record.settings.files_only {
                ours.record.drop_memory();
            }
            let paused = nats::update(&self.links.sandboxes, &key, bytes(&ours), revision).await;
            revision = paused.map_err(NatsError::repeatable)?;
        }
        let owned_entry = OwnedEntry {
            state: ours.state,
            unknown: ours.unknown,
            ..OwnedEntry::new(revision, note)
        };
        let owned = OwnedSandbox { record: ours.record, owned_entry, life };
        let outcome = self.adopt_sandbox(&key, owned, over).await?;
        guard.finish();
        Ok(outcome)
    }

    /// Sets the end of a sandbox that was just taken, by this host's clock. The servers' clock
    /// gives the rest of its time. `false` if its time is over.
    async fn adopt_time(&self, key: &str, ours: &mut Entry) -> Result<bool, ErrorResponse> {
        let Some(changed) = nats::find(&self.links.sandboxes, key).await? else { return Ok(true) };
        let left = ours.remaining(changed.time, changed.time);
        let now = milliseconds(std::time::SystemTime::now());
        ours.record.ends = now.saturating_add(left);
        Ok(left > 0)
    }

    async fn adopt_sandbox(
        &self,
        key: &str,
        owned: OwnedSandbox,
        over: bool,
    ) -> Result<TakeOutcome, ErrorResponse> {
        let OwnedSandbox { record, owned_entry, .. } = &owned;
        if owned_entry.state.is_none() || over {
            tracing::warn!(
                id = record.id,
                over,
                "a sandbox does not exist any more: its time is over, or it was lost before it was ever saved"
            );
            self.counts.lost.inc();
            let removed = nats::remove(&self.links.sandboxes, key, owned_entry.revision).await;
            removed.map_err(NatsError::repeatable)?;
            self.forget_owned(&record.id, owned_entry.note).await;
            return Ok(TakeOutcome::Missing);
        }
        Ok(TakeOutcome::Ours(Box::new(owned)))
    }

    /// The sandboxes of a tenant, at most `most`. Unreadable entries may be those of a tenant with
    /// the same prefix.
    pub(super) async fn entries_of(
        &self,
        tenant: &str,
        most: usize,
    ) -> Result<RecordedSandboxes, ErrorResponse> {
        let filter = format!("{}.*", record::tenant_prefix(tenant));
        let parse = |found: &BucketEntry| serde_json::from_slice::<Entry>(&found.value).ok();
        let own = |entry: &Entry| {
            let lost = entry.state.is_none()
                && entry.owner.as_ref().is_some_and(|life| self.is_over(life));
            entry.record.tenant == tenant && !lost
        };
        let list = self.list_readable(|links| &links.sandboxes, &filter, most, parse, own).await?;
        let records = list.entries.into_iter().map(|entry| entry.record).collect();
        Ok(RecordedSandboxes { records, unreadable: list.unreadable, omitted: list.omitted })
    }

    /// Sends a saved state to the store. Blocks.
    pub(crate) fn send(
        &self,
        local: &afresh::store::Store,
        snapshot: &afresh::Snapshot,
        own: u64,
    ) -> Result<State, ErrorResponse> {
        let store = self.store.as_ref().ok_or_else(ErrorResponse::host)?;
        let sent = store.keep(local, snapshot, afresh::Encoding::Raw, &mut |_| {});
        let id = sent.map_err(|error| {
            if is_disk_full(&error) {
                tracing::error!(why = describe(&error), "the fleet's store is full");
                return ErrorResponse::disk_full();
            }
            tracing::error!(
                why = describe(&error),
                "a sandbox cannot be saved in the fleet's store"
            );
            ErrorResponse::busy(
                StatusCode::SERVICE_UNAVAILABLE,
                "the fleet's store does not answer; try again",
            )
        })?;
        Ok(State {
            digest: id.to_string(),
            bytes: own,
            by: self.life(),
            unknown: UnknownFields::default(),
        })
    }

    /// Whether the store answers, by a name that it does not have. Blocks.
    pub(crate) fn probe_store(&self) -> Result<(), String> {
        let Some(store) = &self.store else { return Ok(()) };
        match store.resolve(PROBE_NAME) {
            Err(error) if !error.is_not_found() => Err(afresh::describe_error(&error)),
            _ => Ok(()),
        }
    }

    /// The fleet's store.
    pub(crate) fn store(&self) -> Option<&afresh::store::remote::Remote> {
        self.store.as_ref()
    }

    /// The place that opens a saved state where it is.
    pub(crate) fn place(&self, state: &State) -> Result<String, ErrorResponse> {
        let place = self.config.store.as_deref().ok_or_else(ErrorResponse::host)?;
        let place = match place.contains("://") {
            true => place.to_owned(),
            false => format!(
                "file://{}",
                std::fs::canonicalize(place).map_err(|_| ErrorResponse::host())?.display()
            ),
        };
        Ok(format!("{place}@{}", state.digest))
    }

    /// One at a time takes a sandbox.
    pub(super) fn turn(&self, id: &str) -> &tokio::sync::Mutex<()> {
        let sum: usize = id.bytes().map(usize::from).sum();
        &self.taking[sum % self.taking.len()]
    }
}
