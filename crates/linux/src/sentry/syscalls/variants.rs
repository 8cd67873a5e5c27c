//! System calls that are another call with some arguments fixed, as in Linux: `open` is `openat`
//! from the current directory.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::streams::End;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::attributes::TimeFormat;

/// The current directory, as the first argument of the `*at` calls.
const HERE: u64 = libc::AT_FDCWD as u64;
const NO_FOLLOW: u64 = libc::AT_SYMLINK_NOFOLLOW as u64;

// Opening and descriptors.
impl Sentry {
    pub(in crate::sentry) fn sys_open(
        &mut self,
        p: &Process,
        path: u64,
        flags: u64,
        mode: u64,
    ) -> SyscallResult {
        self.sys_openat(p, HERE, path, flags, mode)
    }

    pub(in crate::sentry) fn sys_creat(
        &mut self,
        p: &Process,
        path: u64,
        mode: u64,
    ) -> SyscallResult {
        let flags = libc::O_CREAT | libc::O_TRUNC | libc::O_WRONLY;
        self.sys_openat(p, HERE, path, flags as u64, mode)
    }

    pub(in crate::sentry) fn sys_close(&mut self, fd: u64) -> SyscallResult {
        self.closing(vec![fd], |sentry| sentry.close(fd))
    }

    pub(in crate::sentry) fn sys_dup2(&mut self, old: u64, new: u64) -> SyscallResult {
        if old as u32 == new as u32 {
            return self.replace(old, new, 0, true);
        }
        self.closing(vec![new], |sentry| sentry.replace(old, new, 0, true))
    }

    pub(in crate::sentry) fn sys_dup3(&mut self, old: u64, new: u64, flags: u64) -> SyscallResult {
        if old as u32 == new as u32 {
            return Err(Errno::INVAL.into());
        }
        self.closing(vec![new], |sentry| sentry.replace(old, new, flags, false))
    }

    /// `preadv2`: all of a file is in memory, so that its flags change nothing.
    pub(in crate::sentry) fn sys_preadv2(
        &mut self,
        p: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        const FLAGS: i32 = libc::RWF_HIPRI | libc::RWF_NOWAIT | libc::RWF_DSYNC | libc::RWF_SYNC;
        let [fd, vector, count, offset, _, flags] = *a;
        if flags as i32 & !FLAGS != 0 {
            return Err(Errno::OPNOTSUPP.into());
        }
        match offset {
            u64::MAX => self.sys_readv(p, fd, vector, count),
            offset => self.sys_preadv(p, fd, vector, count, offset),
        }
    }

    pub(in crate::sentry) fn sys_pwritev2(
        &mut self,
        p: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        const FLAGS: i32 = libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC;
        let [fd, vector, count, offset, _, flags] = *a;
        if flags as i32 & !FLAGS != 0 {
            return Err(Errno::OPNOTSUPP.into());
        }
        match offset {
            u64::MAX => self.sys_writev(p, fd, vector, count),
            offset => self.sys_pwritev(p, fd, vector, count, offset),
        }
    }

    /// `readahead`: nothing is read ahead.
    pub(in crate::sentry) fn sys_readahead(&mut self, fd: u64) -> SyscallResult {
        let description = self.state.table.get(fd)?;
        match description.open {
            FileObject::File(_) if description.reads() => Ok(ZERO),
            _ if !description.reads() => Err(Errno::BADF.into()),
            _ => Err(Errno::INVAL.into()),
        }
    }

    pub(in crate::sentry) fn sys_syncfs(&mut self, fd: u64) -> SyscallResult {
        if self.state.table.get(fd)?.is_path() { Err(Errno::BADF.into()) } else { Ok(ZERO) }
    }

    pub(in crate::sentry) fn sys_sync(&mut self) -> SyscallResult {
        Ok(ZERO)
    }

    /// `personality`: it is stored. That of 32 bits has `uname` name another machine.
    pub(in crate::sentry) fn sys_personality(&mut self, persona: u64) -> SyscallResult {
        let (new, old) = (persona as u32, self.state.current().info.traits.persona);
        if new != u32::MAX && new != old {
            self.change().current_mut().info.traits.persona = new;
        }
        Ok(SyscallControl::Value(old.into()))
    }

    /// `setfsuid` and `setfsgid` return the former number, whether or not it has changed: here it
    /// never does.
    pub(in crate::sentry) fn sys_setfsuid(&mut self) -> SyscallResult {
        self.sys_getuid()
    }

    pub(in crate::sentry) fn sys_setfsgid(&mut self) -> SyscallResult {
        self.sys_getgid()
    }

    pub(in crate::sentry) fn sys_fdatasync(&mut self, fd: u64) -> SyscallResult {
        self.sys_fsync(fd)
    }

    pub(in crate::sentry) fn sys_sync_file_range(
        &mut self,
        fd: u64,
        offset: u64,
        len: u64,
    ) -> SyscallResult {
        let end = offset.checked_add(len).filter(|_| offset <= i64::MAX as u64);
        if end.is_none_or(|end| end > i64::MAX as u64) {
            return Err(Errno::INVAL.into());
        }
        self.sys_fsync(fd)
    }

    pub(in crate::sentry) fn sys_epoll_create(&mut self, size: u64) -> SyscallResult {
        if size as i32 <= 0 {
            return Err(Errno::INVAL.into());
        }
        self.sys_epoll_create1(0)
    }

    pub(in crate::sentry) fn sys_epoll_pwait(
        &mut self,
        p: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        self.epoll_pwait(p, a, false)
    }

    pub(in crate::sentry) fn sys_epoll_pwait2(
        &mut self,
        p: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        self.epoll_pwait(p, a, true)
    }

    pub(in crate::sentry) fn sys_pipe(&mut self, p: &mut Process, fds: u64) -> SyscallResult {
        self.sys_pipe2(p, fds, 0)
    }

    pub(in crate::sentry) fn sys_eventfd(&mut self, count: u64) -> SyscallResult {
        self.sys_eventfd2(count, 0)
    }

    pub(in crate::sentry) fn sys_inotify_init(&mut self) -> SyscallResult {
        self.sys_inotify_init1(0)
    }

    pub(in crate::sentry) fn sys_signalfd(
        &mut self,
        p: &Process,
        fd: u64,
        mask: u64,
        size: u64,
    ) -> SyscallResult {
        self.sys_signalfd4(p, fd, mask, size, 0)
    }

    pub(in crate::sentry) fn sys_accept(
        &mut self,
        p: &mut Process,
        fd: u64,
        address: u64,
        len: u64,
    ) -> SyscallResult {
        self.sys_accept4(p, fd, address, len, 0)
    }
}

// Paths.
impl Sentry {
    pub(in crate::sentry) fn sys_stat(
        &mut self,
        p: &mut Process,
        path: u64,
        to: u64,
    ) -> SyscallResult {
        self.sys_newfstatat(p, HERE, path, to, 0)
    }

    pub(in crate::sentry) fn sys_lstat(
        &mut self,
        p: &mut Process,
        path: u64,
        to: u64,
    ) -> SyscallResult {
        self.sys_newfstatat(p, HERE, path, to, NO_FOLLOW)
    }

    pub(in crate::sentry) fn sys_access(
        &mut self,
        p: &Process,
        path: u64,
        mode: u64,
    ) -> SyscallResult {
        self.sys_faccessat2(p, HERE, path, mode, 0)
    }

    pub(in crate::sentry) fn sys_faccessat(
        &mut self,
        p: &Process,
        at: u64,
        path: u64,
        mode: u64,
    ) -> SyscallResult {
        self.sys_faccessat2(p, at, path, mode, 0)
    }

    pub(in crate::sentry) fn sys_readlink(
        &mut self,
        p: &mut Process,
        path: u64,
        to: u64,
        len: u64,
    ) -> SyscallResult {
        self.sys_readlinkat(p, HERE, path, to, len)
    }

    pub(in crate::sentry) fn sys_mkdir(
        &mut self,
        p: &Process,
        path: u64,
        mode: u64,
    ) -> SyscallResult {
        self.sys_mkdirat(p, HERE, path, mode)
    }

    pub(in crate::sentry) fn sys_mknod(
        &mut self,
        p: &Process,
        path: u64,
        mode: u64,
    ) -> SyscallResult {
        self.sys_mknodat(p, HERE, path, mode)
    }

    pub(in crate::sentry) fn sys_rmdir(&mut self, p: &Process, path: u64) -> SyscallResult {
        self.sys_unlinkat(p, HERE, path, libc::AT_REMOVEDIR as u64)
    }

    pub(in crate::sentry) fn sys_unlink(&mut self, p: &Process, path: u64) -> SyscallResult {
        self.sys_unlinkat(p, HERE, path, 0)
    }

    pub(in crate::sentry) fn sys_rename(
        &mut self,
        p: &Process,
        old: u64,
        new: u64,
    ) -> SyscallResult {
        self.sys_renameat2(p, HERE, old, HERE, new, 0)
    }

    pub(in crate::sentry) fn sys_renameat(
        &mut self,
        p: &Process,
        old_at: u64,
        old: u64,
        new_at: u64,
        new: u64,
    ) -> SyscallResult {
        self.sys_renameat2(p, old_at, old, new_at, new, 0)
    }

    pub(in crate::sentry) fn sys_symlink(
        &mut self,
        p: &Process,
        target: u64,
        path: u64,
    ) -> SyscallResult {
        self.sys_symlinkat(p, target, HERE, path)
    }

    pub(in crate::sentry) fn sys_link(&mut self, p: &Process, old: u64, new: u64) -> SyscallResult {
        self.sys_linkat(p, (HERE, old), (HERE, new), 0)
    }

    pub(in crate::sentry) fn sys_chmod(
        &mut self,
        p: &Process,
        path: u64,
        mode: u64,
    ) -> SyscallResult {
        self.sys_fchmodat(p, HERE, path, mode)
    }

    pub(in crate::sentry) fn sys_chown(
        &mut self,
        p: &Process,
        path: u64,
        user: u64,
        group: u64,
    ) -> SyscallResult {
        self.sys_fchownat(p, HERE, path, (user, group), 0)
    }

    pub(in crate::sentry) fn sys_lchown(
        &mut self,
        p: &Process,
        path: u64,
        user: u64,
        group: u64,
    ) -> SyscallResult {
        self.sys_fchownat(p, HERE, path, (user, group), NO_FOLLOW)
    }

    pub(in crate::sentry) fn sys_utime(
        &mut self,
        p: &Process,
        path: u64,
        times: u64,
    ) -> SyscallResult {
        self.set_times(p, HERE, path, (times, TimeFormat::Seconds), 0)
    }

    pub(in crate::sentry) fn sys_utimes(
        &mut self,
        p: &Process,
        path: u64,
        times: u64,
    ) -> SyscallResult {
        self.set_times(p, HERE, path, (times, TimeFormat::Micro), 0)
    }

    pub(in crate::sentry) fn sys_futimesat(
        &mut self,
        p: &Process,
        at: u64,
        path: u64,
        times: u64,
    ) -> SyscallResult {
        self.set_times(p, at, path, (times, TimeFormat::Micro), 0)
    }

    pub(in crate::sentry) fn sys_utimensat(
        &mut self,
        p: &Process,
        at: u64,
        path: u64,
        times: u64,
        flags: u64,
    ) -> SyscallResult {
        self.set_times(p, at, path, (times, TimeFormat::Nano), flags)
    }
}

// Processes, signals and time.
impl Sentry {
    pub(in crate::sentry) fn sys_clone(&mut self, p: &mut Process, a: &[u64; 6]) -> SyscallResult {
        match a[0] as i32 & libc::CLONE_THREAD {
            0 => self.clone_process(p, a),
            _ if a[0] as i32 & libc::CLONE_NEWUSER != 0 => Err(Errno::INVAL.into()),
            _ => self.clone_thread(p, a),
        }
    }

    pub(in crate::sentry) fn sys_fork(&mut self, p: &mut Process) -> SyscallResult {
        self.clone_process(p, &[libc::SIGCHLD as u64, 0, 0, 0, 0, 0])
    }

    pub(in crate::sentry) fn sys_vfork(&mut self, p: &mut Process) -> SyscallResult {
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        self.clone_process(p, &[flags as u64, 0, 0, 0, 0, 0])
    }

    pub(in crate::sentry) fn sys_execve(
        &mut self,
        p: &Process,
        path: u64,
        argv: u64,
        envp: u64,
    ) -> SyscallResult {
        self.sys_execveat(p, HERE, path, (argv, envp), 0)
    }

    pub(in crate::sentry) fn sys_exit_group(&mut self, status: u64) -> SyscallResult {
        Ok(SyscallControl::End(End::Exit(status as i32 & 0xff)))
    }

    pub(in crate::sentry) fn sys_getpid(&self) -> SyscallResult {
        Ok(SyscallControl::Value(self.state.processes.current_id().into()))
    }

    pub(in crate::sentry) fn sys_getppid(&self) -> SyscallResult {
        Ok(SyscallControl::Value(self.state.current().info.parent.into()))
    }

    pub(in crate::sentry) fn sys_gettid(&self) -> SyscallResult {
        Ok(SyscallControl::Value(self.state.current().threads.current_id().into()))
    }

    pub(in crate::sentry) fn sys_getpgrp(&self) -> SyscallResult {
        self.process_group_or_session(0, false)
    }

    pub(in crate::sentry) fn sys_getpgid(&self, pid: u64) -> SyscallResult {
        self.process_group_or_session(pid, false)
    }

    pub(in crate::sentry) fn sys_getsid(&self, pid: u64) -> SyscallResult {
        self.process_group_or_session(pid, true)
    }

    pub(in crate::sentry) fn sys_tkill(&mut self, tid: u64, signal: u64) -> SyscallResult {
        self.signal_thread(None, tid, signal)
    }

    pub(in crate::sentry) fn sys_tgkill(
        &mut self,
        pid: u64,
        tid: u64,
        signal: u64,
    ) -> SyscallResult {
        self.signal_thread(Some(pid), tid, signal)
    }

    pub(in crate::sentry) fn sys_rt_sigqueueinfo(
        &mut self,
        p: &Process,
        pid: u64,
        signal: u64,
        info: u64,
    ) -> SyscallResult {
        self.queue_signal(p, (pid, None), signal, info)
    }

    pub(in crate::sentry) fn sys_rt_tgsigqueueinfo(
        &mut self,
        p: &Process,
        pid: u64,
        tid: u64,
        signal: u64,
        info: u64,
    ) -> SyscallResult {
        self.queue_signal(p, (pid, Some(tid)), signal, info)
    }

    pub(in crate::sentry) fn sys_pause(&mut self, p: &Process) -> SyscallResult {
        // An empty set of signals, at address 0, leaves the mask as it is.
        self.sys_rt_sigsuspend(p, 0, 8)
    }

    pub(in crate::sentry) fn sys_nanosleep(&mut self, p: &Process, request: u64) -> SyscallResult {
        self.sys_clock_nanosleep(p, libc::CLOCK_MONOTONIC as u64, 0, request)
    }

    pub(in crate::sentry) fn sys_setitimer(
        &mut self,
        p: &mut Process,
        which: u64,
        new: u64,
        old: u64,
    ) -> SyscallResult {
        self.interval_timer(p, which, Some(new), old)
    }

    pub(in crate::sentry) fn sys_getitimer(
        &mut self,
        p: &mut Process,
        which: u64,
        to: u64,
    ) -> SyscallResult {
        self.interval_timer(p, which, None, to)
    }

    pub(in crate::sentry) fn sys_getrlimit(
        &mut self,
        p: &mut Process,
        resource: u64,
        to: u64,
    ) -> SyscallResult {
        self.sys_prlimit64(p, 0, resource, 0, to)
    }

    pub(in crate::sentry) fn sys_setrlimit(
        &mut self,
        p: &mut Process,
        resource: u64,
        from: u64,
    ) -> SyscallResult {
        self.sys_prlimit64(p, 0, resource, from, 0)
    }
}

// Users: a guest has one, and one group.
impl Sentry {
    pub(in crate::sentry) fn sys_getuid(&self) -> SyscallResult {
        Ok(SyscallControl::Value(self.state.user_id().into()))
    }

    pub(in crate::sentry) fn sys_geteuid(&self) -> SyscallResult {
        self.sys_getuid()
    }

    pub(in crate::sentry) fn sys_getgid(&self) -> SyscallResult {
        Ok(SyscallControl::Value(self.state.group_id().into()))
    }

    pub(in crate::sentry) fn sys_getegid(&self) -> SyscallResult {
        self.sys_getgid()
    }

    pub(in crate::sentry) fn sys_getgroups(&self, room: u64) -> SyscallResult {
        if (room as i32) < 0 { Err(Errno::INVAL.into()) } else { Ok(ZERO) }
    }

    pub(in crate::sentry) fn sys_setgroups(&self) -> SyscallResult {
        Err(Errno::PERM.into())
    }

    pub(in crate::sentry) fn sys_setuid(&mut self, id: u64) -> SyscallResult {
        self.set_ids(self.state.user_id(), &[id])
    }

    pub(in crate::sentry) fn sys_setgid(&mut self, id: u64) -> SyscallResult {
        self.set_ids(self.state.group_id(), &[id])
    }

    pub(in crate::sentry) fn sys_setreuid(&mut self, real: u64, effective: u64) -> SyscallResult {
        self.set_ids(self.state.user_id(), &[real, effective])
    }

    pub(in crate::sentry) fn sys_setregid(&mut self, real: u64, effective: u64) -> SyscallResult {
        self.set_ids(self.state.group_id(), &[real, effective])
    }

    pub(in crate::sentry) fn sys_setresuid(
        &mut self,
        real: u64,
        effective: u64,
        saved: u64,
    ) -> SyscallResult {
        self.set_ids(self.state.user_id(), &[real, effective, saved])
    }

    pub(in crate::sentry) fn sys_setresgid(
        &mut self,
        real: u64,
        effective: u64,
        saved: u64,
    ) -> SyscallResult {
        self.set_ids(self.state.group_id(), &[real, effective, saved])
    }
}
