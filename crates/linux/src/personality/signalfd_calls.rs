//! Descriptors that signals are read from (`signalfd`): of whoever reads, and those of its process.

use rustix::io::Errno;

use super::encode::Bytes;
use super::readiness::IN;
use super::signals::{Info, UNTOUCHABLE};
use super::table::Open;
use super::{Outcome, Person, Served, copy_out, word_in};
use crate::platform::Process;

/// Bytes that tell of one signal (`struct signalfd_siginfo`).
const TOLD: usize = 128;

/// A signal as it is read.
fn told(info: &Info) -> Vec<u8> {
    let given = info.all();
    let int = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|n| given[at + n]));
    let value = u64::from(int(24)) | u64::from(int(28)) << 32;
    let is_child = i32::from(info.signal) == libc::SIGCHLD;
    let of_timer = int(8) as i32 == libc::SI_TIMER;
    let (process, user) = if of_timer { (0, 0) } else { (int(16), int(20)) };
    let (timer, overrun) = if of_timer { (int(16), int(20)) } else { (0, 0) };
    let bytes = Bytes::default()
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
    bytes.zeros(TOLD - len).0
}

impl Person {
    /// A descriptor for signals of a set, or another set for one that there is.
    pub(super) fn signal_descriptor(
        &mut self,
        process: &Process,
        descriptor: u64,
        set: u64,
        size: u64,
        flags: u64,
    ) -> Served {
        if size != 8 || flags as i32 & !(libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) != 0 {
            return Err(Errno::INVAL.into());
        }
        let set = word_in(process, set)? & !UNTOUCHABLE;
        if descriptor as i32 == -1 {
            return self.add(Open::Signals(set), flags as i32 | libc::O_RDWR);
        }
        if !matches!(self.state.table.get(descriptor)?.open, Open::Signals(_)) {
            return Err(Errno::INVAL.into());
        }
        self.change().table.get_mut(descriptor)?.open = Open::Signals(set);
        Ok(Outcome::Value(descriptor & u64::from(u32::MAX)))
    }

    /// Reads as many signals of `set` as there is room for, and takes them.
    pub(super) fn read_signals(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        set: u64,
        pieces: &[(u64, u64)],
    ) -> Served {
        let room = pieces.iter().map(|(_, len)| *len as usize / TOLD).sum::<usize>();
        if room == 0 {
            return Err(Errno::INVAL.into());
        }
        let pending = self.state.threads.current().pending.set() | self.state.pending.set();
        if pending & set == 0 {
            return self.wait_for(descriptor, IN, 0);
        }
        let mut done = 0;
        for &(to, len) in pieces {
            for at in 0..len / TOLD as u64 {
                let state = self.change();
                let own = state.threads.current_mut().pending.take(set);
                let Some(info) = own.or_else(|| state.pending.take(set)) else { break };
                copy_out(process, to.wrapping_add(at * TOLD as u64), &told(&info))?;
                done += TOLD as u64;
            }
        }
        Ok(Outcome::Value(done))
    }
}
