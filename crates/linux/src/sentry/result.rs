//! The outcome of a system call.

use afresh_files::Refused;
use rustix::io::Errno;

use crate::exec_command::ExecCommand;
use crate::platform::PlatformError;
use crate::sentry::kernel::fork_request::ForkRequest;
use crate::sentry::kernel::peer_copy::PeerCopy;
use crate::sentry::kernel::streams::End;
use crate::sentry::kernel::threads::Wait;
use crate::sentry::kernel::trace_request::TraceRequest;
use crate::sentry::mm::stub_calls::Change;

/// The outcome of a call.
#[derive(Debug)]
pub(crate) enum SyscallControl {
    /// It returns this.
    Value(u64),
    /// The memory changes, then it returns this.
    Memory(u64, Change),
    /// Its thread waits; then it is repeated.
    Wait(Wait),
    /// It returns 0 after other threads have run.
    Yield,
    /// It starts a process and returns its PID.
    Fork(ForkRequest),
    /// Its process runs another program, if that can be opened.
    Exec(Box<ExecCommand>),
    /// Bytes are copied between two processes; it returns their number.
    Peer(Box<PeerCopy>),
    /// Registers or memory of a traced thread are read or written for it.
    Trace(Box<TraceRequest>),
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
    /// Its thread waits, and it is repeated if the guest continues: it has to end now.
    Paused,
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

pub(crate) type SyscallResult<T = SyscallControl> = Result<T, SyscallError>;

pub(in crate::sentry) const ZERO: SyscallControl = SyscallControl::Value(0);
