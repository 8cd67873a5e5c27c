//! Garbage collection: blobs that nothing in `index.json` reaches are removed.
//!
//! A layout may hold images and artifacts of other tools. Blobs that they name are kept, in any
//! field. Only damage stops the collection: the blobs of a manifest with a wrong digest are
//! unknown.
//!
//! The directory may also be one that programs use as a remote (`file://`). The ledger of a fleet
//! names its snapshots there, so a collection without it is refused.

use std::collections::HashSet;
use std::{fs, io};

use crate::blobs::file::read_bounded;
use crate::disk::temporary::{TEMPORARY, sync_dir};
use crate::format::descriptor::{JOURNALS, KEEPERS, is_journal};
use crate::format::digest::from_hex;
use crate::format::manifest::parse;
use crate::local::live_set::{LiveSet, MAX_FOREIGN, reach};
use crate::local::remote_turns::remove_old_turns;
use crate::local::staging::{belongs, remove};
use crate::{OpenError, SaveError, Sha256, Store};

/// Counts of a collection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectionReport {
    /// Blobs and temporary files removed.
    pub files: usize,
    /// Bytes of these files.
    pub bytes: u64,
    /// Blobs kept.
    pub kept: usize,
}

impl Store {
    /// Removes the blobs that are unreachable from `index.json`, and files of killed writers. It
    /// keeps blobs of saves and transfers in progress without waiting for them, and blobs that
    /// manifests of other tools name. Open snapshots stay readable.
    ///
    /// # Errors
    /// [`SaveError::Kept`] where a fleet names snapshots of the directory; a damaged manifest or an
    /// I/O error. Reachable blobs are never removed.
    pub fn gc(&self) -> Result<CollectionReport, SaveError> {
        let _locks = self.lock_all_blobs()?;
        // Names cannot change meanwhile, and the temporary files of `index.json` are dead ones.
        let _index = self.lock_index()?;
        // Behind the locks, because a fleet may begin during the wait for them.
        self.check_keepers()?;
        // A writer that died may have replaced `index.json` without a sync. After a power failure
        // the one before would name blobs that are removed here.
        sync_dir(self.root()).map_err(|e| SaveError::io(self.root(), e))?;
        let mut live = self.live()?;
        let writers = self.staged(&mut live)?;
        let mut collected = CollectionReport::default();
        for dir in [self.blob_dir(), self.root().to_owned()] {
            let io = |e| SaveError::io(&dir, e);
            for entry in fs::read_dir(&dir).map_err(io)? {
                let entry = entry.map_err(io)?;
                let name = entry.file_name();
                let Some(name) = name.to_str() else { continue };
                let dead = match from_hex(name) {
                    Some(digest) => !live.blobs.contains(&Sha256(digest)),
                    None => name.starts_with(TEMPORARY) && !belongs(name, &writers),
                };
                if !dead {
                    collected.kept += usize::from(from_hex(name).is_some());
                    continue;
                }
                collected.files += 1;
                // Its writer may remove it at the same time.
                collected.bytes += entry.metadata().map_or(0, |meta| meta.len());
                afresh_sys::crash::point();
                remove(&entry.path()).map_err(io)?;
            }
            sync_dir(&dir).map_err(io)?;
        }
        self.collect_journals(&live, &mut collected)?;
        Ok(collected)
    }

    /// Refuses a directory whose snapshots are named elsewhere.
    fn check_keepers(&self) -> Result<(), SaveError> {
        use io::ErrorKind::{NotADirectory, NotFound};
        let dir = self.root().join(KEEPERS);
        let first = match fs::read_dir(&dir) {
            // Other tools may have a file of that name.
            Err(error) if matches!(error.kind(), NotFound | NotADirectory) => None,
            entries => {
                let first = entries.and_then(|mut entries| entries.next().transpose());
                first.map_err(|e| SaveError::io(&dir, e))?
            }
        };
        match first {
            None => Ok(()),
            Some(entry) => Err(SaveError::Kept {
                path: self.root().to_owned(),
                by: entry.file_name().to_string_lossy().into_owned(),
            }),
        }
    }

    /// Removes the turns of sessions that no manifest names any more.
    fn collect_journals(
        &self,
        live: &LiveSet,
        collected: &mut CollectionReport,
    ) -> Result<(), SaveError> {
        let dir = self.root().join(JOURNALS);
        let io = |e| SaveError::io(&dir, e);
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(io)?,
        };
        for entry in entries {
            let entry = entry.map_err(io)?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            let dead =
                name.starts_with(TEMPORARY) || (is_journal(name) && !live.journals.contains(name));
            if !dead {
                continue;
            }
            let (path, meta) = (entry.path(), entry.metadata().map_err(io)?);
            if meta.is_dir() {
                let removed = remove_old_turns(&path).map_err(|e| SaveError::io(&path, e))?;
                collected.files += removed.files;
                collected.bytes += removed.bytes;
                continue;
            }
            collected.files += 1;
            collected.bytes += meta.len();
            afresh_sys::crash::point();
            fs::remove_file(path).map_err(io)?;
        }
        sync_dir(&dir).map_err(io)
    }

    /// Every blob that something in `index.json` reaches.
    fn live(&self) -> Result<LiveSet, OpenError> {
        let mut live = LiveSet::default();
        let mut manifests: Vec<Sha256> = Vec::new();
        for descriptor in self.index()?.manifests {
            // Blobs of other digests are elsewhere, and are not touched.
            let Ok(id) = descriptor.digest.parse::<Sha256>() else { continue };
            live.blobs.insert(id);
            manifests.push(id);
            // Such as the manifest that an artifact is attached to.
            for other in descriptor.others.values() {
                reach(other, &mut live, &mut manifests);
            }
        }
        let mut seen = HashSet::new();
        while let Some(id) = manifests.pop() {
            if !seen.insert(id) {
                continue;
            }
            let bytes = match read_bounded(&self.blob_path(id), "a manifest", MAX_FOREIGN) {
                Ok(bytes) => bytes,
                // A copy of a part of an image: what is not there needs nothing.
                Err(error) if error.is_missing_file() => continue,
                Err(error) => return Err(error),
            };
            if Sha256::of(&bytes) != id {
                return Err(OpenError::Digest { what: "a manifest", expected: id });
            }
            match parse("a manifest", &bytes) {
                Ok(manifest) => reach(&manifest, &mut live, &mut manifests),
                Err(error @ OpenError::TooLarge { .. }) => return Err(error),
                // Other bytes than JSON name nothing.
                Err(_) => {}
            }
        }
        Ok(live)
    }
}
