//! Calls that control a descriptor: `fcntl` and `ioctl`.

use rustix::io::Errno;

use crate::ioctl;
use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::fs::proc_settings::{NAMESPACES, ProcSetting, USER_KIND};
use crate::sentry::fs::seals;
use crate::sentry::kernel::device::{Device, GenerationWatch};
use crate::sentry::kernel::fd_table::{CREATED, FileObject};
use crate::sentry::kernel::user_namespaces::INITIAL;
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::net::sockets::SocketState;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::pidfd::info_len;

const F_SETSIG: i32 = 10;
const F_GETSIG: i32 = 11;
const F_NOTIFY: i32 = 1026;
const F_SETOWN_EX: i32 = 15;
const F_GETOWN_EX: i32 = 16;
/// `F_OWNER_PID` and `F_OWNER_PGRP`, of `struct f_owner_ex`.
const OWNER_PROCESS: i32 = 1;
const OWNER_GROUP: i32 = 2;
/// Whether two descriptors are of one open file, and whether an open made its file.
const F_DUPFD_QUERY: i32 = 1027;
const F_CREATED_QUERY: i32 = 1028;
const F_SETPIPE_SZ: i32 = 1031;
const F_GETPIPE_SZ: i32 = 1032;
/// Missing in `libc`.
const CLONE_NEWTIME: i32 = 0x80;
/// Bits of the generator of random numbers, which is always full.
const RANDOM_BITS: u32 = 256;
/// Commands that a descriptor takes which only names a file (`O_PATH`).
const PATH_COMMANDS: [i32; 7] = [
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    F_DUPFD_QUERY,
    F_CREATED_QUERY,
];

impl Sentry {
    /// `fcntl(2)`: `O_ASYNC` sends no signal for standard input. At most 512 open files send
    /// signals.
    pub(in crate::sentry) fn sys_fcntl(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        code: u64,
        value: u64,
    ) -> SyscallResult {
        let description = self.state.table.get(descriptor)?;
        if description.is_path() && !PATH_COMMANDS.contains(&(code as i32)) {
            return Err(Errno::BADF.into());
        }
        match code as i32 {
            libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
                let close_on_exec = code as i32 == libc::F_DUPFD_CLOEXEC;
                let number = self.change().table.duplicate(descriptor, value, close_on_exec)?;
                Ok(SyscallControl::Value(u64::from(number)))
            }
            F_DUPFD_QUERY => {
                let is_same = self.state.table.id(descriptor)? == self.state.table.id(value)?;
                Ok(SyscallControl::Value(is_same.into()))
            }
            F_CREATED_QUERY => Ok(SyscallControl::Value((description.flags & CREATED != 0).into())),
            libc::F_GETFD => {
                Ok(SyscallControl::Value(u64::from(self.state.table.closes_on_exec(descriptor)?)))
            }
            libc::F_SETFD => {
                self.change().table.set_close_on_exec(descriptor, value & 1 != 0)?;
                Ok(ZERO)
            }
            libc::F_GETFL => Ok(SyscallControl::Value(description.status_flags().into())),
            libc::F_SETFL => self.set_status_flags(descriptor, value as u32),
            command @ (libc::F_SETOWN
            | libc::F_GETOWN
            | F_SETSIG
            | F_GETSIG
            | F_SETOWN_EX
            | F_GETOWN_EX)
                if let FileObject::Device(Device::Generation(watch), _) = description.open =>
            {
                self.control_generation(process, descriptor, watch, command, value)
            }
            libc::F_SETOWN => self.set_owner(descriptor, value as i32),
            libc::F_GETOWN => {
                let owner = self.owner_number(descriptor)?;
                Ok(SyscallControl::Value(i64::from(owner) as u64))
            }
            F_SETOWN_EX => self.set_owner_ex(process, descriptor, value),
            F_GETOWN_EX => self.owner_ex(process, descriptor, value),
            F_SETSIG => self.set_owner_signal(descriptor, value),
            F_GETSIG => {
                let id = self.state.table.id(descriptor)?;
                Ok(SyscallControl::Value(self.state.table.async_files.of(id).signal.into()))
            }
            F_NOTIFY => self.watch_directory(descriptor, value as u32),
            F_GETPIPE_SZ | F_SETPIPE_SZ
                if matches!(description.open, FileObject::Pipe { .. } | FileObject::Fifo(_)) =>
            {
                self.pipe_size(descriptor, (code as i32 == F_SETPIPE_SZ).then_some(value))
            }
            libc::F_GETLEASE => self.control_lease(descriptor, None),
            libc::F_SETLEASE => self.control_lease(descriptor, Some(value)),
            F_GETPIPE_SZ | F_SETPIPE_SZ if description.open.is_standard() => {
                self.standard_pipe_size((code as i32 == F_SETPIPE_SZ).then_some(value))
            }
            seals::GET => self.seals(descriptor, None),
            seals::ADD => self.seals(descriptor, Some(value)),
            command @ (libc::F_SETLK
            | libc::F_SETLKW
            | libc::F_GETLK
            | libc::F_OFD_SETLK
            | libc::F_OFD_SETLKW
            | libc::F_OFD_GETLK) => self.lock_range(process, descriptor, command, value),
            _ => Err(Errno::INVAL.into()),
        }
    }

    /// `ioctl(2)`: only requests of terminals, sockets and streams are served, and those that set
    /// flags of a descriptor. Those of file systems and of other devices are `ENOTTY`.
    pub(in crate::sentry) fn sys_ioctl(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        request: u64,
        value: u64,
    ) -> SyscallResult {
        let description = self.state.table.get(descriptor)?;
        if description.is_path() {
            return Err(Errno::BADF.into());
        }
        match request {
            request
                if matches!(description.open, FileObject::Terminal(_))
                    && ![ioctl::FIONBIO, ioctl::FIOCLEX, ioctl::FIONCLEX, ioctl::FIOASYNC]
                        .contains(&request) =>
            {
                self.control_terminal(process, descriptor, request, value)
            }
            ioctl::FIONBIO => {
                let on = copy_in(process, value, 4)? != [0; 4];
                let bit = libc::O_NONBLOCK as u32;
                let flags = description.flags & !bit | if on { bit } else { 0 };
                self.change().table.get_mut(descriptor)?.flags = flags;
                Ok(ZERO)
            }
            ioctl::FIOASYNC => {
                let on = copy_in(process, value, 4)? != [0; 4];
                self.set_async(descriptor, on)
            }
            // There are no urgent data.
            ioctl::SIOCATMARK
                if let FileObject::Socket(socket) = &description.open
                    && socket.own.is_internet()
                    && !matches!(socket.stage, SocketState::Datagrams { .. }) =>
            {
                copy_out(process, value, &[0; 4])?;
                Ok(ZERO)
            }
            0x8910..=0x8942 if matches!(description.open, FileObject::Socket(_)) => {
                let control = self.control_interface(process, request, value)?;
                control.ok_or_else(|| Errno::NOTTY.into())
            }
            ioctl::FIOSETOWN | ioctl::SIOCSPGRP
                if matches!(description.open, FileObject::Socket(_)) =>
            {
                let owner = copy_in(process, value, 4)?;
                self.set_owner(
                    descriptor,
                    i32::from_le_bytes([owner[0], owner[1], owner[2], owner[3]]),
                )
            }
            ioctl::FIOGETOWN | ioctl::SIOCGPGRP
                if matches!(description.open, FileObject::Socket(_)) =>
            {
                copy_out(process, value, &self.owner_number(descriptor)?.to_le_bytes())?;
                Ok(ZERO)
            }
            ioctl::FIONREAD if let FileObject::Watches(watches) = &description.open => {
                let len = watches.readable() as u32;
                copy_out(process, value, &len.to_le_bytes())?;
                Ok(ZERO)
            }
            ioctl::FIONREAD if description.open.is_standard() => {
                let len = match description.open {
                    FileObject::Input => self.streams.input_len(),
                    _ => 0,
                };
                let len = i32::try_from(len).unwrap_or(i32::MAX);
                copy_out(process, value, &len.to_le_bytes())?;
                Ok(ZERO)
            }
            ioctl::FIONREAD if description.open.is_stream() => {
                let ends = description.open.ends();
                let read = ends.iter().find(|(_, writes)| !writes).or(ends.first());
                let held = read.and_then(|(id, _)| self.state.channels.get(*id));
                // Of datagrams the next one's alone.
                let next =
                    |channel: &crate::sentry::kernel::channels::Channel| match channel.letter() {
                        Some(letter) => letter.len,
                        None => channel.len(),
                    };
                let len = held.map_or(0, next) as u32;
                copy_out(process, value, &len.to_le_bytes())?;
                Ok(ZERO)
            }
            ioctl::TIOCOUTQ if matches!(description.open, FileObject::Socket(_)) => {
                let ends = description.open.ends();
                let written = ends.iter().find(|(_, writes)| *writes);
                let held = written.and_then(|(id, _)| self.state.channels.get(*id));
                let len = held.map_or(0, |channel| channel.len()) as u32;
                copy_out(process, value, &len.to_le_bytes())?;
                Ok(ZERO)
            }
            ioctl::RNDGETENTCNT
                if matches!(description.open, FileObject::Device(Device::Random, _)) =>
            {
                copy_out(process, value, &RANDOM_BITS.to_le_bytes())?;
                Ok(ZERO)
            }
            ioctl::NS_GET_USERNS..=ioctl::NS_GET_OWNER_UID
                if let FileObject::Proc(file) = &description.open
                    && let ProcSetting::Namespace(kind, id) = file.setting =>
            {
                query_namespace(request, kind, id)
            }
            ioctl::PROCMAP_QUERY
                if let FileObject::File(open) = &description.open
                    && let Some(memory) = self.state.map_files.get(&open.node) =>
            {
                self.query_mapping(process, *memory, value)
            }
            request
                if let (FileObject::Process(id), Some(len)) =
                    (&description.open, info_len(request)) =>
            {
                self.pidfd_info(process, *id, len, value)
            }
            ioctl::FIOCLEX | ioctl::FIONCLEX => {
                self.change().table.set_close_on_exec(descriptor, request == ioctl::FIOCLEX)?;
                Ok(ZERO)
            }
            _ => Err(Errno::NOTTY.into()),
        }
    }

    /// Refuses an owner of a descriptor that does not exist: a process, a group if it is negative,
    /// or 0 for none. As in Linux, any number that is in use is one.
    pub(in crate::sentry) fn check_owner(&self, owner: i32) -> Result<(), Errno> {
        if owner == i32::MIN {
            return Err(Errno::INVAL);
        }
        let known = owner == 0 || self.state.processes.is_in_use(owner.unsigned_abs());
        if known { Ok(()) } else { Err(Errno::SRCH) }
    }

    /// The owner and the signal of a descriptor of `/dev/afresh/generation`.
    fn control_generation(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        watch: GenerationWatch,
        command: i32,
        value: u64,
    ) -> SyscallResult {
        match command {
            libc::F_GETOWN => return Ok(SyscallControl::Value(i64::from(watch.owner) as u64)),
            // As this the C library asks for the owner.
            F_GETOWN_EX => {
                let kind = if watch.owner < 0 { OWNER_GROUP } else { OWNER_PROCESS };
                let owner = [kind.to_le_bytes(), watch.owner.wrapping_abs().to_le_bytes()];
                copy_out(process, value, &owner.concat())?;
                return Ok(ZERO);
            }
            F_GETSIG => return Ok(SyscallControl::Value(watch.signal.into())),
            F_SETSIG => {
                let signal = u8::try_from(value).ok().filter(|signal| *signal <= 64);
                let signal = signal.ok_or(Errno::INVAL)?;
                self.watch_generation(descriptor, |watch| watch.signal = signal)?;
            }
            _ => {
                let owner = match command {
                    F_SETOWN_EX => {
                        let [kind, id] = int_pair(process, value)?;
                        match kind {
                            OWNER_PROCESS if id >= 0 => id,
                            OWNER_GROUP if id > 0 => -id,
                            // One thread of a process is never the owner.
                            _ => return Err(Errno::INVAL.into()),
                        }
                    }
                    _ => value as i32,
                };
                self.check_owner(owner)?;
                self.watch_generation(descriptor, |watch| watch.owner = owner)?;
            }
        }
        Ok(ZERO)
    }
}

/// The answer to a request about a namespace. Only user namespaces and those of processes have
/// parents, and those of the first ones are out of reach.
fn query_namespace(request: u64, kind: u8, id: u32) -> SyscallResult {
    let (name, _) = NAMESPACES[usize::from(kind)];
    let nested = ["pid", "pid_for_children", "user"].contains(&name);
    match request {
        ioctl::NS_GET_NSTYPE => Ok(SyscallControl::Value(namespace_flag(name))),
        ioctl::NS_GET_PARENT if !nested => Err(Errno::INVAL.into()),
        ioctl::NS_GET_OWNER_UID if kind != USER_KIND => Err(Errno::INVAL.into()),
        ioctl::NS_GET_PARENT | ioctl::NS_GET_USERNS if nested && id == INITIAL => {
            Err(Errno::PERM.into())
        }
        _ => Err(Errno::NOTTY.into()),
    }
}

/// The flag of `clone` for a kind of namespaces.
fn namespace_flag(name: &str) -> u64 {
    let flag = match name {
        "cgroup" => libc::CLONE_NEWCGROUP,
        "ipc" => libc::CLONE_NEWIPC,
        "mnt" => libc::CLONE_NEWNS,
        "net" => libc::CLONE_NEWNET,
        "pid" | "pid_for_children" => libc::CLONE_NEWPID,
        "time" | "time_for_children" => CLONE_NEWTIME,
        "user" => libc::CLONE_NEWUSER,
        _ => libc::CLONE_NEWUTS,
    };
    flag as u32 as u64
}

/// Two numbers of four bytes.
pub(in crate::sentry) fn int_pair(process: &Process, address: u64) -> SyscallResult<[i32; 2]> {
    let bytes = copy_in(process, address, 8)?;
    Ok([0, 4].map(|at| i32::from_le_bytes([0, 1, 2, 3].map(|n| bytes[at + n]))))
}
