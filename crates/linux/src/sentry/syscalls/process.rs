//! System calls that make processes, run other programs in them and wait for them.

use afresh_files::Kind;
use afresh_snapshot::{OutputSource, OutputStream};
use rustix::io::Errno;

use crate::exec_command::ExecCommand;
use crate::platform::{GUEST, Process};
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::fs::proc_files::ResolvedPath;
use crate::sentry::kernel::cpu_time;
use crate::sentry::kernel::fork_request::ForkRequest;
use crate::sentry::kernel::identity::FIRST;
use crate::sentry::kernel::process_info::ChildEvent;
use crate::sentry::kernel::shared_parts::SharedPart;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::threads::{Thread, Wait, WaitReason};
use crate::sentry::kernel::tracing::{EVENT_CLONE, EVENT_FORK, EVENT_VFORK};
use crate::sentry::kernel::users::REAL;
use crate::sentry::kernel::wait_options::{WaitOptions, WaitTarget};
use crate::sentry::mm::user_memory::{PageReader, copy_out, path_in};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::AT_FDCWD;

/// Arguments and variables that a program may be given, and bytes of all: a quarter of its stack.
const STRINGS: usize = 1 << 18;
/// Longest of them.
const MAX_ARGUMENT: usize = 128 << 10;
const BYTES: usize = (crate::sentry::STACK_LEN / 4) as usize;

/// Flags of `clone` for processes that are served.
const SERVED: i32 = libc::CLONE_VM
    | libc::CLONE_VFORK
    | libc::CLONE_PIDFD
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_SETTID
    | libc::CLONE_CHILD_CLEARTID
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_SYSVSEM
    | CLONE_IO
    | libc::CLONE_UNTRACED
    | libc::CLONE_NEWUSER;
/// Its type in `libc` differs.
const CLONE_IO: i32 = 0x8000_0000_u32 as i32;

/// Options of `wait4`: `WNOHANG`, `WUNTRACED`, `WCONTINUED`, and the kinds of children.
const WAIT_FLAGS: u32 = 0xe000_000b;

impl Sentry {
    /// A new process: `clone` without the flags of a thread.
    pub(in crate::sentry) fn clone_process(
        &mut self,
        process: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        if let Some(Wait { reason: WaitReason::Borrower(child), .. }) = self.resumed {
            self.note_grown(child);
            return Ok(SyscallControl::Value(child.into()));
        }
        let [flags, stack, parent, child, base, _] = *a;
        let flags = flags as i32;
        let waits = flags & libc::CLONE_VFORK != 0;
        let copies = flags & libc::CLONE_VM == 0;
        self.check_namespace_flags(flags)?;
        // The lowest byte is the signal at the child's end.
        if flags & !SERVED & !0xff != 0 {
            return self.refuse_unknown(libc::SYS_clone);
        }
        if flags & libc::CLONE_SIGHAND != 0 && copies {
            return Err(Errno::INVAL.into());
        }
        let described = flags & libc::CLONE_PIDFD != 0;
        if described {
            // Both are stored at one address.
            if flags & libc::CLONE_PARENT_SETTID != 0 {
                return Err(Errno::INVAL.into());
            }
            self.state.table.check_described_fork()?;
        }
        let base = (flags & libc::CLONE_SETTLS != 0).then_some(base);
        if base.is_some_and(|base| base >= GUEST.end) {
            return Err(Errno::PERM.into());
        }
        let context = process.context().child((stack != 0).then_some(stack), base);
        let current = self.state.current().threads.current();
        let thread = Thread {
            context: Some(context),
            wait: None,
            masked: None,
            pending: Default::default(),
            cleared: 0,
            robust: 0,
            spent: 0,
            ..current.clone()
        };
        let enters = flags & libc::CLONE_NEWUSER != 0;
        if enters {
            self.change().make_room_for_namespace()?;
        }
        let id = self.change().add_child(thread, copies)?;
        if enters {
            self.change().enter_new_namespace(id)?;
        }
        self.change().share_parts(id, flags);
        if flags & libc::CLONE_PARENT_SETTID != 0 {
            // As in Linux, a place that cannot be written is the guest's loss.
            let _ = process.write(parent, &id.to_le_bytes())?;
        }
        if flags & libc::CLONE_UNTRACED == 0 {
            let event = match flags & 0xff {
                _ if waits => EVENT_VFORK,
                libc::SIGCHLD => EVENT_FORK,
                _ => EVENT_CLONE,
            };
            self.note_new(event, id, id);
        }
        let mut descriptor = None;
        // There is room: an error would leave a child without a process of the host.
        if described && let Ok(SyscallControl::Value(number)) = self.sys_pidfd_open(id.into(), 0) {
            let _ = process.write(parent, &(number as u32).to_le_bytes())?;
            descriptor = Some(number);
        }
        let child_tid_at = (flags & libc::CLONE_CHILD_SETTID != 0).then_some(child);
        Ok(SyscallControl::Fork(ForkRequest {
            id,
            copies,
            waits: waits && !copies,
            child_tid_at,
            descriptor,
        }))
    }

    /// `clone(2)`: threads share all parts, and processes end with the one that their memory began
    /// with. Namespaces are those of users. `CLONE_SYSVSEM` and `CLONE_IO` share nothing, and other
    /// flags are `ENOSYS`.
    pub(in crate::sentry) fn sys_clone(
        &mut self,
        process: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        match a[0] as i32 & libc::CLONE_THREAD {
            0 => self.clone_process(process, a),
            _ if a[0] as i32 & libc::CLONE_NEWUSER != 0 => Err(Errno::INVAL.into()),
            _ => self.clone_thread(process, a),
        }
    }

    /// `fork(2)`, as on Linux.
    pub(in crate::sentry) fn sys_fork(&mut self, process: &mut Process) -> SyscallResult {
        self.clone_process(process, &[libc::SIGCHLD as u64, 0, 0, 0, 0, 0])
    }

    /// `vfork(2)`, as on Linux.
    pub(in crate::sentry) fn sys_vfork(&mut self, process: &mut Process) -> SyscallResult {
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        self.clone_process(process, &[flags as u64, 0, 0, 0, 0, 0])
    }

    /// `execveat(2)`: set-user-ID bits have no effect.
    pub(in crate::sentry) fn sys_execveat(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        strings: (u64, u64),
        flags: u64,
    ) -> SyscallResult {
        let (flags, known) = (flags as i32, libc::AT_EMPTY_PATH | libc::AT_SYMLINK_NOFOLLOW);
        if flags & !known != 0 {
            return Err(Errno::INVAL.into());
        }
        // The program gets its own descriptors.
        self.state.table.check_unshare(self.state.processes.current_id())?;
        let mut path = path_in(process, path)?;
        let is_descriptor = path.is_empty() && flags & libc::AT_EMPTY_PATH != 0;
        if is_descriptor {
            self.state.table.get(at)?;
            path = format!("/proc/self/fd/{}", at as u32).into_bytes();
        } else if flags & libc::AT_SYMLINK_NOFOLLOW != 0 {
            let named = self.reach(at, &path, |walk| walk.follow(false))?;
            let is_link = |place: &afresh_files::ResolvedName| {
                place.found.is_some_and(|(_, kind)| kind == Kind::Link)
            };
            match named {
                ResolvedPath::Place(place) if !is_link(&place) => {}
                _ => return Err(Errno::LOOP.into()),
            }
        }
        let (path, from) = self.program_at(at, path, is_descriptor)?;
        let mut left = BYTES;
        let mut pages = PageReader::new(process);
        let args = strings_in(&mut pages, strings.0, &mut left)?;
        let env = strings_in(&mut pages, strings.1, &mut left)?;
        Ok(SyscallControl::Exec(Box::new(ExecCommand { path, from, args, env })))
    }

    /// `execve(2)`: as `execveat` from the current directory.
    pub(in crate::sentry) fn sys_execve(
        &mut self,
        process: &Process,
        path: u64,
        argv: u64,
        envp: u64,
    ) -> SyscallResult {
        self.sys_execveat(process, AT_FDCWD, path, (argv, envp), 0)
    }

    /// `wait4(2)`: the usage of a child is its CPU time.
    pub(in crate::sentry) fn sys_wait4(
        &mut self,
        process: &mut Process,
        target: u64,
        status: u64,
        options: u64,
        usage: u64,
    ) -> SyscallResult {
        if options as u32 & !WAIT_FLAGS != 0 {
            return Err(Errno::INVAL.into());
        }
        let children = match target as i32 {
            i32::MIN => return Err(Errno::SRCH.into()),
            -1 => WaitTarget::Any,
            0 => WaitTarget::Group(self.state.current().info.group),
            group @ ..0 => WaitTarget::Group(group.unsigned_abs()),
            one => WaitTarget::One(one as u32),
        };
        let flag = |flag: i32| options as i32 & flag != 0;
        let asked = WaitOptions {
            target: children,
            ended: true,
            stopped: flag(libc::WUNTRACED),
            continued: flag(libc::WCONTINUED),
        };
        let Some((id, ended)) = self.state.processes.child_ended(children) else {
            let Some((id, news)) = self.state.processes.child_changed(asked) else {
                return self.wait_longer(asked, options);
            };
            if status != 0 {
                copy_out(process, status, &news.status().to_le_bytes())?;
            }
            if usage != 0 {
                let spent = self.state.processes.spent_by(id);
                let system = self.state.system_times.sum_of(id);
                copy_out(process, usage, &cpu_time::usage(spent, system, 0))?;
            }
            self.forget_news(id, news);
            return Ok(SyscallControl::Value(id.into()));
        };
        if status != 0 {
            copy_out(process, status, &ended.status.to_le_bytes())?;
        }
        if usage != 0 {
            let system = self.state.system_times.sum_of(id);
            copy_out(process, usage, &cpu_time::usage(ended.spent, system, 0))?;
        }
        self.change().reap_child(id);
        Ok(SyscallControl::Value(id.into()))
    }

    /// `waitid(2)`: the usage of a child is its CPU time.
    pub(in crate::sentry) fn sys_waitid(
        &mut self,
        process: &mut Process,
        &[idtype, id, infop, options, rusage, _]: &[u64; 6],
    ) -> SyscallResult {
        let children = match idtype as u32 {
            libc::P_ALL => WaitTarget::Any,
            libc::P_PID => WaitTarget::One(id as u32),
            libc::P_PIDFD => WaitTarget::One(self.process_meant(id)?),
            libc::P_PGID if id == 0 => WaitTarget::Group(self.state.current().info.group),
            libc::P_PGID => WaitTarget::Group(id as u32),
            _ => return Err(Errno::INVAL.into()),
        };
        const EVENTS: i32 = libc::WEXITED | libc::WSTOPPED | libc::WCONTINUED;
        const CHILDREN: i32 = libc::__WNOTHREAD | libc::__WALL | libc::__WCLONE;
        let known = EVENTS | CHILDREN | libc::WNOHANG | libc::WNOWAIT;
        if options as i32 & EVENTS == 0 || options as i32 & !known != 0 {
            return Err(Errno::INVAL.into());
        }
        let flag = |flag: i32| options as i32 & flag != 0;
        let asked = WaitOptions {
            target: children,
            ended: flag(libc::WEXITED),
            stopped: flag(libc::WSTOPPED),
            continued: flag(libc::WCONTINUED),
        };
        let gone = self.state.processes.child_ended(children).filter(|_| asked.ended);
        let changed = self.state.processes.child_changed(asked);
        let news = changed.map(|(_, news)| news);
        let found = match gone {
            Some((id, ended)) => Some(match ended.status & 0x7f {
                0 => (id, libc::CLD_EXITED, ended.status >> 8),
                signal => (id, libc::CLD_KILLED, signal),
            }),
            None => changed.map(|(id, news)| match news {
                ChildEvent::Stopped(signal) => (id, libc::CLD_STOPPED, signal.into()),
                ChildEvent::Continued => (id, libc::CLD_CONTINUED, libc::SIGCONT),
                ChildEvent::Traced(code) => (id, libc::CLD_TRAPPED, code as i32),
            }),
        };
        let Some((id, code, status)) = found else {
            let own = self.state.processes.has_child(children);
            if own && idtype as u32 == libc::P_PIDFD && options & libc::WNOHANG as u64 == 0 {
                // One that does not wait has no wait done through it.
                let flags = self.state.table.get(id)?.flags;
                if flags & libc::O_NONBLOCK as u32 != 0 {
                    return Err(Errno::AGAIN.into());
                }
            }
            let outcome = self.wait_longer(asked, options)?;
            if infop != 0 && matches!(outcome, SyscallControl::Value(0)) {
                copy_out(process, infop, &[0; 128])?;
            }
            return Ok(outcome);
        };
        let has_gone = gone.is_some();
        if infop != 0 {
            let bytes = StructBuilder::default()
                .int(libc::SIGCHLD as u32)
                .int(0)
                .int(code as u32)
                .int(0)
                .int(id)
                .int(self.state.seen_ids(id).user[REAL])
                .int(status as u32)
                .zeros(100);
            copy_out(process, infop, &bytes.0)?;
        }
        if rusage != 0 {
            let spent = self.state.processes.spent_by(id);
            let system = self.state.system_times.sum_of(id);
            copy_out(process, rusage, &cpu_time::usage(spent, system, 0))?;
        }
        if options & libc::WNOWAIT as u64 == 0 {
            match has_gone {
                true => self.change().reap_child(id),
                false => self.forget_news(id, news.unwrap_or(ChildEvent::Continued)),
            }
        }
        Ok(ZERO)
    }

    /// The parent of `id`, or its tracer, was notified.
    fn forget_news(&mut self, id: u32, news: ChildEvent) {
        if let ChildEvent::Traced(_) = news {
            if let Some(trace) = self.change().processes.tracing.get_mut(id) {
                trace.reported = true;
            }
            return;
        }
        if let Some(info) = self.change().processes.info_mut(id) {
            info.news = None;
        }
    }

    fn wait_longer(&self, asked: WaitOptions, options: u64) -> SyscallResult {
        if !self.state.processes.may_change(asked) {
            return Err(Errno::CHILD.into());
        }
        if options & libc::WNOHANG as u64 != 0 {
            return Ok(ZERO);
        }
        Ok(SyscallControl::Wait(Wait::new(WaitReason::Children(asked), None)))
    }

    /// The source of output that the current process writes to `stream`.
    pub(in crate::sentry) fn output_source(&self, stream: OutputStream) -> OutputSource {
        let session = self.state.current().info.session;
        OutputSource::new(stream, (session != FIRST).then_some(session))
    }
}

impl Kernel {
    /// Has a new child share parts with the current process, as the flags of `clone` say. It may
    /// have the same parent instead.
    fn share_parts(&mut self, child: u32, flags: i32) {
        let own = self.processes.current_id();
        if flags & libc::CLONE_PARENT != 0 {
            let parent = self.processes.current.info.parent;
            if let Some(info) = self.processes.info_mut(child) {
                info.parent = parent;
            }
        }
        if flags & libc::CLONE_FILES != 0 {
            self.table.share_with_child(child, own);
        }
        for (flag, part) in [
            (libc::CLONE_FS, SharedPart::Directories),
            (libc::CLONE_SIGHAND, SharedPart::Handlers),
            (CLONE_IO, SharedPart::Io),
            (libc::CLONE_SYSVSEM, SharedPart::Undo),
        ] {
            if flags & flag != 0 {
                self.shared_parts.share(part, child, own);
            }
        }
    }
}

/// Copies in a list of strings. Consecutive strings and pointers of one page are read together: a
/// list may have [`STRINGS`] of them, and each read is a call.
fn strings_in(
    pages: &mut PageReader<'_>,
    at: u64,
    left: &mut usize,
) -> SyscallResult<Vec<Vec<u8>>> {
    let mut strings = Vec::new();
    if at == 0 {
        return Ok(strings);
    }
    loop {
        let address = pages.word(at.wrapping_add(8 * strings.len() as u64))?;
        if address == 0 {
            return Ok(strings);
        }
        let string = pages.string(address, MAX_ARGUMENT.min(*left))?;
        *left = left.checked_sub(string.len() + 9).ok_or(Errno::TOOBIG)?;
        strings.push(string);
        if strings.len() > STRINGS {
            return Err(Errno::TOOBIG.into());
        }
    }
}
