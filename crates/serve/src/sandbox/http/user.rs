//! The user that a client asks for.
//!
//! Promises: programs run as one user, and another one is refused.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;

use crate::sandbox::agent::connect::ConnectError;

/// The user of every sandbox.
const USER: &str = "user";

/// Refuses another user by name.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    match name {
        "" | USER => Ok(()),
        other => {
            let other: String = other.chars().take(64).collect();
            Err(format!(
                "invalid username: '{other}': programs run as `{USER}`, who owns all files; leave the user \
                 out, or name `{USER}`"
            ))
        }
    }
}

/// Refuses a request for another user, who is named as in HTTP's basic authentication.
pub(crate) fn check(headers: &HeaderMap) -> Result<(), ConnectError> {
    let Some(given) = headers.get(AUTHORIZATION) else { return Ok(()) };
    let Some(text) = given.as_bytes().strip_prefix(b"Basic ") else { return Ok(()) };
    let wrong = |why: String| ConnectError::new("unauthenticated", why);
    let plain = STANDARD.decode(text).map_err(|error| wrong(error.to_string()))?;
    let plain = String::from_utf8_lossy(&plain);
    check_name(plain.split(':').next().unwrap_or_default()).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_user_is_refused_by_name() {
        let of = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, text.parse().unwrap());
            check(&headers).is_ok()
        };
        assert!(check(&HeaderMap::new()).is_ok() && of("Basic dXNlcjo=") && of("Bearer key"));
        assert!(!of("Basic cm9vdDo=") && !of("Basic !"));
    }
}
