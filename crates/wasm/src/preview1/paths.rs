//! Calls about paths. They start at a directory that is open, and stay within it.

use afresh_files::{Access, Kind, New, Node, Refused, Rename, ResolvedName, Time, Walk};

use super::calls::{file, filestat, times};
use super::memory::Fail;
use super::{Call, DIRECTORY, FILE, errno, rights};
use crate::files::{Descriptor, FileDescriptor, Files};

/// Lookup flag: a last link is followed.
const FOLLOW: i32 = 1;
/// How a path is opened.
const CREATE: i32 = 1;
const ONLY_DIRECTORY: i32 = 2;
const EXCLUSIVE: i32 = 4;
const TRUNCATE: i32 = 8;
/// Flag of a descriptor.
const APPEND: i32 = 1;

/// The directory that paths of a call start from.
fn directory(files: &Files, fd: i32) -> Result<Node, Fail> {
    let file = file(files, fd, errno::BADF)?;
    match files.tree.stat(file.open.node)?.kind {
        Kind::Directory => Ok(file.open.node),
        _ => Err(errno::NOTDIR.into()),
    }
}

/// How the paths of a call are followed.
fn walk(files: &Files, fd: i32, flags: i32) -> Result<Walk, Fail> {
    Ok(Walk::beneath(directory(files, fd)?).follow(flags & FOLLOW != 0))
}

/// The place that a path names, whether anything is there or not.
fn place(files: &Files, fd: i32, path: &[u8]) -> Result<ResolvedName, Fail> {
    Ok(files.tree.walk(path, walk(files, fd, 0)?.name())?)
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
        let place = place(&files, fd, &path)?;
        files.tree.create_at(&place, New::Directory, 0o777, Time::now())?;
        Ok(())
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
            let node = files.tree.walk(&path, walk(&files, fd, flags)?)?.node()?;
            filestat(&files.tree.stat(node)?)
        };
        self.memory.put(to, &bytes)
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
        let node = files.tree.walk(&path, walk(&files, fd, flags)?)?.node()?;
        Ok(files.tree.set_times(node, accessed, modified, now)?)
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
            return Err(errno::INVAL.into());
        }
        let mut files = self.files.lock();
        let node = files.tree.walk(&old, walk(&files, from, 0)?)?.node()?;
        let place = place(&files, into, &new)?;
        Ok(files.tree.link_at(node, &place, Time::now())?)
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
            let mut files = self.files.lock();
            let number = files.free().ok_or(Fail::Errno(errno::MFILE))?;
            let from = file(&files, fd, errno::BADF)?;
            if how & TRUNCATE != 0 && from.rights & rights::SET_SIZE == 0 {
                return Err(errno::NOTCAPABLE.into());
            }
            let (wanted, inheriting) = (wanted as u64, inheriting as u64 & from.inheriting);
            let access = Access {
                read: wanted & (rights::READ | rights::READDIR) != 0,
                write: wanted & rights::WRITE != 0,
                append: flags & APPEND != 0,
            };
            let node = open(&mut files, fd, lookup, &path, how, access)?;
            let is_directory = files.tree.stat(node)?.kind == Kind::Directory;
            let access = if is_directory { Access::reading() } else { access };
            let open = files.tree.open(node, access)?;
            let (rights, inheriting) = match is_directory {
                true => (wanted & DIRECTORY, inheriting),
                false => (wanted & FILE, 0),
            };
            let flags = flags as u16;
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
            let node = files.tree.walk(&path, walk(&files, fd, 0)?)?.node()?;
            files.tree.read_link(node)?
        };
        if target.starts_with(b"/") {
            // An absolute target leads outside the directory, where it cannot be followed.
            return Err(errno::PERM.into());
        }
        let part = target.len().min(room as u32 as usize);
        self.memory.put(buffer, &target[..part])?;
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
        let place = place(&files, fd, &path)?;
        Ok(files.tree.remove_directory_at(&place, Time::now())?)
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
        let one = place(&files, from, &old)?;
        let two = place(&files, into, &new)?;
        Ok(files.tree.rename_at(&one, &two, Rename::Replace, Time::now())?)
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
        if target.starts_with(b"/") {
            return Err(errno::PERM.into());
        }
        let mut files = self.files.lock();
        let place = place(&files, fd, &path)?;
        if place.slash && place.found.is_some_and(|(_, kind)| kind != Kind::Directory) {
            return Err(errno::NOTDIR.into());
        }
        files.tree.create_at(&place, New::Link(&target), 0o777, Time::now())?;
        Ok(())
    }

    pub(super) fn path_unlink_file(&mut self, fd: i32, path: i32, len: i32) -> Result<(), Fail> {
        let path = self.memory.text(path, len)?;
        let mut files = self.files.lock();
        let place = place(&files, fd, &path)?;
        Ok(files.tree.remove_file_at(&place, Time::now())?)
    }
}

/// Finds or makes the file to open.
fn open(
    files: &mut Files,
    fd: i32,
    lookup: i32,
    path: &[u8],
    how: i32,
    access: Access,
) -> Result<Node, Fail> {
    let now = Time::now();
    let has = |flag: i32| how & flag != 0;
    if has(CREATE) && has(ONLY_DIRECTORY) {
        return Err(errno::INVAL.into());
    }
    let exclusive = has(CREATE) && has(EXCLUSIVE);
    let mut way = walk(files, fd, lookup)?;
    if exclusive {
        way = way.name();
    }
    let place = files.tree.walk(path, way)?;
    let Some((node, kind)) = place.found else {
        return match has(CREATE) {
            true => Ok(files.tree.create_at(&place, New::File, 0o666, now)?),
            false => Err(Refused::Missing.into()),
        };
    };
    if exclusive {
        return Err(errno::EXIST.into());
    }
    match kind {
        Kind::Link => return Err(errno::LOOP.into()),
        Kind::Directory if access.write || has(TRUNCATE) || has(CREATE) => {
            return Err(errno::ISDIR.into());
        }
        Kind::Directory => {}
        _ if has(ONLY_DIRECTORY) => return Err(errno::NOTDIR.into()),
        Kind::File if has(TRUNCATE) => files.tree.set_size(node, 0, now)?,
        _ => {}
    }
    Ok(node)
}
