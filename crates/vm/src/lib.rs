//! Internal crate of `afresh` (`afresh::vm`). KVM micro-VM guests: native code behind a hardware
//! boundary that is called, and then is pristine again for the price of its writes.
//!
//! A guest is a static position-independent ELF executable that runs at privilege level 3 in long
//! mode, without a kernel. It is initialised once; the memory it then has is its image. Each call
//! starts from that image.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let elf = std::fs::read("guest.elf")?;
//! let mut sandbox = afresh_vm::Sandbox::builder()
//!     .memory(64 << 20)
//!     .host_function("add", |a: u64, b: u64| a + b)
//!     .build(&elf)?;
//! let output = sandbox.run(b"input")?;
//! # Ok(()) }
//! ```
//!
//! See `docs/vm.md` for the guest's side, the layers below and the limits.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod builder;
mod call;
mod config;
mod cpu;
mod crash;
mod elf;
mod error;
mod frozen;
mod generation;
mod host;
mod layout;
mod machine;
mod memory;
mod pages;
mod probe;
mod processor;
mod reset;
mod sandbox;
mod shared;
mod snapshot;
mod strategy;
mod system;
mod template;
mod thaw;
mod tracker;
mod verify;
mod watch;

pub use afresh_vm_abi as abi;
pub use builder::SandboxBuilder;
pub use cpu::{CpuTemplate, UnknownFeature};
pub use crash::{Crash, CrashReason};
pub use elf::{ElfError, Program};
pub use error::{
    BuildError, CallError, FreezeError, GuestError, Incompatible, KvmError, ThawError,
};
pub use frozen::{Frozen, MachineState};
pub use host::{FromWire, HostError, HostFunction, HostReturn, IntoWire};
pub use layout::{LayoutError, RegionKind, Span};
pub use memory::AccessError;
pub use sandbox::Sandbox;
pub use shared::SharedMemory;
pub use snapshot::{GuestState, Snapshot, SnapshotError};
pub use strategy::{HostSupport, ResetMethod, Tracking};
pub use verify::{Difference, VerifyError};
pub use watch::StopHandle;

pub use afresh_pager::{SnapshotMemory, SnapshotOptions};

/// Bytes of a page.
pub const PAGE: u64 = afresh_sys::PAGE_SIZE as u64;
