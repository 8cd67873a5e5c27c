//! Signatures come to snapshots: when they are saved, and later.

use crate::blobs::source::read_manifest;
use crate::format::manifest::{Manifest, print};
use crate::layers::blob_sink::BlobSink;
use crate::local::naming::ExpectedName;
use crate::seal::{PublicKey, SigningKey, annotation, claimed};
use crate::{SaveError, Sha256, Snapshot, Store};

impl Manifest {
    /// Adds a signature of `key`.
    pub(crate) fn sign(&mut self, key: &SigningKey) -> Result<(), SaveError> {
        let config = self.config.digest("the manifest")?;
        let (name, value) = annotation(key, config)?;
        self.annotations.insert(name, value);
        Ok(())
    }
}

impl Snapshot {
    /// The same snapshot with an additional signature of `key`, and so with another id.
    /// [`Store::sign`] or [`crate::archive::export`] makes it durable.
    ///
    /// # Errors
    /// [`SealError::Library`](crate::SealError::Library) when signing fails.
    pub fn signed(&self, key: &SigningKey) -> Result<Snapshot, SaveError> {
        if self.turns().is_some() {
            return Err(SaveError::Session);
        }
        let mut manifest = self.manifest().clone();
        manifest.sign(key)?;
        self.with_manifest(manifest)
    }

    /// The keys of the snapshot's signatures, which are not verified.
    /// [`Access::trusting`](crate::Access::trusting) verifies them.
    #[must_use]
    pub fn claimed_signers(&self) -> Vec<PublicKey> {
        claimed(&self.manifest().annotations)
    }
}

impl Store {
    /// Adds a signature of `key` to the snapshot that `name` means, and tags the result `name`,
    /// whose id is another.
    ///
    /// # Errors
    /// [`SaveError`] by cause; `name` is unchanged then.
    pub fn sign(&self, name: &str, key: &SigningKey) -> Result<Sha256, SaveError> {
        let mut staging = self.stage()?;
        loop {
            // A name that means nothing may still stand for the only snapshot.
            let expected = ExpectedName::Manifest(self.index()?.target(name));
            let mut manifest = read_manifest(self, self.resolve(name)?)?;
            if manifest.journal()?.is_some() {
                return Err(SaveError::Session);
            }
            manifest.sign(key)?;
            let (id, _) = staging.put(print(&manifest)?)?;
            match staging.rename(name, id, expected) {
                // Saved or signed since: the signature is for the new target.
                Err(SaveError::Moved(_)) => {}
                renamed => return renamed.map(|()| id),
            }
        }
    }
}
