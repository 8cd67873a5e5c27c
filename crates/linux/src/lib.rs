//! Internal crate of `afresh` (`afresh::linux`). Unmodified Linux programs as guests: warmed once,
//! then called any number of times, each time from the same state.
//!
//! A [`Program`] runs in a separate process until it waits for input, and is then frozen: memory,
//! registers, mappings, descriptors, files. An [`Instance`] of the [`Warm`] program reads requests
//! on its standard input and answers on its standard output. [`Instance::reset`] undoes all changes
//! by calls, so the next call starts from the warm state.
//!
//! ```no_run
//! use afresh_linux::Program;
//!
//! let script = "import sys, json\nfor line in sys.stdin: print(sum(json.loads(line)), flush=True)\n";
//! let warm = Program::new("/usr/bin/python3").arg("/app.py").file("/app.py", script).request("[1]\n").warm()?;
//! let mut python = warm.instance();
//! assert_eq!(python.call(b"[1, 2, 3]\n")?, b"6\n");
//! python.reset();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The *sentry* serves the guest's system calls and holds its kernel state as plain data. The
//! *platform* runs the guest's code in a process. No system call of a guest reaches the kernel
//! unchecked: each stops in a seccomp filter, and the sentry serves it. `docs/internals/linux.md`
//! has the threat model, and the promises that only a micro-VM makes.
//!
//! The crate needs Linux 6.6 or newer on x86-64 or arm64, and no privileges. Processes that a guest
//! starts are frozen with it. Code for one processor is in `platform/arch` and `sentry/abi`.

#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

mod base;
mod call_names;
mod caller_settings;
mod elf;
mod error;
mod exec_command;
mod file_cache;
mod file_mappings;
mod file_view;
mod frozen;
mod frozen_state;
mod guest;
mod host_file_cache;
mod host_files;
mod host_program;
mod http;
mod instance;
mod ioctl;
mod large_change;
mod limits;
mod load;
mod outbound;
mod packed_bytes;
mod parked_call;
mod peer_copy;
mod platform;
mod program;
mod ranges;
mod resource_numbers;
mod run;
mod sentry;
mod session;
mod shared_files;
mod shared_memory_file;
mod start_turn;
mod stats;
mod subprocess;
mod subprocess_changes;
mod subprocess_memory;
mod subprocesses;
mod text_twin;
mod traced;
mod trust;
mod warm;
mod window_charge;

pub use afresh_egress::{
    ConnectionLog, ConnectionOwner, ConnectionReceiver, ConnectionRecord, Destination,
    EgressFilter, FilterError, NetGrant, Outcome, ParseDestinationError, ParseGrantError, Rule,
    SharedFilter,
};
pub use afresh_snapshot::{OutputSource, OutputStream};
pub use call_names::call_name;
pub use caller_settings::CallerSettings;
pub use error::{
    CallError, FreezeError, Incompatible, SnapshotError, ThawError, VerifyError, WarmError,
};
pub use file_view::FileView;
pub use frozen::{Frozen, PackedProgram};
pub use host_file_cache::{cached_file_bytes, release_cached_files};
pub use host_program::HostProgram;
pub use instance::{Instance, SpareProcess};
pub use limits::StopHandle;
pub use outbound::take_outbound_bytes;
pub use platform::{
    IsolationLayer, PlatformError, guest_cpu_time, isolation_layers, require_isolation,
    take_guest_cpu_time,
};
pub use program::{Program, find_in_path};
pub use run::{EndedRun, HostStreams, Run};
pub use sentry::{
    End, ExchangeResult, FailedLookups, InboundConnection, MemoryPeak, Resource, RunControl,
};
pub use session::{InstanceTemplate, ProgramState};
pub use stats::Stats;
pub use warm::Warm;
