//! Owners of open files: `fcntl` and `ioctl` that set who gets signals about a file, which signal,
//! and when.

use afresh_files::Kind;
use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::async_files::{
    DN_EVENTS, DN_MULTISHOT, DirectoryNotice, FileOwner, OwnerKind, SeenEvents,
};
use crate::sentry::kernel::device::Device;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::mm::user_memory::copy_out;
use crate::sentry::result::{SyscallResult, ZERO};
use crate::sentry::syscalls::descriptor_control::int_pair;

const ASYNC: u32 = libc::O_ASYNC as u32;

/// Whether an object sends signals when it is ready.
fn sends_signals(open: &FileObject) -> bool {
    matches!(
        open,
        FileObject::Pipe { .. }
            | FileObject::Fifo(_)
            | FileObject::Socket(_)
            | FileObject::Terminal(_)
            | FileObject::Watches(_)
            | FileObject::Input
            | FileObject::Output
            | FileObject::Messages
            | FileObject::Device(Device::Generation(_) | Device::Random, _)
    )
}

impl Sentry {
    /// `fcntl` with `F_SETFL`.
    pub(in crate::sentry) fn set_status_flags(
        &mut self,
        descriptor: u64,
        value: u32,
    ) -> SyscallResult {
        let description = self.state.table.get(descriptor)?;
        let mut may = (libc::O_APPEND | libc::O_NONBLOCK | libc::O_NOATIME) as u32;
        if matches!(description.open, FileObject::File(_)) {
            may |= libc::O_DIRECT as u32;
        }
        if sends_signals(&description.open) {
            self.set_async(descriptor, value & ASYNC != 0)?;
        }
        let description = self.change().table.get_mut(descriptor)?;
        let flags = description.flags & !may | value & may;
        description.flags = flags;
        if let FileObject::File(open) = &mut description.open {
            open.access.append = flags & libc::O_APPEND as u32 != 0;
        }
        Ok(ZERO)
    }

    /// Has an open file send signals when it is ready, or not any more.
    pub(in crate::sentry) fn set_async(&mut self, descriptor: u64, on: bool) -> SyscallResult {
        let (id, description) =
            (self.state.table.id(descriptor)?, self.state.table.get(descriptor)?);
        if (description.flags & ASYNC != 0) == on {
            return Ok(ZERO);
        }
        if !sends_signals(&description.open) {
            return Err(Errno::NOTTY.into());
        }
        // The owner of a terminal is the group in its foreground, unless it has another.
        let owner = match &description.open {
            FileObject::Terminal(end) if on => {
                let group = end.id.and_then(|id| self.state.terminals.get(id));
                let group = group.map_or(0, |terminal| terminal.group);
                let own = self.state.processes.current_id();
                Some(match group {
                    0 => self.owner(OwnerKind::Process, own),
                    group => self.owner(OwnerKind::Group, group),
                })
            }
            _ => None,
        };
        let seen = match on {
            true => self.state.seen_events(&self.streams, id),
            false => SeenEvents::default(),
        };
        let table = &mut self.change().table;
        table.async_files.set(id, |file| {
            file.number = on.then_some(descriptor as u32);
            file.seen = seen;
            if let Some(owner) = owner.filter(|_| file.owner.id == 0) {
                file.owner = owner;
            }
        })?;
        let flags = &mut table.get_mut(descriptor)?.flags;
        *flags = *flags & !ASYNC | if on { ASYNC } else { 0 };
        Ok(ZERO)
    }

    /// An owner that the current process sets.
    fn owner(&self, kind: OwnerKind, id: u32) -> FileOwner {
        FileOwner { kind, id, users: self.state.owning_users() }
    }

    /// `fcntl` with `F_SETOWN`: a process, or a group if the number is negative.
    pub(in crate::sentry) fn set_owner(&mut self, descriptor: u64, number: i32) -> SyscallResult {
        self.check_owner(number)?;
        let kind = if number < 0 { OwnerKind::Group } else { OwnerKind::Process };
        self.give_owner(descriptor, self.owner(kind, number.unsigned_abs()))
    }

    fn give_owner(&mut self, descriptor: u64, owner: FileOwner) -> SyscallResult {
        let id = self.state.table.id(descriptor)?;
        self.change().table.async_files.set(id, |file| file.owner = owner)?;
        Ok(ZERO)
    }

    /// The owner of an open file, without one that has ended.
    fn living_owner(&self, descriptor: u64) -> Result<FileOwner, Errno> {
        let owner = self.state.table.async_files.of(self.state.table.id(descriptor)?).owner;
        let lives = owner.id != 0 && self.state.processes.is_in_use(owner.id);
        Ok(FileOwner { id: if lives { owner.id } else { 0 }, ..owner })
    }

    /// The owner as `F_GETOWN` returns it.
    pub(in crate::sentry) fn owner_number(&self, descriptor: u64) -> Result<i32, Errno> {
        let owner = self.living_owner(descriptor)?;
        let number = i32::try_from(owner.id).unwrap_or_default();
        Ok(if owner.kind == OwnerKind::Group { -number } else { number })
    }

    /// `fcntl` with `F_SETOWN_EX`.
    pub(in crate::sentry) fn set_owner_ex(
        &mut self,
        process: &Process,
        descriptor: u64,
        from: u64,
    ) -> SyscallResult {
        let [kind, id] = int_pair(process, from)?;
        let kind = OwnerKind::of(kind).ok_or(Errno::INVAL)?;
        let id = u32::try_from(id).map_err(|_| Errno::SRCH)?;
        if id != 0 && !self.state.processes.is_in_use(id) {
            return Err(Errno::SRCH.into());
        }
        self.give_owner(descriptor, self.owner(kind, id))
    }

    /// `fcntl` with `F_GETOWN_EX`.
    pub(in crate::sentry) fn owner_ex(
        &self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
    ) -> SyscallResult {
        let FileOwner { kind, id, .. } = self.living_owner(descriptor)?;
        let pair = [(kind as u32).to_le_bytes(), id.to_le_bytes()];
        copy_out(process, to, &pair.concat())?;
        Ok(ZERO)
    }

    /// `fcntl` with `F_SETSIG`.
    pub(in crate::sentry) fn set_owner_signal(
        &mut self,
        descriptor: u64,
        signal: u64,
    ) -> SyscallResult {
        let signal = u8::try_from(signal).ok().filter(|signal| *signal <= 64);
        let signal = signal.ok_or(Errno::INVAL)?;
        let id = self.state.table.id(descriptor)?;
        self.change().table.async_files.set(id, |file| file.signal = signal)?;
        Ok(ZERO)
    }

    /// `fcntl` with `F_NOTIFY`: signals changes in a directory. Without events it ends that.
    pub(in crate::sentry) fn watch_directory(
        &mut self,
        descriptor: u64,
        events: u32,
    ) -> SyscallResult {
        let (id, description) =
            (self.state.table.id(descriptor)?, self.state.table.get(descriptor)?);
        let FileObject::File(open) = &description.open else {
            return Err(Errno::NOTDIR.into());
        };
        if self.state.tree.stat(open.node)?.kind != Kind::Directory {
            return Err(Errno::NOTDIR.into());
        }
        let own = self.owner(OwnerKind::Process, self.state.processes.current_id());
        let (mask, number) = (events & (DN_EVENTS | DN_MULTISHOT), descriptor as u32);
        self.change().table.async_files.set(id, |file| {
            if mask & DN_EVENTS == 0 {
                file.notice = None;
                return;
            }
            let before = file.notice.map_or(0, |notice| notice.mask);
            file.notice = Some(DirectoryNotice { mask: before | mask, number });
            if file.owner.id == 0 {
                file.owner = own;
            }
        })?;
        Ok(ZERO)
    }
}
