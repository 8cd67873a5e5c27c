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
//! * `own_process`: access of other processes, and the number of descriptors.
//! * [`termination`]: SIGTERM and SIGINT as a flag.
//! * [`Features`]: the features of this kernel for this process; can be masked to simulate a host
//!   with fewer features.
//! * `poll`, `random`, and with the feature `socket` Unix sockets that carry descriptors.
//! * `folios`: how the page cache holds a file.
//! * `kvm`: the gate that KVM's calls pass, the dirty ring and dirty log, and stopping a vCPU
//!   (x86_64 only, with the feature `kvm`).
//! * [`errno`]: names of kernel errors.
//! * [`inject`]: makes the nth call of a kind fail, for tests of the error paths.
//! * [`planted`]: makes the reset wrong on purpose, for tests of the tests. Its feature also has
//!   `run_isolated` and `test_command`, for a test in a separate process, and `child_passes`, for a
//!   check in a forked one.
//!
//! On systems other than Linux the `portable` backend replaces the kernel's mappings and files: it
//! copies, protects nothing, and reports every other feature as missing. Miri uses it as well, and
//! so do builds for Linux with `--cfg afresh_portable`, which test it.

mod cause;
#[cfg(all(feature = "planted", unix, not(miri)))]
mod child;
pub mod crash;
pub mod errno;
mod error;
mod features;
mod inherited;
mod inherited_mutex;
pub mod inject;
#[cfg(all(feature = "planted", unix, not(miri)))]
mod isolated_test;
#[cfg(all(
    feature = "kvm",
    target_os = "linux",
    target_arch = "x86_64",
    not(any(miri, afresh_portable))
))]
pub mod kvm;
mod lock;
mod page;
mod per_process;
pub mod planted;
#[cfg(feature = "planted")]
pub mod power;
mod split_mix;
mod worker;
mod zero_page_source;

#[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
mod linux;
#[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
use linux as imp;

#[cfg(any(not(target_os = "linux"), miri, afresh_portable))]
mod portable;
#[cfg(any(not(target_os = "linux"), miri, afresh_portable))]
use portable as imp;

#[cfg(all(feature = "planted", unix, not(miri)))]
pub use child::child_passes;
pub use error::{Call, MoveError, SysError};
pub use features::{Feature, Features, UnknownFeature};
#[cfg(all(feature = "planted", unix, not(miri)))]
pub use isolated_test::{run_isolated, test_command};
/// Whether this build has the portable backend, in which pages cannot be protected or shared, and
/// no write to one is noticed.
pub const PORTABLE: bool = cfg!(any(not(target_os = "linux"), miri, afresh_portable));

pub use imp::fault;
pub use imp::file;
#[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
pub use imp::folios;
pub use imp::fork;
pub use imp::futex;
pub use imp::host;
pub use imp::pagemap;
#[cfg(all(feature = "socket", target_os = "linux", not(any(miri, afresh_portable))))]
pub use imp::socket;
pub use imp::termination;
pub use imp::usage;
pub use imp::{
    Advice, Instructions, Interest, Memfd, Protection, Reservation, Uffd, UffdEvent, UffdMode,
    WithholdGuard, withhold, withhold_all,
};
#[cfg(all(feature = "socket", target_os = "linux", not(any(miri, afresh_portable))))]
pub use imp::{MappingKind, ProcessMemory};
#[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
pub use imp::{SealedMemfd, merges_memory, own_process, poll, random};
pub use inherited::InheritedCell;
pub use inherited_mutex::{InheritedMutex, InheritedMutexGuard};
pub use lock::lock;
pub use page::{HUGE_PAGES, HUGE_SIZE, PAGE_SIZE, PageRange, page_align_up};
pub use per_process::PerProcess;
pub use split_mix::SplitMix64;
pub use worker::Worker;
pub use zero_page_source::ZeroPageSource;
