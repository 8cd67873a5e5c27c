//! Addresses in messages, without the credentials that a user wrote into them.

use std::fmt;

/// An address as messages show it: without a password, and without the user before one.
///
/// No remote takes credentials from its address. The message that refuses them may be in a log.
#[derive(Clone, Copy, Debug)]
pub struct RedactedUrl<'a>(pub &'a str);

impl fmt::Display for RedactedUrl<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((scheme, rest)) = self.0.split_once("://") else { return f.write_str(self.0) };
        if let Some(at) = end_of_password(rest) {
            return write!(f, "{scheme}://***@{}", &rest[at + 1..]);
        }
        // A password with a slash, whose end was taken for a name.
        match rest.split('/').next().and_then(|authority| authority.split_once(':')) {
            Some((user, port)) if !user.starts_with('[') && !is_port(port) => {
                write!(f, "{scheme}://{user}:***")
            }
            _ => f.write_str(self.0),
        }
    }
}

/// Position of the `@` behind a password. An address without one may have a port, a tag and an `@`
/// before a name.
fn end_of_password(rest: &str) -> Option<usize> {
    let is_digest = |at: usize| rest[at + 1..].starts_with("sha256:");
    let mut marks = rest.match_indices('@').map(|(at, _)| at).filter(|at| !is_digest(*at));
    let at = marks.next_back()?;
    let (user, password) = rest[..at].split_once(':')?;
    let has_port = password.split_once('/').is_some_and(|(port, _)| is_port(port));
    (!user.contains('/') && !user.starts_with('[') && !has_port).then_some(at)
}

fn is_port(text: &str) -> bool {
    text.len() <= 5 && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_not_shown() {
        for secret in [
            "oci://user:secret@host/a",
            "oci://user:secret@host/a:tag@name",
            "oci://user:sec/ret@host/a",
            "oci://user:sec/ret",
            "oci://user:se@c/ret@host:5000/a",
            "s3://user:secret@bucket/p@name",
        ] {
            let shown = RedactedUrl(secret).to_string();
            assert!(!shown.contains("ret"), "{shown}");
            assert!(shown.contains("***"), "{shown}");
        }
        assert_eq!(RedactedUrl("oci://u:p@host/a").to_string(), "oci://***@host/a");
    }

    #[test]
    fn an_address_without_a_password_is_shown_whole() {
        let digest = format!("oci://host:5000/a:tag@sha256:{}", "0".repeat(64));
        for address in [
            "oci://host:5000/a@name",
            "oci://host/a:tag@name",
            "oci://[::1]:5000/a@name",
            "abfs://container@account.dfs.core.windows.net/p",
            "s3://bucket/p@latest",
            "file:///home/me:x@work/store@name",
            "store@name",
            digest.as_str(),
        ] {
            assert_eq!(RedactedUrl(address).to_string(), address);
        }
    }
}
