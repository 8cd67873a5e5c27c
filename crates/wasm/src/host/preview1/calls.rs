//! Calls about descriptors.

use std::io::IsTerminal;

use afresh_files::{Durability, HostHandle, HostKind, Time, Tree, Whence};

use super::memory::Fail;
use super::{Call, errno, rights};
use crate::host::files::{Descriptor, FileDescriptor, Files};
use crate::host::opened::{FileStat, OpenHandle};

/// Flags of descriptors.
const APPEND: u16 = 1;
const DATA_SYNC: u16 = 2;
const SYNC: u16 = 16;
const KNOWN_FLAGS: u16 = 0x1f;
/// Flags of `path_filestat_set_times`: which times are set, and to which value.
const ACCESSED: i32 = 1;
const ACCESSED_NOW: i32 = 2;
const MODIFIED: i32 = 4;
const MODIFIED_NOW: i32 = 8;
/// File types of a descriptor; a terminal is `CHARACTERS`.
const UNKNOWN: u8 = 0;
const CHARACTERS: u8 = 2;
/// Maximum bytes of one step of a read or write.
const STEP: usize = 1 << 16;
/// Bytes of an entry of a directory before its name.
const ENTRY: usize = 24;
/// Maximum subscriptions of one `poll_oneoff`.
pub(super) const POLLED: u32 = 4096;

pub(super) fn kind(kind: HostKind) -> u8 {
    match kind {
        HostKind::BlockDevice => 1,
        HostKind::CharacterDevice => CHARACTERS,
        HostKind::Directory => 3,
        HostKind::File => 4,
        HostKind::Socket => 6,
        HostKind::Link => 7,
        _ => UNKNOWN,
    }
}

/// When writes to a descriptor with such flags are on the disk.
pub(super) fn durability(flags: u16) -> Durability {
    match (flags & SYNC != 0, flags & DATA_SYNC != 0) {
        (true, _) => Durability::All,
        (false, true) => Durability::Data,
        (false, false) => Durability::Later,
    }
}

/// The descriptor, of a file or not.
fn any(files: &Files, fd: i32) -> Result<&Descriptor, Fail> {
    files.descriptors.get(&(fd as u32)).ok_or(Fail::Errno(errno::EBADF))
}

/// The descriptor of a file or directory; a standard stream is `otherwise`.
pub(super) fn file(files: &Files, fd: i32, otherwise: u16) -> Result<&FileDescriptor, Fail> {
    match any(files, fd)? {
        Descriptor::File(file) => Ok(file),
        Descriptor::Standard(_) => Err(otherwise.into()),
    }
}

/// Runs `change` on an open file, and the guest's tree.
fn with<T>(
    files: &mut Files,
    fd: i32,
    otherwise: u16,
    change: impl FnOnce(&mut OpenHandle, &mut Tree) -> Result<T, Fail>,
) -> Result<T, Fail> {
    file(files, fd, otherwise)?;
    let Files { tree, descriptors, .. } = files;
    let descriptors = std::sync::Arc::make_mut(descriptors);
    match descriptors.get_mut(&(fd as u32)) {
        Some(Descriptor::File(file)) => change(&mut file.open, tree),
        _ => Err(errno::EBADF.into()),
    }
}

/// The times to set.
pub(super) fn times(
    accessed: i64,
    modified: i64,
    which: i32,
    now: Time,
) -> Result<(Option<Time>, Option<Time>), Fail> {
    let one =
        |given: i32, current: i32, value: i64| match (which & given != 0, which & current != 0) {
            (true, true) => Err(Fail::Errno(errno::EINVAL)),
            (true, false) => Ok(Some(Time::from_nanos(value as u64))),
            (false, true) => Ok(Some(now)),
            (false, false) => Ok(None),
        };
    Ok((one(ACCESSED, ACCESSED_NOW, accessed)?, one(MODIFIED, MODIFIED_NOW, modified)?))
}

/// The attributes of a file, as guests have them.
pub(super) fn filestat(stat: &FileStat) -> [u8; 64] {
    let mut bytes = [0; 64];
    let mut put = |at: usize, value: u64| bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    put(0, stat.device);
    put(8, stat.inode);
    put(24, stat.links);
    put(32, stat.size);
    put(40, stat.times.accessed.nanos());
    put(48, stat.times.modified.nanos());
    put(56, stat.times.changed.nanos());
    bytes[16] = kind(stat.kind);
    bytes
}

impl Call<'_> {
    pub(super) fn fd_advise(
        &mut self,
        fd: i32,
        offset: i64,
        len: i64,
        advice: i32,
    ) -> Result<(), Fail> {
        let files = self.files.lock();
        let file = file(&files, fd, errno::ESPIPE)?;
        if file.open.is_directory(&files.tree)? {
            return Err(errno::EBADF.into());
        }
        let end = (offset as u64).checked_add(len as u64).filter(|end| *end <= i64::MAX as u64);
        match (0..=5).contains(&advice) && end.is_some() {
            true => Ok(()),
            false => Err(errno::EINVAL.into()),
        }
    }

    pub(super) fn fd_allocate(&mut self, fd: i32, offset: i64, len: i64) -> Result<(), Fail> {
        if len == 0 {
            return Err(errno::EINVAL.into());
        }
        with(&mut self.files.lock(), fd, errno::ESPIPE, |open, tree| {
            if !open.access().write || open.stat(tree)?.kind != HostKind::File {
                return Err(errno::EBADF.into());
            }
            Ok(open.allocate(tree, offset as u64, len as u64)?)
        })
    }

    pub(super) fn fd_close(&mut self, fd: i32) -> Result<(), Fail> {
        let mut files = self.files.lock();
        any(&files, fd)?;
        if let Some(Descriptor::File(file)) = files.descriptors_mut().remove(&(fd as u32)) {
            file.open.close(&mut files.tree);
        }
        Ok(())
    }

    /// The host file that has to be written to its disk, if the descriptor is one.
    pub(super) fn host_to_sync(&self, fd: i32, data: bool) -> Result<Option<HostHandle>, Fail> {
        let files = self.files.lock();
        match any(&files, fd)? {
            Descriptor::Standard(_) if data => Err(errno::EINVAL.into()),
            Descriptor::Standard(_) => Ok(None),
            Descriptor::File(file) if data && file.open.is_directory(&files.tree)? => {
                Err(errno::EBADF.into())
            }
            Descriptor::File(file) => Ok(file.open.on_host()),
        }
    }

    pub(super) fn fd_fdstat_get(&mut self, fd: i32, to: i32) -> Result<(), Fail> {
        let files = self.files.lock();
        let (kind, flags, base, inheriting) = match any(&files, fd)? {
            Descriptor::Standard(number) => {
                let right = if *number == 0 { rights::READ } else { rights::WRITE };
                // Only a stream of this process can be one, as in wasmtime-wasi.
                let terminal = match number {
                    0 => self.host.inherits_stdin() && std::io::stdin().is_terminal(),
                    1 => self.host.inherits_output() && std::io::stdout().is_terminal(),
                    _ => self.host.inherits_output() && std::io::stderr().is_terminal(),
                };
                let kind = if terminal { CHARACTERS } else { UNKNOWN };
                (kind, 0, right, right)
            }
            Descriptor::File(file) => {
                let stat = file.open.stat(&files.tree)?;
                (kind(stat.kind), file.flags, file.rights, file.inheriting)
            }
        };
        let mut bytes = [0; 24];
        bytes[0] = kind;
        bytes[2..4].copy_from_slice(&flags.to_le_bytes());
        bytes[8..16].copy_from_slice(&base.to_le_bytes());
        bytes[16..24].copy_from_slice(&inheriting.to_le_bytes());
        self.memory.write_bytes(to, &bytes)
    }

    pub(super) fn fd_fdstat_set_flags(&mut self, fd: i32, flags: i32) -> Result<(), Fail> {
        let flags = u16::try_from(flags).ok().filter(|flags| flags & !KNOWN_FLAGS == 0);
        let flags = flags.ok_or(Fail::Errno(errno::EINVAL))?;
        let mut files = self.files.lock();
        file(&files, fd, errno::EBADF)?;
        if let Some(Descriptor::File(file)) = files.descriptors_mut().get_mut(&(fd as u32)) {
            file.flags = flags;
            file.open.access_mut().append = flags & APPEND != 0;
            file.open.set_durability(durability(flags));
        }
        Ok(())
    }

    /// Rights can be given up, and not got back.
    pub(super) fn fd_fdstat_set_rights(
        &mut self,
        fd: i32,
        rights: i64,
        inheriting: i64,
    ) -> Result<(), Fail> {
        let (rights, inheriting) = (rights as u64, inheriting as u64);
        let mut files = self.files.lock();
        let now = file(&files, fd, errno::EBADF)?;
        if rights & !now.rights != 0 || inheriting & !now.inheriting != 0 {
            return Err(errno::ENOTCAPABLE.into());
        }
        if let Some(Descriptor::File(file)) = files.descriptors_mut().get_mut(&(fd as u32)) {
            (file.rights, file.inheriting) = (rights, inheriting);
            let access = file.open.access_mut();
            access.read &= rights & (rights::READ | rights::READDIR) != 0;
            access.write &= rights & rights::WRITE != 0;
        }
        Ok(())
    }

    pub(super) fn fd_filestat_get(&mut self, fd: i32, to: i32) -> Result<(), Fail> {
        let files = self.files.lock();
        let bytes = match any(&files, fd)? {
            Descriptor::Standard(_) => [0; 64],
            Descriptor::File(file) => filestat(&file.open.stat(&files.tree)?),
        };
        self.memory.write_bytes(to, &bytes)
    }

    pub(super) fn fd_filestat_set_size(&mut self, fd: i32, size: i64) -> Result<(), Fail> {
        with(&mut self.files.lock(), fd, errno::EBADF, |open, tree| {
            if open.is_directory(tree)? {
                return Err(errno::EBADF.into());
            }
            if !open.access().write {
                return Err(errno::EINVAL.into());
            }
            Ok(open.set_size(tree, size as u64)?)
        })
    }

    pub(super) fn fd_filestat_set_times(
        &mut self,
        fd: i32,
        accessed: i64,
        modified: i64,
        which: i32,
    ) -> Result<(), Fail> {
        let now = Time::now();
        let (accessed, modified) = times(accessed, modified, which, now)?;
        with(&mut self.files.lock(), fd, errno::EBADF, |open, tree| {
            Ok(open.set_times(tree, accessed, modified, now)?)
        })
    }

    /// Reads into the buffers of a call.
    fn read_into(&mut self, fd: i32, parts: i32, count: i32, at: Option<u64>) -> Result<u32, Fail> {
        let (parts, mut done) = (self.memory.parts(parts, count)?, 0_u32);
        // Also for a call without buffers.
        file(&self.files.lock(), fd, errno::ESPIPE)?;
        for (start, len) in parts {
            let mut part = 0;
            // At least one step, which finds out whether the file can be read.
            while part < len as usize || part == 0 {
                if done > 0 {
                    self.check_limits()?;
                }
                let out = &mut self.memory.slice_mut(start, len)?[part..];
                let step = out.len().min(STEP);
                let out = &mut out[..step];
                let read = with(&mut self.files.lock(), fd, errno::ESPIPE, |open, tree| {
                    Ok(open.read_into_guest(tree, at.map(|at| at + u64::from(done)), out)?)
                })?;
                (part, done) = (part + read, done.saturating_add(read as u32));
                if read < step {
                    return Ok(done);
                }
                if len == 0 {
                    break;
                }
            }
        }
        Ok(done)
    }

    pub(super) fn fd_read(&mut self, fd: i32, parts: i32, count: i32, to: i32) -> Result<(), Fail> {
        let done = self.read_into(fd, parts, count, None)?;
        self.memory.put_u32(to, done)
    }

    pub(super) fn fd_pread(
        &mut self,
        fd: i32,
        parts: i32,
        count: i32,
        offset: i64,
        to: i32,
    ) -> Result<(), Fail> {
        let done = self.read_into(fd, parts, count, Some(offset as u64))?;
        self.memory.put_u32(to, done)
    }

    /// Writes the buffers of a call.
    fn write_from(
        &mut self,
        fd: i32,
        parts: i32,
        count: i32,
        at: Option<u64>,
    ) -> Result<u32, Fail> {
        let (parts, mut done) = (self.memory.parts(parts, count)?, 0_u32);
        // Also for a call without buffers.
        file(&self.files.lock(), fd, errno::ESPIPE)?;
        for (start, len) in parts {
            let mut part = 0;
            while part < len as usize || part == 0 {
                if done > 0 {
                    self.check_limits()?;
                }
                let bytes = &self.memory.slice(start, len)?[part..];
                let bytes = &bytes[..bytes.len().min(STEP)];
                let written = with(&mut self.files.lock(), fd, errno::ESPIPE, |open, tree| {
                    Ok(open.write_from_guest(tree, at.map(|at| at + u64::from(done)), bytes)?)
                });
                let written = match written {
                    // Bytes that were written before an error count.
                    Err(Fail::Errno(_)) if done > 0 => return Ok(done),
                    written => written?,
                };
                let short = written < bytes.len();
                (part, done) = (part + written, done.saturating_add(written as u32));
                if short {
                    return Ok(done);
                }
                if len == 0 {
                    break;
                }
            }
        }
        Ok(done)
    }

    pub(super) fn fd_write(
        &mut self,
        fd: i32,
        parts: i32,
        count: i32,
        to: i32,
    ) -> Result<(), Fail> {
        let done = self.write_from(fd, parts, count, None)?;
        self.memory.put_u32(to, done)
    }

    pub(super) fn fd_pwrite(
        &mut self,
        fd: i32,
        parts: i32,
        count: i32,
        offset: i64,
        to: i32,
    ) -> Result<(), Fail> {
        let done = self.write_from(fd, parts, count, Some(offset as u64))?;
        self.memory.put_u32(to, done)
    }

    /// The name of a directory that was given.
    fn preopen_name(&self, fd: i32) -> Result<String, Fail> {
        let files = self.files.lock();
        let given = file(&files, fd, errno::EBADF)?.given.clone();
        given.ok_or(Fail::Errno(errno::EBADF))
    }

    pub(super) fn fd_prestat_get(&mut self, fd: i32, to: i32) -> Result<(), Fail> {
        let name = self.preopen_name(fd)?;
        let mut bytes = [0; 8];
        bytes[4..].copy_from_slice(&(name.len() as u32).to_le_bytes());
        self.memory.write_bytes(to, &bytes)
    }

    pub(super) fn fd_prestat_dir_name(&mut self, fd: i32, to: i32, len: i32) -> Result<(), Fail> {
        let name = self.preopen_name(fd)?;
        if (len as u32 as usize) < name.len() {
            return Err(errno::ENAMETOOLONG.into());
        }
        self.memory.write_bytes(to, name.as_bytes())
    }

    pub(super) fn fd_readdir(
        &mut self,
        fd: i32,
        buffer: i32,
        len: i32,
        cookie: i64,
        to: i32,
    ) -> Result<(), Fail> {
        let room = self.memory.slice(buffer, len as u32)?.len();
        let (mut used, mut from) = (0, cookie as u64);
        // A buffer that is not full means the end of the directory.
        while used < room {
            if used > 0 {
                self.check_limits()?;
            }
            let entries = with(&mut self.files.lock(), fd, errno::EBADF, |open, tree| {
                Ok(open.entries(tree, from)?)
            })?;
            let Some(last) = entries.last() else { break };
            from = last.next;
            for entry in entries {
                let mut bytes = vec![0; ENTRY];
                bytes[..8].copy_from_slice(&entry.next.to_le_bytes());
                bytes[8..16].copy_from_slice(&entry.inode.to_le_bytes());
                bytes[16..20].copy_from_slice(&(entry.name.len() as u32).to_le_bytes());
                bytes[20] = kind(entry.kind);
                bytes.extend(entry.name);
                // An entry that does not fit is cut: the full buffer means that more entries
                // follow.
                let part = bytes.len().min(room - used);
                let out = self.memory.slice_mut(buffer, len as u32)?;
                out[used..used + part].copy_from_slice(&bytes[..part]);
                used += part;
                if used == room {
                    break;
                }
            }
        }
        self.memory.put_u32(to, used as u32)
    }

    pub(super) fn fd_renumber(&mut self, fd: i32, other: i32) -> Result<(), Fail> {
        let mut files = self.files.lock();
        any(&files, fd)?;
        any(&files, other)?;
        if fd == other {
            return Ok(());
        }
        let descriptors = files.descriptors_mut();
        if let Some(moved) = descriptors.remove(&(fd as u32))
            && let Some(Descriptor::File(old)) = descriptors.insert(other as u32, moved)
        {
            old.open.close(&mut files.tree);
        }
        Ok(())
    }

    pub(super) fn fd_seek(
        &mut self,
        fd: i32,
        offset: i64,
        whence: i32,
        to: i32,
    ) -> Result<(), Fail> {
        let whence = match whence {
            0 => Whence::Start,
            1 => Whence::Current,
            2 => Whence::End,
            _ => return Err(errno::EINVAL.into()),
        };
        let at = with(&mut self.files.lock(), fd, errno::ESPIPE, |open, tree| {
            match open.is_directory(tree)? {
                true => Err(errno::EBADF.into()),
                false => Ok(open.seek(tree, whence, offset)?),
            }
        })?;
        self.memory.put_u64(to, at)
    }

    pub(super) fn fd_tell(&mut self, fd: i32, to: i32) -> Result<(), Fail> {
        self.fd_seek(fd, 0, 1, to)
    }

    pub(super) fn sock_accept(&mut self, fd: i32, _: i32, _: i32) -> Result<(), Fail> {
        self.no_socket(fd)
    }

    pub(super) fn sock_recv(
        &mut self,
        fd: i32,
        _: i32,
        _: i32,
        _: i32,
        _: i32,
        _: i32,
    ) -> Result<(), Fail> {
        self.no_socket(fd)
    }

    pub(super) fn sock_send(
        &mut self,
        fd: i32,
        _: i32,
        _: i32,
        _: i32,
        _: i32,
    ) -> Result<(), Fail> {
        self.no_socket(fd)
    }

    pub(super) fn sock_shutdown(&mut self, fd: i32, _: i32) -> Result<(), Fail> {
        self.no_socket(fd)
    }

    fn no_socket(&self, fd: i32) -> Result<(), Fail> {
        /// Errno: not a socket.
        const NOTSOCK: u16 = 57;
        any(&self.files.lock(), fd)?;
        Err(NOTSOCK.into())
    }

    /// Answers a poll with files in it: they are ready. Returns whether it had any.
    pub(super) fn poll_files(
        &mut self,
        asked: i32,
        answers: i32,
        count: i32,
        to: i32,
    ) -> Result<bool, Fail> {
        const SUBSCRIPTION_BYTES: u32 = 48;
        let count = count as u32;
        if count > POLLED {
            return Err(errno::EINVAL.into());
        }
        let mut events = Vec::new();
        for index in 0..count {
            let question = self.memory.read(
                asked.wrapping_add((index * SUBSCRIPTION_BYTES) as i32),
                SUBSCRIPTION_BYTES,
            )?;
            let what = question[8];
            if what != 1 && what != 2 {
                continue;
            }
            let fd = i32::from_le_bytes([question[16], question[17], question[18], question[19]]);
            let mut event = [0; 32];
            event[..8].copy_from_slice(&question[..8]);
            event[10] = what;
            let files = self.files.lock();
            match any(&files, fd) {
                Ok(Descriptor::Standard(number)) if *number == fd as u32 => continue,
                // A stream under another number is as ready as it ever is.
                Ok(Descriptor::Standard(_)) => {}
                Ok(Descriptor::File(file)) => {
                    let stat = file.open.stat(&files.tree)?;
                    let left = stat.size.saturating_sub(file.open.offset()).max(1);
                    event[16..24].copy_from_slice(&left.to_le_bytes());
                }
                Err(_) => event[8..10].copy_from_slice(&errno::EBADF.to_le_bytes()),
            }
            events.push(event);
        }
        if events.is_empty() {
            return Ok(false);
        }
        for (index, event) in (0..).zip(&events) {
            self.memory.write_bytes(answers.wrapping_add(index * 32), event)?;
        }
        self.memory.put_u32(to, events.len() as u32)?;
        Ok(true)
    }
}
