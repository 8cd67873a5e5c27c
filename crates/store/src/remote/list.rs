//! The snapshots of a remote, by name.

use super::{Remote, RemoteError};
use crate::local::list::{Extent, ListEntry};

impl Remote {
    /// Lists every name in order, with the size of its snapshot. It fetches the names and every
    /// manifest.
    ///
    /// # Errors
    /// As [`Remote::tags`].
    pub fn list(&self) -> Result<Vec<ListEntry<RemoteError>>, RemoteError> {
        let mut list = Vec::new();
        for tag in self.tags()? {
            let manifest = self.block_on(self.manifest_of(&tag.id.to_string()));
            list.push(ListEntry {
                tag,
                extent: manifest.map(|(_, manifest)| Extent::of(&manifest)),
            });
        }
        Ok(list)
    }
}
