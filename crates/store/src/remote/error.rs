//! Errors of an object store and of the way to it.

use std::error::Error;
use std::io;
use std::time::Duration;

use crate::{OpenError, SaveError, Sha256};

/// The cause of a failure in another part.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// A remote could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// The address is invalid, or this build does not support it.
    #[error("`{url}` is not a remote: {why}")]
    Url {
        /// The address.
        url: String,
        /// Why.
        why: String,
    },
    /// The store refused the request, or gave an invalid answer.
    #[error("{what}: {}", with_causes(source))]
    Object {
        /// Which object.
        what: String,
        /// The answer of the store.
        source: object_store::Error,
    },
    /// A registry could not be reached, or the connection broke.
    #[error("{what}: {}", with_causes(&**source))]
    Connection {
        /// Which request.
        what: String,
        /// What went wrong.
        source: Box<dyn Error + Send + Sync>,
    },
    /// A registry refused.
    #[error("{what}: the registry answered {status}{message}")]
    Refused {
        /// Which request.
        what: String,
        /// The HTTP status.
        status: u16,
        /// The answer of the registry, and the way out where it is known; begins with a colon.
        message: String,
    },
    /// A registry answered in a way that the protocol does not allow, or made an unsafe request.
    #[error("{what}: {why}")]
    Protocol {
        /// Which request.
        what: String,
        /// What is wrong.
        why: String,
    },
    /// The credentials for a registry cannot be read.
    #[error("credentials for {registry}: {why}")]
    Credentials {
        /// The registry.
        registry: String,
        /// Why.
        why: String,
    },
    /// The name cannot be a tag in a registry.
    #[error(
        "`{0}` cannot be a tag in a registry: use 1 to 128 of A-Z a-z 0-9 _ . - and begin with none \
         of the last two"
    )]
    Name(String),
    /// The store did not answer in time.
    #[error("{what}: no answer within {after:?}; is the server reachable?")]
    Timeout {
        /// Which object.
        what: String,
        /// Time limit of each attempt.
        after: Duration,
    },
    /// A request failed, and was not tried again because the retry budget of the remote is spent.
    #[error(
        "{source}; it was not tried again, because most of the last requests to this store failed"
    )]
    RetryRefused {
        /// The error of the last attempt.
        source: Box<Self>,
    },
    /// The store sent fewer or more bytes than requested.
    #[error("{what}: the server sent {found} bytes instead of {wanted}")]
    Length {
        /// Which object.
        what: String,
        /// Bytes that came.
        found: u64,
        /// Bytes asked for.
        wanted: u64,
    },
    /// An object does not match the digest in its name.
    #[error("the object {expected} has digest {found}: it was damaged on the server or on the way")]
    Digest {
        /// The name.
        expected: Sha256,
        /// Its real digest.
        found: Sha256,
    },
    /// Other writers kept changing the names.
    #[error("`{0}` could not be named: others change the names all the time; try again")]
    Contended(String),
    /// The store writes although the condition of a write does not hold.
    #[error(
        "{store} ignores the condition {condition} of a write, so concurrent writers would lose names and turns; use \
         a store, or a version of it, with conditional writes, an OCI registry, or file://"
    )]
    Unconditional {
        /// The store.
        store: String,
        /// The condition.
        condition: &'static str,
    },
    /// Objects may only be removed when they are old enough.
    #[error(
        "a grace of {grace:?} is too short: writers rely on younger objects; give {least:?} or more"
    )]
    Grace {
        /// The requested digest.
        grace: Duration,
        /// The least.
        least: Duration,
    },
    /// Objects are named elsewhere.
    #[error(
        "snapshots in this store are named by `{by}`, not by names in it; collect the store of a fleet with --nats and --fleet"
    )]
    Kept {
        /// Who names them.
        by: String,
    },
    /// Nothing has a name, so everything would be removed.
    #[error(
        "this store has no valid name, so a collection would remove everything: delete the store itself if that is intended"
    )]
    NoNames,
    /// The keeper's names cannot be read.
    #[error("the names of snapshots in this store cannot be read")]
    Names(#[source] Cause),
    /// The remote collects unreferenced objects itself.
    #[error("a registry collects its own garbage: only object stores are collected")]
    NoCollection,
    /// Collections ran without a pause.
    #[error("collections of the store went on all the time; try again")]
    Collected,
    /// The snapshot is damaged or of another kind.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The local store failed.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// Threads could not be started.
    #[error("starting threads for remote access: {0}")]
    Runtime(io::Error),
    /// The remote belongs to a parent of this process, whose threads and connections it uses.
    #[error("this remote was opened before this process was forked: open it again in the child")]
    Forked,
}

impl RemoteError {
    /// Whether the object does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(
            self,
            Self::Object { source: object_store::Error::NotFound { .. }, .. }
                | Self::Refused { status: 404, .. }
                | Self::Open(OpenError::NoSuchName { .. })
        )
    }

    /// Whether trying again may help.
    pub(super) fn may_pass(&self) -> bool {
        match self {
            Self::Timeout { .. } | Self::Length { .. } | Self::Connection { .. } => true,
            Self::Refused { status, .. } => matches!(status, 408 | 429 | 500..),
            Self::RetryRefused { source } => source.may_pass(),
            Self::Object { source, .. } => matches!(
                source,
                object_store::Error::Generic { .. } | object_store::Error::JoinError { .. }
            ),
            _ => false,
        }
    }
}

impl RemoteError {
    /// Whether the server does not answer, as opposed to a wrong answer.
    #[must_use]
    pub fn is_outage(&self) -> bool {
        self.may_pass() && !matches!(self, Self::Length { .. })
    }
}

/// The error and its causes, each said once: clients tend to hide "connection refused" at the
/// bottom.
pub(super) fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let said = cause.to_string();
        if !text.contains(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_a_store_does_not_have_is_not_found() {
        let unknown = OpenError::NoSuchName { name: "a".to_owned(), known: Vec::new() };
        assert!(RemoteError::from(unknown).is_not_found());
        let other = OpenError::NotALayout("a".into());
        assert!(!RemoteError::from(other).is_not_found());
    }
}
