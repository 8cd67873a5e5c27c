//! The boundary between sandboxes and the keeper of their records.
//!
//! [`SandboxStore`] keeps the records and saved states of sandboxes: the directory of one server,
//! or the ledger that the hosts of a fleet share. [`SandboxHost`] is this server as a fleet sees
//! it. Both sides import the data of the traits from this file, which re-exports it.
//!
//! Promises: a record is written before its client is answered. In a fleet no call of a sandbox is
//! answered that another host may own by now, neither when it begins nor when it ends.

use std::path::Path;

use afresh::{Reference, SavedSnapshot};
use async_trait::async_trait;
use hyper::StatusCode;

pub(crate) use crate::sandbox::records::creation_key::CreationKey;
#[cfg(all(test, feature = "fleet"))]
pub(crate) use crate::sandbox::records::record::BuiltTemplate;
pub(crate) use crate::sandbox::records::record::{SandboxRecord, SnapshotRecord};
pub use crate::sandbox::records::tenant_use::TenantUse;
#[cfg(feature = "fleet")]
pub(crate) use crate::sandbox::request_body::unknown_fields::UnknownFields;
#[cfg(feature = "fleet")]
pub(crate) use shared::*;

use crate::error_response::ErrorResponse;

/// Maximum bytes of an entry in the ledger of a fleet.
pub(crate) const MAX_ENTRY: usize = 64 << 10;

/// The standing of a sandbox in a shared store.
#[derive(Default)]
pub(crate) struct StoreEntry {
    /// Its entry, as this host knows it.
    #[cfg(feature = "fleet")]
    pub(crate) owned_entry: std::sync::Arc<tokio::sync::Mutex<Option<OwnedEntry>>>,
    /// The lease was lost, and the ledger has not confirmed yet that this host still owns the
    /// sandbox.
    #[cfg(feature = "fleet")]
    pub(crate) doubt: std::sync::atomic::AtomicBool,
    /// The state that it is opened from, if that is not in the directory of this host.
    #[cfg(feature = "fleet")]
    pub(crate) from: std::sync::Mutex<Option<State>>,
    /// Held while the file with its record is written or removed.
    pub(crate) writing: std::sync::Arc<tokio::sync::Mutex<()>>,
}

/// The entry of a sandbox that is not recorded yet. Its other users wait until this is dropped: a
/// sandbox that is killed meanwhile is struck out after it was recorded.
pub(crate) struct NewEntry {
    #[cfg(feature = "fleet")]
    pub(crate) owned_entry: tokio::sync::OwnedMutexGuard<Option<OwnedEntry>>,
}

impl StoreEntry {
    /// Begins to record a sandbox that no other task knows yet. `None` if one does.
    pub(crate) fn begin(&self) -> Option<NewEntry> {
        Some(NewEntry {
            #[cfg(feature = "fleet")]
            owned_entry: self.owned_entry.clone().try_lock_owned().ok()?,
        })
    }
}

/// A saved state, for the record of its sandbox or snapshot.
#[derive(Clone, Default)]
pub(crate) struct SavedState {
    #[cfg(feature = "fleet")]
    pub(crate) state: Option<State>,
    /// The guest lives on if the change that names this state fails, and no later change names it.
    #[cfg(feature = "fleet")]
    pub(crate) replaces_guest: bool,
}

impl SavedState {
    /// A state that takes the place of its guest once it is recorded.
    pub(crate) fn replacing_guest(self) -> Self {
        Self {
            #[cfg(feature = "fleet")]
            replaces_guest: true,
            ..self
        }
    }
}

/// The sandboxes of a tenant in a store.
#[derive(Default)]
pub(crate) struct RecordedSandboxes {
    pub(crate) records: Vec<SandboxRecord>,
    /// The number of entries that cannot be read. Each may be a sandbox of the tenant.
    pub(crate) unreadable: usize,
    /// The number of entries that were not read, since the list has its maximum. Each may be a
    /// sandbox of the tenant.
    pub(crate) omitted: usize,
}

/// Maximum entries in a list of a tenant that may have `limit` of them. It has more than its limit
/// where that was lowered.
pub(crate) fn max_listed(limit: usize) -> usize {
    limit.saturating_mul(2).max(10_000)
}

/// A snapshot and its state.
#[derive(Clone)]
pub(crate) struct StoredSnapshot {
    pub(crate) record: SnapshotRecord,
    #[cfg_attr(not(feature = "fleet"), expect(dead_code, reason = "for shared stores"))]
    pub(crate) kept: SavedState,
}

/// The sandbox of a key of requests.
pub(crate) enum KeyState {
    /// No sandbox of it exists.
    Free,
    /// A request makes one now.
    Pending,
    Made(Box<SandboxRecord>),
}

/// A sandbox as its store sees it.
pub(crate) trait StoredSandbox: Send + Sync {
    fn id(&self) -> &str;
    /// Whether a state of it was saved.
    fn is_saved(&self) -> bool;
    /// Whether it was killed. From then on its record is removed, and not written any more.
    fn is_killed(&self) -> bool;
    /// The name of its saved state in the directory of this server.
    fn saved_name(&self) -> String;
    #[cfg(feature = "fleet")]
    fn record(&self) -> SandboxRecord;
    fn entry(&self) -> &StoreEntry;
}

/// Refuses to write the record of a sandbox that was killed, also for a save that had begun before.
/// To be checked by the holder of the lock under which the record is removed.
pub(crate) fn check_alive(sandbox: &dyn StoredSandbox) -> Result<(), ErrorResponse> {
    if sandbox.is_killed() {
        let message = format!("the sandbox {} was killed", sandbox.id());
        return Err(ErrorResponse::new(StatusCode::NOT_FOUND, message));
    }
    Ok(())
}

/// Keeps the records of sandboxes and snapshots. The provided methods suit a store that one server
/// has for itself.
#[async_trait]
pub(crate) trait SandboxStore: Send + Sync {
    /// The sandboxes of an earlier process, which are served again. `dir` is the directory of this
    /// server. Blocks.
    fn records(&self, dir: &Path) -> Result<Vec<SandboxRecord>, afresh::Cause>;

    /// An id for a new sandbox or snapshot of a tenant.
    fn new_id(&self, tenant: &str) -> Result<String, ErrorResponse>;

    /// Makes a template, or fetches the one that another host has made, and returns the digest that
    /// all hosts agree on. `parts` identify the template, `kept` is its name here, and `make` makes
    /// it. Blocks.
    fn template(
        &self,
        parts: &[&[u8]],
        kept: &Reference,
        make: &dyn Fn() -> Result<(), afresh::Cause>,
    ) -> Result<String, afresh::Cause> {
        let _ = (parts, kept);
        make().map(|()| String::new())
    }

    /// Whether this server may answer for a sandbox now.
    fn check(&self, sandbox: &dyn StoredSandbox) -> Result<(), ErrorResponse> {
        let _ = sandbox;
        Ok(())
    }

    /// Whether this server may save and end sandboxes: not if it may have lost them.
    fn is_owner(&self) -> bool {
        true
    }

    /// Whether this server is leaving its sandboxes to other hosts.
    fn is_leaving(&self) -> bool {
        false
    }

    /// Whether a paused sandbox is released for any host that needs it next.
    fn releases(&self) -> bool {
        false
    }

    /// Number of sandboxes of a tenant that are recorded and not among `here`, the ones of this
    /// server. Changes of other hosts arrive a moment later. `None` while the fleet is not counted
    /// yet.
    fn elsewhere(&self, tenant: &str, here: &mut dyn Iterator<Item = &str>) -> Option<usize> {
        let _ = (tenant, here);
        Some(0)
    }

    /// The use of a tenant on other hosts, in this window. It is late by their reports.
    fn use_elsewhere(&self, tenant: &str, window: u64) -> TenantUse {
        let _ = tenant;
        TenantUse { window, ..TenantUse::default() }
    }

    /// The sandbox of a key on any host. `None` if each server has its own keys.
    async fn key_state(
        &self,
        tenant: &str,
        key: &CreationKey,
    ) -> Result<Option<KeyState>, ErrorResponse> {
        let _ = (tenant, key);
        Ok(None)
    }

    /// Records a new sandbox; fails if another one has its key. A store in files records only saved
    /// ones.
    async fn create(
        &self,
        sandbox: &dyn StoredSandbox,
        entry: NewEntry,
    ) -> Result<(), ErrorResponse> {
        let _ = (sandbox, entry);
        Ok(())
    }

    /// Stores a state where all hosts that may need it find it. `bytes` is the size of its own
    /// pages. Blocks.
    fn save_state(
        &self,
        dir: &Path,
        saved: &SavedSnapshot,
        bytes: u64,
    ) -> Result<SavedState, ErrorResponse> {
        let _ = (dir, saved, bytes);
        Ok(SavedState::default())
    }

    /// Writes the record of a saved sandbox, unless it was killed. `release` leaves the sandbox to
    /// any host.
    async fn update(
        &self,
        sandbox: &dyn StoredSandbox,
        record: SandboxRecord,
        saved: Option<SavedState>,
        release: bool,
    ) -> Result<(), ErrorResponse>;

    /// Whether a sandbox has a record, which must follow its changes.
    fn has_record(&self, sandbox: &dyn StoredSandbox) -> bool;

    /// Removes the record of a sandbox.
    async fn remove(&self, sandbox: &dyn StoredSandbox) -> Result<(), ErrorResponse>;

    /// The reference that a saved sandbox is opened from. Blocks.
    fn source(&self, dir: &Path, sandbox: &dyn StoredSandbox) -> Result<String, ErrorResponse>;

    /// The sandbox was saved in the directory of this server, and is opened from there.
    fn saved_here(&self, sandbox: &dyn StoredSandbox) {
        let _ = sandbox;
    }

    /// The sandboxes of a tenant that are recorded elsewhere, those of other hosts among them; at
    /// most `most`.
    async fn sandboxes_of(
        &self,
        tenant: &str,
        most: usize,
    ) -> Result<RecordedSandboxes, ErrorResponse> {
        let _ = (tenant, most);
        Ok(RecordedSandboxes::default())
    }

    /// The snapshots that are known without a request.
    fn known_snapshots(&self) -> Vec<SnapshotRecord> {
        Vec::new()
    }

    /// Records a new snapshot, and returns its names. Another snapshot of the tenant loses a name
    /// that this one has. Of two that are recorded at the same time, the one that was recorded last
    /// has the name.
    async fn create_snapshot(&self, snapshot: StoredSnapshot)
    -> Result<Vec<String>, ErrorResponse>;

    /// Gives a snapshot further names, which others lose. `false` if it does not exist any more.
    async fn add_names(
        &self,
        record: &SnapshotRecord,
        names: &[String],
    ) -> Result<bool, ErrorResponse>;

    /// Takes names from a snapshot, as far as it has them.
    async fn remove_names(
        &self,
        record: &SnapshotRecord,
        names: &[String],
    ) -> Result<(), ErrorResponse>;

    /// A snapshot of a tenant, by its id or its name.
    async fn snapshot(
        &self,
        tenant: &str,
        name: &str,
    ) -> Result<Option<StoredSnapshot>, ErrorResponse>;

    /// The snapshots of a tenant, at most `most` where they are read from a ledger.
    async fn snapshots(
        &self,
        tenant: &str,
        most: usize,
    ) -> Result<Vec<SnapshotRecord>, ErrorResponse>;

    /// Removes the record of a snapshot.
    async fn remove_snapshot(&self, record: &SnapshotRecord) -> Result<(), ErrorResponse>;

    /// The reference that a snapshot is opened from. Blocks.
    fn snapshot_source(
        &self,
        dir: &Path,
        snapshot: &StoredSnapshot,
    ) -> Result<String, ErrorResponse>;

    /// Whether a name in the snapshots of this server has no record, because the server was killed
    /// between the save and the record. In a fleet other hosts may know it.
    fn is_orphan(&self, name: &str) -> bool {
        let _ = name;
        false
    }
}

#[cfg(feature = "fleet")]
mod shared {
    use std::sync::Arc;

    use axum::body::Body;
    use hyper::{HeaderMap, Request};
    use serde::{Deserialize, Serialize};

    use super::{SandboxRecord, StoredSandbox, TenantUse, UnknownFields};
    use crate::error_response::ErrorResponse;
    pub(crate) use crate::sandbox::records::record::milliseconds;
    pub(crate) use crate::sandbox::records::record::state_reference;

    /// A saved state in the store of a fleet.
    #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
    pub(crate) struct State {
        /// The digest of its manifest.
        pub(crate) digest: String,
        /// Bytes that its template lacks.
        pub(crate) bytes: u64,
        /// The life of the host that saved it.
        pub(crate) by: String,
        #[serde(flatten)]
        pub(crate) unknown: UnknownFields,
    }

    /// The entry of a sandbox as its owner knows it.
    #[derive(Clone, Debug)]
    pub(crate) struct OwnedEntry {
        pub(crate) revision: u64,
        /// The revision of the note that the sandbox is this host's.
        pub(crate) note: u64,
        pub(crate) state: Option<State>,
        /// A later state, which is in the store and which no entry names yet: the change that would
        /// have named it failed. The next change of the entry names it.
        pub(crate) pending: Option<State>,
        /// Fields of the entry that a later version has added.
        pub(crate) unknown: UnknownFields,
    }

    impl OwnedEntry {
        pub(crate) fn new(revision: u64, note: u64) -> Self {
            let unknown = UnknownFields::default();
            Self { revision, note, state: None, pending: None, unknown }
        }

        /// The entry has this revision now, and names this state. No later one is pending.
        pub(crate) fn note_change(&mut self, revision: u64, state: Option<State>) {
            (self.revision, self.state, self.pending) = (revision, state, None);
        }
    }

    /// The subject of a request about sandboxes.
    pub(crate) enum RouteSubject {
        /// One sandbox; the headers have its key or token.
        Sandbox { id: String, inside: bool },
        /// A new one.
        New,
        /// None, or all.
        Other,
    }

    /// The proof that requests about a sandbox need.
    pub(crate) struct SandboxAccess {
        pub(crate) tenant: Arc<str>,
        pub(crate) token: String,
    }

    impl SandboxAccess {
        pub(crate) fn of(record: &SandboxRecord) -> Self {
            Self { tenant: record.tenant.as_str().into(), token: record.token.clone() }
        }
    }

    /// The sandboxes of this server, as its fleet sees them.
    pub(crate) trait SandboxHost: Send + Sync {
        /// Whether this server knows about a sandbox: it is here, or it is being killed here.
        fn has(&self, id: &str) -> bool;

        /// Whether this server may answer for a sandbox that is here.
        fn check(&self, id: &str) -> Result<(), ErrorResponse>;

        /// Whether a request shows a key of the tenant, or the token of the sandbox or a signature
        /// by it if it is for its inside.
        fn proves(&self, request: &Request<Body>, access: &SandboxAccess, inside: bool) -> bool;

        /// Whether a request is for a program that listens in a sandbox.
        fn is_for_port(&self, headers: &HeaderMap) -> bool;

        /// Whether a request may move a sandbox to this host: it proves its access, or is for a
        /// port of a public sandbox. The sandbox runs, or is resumed by it, if the request is for
        /// its inside.
        fn permits(&self, request: &Request<Body>, record: &SandboxRecord, inside: bool) -> bool {
            let settings = &record.settings;
            if inside && record.paused && !settings.auto_resume {
                return false;
            }
            let is_public = inside && settings.public && self.is_for_port(request.headers());
            is_public || self.proves(request, &SandboxAccess::of(record), inside)
        }

        /// The answer to a request into a sandbox that does not prove its access.
        fn no_token(&self, headers: &HeaderMap, id: &str) -> ErrorResponse;

        /// The tenant of a key.
        fn tenant(&self, headers: &HeaderMap) -> Option<Arc<str>>;

        /// Names of the templates.
        fn templates(&self) -> Vec<String>;

        /// Whether a template of exactly this name exists.
        fn has_template(&self, name: &str) -> bool;

        /// The digest of the template `name`, or of the default one.
        fn template_digest(&self, name: Option<&str>) -> Option<String>;

        /// Digests of the templates and ids of the open snapshots.
        fn held_sources(&self) -> Vec<String>;

        /// Running calls, and their limit.
        fn busy(&self) -> (usize, usize);

        /// Number of live sandboxes.
        fn live(&self) -> usize;

        /// The use of the tenants that have limits on all hosts together.
        fn tenant_uses(&self) -> Vec<(Arc<str>, TenantUse)>;

        /// Takes in a sandbox that the ledger gave to this host. It is in doubt unless `is_current`
        /// holds once no call of [`doubt_all`](Self::doubt_all) can miss it.
        fn adopt(
            &self,
            record: SandboxRecord,
            owned_entry: OwnedEntry,
            is_current: &dyn Fn() -> bool,
        );

        /// The lease is lost: calls of these sandboxes are refused until their owner is known.
        fn doubt_all(&self);

        /// The sandboxes in doubt.
        fn doubtful(&self) -> Vec<Arc<dyn StoredSandbox>>;

        /// The ledger confirmed the owner of a sandbox, whose doubt ends if `is_current` holds.
        fn confirm(&self, sandbox: &dyn StoredSandbox, is_current: &dyn Fn() -> bool);

        /// Drops a sandbox that another host has taken.
        fn give_up(&self, id: &str);
    }
}
