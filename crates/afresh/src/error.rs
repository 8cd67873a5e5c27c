//! Errors of the front door, one type per operation.
//!
//! Each error names the failure, and the way out if one exists; [`source`](std::error::Error::source) returns the
//! cause, which is an error of the crate below and can be downcast to it.

use std::io;
use std::path::PathBuf;

#[cfg(any(feature = "wasm", feature = "vm", feature = "linux"))]
use afresh_snapshot::TreeError;

use crate::Place;

/// An error of a crate below.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Text that is no [`Reference`](crate::Reference), or one that does not fit its use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceError {
    /// Place or name is empty.
    #[error("a snapshot is PLACE or PLACE@NAME, and neither may be empty")]
    Empty,
    /// A digest where a name is needed.
    #[error("{0} is a digest, which cannot be given to a snapshot: write under a name")]
    Digest(String),
    /// A name for a file, which holds one snapshot and needs none.
    #[error("{} holds one snapshot and has no names: leave @{name} out", path.display())]
    Single {
        /// The file.
        path: PathBuf,
        /// The name that was given.
        name: String,
    },
}

/// Something could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The reference is invalid.
    #[error("`{reference}` names no snapshot")]
    Reference {
        /// The given reference.
        reference: String,
        /// The reason.
        source: ReferenceError,
    },
    /// A file could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file is nothing that can be opened.
    #[error(
        "{} is neither a Wasm binary nor an ELF executable nor a snapshot (Wasm in its text format must \
         be assembled first)", path.display()
    )]
    Unknown {
        /// The file.
        path: PathBuf,
    },
    /// The snapshot is of a guest that this crate does not run.
    #[error("{reference} holds memory of kind `{kind}`, which cannot be run here")]
    Kind {
        /// The snapshot.
        reference: String,
        /// The kind of guest in the snapshot.
        kind: String,
    },
    /// The place is of another kind than the operation needs.
    #[error("{place} is {is}; this needs {needs}", is = place.kind())]
    Place {
        /// The place.
        place: Place,
        /// The requirement.
        needs: &'static str,
    },
    /// This build lacks a feature for it.
    #[error("{what}: this build of afresh cannot open it; enable the feature `{feature}`")]
    Feature {
        /// The reference.
        what: String,
        /// The feature of this crate.
        feature: &'static str,
    },
    /// An option that this guest cannot have.
    #[error("{reference}: {why}")]
    Option {
        /// The guest.
        reference: String,
        /// Which option, and why not.
        why: &'static str,
    },
    /// The snapshot's signature or seal does not meet the demands.
    #[error("{reference} does not open")]
    Seal {
        /// The snapshot.
        reference: String,
        /// The reason.
        source: afresh_store::SealError,
    },
    /// The snapshot could not be opened: it is missing, damaged, or its place cannot be reached.
    #[error("opening {reference}")]
    Snapshot {
        /// The snapshot.
        reference: String,
        /// [`afresh_store::OpenError`], or `afresh_store::remote::RemoteError`.
        source: Cause,
    },
    /// The file or snapshot did not become a guest.
    #[error("{reference} cannot be run")]
    Guest {
        /// The guest.
        reference: String,
        /// The error of `afresh::wasm` or `afresh::vm`.
        source: Cause,
    },
}

/// No instance is available for a call. The guest itself is unharmed.
#[cfg(any(feature = "wasm", feature = "vm", feature = "linux"))]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The pool is at its limit, or an instance could not be made.
    #[error("no instance of the guest is available")]
    Instance(#[source] Cause),
}

/// A call failed. The instance is reset, or dropped, when its lease ends.
#[cfg(any(feature = "wasm", feature = "vm", feature = "linux"))]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// There was no instance to call.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// The guest has no such function, or the function takes other arguments.
    #[error("the call of `{function}` does not fit the guest")]
    Request {
        /// The function.
        function: String,
        /// The mismatch.
        source: Cause,
    },
    /// The call ran longer than [`Options::timeout`](crate::Options::timeout) allows.
    #[error("the call of `{function}` ran too long")]
    Timeout {
        /// The function.
        function: String,
        /// The limit that stopped the call.
        source: Cause,
    },
    /// The call was ended by the embedder's watch.
    #[error("the call of `{function}` was stopped by its host")]
    Stopped {
        /// The function.
        function: String,
        /// The reason.
        source: Cause,
    },
    /// The guest trapped, crashed, or ended itself with an error.
    #[error("the guest failed in `{function}`")]
    Guest {
        /// The function.
        function: String,
        /// How.
        source: Cause,
    },
    /// The host failed: a host function, memory that could not be fetched, the kernel.
    #[error("the call of `{function}` failed on the host's side")]
    Host {
        /// The function.
        function: String,
        /// How.
        source: Cause,
    },
}

/// A session could not be made, called or moved. Unless the error is that the session failed, the session is
/// unchanged.
#[cfg(any(feature = "wasm", feature = "vm", feature = "linux"))]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The call failed. When the guest had begun, the session has failed with it.
    #[error(transparent)]
    Call(#[from] CallError),
    /// An earlier call was cut short, so the state of the guest is unknown.
    #[error("the session failed earlier ({why}): roll it back, to a checkpoint or to its root")]
    Failed {
        /// How.
        why: String,
    },
    /// This kind of guest has no sessions.
    #[error("this guest has no sessions: {0}")]
    Guest(&'static str),
    /// The guest has no file tree.
    #[error("this session has no files: {0}")]
    NoFiles(&'static str),
    /// Something about a file was refused.
    #[cfg(any(feature = "wasm", feature = "linux"))]
    #[error("{path}: {source}")]
    Files {
        /// Which.
        path: String,
        /// Why.
        source: afresh_files::Refused,
    },
    /// A file is larger than the rest of the budget for reading it whole. [`crate::SessionFiles::tree`] reads it in parts.
    #[cfg(any(feature = "wasm", feature = "linux"))]
    #[error("{path}: {source}; read it in parts, or within a larger budget")]
    Budget {
        /// The file.
        path: String,
        /// The budget.
        source: afresh_budget::Exceeded,
    },
    /// No such checkpoint.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A delta is damaged, or was made since another state.
    #[error("the delta cannot be applied")]
    Delta(#[from] afresh_store::TurnError),
    /// The present state cannot be kept, or another not be reached.
    #[error("the session's state cannot be kept or changed")]
    State(#[source] Cause),
}

/// A guest could not be saved; the name is unchanged.
#[cfg(any(feature = "wasm", feature = "vm", feature = "linux"))]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The reference has no valid place.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// The place cannot be written to, or the snapshot to start from cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// This guest, or this kind of guest, has no state that could be kept.
    #[error("this guest cannot be saved: {0}")]
    Guest(&'static str),
    /// The guest's state could not be read.
    #[error("the guest cannot be frozen")]
    Freeze(#[source] Cause),
    /// A call of the recording of a working set failed.
    #[error("recording `{function}`")]
    Record {
        /// The function.
        function: String,
        /// The error.
        source: Cause,
    },
    /// The snapshot could not be written.
    #[error("saving {reference}")]
    Write {
        /// Where to.
        reference: String,
        /// The error.
        source: Cause,
    },
}

/// A verification could not be carried out. Differences are not an error: see [`Verification`](crate::Verification).
#[cfg(any(feature = "wasm", feature = "vm", feature = "linux"))]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// No instance is available, or the call does not fit the guest.
    #[error(transparent)]
    Call(#[from] CallError),
    /// Memory or state could not be read.
    #[error("the guest's state cannot be compared")]
    Compare(#[source] Cause),
}

/// An error and its causes in one line. A cause that the text before it contains is omitted.
#[must_use]
pub fn describe_error(error: &(dyn std::error::Error + 'static)) -> String {
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
