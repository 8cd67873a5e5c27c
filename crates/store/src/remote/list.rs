//! What a remote holds, by name.

use super::{Remote, RemoteError};
use crate::Listed;
use crate::manifest::{MAX_MANIFEST, Manifest, parse};

impl Remote {
    /// Every name, in order, and what it means; an entry is an error when its manifest can not be read.
    /// Fetches `index.json` and each manifest.
    ///
    /// # Errors
    /// As [`Remote::tags`].
    pub fn list(&self) -> Result<Vec<(String, Result<Listed, RemoteError>)>, RemoteError> {
        let mut list = Vec::new();
        for tag in self.tags()? {
            let read = async {
                let bytes = self.get_blob("the manifest", tag.id, MAX_MANIFEST).await?;
                let manifest: Manifest = parse("the manifest", &bytes)?;
                manifest.check()?;
                Ok(manifest)
            };
            let listed = self.block_on(read).map(|manifest| Listed::new(tag.clone(), &manifest));
            list.push((tag.name, listed));
        }
        Ok(list)
    }
}
