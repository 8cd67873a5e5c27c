//! The personality: what the guest takes for Linux.
//!
//! All that a guest can change but memory and registers is [`State`]: plain data that is cloned when the guest is warm and compared
//! when a reset is verified. Every system call is served from it, or answered with an error and counted. Arguments in
//! the guest's memory are copied in once, and nothing that is found there is followed twice.

mod alarms;
mod attribute_calls;
mod channels;
mod clock_calls;
mod control_calls;
mod copies;
mod copy_calls;
mod datagrams;
mod devices;
mod dialed;
mod discipline;
mod encode;
mod family;
mod family_calls;
mod fifos;
mod file_calls;
mod ground;
mod kin;
mod layout;
mod limits;
mod locks;
mod many_calls;
mod memory_calls;
mod message_calls;
mod name_calls;
mod names;
mod options;
mod packed;
mod parcels;
mod permissions;
mod pidfd_calls;
mod pipe_calls;
mod poll_calls;
mod proc_calls;
mod proc_paths;
mod process_calls;
mod processor;
mod reach_calls;
mod readiness;
mod seals;
mod shared;
mod signal_calls;
mod signalfd_calls;
mod signals;
mod socket_calls;
mod sockets;
mod streams;
mod system_v;
mod table;
mod terminal_calls;
mod terminals;
mod thread_calls;
mod threads;
mod timer_calls;
mod told;
mod transfer_calls;
mod watches;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use afresh_files::{Node, Refused, Tree};
use rustix::io::Errno;

use crate::base::Base;
use crate::contents::Contents;
use crate::lines::Lines;
use crate::load::Command;
use crate::platform::{Call, PlatformError, Process};
use crate::reach::Destination;
use alarms::Alarms;
use attribute_calls::Times;
use channels::Channels;
pub(crate) use clock_calls::now_moment;
use copies::{copy_in, copy_out, path_in, word_in};
pub use dialed::{Dialed, Exchanged};
use family::Family;
pub(crate) use family::{FIRST, PROCESSES};
pub(crate) use family_calls::Fork;
pub(crate) use ground::{bytes, prepare, settle, tell};
pub(crate) use kin::{Known, Strings};
pub(crate) use layout::{
    Change, Content, Layout, PAGE, STACK_LEN, map_order, protect_order, unmap_order,
};
use locks::Locks;
pub(crate) use name_calls::path_of;
use names::Names;
pub(crate) use packed::{Packed, damaged};
pub(crate) use process_calls::USER;
pub(crate) use readiness::Ear;
use seals::Seals;
pub(crate) use shared::{Absorbed, Behind};
use signals::Pending;
pub(crate) use signals::Taken;
pub use streams::{Channel, End, Writer};
pub(crate) use streams::{Hearer, Streams};
use table::Table;
use terminals::Terminals;
use threads::Threads;
pub(crate) use threads::{On, Wait};

/// Longest name of a file.
const NAME: usize = 255;
/// Longest path, with its end.
const PATH_LEN: usize = 4096;

/// Everything of a guest's that is not memory or registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) layout: Layout,
    pub(crate) tree: Tree,
    /// The image that the tree lies over, if it does.
    pub(crate) base: Option<Arc<Base>>,
    /// Directories of the host's that it lies over, too.
    layers: Arc<[PathBuf]>,
    pub(crate) table: Table,
    pub(crate) directory: Node,
    umask: u32,
    /// Handlers by signal, as the program gave them.
    handlers: BTreeMap<u64, [u8; 32]>,
    /// Signals for whichever thread takes them.
    pub(crate) pending: Pending,
    alarms: Alarms,
    pub(crate) threads: Threads,
    channels: Channels,
    terminals: Terminals,
    /// Locks on files.
    locks: Locks,
    seals: Seals,
    /// Descriptors that watch files, and how often a name was given away for their sake.
    watchers: u32,
    moves: u32,
    /// Files that are held because memory is shared through them.
    shares: BTreeSet<Node>,
    system_v: system_v::Segments,
    /// Names of hosts that were asked for.
    names: Names,
    /// Which process all of this belongs to, and the others.
    pub(crate) family: Family,
}

impl State {
    /// The state of a program that starts at the top of `tree`, which lies over `base` and `layers`.
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
            table: Table::new(),
            directory: Tree::ROOT,
            umask: 0o022,
            handlers: BTreeMap::new(),
            pending: Pending::default(),
            alarms: Alarms::default(),
            threads: Threads::new(),
            channels: Channels::default(),
            terminals: Terminals::default(),
            locks: Locks::default(),
            seals: Seals::default(),
            watchers: 0,
            moves: 0,
            shares: BTreeSet::new(),
            system_v: system_v::Segments::default(),
            names: Names::default(),
            family: Family::new(),
        }
    }
}

/// What becomes of a call.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// It returns this.
    Value(u64),
    /// The memory changes, then it returns this.
    Memory(u64, Change),
    /// Its thread waits; then it is made once more.
    Wait(Wait),
    /// It returns nought, after others have had their turn.
    Yield,
    /// There is a further process, whose number it returns.
    Fork(Fork),
    /// Its process runs another program, if that can be had.
    Exec(Box<Command>),
    /// Its thread is no more.
    Gone,
    /// It does not return: the registers are what it was to set them to.
    Resumed,
    /// It waits for input, and there is none.
    Idle,
    /// The guest is through.
    End(End),
}

/// Why a call was not served.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The guest sees this error.
    Errno(Errno),
    /// The guest cannot go on.
    Broken(PlatformError),
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl From<Refused> for Stop {
    fn from(refused: Refused) -> Self {
        Self::Errno(refused.errno())
    }
}

impl From<PlatformError> for Stop {
    fn from(error: PlatformError) -> Self {
        Self::Broken(error)
    }
}

type Served<T = Outcome> = Result<T, Stop>;

/// A guest's state at this moment, its streams and limits.
#[derive(Debug)]
pub(crate) struct Person {
    /// Shared with the warm state until something in it changes.
    pub(crate) state: Arc<State>,
    pub(crate) streams: Streams,
    /// Bytes of output a call may have.
    pub(crate) output_limit: usize,
    /// Calls that were answered with `ENOSYS`, by number.
    pub(crate) unserved: BTreeMap<i64, u64>,
    /// The wait that the call which is served has behind it.
    pub(crate) resumed: Option<Wait>,
    /// What files hold that its processes have mapped.
    pub(crate) contents: Contents,
    /// Its connections to the outside.
    pub(crate) lines: Lines,
}

impl Person {
    /// One whose calls have so many bytes of output, and who may connect to what is granted.
    pub(crate) fn new(state: Arc<State>, output_limit: usize, granted: Arc<[Destination]>) -> Self {
        let streams = Streams::default();
        let (unserved, contents) = (BTreeMap::new(), Contents::default());
        let lines = Lines::new(granted);
        Self { state, streams, output_limit, unserved, resumed: None, contents, lines }
    }

    /// Moves what can be moved between the guest and the outside. Whether it sees something new.
    pub(crate) fn pump(&mut self) -> bool {
        !self.lines.is_empty() && self.lines.pump(&mut self.state)
    }

    /// The state, to be changed.
    pub(crate) fn change(&mut self) -> &mut State {
        Arc::make_mut(&mut self.state)
    }

    /// Serves one call. An error of the guest's is a value, too.
    pub(crate) fn serve(
        &mut self,
        process: &mut Process,
        call: &Call,
    ) -> Result<Outcome, PlatformError> {
        match self.in_step(process, call) {
            Ok(outcome) => Ok(outcome),
            Err(Stop::Errno(errno)) => {
                Ok(Outcome::Value((-i64::from(errno.raw_os_error())) as u64))
            }
            Err(Stop::Broken(error)) => Err(error),
        }
    }

    /// Has the current thread take its signals; see [`Person::take_signals`].
    pub(crate) fn served_signals(
        &mut self,
        process: &mut Process,
        interrupted: bool,
    ) -> Result<Taken, PlatformError> {
        match self.take_signals(process, interrupted) {
            Ok(taken) => Ok(taken),
            Err(Stop::Errno(_)) => Ok(Taken::Ends(End::Signal(libc::SIGSEGV))),
            Err(Stop::Broken(error)) => Err(error),
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
            Err(Stop::Errno(_)) => Ok(Some(End::Signal(signal))),
            Err(Stop::Broken(error)) => Err(error),
        }
    }

    fn dispatch(&mut self, process: &mut Process, call: &Call) -> Served {
        let a = call.args;
        match call.number {
            libc::SYS_read => self.read(process, a[0], a[1], a[2]),
            libc::SYS_readv => self.readv(process, a[0], a[1], a[2]),
            libc::SYS_pread64 => self.pread(process, a[0], a[1], a[2], a[3]),
            libc::SYS_preadv => self.preadv(process, a[0], a[1], a[2], a[3]),
            libc::SYS_write => self.write(process, a[0], a[1], a[2]),
            libc::SYS_writev => self.writev(process, a[0], a[1], a[2]),
            libc::SYS_pwrite64 => self.pwrite(process, a[0], a[1], a[2], a[3]),
            libc::SYS_pwritev => self.pwritev(process, a[0], a[1], a[2], a[3]),
            libc::SYS_sendfile => self.send_file(process, a[0], a[1], a[2], a[3]),
            libc::SYS_copy_file_range => self.copy_range(process, &a),
            // Flags that are no flags.
            libc::SYS_getrandom if a[2] & !7 != 0 => Err(Errno::INVAL.into()),
            libc::SYS_getrandom => self.random(process, a[0], a[1]),

            libc::SYS_open => self.open(process, libc::AT_FDCWD as u64, a[0], a[1], a[2]),
            libc::SYS_creat => {
                let flags = libc::O_CREAT | libc::O_TRUNC | libc::O_WRONLY;
                self.open(process, libc::AT_FDCWD as u64, a[0], flags as u64, a[1])
            }
            libc::SYS_openat => self.open(process, a[0], a[1], a[2], a[3]),
            libc::SYS_memfd_create => self.memory_file(process, a[0], a[1]),
            libc::SYS_close => self.closing(vec![a[0]], |person| person.close(a[0])),
            libc::SYS_close_range => {
                let closed = self.state.table.numbers(a[0], a[1]);
                self.closing(closed, |person| person.close_range(a[0], a[1], a[2]))
            }
            libc::SYS_lseek => self.seek(a[0], a[1] as i64, a[2]),
            libc::SYS_dup => self.duplicate(a[0]),
            libc::SYS_dup2 if a[0] as u32 != a[1] as u32 => {
                self.closing(vec![a[1]], |person| person.replace(a[0], a[1], 0, true))
            }
            libc::SYS_dup2 => self.replace(a[0], a[1], 0, true),
            libc::SYS_dup3 if a[0] as u32 == a[1] as u32 => Err(Errno::INVAL.into()),
            libc::SYS_dup3 => {
                self.closing(vec![a[1]], |person| person.replace(a[0], a[1], a[2], false))
            }
            libc::SYS_fcntl => self.control(process, a[0], a[1], a[2]),
            libc::SYS_flock => self.lock_whole(a[0], a[1]),
            libc::SYS_ioctl => self.device(process, a[0], a[1], a[2]),
            libc::SYS_ftruncate => self.truncate(a[0], a[1]),
            libc::SYS_fsync | libc::SYS_fdatasync | libc::SYS_sync_file_range => self.flush(a[0]),
            libc::SYS_fadvise64 => self.expect(a[0], a[3]),
            libc::SYS_poll => self.poll(process, a[0], a[1], a[2]),
            libc::SYS_ppoll => self.ppoll(process, &a),
            libc::SYS_select => self.select(process, &a),
            libc::SYS_pselect6 => self.pselect(process, &a),
            libc::SYS_epoll_create if a[0] as i32 <= 0 => Err(Errno::INVAL.into()),
            libc::SYS_epoll_create => self.new_set(0),
            libc::SYS_epoll_create1 => self.new_set(a[0]),
            libc::SYS_epoll_ctl => self.change_set(process, a[0], a[1], a[2], a[3]),
            libc::SYS_epoll_wait => self.wait_set(process, &a),
            libc::SYS_epoll_pwait => self.pwait_set(process, &a, false),
            libc::SYS_epoll_pwait2 => self.pwait_set(process, &a, true),
            libc::SYS_pipe => self.pipe(process, a[0], 0),
            libc::SYS_pipe2 => self.pipe(process, a[0], a[1]),
            libc::SYS_eventfd => self.event(a[0], 0),
            libc::SYS_eventfd2 => self.event(a[0], a[1]),
            libc::SYS_inotify_init => self.new_watches(0),
            libc::SYS_inotify_init1 => self.new_watches(a[0]),
            libc::SYS_inotify_add_watch => self.watch(process, a[0], a[1], a[2]),
            libc::SYS_inotify_rm_watch => self.unwatch(a[0], a[1]),
            libc::SYS_signalfd => self.signal_descriptor(process, a[0], a[1], a[2], 0),
            libc::SYS_signalfd4 => self.signal_descriptor(process, a[0], a[1], a[2], a[3]),
            libc::SYS_timerfd_create => self.timer(a[0], a[1]),
            libc::SYS_timerfd_settime => self.set_timer(process, a[0], a[1], a[2], a[3]),
            libc::SYS_timerfd_gettime => self.timer_left(process, a[0], a[1]),

            libc::SYS_socket => self.socket(a[0], a[1]),
            libc::SYS_socketpair => self.socket_pair(process, a[0], a[1], a[3]),
            libc::SYS_bind => self.bind(process, a[0], a[1], a[2]),
            libc::SYS_listen => self.listen(a[0]),
            libc::SYS_accept => self.accept(process, a[0], a[1], a[2], 0),
            libc::SYS_accept4 => self.accept(process, a[0], a[1], a[2], a[3]),
            libc::SYS_connect => self.connect(process, a[0], a[1], a[2]),
            libc::SYS_recvfrom => self.receive(process, &a),
            libc::SYS_recvmsg => self.receive_message(process, a[0], a[1], a[2]),
            libc::SYS_sendto => self.send(process, &a),
            libc::SYS_sendmsg => self.send_message(process, a[0], a[1], a[2]),
            libc::SYS_sendmmsg => self.send_messages(process, &a),
            libc::SYS_recvmmsg => self.receive_messages(process, &a),
            libc::SYS_shutdown => self.shut_down(a[0], a[1]),
            libc::SYS_getsockname => self.own_address(process, &a),
            libc::SYS_getpeername => self.peer_address(process, &a),
            libc::SYS_setsockopt => self.set_option(process, &a),
            libc::SYS_getsockopt => self.option(process, &a),

            libc::SYS_stat => self.stat(process, libc::AT_FDCWD as u64, a[0], a[1], 0),
            libc::SYS_lstat => {
                let flags = libc::AT_SYMLINK_NOFOLLOW as u64;
                self.stat(process, libc::AT_FDCWD as u64, a[0], a[1], flags)
            }
            libc::SYS_fstat => self.fstat(process, a[0], a[1]),
            libc::SYS_newfstatat => self.stat(process, a[0], a[1], a[2], a[3]),
            libc::SYS_statx if statx_refused(a[2], a[3]) => Err(Errno::INVAL.into()),
            libc::SYS_statx => self.statx(process, a[0], a[1], a[2], a[4]),
            libc::SYS_access => self.access(process, libc::AT_FDCWD as u64, a[0], a[1], 0),
            libc::SYS_faccessat => self.access(process, a[0], a[1], a[2], 0),
            libc::SYS_faccessat2 => self.access(process, a[0], a[1], a[2], a[3]),
            libc::SYS_readlink => self.read_link(process, libc::AT_FDCWD as u64, a[0], a[1], a[2]),
            libc::SYS_readlinkat => self.read_link(process, a[0], a[1], a[2], a[3]),
            libc::SYS_getdents64 => self.list(process, a[0], a[1], a[2]),
            libc::SYS_getcwd => self.where_am_i(process, a[0], a[1]),
            libc::SYS_chdir => self.go(process, a[0]),
            libc::SYS_fchdir => self.go_to(a[0]),
            libc::SYS_mkdir => self.make_directory(process, libc::AT_FDCWD as u64, a[0], a[1]),
            libc::SYS_mkdirat => self.make_directory(process, a[0], a[1], a[2]),
            libc::SYS_mknod => self.make_node(process, libc::AT_FDCWD as u64, a[0], a[1]),
            libc::SYS_mknodat => self.make_node(process, a[0], a[1], a[2]),
            libc::SYS_rmdir => {
                let flags = libc::AT_REMOVEDIR as u64;
                self.unlink(process, libc::AT_FDCWD as u64, a[0], flags)
            }
            libc::SYS_unlink => self.unlink(process, libc::AT_FDCWD as u64, a[0], 0),
            libc::SYS_unlinkat => self.unlink(process, a[0], a[1], a[2]),
            libc::SYS_rename => {
                let here = libc::AT_FDCWD as u64;
                self.rename(process, here, a[0], here, a[1], 0)
            }
            libc::SYS_renameat => self.rename(process, a[0], a[1], a[2], a[3], 0),
            libc::SYS_renameat2 => self.rename(process, a[0], a[1], a[2], a[3], a[4]),
            libc::SYS_symlink => self.make_link(process, a[0], libc::AT_FDCWD as u64, a[1]),
            libc::SYS_symlinkat => self.make_link(process, a[0], a[1], a[2]),
            libc::SYS_chmod => self.chmod(process, libc::AT_FDCWD as u64, a[0], a[1]),
            libc::SYS_fchmodat => self.chmod(process, a[0], a[1], a[2]),
            libc::SYS_fchmod => self.fchmod(a[0], a[1]),
            libc::SYS_utime => {
                let times = (a[1], Times::Seconds);
                self.set_times(process, libc::AT_FDCWD as u64, a[0], times, 0)
            }
            libc::SYS_utimes => {
                let times = (a[1], Times::Micro);
                self.set_times(process, libc::AT_FDCWD as u64, a[0], times, 0)
            }
            libc::SYS_futimesat => self.set_times(process, a[0], a[1], (a[2], Times::Micro), 0),
            libc::SYS_utimensat => self.set_times(process, a[0], a[1], (a[2], Times::Nano), a[3]),
            libc::SYS_chown => self.chown(process, libc::AT_FDCWD as u64, a[0], (a[1], a[2]), 0),
            libc::SYS_lchown => {
                let flags = libc::AT_SYMLINK_NOFOLLOW as u64;
                self.chown(process, libc::AT_FDCWD as u64, a[0], (a[1], a[2]), flags)
            }
            libc::SYS_fchownat => self.chown(process, a[0], a[1], (a[2], a[3]), a[4]),
            libc::SYS_fchown => self.fchown(a[0], a[1], a[2]),
            libc::SYS_link => {
                let here = libc::AT_FDCWD as u64;
                self.link(process, (here, a[0]), (here, a[1]), 0)
            }
            libc::SYS_linkat => self.link(process, (a[0], a[1]), (a[2], a[3]), a[4]),
            libc::SYS_truncate => self.truncate_path(process, a[0], a[1]),
            libc::SYS_fallocate => self.allocate(a[0], a[1], a[2], a[3]),
            libc::SYS_statfs => self.file_system(process, a[0], a[1]),
            libc::SYS_fstatfs => self.file_system_of(process, a[0], a[1]),
            libc::SYS_umask => self.set_umask(a[0]),

            libc::SYS_mmap => {
                let [at, len, protection, flags, descriptor, offset] = a;
                self.map(process, &[at, len, readable(protection), flags, descriptor, offset])
            }
            libc::SYS_munmap => self.unmap(a[0], a[1]),
            libc::SYS_msync => self.sync_memory(a[0], a[1], a[2]),
            libc::SYS_shmget => self.segment(a[0], a[1], a[2]),
            libc::SYS_shmat => self.attach(a[0], a[1], a[2]),
            libc::SYS_shmdt => self.detach(a[0]),
            libc::SYS_shmctl => self.control_segment(process, a[0], a[1], a[2]),
            libc::SYS_mprotect => self.protect(a[0], a[1], readable(a[2])),
            libc::SYS_madvise => self.advise(a[0], a[1], a[2]),
            libc::SYS_mremap => self.remap(a[0], a[1], a[2], a[3]),
            libc::SYS_brk => self.brk(a[0]),

            libc::SYS_clock_gettime => self.clock(process, a[0], a[1]),
            libc::SYS_clock_getres => self.clock_step(process, a[0], a[1]),
            libc::SYS_gettimeofday => self.time_of_day(process, a[0], a[1]),
            libc::SYS_time => self.seconds(process, a[0]),
            libc::SYS_nanosleep => self.sleep(process, libc::CLOCK_MONOTONIC as u64, 0, a[0]),
            libc::SYS_clock_nanosleep => self.sleep(process, a[0], a[1], a[2]),
            libc::SYS_futex => self.futex(process, &a),
            libc::SYS_alarm => self.alarm(a[0]),
            libc::SYS_setitimer => self.interval(process, a[0], Some(a[1]), a[2]),
            libc::SYS_timer_create => self.make_timer(process, a[0], a[1], a[2]),
            libc::SYS_timer_settime => self.set_bell(process, a[0], a[1], a[2], a[3]),
            libc::SYS_timer_gettime => self.bell_left(process, a[0], a[1]),
            libc::SYS_timer_getoverrun => self.bell_overrun(a[0]),
            libc::SYS_timer_delete => self.remove_bell(a[0]),
            libc::SYS_getitimer => self.interval(process, a[0], None, a[1]),

            libc::SYS_exit => self.exit_thread(process, a[0]),
            libc::SYS_exit_group => Ok(Outcome::End(End::Exit(a[0] as i32 & 0xff))),
            libc::SYS_clone if a[0] as i32 & libc::CLONE_THREAD == 0 => self.fork(process, &a),
            libc::SYS_clone => self.clone_thread(process, &a),
            libc::SYS_fork => self.fork(process, &[libc::SIGCHLD as u64, 0, 0, 0, 0, 0]),
            libc::SYS_vfork => {
                let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
                self.fork(process, &[flags as u64, 0, 0, 0, 0, 0])
            }
            libc::SYS_execve => self.exec(process, libc::AT_FDCWD as u64, a[0], (a[1], a[2]), 0),
            libc::SYS_execveat => self.exec(process, a[0], a[1], (a[2], a[3]), a[4]),
            libc::SYS_kill => self.kill(a[0], a[1]),
            libc::SYS_tkill => self.kill_thread(None, a[0], a[1]),
            libc::SYS_tgkill => self.kill_thread(Some(a[0]), a[1], a[2]),
            libc::SYS_rt_sigqueueinfo => self.queue(process, (a[0], None), a[1], a[2]),
            libc::SYS_rt_tgsigqueueinfo => self.queue(process, (a[0], Some(a[1])), a[2], a[3]),
            libc::SYS_pidfd_open => self.process_descriptor(a[0], a[1]),
            libc::SYS_pidfd_send_signal => self.send_to_meant(process, a[0], a[1], a[2], a[3]),
            libc::SYS_arch_prctl => self.set_base(process, a[0], a[1]),
            libc::SYS_getpid => Ok(Outcome::Value(self.state.family.own.id.into())),
            libc::SYS_getpgrp => self.kinship(0, false),
            libc::SYS_getpgid => self.kinship(a[0], false),
            libc::SYS_getsid => self.kinship(a[0], true),
            libc::SYS_setpgid => self.set_group(a[0], a[1]),
            libc::SYS_setsid => self.set_session(),
            libc::SYS_gettid => Ok(Outcome::Value(self.state.threads.current_id().into())),
            libc::SYS_set_tid_address => self.set_cleared(a[0]),
            libc::SYS_getppid => Ok(Outcome::Value(self.state.family.own.parent.into())),
            libc::SYS_getuid | libc::SYS_geteuid | libc::SYS_getgid | libc::SYS_getegid => {
                Ok(Outcome::Value(process_calls::USER))
            }
            libc::SYS_getresuid | libc::SYS_getresgid => self.identities(process, &a),
            libc::SYS_getgroups => Ok(Outcome::Value(0)),
            libc::SYS_set_robust_list => self.robust(a[1]),
            libc::SYS_sched_yield => self.give_way(),
            libc::SYS_rt_sigaction => self.handler(process, a[0], a[1], a[2], a[3]),
            libc::SYS_rt_sigprocmask => self.block(process, a[0], a[1], a[2], a[3]),
            libc::SYS_rt_sigpending => self.pending_signals(process, a[0], a[1]),
            libc::SYS_rt_sigreturn => self.leave(process),
            libc::SYS_rt_sigsuspend => self.suspend(process, a[0], a[1]),
            libc::SYS_rt_sigtimedwait => self.wait_signal(process, a[0], a[1], a[2], a[3]),
            libc::SYS_pause => self.suspend(process, 0, 8),
            libc::SYS_sigaltstack => self.alternate(process, a[0], a[1]),
            libc::SYS_wait4 if a[2] as u32 & !WAIT_FLAGS != 0 => Err(Errno::INVAL.into()),
            libc::SYS_wait4 => self.wait_child(process, a[0], a[1], a[2], a[3]),
            libc::SYS_waitid => self.wait_id(process, &a),
            libc::SYS_uname => self.names(process, a[0]),
            libc::SYS_sysinfo => self.system(process, a[0]),
            libc::SYS_prlimit64 => self.limit(process, a[0], a[1], a[2], a[3]),
            libc::SYS_getrlimit => self.limit(process, 0, a[0], 0, a[1]),
            libc::SYS_setrlimit => self.limit(process, 0, a[0], a[1], 0),
            libc::SYS_getrusage => self.usage(process, a[0], a[1]),
            libc::SYS_times => self.times(process, a[0]),
            libc::SYS_sched_getaffinity => self.processors(process, a[0], a[1], a[2]),
            libc::SYS_getcpu => self.processor(process, a[0], a[1]),
            libc::SYS_prctl => self.process_control(process, &a),
            libc::SYS_setuid | libc::SYS_setgid => self.become_user(&a[..1]),
            libc::SYS_setreuid | libc::SYS_setregid => self.become_user(&a[..2]),
            libc::SYS_setresuid | libc::SYS_setresgid => self.become_user(&a[..3]),
            libc::SYS_setgroups => Err(Errno::PERM.into()),
            libc::SYS_capget => self.capabilities(process, a[0], a[1]),
            libc::SYS_capset => self.set_capabilities(process, a[0], a[1]),
            // Extended attributes: files have none, and take none.
            libc::SYS_setxattr..=libc::SYS_fremovexattr => Err(Errno::OPNOTSUPP.into()),
            number => self.unknown(number),
        }
    }

    /// A call that is not served.
    fn unknown(&mut self, number: i64) -> Served {
        *self.unserved.entry(number).or_default() += 1;
        Err(Errno::NOSYS.into())
    }
}

/// A protection as this processor has it: what can be written can be read.
fn readable(protection: u64) -> u64 {
    let writes = protection & libc::PROT_WRITE as u64 != 0;
    if writes { protection | libc::PROT_READ as u64 } else { protection }
}

/// What `wait4` knows: `WNOHANG`, `WUNTRACED`, `WCONTINUED`, and which kinds of children.
const WAIT_FLAGS: u32 = 0xe000_000b;

/// Whether `statx` knows no such flags, or no such mask.
fn statx_refused(flags: u64, mask: u64) -> bool {
    let known = libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT | libc::AT_EMPTY_PATH | 0x6000;
    // Synchronised with a server that there is not, and not: not both.
    flags as i32 & !known != 0 || flags & 0x6000 == 0x6000 || mask as u32 & 1 << 31 != 0
}

const DONE: Outcome = Outcome::Value(0);
