//! The sentry: the kernel that a guest sees.
//!
//! All that a guest can change but memory and registers is [`Kernel`]: plain data that is cloned
//! when the guest is warm and compared when a reset is verified. Every system call is served from
//! it, or answered with an error and counted. Arguments in the guest's memory are copied in once,
//! and nothing that is found there is followed twice.

mod abi;
mod attribute_prefetch;
mod call_budget;
mod console;
mod dispatch;
mod fs;
mod host_input;
mod inside_answers;
mod kernel;
#[cfg(test)]
mod maxima;
mod mm;
mod name_lengths;
mod net;
mod result;
mod signal_delivery;
mod syscalls;
mod trace_access;
mod trace_delivery;
mod tty;
mod unserved;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use afresh_egress::EgressPolicy;
use afresh_sys::host::thread_cpu_time;

use crate::file_cache::FileCache;
use crate::outbound::OutboundConnections;
use crate::platform::{Call, PlatformError, Process};
use crate::shared_files::SharedFiles;
pub(crate) use abi::PLATFORM;
use attribute_prefetch::FileLookup;
use call_budget::CallBudget;
pub(crate) use console::{Console, OutputFailure, PublishedPort, PublishedPorts};
pub use console::{FailedLookups, RunControl};
pub(crate) use fs::root_files::{bytes, prepare, settle, thawed_budget, write_system_files};
pub(crate) use host_input::HostInput;
pub(crate) use inside_answers::InsideAnswers;
pub(crate) use kernel::epoll::ReadySets;
pub(crate) use kernel::fork_request::ForkRequest;
pub(crate) use kernel::generation::Generation;
pub(crate) use kernel::identity::DEFAULT_OWNER;
pub(crate) use kernel::identity::FIRST;
pub(crate) use kernel::input_source::InputSource;
pub(crate) use kernel::packed_kernel::{OpenerGrants, PackedAdditions, PackedKernel, damaged};
pub(crate) use kernel::peer_copy::PeerCopy;
pub(crate) use kernel::process_info::{ArgumentStrings, Executable};
pub(crate) use kernel::process_table::PROCESSES;
pub use kernel::resource_limits::Resource;
pub(crate) use kernel::state::Kernel;
pub use kernel::streams::End;
pub(crate) use kernel::streams::{LogSink, OutputSink, OutputSinks, Streams};
pub(crate) use kernel::threads::{Wait, WaitReason};
use kernel::time::MonotonicTime;
pub(crate) use kernel::time::StoppedClock;
pub(crate) use kernel::trace_request::{TraceOperation, TraceRequest};
pub(crate) use mm::file_backing::{FileBacking, SharedMapping};
pub(crate) use mm::file_part::{FilePart, MAX_WHOLE};
pub(crate) use mm::layout::{Layout, MAX_RESERVED, PAGE, STACK_LEN};
pub use mm::memory_peak::MemoryPeak;
pub(crate) use mm::stub_calls::{Change, Content, StubCall, protect_call, unmap_call};
pub(crate) use mm::user_memory::{read_some, write_some};
pub use net::inbound::{ExchangeResult, InboundConnection};
pub(crate) use result::{SyscallControl, SyscallError, SyscallResult};
pub(crate) use signal_delivery::SignalDelivery;
pub(crate) use syscalls::path::path_of_name;
pub(crate) use trace_delivery::TracedEntry;
pub(crate) use unserved::count_unserved;

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
    /// When the guest stops, however long the call that is served takes.
    pub(crate) deadline: Option<Instant>,
    /// The work of the call that is served.
    budget: CallBudget,
    /// Nanoseconds of CPU time that it has served the current process for and not counted yet.
    pub(crate) served: u64,
    /// The wait that the call which is served has behind it.
    pub(crate) resumed: Option<Wait>,
    /// Contents of files that its processes have mapped.
    pub(crate) contents: FileCache,
    /// The lookup of the present call, if others may follow it.
    lookup: Option<FileLookup>,
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
            deadline: None,
            budget: CallBudget::default(),
            served: 0,
            resumed,
            contents,
            lookup: None,
            lines,
            shared,
            unattached: false,
            console,
        }
    }

    /// Sets whether calls are answered inside the process where that is possible.
    pub(crate) fn answer_inside(&mut self, answers: bool) {
        self.contents.shows_twins = answers;
    }

    /// Moves bytes between the guest and the outside. Returns whether the guest sees a change.
    pub(crate) fn pump(&mut self) -> bool {
        self.attend();
        let released = self.state.channels.has_corks() && {
            let now = self.now();
            self.change().channels.release_late_corks(now)
        };
        let changed = released | (!self.lines.is_empty() && self.lines.pump(&mut self.state));
        self.signal_ready_files();
        changed
    }

    /// This moment, by the guest's clock.
    pub(crate) fn now(&self) -> MonotonicTime {
        self.streams.clock.now()
    }

    /// Whether a moment has passed; `None` never does.
    pub(in crate::sentry) fn passed(&self, until: Option<MonotonicTime>) -> bool {
        self.streams.clock.passed(until)
    }

    /// The state, to be changed.
    pub(crate) fn change(&mut self) -> &mut Kernel {
        Arc::make_mut(&mut self.state)
    }

    /// Ends the wait of the current thread, whose call is repeated.
    pub(crate) fn resume(&mut self, mut wait: Wait) {
        let state = self.change();
        state.current_mut().threads.current_mut().wait = None;
        state.use_held(&mut wait);
        self.resumed = Some(wait);
    }

    /// Ends the wait of the current thread, whose call is over.
    pub(crate) fn end_wait(&mut self) {
        self.resumed = None;
        let state = self.change();
        let wait = state.current_mut().threads.current_mut().wait.take();
        state.give_up(wait);
    }

    /// After a call; see [`Kernel::leave_held`].
    pub(crate) fn leave_held(&mut self, control: &mut SyscallControl) {
        if self.state.holds_files() {
            self.change().leave_held(control);
        }
    }

    /// Serves one call. An error that the guest caused is a return value.
    pub(crate) fn serve(
        &mut self,
        process: &mut Process,
        call: &Call,
    ) -> Result<SyscallControl, PlatformError> {
        let begun = self.state.processes.timed.then(thread_cpu_time);
        let outcome = self.in_step(process, call);
        self.signal_ready_files();
        if let Some(begun) = begun {
            let time = thread_cpu_time().saturating_sub(begun).as_nanos() as u64;
            self.served = self.served.saturating_add(time);
        }
        match outcome {
            Ok(outcome) => Ok(outcome),
            Err(SyscallError::Errno(errno)) => {
                Ok(SyscallControl::Value((-i64::from(errno.raw_os_error())) as u64))
            }
            Err(SyscallError::Paused) => Ok(self.pause(self.resumed_bytes())),
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
            Err(SyscallError::Errno(_) | SyscallError::Paused) => {
                Ok(SignalDelivery::Ends(End::Signal(libc::SIGSEGV)))
            }
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
            Err(SyscallError::Errno(_) | SyscallError::Paused) => Ok(Some(End::Signal(signal))),
            Err(SyscallError::Broken(error)) => Err(error),
        }
    }
}
