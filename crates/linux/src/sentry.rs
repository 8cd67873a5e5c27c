//! The sentry: the kernel that a guest sees.
//!
//! All that a guest can change but memory and registers is [`Kernel`]: plain data that is cloned
//! when the guest is warm and compared when a reset is verified. Every system call is served from
//! it, or answered with an error and counted. Arguments in the guest's memory are copied in once,
//! and nothing that is found there is followed twice.

mod abi;
mod console;
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
use crate::file_cache::FileCache;
use crate::load::Command;
use crate::outbound::OutboundConnections;
use crate::platform::{Call, PlatformError, Process};
use crate::shared_files::SharedFiles;
pub use console::RunControl;
pub(crate) use console::{Console, HostInput};
pub(crate) use fs::root_files::{bytes, prepare, settle, tell, thawed_budget};
use fs::seals::Seals;
use kernel::channels::Channels;
use kernel::fd_table::FdTable;
use kernel::file_locks::FileLocks;
pub(crate) use kernel::generation::Generation;
pub(crate) use kernel::identity::USER;
use kernel::message_queues::MessageQueues;
pub(crate) use kernel::packed_kernel::{OpenerGrants, PackedKernel, damaged};
use kernel::posix_queues::PosixQueues;
pub(crate) use kernel::process_info::{ArgumentStrings, Executable};
use kernel::process_table::ProcessTable;
pub(crate) use kernel::process_table::{FIRST, PROCESSES};
pub(crate) use kernel::readiness::InputSource;
pub use kernel::resource_limits::Resource;
use kernel::semaphores::Semaphores;
pub use kernel::streams::End;
pub(crate) use kernel::streams::{LogSink, OutputSink, OutputSinks, Streams};
pub(crate) use kernel::threads::{Wait, WaitReason};
pub(crate) use kernel::time::StoppedClock;
pub(crate) use mm::layout::{Layout, MAX_RESERVED, PAGE, STACK_LEN};
pub(crate) use mm::orders::{Change, Content, Order, protect_order, unmap_order};
pub(crate) use mm::shared::{Share, Shared};
use mm::user_memory::{copy_in, copy_out, path_in, word_in};
use net::dns::ResolvedNames;
pub use net::inbound::{ExchangeResult, InboundConnection};
pub(crate) use signal_delivery::SignalDelivery;
pub(crate) use syscalls::path::path_of;
pub(crate) use syscalls::process::ForkRequest;
use syscalls::unprivileged::takes_privilege;
use tty::terminals::Terminals;

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
    system_v: mm::shared_segments::SharedSegments,
    semaphores: Semaphores,
    queues: MessageQueues,
    named_queues: PosixQueues,
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
            system_v: mm::shared_segments::SharedSegments::default(),
            semaphores: Semaphores::default(),
            queues: MessageQueues::default(),
            named_queues: PosixQueues::default(),
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
    Exec(Box<Command>),
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

    fn dispatch(&mut self, process: &mut Process, call: &Call) -> SyscallResult {
        let a = call.args;
        match call.number {
            libc::SYS_read => self.sys_read(process, a[0], a[1], a[2]),
            libc::SYS_readv => self.sys_readv(process, a[0], a[1], a[2]),
            libc::SYS_pread64 => self.sys_pread64(process, a[0], a[1], a[2], a[3]),
            libc::SYS_preadv => self.sys_preadv(process, a[0], a[1], a[2], a[3]),
            libc::SYS_write => self.sys_write(process, a[0], a[1], a[2]),
            libc::SYS_writev => self.sys_writev(process, a[0], a[1], a[2]),
            libc::SYS_pwrite64 => self.sys_pwrite64(process, a[0], a[1], a[2], a[3]),
            libc::SYS_pwritev => self.sys_pwritev(process, a[0], a[1], a[2], a[3]),
            libc::SYS_preadv2 => self.sys_preadv2(process, &a),
            libc::SYS_pwritev2 => self.sys_pwritev2(process, &a),
            libc::SYS_splice => self.sys_splice(process, &a),
            libc::SYS_tee => self.sys_tee(a[0], a[1], a[2], a[3]),
            libc::SYS_vmsplice => self.sys_vmsplice(process, a[0], a[1], a[2], a[3]),
            libc::SYS_sendfile => self.sys_sendfile(process, a[0], a[1], a[2], a[3]),
            libc::SYS_copy_file_range => self.sys_copy_file_range(process, &a),
            libc::SYS_getrandom => self.sys_getrandom(process, a[0], a[1], a[2]),

            libc::SYS_open => self.sys_open(process, a[0], a[1], a[2]),
            libc::SYS_creat => self.sys_creat(process, a[0], a[1]),
            libc::SYS_openat => self.sys_openat(process, a[0], a[1], a[2], a[3]),
            libc::SYS_openat2 => self.sys_openat2(process, a[0], a[1], a[2], a[3]),
            libc::SYS_memfd_create => self.sys_memfd_create(process, a[0], a[1]),
            libc::SYS_close => self.sys_close(a[0]),
            libc::SYS_close_range => self.sys_close_range(a[0], a[1], a[2]),
            libc::SYS_lseek => self.sys_lseek(a[0], a[1] as i64, a[2]),
            libc::SYS_dup => self.sys_dup(a[0]),
            libc::SYS_dup2 => self.sys_dup2(a[0], a[1]),
            libc::SYS_dup3 => self.sys_dup3(a[0], a[1], a[2]),
            libc::SYS_fcntl => self.sys_fcntl(process, a[0], a[1], a[2]),
            libc::SYS_flock => self.sys_flock(a[0], a[1]),
            libc::SYS_ioctl => self.sys_ioctl(process, a[0], a[1], a[2]),
            libc::SYS_ftruncate => self.sys_ftruncate(a[0], a[1]),
            libc::SYS_fsync => self.sys_fsync(a[0]),
            libc::SYS_fdatasync => self.sys_fdatasync(a[0]),
            libc::SYS_sync_file_range => self.sys_sync_file_range(a[0], a[1], a[2]),
            libc::SYS_readahead => self.sys_readahead(a[0]),
            libc::SYS_syncfs => self.sys_syncfs(a[0]),
            libc::SYS_sync => self.sys_sync(),
            libc::SYS_fadvise64 => self.sys_fadvise64(a[0], a[2], a[3]),
            libc::SYS_poll => self.sys_poll(process, a[0], a[1], a[2]),
            libc::SYS_ppoll => self.sys_ppoll(process, &a),
            libc::SYS_select => self.sys_select(process, &a),
            libc::SYS_pselect6 => self.sys_pselect6(process, &a),
            libc::SYS_epoll_create => self.sys_epoll_create(a[0]),
            libc::SYS_epoll_create1 => self.sys_epoll_create1(a[0]),
            libc::SYS_epoll_ctl => self.sys_epoll_ctl(process, a[0], a[1], a[2], a[3]),
            libc::SYS_epoll_wait => self.sys_epoll_wait(process, &a),
            libc::SYS_epoll_pwait => self.sys_epoll_pwait(process, &a),
            libc::SYS_epoll_pwait2 => self.sys_epoll_pwait2(process, &a),
            libc::SYS_pipe => self.sys_pipe(process, a[0]),
            libc::SYS_pipe2 => self.sys_pipe2(process, a[0], a[1]),
            libc::SYS_eventfd => self.sys_eventfd(a[0]),
            libc::SYS_eventfd2 => self.sys_eventfd2(a[0], a[1]),
            libc::SYS_inotify_init => self.sys_inotify_init(),
            libc::SYS_inotify_init1 => self.sys_inotify_init1(a[0]),
            libc::SYS_inotify_add_watch => self.sys_inotify_add_watch(process, a[0], a[1], a[2]),
            libc::SYS_inotify_rm_watch => self.sys_inotify_rm_watch(a[0], a[1]),
            libc::SYS_signalfd => self.sys_signalfd(process, a[0], a[1], a[2]),
            libc::SYS_signalfd4 => self.sys_signalfd4(process, a[0], a[1], a[2], a[3]),
            libc::SYS_timerfd_create => self.sys_timerfd_create(a[0], a[1]),
            libc::SYS_timerfd_settime => self.sys_timerfd_settime(process, a[0], a[1], a[2], a[3]),
            libc::SYS_timerfd_gettime => self.sys_timerfd_gettime(process, a[0], a[1]),

            libc::SYS_socket => self.sys_socket(a[0], a[1], a[2]),
            libc::SYS_socketpair => self.sys_socketpair(process, a[0], a[1], a[3]),
            libc::SYS_bind => self.sys_bind(process, a[0], a[1], a[2]),
            libc::SYS_listen => self.sys_listen(a[0], a[1]),
            libc::SYS_accept => self.sys_accept(process, a[0], a[1], a[2]),
            libc::SYS_accept4 => self.sys_accept4(process, a[0], a[1], a[2], a[3]),
            libc::SYS_connect => self.sys_connect(process, a[0], a[1], a[2]),
            libc::SYS_recvfrom => self.sys_recvfrom(process, &a),
            libc::SYS_recvmsg => self.sys_recvmsg(process, a[0], a[1], a[2]),
            libc::SYS_sendto => self.sys_sendto(process, &a),
            libc::SYS_sendmsg => self.sys_sendmsg(process, a[0], a[1], a[2]),
            libc::SYS_sendmmsg => self.sys_sendmmsg(process, &a),
            libc::SYS_recvmmsg => self.sys_recvmmsg(process, &a),
            libc::SYS_shutdown => self.sys_shutdown(a[0], a[1]),
            libc::SYS_getsockname => self.sys_getsockname(process, &a),
            libc::SYS_getpeername => self.sys_getpeername(process, &a),
            libc::SYS_setsockopt => self.sys_setsockopt(process, &a),
            libc::SYS_getsockopt => self.sys_getsockopt(process, &a),

            libc::SYS_stat => self.sys_stat(process, a[0], a[1]),
            libc::SYS_lstat => self.sys_lstat(process, a[0], a[1]),
            libc::SYS_fstat => self.sys_fstat(process, a[0], a[1]),
            libc::SYS_newfstatat => self.sys_newfstatat(process, a[0], a[1], a[2], a[3]),
            libc::SYS_statx => self.sys_statx(process, a[0], a[1], a[2], a[3], a[4]),
            libc::SYS_access => self.sys_access(process, a[0], a[1]),
            libc::SYS_faccessat => self.sys_faccessat(process, a[0], a[1], a[2]),
            libc::SYS_faccessat2 => self.sys_faccessat2(process, a[0], a[1], a[2], a[3]),
            libc::SYS_readlink => self.sys_readlink(process, a[0], a[1], a[2]),
            libc::SYS_readlinkat => self.sys_readlinkat(process, a[0], a[1], a[2], a[3]),
            libc::SYS_getdents => self.sys_getdents(process, a[0], a[1], a[2]),
            libc::SYS_getdents64 => self.sys_getdents64(process, a[0], a[1], a[2]),
            libc::SYS_getcwd => self.sys_getcwd(process, a[0], a[1]),
            libc::SYS_chdir => self.sys_chdir(process, a[0]),
            libc::SYS_fchdir => self.sys_fchdir(a[0]),
            libc::SYS_mkdir => self.sys_mkdir(process, a[0], a[1]),
            libc::SYS_mkdirat => self.sys_mkdirat(process, a[0], a[1], a[2]),
            libc::SYS_mknod => self.sys_mknod(process, a[0], a[1]),
            libc::SYS_mknodat => self.sys_mknodat(process, a[0], a[1], a[2]),
            libc::SYS_rmdir => self.sys_rmdir(process, a[0]),
            libc::SYS_unlink => self.sys_unlink(process, a[0]),
            libc::SYS_unlinkat => self.sys_unlinkat(process, a[0], a[1], a[2]),
            libc::SYS_rename => self.sys_rename(process, a[0], a[1]),
            libc::SYS_renameat => self.sys_renameat(process, a[0], a[1], a[2], a[3]),
            libc::SYS_renameat2 => self.sys_renameat2(process, a[0], a[1], a[2], a[3], a[4]),
            libc::SYS_symlink => self.sys_symlink(process, a[0], a[1]),
            libc::SYS_symlinkat => self.sys_symlinkat(process, a[0], a[1], a[2]),
            libc::SYS_chmod => self.sys_chmod(process, a[0], a[1]),
            libc::SYS_fchmodat => self.sys_fchmodat(process, a[0], a[1], a[2]),
            libc::SYS_fchmodat2 => self.sys_fchmodat2(process, a[0], a[1], a[2], a[3]),
            libc::SYS_fchmod => self.sys_fchmod(a[0], a[1]),
            libc::SYS_utime => self.sys_utime(process, a[0], a[1]),
            libc::SYS_utimes => self.sys_utimes(process, a[0], a[1]),
            libc::SYS_futimesat => self.sys_futimesat(process, a[0], a[1], a[2]),
            libc::SYS_utimensat => self.sys_utimensat(process, a[0], a[1], a[2], a[3]),
            libc::SYS_chown => self.sys_chown(process, a[0], a[1], a[2]),
            libc::SYS_lchown => self.sys_lchown(process, a[0], a[1], a[2]),
            libc::SYS_fchownat => self.sys_fchownat(process, a[0], a[1], (a[2], a[3]), a[4]),
            libc::SYS_fchown => self.sys_fchown(a[0], a[1], a[2]),
            libc::SYS_link => self.sys_link(process, a[0], a[1]),
            libc::SYS_linkat => self.sys_linkat(process, (a[0], a[1]), (a[2], a[3]), a[4]),
            libc::SYS_truncate => self.sys_truncate(process, a[0], a[1]),
            libc::SYS_fallocate => self.sys_fallocate(a[0], a[1], a[2], a[3]),
            libc::SYS_statfs => self.sys_statfs(process, a[0], a[1]),
            libc::SYS_fstatfs => self.sys_fstatfs(process, a[0], a[1]),
            libc::SYS_umask => self.sys_umask(a[0]),

            libc::SYS_mmap => self.sys_mmap(process, &a),
            libc::SYS_munmap => self.sys_munmap(a[0], a[1]),
            libc::SYS_msync => self.sys_msync(a[0], a[1], a[2]),
            libc::SYS_shmget => self.sys_shmget(a[0], a[1], a[2]),
            libc::SYS_shmat => self.sys_shmat(a[0], a[1], a[2]),
            libc::SYS_shmdt => self.sys_shmdt(a[0]),
            libc::SYS_shmctl => self.sys_shmctl(process, a[0], a[1], a[2]),
            libc::SYS_semget => self.sys_semget(a[0], a[1], a[2]),
            libc::SYS_semop => self.sys_semop(process, a[0], a[1], a[2]),
            libc::SYS_semtimedop => self.sys_semtimedop(process, a[0], a[1], a[2], a[3]),
            libc::SYS_semctl => self.sys_semctl(process, a[0], a[1], a[2], a[3]),
            libc::SYS_msgget => self.sys_msgget(a[0], a[1]),
            libc::SYS_msgsnd => self.sys_msgsnd(process, a[0], a[1], a[2], a[3]),
            libc::SYS_msgrcv => self.sys_msgrcv(process, &a),
            libc::SYS_msgctl => self.sys_msgctl(process, a[0], a[1], a[2]),
            libc::SYS_mq_open => self.sys_mq_open(process, a[0], a[1], a[2], a[3]),
            libc::SYS_mq_unlink => self.sys_mq_unlink(process, a[0]),
            libc::SYS_mq_timedsend => self.sys_mq_timedsend(process, &a),
            libc::SYS_mq_timedreceive => self.sys_mq_timedreceive(process, &a),
            libc::SYS_mq_notify => self.sys_mq_notify(process, a[0], a[1]),
            libc::SYS_mq_getsetattr => self.sys_mq_getsetattr(process, a[0], a[1], a[2]),
            libc::SYS_process_vm_readv => self.sys_process_vm_readv(process, &a),
            libc::SYS_process_vm_writev => self.sys_process_vm_writev(process, &a),
            libc::SYS_mprotect => self.sys_mprotect(a[0], a[1], a[2]),
            libc::SYS_madvise => self.sys_madvise(a[0], a[1], a[2]),
            libc::SYS_mlock => self.sys_mlock(a[0], a[1]),
            libc::SYS_mlock2 => self.sys_mlock2(a[0], a[1], a[2]),
            libc::SYS_munlock => self.sys_munlock(a[0], a[1]),
            libc::SYS_mlockall => self.sys_mlockall(a[0]),
            libc::SYS_munlockall => self.sys_munlockall(),
            libc::SYS_mincore => self.sys_mincore(process, a[0], a[1], a[2]),
            libc::SYS_membarrier => self.sys_membarrier(a[0], a[1]),
            libc::SYS_mremap => self.sys_mremap(&a),
            libc::SYS_brk => self.sys_brk(a[0]),

            libc::SYS_clock_gettime => self.sys_clock_gettime(process, a[0], a[1]),
            libc::SYS_clock_getres => self.sys_clock_getres(process, a[0], a[1]),
            libc::SYS_gettimeofday => self.sys_gettimeofday(process, a[0], a[1]),
            libc::SYS_time => self.sys_time(process, a[0]),
            libc::SYS_nanosleep => self.sys_nanosleep(process, a[0]),
            libc::SYS_clock_nanosleep => self.sys_clock_nanosleep(process, a[0], a[1], a[2]),
            libc::SYS_futex => self.sys_futex(process, &a),
            libc::SYS_alarm => self.sys_alarm(a[0]),
            libc::SYS_setitimer => self.sys_setitimer(process, a[0], a[1], a[2]),
            libc::SYS_timer_create => self.sys_timer_create(process, a[0], a[1], a[2]),
            libc::SYS_timer_settime => self.sys_timer_settime(process, a[0], a[1], a[2], a[3]),
            libc::SYS_timer_gettime => self.sys_timer_gettime(process, a[0], a[1]),
            libc::SYS_timer_getoverrun => self.sys_timer_getoverrun(a[0]),
            libc::SYS_timer_delete => self.sys_timer_delete(a[0]),
            libc::SYS_getitimer => self.sys_getitimer(process, a[0], a[1]),

            libc::SYS_exit => self.sys_exit(process, a[0]),
            libc::SYS_exit_group => self.sys_exit_group(a[0]),
            libc::SYS_clone => self.sys_clone(process, &a),
            libc::SYS_clone3 => self.sys_clone3(process, a[0], a[1]),
            libc::SYS_fork => self.sys_fork(process),
            libc::SYS_vfork => self.sys_vfork(process),
            libc::SYS_execve => self.sys_execve(process, a[0], a[1], a[2]),
            libc::SYS_execveat => self.sys_execveat(process, a[0], a[1], (a[2], a[3]), a[4]),
            libc::SYS_kill => self.sys_kill(a[0], a[1]),
            libc::SYS_tkill => self.sys_tkill(a[0], a[1]),
            libc::SYS_tgkill => self.sys_tgkill(a[0], a[1], a[2]),
            libc::SYS_rt_sigqueueinfo => self.sys_rt_sigqueueinfo(process, a[0], a[1], a[2]),
            libc::SYS_rt_tgsigqueueinfo => {
                self.sys_rt_tgsigqueueinfo(process, a[0], a[1], a[2], a[3])
            }
            libc::SYS_pidfd_open => self.sys_pidfd_open(a[0], a[1]),
            libc::SYS_pidfd_send_signal => {
                self.sys_pidfd_send_signal(process, a[0], a[1], a[2], a[3])
            }
            libc::SYS_arch_prctl => self.sys_arch_prctl(process, a[0], a[1]),
            libc::SYS_getpid => self.sys_getpid(),
            libc::SYS_getpgrp => self.sys_getpgrp(),
            libc::SYS_getpgid => self.sys_getpgid(a[0]),
            libc::SYS_getsid => self.sys_getsid(a[0]),
            libc::SYS_setpgid => self.sys_setpgid(a[0], a[1]),
            libc::SYS_setsid => self.sys_setsid(),
            libc::SYS_gettid => self.sys_gettid(),
            libc::SYS_set_tid_address => self.sys_set_tid_address(a[0]),
            libc::SYS_getppid => self.sys_getppid(),
            libc::SYS_getuid => self.sys_getuid(),
            libc::SYS_geteuid => self.sys_geteuid(),
            libc::SYS_getgid => self.sys_getgid(),
            libc::SYS_getegid => self.sys_getegid(),
            libc::SYS_getresuid => self.sys_getresuid(process, &a),
            libc::SYS_getresgid => self.sys_getresgid(process, &a),
            libc::SYS_getgroups => self.sys_getgroups(a[0]),
            libc::SYS_set_robust_list => self.sys_set_robust_list(a[0], a[1]),
            libc::SYS_get_robust_list => self.sys_get_robust_list(process, a[0], a[1], a[2]),
            libc::SYS_sched_yield => self.sys_sched_yield(),
            libc::SYS_rt_sigaction => self.sys_rt_sigaction(process, a[0], a[1], a[2], a[3]),
            libc::SYS_rt_sigprocmask => self.sys_rt_sigprocmask(process, a[0], a[1], a[2], a[3]),
            libc::SYS_rt_sigpending => self.sys_rt_sigpending(process, a[0], a[1]),
            libc::SYS_rt_sigreturn => self.sys_rt_sigreturn(process),
            libc::SYS_rt_sigsuspend => self.sys_rt_sigsuspend(process, a[0], a[1]),
            libc::SYS_rt_sigtimedwait => self.sys_rt_sigtimedwait(process, a[0], a[1], a[2], a[3]),
            libc::SYS_pause => self.sys_pause(process),
            libc::SYS_sigaltstack => self.sys_sigaltstack(process, a[0], a[1]),
            libc::SYS_wait4 => self.sys_wait4(process, a[0], a[1], a[2], a[3]),
            libc::SYS_waitid => self.sys_waitid(process, &a),
            libc::SYS_uname => self.sys_uname(process, a[0]),
            libc::SYS_sysinfo => self.sys_sysinfo(process, a[0]),
            libc::SYS_prlimit64 => self.sys_prlimit64(process, a[0], a[1], a[2], a[3]),
            libc::SYS_getrlimit => self.sys_getrlimit(process, a[0], a[1]),
            libc::SYS_setrlimit => self.sys_setrlimit(process, a[0], a[1]),
            libc::SYS_getrusage => self.sys_getrusage(process, a[0], a[1]),
            libc::SYS_times => self.sys_times(process, a[0]),
            libc::SYS_sched_getaffinity => self.sys_sched_getaffinity(process, a[0], a[1], a[2]),
            libc::SYS_sched_setaffinity => self.sys_sched_setaffinity(process, a[0], a[1], a[2]),
            libc::SYS_sched_getscheduler => self.sys_sched_getscheduler(a[0]),
            libc::SYS_sched_setscheduler => self.sys_sched_setscheduler(process, a[0], a[1], a[2]),
            libc::SYS_sched_getparam => self.sys_sched_getparam(process, a[0], a[1]),
            libc::SYS_sched_setparam => self.sys_sched_setparam(process, a[0], a[1]),
            libc::SYS_sched_get_priority_max => self.sys_sched_get_priority_max(a[0]),
            libc::SYS_sched_get_priority_min => self.sys_sched_get_priority_min(a[0]),
            libc::SYS_sched_rr_get_interval => self.sys_sched_rr_get_interval(process, a[0], a[1]),
            libc::SYS_sched_getattr => self.sys_sched_getattr(process, a[0], a[1], a[2], a[3]),
            libc::SYS_sched_setattr => self.sys_sched_setattr(process, a[0], a[1], a[2]),
            libc::SYS_getpriority => self.sys_getpriority(a[0], a[1]),
            libc::SYS_setpriority => self.sys_setpriority(a[0], a[1], a[2]),
            libc::SYS_ioprio_get => self.sys_ioprio_get(a[0], a[1]),
            libc::SYS_ioprio_set => self.sys_ioprio_set(a[0], a[1], a[2]),
            libc::SYS_personality => self.sys_personality(a[0]),
            libc::SYS_setfsuid => self.sys_setfsuid(),
            libc::SYS_setfsgid => self.sys_setfsgid(),
            libc::SYS_getcpu => self.sys_getcpu(process, a[0], a[1]),
            libc::SYS_prctl => self.sys_prctl(process, &a),
            libc::SYS_setuid => self.sys_setuid(a[0]),
            libc::SYS_setgid => self.sys_setgid(a[0]),
            libc::SYS_setreuid => self.sys_setreuid(a[0], a[1]),
            libc::SYS_setregid => self.sys_setregid(a[0], a[1]),
            libc::SYS_setresuid => self.sys_setresuid(a[0], a[1], a[2]),
            libc::SYS_setresgid => self.sys_setresgid(a[0], a[1], a[2]),
            libc::SYS_setgroups => self.sys_setgroups(),
            libc::SYS_capget => self.sys_capget(process, a[0], a[1]),
            libc::SYS_capset => self.sys_capset(process, a[0], a[1]),

            libc::SYS_adjtimex => self.sys_adjtimex(process, a[0]),
            libc::SYS_clock_adjtime => self.sys_clock_adjtime(process, a[0], a[1]),
            libc::SYS_get_mempolicy => self.sys_get_mempolicy(process, &a),
            libc::SYS_set_mempolicy => self.sys_set_mempolicy(process, a[0], a[1], a[2]),
            libc::SYS_mbind => self.sys_mbind(process, &a),
            libc::SYS_unshare if a[0] == 0 => Ok(ZERO),
            number if takes_privilege(number) => Err(Errno::PERM.into()),
            // Files have no extended attributes.
            libc::SYS_setxattr..=libc::SYS_fremovexattr => Err(Errno::OPNOTSUPP.into()),
            number => self.refuse_unknown(number),
        }
    }
}

const ZERO: SyscallControl = SyscallControl::Value(0);
