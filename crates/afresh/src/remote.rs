//! Places in object stores and registries.

use std::path::PathBuf;

#[cfg(feature = "guests")]
use afresh_store::Sha256;
use afresh_store::Snapshot;
use afresh_store::remote::{Remote, RemoteError, RetryPolicy};

#[cfg(feature = "guests")]
use crate::LATEST;
use crate::{OpenError, Options, Place, Reference};

impl Place {
    /// The remote behind a URL.
    ///
    /// # Errors
    /// [`OpenError::Place`] for a directory or a file, [`OpenError::Snapshot`] for a URL that is
    /// not a remote.
    pub fn remote(&self) -> Result<Remote, OpenError> {
        match self {
            Self::Remote(url) => {
                Remote::open(url, RetryPolicy::default()).map_err(|error| self.failed(error))
            }
            Self::Directory(_) | Self::File(_) => Err(OpenError::Place {
                place: self.clone(),
                needs: "a remote, which is a URL such as s3://bucket/prefix or file:///directory",
            }),
        }
    }
}

impl Reference {
    /// The snapshot in a remote.
    pub(crate) fn load_remote(&self, options: &Options) -> Result<Snapshot, OpenError> {
        let mut remote = self.place().remote()?;
        remote.prepare();
        if let Some(dir) = options.page_cache() {
            remote = remote.with_cache(dir);
        }
        remote.load_with(self.name(), &options.access).map_err(|error| match error {
            RemoteError::Open(error) => self.not_opened(error),
            other => self.place_failed(other),
        })
    }
}

#[cfg(feature = "guests")]
impl Reference {
    /// The digest of the manifest or index in a remote.
    pub(crate) fn remote_digest(&self) -> Result<Sha256, OpenError> {
        let remote = self.place().remote()?;
        let name = self.explicit_name().or(remote.name()).unwrap_or(LATEST);
        match remote.resolve(name) {
            Ok(digest) => Ok(digest),
            Err(RemoteError::Open(afresh_store::OpenError::NoSuchName { known, .. }))
                if self.explicit_name().is_none() && known.len() == 1 =>
            {
                remote.resolve(&known[0]).map_err(|error| self.place_failed(error))
            }
            Err(error) => Err(self.place_failed(error)),
        }
    }
}

impl OpenError {
    /// Whether the place of a snapshot or an image does not answer, so that a later attempt may
    /// open it. A place that answers that the name is missing is no outage.
    #[must_use]
    pub fn is_outage(&self) -> bool {
        match self {
            Self::Snapshot { source, .. } | Self::Guest { source, .. } => {
                source.downcast_ref::<RemoteError>().is_some_and(RemoteError::is_outage)
            }
            _ => false,
        }
    }
}

impl Options {
    /// Directory for pages of remote snapshots.
    fn page_cache(&self) -> Option<PathBuf> {
        self.page_cache.clone().or_else(|| Some(self.cache.as_ref()?.join("pages")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_no_remote() {
        let dir: Place = "/nowhere".parse().unwrap();
        assert!(dir.remote().unwrap_err().to_string().contains("s3://bucket/prefix"));
    }
}
