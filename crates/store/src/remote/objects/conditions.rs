//! Guards the names of an object store against concurrent writers: by conditional writes, whose
//! support is checked once, or by a lock if the store is a directory.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use afresh_sys::crash::point;
use object_store::{Error, ObjectStoreExt, PutMode, UpdateVersion};

use super::super::RemoteError;
use super::Objects;
use crate::format::manifest::{INDEX_FILE, Manifest};
use crate::{SaveError, Sha256};

/// The object that is written to check conditions.
const PROBE: &str = "conditions";
const PROBE_TEXT: &str = "A check that this store keeps the conditions of a write.\n";

/// Whether a write was refused because its condition did not hold.
pub(super) fn is_conflict(error: &RemoteError) -> bool {
    matches!(
        error,
        RemoteError::Object {
            source: Error::Precondition { .. } | Error::AlreadyExists { .. },
            ..
        }
    )
}

/// Whether the client knows that the store has no conditional writes.
fn is_unknown(error: &RemoteError) -> bool {
    matches!(
        error,
        RemoteError::Object {
            source: Error::NotImplemented { .. } | Error::NotSupported { .. },
            ..
        }
    )
}

impl Objects {
    /// Refuses a store that writes where the condition of a write does not hold. Asks it once.
    pub(super) async fn check_conditions(&self) -> Result<(), RemoteError> {
        self.conditional.get_or_try_init(|| self.probe()).await.map(drop)
    }

    async fn probe(&self) -> Result<(), RemoteError> {
        // A first answer may be lost, and the object may be there from an earlier check: the second
        // is a conflict.
        if !self.conflicts(PutMode::Create).await? && !self.conflicts(PutMode::Create).await? {
            return Err(self.unconditional("If-None-Match"));
        }
        // The version of no object: object stores compare the tag, Google's the number.
        let e_tag = Some(format!("\"{}\"", "0".repeat(32)));
        let stale = UpdateVersion { e_tag, version: Some("1".to_owned()) };
        match self.conflicts(PutMode::Update(stale)).await? {
            true => Ok(()),
            false => Err(self.unconditional("If-Match")),
        }
    }

    async fn conflicts(&self, mode: PutMode) -> Result<bool, RemoteError> {
        match self.put_object(&self.path(PROBE), PROBE_TEXT.into(), mode).await {
            Ok(()) => Ok(false),
            Err(error) if is_conflict(&error) => Ok(true),
            Err(error) if is_unknown(&error) => Err(self.unconditional("If-Match")),
            Err(error) => Err(error),
        }
    }

    fn unconditional(&self, condition: &'static str) -> RemoteError {
        RemoteError::Unconditional { store: self.to_string(), condition }
    }

    /// Locks the names in a directory, as a local store does.
    pub(super) fn lock_names(&self, path: &Path) -> Result<File, RemoteError> {
        point();
        let lock = || {
            let mut file = File::options();
            let file = file.read(true).write(true).create(true).truncate(false).mode(0o660);
            let file = file.open(path)?;
            file.lock()?;
            Ok(file)
        };
        lock().map_err(|e| SaveError::io(path, e).into())
    }

    /// Refuses a manifest that is missing, or has missing blobs. In a directory, the collection of
    /// a local store removes them until they have a name; it holds the lock of the names.
    pub(super) async fn check_blobs(&self, id: Sha256, manifest: &[u8]) -> Result<(), RemoteError> {
        let parsed = Manifest::parse(manifest)?;
        let mut all = vec![(id, manifest.len() as u64)];
        for part in parsed.layers.iter().chain([&parsed.config]) {
            all.push((part.digest("the manifest")?, part.size));
        }
        for (digest, size) in all {
            let path = self.blob_path(digest);
            match self.attempt(&digest.to_string(), || self.objects.head(&path)).await {
                Ok(meta) if meta.size == size => {}
                Err(error) if !error.is_not_found() => return Err(error),
                _ => return Err(RemoteError::Collected),
            }
        }
        Ok(())
    }

    /// Writes `index.json` if it is of `version` still. False if it is not.
    pub(super) async fn replace_index(
        &self,
        bytes: Vec<u8>,
        version: Option<UpdateVersion>,
    ) -> Result<bool, RemoteError> {
        let mode = match (&self.lock, version) {
            // No other writer has the lock.
            (Some(_), _) => PutMode::Overwrite,
            (None, Some(version)) => PutMode::Update(version),
            (None, None) => PutMode::Create,
        };
        match self.put_object(&self.path(INDEX_FILE), bytes, mode).await {
            Ok(()) => Ok(true),
            Err(error) if is_conflict(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
