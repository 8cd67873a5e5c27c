//! The objects of a store, as collections and concurrent writers see them.

use std::time::Duration;

use crate::Sha256;
use crate::local::live_set::LiveSet;

/// How long an object that is there counts as sent.
pub(super) const TRUSTED: Duration = Duration::from_secs(24 * 3600);
/// A writer that takes longer from its first look at an object to its name looks again.
pub(super) const NAMED_WITHIN: Duration = Duration::from_secs(12 * 3600);

/// An object that can be collected.
#[derive(Clone, Debug)]
pub(super) struct StoredObject {
    /// Its name below the remote's prefix.
    pub(super) name: String,
    pub(super) size: u64,
    pub(super) age: Duration,
}

impl StoredObject {
    pub(super) fn is_live(&self, live: &LiveSet) -> bool {
        let mut parts = self.name.rsplit('/');
        match (parts.next(), parts.next()) {
            (Some(digest), Some("sha256")) => {
                let digest = format!("sha256:{digest}").parse::<Sha256>();
                // Other objects are never removed.
                digest.map_or(true, |digest| live.blobs.contains(&digest))
            }
            (Some(_), Some(journal)) => live.journals.contains(journal),
            _ => true,
        }
    }

    /// The journal that it is a turn of.
    pub(super) fn journal(&self) -> Option<&str> {
        let (above, _) = self.name.rsplit_once('/')?;
        (!above.ends_with("sha256")).then_some(above)
    }
}
