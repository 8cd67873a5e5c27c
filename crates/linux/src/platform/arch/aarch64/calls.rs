//! Numbers of the calls that arm64 lacks. No program can make them: a call has a number of 32 bits.

#![allow(non_upper_case_globals, reason = "names as in `libc`")]

use libc::c_long;

pub(crate) use crate::platform::arch::recent_calls::*;

/// Missing in `libc`.
pub(crate) const SYS_io_pgetevents: c_long = 292;

const NONE: c_long = 1 << 32;

pub(crate) const SYS_access: c_long = NONE + 0;
pub(crate) const SYS_alarm: c_long = NONE + 1;
pub(crate) const SYS_arch_prctl: c_long = NONE + 2;
pub(crate) const SYS_chmod: c_long = NONE + 3;
pub(crate) const SYS_chown: c_long = NONE + 4;
pub(crate) const SYS_creat: c_long = NONE + 5;
pub(crate) const SYS_dup2: c_long = NONE + 6;
pub(crate) const SYS_epoll_create: c_long = NONE + 7;
pub(crate) const SYS_epoll_wait: c_long = NONE + 8;
pub(crate) const SYS_eventfd: c_long = NONE + 9;
pub(crate) const SYS_fork: c_long = NONE + 10;
pub(crate) const SYS_futimesat: c_long = NONE + 11;
pub(crate) const SYS_getdents: c_long = NONE + 12;
pub(crate) const SYS_getpgrp: c_long = NONE + 13;
pub(crate) const SYS_inotify_init: c_long = NONE + 14;
pub(crate) const SYS_ioperm: c_long = NONE + 15;
pub(crate) const SYS_iopl: c_long = NONE + 16;
pub(crate) const SYS_lchown: c_long = NONE + 17;
pub(crate) const SYS_link: c_long = NONE + 18;
pub(crate) const SYS_lstat: c_long = NONE + 19;
pub(crate) const SYS_mkdir: c_long = NONE + 20;
pub(crate) const SYS_mknod: c_long = NONE + 21;
pub(crate) const SYS_open: c_long = NONE + 22;
pub(crate) const SYS_pause: c_long = NONE + 23;
pub(crate) const SYS_pipe: c_long = NONE + 24;
pub(crate) const SYS_poll: c_long = NONE + 25;
pub(crate) const SYS_readlink: c_long = NONE + 26;
pub(crate) const SYS_rename: c_long = NONE + 27;
pub(crate) const SYS_rmdir: c_long = NONE + 28;
pub(crate) const SYS_select: c_long = NONE + 29;
pub(crate) const SYS_signalfd: c_long = NONE + 30;
pub(crate) const SYS_stat: c_long = NONE + 31;
pub(crate) const SYS_symlink: c_long = NONE + 32;
pub(crate) const SYS_time: c_long = NONE + 33;
pub(crate) const SYS_unlink: c_long = NONE + 34;
pub(crate) const SYS_utime: c_long = NONE + 35;
pub(crate) const SYS_utimes: c_long = NONE + 36;
pub(crate) const SYS_vfork: c_long = NONE + 37;
pub(crate) const SYS_sysfs: c_long = NONE + 38;
pub(crate) const SYS_ustat: c_long = NONE + 39;
