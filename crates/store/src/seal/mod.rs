//! Signed and sealed snapshots.
//!
//! A *signature* (Ed25519) is over the digest of the configuration, which names the root of every layer
//! and holds the guest build and state: it covers all that a guest can see, and stays valid when layers
//! are compressed on the way to another machine. It is an annotation of the manifest. [`Access::trusting`]
//! refuses a snapshot that none of the given keys signed before anything of it is parsed but the manifest.
//!
//! A *sealed* snapshot (AES-256-GCM) has every blob but the manifest encrypted: see `docs/format.md`. Pages are
//! read at random and lazily as before, but can not be mapped. What stays visible is what the manifest
//! and the directory show: names, and the number and length of blobs.
//!
//! What neither does: keep an old snapshot from being given for a new one of the same signer or key. Name
//! snapshots by their id where that matters.
//!
//! The cryptography is that of `aws-lc-rs`, which the object stores' TLS brings along.

mod cipher;
mod keyfile;
mod sign;

pub use cipher::SealKey;
pub(crate) use cipher::Sealer;
pub use sign::{PublicKey, SigningKey};

use crate::manifest::Manifest;
use crate::{OpenError, SaveError, Sha256, Snapshot, Store};

/// What is needed, and demanded, to open a snapshot.
#[derive(Clone, Debug, Default)]
pub struct Access {
    trust: Option<Vec<PublicKey>>,
    key: Option<SealKey>,
}

impl Access {
    /// Demands nothing, and opens what is not sealed.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Demands a signature by one of `keys`. With no key at all nothing opens.
    #[must_use]
    pub fn trusting(mut self, keys: impl IntoIterator<Item = PublicKey>) -> Self {
        self.trust = Some(keys.into_iter().collect());
        self
    }

    /// Opens what was sealed with `key`, and nothing else: a snapshot that is not sealed might be anyone's.
    #[must_use]
    pub fn with_key(mut self, key: SealKey) -> Self {
        self.key = Some(key);
        self
    }

    pub(crate) fn key(&self) -> Option<&SealKey> {
        self.key.as_ref()
    }

    /// Refuses a manifest whose configuration none of the trusted keys signed.
    pub(crate) fn check(&self, manifest: &Manifest) -> Result<(), OpenError> {
        match &self.trust {
            None => Ok(()),
            Some(keys) => {
                let config = manifest.config.digest("the manifest")?;
                Ok(sign::check(keys, config, &manifest.annotations)?)
            }
        }
    }
}

impl Manifest {
    /// Adds a signature of `key`.
    pub(crate) fn sign(&mut self, key: &SigningKey) -> Result<(), SaveError> {
        let config = self.config.digest("the manifest")?;
        let (name, value) = sign::annotation(key, config)?;
        self.annotations.insert(name, value);
        Ok(())
    }
}

impl Snapshot {
    /// The same snapshot with a signature of `key` beside those it has. Its id is another; it becomes
    /// durable by [`Store::sign`] or [`crate::archive::export`].
    ///
    /// # Errors
    /// [`SealError::Library`](crate::SealError::Library) when signing fails.
    pub fn signed(&self, key: &SigningKey) -> Result<Snapshot, SaveError> {
        let mut manifest = self.manifest().clone();
        manifest.sign(key)?;
        self.with_manifest(manifest)
    }

    /// The keys that the snapshot says it was signed by. Nothing was verified: that is what
    /// [`Access::trusting`] does.
    #[must_use]
    pub fn claimed_signers(&self) -> Vec<PublicKey> {
        sign::claimed(&self.manifest().annotations)
    }
}

impl Store {
    /// Adds a signature of `key` to the snapshot that `name` means, and makes `name` mean the result,
    /// whose id is another.
    ///
    /// # Errors
    /// [`SaveError`] by cause; `name` means then what it meant before.
    pub fn sign(&self, name: &str, key: &SigningKey) -> Result<Sha256, SaveError> {
        use crate::shelf::Shelf;
        let _lock = self.lock(crate::store::BLOB_LOCK, false)?;
        let mut manifest = crate::open::read_manifest(self, self.resolve(name)?)?;
        manifest.sign(key)?;
        let (id, _) = self.shelf().put(crate::manifest::print("the manifest", &manifest)?)?;
        self.tag(name, Some(id))?;
        Ok(id)
    }
}
