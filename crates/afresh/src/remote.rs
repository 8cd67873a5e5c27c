//! Places in object stores and registries.

use std::path::PathBuf;

use afresh_store::Snapshot;
use afresh_store::remote::{Remote, RemoteError, RetryPolicy};

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
