//! The user that a client asks for.
//!
//! Promises: programs run as `user` or as `root`, and another user is refused. `root` is the number
//! 0 in a user namespace of the guest. It passes permission bits, and has no other rights beyond
//! those of `user`, who owns all files.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;

use crate::sandbox::agent::connect::ConnectError;

/// A user of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum User {
    /// The owner of all files.
    User,
    Root,
}

impl User {
    /// The user of a name, which is `None` where the name is empty.
    pub(crate) fn named(name: &str) -> Result<Option<Self>, String> {
        match name {
            "" => Ok(None),
            "user" => Ok(Some(Self::User)),
            "root" => Ok(Some(Self::Root)),
            other => {
                let other: String = other.chars().take(64).collect();
                Err(format!(
                    "invalid username: '{other}': programs run as `user` or `root`; name one of \
                     them, or leave the user out"
                ))
            }
        }
    }

    /// The user that a request names as in HTTP's basic authentication.
    pub(crate) fn of_request(headers: &HeaderMap) -> Result<Option<Self>, ConnectError> {
        let Some(given) = headers.get(AUTHORIZATION) else { return Ok(None) };
        let Some(text) = given.as_bytes().strip_prefix(b"Basic ") else { return Ok(None) };
        let wrong = |why: String| ConnectError::new("unauthenticated", why);
        let plain = STANDARD.decode(text).map_err(|error| wrong(error.to_string()))?;
        let plain = String::from_utf8_lossy(&plain);
        Self::named(plain.split(':').next().unwrap_or_default()).map_err(wrong)
    }

    pub(crate) fn of(is_root: bool) -> Self {
        if is_root { Self::Root } else { Self::User }
    }

    /// The operation that starts a command in the guest. A sandbox that an earlier version saved
    /// refuses that of `root`.
    pub(crate) fn start_operation(self) -> &'static str {
        match self {
            Self::User => "start",
            Self::Root => "start as root",
        }
    }

    pub(crate) fn is_root(self) -> bool {
        self == Self::Root
    }

    /// The start of relative paths.
    pub(crate) fn home(self) -> &'static str {
        match self {
            Self::User => "/home/user",
            Self::Root => "/root",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_other_than_two_are_refused_by_name() {
        let of = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, text.parse().unwrap());
            User::of_request(&headers).map_err(|refused| refused.why().to_owned())
        };
        assert!(User::of_request(&HeaderMap::new()).is_ok_and(|user| user.is_none()));
        assert_eq!(of("Basic dXNlcjo="), Ok(Some(User::User)));
        assert_eq!(of("Basic cm9vdDo="), Ok(Some(User::Root)));
        assert_eq!((of("Basic Og=="), of("Bearer key")), (Ok(None), Ok(None)));
        assert!(of("Basic bm9ib2R5Og==").unwrap_err().contains("'nobody'"));
        assert!(of("Basic !").is_err());
    }
}
