//! Garbage collection in the store of a fleet: removes states that no entry of the ledger names.
//!
//! Promises: an unreadable entry or an empty ledger ends the collection. Hosts keep working;
//! `afresh::store::remote` describes how.

use std::collections::BTreeSet;
use std::time::Duration;

use afresh::Sha256;
use afresh::store::CollectionReport;
use afresh::store::remote::{GcRoot, RemoteError};

use super::config::FleetConfig;
use super::credentials::Role;
use super::nats::{self, NatsConnection};
use super::record::Entry;
use super::{catalog, keeper};

/// A fleet's store could not be collected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectError {
    /// The fleet cannot be reached.
    #[error("cannot reach the fleet")]
    Away(#[source] afresh::Cause),
    /// No store was given.
    #[error("a fleet's store is collected where it is: name it as the hosts do")]
    NoStore,
    /// The store refused, or the ledger could not be read.
    #[error(transparent)]
    Store(#[from] RemoteError),
    /// A thread could not be started.
    #[error(
        "cannot start a thread; raise the limits of tasks (`ulimit -u`, the cgroup's `pids.max`)"
    )]
    Thread(#[source] afresh::Cause),
}

/// Every digest that the ledger names.
async fn names(links: &NatsConnection) -> Result<Vec<Sha256>, afresh::Cause> {
    let mut all = BTreeSet::new();
    // Twice: an entry that changes during the read moves to the end of the list.
    for _ in 0..2 {
        for found in nats::every(&links.client, &links.sandboxes).await? {
            let entry: Entry = serde_json::from_slice(&found.value)?;
            all.extend(entry.state.map(|state| state.digest));
        }
        for found in nats::every(&links.client, &links.kept).await? {
            all.extend(catalog::digest(&found.key, &found.value));
        }
    }
    let parsed = all.iter().map(|digest| {
        digest
            .parse::<Sha256>()
            .map_err(|_| format!("an entry names `{digest}`, which is no digest").into())
    });
    parsed.collect()
}

/// Removes objects from the fleet's store that its ledger does not name and that are older than
/// `grace`.
///
/// # Errors
/// [`CollectError`].
pub async fn collect(
    config: &FleetConfig,
    grace: Duration,
) -> Result<CollectionReport, CollectError> {
    let links =
        NatsConnection::open(config, "afresh", Role::Reader).await.map_err(CollectError::Away)?;
    let place = config.store.clone().ok_or(CollectError::NoStore)?;
    let (keeper, runtime) = (keeper(config), tokio::runtime::Handle::current());
    let collecting = move || {
        let store = super::store(&place).map_err(CollectError::Away)?;
        let mut names = || runtime.block_on(names(&links));
        Ok(store.gc(Some(GcRoot { name: &keeper, names: &mut names }), grace)?)
    };
    let done = tokio::task::spawn_blocking(collecting).await;
    done.map_err(|error| CollectError::Thread(error.into()))?
}
