//! Calls about names: links, directories, where the program is.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use rustix::io::Errno;

use super::encode::Bytes;
use super::table::Open;
use super::tree::Kind;
use super::{DONE, Found, Outcome, Person, Served, clock_calls, copy_out, path_in};
use crate::platform::Process;

impl Person {
    pub(super) fn read_link(
        &mut self,
        process: &mut Process,
        at: u64,
        path: u64,
        to: u64,
        len: u64,
    ) -> Served {
        let (_, found) = self.follow(process, at, path, false)?;
        let target = self.state.tree.read_link(&found)?;
        let bytes = target.as_os_str().as_bytes();
        let bytes = &bytes[..bytes.len().min(len as usize)];
        copy_out(process, to, bytes)?;
        Ok(Outcome::Value(bytes.len() as u64))
    }

    pub(super) fn list(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
        len: u64,
    ) -> Served {
        let description = self.state.table.get(descriptor)?;
        let path = description.path.clone();
        let names = match &description.open {
            Open::Directory(Some(names)) if description.offset > 0 => Arc::clone(names),
            Open::Directory(_) => {
                let mut names: Vec<OsString> = vec![".".into(), "..".into()];
                names.extend(self.state.tree.list(&path));
                let names = Arc::new(names);
                let open = Open::Directory(Some(Arc::clone(&names)));
                self.change().table.get_mut(descriptor)?.open = open;
                names
            }
            _ => return Err(Errno::NOTDIR.into()),
        };
        let start = self.state.table.get(descriptor)?.offset as usize;
        let mut bytes = Bytes::default();
        let mut next = start;
        for name in names.iter().skip(start) {
            let length = (19 + name.len() + 1).next_multiple_of(8);
            if bytes.0.len() + length > (len as usize).min(1 << 16) {
                break;
            }
            next += 1;
            let found = if name == "." || name == ".." {
                Found::Missing
            } else {
                self.state.tree.look(&path.join(name))
            };
            let attributes = self.state.tree.attributes(&found).ok();
            let inode = attributes.map_or(1, |a| a.inode);
            let kind = attributes.map_or(libc::S_IFDIR, |a| a.mode & libc::S_IFMT) >> 12;
            let before = bytes.0.len();
            bytes = bytes.word(inode).word(next as u64).half(length as u16);
            bytes.0.push(kind as u8);
            bytes.0.extend(name.as_bytes());
            bytes.0.resize(before + length, 0);
        }
        if next == start && start < names.len() {
            return Err(Errno::INVAL.into());
        }
        copy_out(process, to, &bytes.0)?;
        self.change().table.get_mut(descriptor)?.offset = next as u64;
        Ok(Outcome::Value(bytes.0.len() as u64))
    }

    pub(super) fn where_am_i(&mut self, process: &mut Process, to: u64, len: u64) -> Served {
        let mut bytes = self.state.directory.as_os_str().as_bytes().to_vec();
        bytes.push(0);
        if bytes.len() as u64 > len {
            return Err(Errno::RANGE.into());
        }
        copy_out(process, to, &bytes)?;
        Ok(Outcome::Value(bytes.len() as u64))
    }

    pub(super) fn go(&mut self, process: &Process, path: u64) -> Served {
        let (path, found) = self.follow(process, libc::AT_FDCWD as u64, path, true)?;
        if !self.state.tree.attributes(&found)?.is(libc::S_IFDIR) {
            return Err(Errno::NOTDIR.into());
        }
        self.change().directory = path;
        Ok(DONE)
    }

    pub(super) fn go_to(&mut self, descriptor: u64) -> Served {
        let description = self.state.table.get(descriptor)?;
        if !self.attributes_of(description)?.is(libc::S_IFDIR) {
            return Err(Errno::NOTDIR.into());
        }
        let path = description.path.clone();
        self.change().directory = path;
        Ok(DONE)
    }

    pub(super) fn make_directory(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        mode: u64,
    ) -> Served {
        let (path, found) = self.follow(process, at, path, true)?;
        if found != Found::Missing {
            return Err(Errno::EXIST.into());
        }
        let mode = mode as u32 & !self.state.umask;
        self.change().tree.create(path, Kind::Directory, mode, clock_calls::now())?;
        Ok(DONE)
    }

    pub(super) fn unlink(&mut self, process: &Process, at: u64, path: u64, flags: u64) -> Served {
        let (path, found) = self.follow(process, at, path, false)?;
        if path.parent().is_none() {
            return Err(Errno::BUSY.into());
        }
        let directory = flags & libc::AT_REMOVEDIR as u64 != 0;
        self.change().tree.remove(&path, &found, directory)?;
        Ok(DONE)
    }

    pub(super) fn rename(
        &mut self,
        process: &Process,
        at: u64,
        from: u64,
        to_at: u64,
        to: u64,
        flags: u64,
    ) -> Served {
        let (from, found) = self.follow(process, at, from, false)?;
        let (to, there) = self.follow(process, to_at, to, false)?;
        let tree = &self.state.tree;
        let directory = tree.attributes(&found)?.is(libc::S_IFDIR);
        if flags & u64::from(libc::RENAME_NOREPLACE) != 0 && there != Found::Missing {
            return Err(Errno::EXIST.into());
        }
        if flags & !u64::from(libc::RENAME_NOREPLACE) != 0 || from.parent().is_none() {
            return Err(Errno::INVAL.into());
        }
        if there != Found::Missing && from != to {
            match (directory, tree.attributes(&there)?.is(libc::S_IFDIR)) {
                (true, false) => return Err(Errno::NOTDIR.into()),
                (false, true) => return Err(Errno::ISDIR.into()),
                (true, true) if !tree.list(&to).is_empty() => return Err(Errno::NOTEMPTY.into()),
                _ => {}
            }
        }
        self.change().tree.rename(&from, &found, &to)?;
        Ok(DONE)
    }

    pub(super) fn make_link(
        &mut self,
        process: &Process,
        target: u64,
        at: u64,
        path: u64,
    ) -> Served {
        let target = path_in(process, target)?;
        let (path, found) = self.follow(process, at, path, false)?;
        if found != Found::Missing {
            return Err(Errno::EXIST.into());
        }
        self.change().tree.create(path, Kind::Link(target), 0o777, clock_calls::now())?;
        Ok(DONE)
    }

    pub(super) fn chmod(&mut self, process: &Process, at: u64, path: u64, mode: u64) -> Served {
        let (path, found) = self.follow(process, at, path, true)?;
        let tree = &mut self.change().tree;
        let inode = tree.writable(&path, &found, true)?;
        tree.inode_mut(inode)?.mode = mode as u32 & 0o7777;
        Ok(DONE)
    }

    pub(super) fn fchmod(&mut self, descriptor: u64, mode: u64) -> Served {
        match self.state.table.get(descriptor)?.open {
            Open::Layer(inode) => {
                self.change().tree.inode_mut(inode)?.mode = mode as u32 & 0o7777;
                Ok(DONE)
            }
            _ => Err(Errno::PERM.into()),
        }
    }

    pub(super) fn set_umask(&mut self, mask: u64) -> Served {
        let old = self.state.umask;
        self.change().umask = mask as u32 & 0o777;
        Ok(Outcome::Value(u64::from(old)))
    }
}
