//! Descriptors that signals are read from (`signalfd`): signals of the reading thread and of its
//! process.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::poll_events::IN;
use crate::sentry::kernel::signals::{SignalInfo, UNTOUCHABLE};
use crate::sentry::mm::user_memory::{copy_out, word_in};
use crate::sentry::result::{SyscallControl, SyscallError, SyscallResult};

/// Bytes of one signal (`struct signalfd_siginfo`).
const SIGINFO_LEN: usize = 128;

/// A signal as it is read.
fn encode_signal(info: &SignalInfo) -> Vec<u8> {
    let given = info.all();
    let int = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|n| given[at + n]));
    let value = u64::from(int(24)) | u64::from(int(28)) << 32;
    let is_child = i32::from(info.signal) == libc::SIGCHLD;
    let of_timer = int(8) as i32 == libc::SI_TIMER;
    let (process, user) = if of_timer { (0, 0) } else { (int(16), int(20)) };
    let (timer, overrun) = if of_timer { (int(16), int(20)) } else { (0, 0) };
    let bytes = StructBuilder::default()
        .int(int(0))
        .int(int(4))
        .int(int(8))
        .int(process)
        .int(user)
        .int(0)
        .int(timer)
        .int(0)
        .int(overrun)
        .int(0)
        .int(if is_child { int(24) } else { 0 })
        .int(if is_child { 0 } else { int(24) })
        .word(if is_child { 0 } else { value });
    let len = bytes.0.len();
    bytes.zeros(SIGINFO_LEN - len).0
}

impl Sentry {
    /// `signalfd4(2)`, as on Linux.
    pub(in crate::sentry) fn sys_signalfd4(
        &mut self,
        process: &Process,
        descriptor: u64,
        set: u64,
        size: u64,
        flags: u64,
    ) -> SyscallResult {
        if size != 8 || flags as i32 & !(libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) != 0 {
            return Err(Errno::INVAL.into());
        }
        let set = word_in(process, set)? & !UNTOUCHABLE;
        if descriptor as i32 == -1 {
            return self.add(FileObject::Signals(set), flags as i32 | libc::O_RDWR);
        }
        if !matches!(self.state.table.get(descriptor)?.open, FileObject::Signals(_)) {
            return Err(Errno::INVAL.into());
        }
        self.change().table.get_mut(descriptor)?.open = FileObject::Signals(set);
        Ok(SyscallControl::Value(descriptor & u64::from(u32::MAX)))
    }

    /// `signalfd(2)`: as `signalfd4`.
    pub(in crate::sentry) fn sys_signalfd(
        &mut self,
        process: &Process,
        fd: u64,
        mask: u64,
        size: u64,
    ) -> SyscallResult {
        self.sys_signalfd4(process, fd, mask, size, 0)
    }

    /// Reads as many signals of `set` as there is room for, and takes them.
    pub(in crate::sentry) fn read_signals(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        set: u64,
        pieces: &[(u64, u64)],
    ) -> SyscallResult {
        let room = pieces.iter().map(|(_, len)| *len as usize / SIGINFO_LEN).sum::<usize>();
        if room == 0 {
            return Err(Errno::INVAL.into());
        }
        let pending = self.state.current().threads.current().pending.set()
            | self.state.current().pending.set();
        if pending & set == 0 {
            return self.wait_for(descriptor, IN, 0);
        }
        let mut done = 0;
        for &(to, len) in pieces {
            for at in 0..len / SIGINFO_LEN as u64 {
                let Some(info) = self.change().take_signal(set) else { break };
                match copy_out(
                    process,
                    to.wrapping_add(at * SIGINFO_LEN as u64),
                    &encode_signal(&info),
                ) {
                    Ok(()) => done += SIGINFO_LEN as u64,
                    // Signals were taken before.
                    Err(SyscallError::Errno(_)) if done > 0 => {
                        return Ok(SyscallControl::Value(done));
                    }
                    Err(stop) => return Err(stop),
                }
            }
        }
        Ok(SyscallControl::Value(done))
    }
}
