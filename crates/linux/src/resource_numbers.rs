//! Numbers of resource limits, as in `getrlimit(2)`. They are those of the kernel; the types of
//! `libc`'s differ between C libraries.

pub(crate) const RLIMIT_CPU: u32 = 0;
pub(crate) const RLIMIT_FSIZE: u32 = 1;
pub(crate) const RLIMIT_DATA: u32 = 2;
pub(crate) const RLIMIT_STACK: u32 = 3;
pub(crate) const RLIMIT_CORE: u32 = 4;
pub(crate) const RLIMIT_RSS: u32 = 5;
pub(crate) const RLIMIT_NPROC: u32 = 6;
pub(crate) const RLIMIT_NOFILE: u32 = 7;
pub(crate) const RLIMIT_MEMLOCK: u32 = 8;
pub(crate) const RLIMIT_AS: u32 = 9;
pub(crate) const RLIMIT_LOCKS: u32 = 10;
pub(crate) const RLIMIT_SIGPENDING: u32 = 11;
pub(crate) const RLIMIT_MSGQUEUE: u32 = 12;
pub(crate) const RLIMIT_NICE: u32 = 13;
pub(crate) const RLIMIT_RTPRIO: u32 = 14;
pub(crate) const RLIMIT_RTTIME: u32 = 15;
