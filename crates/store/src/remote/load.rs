//! Opens a snapshot in place, with few round trips.
//!
//! The requests in order: the name, the manifest (in a registry the same request), then together
//! the configuration and the end of every layer, which has its index. The next request is for
//! pages.

use std::cell::Cell;
use std::sync::Arc;

use futures_util::future::{try_join, try_join_all};

use super::blob::{RangeBlob, Tail};
use super::cache::CacheFile;
use super::{Remote, RemoteError};
use crate::disk::two_clocks::TwoClocks;
use crate::format::blob::BlobRead;
use crate::format::manifest::{MAX_CONFIG, MAX_MANIFEST, Manifest};
use crate::seal::access::Access;
use crate::snapshots::open::{parse_config, unlock};
use crate::snapshots::turns::SnapshotWithTurns;
use crate::turn::{JournalFile, JournalPlace, MAX_JOURNAL, RemoteJournal};
use crate::{OpenError, Sha256, Snapshot};

impl Remote {
    /// Opens a snapshot in place. It fetches manifest, configuration and the index of every layer,
    /// and pages when they are read.
    ///
    /// # Errors
    /// [`RemoteError`] by cause.
    pub fn load(&self, name: &str) -> Result<Snapshot, RemoteError> {
        self.load_by(name, &Access::new())
    }

    /// As [`Remote::load`], for a snapshot that meets the demands of `access`: signed by a trusted
    /// key, or sealed with the given one.
    ///
    /// # Errors
    /// [`OpenError::Seal`] by cause, and those of [`Remote::load`].
    pub fn load_with(&self, name: &str, access: &Access) -> Result<Snapshot, RemoteError> {
        self.load_by(name, access)
    }

    fn load_by(&self, name: &str, access: &Access) -> Result<Snapshot, RemoteError> {
        let begun = TwoClocks::now();
        let (id, manifest, config, blobs, turns) = self.block_on(async {
            let (id, manifest) = self.manifest_of(name).await?;
            unlock(&manifest, access)?;
            let mut blobs = Vec::with_capacity(manifest.layers.len());
            for layer in &manifest.layers {
                let digest = layer.digest("the manifest")?;
                blobs.push(RangeBlob::new(self.clone(), digest, layer.size)?);
            }
            let (limits, indexes) = (access.limits(), Cell::new(0));
            let tails = try_join_all(blobs.iter().map(|blob| blob.fetch_tail(limits, &indexes)));
            let turns = async {
                match manifest.journal()? {
                    Some(journal) => self.backend.turns(journal, MAX_JOURNAL).await.map(Some),
                    None => Ok(None),
                }
            };
            let (config, (_, turns)) =
                try_join(self.config_of(&manifest), try_join(tails, turns)).await?;
            Ok((id, manifest, config, blobs, turns))
        })?;
        let key = unlock(&manifest, access)?;
        let (config, sealed_config) = parse_config(config, key)?;
        let tails: Vec<_> = blobs.iter().map(RangeBlob::tail).collect();
        let mut blobs = blobs.into_iter();
        let mut blob = |_, digest, size| -> Result<Box<dyn BlobRead>, OpenError> {
            Ok(Box::new(match blobs.next() {
                Some(blob) => blob,
                None => RangeBlob::new(self.clone(), digest, size)?,
            }))
        };
        let journal = manifest.journal()?.map(str::to_owned);
        let snapshot = Snapshot::assemble(id, manifest, config, access, key, &mut blob)?;
        tails.iter().for_each(Tail::opened);
        let snapshot = match key.zip(sealed_config) {
            None => snapshot,
            Some((key, config)) => snapshot.with_seal(key.clone(), config),
        };
        let Some((journal, turns)) = journal.zip(turns) else { return Ok(snapshot) };
        let (file, closed) = JournalFile::of_frames(&turns, id)?;
        let journal = RemoteJournal::new(Arc::new(self.clone()), journal, closed, begun);
        let place = JournalPlace::Remote(journal);
        let turned = SnapshotWithTurns::of(&snapshot, &file, place, access)?;
        Ok(snapshot.with_turns(turned))
    }

    /// The checked manifest that `name` means.
    pub(super) async fn manifest_of(&self, name: &str) -> Result<(Sha256, Manifest), RemoteError> {
        let (id, bytes) = self.document_of(name).await?;
        Ok((id, Manifest::parse(&bytes)?))
    }

    /// The bytes that `name` means, and their digest.
    pub(super) async fn document_of(&self, name: &str) -> Result<(Sha256, Vec<u8>), RemoteError> {
        let target = self.backend.resolve(name).await?;
        let id = target.id;
        let bytes = match target.manifest {
            Some(bytes) => bytes,
            None => {
                let fetch = self.backend.manifest(id, MAX_MANIFEST);
                self.small("the manifest", id, target.size, MAX_MANIFEST, fetch).await?
            }
        };
        Ok((id, bytes))
    }

    /// The bytes of the configuration, checked against the manifest.
    pub(super) async fn config_of(&self, manifest: &Manifest) -> Result<Vec<u8>, RemoteError> {
        const NAME: &str = "the configuration";
        let digest = manifest.config.digest("the manifest")?;
        let fetch = self.backend.blob(NAME, digest, MAX_CONFIG);
        self.small(NAME, digest, Some(manifest.config.size), MAX_CONFIG, fetch).await
    }

    /// A small blob with the digest `digest`: from the cache, or by `fetch`.
    async fn small(
        &self,
        what: &'static str,
        digest: Sha256,
        size: Option<u64>,
        limit: u64,
        fetch: impl Future<Output = Result<Vec<u8>, RemoteError>>,
    ) -> Result<Vec<u8>, RemoteError> {
        if let Some(size) = size.filter(|size| *size > limit) {
            return Err(OpenError::TooLarge { what, size, limit }.into());
        }
        let mut cache = None;
        if let (Some(dir), Some(size)) = (&self.cache, size) {
            let file = CacheFile::open(dir, digest, size).map_err(|e| OpenError::io(dir, e))?;
            if let Some(bytes) = file.whole().filter(|bytes| Sha256::of(bytes) == digest) {
                return Ok(bytes);
            }
            cache = Some(file);
        }
        let bytes = fetch.await?;
        if Sha256::of(&bytes) != digest {
            return Err(OpenError::Digest { what, expected: digest }.into());
        }
        if let Some(cache) = cache.filter(|cache| cache.blob_len() == bytes.len() as u64) {
            cache.keep(&bytes);
        }
        Ok(bytes)
    }
}
