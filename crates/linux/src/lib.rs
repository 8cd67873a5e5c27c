//! Internal crate of `afresh` (`afresh::linux`). Unmodified Linux programs as guests: warmed once,
//! then called any number of times, each time from the same state.
//!
//! A [`Program`] is started in a separate process and runs until it waits for input. There it is
//! frozen: memory, registers, mappings, descriptors, files. An [`Instance`] of the [`Warm`] program
//! answers requests: bytes go in on its standard input, its answer comes out on its standard
//! output. After [`Instance::reset`] the next call starts from the warm state: all changes by calls
//! are undone.
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
//! Two halves: the *sentry* is what the guest takes for Linux, and holds all of its state as plain
//! data; the *platform* is a process that runs the guest's code. No system call of a guest
//! reaches the kernel: each stops in a seccomp filter and is served here. `docs/internals/linux.md`
//! has the threat model, and the promises that only a micro-VM makes.
//!
//! Linux 6.6 or newer on x86-64 or arm64; no privilege is needed. A guest may start further
//! processes; they are frozen with it. Files in `platform/arch` and `sentry/abi` hold the parts
//! that depend on the processor.

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
