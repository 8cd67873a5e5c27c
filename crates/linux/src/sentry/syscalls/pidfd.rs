//! Descriptors of processes (`pidfd`). Each means one process permanently, since PIDs are never
//! reused.
//!
//! Promises: they mean processes of the guest only, and signals reach those alone.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::fs::proc_dir::ProcDir;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::process_info::INIT_PID;
use crate::sentry::kernel::signals::SignalInfo;
use crate::sentry::kernel::user_namespaces::{INITIAL, KILL};
use crate::sentry::kernel::users::{EFFECTIVE, FOR_FILES, REAL, SAVED};
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

// Parts of `struct pidfd_info`, in its mask.
const INFO_PID: u64 = 1;
const INFO_CREDENTIALS: u64 = 2;
const INFO_CGROUP: u64 = 4;
const INFO_EXIT: u64 = 8;
/// Bytes of its first version.
const INFO_LEN: u64 = 64;
/// The only control group.
const CGROUP: u64 = 1;

/// The bytes that an `ioctl` about a process stores, if it is `PIDFD_GET_INFO` of any version.
pub(in crate::sentry) fn info_len(request: u64) -> Option<u64> {
    // Read and write, size, type and number.
    let (size, kind) = (request >> 16 & 0x3fff, request & !(0x3fff << 16));
    (kind == 0xc000_ff0b).then_some(size)
}

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
        if id == INIT_PID {
            return self.signal_init(number);
        }
        let sender = self.state.sender(own);
        self.post(id, None, number, |signal| match given {
            Some(given) => SignalInfo::from_guest(signal, &given),
            None => SignalInfo::new(signal, 0, sender, 0),
        })
    }

    /// A signal to the process that adopts orphans, which takes none.
    pub(in crate::sentry) fn signal_init(&self, number: u64) -> SyscallResult {
        if number > 64 {
            return Err(Errno::INVAL.into());
        }
        let may = self.state.has_over_namespace(INITIAL, KILL);
        if may { Ok(ZERO) } else { Err(Errno::PERM.into()) }
    }

    /// `pidfd_getfd(2)`, as on Linux.
    pub(in crate::sentry) fn sys_pidfd_getfd(
        &mut self,
        pidfd: u64,
        number: u64,
        flags: u64,
    ) -> SyscallResult {
        if flags as u32 != 0 {
            return Err(Errno::INVAL.into());
        }
        let id = self.process_meant(pidfd)?;
        if !self.state.processes.lives(id) {
            return Err(Errno::SRCH.into());
        }
        if !self.state.may_inspect(id, REAL) {
            return Err(Errno::PERM.into());
        }
        let mut open = self.state.descriptors_of(id);
        let found = open.find(|(known, ..)| *known == number as u32);
        let description = found.map(|(_, description, _)| description).ok_or(Errno::BADF)?;
        drop(open);
        let number = self.change().table.describe(description)?;
        Ok(SyscallControl::Value(number.into()))
    }

    /// `ioctl` with `PIDFD_GET_INFO`: `len` bytes about a process. Its exit status is known once it
    /// was reaped.
    pub(in crate::sentry) fn pidfd_info(
        &self,
        process: &mut Process,
        id: u32,
        len: u64,
        at: u64,
    ) -> SyscallResult {
        if at == 0 || len < INFO_LEN {
            return Err(Errno::INVAL.into());
        }
        let asked = copy_in(process, at, 8)?;
        let asks_exit = asked[0] & INFO_EXIT as u8 != 0;
        let status = self.state.exits.of(id).filter(|_| asks_exit);
        let (state, exists) = (&self.state, self.state.processes.exists(id));
        if !exists && status.is_none() {
            return Err(Errno::SRCH.into());
        }
        let mut mask = if status.is_some() { INFO_EXIT } else { 0 };
        let mut words = [0u32; 11];
        if exists {
            mask |= INFO_PID | INFO_CREDENTIALS | INFO_CGROUP;
            let ids = state.seen_ids(id);
            let parent = state.processes.info(id).map_or(0, |info| info.parent);
            let pair = |place: usize| [ids.user[place], ids.group[place]];
            let all = [REAL, EFFECTIVE, SAVED, FOR_FILES].map(pair);
            words[..3].copy_from_slice(&[id, id, parent]);
            words[3..].copy_from_slice(&all.concat());
        }
        let cgroup = if exists { CGROUP } else { 0 };
        let head = StructBuilder::default().word(mask).word(cgroup);
        let body = words.into_iter().fold(head, StructBuilder::int);
        let mut bytes = body.int(status.unwrap_or_default() as u32).0;
        bytes.resize((len as usize).min(bytes.len()), 0);
        copy_out(process, at, &bytes)?;
        Ok(ZERO)
    }
}
