//! No remotes: this build lacks the feature `remote`.

use afresh_store::Snapshot;

use crate::{OpenError, Options, Reference};

impl Reference {
    /// The snapshot in a remote.
    pub(crate) fn load_remote(&self, _: &Options) -> Result<Snapshot, OpenError> {
        Err(self.lacking_remote())
    }

    /// The error of everything in a remote.
    pub(crate) fn lacking_remote(&self) -> OpenError {
        OpenError::Feature { what: self.to_string(), feature: "remote" }
    }
}
