//! Descriptors of processes (`pidfd`). Each means one process for good, since PIDs are never
//! reused.
//!
//! Promises: they mean processes of the guest only, and signals reach those alone.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::fs::proc_dir::ProcDir;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::signals::SignalInfo;
use crate::sentry::mm::user_memory::copy_in;
use crate::sentry::result::SyscallResult;

impl Sentry {
    /// `pidfd_open(2)`: `PIDFD_THREAD` is `EINVAL`.
    pub(in crate::sentry) fn sys_pidfd_open(&mut self, id: u64, flags: u64) -> SyscallResult {
        if flags as i32 & !libc::O_NONBLOCK != 0 || id as i32 <= 0 {
            return Err(Errno::INVAL.into());
        }
        let (id, processes) = (id as u32, &self.state.processes);
        if !processes.lives(id) && !processes.is_ended(id) {
            let is_thread = processes.threads().any(|(thread, _)| thread == id);
            // A thread is no process.
            return Err(if is_thread { Errno::INVAL } else { Errno::SRCH }.into());
        }
        self.add(FileObject::Process(id), flags as i32 | libc::O_RDWR | libc::O_CLOEXEC)
    }

    /// The process that a descriptor means.
    pub(in crate::sentry) fn process_meant(&self, descriptor: u64) -> Result<u32, Errno> {
        match self.state.table.get(descriptor)?.open {
            FileObject::Process(id) => Ok(id),
            _ => Err(Errno::BADF),
        }
    }

    /// `pidfd_send_signal(2)`: flags are `EINVAL`. The directory of a process in `/proc` means it.
    pub(in crate::sentry) fn sys_pidfd_send_signal(
        &mut self,
        process: &Process,
        descriptor: u64,
        number: u64,
        info: u64,
        flags: u64,
    ) -> SyscallResult {
        if flags != 0 {
            return Err(Errno::INVAL.into());
        }
        let id = match self.state.table.get(descriptor)?.open {
            FileObject::Folder(ProcDir::Process(id), _) => id,
            _ => self.process_meant(descriptor)?,
        };
        let own = self.state.processes.current_id();
        let given = match info {
            0 => None,
            at => Some(copy_in(process, at, 32)?),
        };
        if let Some(given) = &given {
            let word = |at: usize| i32::from_le_bytes([0, 1, 2, 3].map(|n| given[at + n]));
            if word(0) as u32 as u64 != number & u64::from(u32::MAX) {
                return Err(Errno::INVAL.into());
            }
            // Only to itself may a process claim another sender.
            if word(8) >= 0 && id != own {
                return Err(Errno::PERM.into());
            }
        }
        let sender = self.state.sender(own);
        self.post(id, None, number, |signal| match given {
            Some(given) => SignalInfo::from_guest(signal, &given),
            None => SignalInfo::new(signal, 0, sender, 0),
        })
    }
}
