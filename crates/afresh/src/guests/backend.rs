//! The kinds of guests, each behind the same traits. A further kind is a file in the folder and its
//! arms in this one; its crate is re-exported in `lib.rs`.
//!
//! A [`Backend`] is a warm guest, an [`Instance`] one of its instances on lease. Both are on the
//! path of every call, so they are enums, and a match takes the place of a virtual call. Sessions
//! ([`SessionBackend`]) and frozen guests ([`FrozenGuest`]) are trait objects. The types of a kind
//! that the build lacks have no values (`absent.rs`), so every match has the arms of all kinds.

#[cfg(not(any(feature = "wasm", vm_guests, linux_guests)))]
compile_error!(
    "no kind of guest is enabled: enable the feature `wasm`, or on Linux `linux` or `vm`"
);

#[cfg(not(all(feature = "wasm", vm_guests, linux_guests)))]
mod absent;
#[cfg(vm_guests)]
mod machine;
#[cfg(not(vm_guests))]
#[path = "backend/machine_absent.rs"]
mod machine;
#[cfg(linux_guests)]
pub(crate) mod process_costs;
#[cfg(not(linux_guests))]
#[path = "backend/process_costs_absent.rs"]
pub(crate) mod process_costs;
#[cfg(linux_guests)]
mod program;
#[cfg(not(linux_guests))]
#[path = "backend/program_absent.rs"]
mod program;
#[cfg(any(vm_guests, linux_guests))]
mod reset_pool;
mod session_backend;
mod traits;
#[cfg(feature = "wasm")]
mod wasm;
#[cfg(not(feature = "wasm"))]
#[path = "backend/wasm_absent.rs"]
mod wasm;

use std::env::consts::{ARCH, OS};
use std::path::Path;

use afresh_pager::SnapshotMemory;
use afresh_store::Snapshot;

use crate::guests::call::Exit;
use crate::{CallError, Cause, OpenError, Options, Reference};

#[cfg(linux_guests)]
pub use program::oci_image::{image_program, stored_program};
pub(crate) use session_backend::SessionBackend;
pub(crate) use traits::{FrozenGuest, LeaseControl, LiveInstance, StopCall, WarmGuest};

/// The kind of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// A Wasm core module.
    Module,
    /// A Wasm component.
    Component,
    /// A micro-VM.
    Machine,
    /// A Linux program, as it is.
    Program,
}

impl Kind {
    /// Recognises a guest by its file; `None` for any other file. An ELF executable with a dynamic
    /// loader is a Linux program, and any other one a micro-VM program, unless [`Options::kind`] is
    /// set.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Option<Self> {
        if bytes.starts_with(b"\x7fELF") {
            Some(if names_loader(bytes) { Self::Program } else { Self::Machine })
        } else if !bytes.starts_with(b"\0asm") {
            None
        } else if bytes.get(6..8) == Some(&[1, 0]) {
            // The layer field follows the version in the binary's header.
            Some(Self::Component)
        } else {
            Some(Self::Module)
        }
    }

    /// The feature of this crate that brings it.
    pub(crate) fn feature(self) -> &'static str {
        match self {
            Self::Module | Self::Component => "wasm",
            Self::Machine => "vm",
            Self::Program => "linux",
        }
    }

    /// The reason that this build has no such guests: the processor, or a feature that is not
    /// enabled. `None` if it has them.
    #[must_use]
    pub fn missing_reason(self) -> Option<String> {
        let (open, guests) = self.support();
        if open.is_some() {
            None
        } else if self.lacks_processor() {
            let places = self.places();
            Some(format!("afresh runs {guests} on {places} only, and this is {ARCH} {OS}"))
        } else {
            Some(format!("this build of afresh lacks the feature `{}`", self.feature()))
        }
    }

    /// Whether no feature brings such guests to this processor and system.
    fn lacks_processor(self) -> bool {
        match self {
            Self::Module | Self::Component => false,
            Self::Machine => (ARCH, OS) != ("x86_64", "linux"),
            Self::Program => OS != "linux" || !["x86_64", "aarch64"].contains(&ARCH),
        }
    }

    /// Where afresh runs guests that need a processor.
    fn places(self) -> &'static str {
        if self == Self::Program { "Linux on x86_64 and aarch64" } else { "x86_64 Linux" }
    }

    /// The opener of such guests, if the build has it, and their name.
    fn support(self) -> (Option<OpenFile>, &'static str) {
        match self {
            Self::Module | Self::Component => (wasm::OPEN, "Wasm guests"),
            Self::Machine => (machine::OPEN, "micro-VMs"),
            Self::Program => (program::OPEN, "Linux programs"),
        }
    }
}

/// Whether an ELF file has a header that names a dynamic loader (`PT_INTERP`).
fn names_loader(elf: &[u8]) -> bool {
    let word =
        |at: usize| Some(u64::from_le_bytes(elf.get(at..at.checked_add(8)?)?.try_into().ok()?));
    let half = |at: usize| Some(u16::from_le_bytes(elf.get(at..at + 2)?.try_into().ok()?));
    let (Some(first), Some(size), Some(count)) = (word(32), half(54), half(56)) else {
        return false;
    };
    (0..usize::from(count)).any(|index| {
        let at =
            usize::try_from(first).ok().and_then(|at| at.checked_add(index * usize::from(size)));
        let kind = at.and_then(|at| elf.get(at..at.checked_add(4)?));
        kind == Some(&[3, 0, 0, 0])
    })
}

/// The options of single kinds. The file of each kind sets them.
#[derive(Clone, Default)]
pub(crate) struct KindOptions {
    pub(super) wasm: wasm::WasmOptions,
    #[allow(dead_code, reason = "empty without the feature `vm`")]
    pub(super) vm: machine::MachineOptions,
    #[allow(dead_code, reason = "empty without the feature `linux`")]
    pub(super) linux: program::ProgramOptions,
}

/// A warm guest.
#[allow(dead_code, reason = "a kind that the build lacks has no values")]
pub(crate) enum Backend {
    Module(wasm::WarmModule),
    Component(wasm::WarmComponent),
    Machine(Box<machine::Machines>),
    Program(Box<program::Programs>),
}

/// An instance of a guest.
#[allow(clippy::large_enum_variant, reason = "a box would be an allocation for each call")]
#[allow(dead_code, reason = "a kind that the build lacks has no values")]
pub(crate) enum Instance<'a> {
    Module(wasm::ModuleLease<'a>),
    Component(wasm::ComponentLease<'a>),
    Machine(machine::MachineLease<'a>),
    Program(program::ProgramLease<'a>),
}

/// Does the same with every kind of a [`Backend`] or an [`Instance`], by the traits that they have
/// in common.
macro_rules! dispatch {
    ($kinds:ident, $value:expr, $guest:ident => $body:expr) => {
        match $value {
            $crate::guests::backend::$kinds::Module($guest) => $body,
            $crate::guests::backend::$kinds::Component($guest) => $body,
            $crate::guests::backend::$kinds::Machine($guest) => $body,
            $crate::guests::backend::$kinds::Program($guest) => $body,
        }
    };
}
pub(crate) use dispatch;

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
type OpenFile = fn(Kind, &GuestFile<'_>, &Options) -> Result<Backend, OpenError>;
/// A warm guest out of a snapshot, with its pages.
type Thaw = fn(Snapshot, &Options) -> Result<(Backend, SnapshotMemory), Cause>;

/// Warms the guest in a file.
pub(crate) fn open_file(
    kind: Kind,
    file: &GuestFile<'_>,
    options: &Options,
) -> Result<Backend, OpenError> {
    let (open, _) = kind.support();
    let open = open.ok_or_else(|| lacking(file.name, kind))?;
    open(kind, file, options)
}

/// A guest out of a snapshot, with its pages.
pub(crate) fn thaw(
    name: &str,
    snapshot: Snapshot,
    options: &Options,
) -> Result<(Backend, SnapshotMemory), OpenError> {
    let (thaw, kind) = match snapshot.guest().kind.as_str() {
        wasm::SNAPSHOT_KIND => (wasm::THAW, Kind::Module),
        machine::SNAPSHOT_KIND => (machine::THAW, Kind::Machine),
        program::SNAPSHOT_KIND => (program::THAW, Kind::Program),
        other => {
            return Err(OpenError::Kind { reference: name.to_owned(), kind: other.to_owned() });
        }
    };
    let thaw = thaw.ok_or_else(|| lacking(name, kind))?;
    thaw(snapshot, options).map_err(|error| failed(name, error))
}

/// The program of an OCI image, for a reference that could not be opened as a snapshot for the
/// reason of `error`.
pub(crate) fn open_image(
    reference: &Reference,
    options: &Options,
    error: OpenError,
) -> Result<Backend, OpenError> {
    program::oci_image::open(reference, options, error)
}

impl CallError {
    /// The exit of the guest, if that ended the call: a command whose caller needs its status.
    #[must_use]
    pub fn exit(&self) -> Option<Exit<'_>> {
        let Self::Guest { source, .. } = self else { return None };
        wasm::exit(source).or_else(|| program::exit(source))
    }

    /// The guest's stack at the failure, if it is known, as text of several lines.
    #[must_use]
    pub fn backtrace(&self) -> Option<String> {
        let (Self::Guest { source, .. } | Self::Host { source, .. }) = self else { return None };
        wasm::backtrace(source)
    }
}

fn lacking(name: &str, kind: Kind) -> OpenError {
    let what = name.to_owned();
    if kind.lacks_processor() {
        return OpenError::Processor { what, guests: kind.support().1, places: kind.places() };
    }
    OpenError::Feature { what, feature: kind.feature() }
}

fn failed(name: &str, error: impl Into<Cause>) -> OpenError {
    OpenError::Guest { reference: name.to_owned(), source: error.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_recognised_by_the_first_bytes_of_its_file() {
        for (bytes, kind) in [
            (&b"\x7fELF\x02\x01"[..], Some(Kind::Machine)),
            (b"\0asm\x01\0\0\0", Some(Kind::Module)),
            (b"\0asm\x0d\0\x01\0", Some(Kind::Component)),
            (b"\0asm", Some(Kind::Module)),
            (b"(module)", None),
            (b"", None),
        ] {
            assert_eq!(Kind::of(bytes), kind, "{bytes:?}");
        }
    }
}
