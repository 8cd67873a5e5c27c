//! The kinds of guests, each behind the same traits. A further kind is a file here and its arms in this one.
//!
//! A [`Backend`] is a warm guest, an [`Instance`] one of its instances on lease. Both are on the path of every call,
//! so they are enums, and a match takes the place of a virtual call. Sessions ([`SessionLine`]) and frozen guests
//! ([`FrozenGuest`]) are trait objects.

#[cfg(feature = "vm")]
mod machine;
#[cfg(any(feature = "vm", feature = "linux"))]
mod pooled;
#[cfg(feature = "linux")]
mod program;
mod session_line;
mod traits;
#[cfg(feature = "wasm")]
mod wasm;

use std::path::Path;

use afresh_pager::SnapshotMemory;
use afresh_store::Snapshot;

use crate::guests::call::Exit;
use crate::{Cause, Kind, OpenError, Options, Reference};

#[cfg(feature = "linux")]
pub use program::oci_image::{image_program, stored_program};
pub(crate) use session_line::SessionLine;
pub(crate) use traits::{FileOwner, FrozenGuest, LiveInstance, WarmGuest};
#[cfg(feature = "wasm")]
pub(crate) use wasm::WasmOptions;

/// A warm guest.
pub(crate) enum Backend {
    #[cfg(feature = "wasm")]
    Module(afresh_wasm::Warm),
    #[cfg(feature = "wasm")]
    Component(afresh_wasm::WarmComponent),
    #[cfg(feature = "vm")]
    Machine(Box<machine::Machines>),
    #[cfg(feature = "linux")]
    Program(Box<program::Programs>),
}

/// An instance of a guest.
#[allow(clippy::large_enum_variant, reason = "a box would be an allocation for each call")]
pub(crate) enum Instance<'a> {
    #[cfg(feature = "wasm")]
    Module(afresh_wasm::Lease<'a>),
    #[cfg(feature = "wasm")]
    Component(afresh_wasm::ComponentLease<'a>),
    #[cfg(feature = "vm")]
    Machine(pooled::Leased<'a, afresh_vm::Sandbox>),
    #[cfg(feature = "linux")]
    Program(pooled::Leased<'a, afresh_linux::Instance>),
}

/// Does the same with every kind of a [`Backend`] or an [`Instance`], by the traits that they have in common.
macro_rules! dispatch {
    ($kinds:ident, $value:expr, $guest:ident => $body:expr) => {
        match $value {
            #[cfg(feature = "wasm")]
            $crate::guests::backend::$kinds::Module($guest) => $body,
            #[cfg(feature = "wasm")]
            $crate::guests::backend::$kinds::Component($guest) => $body,
            #[cfg(feature = "vm")]
            $crate::guests::backend::$kinds::Machine($guest) => $body,
            #[cfg(feature = "linux")]
            $crate::guests::backend::$kinds::Program($guest) => $body,
        }
    };
}
pub(crate) use dispatch;

/// Looked up once in a module, to be called many times.
#[cfg(feature = "wasm")]
pub(crate) type FunctionEntry = afresh_wasm::BytesEntry;
/// No other kind looks functions up.
#[cfg(not(feature = "wasm"))]
pub(crate) type FunctionEntry = std::convert::Infallible;

/// The file of a guest.
pub(crate) struct GuestFile<'a> {
    /// The name for errors.
    pub(crate) name: &'a str,
    pub(crate) bytes: &'a [u8],
    /// Its place on the host, where a Linux program runs from.
    #[allow(dead_code, reason = "only a Linux program runs from its place")]
    pub(crate) path: Option<&'a Path>,
}

/// Warms the guest in a file.
pub(crate) fn open_file(
    kind: Kind,
    file: &GuestFile<'_>,
    options: &Options,
) -> Result<Backend, OpenError> {
    match kind {
        #[cfg(feature = "wasm")]
        Kind::Module | Kind::Component => wasm::open(kind, file, options),
        #[cfg(feature = "vm")]
        Kind::Machine => machine::open(file, options),
        #[cfg(feature = "linux")]
        Kind::Program => program::open(file, options),
        #[allow(unreachable_patterns, reason = "kinds that this build lacks")]
        other => Err(lacking(file.name, other.feature())),
    }
}

/// A guest out of a snapshot, with its pages.
pub(crate) fn thaw(
    name: &str,
    snapshot: Snapshot,
    options: &Options,
) -> Result<(Backend, SnapshotMemory), OpenError> {
    let kind = snapshot.guest().kind.clone();
    let thawed = match kind.as_str() {
        #[cfg(feature = "wasm")]
        wasm::SNAPSHOT_KIND => wasm::thaw(snapshot, options),
        #[cfg(feature = "vm")]
        machine::SNAPSHOT_KIND => machine::thaw(snapshot, options),
        #[cfg(feature = "linux")]
        program::SNAPSHOT_KIND => program::thaw(snapshot, options),
        other => {
            let known = ["wasm", "vm", "linux"].into_iter().find(|feature| *feature == other);
            return Err(match known {
                Some(feature) => lacking(name, feature),
                None => OpenError::Kind { reference: name.to_owned(), kind: kind.clone() },
            });
        }
    };
    thawed.map_err(|error| failed(name, error))
}

/// The program of an OCI image, for a reference that could not be opened as a snapshot for the reason of `error`.
pub(crate) fn open_image(
    reference: &Reference,
    options: &Options,
    error: OpenError,
) -> Result<Backend, OpenError> {
    #[cfg(feature = "linux")]
    return program::oci_image::open(reference, options, error);
    #[cfg(not(feature = "linux"))]
    {
        let _ = (reference, options);
        Err(error)
    }
}

/// The exit of a guest, if that is the cause of an error.
pub(crate) fn exit(cause: &Cause) -> Option<Exit<'_>> {
    #[cfg(feature = "wasm")]
    if let Some(exit) = wasm::exit(cause) {
        return Some(exit);
    }
    #[cfg(feature = "linux")]
    if let Some(exit) = program::exit(cause) {
        return Some(exit);
    }
    let _ = cause;
    None
}

/// The stack of a guest at its failure.
pub(crate) fn backtrace(cause: &Cause) -> Option<String> {
    #[cfg(feature = "wasm")]
    return wasm::backtrace(cause);
    #[cfg(not(feature = "wasm"))]
    {
        let _ = cause;
        None
    }
}

fn lacking(name: &str, feature: &'static str) -> OpenError {
    OpenError::Feature { what: name.to_owned(), feature }
}

fn failed(name: &str, error: impl Into<Cause>) -> OpenError {
    OpenError::Guest { reference: name.to_owned(), source: error.into() }
}
