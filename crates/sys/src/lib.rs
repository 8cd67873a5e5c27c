//! Internal crate of `afresh`. The system calls that afresh stands on, and nothing above them.
//!
//! Memory, faults, sockets and KVM are reached through this crate alone; system calls for files and
//! guest programs are in `afresh-files` and `afresh-linux`. Everything it offers is a thin, typed
//! wrapper with an error that names the call, the errno and, where one is known, the way out. It
//! promises no policy: which strategy resets a slot is decided in `afresh-memory`.
//!
//! * [`Reservation`]: a range of address space and the mappings inside it.
//! * [`Memfd`]: anonymous files that back images.
//! * [`Uffd`]: userfaultfd, for write protection and for filling missing pages.
//! * [`pagemap`]: `PAGEMAP_SCAN`, which lists the pages that were written.
//! * [`mod@file`]: files other than memfds, and moving mappings.
//! * [`usage`]: page-fault counts.
//! * [`futex`]: waiting for a word to change.
//! * [`fault`]: SIGBUS and SIGSEGV, dispatched by address to the owner of the range.
//! * [`host`]: memory headroom and pressure, thread priority, CPU clocks.
//! * [`fork`]: whether this process was forked since; [`PerProcess`] and [`InheritedCell`]: statics
//!   that a child makes anew, or keeps; [`InheritedMutex`]: a lock that no thread of a parent keeps
//!   from a child; [`Worker`]: a thread that is not in the child.
//! * [`withhold`]: memory that forked children do not get.
//! * [`SplitMix64`]: numbers that are the same for the same seed.
//! * [`lock()`]: a mutex whose holder may have panicked.
//! * [`ZeroPageSource`]: where zero memory may come from, other than the kernel's faults.
//! * [`termination`]: SIGTERM and SIGINT as a flag.
//! * [`Features`]: the features of this kernel for this process; can be masked to play a poorer
//!   host.
//! * `poll`, `random`, and with the feature `socket` Unix sockets that carry descriptors.
//! * `folios`: how the page cache holds a file.
//! * `kvm`: the gate that KVM's calls pass, the dirty ring and dirty log, and stopping a vCPU
//!   (x86_64 only, with the feature `kvm`).
//! * [`errno`]: names of kernel errors.
//! * [`inject`]: makes the nth call of a kind fail, for tests of the error paths.
//! * [`planted`]: makes the reset wrong on purpose, for tests of the tests; its feature also brings
//!   `alone` and `again`, a test in a separate process, and `child_passes`, a check in a forked
//!   one.
//!
//! Under Miri a fake replaces the maps and files, so that the logic above runs in the interpreter.

// The errors of missing names that follow would not say why.
#[cfg(not(target_os = "linux"))]
compile_error!(
    "afresh-sys has a backend for Linux alone, so this crate and all that depend on it do not compile for this target. Build in a virtual machine with Linux, or for a Linux target"
);

#[cfg(all(feature = "planted", not(miri)))]
mod alone;
mod cause;
#[cfg(all(feature = "planted", not(miri)))]
mod child;
pub mod crash;
pub mod errno;
mod error;
mod features;
mod inherited;
mod inherited_mutex;
pub mod inject;
#[cfg(all(feature = "kvm", target_os = "linux", target_arch = "x86_64", not(miri)))]
pub mod kvm;
mod lock;
mod page;
mod per_process;
pub mod planted;
#[cfg(feature = "planted")]
pub mod power;
mod split_mix;
mod stock;
mod worker;

#[cfg(not(miri))]
mod linux;
#[cfg(not(miri))]
use linux as imp;

#[cfg(miri)]
mod fake;
#[cfg(miri)]
use fake as imp;

#[cfg(all(feature = "planted", not(miri)))]
pub use alone::{again, alone};
#[cfg(all(feature = "planted", not(miri)))]
pub use child::child_passes;
pub use error::{Call, MoveError, SysError};
pub use features::{Feature, Features, UnknownFeature};
pub use imp::fault;
pub use imp::file;
#[cfg(not(miri))]
pub use imp::folios;
pub use imp::fork;
pub use imp::futex;
pub use imp::host;
pub use imp::pagemap;
#[cfg(all(feature = "socket", not(miri)))]
pub use imp::socket;
pub use imp::termination;
pub use imp::usage;
pub use imp::{
    Advice, Instructions, Interest, Memfd, Protection, Reservation, Uffd, UffdEvent, UffdMode,
    WithholdGuard, withhold, withhold_all,
};
#[cfg(all(feature = "socket", not(miri)))]
pub use imp::{MappingKind, ProcessMemory};
#[cfg(not(miri))]
pub use imp::{merges_memory, poll, random};
pub use inherited::InheritedCell;
pub use inherited_mutex::{InheritedMutex, InheritedMutexGuard};
pub use lock::lock;
pub use page::{HUGE_PAGES, HUGE_SIZE, PAGE_SIZE, PageRange, page_align_up};
pub use per_process::PerProcess;
pub use split_mix::SplitMix64;
pub use stock::ZeroPageSource;
pub use worker::Worker;
