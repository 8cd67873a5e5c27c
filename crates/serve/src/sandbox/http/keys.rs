//! API keys, and the tenants that they belong to.
//!
//! Promises: keys are compared by their digests, so the time of a comparison reveals nothing about
//! them. The file may hold digests alone, so a copy of it opens nothing. A key with an end is
//! refused from then on. A key serves the operations of its scopes only. May break it: a wall clock
//! that is wrong.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::SystemTime;

use hyper::header::AUTHORIZATION;
use hyper::{HeaderMap, StatusCode};
use sha2::{Digest, Sha256};

use crate::error::ManifestError;
use crate::error_response::ErrorResponse;
#[cfg(feature = "oidc")]
use crate::oidc::Issuer;

/// Prefix of a key that is given by its digest.
const DIGEST: &str = "sha256:";
/// Prefix of the time at which a key ends.
const UNTIL: &str = "until=";
/// Prefix of the scopes of a key.
const SCOPES: &str = "scopes=";
/// Prefix of the id of a key.
const ID: &str = "id=";
/// Bytes of a digest that are the id of a key without an own one.
const ID_BYTES: usize = 6;
/// Maximum characters of the id of a key.
const MAX_ID: usize = 64;

/// The operations that a key is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The sandboxes and the usage of its tenant.
    Use,
    /// The usage of all tenants, and everything of [`Scope::Metrics`].
    Admin,
    /// Metrics and the status page.
    Metrics,
}

impl Scope {
    const ALL: [Self; 3] = [Self::Use, Self::Admin, Self::Metrics];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Use => "use",
            Self::Admin => "admin",
            Self::Metrics => "metrics",
        }
    }
}

/// A set of scopes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Scopes(u8);

impl Scopes {
    fn with(self, scope: Scope) -> Self {
        Self(self.0 | 1 << scope as u8)
    }

    pub(crate) fn has(self, scope: Scope) -> bool {
        self.0 & 1 << scope as u8 != 0
    }

    /// Every scope.
    #[cfg(feature = "oidc")]
    pub(crate) fn all() -> Self {
        Scope::ALL.into_iter().fold(Self::default(), Self::with)
    }

    /// A scope that `permitted` lacks.
    #[cfg(feature = "oidc")]
    pub(crate) fn beyond(self, permitted: Self) -> Option<Scope> {
        Scope::ALL.into_iter().find(|scope| self.has(*scope) && !permitted.has(*scope))
    }

    /// Parses names with commas between.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        text.split(',').try_fold(Self::default(), |scopes, name| {
            let scope = Scope::ALL.into_iter().find(|scope| scope.name() == name)?;
            Some(scopes.with(scope))
        })
    }
}

/// The holder of the key that a request shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) tenant: Arc<str>,
    /// The id of the key, for logs. It opens nothing.
    pub(crate) key: Arc<str>,
    pub(crate) scopes: Scopes,
}

/// Keys of tenants. Cheap to clone; clones share them.
#[derive(Clone, Default)]
pub struct Keys {
    tenants: Arc<RwLock<Tenants>>,
    /// Issuers of bearer tokens, which are an alternative to the keys.
    #[cfg(feature = "oidc")]
    issuers: Arc<RwLock<Vec<Arc<Issuer>>>>,
}

/// Tenants by the digests of their keys.
type Tenants = HashMap<[u8; 32], KeyHolder>;

/// The holder of a key.
#[derive(Clone)]
struct KeyHolder {
    identity: Identity,
    /// The key is refused from then on.
    until: Option<SystemTime>,
}

/// Why a request has no tenant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum KeyError {
    #[error(
        "the request has no known API key: send one that the operator has issued, as `X-API-Key`"
    )]
    Unknown,
    #[error("the API key of the request has expired; ask the operator for a new one")]
    Expired,
    #[cfg(feature = "oidc")]
    #[error("the bearer token of the request does not count: {0}")]
    Token(&'static str),
    /// A valid token is beyond the limits of its issuer.
    #[cfg(feature = "oidc")]
    #[error(
        "the bearer token of the request is refused: {why}; the operator sets `tenants` and `scopes` of each issuer"
    )]
    Outside {
        why: String,
        /// The holder, for logs.
        key: Arc<str>,
    },
    #[cfg(feature = "oidc")]
    #[error("the keys of the bearer token's issuer are not fetched yet; try again")]
    NoIssuerKeys,
    #[error("the API key of the request lacks the scope `{}`; ask the operator for a key that has it", .0.name())]
    Scope(Scope),
}

impl From<KeyError> for ErrorResponse {
    fn from(error: KeyError) -> Self {
        let status = match error {
            KeyError::Scope(_) => StatusCode::FORBIDDEN,
            #[cfg(feature = "oidc")]
            KeyError::Outside { .. } => StatusCode::FORBIDDEN,
            #[cfg(feature = "oidc")]
            KeyError::NoIssuerKeys => {
                return Self::busy(StatusCode::SERVICE_UNAVAILABLE, error.to_string());
            }
            _ => StatusCode::UNAUTHORIZED,
        };
        Self::new(status, error.to_string())
    }
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
    /// Keys, each with its tenant, for the sandboxes of that.
    #[must_use]
    pub fn new<'a>(keys: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let scopes = Scopes::default().with(Scope::Use);
        let entry = |(tenant, key): (&str, &str)| {
            let digest = digest(key.as_bytes());
            let identity = Identity { tenant: tenant.into(), key: id_of(&digest), scopes };
            (digest, KeyHolder { identity, until: None })
        };
        Self::of(keys.into_iter().map(entry).collect())
    }

    /// The tenants that have a key.
    pub(crate) fn tenants(&self) -> BTreeSet<Arc<str>> {
        self.read_tenants().values().map(|holder| holder.identity.tenant.clone()).collect()
    }

    fn of(tenants: Tenants) -> Self {
        Self { tenants: Arc::new(RwLock::new(tenants)), ..Self::default() }
    }

    fn read_tenants(&self) -> RwLockReadGuard<'_, Tenants> {
        self.tenants.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds issuers of bearer tokens.
    #[cfg(feature = "oidc")]
    #[must_use]
    pub fn with_issuers(self, configs: impl IntoIterator<Item = crate::OidcConfig>) -> Self {
        *self.issuers.write().unwrap_or_else(PoisonError::into_inner) =
            configs.into_iter().map(Issuer::new).collect();
        self
    }

    #[cfg(feature = "oidc")]
    fn issuers(&self) -> Vec<Arc<Issuer>> {
        self.issuers.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Fetches the keys of issuers from now on.
    #[cfg(feature = "oidc")]
    pub(crate) fn watch_issuers(&self) {
        for issuer in self.issuers() {
            issuer.watch();
        }
    }

    /// Replaces the issuers, in every clone, by the others. Those with an equal configuration keep
    /// their keys.
    #[cfg(feature = "oidc")]
    fn renew_issuers(&self, others: &Self) {
        if Arc::ptr_eq(&self.issuers, &others.issuers) {
            return;
        }
        let before = self.issuers();
        let renewed = others.issuers().into_iter().map(|new| {
            let same = before.iter().find(|old| old.config() == new.config());
            same.cloned().unwrap_or(new)
        });
        *self.issuers.write().unwrap_or_else(PoisonError::into_inner) = renewed.collect();
        self.watch_issuers();
    }

    /// Replaces these keys, in every clone, by the others.
    pub(crate) fn renew(&self, others: &Self) {
        #[cfg(feature = "oidc")]
        self.renew_issuers(others);
        if !Arc::ptr_eq(&self.tenants, &others.tenants) {
            let others = others.read_tenants().clone();
            *self.tenants.write().unwrap_or_else(PoisonError::into_inner) = others;
        }
    }

    /// Reads a file of keys. Each line has a tenant, and a key or `sha256:` with the digest of one
    /// in hexadecimal. These may follow in any order: `until=2027-01-31T00:00:00Z` ends the key,
    /// `scopes=use,admin,metrics` replaces its scope `use`, and `id=NAME` is its name in the audit
    /// log. Lines that begin with `#` are comments.
    ///
    /// # Errors [`ManifestError::Read`], [`ManifestError::Key`] for a line that is neither.
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

    /// The holder of the key or the signed token that a request shows, in `x-api-key` or as a
    /// bearer token.
    pub(crate) fn identity(&self, headers: &HeaderMap) -> Result<Identity, KeyError> {
        let bearer =
            headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        let key = headers.get("x-api-key").map(|value| value.as_bytes()).or(bearer);
        let key = key.ok_or(KeyError::Unknown)?;
        let tenants = self.read_tenants();
        let Some(holder) = tenants.get(&digest(key)) else {
            #[cfg(feature = "oidc")]
            {
                let issuers = self.issuers();
                if crate::oidc::is_token(key) && !issuers.is_empty() {
                    return crate::oidc::identity(&issuers, key);
                }
            }
            return Err(KeyError::Unknown);
        };
        match holder.until {
            Some(until) if SystemTime::now() >= until => Err(KeyError::Expired),
            _ => Ok(holder.identity.clone()),
        }
    }

    /// The tenant whose sandboxes a request may use.
    #[cfg(feature = "fleet")]
    pub(crate) fn tenant(&self, headers: &HeaderMap) -> Result<Arc<str>, KeyError> {
        self.identity(headers)?.allow(&[Scope::Use])
    }
}

impl Identity {
    /// The tenant, if the key has one of these scopes.
    pub(crate) fn allow(self, scopes: &[Scope]) -> Result<Arc<str>, KeyError> {
        match scopes.iter().any(|scope| self.scopes.has(*scope)) {
            true => Ok(self.tenant),
            false => Err(scopes.first().map_or(KeyError::Unknown, |first| KeyError::Scope(*first))),
        }
    }
}

/// The id of a key in logs.
fn id_of(digest: &[u8; 32]) -> Arc<str> {
    let digits = digest.iter().take(ID_BYTES).map(|byte| format!("{byte:02x}"));
    digits.collect::<String>().into()
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
    let (mut until, mut scopes, mut id) = (None, None, None);
    for word in words {
        let first = if let Some(time) = word.strip_prefix(UNTIL) {
            let time = humantime::parse_rfc3339(time);
            let time =
                time.map_err(|_| "the end of a key is a time, as until=2027-01-31T00:00:00Z")?;
            until.replace(time).is_none()
        } else if let Some(names) = word.strip_prefix(SCOPES) {
            let parsed = Scopes::parse(names);
            scopes
                .replace(
                    parsed.ok_or("scopes are `use`, `admin` and `metrics`, with commas between")?,
                )
                .is_none()
        } else if let Some(name) = word.strip_prefix(ID) {
            if name.is_empty() || name.len() > MAX_ID {
                return Err("the id of a key has 1 to 64 characters");
            }
            id.replace(name).is_none()
        } else {
            return Err("after tenant and key a line has `until=`, `scopes=` and `id=` only");
        };
        if !first {
            return Err("a line has `until=`, `scopes=` and `id=` at most once each");
        }
    }
    let identity = Identity {
        tenant: tenant.into(),
        key: id.map_or_else(|| id_of(&digest), Arc::from),
        scopes: scopes.unwrap_or_else(|| Scopes::default().with(Scope::Use)),
    };
    Ok((digest, KeyHolder { identity, until }))
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
            keys.identity(&headers).map(|identity| identity.tenant.to_string())
        };
        assert_eq!(of("x-api-key", "key-1").as_deref(), Ok("acme"));
        assert_eq!(of("authorization", "Bearer key-2").as_deref(), Ok("other"));
        assert_eq!(of("x-api-key", "key-3"), Err(KeyError::Unknown));
        assert_eq!(of("authorization", "key-2"), Err(KeyError::Unknown));
        assert!(!format!("{keys:?}").contains("key-1"));
    }

    #[test]
    fn a_key_serves_its_scopes_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        std::fs::write(&path, "acme k1\nops k2 scopes=admin,metrics id=ops-1\n").unwrap();
        let keys = Keys::read(&path).unwrap();
        let of = |key: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("x-api-key", key.parse().unwrap());
            keys.identity(&headers).unwrap()
        };
        assert_eq!(of("k1").allow(&[Scope::Use]).as_deref(), Ok("acme"));
        assert_eq!(of("k1").allow(&[Scope::Admin]), Err(KeyError::Scope(Scope::Admin)));
        assert_eq!(of("k2").allow(&[Scope::Use]), Err(KeyError::Scope(Scope::Use)));
        assert_eq!(of("k2").allow(&[Scope::Metrics, Scope::Admin]).as_deref(), Ok("ops"));
        assert_eq!(&*of("k2").key, "ops-1");
        assert_eq!(of("k1").key.len(), 2 * ID_BYTES);
        assert_eq!(keys.tenants().len(), 2);
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
            keys.identity(&headers).map(|identity| identity.tenant.to_string())
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
            ("acme key until=2999-01-01T00:00:00Z more", "`until=`, `scopes=` and `id=` only"),
            ("acme key scopes=use,root", "`use`, `admin` and `metrics`"),
            ("acme key scopes=use scopes=admin", "at most once"),
            ("acme key id=", "1 to 64"),
        ] {
            std::fs::write(&path, format!("# keys\n{wrong}\n")).unwrap();
            let error = Keys::read(&path).unwrap_err().to_string();
            assert!(error.contains("line 2") && error.contains(reason), "{error}");
        }
    }
}
