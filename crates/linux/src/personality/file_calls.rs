//! Calls about open files: opening, closing, duplicating, telling what they are.

use std::sync::Arc;

use afresh_files::{Access, Kind, New, Node, Tree, Walk, Whence};
use rustix::io::Errno;

use super::devices::{Device, SOCKET, is_special};
use super::encode::{self, Attributes};
use super::fifos::Fifo;
use super::permissions::allows;
use super::proc_calls::Reach;
use super::proc_paths::Meant;
use super::seals;
use super::table::{Description, Open};
use super::terminals::TerminalEnd;
use super::{DONE, Outcome, Person, Served, State, clock_calls, copy_in, copy_out, path_in};
use crate::platform::Process;

const F_SETPIPE_SZ: i32 = 1031;
const F_GETPIPE_SZ: i32 = 1032;

/// Two descriptors, as the guest reads them.
pub(super) type Pair = [u8; 8];

impl Person {
    /// The directory that relative paths of a call start from.
    pub(super) fn base(&self, at: u64, path: &[u8]) -> Served<Node> {
        if path.is_empty() {
            return Err(Errno::NOENT.into());
        }
        if path.starts_with(b"/") {
            return Ok(Tree::ROOT);
        }
        if at as i32 == libc::AT_FDCWD {
            return Ok(self.state.directory);
        }
        match &self.state.table.get(at)?.open {
            Open::File(open) if self.state.tree.stat(open.node)?.kind == Kind::Directory => {
                Ok(open.node)
            }
            _ => Err(Errno::NOTDIR.into()),
        }
    }

    /// Copies a path in and follows it: what is there.
    pub(super) fn follow(
        &self,
        process: &Process,
        at: u64,
        path: u64,
        links: bool,
    ) -> Served<Node> {
        let path = path_in(process, path)?;
        match self.reach(at, &path, |walk| walk.follow(links))? {
            Reach::Place(place) => Ok(place.node()?),
            Reach::Own(meant) => self.node_of(&meant),
        }
    }

    /// Copies a path in whose last name is to be made, removed or given away.
    pub(super) fn place(
        &self,
        process: &Process,
        at: u64,
        path: u64,
    ) -> Served<afresh_files::Place> {
        let path = path_in(process, path)?;
        match self.reach(at, &path, Walk::name)? {
            Reach::Place(place) => Ok(place),
            Reach::Own(_) => Err(Errno::PERM.into()),
        }
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
        if let Some(opened) = self.met(flags) {
            return opened;
        }
        let has = |flag: i32| flags & flag == flag;
        let only_named = has(libc::O_PATH);
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let exclusive = has(libc::O_CREAT | libc::O_EXCL);
        let name = path_in(process, path)?;
        let follows = !has(libc::O_NOFOLLOW);
        let how = |walk: Walk| if exclusive { walk.name() } else { walk.follow(follows) };
        let place = match self.reach(at, &name, how)? {
            Reach::Place(place) => place,
            Reach::Own(meant) => return self.open_meant(&meant, flags),
        };
        let mode = mode as u32 & 0o7777 & !self.state.umask;
        let now = clock_calls::now();
        let access = Access {
            read: !only_named && flags & libc::O_ACCMODE != libc::O_WRONLY,
            write: !only_named && writes,
            append: !only_named && has(libc::O_APPEND),
        };
        if has(libc::O_TMPFILE) {
            let directory = place.node()?;
            if self.state.tree.stat(directory)?.kind != Kind::Directory {
                return Err(Errno::NOTDIR.into());
            }
            if !writes {
                return Err(Errno::INVAL.into());
            }
            self.state.may_change(directory)?;
            let tree = &mut self.change().tree;
            let node = tree.create_unnamed(mode, now)?;
            let open = tree.open(node, access);
            tree.release(node);
            return self.add(Open::File(open?), flags);
        }
        if exclusive && place.found.is_some() {
            return Err(Errno::EXIST.into());
        }
        if has(libc::O_CREAT) {
            self.state.may_make(&place)?;
        }
        let node = match place.found {
            Some((node, _)) => node,
            None if has(libc::O_CREAT) && !only_named => {
                self.state.table.check_room()?;
                let node = self.change().tree.create_at(&place, New::File, mode, now)?;
                self.change().tell_made(&place);
                node
            }
            None => return Err(Errno::NOENT.into()),
        };
        let stat = self.state.tree.stat(node)?;
        if place.found.is_some() && stat.kind != Kind::Link {
            self.may_open(stat.mode, access, flags)?;
        }
        match stat.kind {
            Kind::Link if !only_named => return Err(Errno::LOOP.into()),
            Kind::Device if stat.device == SOCKET && !only_named => {
                return Err(Errno::NXIO.into());
            }
            Kind::Directory if access.write || has(libc::O_CREAT) => {
                return Err(Errno::ISDIR.into());
            }
            Kind::Directory => {}
            _ if has(libc::O_DIRECTORY) => return Err(Errno::NOTDIR.into()),
            Kind::File if has(libc::O_TRUNC) && !only_named && place.found.is_some() => {
                self.cut(node, now)?;
            }
            _ => {}
        }
        let found = Some((place.directory, place.name));
        if stat.kind == Kind::Device && is_special(stat.device) && !only_named {
            return self.open_special(stat.device, node, access, flags, found);
        }
        let open = self.change().tree.open(node, access)?;
        match Device::of(stat.device).filter(|_| stat.kind == Kind::Device && !only_named) {
            Some(device) => self.add_found(Open::Device(device, open), flags, found),
            None => self.add_found(Open::File(open), flags, found),
        }
    }

    /// A file that is opened loses what it holds.
    pub(super) fn cut(&mut self, node: Node, now: afresh_files::Time) -> Served<()> {
        let size = self.state.tree.stat(node)?.size;
        self.state.seals.may_resize(node, size, 0)?;
        let state = self.change();
        state.tree.set_size(node, 0, now)?;
        state.tell_file(node, libc::IN_MODIFY);
        Ok(())
    }

    /// A file that is made as it is opened, and cannot be written.
    pub(super) fn open_text(&mut self, text: &[u8], flags: i32) -> Served {
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            return Err(Errno::ACCESS.into());
        }
        self.state.table.check_room()?;
        let (tree, now) = (&mut self.change().tree, clock_calls::now());
        let node = tree.create_unnamed(0o444, now)?;
        let written = tree.write(node, 0, text, now);
        let access = Access { read: true, write: false, append: false };
        let open = tree.open(node, access);
        tree.release(node);
        written?;
        self.add(Open::File(open?), flags)
    }

    /// A descriptor for what was opened; what finds no room is closed again.
    pub(super) fn add(&mut self, open: Open, flags: i32) -> Served {
        self.add_found(open, flags, None)
    }

    /// As [`Person::add`], of what was found by this name in this directory.
    pub(super) fn add_found(
        &mut self,
        open: Open,
        flags: i32,
        found: Option<(Node, Arc<[u8]>)>,
    ) -> Served {
        let kept = libc::O_ACCMODE | libc::O_APPEND | libc::O_NONBLOCK | libc::O_PATH;
        let description = Description { found, ..Description::new(open, flags & kept) };
        let close_on_exec = flags & libc::O_CLOEXEC != 0;
        let state = self.change();
        state.tell_open(&description, true);
        match state.table.add(description, close_on_exec) {
            Ok(number) => Ok(Outcome::Value(u64::from(number))),
            Err((errno, description)) => {
                state.forget(Some(*description));
                Err(errno.into())
            }
        }
    }

    pub(super) fn close(&mut self, descriptor: u64) -> Served {
        self.state.table.get(descriptor)?;
        let state = self.change();
        let last = state.table.close(descriptor)?;
        state.forget(last);
        Ok(DONE)
    }

    pub(super) fn close_range(&mut self, first: u64, last: u64, flags: u64) -> Served {
        const CLOEXEC: u64 = 4;
        if first > last || flags & !(CLOEXEC | 2) != 0 {
            return Err(Errno::INVAL.into());
        }
        let state = self.change();
        for number in state.table.numbers(first, last & u64::from(u32::MAX)) {
            if flags & CLOEXEC != 0 {
                state.table.set_close_on_exec(number, true)?;
            } else {
                let last = state.table.close(number)?;
                state.forget(last);
            }
        }
        Ok(DONE)
    }

    pub(super) fn seek(&mut self, descriptor: u64, offset: i64, whence: u64) -> Served {
        let whence = match whence as i32 {
            libc::SEEK_SET => Whence::Start,
            libc::SEEK_CUR => Whence::Current,
            libc::SEEK_END => Whence::End,
            libc::SEEK_DATA => Whence::Data,
            libc::SEEK_HOLE => Whence::Hole,
            _ => return Err(Errno::INVAL.into()),
        };
        let open = match &self.state.table.get(descriptor)?.open {
            Open::File(open) => open,
            Open::Device(..) => return Ok(DONE),
            Open::Folder(folder, at) => {
                let at = match whence {
                    Whence::Start => offset,
                    Whence::Current => (*at as i64).saturating_add(offset),
                    _ => return Err(Errno::INVAL.into()),
                };
                let at = u64::try_from(at).map_err(|_| Errno::INVAL)?;
                let open = Open::Folder(*folder, at);
                self.change().table.get_mut(descriptor)?.open = open;
                return Ok(Outcome::Value(at));
            }
            _ => return Err(Errno::SPIPE.into()),
        };
        let mut moved = open.clone();
        let new =
            moved.seek(&self.state.tree, whence, offset).map_err(|refused| match refused {
                // Only where data and holes are looked for.
                afresh_files::Refused::Missing => Errno::NXIO,
                other => other.errno(),
            })?;
        if *open != moved {
            self.change().table.get_mut(descriptor)?.open = Open::File(moved);
        }
        Ok(Outcome::Value(new))
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
        let state = self.change();
        let (number, last) = state.table.replace(old, new, close_on_exec)?;
        state.forget(last);
        Ok(Outcome::Value(u64::from(number)))
    }

    pub(super) fn control(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        code: u64,
        value: u64,
    ) -> Served {
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
                let description = self.change().table.get_mut(descriptor)?;
                description.flags = flags;
                if let Open::File(open) = &mut description.open {
                    open.access.append = flags & libc::O_APPEND as u32 != 0;
                }
                Ok(DONE)
            }
            // Who would be sent `SIGIO`: nobody ever is.
            libc::F_SETOWN if description.open.is_stream() => Ok(DONE),
            F_GETPIPE_SZ | F_SETPIPE_SZ
                if matches!(description.open, Open::Pipe { .. } | Open::Fifo(_)) =>
            {
                self.pipe_size(descriptor, (code as i32 == F_SETPIPE_SZ).then_some(value))
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

    pub(super) fn device(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        request: u64,
        value: u64,
    ) -> Served {
        let description = self.state.table.get(descriptor)?;
        match request {
            request
                if matches!(description.open, Open::Terminal(_))
                    && ![libc::FIONBIO, libc::FIOCLEX, libc::FIONCLEX].contains(&request) =>
            {
                self.control_terminal(process, descriptor, request, value)
            }
            libc::FIONBIO => {
                let on = copy_in(process, value, 4)? != [0; 4];
                let bit = libc::O_NONBLOCK as u32;
                let flags = description.flags & !bit | if on { bit } else { 0 };
                self.change().table.get_mut(descriptor)?.flags = flags;
                Ok(DONE)
            }
            libc::FIOASYNC if description.open.is_stream() => {
                copy_in(process, value, 4)?;
                Ok(DONE)
            }
            libc::FIONREAD if let Open::Watches(watches) = &description.open => {
                let len = watches.readable() as u32;
                copy_out(process, value, &len.to_le_bytes())?;
                Ok(DONE)
            }
            libc::FIONREAD if description.open.is_stream() => {
                let ends = description.open.ends();
                let read = ends.iter().find(|(_, writes)| !writes).or(ends.first());
                let held = read.and_then(|(id, _)| self.state.channels.get(*id));
                // Of datagrams the next one's alone.
                let next = |channel: &super::channels::Channel| match channel.letter() {
                    Some(letter) => letter.len,
                    None => channel.len(),
                };
                let len = held.map_or(0, next) as u32;
                copy_out(process, value, &len.to_le_bytes())?;
                Ok(DONE)
            }
            libc::FIOCLEX | libc::FIONCLEX => {
                self.change().table.set_close_on_exec(descriptor, request == libc::FIOCLEX)?;
                Ok(DONE)
            }
            _ => Err(Errno::NOTTY.into()),
        }
    }

    pub(super) fn truncate(&mut self, descriptor: u64, size: u64) -> Served {
        let Open::File(open) = &self.state.table.get(descriptor)?.open else {
            return Err(Errno::INVAL.into());
        };
        let node = open.node;
        if !open.access.write || size > i64::MAX as u64 {
            return Err(Errno::INVAL.into());
        }
        self.state.seals.may_resize(node, self.state.tree.stat(node)?.size, size)?;
        self.change().tree.set_size(node, size, clock_calls::now())?;
        self.change().tell_file(node, libc::IN_MODIFY);
        Ok(DONE)
    }

    /// There is nothing behind memory that bytes could be flushed to.
    pub(super) fn flush(&mut self, descriptor: u64) -> Served {
        match self.state.table.get(descriptor)?.open {
            Open::File(_) => Ok(DONE),
            _ => Err(Errno::INVAL.into()),
        }
    }

    /// `fadvise64`: nothing is read ahead.
    pub(super) fn expect(&mut self, descriptor: u64, advice: u64) -> Served {
        match self.state.table.get(descriptor)?.open {
            Open::Pipe { .. }
            | Open::Fifo(_)
            | Open::Terminal(_)
            | Open::Input
            | Open::Output
            | Open::Messages => Err(Errno::SPIPE.into()),
            _ if advice as i32 > libc::POSIX_FADV_NOREUSE || (advice as i32) < 0 => {
                Err(Errno::INVAL.into())
            }
            _ => Ok(DONE),
        }
    }

    /// What is told of the description `id`.
    pub(super) fn attributes_of(&self, id: u64, description: &Description) -> Served<Attributes> {
        let inode = self.state.inode_of(id, &description.open);
        let none = Attributes { inode, links: 1, ..Attributes::default() };
        match &description.open {
            Open::Input | Open::Output | Open::Messages | Open::Pipe { .. } => {
                Ok(Attributes { mode: libc::S_IFIFO | 0o600, ..none })
            }
            Open::Socket(_) => Ok(Attributes { mode: libc::S_IFSOCK | 0o777, ..none }),
            Open::Event { .. }
            | Open::Timer(_)
            | Open::Epoll(_)
            | Open::Process(_)
            | Open::Watches(_)
            | Open::Signals(_) => Ok(Attributes { mode: 0o600, ..none }),
            Open::Folder(folder, _) => self.attributes_meant(&Meant::Folder(*folder), true),
            // Its name may be gone, or be another's.
            Open::File(open)
            | Open::Device(_, open)
            | Open::Fifo(Fifo { open, .. })
            | Open::Terminal(TerminalEnd { open, .. }) => {
                Ok(Attributes::from(self.state.tree.stat(open.node)?))
            }
        }
    }

    pub(super) fn fstat(&mut self, process: &mut Process, descriptor: u64, to: u64) -> Served {
        let id = self.state.table.id(descriptor)?;
        let attributes = self.attributes_of(id, self.state.table.get(descriptor)?)?;
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
        let node = if flags & libc::AT_EMPTY_PATH != 0
            && (path == 0 || copy_in(process, path, 1)? == [0])
        {
            if at as i32 != libc::AT_FDCWD {
                return self.attributes_of(self.state.table.id(at)?, self.state.table.get(at)?);
            }
            self.state.directory
        } else {
            match self.reach(at, &path_in(process, path)?, |walk| walk.follow(follow))? {
                Reach::Place(place) => place.node()?,
                Reach::Own(meant) => return self.attributes_meant(&meant, follow),
            }
        };
        Ok(Attributes::from(self.state.tree.stat(node)?))
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
        if allows(attributes.mode, mode as u32) { Ok(DONE) } else { Err(Errno::ACCESS.into()) }
    }
}

impl State {
    /// Descriptors for both; for neither where there is no room.
    pub(super) fn add_pair(
        &mut self,
        one: Description,
        other: Description,
        close_on_exec: bool,
    ) -> Result<Pair, Errno> {
        let first = match self.table.add(one, close_on_exec) {
            Ok(number) => number,
            Err((errno, one)) => {
                self.forget(Some(*one));
                self.forget(Some(other));
                return Err(errno);
            }
        };
        let second = match self.table.add(other, close_on_exec) {
            Ok(number) => number,
            Err((errno, other)) => {
                let last = self.table.close(first.into())?;
                self.forget(last);
                self.forget(Some(*other));
                return Err(errno);
            }
        };
        let mut pair = [0; 8];
        pair[..4].copy_from_slice(&first.to_le_bytes());
        pair[4..].copy_from_slice(&second.to_le_bytes());
        Ok(pair)
    }
}
