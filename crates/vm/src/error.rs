//! Errors of a sandbox, by operation: making one, calling it, and KVM beneath both.
//!
//! Promises: each error names its cause, and the way out if one exists. May break it: nothing here;
//! the errors of a single file stay in that file.

use afresh_memory::{ImageError, ResetError, SlotError, TrackError};
use afresh_sys::SysError;

use crate::abi::MAX_MESSAGE;
use crate::crash::Crash;
use crate::elf::ElfError;
use crate::layout::LayoutError;
use crate::memory::AccessError;

/// Why KVM cannot be used, or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvmError {
    /// `/dev/kvm` does not exist.
    #[error(
        "/dev/kvm is missing: load the kvm_intel or kvm_amd module, or enable nested virtualisation"
    )]
    Missing,
    /// `/dev/kvm` may not be opened.
    #[error("no permission for /dev/kvm: add this user to the group that owns it (often `kvm`)")]
    Permission,
    /// The kernel lacks something that every sandbox needs.
    #[error("this kernel's KVM lacks {0}; Linux 5.5 or newer is needed")]
    Lacks(&'static str),
    /// The processor lacks features of the requested template.
    #[error(
        "this host's processor, as KVM offers it, lacks {} of CPU template {template}; choose one with fewer features with SandboxBuilder::cpu",
        missing.join(", ")
    )]
    Processor {
        /// The template's name.
        template: String,
        /// The features, by name.
        missing: Vec<String>,
    },
    /// Guests see the host's processor, regardless of their template.
    #[error(
        "this host's KVM is paravirtual and lets the processor answer CPUID, so a guest cannot be shown CPU template \
         {template}; leave SandboxBuilder::cpu out, or use a host with hardware virtualisation"
    )]
    OwnCpuid {
        /// The template's name.
        template: String,
    },
    /// Probing the guest's view failed.
    #[error("cannot determine the processor features that a guest has on this host: {0}")]
    Probe(#[source] Box<BuildError>),
    /// The requested tracker is not available.
    #[error("this kernel's KVM has no {0}; choose another tracker")]
    NoTracker(&'static str),
    /// A KVM call failed.
    #[error("KVM: {0}")]
    Call(#[from] SysError),
    /// KVM does not finish an instruction of the last call.
    #[error("KVM does not finish what the last call began; the sandbox can only be dropped")]
    Unfinished,
}

/// Why a sandbox could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The program is not a guest.
    #[error("bad guest program: {0}")]
    Elf(#[from] ElfError),
    /// The sizes do not fit.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// KVM cannot be used, or failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The image could not be stored.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Memory could not be reserved or mapped.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The guest's initialisation failed.
    #[error("the guest's initialisation failed: {0}")]
    Init(#[source] CallError),
    /// The signal that stops a guest cannot be used.
    #[error("the signal or thread that stops runaway guests could not be set up")]
    Watchdog(#[source] std::io::Error),
}

/// A failure of the guest, or its forced end. The sandbox must be reset and is then pristine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// It faulted.
    #[error(transparent)]
    Crash(#[from] Crash),
    /// It panicked.
    #[error("guest panicked: {0}")]
    Panic(String),
    /// It ran longer than allowed.
    #[error("guest ran past its time limit and was stopped at RIP {rip:#x}")]
    Timeout {
        /// Where it was.
        rip: u64,
    },
    /// A [`StopHandle`](crate::StopHandle) stopped it.
    #[error("guest was stopped at RIP {rip:#x} by its stop handle")]
    Stopped {
        /// Where it was.
        rip: u64,
    },
    /// It ended the call with a status other than 0.
    #[error("guest returned status {status}")]
    Failed {
        /// The status.
        status: i64,
        /// Its output.
        output: Vec<u8>,
    },
    /// It made a hypercall that does not exist.
    #[error("guest made unknown hypercall {0}")]
    UnknownHypercall(u32),
    /// It made a hypercall that has no place there: `ready` in a call, `done` before `ready`.
    #[error("guest made hypercall {0} out of place")]
    MisplacedHypercall(u32),
    /// It passed a range outside its memory.
    #[error("guest passed a bad pointer to hypercall {call}: {access}")]
    BadPointer {
        /// The hypercall.
        call: u32,
        /// The range.
        access: AccessError,
    },
    /// It passed a message longer than the limit.
    #[error("guest passed {len} bytes to hypercall {call}, above the limit of {MAX_MESSAGE}")]
    TooLong {
        /// The hypercall.
        call: u32,
        /// The length.
        len: u64,
    },
    /// It passed, or requested, more than the host allows.
    #[error(
        "guest's {what} of {len} bytes is above the limit of {limit}; raise it with SandboxBuilder::{setting}"
    )]
    OverLimit {
        /// The part that is too large.
        what: &'static str,
        /// Its length.
        len: u64,
        /// The limit.
        limit: u64,
        /// The builder's function that sets the limit.
        setting: &'static str,
    },
    /// It was built for another version of the interface.
    #[error("guest speaks interface version {0}; this host speaks {version}", version = crate::abi::ABI_VERSION)]
    Version(u64),
    /// It did something that KVM does not handle.
    #[error("guest stopped for an unexpected reason: {0}")]
    Unexpected(String),
}

/// Why a call did not return output.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The guest's doing.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The input does not fit the input buffer.
    #[error(
        "input of {len} bytes exceeds the guest's input buffer of {capacity}; raise it with SandboxBuilder::input"
    )]
    InputTooLarge {
        /// Length of the input.
        len: usize,
        /// Capacity of the buffer.
        capacity: u64,
    },
    /// The sandbox was made by another process, which this one was forked from. KVM serves a
    /// machine only to the process that made it.
    #[error(
        "this sandbox belongs to the process that made it, and this one was forked from that; make a new one here, \
         from a snapshot (Snapshot::fork) or from the program"
    )]
    Forked,
    /// The last call failed and the sandbox was not reset since.
    #[error("the last call failed; reset the sandbox first")]
    NeedsReset,
    /// A reset failed; the sandbox can only be dropped.
    #[error("an earlier reset failed; this sandbox is quarantined and can only be dropped")]
    Quarantined,
    /// KVM failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The guest's memory comes from a snapshot, and a page of it could not be fetched. The sandbox
    /// can only be dropped.
    #[error("the guest's memory is incomplete: {0}")]
    Memory(String),
    /// Noticing the guest's writes failed.
    #[error(transparent)]
    Track(#[from] TrackError),
    /// The reset failed; the sandbox is quarantined.
    #[error(transparent)]
    Reset(#[from] ResetError),
    /// The snapshot is of another guest.
    #[error(
        "the snapshot belongs to another guest; restore it in a sandbox forked from the same one"
    )]
    ForeignSnapshot,
    /// A snapshot could not be stored.
    #[error(transparent)]
    Snapshot(#[from] ImageError),
    /// The guest writes more than a dirty ring holds, and moving it to a machine with another
    /// tracker failed; the sandbox is quarantined.
    #[error("moving the guest to a machine with a dirty log failed: {0}")]
    Replace(#[source] Box<BuildError>),
    /// A snapshot could not be restored; the sandbox is quarantined.
    #[error(transparent)]
    Restore(#[from] SlotError),
}

/// Freezing or saving a guest failed.
pub type FreezeError = afresh_pager::FreezeError<std::convert::Infallible>;

/// Making a sandbox out of a frozen guest failed.
pub type ThawError = afresh_pager::ThawError<Incompatible>;

/// A frozen guest does not fit this host, or its builder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Incompatible {
    /// The processor lacks features that the guest was warmed up with.
    #[error(
        "the guest was frozen with CPU template {template}, and this host's processor lacks {}; build it with \
         SandboxBuilder::cpu and a smaller template (x86-64-v3, say) to run it on more hosts",
        missing.join(", ")
    )]
    Cpu {
        /// The template's name.
        template: String,
        /// The features, by name.
        missing: Vec<String>,
    },
    /// The builder adds other regions than the guest was frozen with.
    #[error("{0}; a guest is thawed with the regions it was built with, or with none at all")]
    Regions(String),
    /// The sandbox could not be made.
    #[error(transparent)]
    Build(#[from] BuildError),
}

impl From<Incompatible> for ThawError {
    fn from(error: Incompatible) -> Self {
        Self::Guest(error)
    }
}

impl From<BuildError> for ThawError {
    fn from(error: BuildError) -> Self {
        Self::Guest(error.into())
    }
}

impl From<ElfError> for ThawError {
    fn from(error: ElfError) -> Self {
        Self::State(format!("bad guest program: {error}"))
    }
}

impl From<LayoutError> for ThawError {
    fn from(error: LayoutError) -> Self {
        Self::State(error.to_string())
    }
}

impl From<KvmError> for ThawError {
    fn from(error: KvmError) -> Self {
        Self::Guest(Incompatible::Build(error.into()))
    }
}
