//! Sealing the entries of a ledger from before the fleet had a key, and listing those that are not
//! sealed.
//!
//! Promises: an entry that a host changes at the same time is left to that host, and listed as
//! plain. A sandbox keeps the rest of its time, and ends without a host as before. May break it: an
//! entry that another client of NATS wrote is sealed like any other. So entries are sealed before
//! hosts require it, and later only checked.

use bytes::Bytes;
use serde::Serialize;

use super::cipher;
use super::config::FleetConfig;
use super::creation_keys::{self, CLAIM_LIFETIME};
use super::credentials::Role;
use super::nats::{self, Bucket, BucketEntry, NatsConnection, NatsError};
use super::record::Entry;

/// The entries of a ledger could not be sealed or checked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// The fleet cannot be reached.
    #[error("cannot reach the fleet")]
    Away(#[source] afresh::Cause),
    /// No key was given.
    #[error(
        "entries are sealed by the key of the fleet; name it with `--entry-key`, as the hosts do"
    )]
    NoKey,
    /// The ledger could not be read or written.
    #[error("the ledger of the fleet cannot be read or written")]
    Ledger(#[source] afresh::Cause),
}

/// The entries of a ledger by whether they are sealed.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct SealReport {
    /// Entries that were sealed before, by the fleet's key.
    pub sealed: usize,
    /// Entries that this command sealed.
    pub changed: usize,
    /// Keys of entries that are not sealed.
    pub plain: Vec<String>,
    /// Keys of entries that the fleet's key does not open, and of damaged ones.
    pub unreadable: Vec<String>,
}

/// Seals the entries of a fleet that are not sealed yet; with `check` it only lists them.
///
/// # Errors
/// [`SealError`].
pub async fn seal(config: &FleetConfig, check: bool) -> Result<SealReport, SealError> {
    let ledger = |error: NatsError| SealError::Ledger(error.into());
    if config.entry_key.is_none() {
        return Err(SealError::NoKey);
    }
    let role = if check { Role::Reader } else { Role::Admin };
    let links = NatsConnection::open(config, "afresh", role).await.map_err(SealError::Away)?;
    let mut report = SealReport::default();
    let kept = nats::every_stored(&links.client, &links.kept).await.map_err(ledger)?;
    let sandboxes = nats::every_stored(&links.client, &links.sandboxes).await.map_err(ledger)?;
    let leases = nats::every(&links.client, &links.hosts).await.map_err(ledger)?;
    // The clock of the NATS servers, as of the last change: hosts renew their leases all the time.
    let now = sandboxes.iter().chain(&leases).map(|found| found.time).max().unwrap_or_default();
    for found in kept {
        let Some(found) = plain(&links.kept, found, check, &mut report) else { continue };
        let BucketEntry { key, value, revision, .. } = found;
        // A change sets the lifetime anew.
        let lifetime = creation_keys::is_claim(&key).then_some(CLAIM_LIFETIME);
        let lifetime = lifetime.and_then(|most| u64::try_from(most.as_millis()).ok());
        let sealed = nats::update_for(&links.kept, &key, value, revision, lifetime).await;
        report.count(key, sealed).map_err(ledger)?;
    }
    for found in sandboxes {
        let Some(found) = plain(&links.sandboxes, found, check, &mut report) else { continue };
        let BucketEntry { key, value, revision, time } = found;
        let Ok(entry) = serde_json::from_slice::<Entry>(&value) else {
            report.unreadable.push(key);
            continue;
        };
        // Sealing changes the time of the entry, and not that of the sandbox.
        let entry = entry.passed_on(time);
        let lifetime = entry.unowned_lifetime(time, now);
        let value = Bytes::from(serde_json::to_vec(&entry).unwrap_or_default());
        let sealed = nats::update_for(&links.sandboxes, &key, value, revision, lifetime).await;
        report.count(key, sealed).map_err(ledger)?;
    }
    Ok(report)
}

/// An entry that is to be sealed. Any other is counted.
fn plain(
    bucket: &Bucket,
    found: BucketEntry,
    check: bool,
    report: &mut SealReport,
) -> Option<BucketEntry> {
    if !cipher::is_sealed(&found.value) {
        if !check {
            return Some(found);
        }
        report.plain.push(found.key);
        return None;
    }
    match bucket.open(&found.key, found.value) {
        Ok(_) => report.sealed += 1,
        Err(_) => report.unreadable.push(found.key),
    }
    None
}

impl SealReport {
    /// Counts an entry by the outcome of sealing it.
    fn count(&mut self, key: String, sealed: Result<u64, NatsError>) -> Result<(), NatsError> {
        match sealed {
            Ok(_) => self.changed += 1,
            Err(NatsError::Changed) => self.plain.push(key),
            Err(error) => return Err(error),
        }
        Ok(())
    }
}
