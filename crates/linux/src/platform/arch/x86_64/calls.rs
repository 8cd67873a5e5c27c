//! Numbers of the calls that newer processors, or their definitions in `libc`, lack.

pub(crate) use crate::platform::arch::recent_calls::*;
pub(crate) use libc::{
    SYS_access, SYS_alarm, SYS_arch_prctl, SYS_chmod, SYS_chown, SYS_creat, SYS_dup2,
    SYS_epoll_create, SYS_epoll_wait, SYS_eventfd, SYS_fork, SYS_futimesat, SYS_getdents,
    SYS_getpgrp, SYS_inotify_init, SYS_ioperm, SYS_iopl, SYS_lchown, SYS_link, SYS_lstat,
    SYS_mkdir, SYS_mknod, SYS_open, SYS_pause, SYS_pipe, SYS_poll, SYS_readlink, SYS_rename,
    SYS_rmdir, SYS_select, SYS_signalfd, SYS_stat, SYS_symlink, SYS_sysfs, SYS_time, SYS_unlink,
    SYS_ustat, SYS_utime, SYS_utimes, SYS_vfork,
};

/// Missing in `libc`.
#[allow(non_upper_case_globals, reason = "a name as in `libc`")]
pub(crate) const SYS_io_pgetevents: libc::c_long = 333;
