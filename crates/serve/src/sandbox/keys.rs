//! API keys, and the tenants that they belong to.
//!
//! Promises: keys are compared by their digests, so the time of a comparison reveals nothing about
//! them.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use sha2::{Digest, Sha256};

use crate::error::ManifestError;

/// Keys of tenants. Cheap to clone; clones share them.
#[derive(Clone, Default)]
pub struct Keys {
    tenants: Arc<RwLock<Tenants>>,
}

/// Tenants by the digests of their keys.
type Tenants = HashMap<[u8; 32], Arc<str>>;

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keys({})", self.read_tenants().len())
    }
}

fn digest(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}

impl Keys {
    /// Keys, each with its tenant.
    #[must_use]
    pub fn new<'a>(keys: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let tenants = keys.into_iter().map(|(tenant, key)| (digest(key.as_bytes()), tenant.into()));
        Self { tenants: Arc::new(RwLock::new(tenants.collect())) }
    }

    fn read_tenants(&self) -> RwLockReadGuard<'_, Tenants> {
        self.tenants.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces these keys, in every clone, by the others.
    pub(crate) fn renew(&self, others: &Self) {
        if !Arc::ptr_eq(&self.tenants, &others.tenants) {
            let others = others.read_tenants().clone();
            *self.tenants.write().unwrap_or_else(PoisonError::into_inner) = others;
        }
    }

    /// Reads a file with a tenant and a key in each line; lines that begin with `#` are comments.
    ///
    /// # Errors
    /// [`ManifestError::Read`], [`ManifestError::Key`] for a line that is neither.
    pub fn read(path: &Path) -> Result<Self, ManifestError> {
        let read = |source| ManifestError::Read { path: path.to_owned(), source };
        let text = std::fs::read_to_string(path).map_err(read)?;
        let mut keys = Vec::new();
        for (number, line) in (1..).zip(text.lines().map(str::trim)) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let mut words = line.split_whitespace();
            match (words.next(), words.next(), words.next()) {
                (Some(tenant), Some(key), None) => keys.push((tenant, key)),
                _ => return Err(ManifestError::Key { path: path.to_owned(), line: number }),
            }
        }
        Ok(Self::new(keys))
    }

    /// The tenant that a request comes from, by its `x-api-key` or bearer token.
    pub(crate) fn tenant(&self, headers: &HeaderMap) -> Option<Arc<str>> {
        let bearer =
            headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        let key = headers.get("x-api-key").map(|value| value.as_bytes()).or(bearer)?;
        self.read_tenants().get(&digest(key)).cloned()
    }
}

/// Whether two secrets are the same.
pub(crate) fn same(one: &[u8], two: &[u8]) -> bool {
    digest(one) == digest(two)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_means_its_tenant_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        std::fs::write(&path, "# who\n\nacme  key-1\nother key-2\n").unwrap();
        let keys = Keys::read(&path).unwrap();
        let of = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            keys.tenant(&headers).map(|tenant| tenant.to_string())
        };
        assert_eq!(of("x-api-key", "key-1").as_deref(), Some("acme"));
        assert_eq!(of("authorization", "Bearer key-2").as_deref(), Some("other"));
        assert_eq!(of("x-api-key", "key-3"), None);
        assert_eq!(of("authorization", "key-2"), None);
        std::fs::write(&path, "acme\n").unwrap();
        assert!(matches!(Keys::read(&path), Err(ManifestError::Key { line: 1, .. })));
        assert!(!format!("{keys:?}").contains("key-1"));
    }
}
