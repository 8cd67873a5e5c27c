//! Errors of a server as a whole. The error of one request is an
//! [`ErrorResponse`](crate::error_response).

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// The file that describes a server cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// A template of another guest than a Linux program has servers to connect to.
    #[error(
        "the template `{template}` has `net`, which Linux programs alone can have: give it `linux`, or leave `net` out"
    )]
    Net {
        /// The template.
        template: String,
    },
    /// A template is made of one thing.
    #[error(
        "the template `{template}` has `guest`, a module or a snapshot, or `linux`, a program: one of them"
    )]
    Guest {
        /// Its name.
        template: String,
    },
    /// A file could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A line of the file of keys is not valid.
    #[error("{}, line {line}: {reason}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The valid form.
        reason: &'static str,
    },
    /// An issuer of bearer tokens that cannot be used.
    #[cfg(feature = "oidc")]
    #[error("an issuer in `[[sandboxes.oidc]]`: {fault}")]
    Issuer {
        /// The fault.
        fault: String,
    },
    /// A certificate without its key, or a key without its certificate.
    #[cfg(feature = "tls")]
    #[error("{}: `tls-cert` and `tls-key` go together", path.display())]
    Half {
        /// The file.
        path: PathBuf,
    },
    /// A limit of all tenants together that only a tenant can have.
    #[error(
        "`{key}` is a limit of tenants: it belongs in `[sandboxes.tenant-limits]` or `[sandboxes.tenants.NAME]`; \
         `max-running-calls` of `[sandboxes]` is that of all together"
    )]
    TenantKey {
        /// The key.
        key: &'static str,
    },
    /// The audit log is required, and no file is set.
    #[error("{}: `audit-required` needs `audit`, the file of the log", path.display())]
    Audit {
        /// The file.
        path: PathBuf,
    },
    /// It has an unknown entry, or lacks one.
    #[error("{}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The place and the reason.
        source: Box<toml::de::Error>,
    },
}

/// A server could not be started, or could not change its guests; in that case it continues with
/// those it has.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// It has nothing to serve.
    #[error("there is no guest to serve: name one, or a file with `[[guest]]` in it")]
    Nothing,
    /// Two guests for the same requests.
    #[error(
        "two guests answer the same requests: `{first}` and `{second}`; give one of them another route or host"
    )]
    Twice {
        /// One of them.
        first: String,
        /// The other.
        second: String,
    },
    /// A route that no request could have.
    #[error("`{route}` is not a route: a route begins with `/` and has no query")]
    Route {
        /// The value that was given.
        route: String,
    },
    /// A guest could not be opened.
    #[error("the guest `{name}` cannot be served")]
    Guest {
        /// Its name.
        name: String,
        /// Why not.
        source: afresh::Cause,
    },
    /// There can be no sandboxes.
    #[error("sandboxes cannot be served")]
    Sandboxes {
        /// Why not.
        source: afresh::Cause,
    },
    /// The audit log cannot be opened.
    #[error("the audit log {} cannot be opened", path.display())]
    Audit {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// There can be no HTTPS.
    #[cfg(feature = "tls")]
    #[error("HTTPS cannot be served with {}", path.display())]
    Tls {
        /// The certificate or the key.
        path: PathBuf,
        /// The reason.
        source: afresh::Cause,
    },
    /// The fleet cannot be joined.
    #[cfg(feature = "fleet")]
    #[error("the fleet cannot be joined")]
    Fleet {
        /// Why not.
        source: afresh::Cause,
    },
    /// The address cannot be listened at.
    #[error("cannot listen at {addr}")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// The error of the operating system.
        source: io::Error,
    },
}
