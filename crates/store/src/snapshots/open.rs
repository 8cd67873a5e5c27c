//! Opening: manifest, configuration and layer indexes from any store of blobs, each checked before
//! it is used.

use std::path::Path;

use crate::blobs::source::{Blobs, read_manifest, read_small};
use crate::format::blob::BytesBlob;
use crate::format::manifest::{Config, MAX_CONFIG, Manifest, parse};
use crate::seal::SealKey;
use crate::seal::access::Access;
use crate::snapshots::turns::SnapshotWithTurns;
use crate::{OpenError, SealError, Sha256, Snapshot};

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
