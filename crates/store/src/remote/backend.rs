//! The operations of a remote, in any protocol.
//!
//! Blobs are named by their digest, snapshots by names that mean manifests. Implementations repeat
//! failed requests by [`Retrier`](super::retry::Retrier) and bound their reads; callers check
//! digests.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::Handle;

use super::RemoteError;
use super::stored_object::StoredObject;
use crate::disk::two_clocks::TwoClocks;
use crate::local::naming::ExpectedName;
use crate::{OpenError, Sha256, Tag};

/// The bytes of a blob to be sent.
pub(super) trait Source {
    /// Fills `out` from `offset` on.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), RemoteError>;
}

/// Connections that are opened ahead.
pub(super) const CONNECTIONS: usize = 4;

/// The manifest that a name refers to.
pub(super) struct ResolvedName {
    /// Digest of the manifest.
    pub(super) id: Sha256,
    /// Its length, where the remote says so.
    pub(super) size: Option<u64>,
    /// The manifest, where it came with the answer. Has the digest `id`.
    pub(super) manifest: Option<Vec<u8>>,
}

/// A server, or a directory, that holds blobs and names.
#[async_trait(?Send)]
pub(super) trait Backend: fmt::Display + Send + Sync {
    /// Looks up a name: a tag, or a manifest digest in the form `sha256:…`.
    async fn resolve(&self, name: &str) -> Result<ResolvedName, RemoteError>;

    /// Begins to open connections, as many as opening a snapshot may use, and waits for none of
    /// them.
    fn prepare(&self, tasks: &Handle);

    /// Refuses what cannot name a snapshot here.
    fn check_name(&self, name: &str) -> Result<(), RemoteError>;

    /// The names, in order.
    async fn tags(&self) -> Result<Vec<Tag>, RemoteError>;

    /// A manifest, of at most `limit` bytes. Not checked against `id`.
    async fn manifest(&self, id: Sha256, limit: u64) -> Result<Vec<u8>, RemoteError>;

    /// A blob of at most `limit` bytes. Not checked against `digest`.
    async fn blob(
        &self,
        what: &'static str,
        digest: Sha256,
        limit: u64,
    ) -> Result<Vec<u8>, RemoteError>;

    /// Exactly the bytes in `range`, which is not empty.
    async fn range(&self, digest: Sha256, range: Range<u64>) -> Result<Vec<u8>, RemoteError>;

    /// Whether a blob of `size` bytes is there, and will be until it has a name.
    async fn has(&self, digest: Sha256, size: u64) -> Result<bool, RemoteError>;

    /// Sends a blob in one request.
    async fn put(&self, digest: Sha256, bytes: Vec<u8>) -> Result<(), RemoteError>;

    /// Sends a blob of `size` bytes in parts, with bounded memory, and says after each how many
    /// bytes were sent.
    async fn put_parts(
        &self,
        digest: Sha256,
        size: u64,
        source: &dyn Source,
        sent: &mut dyn FnMut(u64),
    ) -> Result<(), RemoteError>;

    /// Sends a manifest that is opened by its digest alone.
    async fn put_manifest(&self, id: Sha256, manifest: Vec<u8>) -> Result<(), RemoteError>;

    /// Whether sessions can be saved here turn by turn.
    fn keeps_turns(&self) -> bool {
        false
    }

    /// The turns of a journal, in order, of at most `limit` bytes together. Not checked.
    async fn turns(&self, journal: &str, limit: u64) -> Result<Vec<Vec<u8>>, RemoteError> {
        let (_, journal) = (limit, journal.to_owned());
        Err(OpenError::NoJournal { journal }.into())
    }

    /// Puts turn `number` behind those that are there, in one request, unless it is there already.
    /// False if there is another. After an error it may be there.
    async fn put_turn(
        &self,
        journal: &str,
        number: usize,
        turn: &[u8],
    ) -> Result<bool, RemoteError> {
        let (_, _, journal) = (number, turn, journal.to_owned());
        Err(OpenError::NoJournal { journal }.into())
    }

    /// Every object that can be collected.
    async fn stored(&self) -> Result<Vec<StoredObject>, RemoteError> {
        Err(RemoteError::NoCollection)
    }

    /// Removes those of these objects that still are of this age, and says which.
    async fn sweep(
        &self,
        batch: &[StoredObject],
        grace: Duration,
    ) -> Result<Vec<StoredObject>, RemoteError> {
        let _ = (batch, grace);
        Err(RemoteError::NoCollection)
    }

    /// Whether nothing was removed while objects were sent; waits until that has ended.
    async fn settled(&self) -> Result<bool, RemoteError> {
        Ok(true)
    }

    /// Notes that objects are named elsewhere.
    async fn claim(&self, keeper: &str) -> Result<(), RemoteError> {
        let _ = keeper.to_owned();
        Ok(())
    }

    /// Those who do.
    async fn keepers(&self) -> Result<Vec<String>, RemoteError> {
        Ok(Vec::new())
    }

    /// The names, as they are written.
    async fn index_json(&self) -> Result<Option<serde_json::Value>, RemoteError> {
        Ok(None)
    }

    /// Makes `name` mean a manifest whose blobs are all there, if it has the expected target.
    /// Atomic: at every moment the name means the old manifest or the new one. The session that it
    /// meant takes no turn from then on. The blobs were looked at since `begun`: if that is long
    /// ago, a collection may have removed them, and the name stays.
    async fn publish(
        &self,
        name: &str,
        id: Sha256,
        manifest: Vec<u8>,
        (expected, begun): (ExpectedName, TwoClocks),
    ) -> Result<(), RemoteError>;
}
