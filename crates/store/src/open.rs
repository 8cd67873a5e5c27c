//! Opening: manifest, configuration and layer indexes from any store of blobs, each checked before
//! it is used.

use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::access::Access;
use crate::blob::BlobRead;
use crate::manifest::{Config, MAX_CONFIG, MAX_MANIFEST, Manifest, parse};
use crate::seal::SealKey;
use crate::turns::SnapshotWithTurns;
use crate::{OpenError, SealError, Sha256, Snapshot};

/// Holds blobs: a store's directory, or an archive.
pub(crate) trait Blobs {
    /// Reads a small blob whole, at most `limit` bytes. The caller checks its digest.
    fn read(&self, what: &'static str, digest: Sha256, limit: u64) -> Result<Vec<u8>, OpenError>;

    /// Opens a blob of pages.
    fn open(&self, digest: Sha256) -> Result<Box<dyn BlobRead>, OpenError>;

    /// Where the turns of a session are; `None` where there are never any.
    fn journal(&self, _: &str) -> Option<PathBuf> {
        None
    }
}

/// Reads a small blob and checks it against its digest.
pub(crate) fn read_small(
    blobs: &dyn Blobs,
    what: &'static str,
    digest: Sha256,
    limit: u64,
) -> Result<Vec<u8>, OpenError> {
    let bytes = blobs.read(what, digest, limit)?;
    if Sha256::of(&bytes) != digest {
        return Err(OpenError::Digest { what, expected: digest });
    }
    Ok(bytes)
}

pub(crate) fn read_manifest(blobs: &dyn Blobs, id: Sha256) -> Result<Manifest, OpenError> {
    Manifest::parse(&read_small(blobs, "the manifest", id, MAX_MANIFEST)?)
}

/// The artifact type of a manifest; empty for a container image.
pub(crate) fn read_kind(blobs: &dyn Blobs, id: Sha256) -> Result<String, OpenError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Kind {
        #[serde(default)]
        artifact_type: String,
    }
    let bytes = read_small(blobs, "the manifest", id, MAX_MANIFEST)?;
    Ok(parse::<Kind>("the manifest", &bytes)?.artifact_type)
}

/// Refuses a snapshot that is not what `access` demands, before anything but its manifest is read,
/// and returns the key of a sealed one.
pub(crate) fn unlock<'a>(
    manifest: &Manifest,
    access: &'a Access,
) -> Result<Option<&'a SealKey>, OpenError> {
    access.check(manifest)?;
    match (manifest.is_sealed(), access.key()) {
        (true, None) => Err(SealError::Locked.into()),
        (false, Some(_)) => Err(SealError::NotSealed.into()),
        (_, key) => Ok(key),
    }
}

/// The configuration in a blob that was checked, and the blob if it is sealed.
pub(crate) fn parse_config(
    stored: Vec<u8>,
    key: Option<&SealKey>,
) -> Result<(Config, Option<Vec<u8>>), OpenError> {
    match key {
        None => Ok((parse("the configuration", &stored)?, None)),
        Some(key) => Ok((parse("the configuration", &unseal(key, &stored)?)?, Some(stored))),
    }
}

/// Opens the snapshot whose manifest has digest `id`, if it is what `access` demands.
pub(crate) fn open_snapshot(
    blobs: &dyn Blobs,
    id: Sha256,
    access: &Access,
) -> Result<Snapshot, OpenError> {
    let manifest = read_manifest(blobs, id)?;
    let key = unlock(&manifest, access)?;
    let config = manifest.config.digest("the manifest")?;
    let stored = read_small(blobs, "the configuration", config, MAX_CONFIG)?;
    let (config, sealed_config) = parse_config(stored, key)?;
    let mut blob = |_, digest, _| blobs.open(digest);
    let journal = manifest.journal()?.map(str::to_owned);
    let snapshot = Snapshot::assemble(id, manifest, config, access, key, &mut blob)?;
    let snapshot = match key.zip(sealed_config) {
        None => snapshot,
        Some((key, config)) => snapshot.with_seal(key.clone(), config),
    };
    let Some(journal) = journal else { return Ok(snapshot) };
    let path = blobs.journal(&journal).ok_or(OpenError::NoJournal { journal })?;
    let turned = SnapshotWithTurns::read(&snapshot, path, access)?;
    Ok(snapshot.with_turns(turned))
}

/// The plain bytes of a small sealed blob.
fn unseal(key: &SealKey, stored: &[u8]) -> Result<Vec<u8>, OpenError> {
    let plain = key.open(Box::new(BytesBlob(stored.to_vec())))?;
    let mut bytes = vec![0; plain.len() as usize];
    plain.read_at(&mut bytes, 0).map_err(|e| OpenError::io(Path::new("the configuration"), e))?;
    Ok(bytes)
}

/// A blob in memory.
pub(crate) struct BytesBlob(pub(crate) Vec<u8>);

impl BlobRead for BytesBlob {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        let from = usize::try_from(offset).map_err(io::Error::other)?;
        let part = self.0.get(from..).and_then(|rest| rest.get(..out.len()));
        out.copy_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}
