//! Garbage collection: blobs that no name reaches are removed.

use std::collections::HashSet;
use std::fs;

use crate::blobs::{TEMPORARY, sync_dir};
use crate::digest::from_hex;
use crate::open::read_manifest;
use crate::store::BLOB_LOCK;
use crate::{SaveError, Sha256, Store};

/// What a collection removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Blobs and temporary files removed.
    pub files: usize,
    /// Bytes they held.
    pub bytes: u64,
    /// Blobs kept.
    pub kept: usize,
}

impl Store {
    /// Removes every blob that no name reaches, and what killed writers left. Waits until no snapshot
    /// is being saved. Snapshots that are open stay readable.
    ///
    /// Manifests of other tools in `index.json` keep what they name; one that this crate can not read
    /// stops the collection, for it can not tell what that one needs.
    ///
    /// # Errors
    /// A damaged manifest or an I/O error; nothing that a name reaches is ever removed.
    pub fn gc(&self) -> Result<Collected, SaveError> {
        let _lock = self.lock(BLOB_LOCK, true)?;
        // Names can not change meanwhile, and temporary files beside `index.json` are dead ones.
        let _index = self.lock_index()?;
        let mut live: HashSet<Sha256> = HashSet::new();
        for descriptor in self.index()?.manifests {
            let id = descriptor.digest("`index.json`")?;
            let manifest = read_manifest(self, id)?;
            live.insert(id);
            live.insert(manifest.config.digest("the manifest")?);
            for layer in &manifest.layers {
                live.insert(layer.digest("the manifest")?);
            }
        }
        let mut collected = Collected::default();
        for dir in [self.blob_dir(), self.root().to_owned()] {
            let io = |e| SaveError::io(&dir, e);
            for entry in fs::read_dir(&dir).map_err(io)? {
                let entry = entry.map_err(io)?;
                let name = entry.file_name();
                let Some(name) = name.to_str() else { continue };
                let dead = match from_hex(name) {
                    Some(digest) => !live.contains(&Sha256(digest)),
                    None => name.starts_with(TEMPORARY),
                };
                if !dead {
                    collected.kept += usize::from(from_hex(name).is_some());
                    continue;
                }
                collected.files += 1;
                collected.bytes += entry.metadata().map_err(io)?.len();
                fs::remove_file(entry.path()).map_err(io)?;
            }
            sync_dir(&dir).map_err(io)?;
        }
        Ok(collected)
    }
}
