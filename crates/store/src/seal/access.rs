//! The demands on a snapshot that is opened: its signers, its key, and its limits.

use super::SealKey;
#[cfg(feature = "seal")]
use super::sign::{self, PublicKey};
use crate::Limits;
use crate::OpenError;
use crate::format::manifest::Manifest;

/// Keys, trusted signers and limits for opening a snapshot.
#[derive(Clone, Debug, Default)]
pub struct Access {
    #[cfg(feature = "seal")]
    trust: Option<Vec<PublicKey>>,
    key: Option<SealKey>,
    limits: Limits,
}

impl Access {
    /// No demands of signatures or seals, and the default [`Limits`].
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Demands a signature by one of `keys`. Without a key no snapshot opens.
    #[cfg(feature = "seal")]
    #[must_use]
    pub fn trusting(mut self, keys: impl IntoIterator<Item = PublicKey>) -> Self {
        self.trust = Some(keys.into_iter().collect());
        self
    }

    /// Opens only snapshots that are sealed with `key`. One that is not sealed could be from
    /// anyone.
    #[cfg(feature = "seal")]
    #[must_use]
    pub fn with_key(mut self, key: SealKey) -> Self {
        self.key = Some(key);
        self
    }

    /// Opens what was sealed with this key, if there is one.
    pub(crate) fn with_seal(self, key: Option<SealKey>) -> Self {
        Self { key, ..self }
    }

    /// Refuses snapshots beyond `limits`.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    pub(crate) fn key(&self) -> Option<&SealKey> {
        self.key.as_ref()
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Whether it opens signed snapshots alone.
    pub(crate) fn demands_signature(&self) -> bool {
        #[cfg(feature = "seal")]
        return self.trust.is_some();
        #[cfg(not(feature = "seal"))]
        false
    }

    /// Refuses the last turn of a session, with this digest, unless one of the trusted keys signed
    /// it.
    pub(crate) fn check_turn(
        &self,
        root: &[u8; 32],
        signature: Option<&[u8]>,
    ) -> Result<(), OpenError> {
        #[cfg(feature = "seal")]
        if let Some(keys) = &self.trust {
            sign::check_turn(keys, root, signature)?;
        }
        #[cfg(not(feature = "seal"))]
        let _ = (root, signature);
        Ok(())
    }

    /// Refuses a manifest whose configuration none of the trusted keys signed.
    pub(crate) fn check(&self, manifest: &Manifest) -> Result<(), OpenError> {
        #[cfg(feature = "seal")]
        if let Some(keys) = &self.trust {
            let config = manifest.config.digest("the manifest")?;
            sign::check(keys, config, &manifest.annotations)?;
        }
        #[cfg(not(feature = "seal"))]
        let _ = manifest;
        Ok(())
    }
}
