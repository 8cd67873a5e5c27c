//! `oci://registry/repository[:tag][@digest]`.

use url::{Host, Url};

use crate::remote::RemoteError;
use crate::{RedactedUrl, Sha256};

/// Where a repository is, and what of it is meant.
#[derive(Debug)]
pub(in crate::remote) struct Address {
    /// Host and port, as credentials are filed.
    pub(super) registry: String,
    pub(super) repository: String,
    /// `scheme://host/v2/repository/`.
    pub(super) base: Url,
    /// The tag or digest.
    pub(in crate::remote) name: Option<String>,
}

impl Address {
    /// Reads an address; `None` when it is of another scheme.
    pub(in crate::remote) fn parse(text: &str) -> Result<Option<Self>, RemoteError> {
        let bad = |why: &str| RemoteError::Url {
            url: RedactedUrl(text).to_string(),
            why: why.to_owned(),
        };
        let Some((scheme, rest)) = text.split_once("://") else { return Ok(None) };
        let scheme = match scheme {
            "oci" => None,
            "oci+http" => Some("http"),
            "oci+https" => Some("https"),
            _ => return Ok(None),
        };
        let (registry, path) = rest
            .split_once('/')
            .ok_or_else(|| bad("the repository is missing: oci://registry/repository[:tag]"))?;
        if registry.contains('@') {
            return Err(bad("credentials do not belong in an address; see `docker login`"));
        }
        let (path, digest) = match path.split_once('@') {
            Some((path, digest)) => (path, Some(digest)),
            None => (path, None),
        };
        let (repository, tag) = match path.rsplit_once(':') {
            Some((repository, tag)) => (repository, Some(tag)),
            None => (path, None),
        };
        if !repository.split('/').all(is_component) {
            return Err(bad("a repository has parts of a-z 0-9 . _ - with slashes between them"));
        }
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(bad("a tag has 1 to 128 of A-Z a-z 0-9 _ . -"));
        }
        if digest.is_some_and(|digest| digest.parse::<Sha256>().is_err()) {
            return Err(bad("a digest has the form sha256:<64 lower-case hexadecimal digits>"));
        }
        // Docker's own registry answers under another name than it is called by.
        let host = if registry == "docker.io" { "registry-1.docker.io" } else { registry };
        let url = |scheme: &str| {
            Url::parse(&format!("{scheme}://{host}/v2/{repository}/"))
                .ok()
                // However the parser treated odd characters, nothing moved between host and path.
                .filter(|url| url.path() == format!("/v2/{repository}/") && !registry.is_empty())
                .filter(|url| url.query().is_none() && url.fragment().is_none())
                .ok_or_else(|| bad("the registry is not a host, or host:port"))
        };
        let mut base = url(scheme.unwrap_or("https"))?;
        if scheme.is_none() && is_loopback(&base) {
            base = url("http")?;
        }
        let name = digest.or(tag).map(str::to_owned);
        let (registry, repository) = (registry.to_owned(), repository.to_owned());
        Ok(Some(Self { registry, repository, base, name }))
    }

    /// Whether the registry is on this host.
    pub(super) fn is_loopback(&self) -> bool {
        is_loopback(&self.base)
    }

    /// Whether a URL leads to the registry itself, which may see what is meant for it.
    pub(super) fn is_same_origin(&self, url: &Url) -> bool {
        self.base.origin() == url.origin()
    }

    /// Whether a URL may be used at all: never a plain one where the registry's own is encrypted.
    pub(super) fn allows(&self, url: &Url) -> bool {
        url.scheme() == "https" || url.scheme() == "http" && self.base.scheme() == "http"
    }
}

/// Whether `tag` can be a tag.
pub(super) fn is_tag(tag: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    !tag.is_empty() && tag.len() <= 128 && tag.chars().all(allowed) && !tag.starts_with(['.', '-'])
}

fn is_component(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c);
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    part.chars().all(allowed) && edge(part.chars().next()) && edge(part.chars().next_back())
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Address {
        Address::parse(text).unwrap().unwrap()
    }

    #[test]
    fn an_address_names_registry_repository_and_tag() {
        let address = parse("oci://ghcr.io/team/guest:v1.2");
        assert_eq!(address.base.as_str(), "https://ghcr.io/v2/team/guest/");
        assert_eq!(address.name.as_deref(), Some("v1.2"));
        let address = parse("oci://host:5000/guest");
        assert_eq!((address.registry.as_str(), address.name), ("host:5000", None));
        let digest = Sha256::of(b"").to_string();
        let address = parse(&format!("oci://host/a:tag@{digest}"));
        assert_eq!((address.repository.as_str(), address.name), ("a", Some(digest)));
        assert_eq!(
            parse("oci://docker.io/x/y").base.as_str(),
            "https://registry-1.docker.io/v2/x/y/"
        );
    }

    #[test]
    fn only_loopback_is_plain_unless_asked_for() {
        for (text, scheme) in [
            ("oci://localhost:5000/a", "http"),
            ("oci://127.0.0.1/a", "http"),
            ("oci://[::1]:5000/a", "http"),
            ("oci://10.0.0.1:5000/a", "https"),
            ("oci://localhost.example.com/a", "https"),
            ("oci+http://10.0.0.1:5000/a", "http"),
            ("oci+https://localhost/a", "https"),
        ] {
            let address = parse(text);
            assert_eq!(address.base.scheme(), scheme, "{text}");
            assert!(address.allows(&Url::parse("https://elsewhere/").unwrap()));
            assert_eq!(address.allows(&Url::parse("http://elsewhere/").unwrap()), scheme == "http");
        }
    }

    #[test]
    fn ambiguous_addresses_are_refused() {
        for text in [
            "oci://host",
            "oci://host/",
            "oci://host/../a",
            "oci://host/a/../b",
            "oci://host/A",
            "oci://host/a?x",
            "oci://host/a:",
            "oci://host/a:.x",
            "oci://host/a@sha256:12",
            "oci://user:secret@host/a",
            "oci://ho st/a",
            "oci://host#/a",
            "oci://host?/a",
            "oci:///a",
        ] {
            let refused = Address::parse(text).unwrap_err();
            assert!(!refused.to_string().contains("secret"), "{refused}");
            assert!(!format!("{refused:?}").contains("secret"), "{refused:?}");
        }
        assert!(Address::parse("s3://bucket/a").unwrap().is_none());
    }
}
