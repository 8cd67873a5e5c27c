//! Calls about open files: opening, closing, duplicating, telling what they are.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;

use super::table::{Description, HostFile, Open};
use super::tree::{Attributes, Kind, Tree};
use super::{
    DONE, Found, Outcome, Person, Served, clock_calls, copy_in, copy_out, encode, path_in,
};
use crate::platform::Process;

/// Descriptors that one `poll` may ask about.
const POLLED: u64 = 1024;

impl Person {
    /// The directory that relative paths of a call start from.
    pub(super) fn base(&self, at: u64, path: &Path) -> Served<PathBuf> {
        if path.is_absolute() || at as i32 == libc::AT_FDCWD {
            return Ok(self.state.directory.clone());
        }
        let description = self.state.table.get(at)?;
        match description.open {
            Open::Directory(_) | Open::Place => Ok(description.path.clone()),
            _ => Err(Errno::NOTDIR.into()),
        }
    }

    /// Copies a path in and follows it.
    pub(super) fn follow(
        &self,
        process: &Process,
        at: u64,
        path: u64,
        links: bool,
    ) -> Served<(PathBuf, Found)> {
        let path = path_in(process, path)?;
        Ok(self.state.tree.resolve(&self.base(at, &path)?, &path, links)?)
    }

    pub(super) fn open(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        flags: u64,
        mode: u64,
    ) -> Served {
        let flags = flags as i32;
        let has = |flag: i32| flags & flag == flag;
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        if has(libc::O_TMPFILE) {
            return Err(Errno::OPNOTSUPP.into());
        }
        let exclusive = has(libc::O_CREAT | libc::O_EXCL);
        let follow = !has(libc::O_NOFOLLOW) && !exclusive;
        let name = path_in(process, path)?;
        let ends_in_slash = name.as_os_str().as_bytes().ends_with(b"/");
        let (path, mut found) = self.state.tree.resolve(&self.base(at, &name)?, &name, follow)?;
        if exclusive && found != Found::Missing {
            return Err(Errno::EXIST.into());
        }
        if found == Found::Missing && has(libc::O_CREAT) && ends_in_slash {
            return Err(Errno::ISDIR.into());
        }
        if found == Found::Missing {
            if !has(libc::O_CREAT) {
                return Err(Errno::NOENT.into());
            }
            let mode = mode as u32 & !self.state.umask;
            let now = clock_calls::now();
            let inode =
                self.change().tree.create(path.clone(), Kind::File(Arc::default()), mode, now)?;
            found = Found::Layer(inode);
        }
        let attributes = self.state.tree.attributes(&found)?;
        let open = if has(libc::O_PATH) {
            Open::Place
        } else if attributes.is(libc::S_IFLNK) {
            return Err(Errno::LOOP.into());
        } else if attributes.is(libc::S_IFDIR) {
            if writes {
                return Err(Errno::ISDIR.into());
            }
            Open::Directory(None)
        } else if has(libc::O_DIRECTORY) {
            return Err(Errno::NOTDIR.into());
        } else if let Found::Layer(inode) = found
            && let Kind::Device(device) = self.state.tree.inode(inode)?.kind
        {
            Open::Device(device)
        } else if writes || has(libc::O_TRUNC) {
            let truncate = has(libc::O_TRUNC);
            let tree = &mut self.change().tree;
            let inode = tree.writable(&path, &found, !truncate)?;
            if truncate {
                tree.edit(inode, 0, Vec::clear)?;
            }
            Open::Layer(inode)
        } else if let Found::Layer(inode) = found {
            Open::Layer(inode)
        } else {
            Open::Host(Arc::new(HostFile {
                file: Tree::open_host(&path)?,
                size: attributes.size,
                modified: attributes.modified,
            }))
        };
        let kept = libc::O_ACCMODE | libc::O_APPEND | libc::O_NONBLOCK | libc::O_PATH;
        let description = Description { open, path, offset: 0, flags: (flags & kept) as u32 };
        let number = self.change().table.add(description, has(libc::O_CLOEXEC))?;
        Ok(Outcome::Value(u64::from(number)))
    }

    pub(super) fn close(&mut self, descriptor: u64) -> Served {
        self.state.table.get(descriptor)?;
        self.change().table.close(descriptor)?;
        Ok(DONE)
    }

    pub(super) fn close_range(&mut self, first: u64, last: u64, flags: u64) -> Served {
        const CLOEXEC: u64 = 4;
        if first > last || flags & !(CLOEXEC | 2) != 0 {
            return Err(Errno::INVAL.into());
        }
        let table = &mut self.change().table;
        for number in table.numbers(first, last & u64::from(u32::MAX)) {
            if flags & CLOEXEC != 0 {
                table.set_close_on_exec(number, true)?;
            } else {
                table.close(number)?;
            }
        }
        Ok(DONE)
    }

    pub(super) fn seek(&mut self, descriptor: u64, offset: i64, whence: u64) -> Served {
        let description = self.state.table.get(descriptor)?;
        let base = match (whence as i32, &description.open) {
            (_, Open::Input | Open::Output | Open::Messages) => return Err(Errno::SPIPE.into()),
            (libc::SEEK_SET, _) => 0,
            (libc::SEEK_CUR, _) => description.offset as i64,
            (libc::SEEK_END, _) => self.attributes_of(description)?.size as i64,
            _ => return Err(Errno::INVAL.into()),
        };
        let new = base.checked_add(offset).filter(|new| *new >= 0).ok_or(Errno::INVAL)?;
        if description.offset != new as u64 {
            self.change().table.get_mut(descriptor)?.offset = new as u64;
        }
        Ok(Outcome::Value(new as u64))
    }

    pub(super) fn duplicate(&mut self, old: u64) -> Served {
        let number = self.change().table.duplicate(old, 0, false)?;
        Ok(Outcome::Value(u64::from(number)))
    }

    pub(super) fn replace(&mut self, old: u64, new: u64, flags: u64, same: bool) -> Served {
        self.state.table.get(old)?;
        if old as u32 == new as u32 {
            return if same { Ok(Outcome::Value(new)) } else { Err(Errno::INVAL.into()) };
        }
        let close_on_exec = flags & libc::O_CLOEXEC as u64 != 0;
        let number = self.change().table.replace(old, new, close_on_exec)?;
        Ok(Outcome::Value(u64::from(number)))
    }

    pub(super) fn control(&mut self, descriptor: u64, code: u64, value: u64) -> Served {
        let description = self.state.table.get(descriptor)?;
        match code as i32 {
            libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
                let close_on_exec = code as i32 == libc::F_DUPFD_CLOEXEC;
                let number = self.change().table.duplicate(descriptor, value, close_on_exec)?;
                Ok(Outcome::Value(u64::from(number)))
            }
            libc::F_GETFD => {
                Ok(Outcome::Value(u64::from(self.state.table.closes_on_exec(descriptor)?)))
            }
            libc::F_SETFD => {
                self.change().table.set_close_on_exec(descriptor, value & 1 != 0)?;
                Ok(DONE)
            }
            libc::F_GETFL => Ok(Outcome::Value(u64::from(description.flags))),
            libc::F_SETFL => {
                let may = (libc::O_APPEND | libc::O_NONBLOCK) as u32;
                let flags = description.flags & !may | value as u32 & may;
                self.change().table.get_mut(descriptor)?.flags = flags;
                Ok(DONE)
            }
            // Nobody else is there to hold a lock.
            libc::F_SETLK | libc::F_SETLKW | libc::F_OFD_SETLK | libc::F_OFD_SETLKW => Ok(DONE),
            _ => Err(Errno::INVAL.into()),
        }
    }

    pub(super) fn device(&mut self, descriptor: u64, request: u64) -> Served {
        self.state.table.get(descriptor)?;
        match request {
            libc::FIOCLEX | libc::FIONCLEX => {
                self.change().table.set_close_on_exec(descriptor, request == libc::FIOCLEX)?;
                Ok(DONE)
            }
            _ => Err(Errno::NOTTY.into()),
        }
    }

    pub(super) fn truncate(&mut self, descriptor: u64, size: u64) -> Served {
        let description = self.state.table.get(descriptor)?;
        let Open::Layer(inode) = description.open else { return Err(Errno::INVAL.into()) };
        if !description.writes() || size > i64::MAX as u64 {
            return Err(Errno::INVAL.into());
        }
        self.change().tree.edit(inode, size, |bytes| bytes.resize(size as usize, 0))?;
        Ok(DONE)
    }

    /// There is nothing behind memory that bytes could be flushed to.
    pub(super) fn flush(&mut self, descriptor: u64) -> Served {
        self.state.table.get(descriptor)?;
        Ok(DONE)
    }

    /// Everything is always ready: a read of the input that must wait makes the guest idle.
    pub(super) fn poll(&mut self, process: &mut Process, list: u64, count: u64) -> Served {
        if count > POLLED {
            return Err(Errno::INVAL.into());
        }
        let mut ready = 0;
        for index in 0..count {
            let entry = list.wrapping_add(8 * index);
            let bytes = copy_in(process, entry, 6)?;
            let number = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            let wanted = i16::from_le_bytes([bytes[4], bytes[5]]);
            let events = match self.state.table.get(number as u32 as u64) {
                _ if number < 0 => 0,
                Ok(_) => wanted & (libc::POLLIN | libc::POLLOUT),
                Err(_) => libc::POLLNVAL,
            };
            copy_out(process, entry.wrapping_add(6), &events.to_le_bytes())?;
            ready += u64::from(events != 0);
        }
        Ok(Outcome::Value(ready))
    }

    pub(super) fn attributes_of(&self, description: &Description) -> Served<Attributes> {
        let tree = &self.state.tree;
        match &description.open {
            Open::Input | Open::Output | Open::Messages => Ok(Attributes {
                inode: 1,
                mode: libc::S_IFIFO | 0o600,
                links: 1,
                ..Attributes::default()
            }),
            // Its name may be gone, or be another's.
            Open::Layer(inode) => Ok(tree.attributes(&Found::Layer(*inode))?),
            Open::Host(_) | Open::Directory(_) | Open::Device(_) | Open::Place => {
                Ok(tree.attributes(&tree.look(&description.path))?)
            }
        }
    }

    pub(super) fn fstat(&mut self, process: &mut Process, descriptor: u64, to: u64) -> Served {
        let attributes = self.attributes_of(self.state.table.get(descriptor)?)?;
        copy_out(process, to, &encode::stat(&attributes))?;
        Ok(DONE)
    }

    fn attributes_at(
        &self,
        process: &Process,
        at: u64,
        path: u64,
        flags: u64,
    ) -> Served<Attributes> {
        let flags = flags as i32;
        let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
        if flags & libc::AT_EMPTY_PATH != 0 && (path == 0 || copy_in(process, path, 1)? == [0]) {
            if at as i32 == libc::AT_FDCWD {
                let tree = &self.state.tree;
                return Ok(tree.attributes(&tree.look(&self.state.directory))?);
            }
            return self.attributes_of(self.state.table.get(at)?);
        }
        let (_, found) = self.follow(process, at, path, follow)?;
        Ok(self.state.tree.attributes(&found)?)
    }

    pub(super) fn stat(
        &mut self,
        process: &mut Process,
        at: u64,
        path: u64,
        to: u64,
        flags: u64,
    ) -> Served {
        let attributes = self.attributes_at(process, at, path, flags)?;
        copy_out(process, to, &encode::stat(&attributes))?;
        Ok(DONE)
    }

    pub(super) fn statx(
        &mut self,
        process: &mut Process,
        at: u64,
        path: u64,
        flags: u64,
        to: u64,
    ) -> Served {
        let attributes = self.attributes_at(process, at, path, flags)?;
        copy_out(process, to, &encode::statx(&attributes))?;
        Ok(DONE)
    }

    pub(super) fn access(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        mode: u64,
        flags: u64,
    ) -> Served {
        let attributes = self.attributes_at(process, at, path, flags)?;
        if mode as i32 & libc::X_OK != 0 && attributes.mode & 0o111 == 0 {
            return Err(Errno::ACCESS.into());
        }
        Ok(DONE)
    }
}
