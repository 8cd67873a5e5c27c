//! Rules for HTTP requests to one destination, and the grants that a guest is given: destinations
//! and rules.
//!
//! Promises: a rule that cannot be kept as written is an error. The debug output of a rule has no
//! secret.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::de::{MapAccess, Visitor, value::MapAccessDeserializer};
use serde::{Deserialize, Deserializer};

use crate::authority::Authority;
use crate::credential::{Credential, CredentialTable};
use crate::destination::{Destination, DestinationQuery, HostPattern, ParseDestinationError};
use crate::path::PathPattern;
use crate::request_head::{HOP_BY_HOP, HeaderList, RequestHead, folded, is_token, is_value_byte};

/// Maximum methods, paths and headers of a rule.
const MAX_ENTRIES: usize = 256;
/// The port of HTTP without TLS.
const PLAIN_PORT: u16 = 80;
/// The port of HTTPS.
const TLS_PORT: u16 = 443;

/// A rule that cannot be kept.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the rule for `{to}` is invalid: {why}")]
pub struct RuleError {
    to: String,
    why: String,
}

/// Text that is neither a destination nor a rule.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ParseGrantError {
    /// An invalid destination.
    #[error(transparent)]
    Destination(#[from] ParseDestinationError),
    /// An invalid table.
    #[error(
        "{0}; a rule is a table, as in {{\"to\": \"api.example.org:443\", \"methods\": [\"GET\"]}}"
    )]
    Rule(String),
}

/// A value of a key that is there. `null` is an error: by its default a key could allow more than
/// was meant.
fn deserialize_value<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    let value = Option::deserialize(from)?;
    let missing = "null is no value of a key: leave the key out for its default";
    value.map(Some).ok_or_else(|| serde::de::Error::custom(missing))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleTable {
    to: String,
    #[serde(default, deserialize_with = "deserialize_value")]
    methods: Option<Vec<String>>,
    #[serde(default, deserialize_with = "deserialize_value")]
    paths: Option<Vec<PathPattern>>,
    #[serde(default, deserialize_with = "deserialize_value")]
    tls: Option<bool>,
    #[serde(default, deserialize_with = "deserialize_value")]
    ca: Option<PathBuf>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "deserialize_value")]
    credential: Option<CredentialTable>,
    #[serde(default)]
    log: bool,
}

/// The parts of a rule.
struct RuleParts {
    to: Destination,
    text: String,
    methods: Option<Vec<String>>,
    paths: Option<Vec<PathPattern>>,
    tls: bool,
    roots: Option<Arc<RootCertStore>>,
    headers: Vec<(String, Vec<u8>)>,
    credential: Option<Credential>,
    logs_requests: bool,
    authority: Option<Authority>,
}

/// A rule for HTTP requests to one destination. Clones share its authority.
#[derive(Clone)]
pub struct Rule(Arc<RuleParts>);

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rule").field("to", &self.0.text).finish_non_exhaustive()
    }
}

impl PartialEq for Rule {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Rule {}

fn roots_in(path: &Path) -> Result<RootCertStore, String> {
    if !path.is_absolute() {
        return Err(format!("`ca` is not absolute: {}", path.display()));
    }
    let certificates =
        CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let certificates =
        certificates.map_err(|error| format!("`ca`, {}: {error}", path.display()))?;
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certificates);
    match roots.is_empty() {
        true => Err(format!("`ca`, {}, has no certificate in PEM", path.display())),
        false => Ok(roots),
    }
}

/// A header that a rule or a filter may set, with its name in lower case.
pub(crate) fn checked_header(name: &str, value: &str) -> Result<(String, Vec<u8>), String> {
    let lower = name.to_ascii_lowercase();
    if !is_token(name.as_bytes()) || !value.bytes().all(is_value_byte) {
        return Err(format!("the header `{name}` has an invalid name or value"));
    }
    if folded(&lower) == "host" || HOP_BY_HOP.contains(&&*folded(&lower)) {
        return Err(format!("the header `{name}` belongs to the connection and cannot be set"));
    }
    Ok((lower, value.as_bytes().to_vec()))
}

/// A list of headers with others in place of those of the same names.
fn replace_headers(all: HeaderList, own: HeaderList) -> HeaderList {
    let names: Vec<String> = own.iter().map(|(name, _)| folded(name)).collect();
    let rest = all.into_iter().filter(|(name, _)| !names.contains(&folded(name)));
    rest.chain(own).collect()
}

impl Rule {
    fn new(table: RuleTable) -> Result<Self, RuleError> {
        let to: String = table.to.chars().take(300).collect();
        let bad = |why: String| RuleError { to: to.clone(), why };
        let destination: Destination =
            table.to.parse().map_err(|error: ParseDestinationError| bad(error.to_string()))?;
        let Some(port) = destination.port() else {
            return Err(bad("`to` needs a port: a rule is for one port, not for `*`".to_owned()));
        };
        let domain = match destination.pattern() {
            HostPattern::Exactly(name) => name.clone(),
            HostPattern::Ending(end) => end.trim_start_matches('.').to_owned(),
            HostPattern::Address(_) => {
                let why = "`to` needs a name: requests to an address have no host to check; \
                           use NAME:PORT=ADDRESS:PORT";
                return Err(bad(why.to_owned()));
            }
        };
        let tls = table.tls.unwrap_or(port != PLAIN_PORT);
        if !tls && table.ca.is_some() {
            return Err(bad("`ca` needs TLS: leave it out, or set `tls = true`".to_owned()));
        }
        if !tls && table.credential.is_some() {
            return Err(bad("a credential is sent over TLS only: set `tls = true`".to_owned()));
        }
        let many = [
            table.methods.as_ref().map_or(0, Vec::len),
            table.paths.as_ref().map_or(0, Vec::len),
            table.headers.len(),
        ];
        if many.into_iter().any(|count| count > MAX_ENTRIES) {
            return Err(bad(format!("it has more than {MAX_ENTRIES} methods, paths or headers")));
        }
        if table.methods.as_ref().is_some_and(Vec::is_empty)
            || table.paths.as_ref().is_some_and(Vec::is_empty)
        {
            return Err(bad(
                "an empty list of methods or paths allows nothing: leave it out to allow all"
                    .to_owned(),
            ));
        }
        for method in table.methods.iter().flatten() {
            let known = is_token(method.as_bytes())
                && method.bytes().all(|byte| !byte.is_ascii_lowercase());
            if !known || matches!(&**method, "CONNECT" | "TRACE") {
                return Err(bad(format!(
                    "`{method}` is no method that a rule can allow: write GET, POST, …"
                )));
            }
        }
        let roots = table.ca.as_deref().map(roots_in).transpose().map_err(bad)?.map(Arc::new);
        let headers: Result<Vec<_>, _> =
            table.headers.iter().map(|(name, value)| checked_header(name, value)).collect();
        let headers = headers.map_err(bad)?;
        let credential = table.credential.map(Credential::new).transpose().map_err(bad)?;
        if let Some(credential) = &credential
            && headers.iter().any(|(name, _)| name == credential.header())
        {
            return Err(bad(format!(
                "`headers` and `credential` both set `{}`",
                credential.header()
            )));
        }
        let authority = tls
            .then(|| Authority::new(&domain))
            .transpose()
            .map_err(|error| bad(error.to_string()))?;
        Ok(Self(Arc::new(RuleParts {
            to: destination,
            text: to.clone(),
            methods: table.methods,
            paths: table.paths,
            tls,
            roots,
            headers,
            credential,
            logs_requests: table.log,
            authority,
        })))
    }

    /// Its destination.
    #[must_use]
    pub fn to(&self) -> &Destination {
        &self.0.to
    }

    /// Whether both allow and change requests in the same way. Their authorities may differ.
    #[must_use]
    pub fn is_equivalent(&self, other: &Self) -> bool {
        let RuleParts {
            to,
            text,
            methods,
            paths,
            tls,
            roots: _,
            headers,
            credential,
            logs_requests,
            authority: _,
        } = &*self.0;
        let other_parts = &*other.0;
        let credentials = match (credential, &other_parts.credential) {
            (Some(own), Some(other)) => own.is_equivalent(other),
            (None, None) => true,
            _ => false,
        };
        (to, text, methods, paths)
            == (&other_parts.to, &other_parts.text, &other_parts.methods, &other_parts.paths)
            && (tls, headers, logs_requests)
                == (&other_parts.tls, &other_parts.headers, &other_parts.logs_requests)
            && credentials
            && self.has_roots_of(other)
    }

    /// Whether both verify servers with the same authorities.
    fn has_roots_of(&self, other: &Self) -> bool {
        match (self.roots(), other.roots()) {
            (Some(own), Some(other)) => own.roots == other.roots,
            (None, None) => true,
            _ => false,
        }
    }

    /// The destination as it was written.
    pub(crate) fn text(&self) -> &str {
        &self.0.text
    }

    pub(crate) fn tls(&self) -> bool {
        self.0.tls
    }

    /// The port that `Host` need not name.
    pub(crate) fn usual_port(&self) -> u16 {
        if self.0.tls { TLS_PORT } else { PLAIN_PORT }
    }

    /// The authorities that its server is verified with, unless those of the host.
    pub(crate) fn roots(&self) -> Option<&Arc<RootCertStore>> {
        self.0.roots.as_ref()
    }

    /// Its authority, if it needs TLS.
    #[must_use]
    pub fn authority(&self) -> Option<&Authority> {
        self.0.authority.as_ref()
    }

    pub(crate) fn logs_requests(&self) -> bool {
        self.0.logs_requests
    }

    /// The environment variable with a placeholder for its secret, for the guest.
    #[must_use]
    pub fn placeholder(&self) -> Option<&str> {
        self.0.credential.as_ref()?.placeholder()
    }

    /// Whether it allows a request.
    pub(crate) fn allows(&self, head: &RequestHead) -> bool {
        let method = self.0.methods.as_ref().is_none_or(|all| all.contains(&head.method));
        let path = self.0.paths.as_ref();
        method && path.is_none_or(|all| all.iter().any(|pattern| pattern.matches(&head.target)))
    }

    /// The headers for the server: those of the guest, without any that the rule or a filter sets,
    /// those of the filter, and the rule's.
    pub(crate) fn headers(
        &self,
        guest: HeaderList,
        filter: &[(String, Vec<u8>)],
    ) -> Result<HeaderList, String> {
        let mut own = self.0.headers.clone();
        if let Some(credential) = &self.0.credential {
            own.push((credential.header().to_owned(), credential.value()?));
        }
        Ok(replace_headers(replace_headers(guest, filter.to_vec()), own))
    }

    /// Whether requests of both may share a connection: they have the same server, verified in the
    /// same way.
    pub(crate) fn shares_connection(&self, other: &Self, name: &str, port: u16) -> bool {
        let server = |rule: &Self| rule.0.to.server(DestinationQuery::Name(name), port);
        self.0.tls == other.0.tls && server(self) == server(other) && self.has_roots_of(other)
    }
}

/// A grant of connections: a destination, or a rule for HTTP requests to one. As text, a rule is a
/// table in JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetGrant {
    /// All connections to a destination, which carry any protocol.
    Destination(Destination),
    /// Requests that a rule allows.
    Rule(Rule),
}

impl NetGrant {
    /// Its destination.
    pub(crate) fn to(&self) -> &Destination {
        match self {
            Self::Destination(destination) => destination,
            Self::Rule(rule) => rule.to(),
        }
    }

    /// Whether both grant the same. Equal rules are one rule, and equivalent ones need not be.
    #[must_use]
    pub fn is_equivalent(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Rule(own), Self::Rule(other)) => own.is_equivalent(other),
            (own, other) => own == other,
        }
    }
}

impl From<Destination> for NetGrant {
    fn from(destination: Destination) -> Self {
        Self::Destination(destination)
    }
}

impl From<Rule> for NetGrant {
    fn from(rule: Rule) -> Self {
        Self::Rule(rule)
    }
}

impl FromStr for NetGrant {
    type Err = ParseGrantError;

    fn from_str(text: &str) -> Result<Self, ParseGrantError> {
        if !text.trim_start().starts_with('{') {
            return Ok(Self::Destination(text.parse()?));
        }
        serde_json::from_str(text).map_err(|error| ParseGrantError::Rule(error.to_string()))
    }
}

impl<'de> Deserialize<'de> for NetGrant {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Grant;
        impl<'de> Visitor<'de> for Grant {
            type Value = NetGrant;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("NAME:PORT, or a table with `to`")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<NetGrant, E> {
                text.parse::<Destination>().map(NetGrant::Destination).map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<NetGrant, A::Error> {
                let table = RuleTable::deserialize(MapAccessDeserializer::new(map))?;
                Rule::new(table).map(NetGrant::Rule).map_err(serde::de::Error::custom)
            }
        }
        deserializer.deserialize_any(Grant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_is_a_destination_or_a_rule() {
        let plain: NetGrant = "api.example.org:443".parse().unwrap();
        assert!(matches!(plain, NetGrant::Destination(_)));
        let text = r#"{"to": "api.example.org:443", "methods": ["GET"], "paths": ["/v1/**"], "log": true}"#;
        let NetGrant::Rule(rule) = text.parse().unwrap() else { panic!("no rule") };
        assert!(rule.tls() && rule.logs_requests() && rule.authority().is_some());
        assert_eq!(rule.usual_port(), 443);
    }

    #[test]
    fn a_rule_that_cannot_be_kept_is_an_error() {
        for (text, part) in [
            (r#"{"methods": ["GET"]}"#, "missing field `to`"),
            (r#"{"to": "a.test:443", "method": "GET"}"#, "unknown field `method`"),
            (r#"{"to": "a.test:*"}"#, "needs a port"),
            (r#"{"to": "192.0.2.1:443"}"#, "needs a name"),
            (r#"{"to": "a.test"}"#, "names no port"),
            (r#"{"to": "a.test:443", "methods": ["get"]}"#, "`get` is no method"),
            (r#"{"to": "a.test:443", "methods": []}"#, "allows nothing"),
            (r#"{"to": "a.test:443", "methods": null}"#, "null is no value"),
            (r#"{"to": "a.test:443", "paths": null}"#, "null is no value"),
            (r#"{"to": "a.test:443", "credential": null}"#, "null is no value"),
            (r#"{"to": "a.test:443", "headers": null}"#, "null"),
            (r#"{"to": "a.test:443", "methods": ["TRACE"]}"#, "`TRACE`"),
            (r#"{"to": "a.test:443", "paths": ["v1"]}"#, "does not begin with a slash"),
            (r#"{"to": "a.test:443", "ca": "ca.pem"}"#, "not absolute"),
            (r#"{"to": "a.test:443", "ca": "/nowhere/ca.pem"}"#, "/nowhere/ca.pem"),
            (r#"{"to": "a.test:80", "ca": "/ca.pem"}"#, "needs TLS"),
            (r#"{"to": "a.test:443", "headers": {"Host": "b"}}"#, "belongs to the connection"),
            (r#"{"to": "a.test:443", "headers": {"X": "a\nb"}}"#, "invalid name or value"),
            (r#"{"to": "a.test:80", "credential": {"header": "x", "env": "PATH"}}"#, "over TLS"),
            (r#"{"to": "a.test:443", "credential": {"header": "x"}}"#, "`env` or `file`"),
            (
                r#"{"to": "a.test:443", "credential": {"header": "x", "env": "AFRESH_NO_SUCH"}}"#,
                "AFRESH_NO_SUCH",
            ),
            (
                r#"{"to": "a.test:443", "credential": {"header": "x", "file": "/nowhere/key"}}"#,
                "/nowhere/key",
            ),
            (
                r#"{"to": "a.test:443", "headers": {"X": "1"}, "credential": {"header": "x", "env": "PATH"}}"#,
                "both",
            ),
        ] {
            let error = text.parse::<NetGrant>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn rules_are_equivalent_until_one_of_their_fields_differs() {
        let folder = tempfile::tempdir().unwrap();
        let certificate = |name: &str| {
            let path = folder.path().join(name);
            let authority = Authority::new(name).unwrap();
            std::fs::write(&path, authority.certificate_pem()).unwrap();
            path
        };
        let (ca, other_ca) = (certificate("one.test"), certificate("two.test"));
        let (key, other_key) = (folder.path().join("key"), folder.path().join("other-key"));
        std::fs::write(&key, "secret").unwrap();
        std::fs::write(&other_key, "secret").unwrap();
        let table = serde_json::json!({
            "to": "a.test:443", "methods": ["GET"], "paths": ["/v1"], "tls": true, "ca": ca,
            "headers": {"x-own": "1"}, "log": true,
            "credential": {"header": "x-key", "file": key, "prefix": "p ", "placeholder": "KEY"},
        });
        let grant = |table: &serde_json::Value| table.to_string().parse::<NetGrant>().unwrap();
        let rule = grant(&table);
        // Another parse has another authority.
        assert!(rule.is_equivalent(&grant(&table)) && rule != grant(&table));
        let plain = NetGrant::Destination(rule.to().clone());
        assert!(!rule.is_equivalent(&plain) && !plain.is_equivalent(&rule));
        assert!(plain.is_equivalent(&plain.clone()));
        for (field, value) in [
            ("/to", "b.test:443".into()),
            ("/methods", serde_json::json!(["POST"])),
            ("/paths", serde_json::json!(["/v2"])),
            ("/ca", serde_json::json!(other_ca)),
            ("/headers", serde_json::json!({"x-own": "2"})),
            ("/log", false.into()),
            ("/credential/header", "x-other".into()),
            ("/credential/file", serde_json::json!(other_key)),
            ("/credential/prefix", "q ".into()),
            ("/credential/placeholder", "OTHER".into()),
        ] {
            let mut changed = table.clone();
            *changed.pointer_mut(field).unwrap() = value;
            assert!(!rule.is_equivalent(&grant(&changed)), "{field}");
        }
        for field in ["methods", "paths", "ca", "headers", "credential", "log"] {
            let mut changed = table.clone();
            changed.as_object_mut().unwrap().remove(field);
            assert!(!rule.is_equivalent(&grant(&changed)), "without {field}");
        }
        let plain = |tls: bool| grant(&serde_json::json!({"to": "a.test:443", "tls": tls}));
        assert!(!plain(true).is_equivalent(&plain(false)));
        // The same path, with another authority.
        std::fs::copy(&other_ca, &ca).unwrap();
        assert!(!rule.is_equivalent(&grant(&table)));
    }
}
