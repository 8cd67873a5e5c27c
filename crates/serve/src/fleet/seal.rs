//! Sealing the entries of a ledger from before the fleet had a key, and listing those that are not sealed.
//!
//! Promises: an entry that a host changes at the same time is left to that host, and listed as plain.
//! May break it: an entry that another client of NATS wrote is sealed like any other. So entries are sealed before
//! hosts require it, and later only checked.

use serde::Serialize;

use super::cipher;
use super::config::FleetConfig;
use super::credentials::Role;
use super::nats::{self, NatsConnection, NatsError};

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
    /// Keys of entries that the fleet's key does not open.
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
    for bucket in [&links.sandboxes, &links.kept] {
        for found in nats::every_stored(&links.client, bucket).await.map_err(ledger)? {
            if cipher::is_sealed(&found.value) {
                match bucket.open(&found.key, found.value) {
                    Ok(_) => report.sealed += 1,
                    Err(_) => report.unreadable.push(found.key),
                }
                continue;
            }
            if check {
                report.plain.push(found.key);
                continue;
            }
            match nats::update(bucket, &found.key, found.value, found.revision).await {
                Ok(_) => report.changed += 1,
                Err(NatsError::Changed) => report.plain.push(found.key),
                Err(error) => return Err(ledger(error)),
            }
        }
    }
    Ok(report)
}
