//! Names of OCI images: `host:port/path:tag@digest`.

use std::net::Ipv6Addr;

/// Maximum bytes of a name.
const MAX_NAME: usize = 1024;
/// Maximum bytes of a tag.
const MAX_TAG: usize = 128;

/// Whether text names an OCI image, by the grammar of the distribution specification.
pub(crate) fn is_image_name(text: &str) -> bool {
    let (name, digest) = text.split_once('@').map_or((text, None), |(name, d)| (name, Some(d)));
    // The colon before a port has a path behind it.
    let (path, tag) = match name.rsplit_once(':') {
        Some((path, tag)) if !tag.contains('/') => (path, Some(tag)),
        _ => (name, None),
    };
    let (host, path) = match path.split_once('/') {
        Some((host, rest)) if host == "localhost" || host.contains(['.', ':']) => {
            (Some(host), rest)
        }
        _ => (None, path),
    };
    text.len() <= MAX_NAME
        && host.is_none_or(is_host)
        && path.split('/').all(is_component)
        && tag.is_none_or(is_tag)
        && digest.is_none_or(is_digest)
}

/// An image's name with its registry.
pub(crate) fn full_image_name(image: &str) -> String {
    let first = image.split('/').next().unwrap_or_default();
    let has_registry =
        image.contains('/') && (first.contains('.') || first.contains(':') || first == "localhost");
    match (has_registry, image.contains('/')) {
        (true, _) => image.to_owned(),
        (false, true) => format!("docker.io/{image}"),
        (false, false) => format!("docker.io/library/{image}"),
    }
}

fn is_host(text: &str) -> bool {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    };
    let is_name = || {
        host.split('.')
            .all(|label| is_word(label, |byte| byte.is_ascii_alphanumeric(), |byte| byte == b'-'))
    };
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_address = || address.is_some_and(|address| address.parse::<Ipv6Addr>().is_ok());
    (is_address() || is_name()) && port.is_none_or(|port| port.parse::<u16>().is_ok())
}

/// Whether text has these characters, and others within.
fn is_word(text: &str, outer: impl Fn(u8) -> bool, within: impl Fn(u8) -> bool) -> bool {
    let bytes = text.as_bytes();
    bytes.first().is_some_and(|byte| outer(*byte))
        && bytes.last().is_some_and(|byte| outer(*byte))
        && bytes.iter().all(|byte| outer(*byte) || within(*byte))
}

fn is_component(text: &str) -> bool {
    let outer = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    is_word(text, outer, |byte| b"._-".contains(&byte))
}

fn is_tag(text: &str) -> bool {
    let first = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let all = |byte: &u8| first(byte) || b".-".contains(byte);
    (1..=MAX_TAG).contains(&text.len())
        && text.as_bytes().first().is_some_and(first)
        && text.as_bytes().iter().all(all)
}

fn is_digest(text: &str) -> bool {
    let Some((algorithm, digits)) = text.split_once(':') else { return false };
    let outer = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    is_word(algorithm, outer, |byte| b"+._-".contains(&byte))
        && digits.len() >= 32
        && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_images_follow_the_grammar() {
        let digest = "a".repeat(64);
        for name in [
            "python",
            "python:3.13-slim",
            "docker.io/library/python:3",
            "127.0.0.1:5000/a/b_c--d.e",
            "[::1]:5000/a:v1",
            "localhost/a",
            "registry.example:443/team/app",
            &format!("ghcr.io/a/b:v1@sha256:{digest}"),
            &format!("a@sha256:{digest}"),
        ] {
            assert!(is_image_name(name), "{name}");
        }
        for name in [
            "",
            "docker.io/library/python:3\nINFO forged",
            "docker.io/library/python\u{1b}[2J",
            "docker.io/library/py thon",
            "docker.io/library/Python",
            "docker.io/library//python",
            "docker.io/../secret",
            "docker.io/library/python:",
            "docker.io:99999/python",
            "docker.io/python?x=1",
            "user@docker.io/python",
            "a@sha256:short",
            "ä/b",
            &"a".repeat(MAX_NAME + 1),
        ] {
            assert!(!is_image_name(name), "{name:?}");
        }
    }

    #[test]
    fn images_have_their_registry_in_their_name() {
        for (given, full) in [
            ("python:3.13", "docker.io/library/python:3.13"),
            ("org/image", "docker.io/org/image"),
            ("ghcr.io/org/image:1", "ghcr.io/org/image:1"),
            ("localhost:5000/image", "localhost:5000/image"),
        ] {
            assert_eq!(full_image_name(given), full);
        }
    }
}
