//! Removing from a fleet's store what nothing in its ledger names any more: states of sandboxes that were killed or saved anew.
//!
//! What it promises: an entry that cannot be read ends it, and so does a ledger with nothing in it. Hosts go on meanwhile;
//! the store says how (`afresh::store::remote`).

use std::collections::BTreeSet;
use std::time::Duration;

use afresh::Sha256;
use afresh::store::Collected;
use afresh::store::remote::{Keeper, RemoteError};

use super::config::FleetConfig;
use super::entry::Entry;
use super::links::{self, Links};
use super::{keep, keeper};

/// A fleet's store could not be collected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectError {
    /// There is no way to the fleet.
    #[error("the fleet cannot be asked")]
    Away(#[source] afresh::Cause),
    /// It was not said where the store is.
    #[error("a fleet's store is collected where it is: name it as the hosts do")]
    NoStore,
    /// The store refused, or the ledger could not be read.
    #[error(transparent)]
    Store(#[from] RemoteError),
    /// A thread could not be had.
    #[error("a thread for it could not be had")]
    Thread(#[source] afresh::Cause),
}

/// Every digest that the ledger names.
async fn names(links: &Links) -> Result<Vec<Sha256>, afresh::Cause> {
    let mut all = BTreeSet::new();
    // Twice: an entry that hosts change while it is read moves to the end of what NATS lists.
    for _ in 0..2 {
        for found in links::every(&links.client, &links.sandboxes).await? {
            let entry: Entry = serde_json::from_slice(&found.value)?;
            all.extend(entry.state.map(|state| state.digest));
        }
        for found in links::every(&links.client, &links.kept).await? {
            all.extend(keep::digest(&found.value));
        }
    }
    let parsed = all.iter().map(|digest| {
        digest
            .parse::<Sha256>()
            .map_err(|_| format!("an entry names `{digest}`, which is no digest").into())
    });
    parsed.collect()
}

/// Removes from the fleet's store what its ledger does not name and what is older than `grace`.
///
/// # Errors
/// [`CollectError`].
pub async fn collect(config: &FleetConfig, grace: Duration) -> Result<Collected, CollectError> {
    let links = Links::open(config, "afresh").await.map_err(CollectError::Away)?;
    let place = config.store.clone().ok_or(CollectError::NoStore)?;
    let (keeper, runtime) = (keeper(config), tokio::runtime::Handle::current());
    let collecting = move || {
        let store = super::store(&place).map_err(CollectError::Away)?;
        let mut names = || runtime.block_on(names(&links));
        Ok(store.gc(Some(Keeper { name: &keeper, names: &mut names }), grace)?)
    };
    let done = tokio::task::spawn_blocking(collecting).await;
    done.map_err(|error| CollectError::Thread(error.into()))?
}
