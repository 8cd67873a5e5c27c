//! Errors of the front door, one type per operation.
//!
//! Each error names the failure, and the way out if one exists;
//! [`source`](std::error::Error::source) returns the cause, which is an error of the crate below
//! and can be downcast to it.

use std::env::consts::{ARCH, OS};
use std::io;
use std::path::PathBuf;

use crate::{Place, ReferenceError};

/// The cause of an error, from a lower layer.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// A guest or snapshot could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The reference is invalid.
    #[error("`{reference}` is not a reference to a snapshot")]
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
    #[error(
        "{reference} holds memory of kind `{kind}`, which cannot be run here: afresh runs `wasm`, `vm` and `linux`, \
         and `afresh pager` restores memory of other VMMs"
    )]
    Kind {
        /// The snapshot.
        reference: String,
        /// The kind of guest in the snapshot.
        kind: String,
    },
    /// The operation needs another kind of place.
    #[error("{place} is {is}; this needs {needs}", is = place.kind())]
    Place {
        /// The place.
        place: Place,
        /// The requirement.
        needs: &'static str,
    },
    /// This build lacks the feature that it needs.
    #[error("{what}: this build of afresh cannot open it; enable the feature `{feature}`")]
    Feature {
        /// The reference.
        what: String,
        /// The feature of this crate.
        feature: &'static str,
    },
    /// This processor runs no such guests.
    #[error("{what}: afresh runs {guests} on {places} only, and this is {ARCH} {OS}")]
    Processor {
        /// The reference.
        what: String,
        /// The kind of guests.
        guests: &'static str,
        /// Where afresh runs them.
        places: &'static str,
    },
    /// The guest does not support the option.
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
    /// The snapshot could not be opened: it is missing or damaged, or its place is unreachable.
    #[error("opening {reference}")]
    Snapshot {
        /// The snapshot.
        reference: String,
        /// [`afresh_store::OpenError`], or `afresh_store::remote::RemoteError`.
        source: Cause,
    },
    /// The file or snapshot could not be made a guest.
    #[error("{reference} cannot be run")]
    Guest {
        /// The guest.
        reference: String,
        /// The error of `afresh::wasm` or `afresh::vm`.
        source: Cause,
    },
}

/// An error and its causes in one line. A cause that the text before it contains is omitted.
#[must_use]
pub fn describe_error(error: &dyn std::error::Error) -> String {
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
