//! Bearer tokens of OpenID Connect: JWTs that an issuer has signed, as an alternative to keys.
//!
//! Promises: a token counts if an issuer of the configuration signed it for the configured
//! audience, it has an end, and that is not over. Only asymmetric signatures count, and each key
//! verifies the algorithms of its kind. A token is verified without a request to its issuer: the
//! issuer's keys are fetched beforehand, every few minutes, and when a token names a key that is
//! not known. While an issuer is away its last keys count. An issuer with limits names no tenant
//! and gives no scope beyond them. May break it: a wall clock that is wrong.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;

use jsonwebtoken::jwk::{AlgorithmParameters, Jwk};
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
use reqwest::{Client, Url};
use serde_json::Value;
use tokio::sync::Notify;

use crate::sandbox::{Identity, KeyError, Scopes};

/// Time between two fetches of the keys of an issuer.
const FETCH_INTERVAL: Duration = Duration::from_secs(300);
/// Minimum time between two fetches, however many tokens name unknown keys.
const MIN_FETCH_INTERVAL: Duration = Duration::from_secs(10);
/// Longest fetch.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of a document of an issuer.
const MAX_DOCUMENT: usize = 1 << 20;
/// Maximum keys of an issuer.
const MAX_KEYS: usize = 100;
/// Maximum bytes of a token.
const MAX_TOKEN: usize = 16 << 10;
/// Maximum characters of a tenant.
const MAX_TENANT: usize = 128;
/// Maximum characters of a subject in the audit log.
const MAX_SUBJECT: usize = 64;
/// Maximum difference of clocks in seconds.
const LEEWAY: u64 = 30;
/// Path of the document that describes an issuer.
const DISCOVERY: &str = "/.well-known/openid-configuration";
/// Prefix of words in the claim of scopes.
const SCOPE_PREFIX: &str = "afresh:";

/// An issuer of bearer tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OidcConfig {
    /// URL of the issuer, as its tokens name it.
    pub issuer: String,
    /// The audience that tokens must name.
    pub audience: String,
    /// The claim with the tenant.
    pub tenant_claim: String,
    /// The claim with words such as `afresh:use`. A token without it has the scope `use`.
    pub scope_claim: String,
    /// URL of the keys; by default that of the discovery document.
    pub jwks: Option<String>,
    /// The tenants that tokens may name: names, and beginnings of names with a `*` at the end.
    /// `None` is every tenant.
    pub tenants: Option<Vec<String>>,
    /// The scopes that tokens may have. `None` is every scope, or `use` alone where `tenants` is
    /// set: `admin` sees the use of all tenants.
    pub scopes: Option<Vec<String>>,
}

impl OidcConfig {
    /// An issuer whose tokens name the tenant in the claim `tenant`.
    #[must_use]
    pub fn new(issuer: impl Into<String>, audience: impl Into<String>) -> Self {
        Self {
            issuer: issuer.into(),
            audience: audience.into(),
            tenant_claim: "tenant".to_owned(),
            scope_claim: "scope".to_owned(),
            jwks: None,
            tenants: None,
            scopes: None,
        }
    }

    /// Checks the limits, and the URLs: keys must not come over a connection that others can
    /// change.
    ///
    /// # Errors
    /// A description of the fault.
    pub fn check(&self) -> Result<(), String> {
        for url in [Some(&self.issuer), self.jwks.as_ref()].into_iter().flatten() {
            secure(url)?;
        }
        if self.audience.is_empty() {
            return Err("the audience of an issuer is empty".to_owned());
        }
        self.permitted_scopes()?;
        let Some(tenants) = &self.tenants else { return Ok(()) };
        if tenants.is_empty() {
            return Err(
                "`tenants` of an issuer is empty; leave it out to permit every tenant".to_owned()
            );
        }
        for pattern in tenants {
            let name = pattern.strip_suffix('*').unwrap_or(pattern);
            if name.is_empty() || name.contains('*') || !is_tenant(name) {
                return Err(format!(
                    "`{pattern}` in `tenants` of an issuer is neither the name of a tenant nor the beginning of one with a `*` at its end"
                ));
            }
        }
        Ok(())
    }

    /// Checks that no earlier issuer has the same tokens.
    ///
    /// # Errors
    /// A description of the fault.
    pub fn check_beside(&self, earlier: &[Self]) -> Result<(), String> {
        let Self { issuer, audience, .. } = self;
        let is_same = |other: &Self| other.issuer == *issuer && other.audience == *audience;
        match earlier.iter().any(is_same) {
            true => Err(format!(
                "two issuers are `{issuer}` with the audience `{audience}`; merge them, or give each its own audience"
            )),
            false => Ok(()),
        }
    }

    /// Checks all issuers of a server.
    ///
    /// # Errors
    /// A description of the first fault.
    pub fn check_all(issuers: &[Self]) -> Result<(), String> {
        let all = issuers.iter().enumerate();
        let mut checks = all.map(|(at, one)| one.check().and(one.check_beside(&issuers[..at])));
        checks.try_for_each(|checked| checked)
    }

    /// The scopes that tokens may have.
    fn permitted_scopes(&self) -> Result<Scopes, String> {
        let permitted = match (&self.scopes, &self.tenants) {
            (Some(named), _) => Scopes::parse(&named.join(",")),
            (None, Some(_)) => Scopes::parse("use"),
            (None, None) => Some(Scopes::all()),
        };
        permitted.ok_or_else(|| {
            let named = self.scopes.iter().flatten().map(String::as_str).collect::<Vec<_>>();
            format!(
                "`scopes` of an issuer is `{}`; `use`, `admin` and `metrics` exist",
                named.join(", ")
            )
        })
    }

    fn permits_tenant(&self, tenant: &str) -> bool {
        self.tenants.as_ref().is_none_or(|patterns| {
            patterns.iter().any(|pattern| match pattern.strip_suffix('*') {
                Some(beginning) => tenant.starts_with(beginning),
                None => tenant == pattern,
            })
        })
    }
}

/// Whether a text can be the name of a tenant.
fn is_tenant(name: &str) -> bool {
    !name.is_empty()
        && name.chars().count() <= MAX_TENANT
        && !name.chars().any(|c| c.is_whitespace() || c.is_control())
}

/// The URL, if it is `https://`, or that of this machine.
fn secure(text: &str) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|error| format!("`{text}` is no URL: {error}"))?;
    let local = matches!(url.host_str(), Some("localhost" | "127.0.0.1" | "[::1]"));
    match url.scheme() {
        "https" => Ok(url),
        "http" if local => Ok(url),
        _ => Err(format!("`{text}` must begin with https://")),
    }
}

/// A key of an issuer.
struct IssuerKey {
    id: Option<String>,
    algorithms: Vec<Algorithm>,
    key: DecodingKey,
}

/// The algorithms that a key verifies; none if it is a secret, or of an unknown kind.
fn algorithms(jwk: &Jwk) -> Vec<Algorithm> {
    use jsonwebtoken::jwk::EllipticCurve;
    match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => vec![
            Algorithm::RS256,
            Algorithm::RS384,
            Algorithm::RS512,
            Algorithm::PS256,
            Algorithm::PS384,
            Algorithm::PS512,
        ],
        AlgorithmParameters::EllipticCurve(key) => match key.curve {
            EllipticCurve::P256 => vec![Algorithm::ES256],
            EllipticCurve::P384 => vec![Algorithm::ES384],
            _ => Vec::new(),
        },
        AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => {
            vec![Algorithm::EdDSA]
        }
        _ => Vec::new(),
    }
}

/// The keys of a JWKS document. Those of unknown kinds are left out.
fn keys_of(document: &Value) -> Vec<IssuerKey> {
    let all = document["keys"].as_array().into_iter().flatten().take(MAX_KEYS);
    let key = |value: &Value| {
        let encrypts = value["use"].as_str().is_some_and(|purpose| purpose != "sig");
        let jwk: Jwk = serde_json::from_value(value.clone()).ok().filter(|_| !encrypts)?;
        let algorithms = algorithms(&jwk);
        let key = DecodingKey::from_jwk(&jwk).ok().filter(|_| !algorithms.is_empty())?;
        Some(IssuerKey { id: jwk.common.key_id, algorithms, key })
    };
    all.filter_map(key).collect()
}

/// An issuer, and its keys.
pub(crate) struct Issuer {
    config: OidcConfig,
    /// `None` until they have been fetched.
    keys: RwLock<Option<Vec<IssuerKey>>>,
    /// A token named a key that is not known.
    wanted: Notify,
    /// A task fetches the keys.
    watched: AtomicBool,
}

/// Whether a credential has the form of a JWT.
pub(crate) fn is_token(credential: &[u8]) -> bool {
    credential.starts_with(b"eyJ") && credential.iter().filter(|byte| **byte == b'.').count() == 2
}

/// The holder of a token that one of the issuers has signed.
pub(crate) fn identity(issuers: &[Arc<Issuer>], token: &[u8]) -> Result<Identity, KeyError> {
    let token = std::str::from_utf8(token).ok().filter(|token| token.len() <= MAX_TOKEN);
    let token = token.ok_or(KeyError::Token("it is too long"))?;
    let named = jsonwebtoken::dangerous::insecure_decode::<Value>(token);
    let named = named.map_err(|_| KeyError::Token("it is no JWT"))?;
    let issuer = named.claims["iss"].as_str().unwrap_or_default();
    let known = || issuers.iter().filter(|known| known.config.issuer == issuer);
    let first = known().next().ok_or(KeyError::Token("its issuer is not known here"))?;
    // One issuer may have several tables, for several audiences, and a token may name several of
    // them.
    let mut fault = None;
    for named in known().filter(|known| has_audience(&named.claims, &known.config.audience)) {
        match named.verify(token) {
            Ok(identity) => return Ok(identity),
            Err(error) => drop(fault.get_or_insert(error)),
        }
    }
    match fault {
        Some(fault) => Err(fault),
        None => first.verify(token),
    }
}

/// Whether claims, which are not verified yet, name an audience.
fn has_audience(claims: &Value, audience: &str) -> bool {
    match &claims["aud"] {
        Value::Array(all) => all.iter().any(|one| one == audience),
        one => one == audience,
    }
}

impl Issuer {
    pub(crate) fn new(config: OidcConfig) -> Arc<Self> {
        Arc::new(Self {
            config,
            keys: RwLock::new(None),
            wanted: Notify::new(),
            watched: AtomicBool::new(false),
        })
    }

    pub(crate) fn config(&self) -> &OidcConfig {
        &self.config
    }

    /// Fetches the keys from now on.
    pub(crate) fn watch(self: &Arc<Self>) {
        if !self.watched.swap(true, Ordering::Relaxed) {
            tokio::spawn(renewing(Arc::downgrade(self)));
        }
    }

    fn verify(&self, token: &str) -> Result<Identity, KeyError> {
        let header = decode_header(token).map_err(|_| KeyError::Token("it is no JWT"))?;
        let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        let Some(keys) = keys.as_deref() else {
            self.wanted.notify_one();
            return Err(KeyError::NoIssuerKeys);
        };
        let named = |key: &&IssuerKey| header.kid.is_none() || key.id == header.kid;
        let mut candidates =
            keys.iter().filter(named).filter(|key| key.algorithms.contains(&header.alg)).peekable();
        if candidates.peek().is_none() {
            // The issuer may have a new key since.
            self.wanted.notify_one();
            return Err(KeyError::Token("its key or its algorithm is not known for its issuer"));
        }
        let mut validation = Validation::new(header.alg);
        validation.leeway = LEEWAY;
        validation.validate_nbf = true;
        validation.set_audience(&[&self.config.audience]);
        validation.set_issuer(&[&self.config.issuer]);
        validation.set_required_spec_claims(&["exp", "iss", "aud"]);
        let mut fault = KeyError::Token("its signature is wrong");
        for candidate in candidates {
            match decode::<Value>(token, &candidate.key, &validation) {
                Ok(decoded) => return self.identity(&decoded.claims),
                Err(error) => fault = fault_of(&error, fault),
            }
        }
        Err(fault)
    }

    /// The holder that verified claims name.
    fn identity(&self, claims: &Value) -> Result<Identity, KeyError> {
        let tenant = claims[&self.config.tenant_claim].as_str().unwrap_or_default();
        if !is_tenant(tenant) {
            return Err(KeyError::Token("it names no tenant"));
        }
        let words: Vec<&str> = match &claims[&self.config.scope_claim] {
            Value::String(words) => words.split_whitespace().collect(),
            Value::Array(words) => words.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let named: Vec<&str> =
            words.iter().filter_map(|word| word.strip_prefix(SCOPE_PREFIX)).collect();
        let scopes = match named.is_empty() {
            true => Scopes::parse("use"),
            false => Scopes::parse(&named.join(",")),
        };
        let subject = claims["sub"].as_str().unwrap_or("?");
        let subject: String =
            subject.chars().filter(|c| !c.is_control()).take(MAX_SUBJECT).collect();
        let scopes = scopes.ok_or(KeyError::Token("it has a scope that is not known here"))?;
        let key: Arc<str> = format!("oidc:{subject}").into();
        let outside = |why: String| KeyError::Outside { why, key: key.clone() };
        if !self.config.permits_tenant(tenant) {
            return Err(outside(format!("its issuer may not name the tenant `{tenant}`")));
        }
        let permitted = self.config.permitted_scopes().unwrap_or_default();
        if let Some(scope) = scopes.beyond(permitted) {
            return Err(outside(format!("its issuer may not give the scope `{}`", scope.name())));
        }
        Ok(Identity { tenant: tenant.into(), key, scopes })
    }

    /// Fetches the keys.
    async fn fetch(&self, client: &Client) -> Result<(), String> {
        let url = match &self.config.jwks {
            Some(url) => secure(url)?,
            None => {
                let base = self.config.issuer.trim_end_matches('/');
                let found = document(client, secure(&format!("{base}{DISCOVERY}"))?).await?;
                if found["issuer"].as_str() != Some(&self.config.issuer) {
                    return Err("its discovery document names another issuer".to_owned());
                }
                let url = found["jwks_uri"].as_str();
                secure(url.ok_or("its discovery document has no `jwks_uri`")?)?
            }
        };
        let document = document(client, url).await?;
        if !document["keys"].is_array() {
            return Err("its document of keys has no list `keys`".to_owned());
        }
        let keys = keys_of(&document);
        let has_keys = !keys.is_empty();
        // An issuer that withdraws all keys is believed.
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = Some(keys);
        match has_keys {
            true => Ok(()),
            false => Err("it has no key that verifies signatures".to_owned()),
        }
    }
}

/// The fault for the client; `before` is that of an earlier key.
fn fault_of(error: &jsonwebtoken::errors::Error, before: KeyError) -> KeyError {
    use jsonwebtoken::errors::ErrorKind;
    KeyError::Token(match error.kind() {
        ErrorKind::ExpiredSignature => "it has expired",
        ErrorKind::ImmatureSignature => "it is not valid yet",
        ErrorKind::InvalidAudience => "it is for another audience",
        ErrorKind::MissingRequiredClaim(_) => "it lacks `exp`, `iss` or `aud`",
        _ => return before,
    })
}

/// A document of an issuer.
async fn document(client: &Client, url: Url) -> Result<Value, String> {
    let shown = url.to_string();
    let failed = |error: reqwest::Error| crate::failure::describe(&error);
    let mut response = client.get(url).send().await.map_err(failed)?;
    if response.status() != reqwest::StatusCode::OK {
        return Err(format!("{shown} answers {}", response.status()));
    }
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await.map_err(failed)? {
        if body.len() + piece.len() > MAX_DOCUMENT {
            return Err(format!("{shown} has more than {MAX_DOCUMENT} bytes"));
        }
        body.extend_from_slice(&piece);
    }
    serde_json::from_slice(&body).map_err(|error| format!("{shown}: {error}"))
}

/// Fetches the keys of an issuer now and then, until it is dropped.
async fn renewing(issuer: Weak<Issuer>) {
    let client = Client::builder()
        .timeout(FETCH_TIMEOUT)
        .user_agent(concat!("afresh/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .build();
    let client = match client {
        Ok(client) => client,
        Err(error) => {
            tracing::error!(%error, "keys of issuers cannot be fetched");
            return;
        }
    };
    loop {
        let Some(this) = issuer.upgrade() else { return };
        if let Err(why) = this.fetch(&client).await {
            tracing::warn!(
                issuer = this.config.issuer,
                why,
                "the keys of an issuer were not fetched"
            );
        }
        let missing = this.keys.read().unwrap_or_else(PoisonError::into_inner).is_none();
        tokio::time::sleep(if missing { Duration::from_secs(1) } else { MIN_FETCH_INTERVAL }).await;
        if missing {
            continue;
        }
        // A token may have named an unknown key meanwhile.
        let _ = tokio::time::timeout(FETCH_INTERVAL, this.wanted.notified()).await;
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::rand::SystemRandom;
    use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use jsonwebtoken::{EncodingKey, Header, encode};
    use serde_json::json;

    use super::*;

    const URL: &str = "https://issuer.example";

    #[test]
    fn each_table_of_one_issuer_counts_for_its_audience() {
        let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
        let document = EcdsaKeyPair::generate_pkcs8(algorithm, &SystemRandom::new()).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(algorithm, document.as_ref()).unwrap();
        let part =
            |at: std::ops::Range<usize>| URL_SAFE_NO_PAD.encode(&pair.public_key().as_ref()[at]);
        let (x, y) = (part(1..33), part(33..65));
        let keys = json!({"keys": [{"kty": "EC", "crv": "P-256", "x": x, "y": y}]});
        let issuer = |audience: &str, tenants: Option<Vec<String>>| {
            let issuer = Issuer::new(OidcConfig { tenants, ..OidcConfig::new(URL, audience) });
            *issuer.keys.write().unwrap() = Some(keys_of(&keys));
            issuer
        };
        let issuers = [issuer("first", Some(vec!["ci-*".to_owned()])), issuer("second", None)];
        let ask = |tenant: &str, audience: Value| {
            let claims = json!({"iss": URL, "aud": audience, "tenant": tenant, "exp": 1u64 << 40});
            let key = EncodingKey::from_ec_der(document.as_ref());
            let token = encode(&Header::new(Algorithm::ES256), &claims, &key).unwrap();
            let identity = identity(&issuers, token.as_bytes());
            identity.map(|of| of.tenant.to_string()).map_err(|error| error.to_string())
        };
        assert_eq!(ask("ci-1", json!("first")), Ok("ci-1".to_owned()));
        assert_eq!(ask("acme", json!("second")), Ok("acme".to_owned()));
        assert_eq!(ask("acme", json!(["first", "second"])), Ok("acme".to_owned()));
        for (audience, reason) in [
            (json!("first"), "may not name the tenant `acme`"),
            (json!(["first", "third"]), "may not name the tenant `acme`"),
            (json!("third"), "another audience"),
            (Value::Null, "lacks"),
        ] {
            let fault = ask("acme", audience).unwrap_err();
            assert!(fault.contains(reason), "{fault}");
        }
        let configs = issuers.map(|issuer| issuer.config.clone());
        assert_eq!(configs[1].check_beside(&configs[..1]), Ok(()));
        let fault = OidcConfig::new(URL, "first").check_beside(&configs).unwrap_err();
        assert!(fault.contains("audience `first`"), "{fault}");
    }
}
