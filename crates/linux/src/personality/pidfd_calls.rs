//! Calls on descriptors of processes (`pidfd`): they mean one process for ever, for numbers are never used again.
//!
//! Promises: only the guest's own processes are meant, and what is sent goes to them alone.

use rustix::io::Errno;

use super::signals::Info;
use super::table::Open;
use super::{Person, Served, copy_in};
use crate::platform::Process;

impl Person {
    /// A descriptor of a process, which may have ended but was not waited for yet.
    pub(super) fn process_descriptor(&mut self, id: u64, flags: u64) -> Served {
        if flags as i32 & !libc::O_NONBLOCK != 0 || id as i32 <= 0 {
            return Err(Errno::INVAL.into());
        }
        let (id, family) = (id as u32, &self.state.family);
        if !family.lives(id) && !family.is_ended(id) {
            let threads = self.state.threads.iter().chain(family.other_threads());
            let is_thread = threads.into_iter().any(|(thread, _)| thread == id);
            // A thread is no process.
            return Err(if is_thread { Errno::INVAL } else { Errno::SRCH }.into());
        }
        self.add(Open::Process(id), flags as i32 | libc::O_RDWR | libc::O_CLOEXEC)
    }

    /// The process that a descriptor means.
    pub(super) fn process_meant(&self, descriptor: u64) -> Result<u32, Errno> {
        match self.state.table.get(descriptor)?.open {
            Open::Process(id) => Ok(id),
            _ => Err(Errno::BADF),
        }
    }

    /// Sends a signal to what a descriptor means, with what the sender says of it, if anything.
    pub(super) fn send_to_meant(
        &mut self,
        process: &Process,
        descriptor: u64,
        number: u64,
        info: u64,
        flags: u64,
    ) -> Served {
        if flags != 0 {
            return Err(Errno::INVAL.into());
        }
        let id = self.process_meant(descriptor)?;
        let own = self.state.family.own.id;
        let given = match info {
            0 => None,
            at => Some(copy_in(process, at, 32)?),
        };
        if let Some(given) = &given {
            let word = |at: usize| i32::from_le_bytes([0, 1, 2, 3].map(|n| given[at + n]));
            if word(0) as u32 as u64 != number & u64::from(u32::MAX) {
                return Err(Errno::INVAL.into());
            }
            // Only to itself may it say that somebody else has sent it.
            if word(8) >= 0 && id != own {
                return Err(Errno::PERM.into());
            }
        }
        // Who has ended hears nothing until somebody asks for it, and is nobody then.
        if !self.state.family.lives(id) && !self.state.family.is_ended(id) {
            return Err(Errno::SRCH.into());
        }
        self.post(id, None, number, |signal| match given {
            Some(given) => Info::given(signal, &given),
            None => Info::new(signal, 0, own.into(), 0),
        })
    }
}
