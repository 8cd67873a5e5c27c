//! The interface of the kernel on x86-64.

mod signal_frame;
mod trace_registers;

use super::{FileStatus, StructBuilder};
use afresh_files::Time;

pub(in crate::sentry) use signal_frame::{RED_ZONE, leave};
pub(in crate::sentry) use trace_registers::*;

/// The machine that `uname` reports, and with the personality of 32 bits.
pub(in crate::sentry) const MACHINES: [&str; 2] = ["x86_64", "i686"];
/// The machine in the auxiliary vector (`AT_PLATFORM`).
pub(crate) const PLATFORM: &str = "x86_64";
/// The flag of `mmap` for low addresses; 0 without one.
pub(in crate::sentry) const MAP_LOW: i32 = libc::MAP_32BIT;
/// `O_LARGEFILE` as the kernel has it.
pub(in crate::sentry) const KERNEL_LARGEFILE: i32 = 0o100_000;
/// Bytes of `struct semid_ds`.
pub(in crate::sentry) const SEMAPHORE_SET_LEN: usize = 104;
/// Bytes of `struct epoll_event`, and where its data is.
pub(in crate::sentry) const EPOLL_EVENT_LEN: usize = 12;
pub(in crate::sentry) const EPOLL_DATA: usize = 4;
/// `/proc/cpuinfo`: the common features of such processors. Programs query the others by
/// instruction.
pub(in crate::sentry) const PROCESSOR: &str = "processor\t: 0\nvendor_id\t: afresh\ncpu family\t: 0\nmodel\t\t: 0\nmodel name\t: afresh\n\
    physical id\t: 0\nsiblings\t: 1\ncore id\t\t: 0\ncpu cores\t: 1\n\
    flags\t\t: fpu tsc cx8 cmov mmx fxsr sse sse2 syscall nx lm\n\n";

/// The arguments of `clone` in the order flags, stack, parent, child, base.
pub(in crate::sentry) fn clone_arguments(arguments: &[u64; 6]) -> [u64; 6] {
    *arguments
}

/// The times of `struct semid_ds`: of the last operation and the last change.
pub(in crate::sentry) fn semaphore_times(bytes: StructBuilder, times: [u64; 2]) -> StructBuilder {
    let [used, changed] = times;
    bytes.word(used).word(0).word(changed).word(0)
}

/// `struct stat` of a file of this user and group.
pub(crate) fn stat(a: &FileStatus, [user, group]: [u32; 2]) -> Vec<u8> {
    let time = |bytes: StructBuilder, t: Time| bytes.word(t.seconds as u64).word(t.nanos.into());
    let bytes = StructBuilder::default()
        .word(a.system.device().into())
        .word(a.inode)
        .word(a.links)
        .int(a.mode)
        .int(user)
        .int(group)
        .int(0)
        .word(a.device)
        .word(a.size)
        .word(4096)
        .word(a.stored.div_ceil(512));
    time(time(time(bytes, a.accessed), a.modified), a.changed).zeros(24).0
}
