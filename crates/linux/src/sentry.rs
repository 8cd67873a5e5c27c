//! The sentry: the kernel that a guest sees.
//!
//! All that a guest can change but memory and registers is [`Kernel`]: plain data that is cloned
//! when the guest is warm and compared when a reset is verified. Every system call is served from
//! it, or answered with an error and counted. Arguments in the guest's memory are copied in once,
//! and nothing that is found there is followed twice.

mod abi;
mod console;
mod dispatch;
mod fs;
mod kernel;
#[cfg(test)]
mod maxima;
mod mm;
mod net;
mod signal_delivery;
mod syscalls;
mod tty;
mod unserved;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use afresh_egress::EgressPolicy;
use afresh_files::{Node, Refused, Tree};
use rustix::io::Errno;

use crate::base::Base;
use crate::exec_command::ExecCommand;
use crate::file_cache::FileCache;
use crate::outbound::OutboundConnections;
use crate::platform::{Call, PlatformError, Process};
use crate::shared_files::SharedFiles;
pub use console::RunControl;
pub(crate) use console::{Console, HostInput, OutputFailure};
pub(crate) use fs::root_files::{bytes, prepare, settle, thawed_budget, write_system_files};
use fs::seals::Seals;
use kernel::channels::Channels;
pub(crate) use kernel::epoll::ReadySets;
use kernel::fd_table::FdTable;
use kernel::file_locks::FileLocks;
pub(crate) use kernel::generation::Generation;
pub(crate) use kernel::identity::FIRST;
pub(crate) use kernel::identity::USER;
use kernel::message_queues::MessageQueues;
pub(crate) use kernel::packed_kernel::{OpenerGrants, PackedAdditions, PackedKernel, damaged};
use kernel::posix_queues::PosixQueues;
pub(crate) use kernel::process_info::{ArgumentStrings, Executable};
pub(crate) use kernel::process_table::PROCESSES;
use kernel::process_table::ProcessTable;
use kernel::process_tunables::ProcessTunables;
pub(crate) use kernel::readiness::InputSource;
pub use kernel::resource_limits::Resource;
use kernel::semaphores::Semaphores;
pub use kernel::streams::End;
pub(crate) use kernel::streams::{LogSink, OutputSink, OutputSinks, Streams};
pub(crate) use kernel::threads::{Wait, WaitReason};
pub(crate) use kernel::time::StoppedClock;
use kernel::user_namespaces::UserNamespaces;
pub(crate) use mm::layout::{Layout, MAX_RESERVED, PAGE, STACK_LEN};
pub(crate) use mm::orders::{Change, Content, Order, protect_order, unmap_order};
pub(crate) use mm::shared::{Share, SharedMapping};
use mm::user_memory::{copy_in, copy_out, path_in, word_in};
pub(crate) use mm::user_memory::{read_some, write_some};
use net::dns::ResolvedNames;
pub use net::inbound::{ExchangeResult, InboundConnection};
pub(crate) use signal_delivery::SignalDelivery;
pub(crate) use syscalls::path::path_of;
pub(crate) use syscalls::peer_memory::PeerCopy;
pub(crate) use syscalls::process::ForkRequest;
use tty::terminals::Terminals;
pub(crate) use unserved::count_unserved;

/// Longest name of a file.
const NAME: usize = 255;
/// Longest path, with its end.
const PATH_LEN: usize = 4096;

/// The kernel state of a guest: everything but memory and registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    pub(crate) layout: Layout,
    pub(crate) tree: Tree,
    /// The image below the file tree.
    pub(crate) base: Option<Arc<Base>>,
    /// Host directories below the file tree.
    layers: Arc<[PathBuf]>,
    pub(crate) table: FdTable,
    /// The current process and the others.
    pub(crate) processes: ProcessTable,
    channels: Channels,
    terminals: Terminals,
    /// Locks on files.
    locks: FileLocks,
    seals: Seals,
    /// Descriptors that watch files, and how often a name was given away for their sake.
    watchers: u32,
    moves: u32,
    /// Files that are held because memory is shared through them.
    shares: BTreeSet<Node>,
    /// Bytes of them that processes have mapped, each once.
    shared_bytes: u64,
    /// Bytes of live files that the tree stores, which `shared_bytes` has as well.
    stored_shares: u64,
    system_v: mm::shared_segments::SharedSegments,
    semaphores: Semaphores,
    queues: MessageQueues,
    named_queues: PosixQueues,
    namespaces: UserNamespaces,
    tunables: ProcessTunables,
    /// Resolved host names.
    names: ResolvedNames,
    /// Addresses of closed connections.
    closed: net::closed_connections::ClosedConnections,
}

impl Kernel {
    /// The state of a program that starts with these files.
    pub(crate) fn with_files(&self, layout: Layout) -> Self {
        Self::new(layout, self.tree.clone(), self.base.clone(), self.layers.to_vec())
    }

    /// The state of a program that starts in the root of `tree`, over `base` and `layers`.
    pub(crate) fn new(
        layout: Layout,
        tree: Tree,
        base: Option<Arc<Base>>,
        layers: Vec<PathBuf>,
    ) -> Self {
        Self {
            layout,
            tree,
            base,
            layers: layers.into(),
            table: FdTable::new(),
            processes: ProcessTable::new(),
            channels: Channels::default(),
            terminals: Terminals::default(),
            locks: FileLocks::default(),
            seals: Seals::default(),
            watchers: 0,
            moves: 0,
            shares: BTreeSet::new(),
            shared_bytes: 0,
            stored_shares: 0,
            system_v: mm::shared_segments::SharedSegments::default(),
            semaphores: Semaphores::default(),
            queues: MessageQueues::default(),
            named_queues: PosixQueues::default(),
            namespaces: UserNamespaces::default(),
            tunables: ProcessTunables::default(),
            names: ResolvedNames::default(),
            closed: Default::default(),
        }
    }
}

/// The outcome of a call.
#[derive(Debug)]
pub(crate) enum SyscallControl {
    /// It returns this.
    Value(u64),
    /// The memory changes, then it returns this.
    Memory(u64, Change),
    /// Its thread waits; then it is made once more.
    Wait(Wait),
    /// It returns 0 after other threads have run.
    Yield,
    /// It starts a process and returns its PID.
    Fork(ForkRequest),
    /// Its process runs another program, if that can be opened.
    Exec(Box<ExecCommand>),
    /// Bytes are copied between two processes; it returns their number.
    Peer(Box<PeerCopy>),
    /// Its thread has ended.
    Gone,
    /// It does not return: the registers have the values that it set.
    Resumed,
    /// It waits for input from the caller.
    Idle,
    /// The guest is through.
    End(End),
}

/// Why a call was not served.
#[derive(Debug)]
pub(crate) enum SyscallError {
    /// The guest sees this error.
    Errno(Errno),
    /// The guest cannot continue.
    Broken(PlatformError),
}

impl From<Errno> for SyscallError {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl From<Refused> for SyscallError {
    fn from(refused: Refused) -> Self {
        Self::Errno(refused.errno())
    }
}

impl From<PlatformError> for SyscallError {
    fn from(error: PlatformError) -> Self {
        Self::Broken(error)
    }
}

type SyscallResult<T = SyscallControl> = Result<T, SyscallError>;

/// A guest's state at this moment, its streams and limits.
#[derive(Debug)]
pub(crate) struct Sentry {
    /// Shared with the warm state until something in it changes.
    pub(crate) state: Arc<Kernel>,
    pub(crate) streams: Streams,
    /// Bytes of output a call may have.
    pub(crate) output_limit: usize,
    /// Calls that were answered with `ENOSYS`, by number.
    pub(crate) unserved: BTreeMap<i64, u64>,
    /// The wait that the call which is served has behind it.
    pub(crate) resumed: Option<Wait>,
    /// Contents of files that its processes have mapped.
    pub(crate) contents: FileCache,
    /// Its connections to the outside.
    pub(crate) lines: OutboundConnections,
    /// Files whose shared mappings can be written.
    pub(crate) shared: SharedFiles,
    /// Whether mappings of the current process may have to show a file that has become live.
    pub(crate) unattached: bool,
    /// The host's side of a run that goes to its end.
    pub(crate) console: Option<Console>,
}

impl Sentry {
    /// A sentry with a limit of output bytes for each call, and its grants of connections.
    pub(crate) fn new(state: Arc<Kernel>, output_limit: usize, egress: EgressPolicy) -> Self {
        let streams = Streams::default();
        let (unserved, contents) = (BTreeMap::new(), FileCache::default());
        let lines = OutboundConnections::new(egress);
        let (resumed, console, shared) = (None, None, SharedFiles::default());
        Self {
            state,
            streams,
            output_limit,
            unserved,
            resumed,
            contents,
            lines,
            shared,
            unattached: false,
            console,
        }
    }

    /// Moves bytes between the guest and the outside. Returns whether the guest sees a change.
    pub(crate) fn pump(&mut self) -> bool {
        self.attend();
        !self.lines.is_empty() && self.lines.pump(&mut self.state)
    }

    /// The state, to be changed.
    pub(crate) fn change(&mut self) -> &mut Kernel {
        Arc::make_mut(&mut self.state)
    }

    /// Serves one call. An error that the guest caused is a return value.
    pub(crate) fn serve(
        &mut self,
        process: &mut Process,
        call: &Call,
    ) -> Result<SyscallControl, PlatformError> {
        match self.in_step(process, call) {
            Ok(outcome) => Ok(outcome),
            Err(SyscallError::Errno(errno)) => {
                Ok(SyscallControl::Value((-i64::from(errno.raw_os_error())) as u64))
            }
            Err(SyscallError::Broken(error)) => Err(error),
        }
    }

    /// Has the current thread take its signals; see [`Sentry::take_signals`].
    pub(crate) fn served_signals(
        &mut self,
        process: &mut Process,
        interrupted: bool,
    ) -> Result<SignalDelivery, PlatformError> {
        match self.take_signals(process, interrupted) {
            Ok(taken) => Ok(taken),
            Err(SyscallError::Errno(_)) => Ok(SignalDelivery::Ends(End::Signal(libc::SIGSEGV))),
            Err(SyscallError::Broken(error)) => Err(error),
        }
    }

    /// Has the current thread take a fault: how it ends, unless it has a handler.
    pub(crate) fn served_fault(
        &mut self,
        process: &mut Process,
        signal: i32,
    ) -> Result<Option<End>, PlatformError> {
        match self.fault(process, signal) {
            Ok(end) => Ok(end),
            Err(SyscallError::Errno(_)) => Ok(Some(End::Signal(signal))),
            Err(SyscallError::Broken(error)) => Err(error),
        }
    }
}

const ZERO: SyscallControl = SyscallControl::Value(0);
