//! The interface of the kernel on arm64.

mod signal_frame;
mod trace_registers;

use super::{FileStatus, StructBuilder};
use afresh_files::Time;

pub(in crate::sentry) use signal_frame::{RED_ZONE, leave};
pub(in crate::sentry) use trace_registers::*;

/// The machine that `uname` reports, and with the personality of 32 bits.
pub(in crate::sentry) const MACHINES: [&str; 2] = ["aarch64", "armv8l"];
/// The machine in the auxiliary vector (`AT_PLATFORM`).
pub(crate) const PLATFORM: &str = "aarch64";
/// The flag of `mmap` for low addresses; 0 without one.
pub(in crate::sentry) const MAP_LOW: i32 = 0;
/// `O_LARGEFILE` as the kernel has it.
pub(in crate::sentry) const KERNEL_LARGEFILE: i32 = 0o400_000;
/// Bytes of `struct semid_ds`.
pub(in crate::sentry) const SEMAPHORE_SET_LEN: usize = 88;
/// Bytes of `struct epoll_event`, and where its data is.
pub(in crate::sentry) const EPOLL_EVENT_LEN: usize = 16;
pub(in crate::sentry) const EPOLL_DATA: usize = 8;
/// `/proc/cpuinfo`: the common features of such processors. The auxiliary vector has all.
pub(in crate::sentry) const PROCESSOR: &str = "processor\t: 0\nBogoMIPS\t: 100.00\nFeatures\t: fp asimd\n\
    CPU implementer\t: 0x00\nCPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0x000\n\
    CPU revision\t: 0\n\n";

/// The arguments of `clone` in the order flags, stack, parent, child, base.
pub(in crate::sentry) fn clone_arguments(arguments: &[u64; 6]) -> [u64; 6] {
    let [flags, stack, parent, base, child, rest] = *arguments;
    [flags, stack, parent, child, base, rest]
}

/// The times of `struct semid_ds`: of the last operation and the last change.
pub(in crate::sentry) fn semaphore_times(bytes: StructBuilder, times: [u64; 2]) -> StructBuilder {
    let [used, changed] = times;
    bytes.word(used).word(changed)
}

/// `struct stat` of a file of this user and group.
pub(crate) fn stat(a: &FileStatus, [user, group]: [u32; 2]) -> Vec<u8> {
    let time = |bytes: StructBuilder, t: Time| bytes.word(t.seconds as u64).word(t.nanos.into());
    let bytes = StructBuilder::default()
        .word(a.system.device().into())
        .word(a.inode)
        .int(a.mode)
        .int(a.links as u32)
        .int(user)
        .int(group)
        .word(a.device)
        .word(0)
        .word(a.size)
        .int(4096)
        .int(0)
        .word(a.stored.div_ceil(512));
    time(time(time(bytes, a.accessed), a.modified), a.changed).zeros(8).0
}
