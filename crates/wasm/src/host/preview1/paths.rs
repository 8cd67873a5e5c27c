//! Calls about paths. They start at a directory that is open, and stay within it.

use afresh_files::{Access, Time};

use super::calls::{durability, file, filestat, times};
use super::memory::Fail;
use super::rights::{DIRECTORY, FILE};
use super::{Call, errno, rights};
use crate::host::files::{Descriptor, FileDescriptor, Files};
use crate::host::opened::{OpenHandle, Opening};

/// Lookup flag: a last link is followed.
const FOLLOW: i32 = 1;
/// Options of opening a path.
const CREATE: i32 = 1;
const ONLY_DIRECTORY: i32 = 2;
const EXCLUSIVE: i32 = 4;
const TRUNCATE: i32 = 8;
/// Flag of a descriptor.
const APPEND: i32 = 1;

/// The directory that paths of a call start from.
fn directory(files: &Files, fd: i32) -> Result<OpenHandle, Fail> {
    let open = &file(files, fd, errno::EBADF)?.open;
    match open.is_directory(&files.tree)? {
        true => Ok(open.clone()),
        false => Err(errno::ENOTDIR.into()),
    }
}

impl Call<'_> {
    pub(super) fn path_create_directory(
        &mut self,
        fd: i32,
        path: i32,
        len: i32,
    ) -> Result<(), Fail> {
        let path = self.memory.text(path, len)?;
        let mut files = self.files.lock();
        let from = directory(&files, fd)?;
        Ok(from.create_directory(&mut files.tree, &path)?)
    }

    pub(super) fn path_filestat_get(
        &mut self,
        fd: i32,
        flags: i32,
        path: i32,
        len: i32,
        to: i32,
    ) -> Result<(), Fail> {
        let path = self.memory.text(path, len)?;
        let bytes = {
            let files = self.files.lock();
            let from = directory(&files, fd)?;
            filestat(&from.stat_at(&files.tree, &path, flags & FOLLOW != 0)?)
        };
        self.memory.write_bytes(to, &bytes)
    }

    #[allow(clippy::too_many_arguments, reason = "the call has as many")]
    pub(super) fn path_filestat_set_times(
        &mut self,
        fd: i32,
        flags: i32,
        path: i32,
        len: i32,
        accessed: i64,
        modified: i64,
        which: i32,
    ) -> Result<(), Fail> {
        let path = self.memory.text(path, len)?;
        let now = Time::now();
        let (accessed, modified) = times(accessed, modified, which, now)?;
        let mut files = self.files.lock();
        let from = directory(&files, fd)?;
        let path = (&path[..], flags & FOLLOW != 0);
        Ok(from.set_times_at(&mut files.tree, path, accessed, modified, now)?)
    }

    #[allow(clippy::too_many_arguments, reason = "the call has as many")]
    pub(super) fn path_link(
        &mut self,
        from: i32,
        flags: i32,
        old: i32,
        old_len: i32,
        into: i32,
        new: i32,
        new_len: i32,
    ) -> Result<(), Fail> {
        let (old, new) = (self.memory.text(old, old_len)?, self.memory.text(new, new_len)?);
        // Hard links that follow a symbolic link are refused, as on other hosts.
        if flags & FOLLOW != 0 {
            return Err(errno::EINVAL.into());
        }
        let mut files = self.files.lock();
        let (from, into) = (directory(&files, from)?, directory(&files, into)?);
        Ok(from.link(&mut files.tree, &old, &into, &new)?)
    }

    #[allow(clippy::too_many_arguments, reason = "the call has as many")]
    pub(super) fn path_open(
        &mut self,
        fd: i32,
        lookup: i32,
        path: i32,
        len: i32,
        how: i32,
        wanted: i64,
        inheriting: i64,
        flags: i32,
        to: i32,
    ) -> Result<(), Fail> {
        let path = self.memory.text(path, len)?;
        let number = {
            let most = self.files.limit();
            let mut files = self.files.lock();
            let number = files.free(most).ok_or(Fail::Errno(errno::EMFILE))?;
            let from = file(&files, fd, errno::EBADF)?;
            if how & TRUNCATE != 0 && from.rights & rights::SET_SIZE == 0 {
                return Err(errno::ENOTCAPABLE.into());
            }
            let start = directory(&files, fd)?;
            let (asked, inheriting) = (wanted as u64, inheriting as u64 & from.inheriting);
            let wanted = asked & from.inheriting;
            if asked & rights::ACCESS != 0 && wanted & rights::ACCESS == 0 {
                return Err(errno::ENOTCAPABLE.into());
            }
            let has = |flag: i32| how & flag != 0;
            if has(CREATE) && has(ONLY_DIRECTORY) {
                return Err(errno::EINVAL.into());
            }
            let how = Opening {
                access: Access {
                    read: wanted & (rights::READ | rights::READDIR) != 0,
                    write: wanted & rights::WRITE != 0,
                    append: flags & APPEND != 0,
                },
                follow: lookup & FOLLOW != 0,
                create: has(CREATE),
                exclusive: has(EXCLUSIVE),
                truncate: has(TRUNCATE),
                directory: has(ONLY_DIRECTORY),
            };
            let mut open = start.open(&mut files.tree, &path, how)?;
            let is_directory = open.is_directory(&files.tree)?;
            let flags = flags as u16;
            open.set_durability(durability(flags));
            let (rights, inheriting) = match is_directory {
                true => (wanted & DIRECTORY, inheriting),
                false => (wanted & FILE, 0),
            };
            let file = FileDescriptor { open, given: None, flags, rights, inheriting };
            files.descriptors_mut().insert(number, Descriptor::File(file));
            number
        };
        self.memory.put_u32(to, number)
    }

    pub(super) fn path_readlink(
        &mut self,
        fd: i32,
        path: i32,
        len: i32,
        buffer: i32,
        room: i32,
        to: i32,
    ) -> Result<(), Fail> {
        let path = self.memory.text(path, len)?;
        let target = {
            let files = self.files.lock();
            let from = directory(&files, fd)?;
            from.read_link(&files.tree, &path)?
        };
        let part = target.len().min(room as u32 as usize);
        self.memory.write_bytes(buffer, &target[..part])?;
        self.memory.put_u32(to, part as u32)
    }

    pub(super) fn path_remove_directory(
        &mut self,
        fd: i32,
        path: i32,
        len: i32,
    ) -> Result<(), Fail> {
        let path = self.memory.text(path, len)?;
        let mut files = self.files.lock();
        let from = directory(&files, fd)?;
        Ok(from.remove_directory(&mut files.tree, &path)?)
    }

    pub(super) fn path_rename(
        &mut self,
        from: i32,
        old: i32,
        old_len: i32,
        into: i32,
        new: i32,
        new_len: i32,
    ) -> Result<(), Fail> {
        let (old, new) = (self.memory.text(old, old_len)?, self.memory.text(new, new_len)?);
        let mut files = self.files.lock();
        let (from, into) = (directory(&files, from)?, directory(&files, into)?);
        Ok(from.rename(&mut files.tree, &old, &into, &new)?)
    }

    pub(super) fn path_symlink(
        &mut self,
        target: i32,
        target_len: i32,
        fd: i32,
        path: i32,
        len: i32,
    ) -> Result<(), Fail> {
        let target = self.memory.text(target, target_len)?;
        let path = self.memory.text(path, len)?;
        let mut files = self.files.lock();
        let from = directory(&files, fd)?;
        Ok(from.create_link(&mut files.tree, &target, &path)?)
    }

    pub(super) fn path_unlink_file(&mut self, fd: i32, path: i32, len: i32) -> Result<(), Fail> {
        let path = self.memory.text(path, len)?;
        let mut files = self.files.lock();
        let from = directory(&files, fd)?;
        Ok(from.remove_file(&mut files.tree, &path)?)
    }
}
