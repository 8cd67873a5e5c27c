//! Touches of sparse memory, by instructions and by calls.

use std::ops::Range;

use crate::platform::{Call, Process, calls};
use crate::resource_numbers;
use crate::sentry::Sentry;
use crate::sentry::kernel::signals::SignalInfo;
use crate::sentry::mm::stub_calls::Change;
use crate::sentry::mm::user_memory::{copy_in, word_in};
use crate::sentry::result::SyscallControl;
use crate::sentry::syscalls::read_write::MAX_TRANSFER;

/// Maximum buffers, and maximum messages, of a call.
const MAX_BUFFERS: u64 = 1024;
/// Maximum bytes at an argument of a call that takes no length of them.
const ARGUMENT_LEN: u64 = 4096;
/// Bytes of a `struct mmsghdr`.
const MESSAGE_LEN: u64 = 64;

/// The part of a buffer that a call can use.
fn head(start: u64, len: u64) -> Range<u64> {
    start..start.saturating_add(len.min(MAX_TRANSFER))
}

impl Sentry {
    /// The pause of a call that has to end before sparse memory in `place` is opened for it. The
    /// search counts as work of the call.
    pub(crate) fn pause_to_open(&mut self, place: &Range<u64>) -> Option<SyscallControl> {
        let steps = self.state.layout.count_in(place) + 1;
        self.is_spent(steps).then(|| self.pause(self.resumed_bytes()))
    }

    /// The change that opens the block which an instruction has touched, or lets a stack grow to
    /// there, if the limits have room for it.
    pub(crate) fn open_touched(&mut self, process: &mut Process, signal: i32) -> Option<Change> {
        let layout = &self.state.layout;
        if signal != libc::SIGSEGV || !layout.has_reserved() && !layout.has_growing() {
            return None;
        }
        let at = SignalInfo::of_frame(signal as u8, &process.frame_bytes()).address();
        if let Some(change) = self.open_sparse(at..at.checked_add(1)?) {
            return Some(change);
        }
        if !self.state.layout.has_growing() {
            return None;
        }
        let own = self.state.processes.current_id();
        let (limit, _) = self.state.limit_of(own, resource_numbers::RLIMIT_STACK)?;
        self.change().layout.grow_down(at, limit)
    }

    /// The change that opens all sparse memory in `place`, if there is any and the limit has room
    /// for it.
    pub(crate) fn open_sparse(&mut self, place: Range<u64>) -> Option<Change> {
        if !self.state.layout.is_sparse_in(&place) {
            return None;
        }
        Some(self.change().layout.open_sparse(place)).filter(|change| !change.is_empty())
    }

    /// The memory that a call reads or fills, by its arguments and the structures at them.
    pub(crate) fn used_by(&self, process: &Process, call: &Call) -> Vec<Range<u64>> {
        let [zeroth, first, second, ..] = call.args;
        if leaves_memory(call.number) || !self.state.layout.has_reserved() {
            return Vec::new();
        }
        let arguments = call.args.iter().map(|&at| head(at, ARGUMENT_LEN));
        let is_sparse = |place: &Range<u64>| self.state.layout.is_sparse_in(place);
        let mut places: Vec<_> = arguments.filter(is_sparse).collect();
        match call.number {
            libc::SYS_read
            | libc::SYS_pread64
            | libc::SYS_recvfrom
            | libc::SYS_write
            | libc::SYS_pwrite64
            | libc::SYS_sendto
            | libc::SYS_getdents64
            | calls::SYS_getdents
            | libc::SYS_mq_timedreceive => places.push(head(first, second)),
            libc::SYS_msgrcv => places.push(head(first, second.saturating_add(8))),
            calls::SYS_epoll_wait | libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => {
                places.push(head(first, second.saturating_mul(16)));
            }
            // The rest is behind pointers in memory.
            number if !has_pointers(number) || !self.state.layout.has_sparse() => {}
            libc::SYS_recvmsg | libc::SYS_sendmsg => message(process, first, &mut places),
            libc::SYS_recvmmsg | libc::SYS_sendmmsg => {
                for number in 0..second.min(MAX_BUFFERS) {
                    let at = first.wrapping_add(number * MESSAGE_LEN);
                    places.push(head(at, MESSAGE_LEN));
                    message(process, at, &mut places);
                }
            }
            libc::SYS_clone3 => {
                // The descriptor and the numbers of the new thread.
                let words =
                    (1..4).filter_map(|word| word_in(process, zeroth.wrapping_add(word * 8)).ok());
                places.extend(words.map(|at| head(at, 8)));
            }
            _ => buffers(process, first, second, &mut places),
        }
        places
    }
}

/// Whether a call uses no memory at the addresses that it takes.
fn leaves_memory(number: i64) -> bool {
    matches!(
        number,
        libc::SYS_mmap
            | libc::SYS_munmap
            | libc::SYS_mprotect
            | libc::SYS_madvise
            | libc::SYS_mremap
            | libc::SYS_msync
            | libc::SYS_mlock
            | libc::SYS_mlock2
            | libc::SYS_munlock
            | libc::SYS_mincore
            | libc::SYS_mbind
            | libc::SYS_shmat
            | libc::SYS_shmdt
            | libc::SYS_brk
    )
}

/// Whether the memory of a call is named by structures in memory.
fn has_pointers(number: i64) -> bool {
    matches!(
        number,
        libc::SYS_readv
            | libc::SYS_preadv
            | libc::SYS_preadv2
            | libc::SYS_writev
            | libc::SYS_pwritev
            | libc::SYS_pwritev2
            | libc::SYS_vmsplice
            | libc::SYS_recvmsg
            | libc::SYS_sendmsg
            | libc::SYS_recvmmsg
            | libc::SYS_sendmmsg
            | libc::SYS_clone3
    )
}

/// Adds the buffers of an array of `struct iovec`.
fn buffers(process: &Process, start: u64, count: u64, places: &mut Vec<Range<u64>>) {
    let Ok(bytes) = copy_in(process, start, (count.min(MAX_BUFFERS) * 16) as usize) else {
        return;
    };
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    let parts = bytes.chunks_exact(16).map(|one| (word(&one[..8]), word(&one[8..])));
    places.extend(parts.map(|(start, len)| head(start, len)));
}

/// Adds the name, the buffers and the control data of a `struct msghdr`.
fn message(process: &Process, at: u64, places: &mut Vec<Range<u64>>) {
    let word = |index: u64| word_in(process, at.wrapping_add(index * 8)).unwrap_or(0);
    places.push(head(word(0), word(1) & u64::from(u32::MAX)));
    places.push(head(word(4), word(5)));
    buffers(process, word(2), word(3), places);
}
