//! Numbers of the calls that newer processors, or their definitions in `libc`, lack.

#![allow(non_upper_case_globals, reason = "names as in `libc`")]

use libc::c_long;

pub(crate) use libc::{
    SYS_access, SYS_alarm, SYS_arch_prctl, SYS_chmod, SYS_chown, SYS_creat, SYS_dup2,
    SYS_epoll_create, SYS_epoll_wait, SYS_eventfd, SYS_fchmodat2, SYS_fork, SYS_futimesat,
    SYS_getdents, SYS_getpgrp, SYS_inotify_init, SYS_ioperm, SYS_iopl, SYS_lchown, SYS_link,
    SYS_lstat, SYS_mkdir, SYS_mknod, SYS_open, SYS_pause, SYS_pipe, SYS_poll, SYS_readlink,
    SYS_rename, SYS_rmdir, SYS_select, SYS_signalfd, SYS_stat, SYS_symlink, SYS_sysfs, SYS_time,
    SYS_unlink, SYS_ustat, SYS_utime, SYS_utimes, SYS_vfork,
};

/// Missing in `libc`.
pub(crate) const SYS_io_pgetevents: c_long = 333;
pub(crate) const SYS_cachestat: c_long = 451;
pub(crate) const SYS_statmount: c_long = 457;
pub(crate) const SYS_listmount: c_long = 458;
pub(crate) const SYS_lsm_get_self_attr: c_long = 459;
pub(crate) const SYS_lsm_set_self_attr: c_long = 460;
pub(crate) const SYS_lsm_list_modules: c_long = 461;
pub(crate) const SYS_file_getattr: c_long = 468;
pub(crate) const SYS_file_setattr: c_long = 469;
