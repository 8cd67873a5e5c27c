//! The personality: what the guest takes for Linux.
//!
//! All that a guest can change but memory and registers is [`State`]: plain data that is cloned when the guest is warm and compared
//! when a reset is verified. Every system call is served from it, or answered with an error and counted. Arguments in
//! the guest's memory are copied in once, and nothing that is found there is followed twice.

mod attribute_calls;
mod clock_calls;
mod devices;
mod encode;
mod file_calls;
mod ground;
mod layout;
mod memory_calls;
mod name_calls;
mod packed;
mod process_calls;
mod table;
mod transfer_calls;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use afresh_files::{Node, Refused, Tree};
use rustix::io::Errno;

use crate::platform::{Call, PlatformError, Process};
use attribute_calls::Times;
pub(crate) use ground::{bytes, plant, prepare};
pub(crate) use layout::{Change, Layout, PAGE, STACK_LEN, protect_order, unmap_order};
pub(crate) use packed::{Packed, damaged};
pub(crate) use process_calls::USER;
use table::Table;

/// Longest path, with its end.
const PATH_LEN: usize = 4096;

/// Everything of a guest's that is not memory or registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) layout: Layout,
    pub(crate) tree: Tree,
    /// Directories of the host's that the tree lies over.
    layers: Arc<[PathBuf]>,
    pub(crate) table: Table,
    pub(crate) directory: Node,
    umask: u32,
    /// Handlers by signal, as the program gave them. None is ever called.
    handlers: BTreeMap<u64, [u8; 32]>,
    blocked: u64,
    signal_stack: [u64; 3],
    name: [u8; 16],
}

impl State {
    /// The state of a program that starts at the top of `tree`, which lies over `layers`.
    pub(crate) fn new(layout: Layout, tree: Tree, layers: Vec<PathBuf>) -> Self {
        Self {
            layout,
            tree,
            layers: layers.into(),
            table: Table::new(),
            directory: Tree::ROOT,
            umask: 0o022,
            handlers: BTreeMap::new(),
            blocked: 0,
            signal_stack: [0, 2, 0],
            name: *b"guest\0\0\0\0\0\0\0\0\0\0\0",
        }
    }
}

/// What goes in and out of a call.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(crate) input: Vec<u8>,
    /// Bytes of the input that were read.
    pub(crate) taken: usize,
    pub(crate) output: Vec<u8>,
    /// The end of what was written to the standard error.
    pub(crate) messages: Vec<u8>,
}

/// How a guest ended, in the middle of a call or before it was warm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// It exited with this status.
    Exit(i32),
    /// It sent itself this signal, or made a system call that ends in one.
    Signal(i32),
    /// It waits for what can never happen.
    Deadlock,
    /// It wrote more than it may.
    Output,
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Exit(status) => write!(f, "exited with status {status}"),
            End::Signal(number) => write!(f, "ended by signal {number}"),
            End::Deadlock => f.write_str("waits for what can never happen"),
            End::Output => f.write_str("wrote more output than it may"),
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
    /// It returns this after a while.
    Later(u64, Duration),
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
}

impl Person {
    pub(crate) fn new(state: Arc<State>, output_limit: usize) -> Self {
        Self { state, streams: Streams::default(), output_limit, unserved: BTreeMap::new() }
    }

    /// The state, to be changed.
    fn change(&mut self) -> &mut State {
        Arc::make_mut(&mut self.state)
    }

    /// Serves one call. An error of the guest's is a value, too.
    pub(crate) fn serve(
        &mut self,
        process: &mut Process,
        call: &Call,
    ) -> Result<Outcome, PlatformError> {
        match self.dispatch(process, call) {
            Ok(outcome) => Ok(outcome),
            Err(Stop::Errno(errno)) => {
                Ok(Outcome::Value((-i64::from(errno.raw_os_error())) as u64))
            }
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
            libc::SYS_getrandom => self.random(process, a[0], a[1]),

            libc::SYS_open => self.open(process, libc::AT_FDCWD as u64, a[0], a[1], a[2]),
            libc::SYS_creat => {
                let flags = libc::O_CREAT | libc::O_TRUNC | libc::O_WRONLY;
                self.open(process, libc::AT_FDCWD as u64, a[0], flags as u64, a[1])
            }
            libc::SYS_openat => self.open(process, a[0], a[1], a[2], a[3]),
            libc::SYS_close => self.close(a[0]),
            libc::SYS_close_range => self.close_range(a[0], a[1], a[2]),
            libc::SYS_lseek => self.seek(a[0], a[1] as i64, a[2]),
            libc::SYS_dup => self.duplicate(a[0]),
            libc::SYS_dup2 => self.replace(a[0], a[1], 0, true),
            libc::SYS_dup3 => self.replace(a[0], a[1], a[2], false),
            libc::SYS_fcntl => self.control(a[0], a[1], a[2]),
            libc::SYS_ioctl => self.device(a[0], a[1]),
            libc::SYS_ftruncate => self.truncate(a[0], a[1]),
            libc::SYS_fsync | libc::SYS_fdatasync | libc::SYS_fadvise64 | libc::SYS_flock => {
                self.flush(a[0])
            }
            libc::SYS_poll => self.poll(process, a[0], a[1]),
            libc::SYS_ppoll => self.poll(process, a[0], a[1]),
            libc::SYS_select | libc::SYS_pselect6 => self.select(process, a[0], a[1], a[2], a[3]),

            libc::SYS_stat => self.stat(process, libc::AT_FDCWD as u64, a[0], a[1], 0),
            libc::SYS_lstat => {
                let flags = libc::AT_SYMLINK_NOFOLLOW as u64;
                self.stat(process, libc::AT_FDCWD as u64, a[0], a[1], flags)
            }
            libc::SYS_fstat => self.fstat(process, a[0], a[1]),
            libc::SYS_newfstatat => self.stat(process, a[0], a[1], a[2], a[3]),
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

            libc::SYS_mmap => self.map(process, &a),
            libc::SYS_munmap => self.unmap(a[0], a[1]),
            libc::SYS_mprotect => self.protect(a[0], a[1], a[2]),
            libc::SYS_madvise => self.advise(a[0], a[1], a[2]),
            libc::SYS_mremap => self.remap(a[0], a[1], a[2], a[3]),
            libc::SYS_brk => self.brk(a[0]),

            libc::SYS_clock_gettime => self.clock(process, a[0], a[1]),
            libc::SYS_clock_getres => self.clock_step(process, a[0], a[1]),
            libc::SYS_gettimeofday => self.time_of_day(process, a[0]),
            libc::SYS_time => self.seconds(process, a[0]),
            libc::SYS_nanosleep => self.sleep(process, libc::CLOCK_MONOTONIC as u64, 0, a[0]),
            libc::SYS_clock_nanosleep => self.sleep(process, a[0], a[1], a[2]),
            libc::SYS_futex => self.futex(process, a[0], a[1], a[2], a[3]),

            libc::SYS_exit | libc::SYS_exit_group => {
                Ok(Outcome::End(End::Exit(a[0] as i32 & 0xff)))
            }
            libc::SYS_kill | libc::SYS_tkill => self.signal(a[0], a[1]),
            libc::SYS_tgkill => self.signal(a[0], a[2]),
            libc::SYS_arch_prctl => self.set_base(process, a[0], a[1]),
            libc::SYS_getpid
            | libc::SYS_gettid
            | libc::SYS_set_tid_address
            | libc::SYS_getpgrp
            | libc::SYS_getpgid
            | libc::SYS_getsid => Ok(Outcome::Value(process_calls::PID)),
            libc::SYS_getppid => Ok(Outcome::Value(1)),
            libc::SYS_getuid | libc::SYS_geteuid | libc::SYS_getgid | libc::SYS_getegid => {
                Ok(Outcome::Value(process_calls::USER))
            }
            libc::SYS_getresuid | libc::SYS_getresgid => self.identities(process, &a),
            libc::SYS_getgroups => Ok(Outcome::Value(0)),
            libc::SYS_set_robust_list | libc::SYS_sched_yield => Ok(Outcome::Value(0)),
            libc::SYS_rt_sigaction => self.handler(process, a[0], a[1], a[2], a[3]),
            libc::SYS_rt_sigprocmask => self.block(process, a[0], a[1], a[2], a[3]),
            libc::SYS_sigaltstack => self.alternate(process, a[0], a[1]),
            libc::SYS_uname => self.names(process, a[0]),
            libc::SYS_sysinfo => self.system(process, a[0]),
            libc::SYS_prlimit64 => self.limit(process, a[1], a[2], a[3]),
            libc::SYS_getrlimit => self.limit(process, a[0], 0, a[1]),
            libc::SYS_getrusage => self.usage(process, a[1]),
            libc::SYS_times => self.times(process, a[0]),
            libc::SYS_sched_getaffinity => self.processors(process, a[0], a[1], a[2]),
            libc::SYS_getcpu => self.processor(process, a[0], a[1]),
            libc::SYS_prctl => self.process_control(process, a[0], a[1]),
            libc::SYS_mknod | libc::SYS_mknodat => Err(Errno::PERM.into()),
            // Extended attributes: files have none, and take none.
            libc::SYS_setxattr..=libc::SYS_fremovexattr => Err(Errno::OPNOTSUPP.into()),
            number => {
                *self.unserved.entry(number).or_default() += 1;
                Err(Errno::NOSYS.into())
            }
        }
    }
}

// What every call needs: the guest's memory, bytes in and out.

fn copy_in(process: &Process, address: u64, len: usize) -> Served<Vec<u8>> {
    let mut bytes = vec![0; len];
    if process.read(address, &mut bytes)? { Ok(bytes) } else { Err(Errno::FAULT.into()) }
}

fn copy_out(process: &mut Process, address: u64, bytes: &[u8]) -> Served<()> {
    if process.write(address, bytes)? { Ok(()) } else { Err(Errno::FAULT.into()) }
}

fn word_in(process: &Process, address: u64) -> Served<u64> {
    let mut bytes = [0; 8];
    if process.read(address, &mut bytes)? {
        Ok(u64::from_le_bytes(bytes))
    } else {
        Err(Errno::FAULT.into())
    }
}

/// A path: bytes up to a zero, at most a page's worth.
fn path_in(process: &Process, address: u64) -> Served<Vec<u8>> {
    let mut path = Vec::new();
    while path.len() < PATH_LEN {
        let at = address.wrapping_add(path.len() as u64);
        // Up to the end of a page: what lies behind it may not be there.
        let len = (PAGE - at % PAGE).min(256).min((PATH_LEN - path.len()) as u64);
        let piece = copy_in(process, at, len as usize)?;
        if let Some(end) = piece.iter().position(|&byte| byte == 0) {
            path.extend(&piece[..end]);
            return Ok(path);
        }
        path.extend(piece);
    }
    Err(Errno::NAMETOOLONG.into())
}

const DONE: Outcome = Outcome::Value(0);
