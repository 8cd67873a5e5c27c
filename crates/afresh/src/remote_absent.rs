//! No remotes: this build lacks the feature `remote`.

#[cfg(feature = "guests")]
use afresh_store::Sha256;
use afresh_store::Snapshot;

use crate::{OpenError, Options, Reference};

impl Reference {
    /// The snapshot in a remote.
    pub(crate) fn load_remote(&self, _: &Options) -> Result<Snapshot, OpenError> {
        Err(self.lacking_remote())
    }

    /// The digest of a manifest in a remote.
    #[cfg(feature = "guests")]
    pub(crate) fn remote_digest(&self) -> Result<Sha256, OpenError> {
        Err(self.lacking_remote())
    }

    /// The error of everything in a remote.
    pub(crate) fn lacking_remote(&self) -> OpenError {
        OpenError::Feature { what: self.to_string(), feature: "remote" }
    }
}

impl OpenError {
    /// Whether the place of a snapshot does not answer. No place is a remote here.
    #[must_use]
    pub fn is_outage(&self) -> bool {
        false
    }
}
