//! API keys, and the tenants that they belong to.
//!
//! Promises: keys are compared by their digests, so the time of a comparison reveals nothing about
//! them. The file may hold digests alone, so a copy of it opens nothing. A key with an end is refused from then on.
//! May break it: a wall clock that is wrong.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::SystemTime;

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use sha2::{Digest, Sha256};

use crate::error::ManifestError;

/// Prefix of a key that is given by its digest.
const DIGEST: &str = "sha256:";
/// Prefix of the time at which a key ends.
const UNTIL: &str = "until=";

/// Keys of tenants. Cheap to clone; clones share them.
#[derive(Clone, Default)]
pub struct Keys {
    tenants: Arc<RwLock<Tenants>>,
}

/// Tenants by the digests of their keys.
type Tenants = HashMap<[u8; 32], KeyHolder>;

/// The holder of a key.
#[derive(Clone)]
struct KeyHolder {
    tenant: Arc<str>,
    /// The key is refused from then on.
    until: Option<SystemTime>,
}

/// Why a request has no tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum KeyError {
    #[error("the request has no API key that is known here")]
    Unknown,
    #[error("the API key of the request has expired; ask the operator for a new one")]
    Expired,
}

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
        let holder = |tenant: &str| KeyHolder { tenant: tenant.into(), until: None };
        let tenants =
            keys.into_iter().map(|(tenant, key)| (digest(key.as_bytes()), holder(tenant)));
        Self::of(tenants.collect())
    }

    fn of(tenants: Tenants) -> Self {
        Self { tenants: Arc::new(RwLock::new(tenants)) }
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

    /// Reads a file of keys. Each line has a tenant, and a key or `sha256:` with the digest of one in hexadecimal. A
    /// time after `until=` ends the key, such as `until=2027-01-31T00:00:00Z`. Lines that begin with `#` are comments.
    ///
    /// # Errors
    /// [`ManifestError::Read`], [`ManifestError::Key`] for a line that is neither.
    pub fn read(path: &Path) -> Result<Self, ManifestError> {
        let read = |source| ManifestError::Read { path: path.to_owned(), source };
        let text = std::fs::read_to_string(path).map_err(read)?;
        let mut tenants = Tenants::new();
        for (number, line) in (1..).zip(text.lines().map(str::trim)) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (digest, holder) = parse(line).map_err(|reason| ManifestError::Key {
                path: path.to_owned(),
                line: number,
                reason,
            })?;
            tenants.insert(digest, holder);
        }
        Ok(Self::of(tenants))
    }

    /// The tenant that a request comes from, by its `x-api-key` or bearer token.
    pub(crate) fn tenant(&self, headers: &HeaderMap) -> Result<Arc<str>, KeyError> {
        let bearer =
            headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        let key = headers.get("x-api-key").map(|value| value.as_bytes()).or(bearer);
        let digest = digest(key.ok_or(KeyError::Unknown)?);
        let tenants = self.read_tenants();
        let holder = tenants.get(&digest).ok_or(KeyError::Unknown)?;
        match holder.until {
            Some(until) if SystemTime::now() >= until => Err(KeyError::Expired),
            _ => Ok(Arc::clone(&holder.tenant)),
        }
    }
}

/// Parses a line of the file of keys.
fn parse(line: &str) -> Result<([u8; 32], KeyHolder), &'static str> {
    let mut words = line.split_whitespace();
    let (Some(tenant), Some(key)) = (words.next(), words.next()) else {
        return Err("a line is a tenant and a key, with a space between");
    };
    let digest = match key.starts_with(DIGEST) {
        true => {
            let parsed = key.to_ascii_lowercase().parse::<afresh::Sha256>();
            parsed.map_err(|_| "a digest has 64 hexadecimal digits")?.0
        }
        false => digest(key.as_bytes()),
    };
    let until = match words.next() {
        None => None,
        Some(word) => {
            let time =
                word.strip_prefix(UNTIL).and_then(|time| humantime::parse_rfc3339(time).ok());
            Some(time.ok_or("the third word is the end of the key, as until=2027-01-31T00:00:00Z")?)
        }
    };
    if words.next().is_some() {
        return Err("a line has at most three words: tenant, key and end");
    }
    Ok((digest, KeyHolder { tenant: tenant.into(), until }))
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
        assert_eq!(of("x-api-key", "key-1").as_deref(), Ok("acme"));
        assert_eq!(of("authorization", "Bearer key-2").as_deref(), Ok("other"));
        assert_eq!(of("x-api-key", "key-3"), Err(KeyError::Unknown));
        assert_eq!(of("authorization", "key-2"), Err(KeyError::Unknown));
        assert!(!format!("{keys:?}").contains("key-1"));
    }

    #[test]
    fn a_file_holds_digests_and_ends_of_keys() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        let hex: String = digest(b"key-1").iter().map(|byte| format!("{byte:02x}")).collect();
        let text = format!(
            "acme sha256:{hex} until=2999-01-01T00:00:00Z\nacme key-2 until=2001-01-01T00:00:00Z\n"
        );
        std::fs::write(&path, text).unwrap();
        let keys = Keys::read(&path).unwrap();
        let of = |key: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("x-api-key", key.parse().unwrap());
            keys.tenant(&headers).map(|tenant| tenant.to_string())
        };
        assert_eq!(of("key-1").as_deref(), Ok("acme"));
        assert_eq!(of("key-2"), Err(KeyError::Expired));
        // The file opens nothing.
        assert_eq!(of(&format!("sha256:{hex}")), Err(KeyError::Unknown));
        for (wrong, reason) in [
            ("acme", "a tenant and a key"),
            ("acme sha256:00", "64 hexadecimal digits"),
            ("acme key tomorrow", "until="),
            ("acme key until=tomorrow", "until="),
            ("acme key until=2999-01-01T00:00:00Z more", "at most three words"),
        ] {
            std::fs::write(&path, format!("# keys\n{wrong}\n")).unwrap();
            let error = Keys::read(&path).unwrap_err().to_string();
            assert!(error.contains("line 2") && error.contains(reason), "{error}");
        }
    }
}
