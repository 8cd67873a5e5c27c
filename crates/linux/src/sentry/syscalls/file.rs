//! System calls on open files: opening, closing, duplicating, and their attributes.

use std::sync::Arc;

use afresh_files::{Access, Kind, New, Node, Stat, Tree, Walk, Whence};
use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::{self, FileStatus};
use crate::sentry::fs::devices::is_special;
use crate::sentry::fs::permissions::access_of;
use crate::sentry::fs::proc_files::ResolvedPath;
use crate::sentry::fs::proc_paths::ProcTarget;
use crate::sentry::fs::proc_settings::ProcFile;
use crate::sentry::fs::special_files::SOCKET;
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::open_fifo::Fifo;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::mm::user_memory::{copy_in, copy_out, path_in};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::open_how::Resolve;
use crate::sentry::tty::terminals::TerminalEnd;

/// Two descriptors, as the guest reads them.
pub(in crate::sentry) type Pair = [u8; 8];

impl Sentry {
    /// The directory that relative paths of a call start from.
    pub(in crate::sentry) fn base(&self, at: u64, path: &[u8]) -> SyscallResult<Node> {
        if path.is_empty() {
            return Err(Errno::NOENT.into());
        }
        if path.starts_with(b"/") {
            return Ok(Tree::ROOT);
        }
        if at as i32 == libc::AT_FDCWD {
            return Ok(self.state.current().directory);
        }
        match &self.state.table.get(at)?.open {
            FileObject::File(open) if self.state.tree.stat(open.node)?.kind == Kind::Directory => {
                Ok(open.node)
            }
            _ => Err(Errno::NOTDIR.into()),
        }
    }

    /// Copies a path in and resolves it.
    pub(in crate::sentry) fn follow(
        &self,
        process: &Process,
        at: u64,
        path: u64,
        links: bool,
    ) -> SyscallResult<Node> {
        let path = path_in(process, path)?;
        match self.reach(at, &path, |walk| walk.follow(links))? {
            ResolvedPath::Place(place) => Ok(place.node()?),
            ResolvedPath::Own(meant) => self.node_of(&meant),
        }
    }

    /// Copies a path in whose last name is created, removed or renamed.
    pub(in crate::sentry) fn place(
        &self,
        process: &Process,
        at: u64,
        path: u64,
    ) -> SyscallResult<afresh_files::ResolvedName> {
        let path = path_in(process, path)?;
        match self.reach(at, &path, Walk::name)? {
            ResolvedPath::Place(place) => Ok(place),
            ResolvedPath::Own(_) => Err(Errno::PERM.into()),
        }
    }

    pub(in crate::sentry) fn sys_openat(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        flags: u64,
        mode: u64,
    ) -> SyscallResult {
        let name = path_in(process, path)?;
        self.open_within(at, &name, flags, mode, Resolve::default())
    }

    /// Opens a file, under conditions on the way there.
    pub(in crate::sentry) fn open_within(
        &mut self,
        at: u64,
        name: &[u8],
        flags: u64,
        mode: u64,
        resolve: Resolve,
    ) -> SyscallResult {
        let flags = flags as i32;
        if let Some(opened) = self.met(flags) {
            return opened;
        }
        let has = |flag: i32| flags & flag == flag;
        let only_named = has(libc::O_PATH);
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let exclusive = has(libc::O_CREAT | libc::O_EXCL);
        let follows = !has(libc::O_NOFOLLOW);
        let how = |walk: Walk| if exclusive { walk.name() } else { walk.follow(follows) };
        let place = match self.reach_within(at, name, resolve, how)? {
            ResolvedPath::Place(place) => place,
            ResolvedPath::Own(meant) => return self.open_meant(&meant, flags),
        };
        let mode = mode as u32 & 0o7777;
        let now = crate::sentry::kernel::time::now();
        let access = access_of(flags);
        if has(libc::O_TMPFILE) {
            let directory = place.node()?;
            if self.state.tree.stat(directory)?.kind != Kind::Directory {
                return Err(Errno::NOTDIR.into());
            }
            if !writes {
                return Err(Errno::INVAL.into());
            }
            self.state.may_change(directory)?;
            let inherited = self.state.inheritance(directory, mode, false)?;
            let state = self.change();
            let node = state.tree.create_unnamed(inherited.mode, now)?;
            let open = state
                .set_inherited(node, &inherited)
                .and_then(|()| Ok(state.tree.open(node, access)?));
            state.tree.release(node);
            return self.add(FileObject::File(open?), flags);
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
                let node = self.change().create_at(&place, New::File, mode)?;
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
            Kind::Directory if has(libc::O_TRUNC) && !only_named => {
                return Err(Errno::ISDIR.into());
            }
            Kind::Directory if has(libc::O_DIRECT) && !only_named => {
                return Err(Errno::INVAL.into());
            }
            Kind::Directory => {}
            _ if has(libc::O_DIRECTORY) => return Err(Errno::NOTDIR.into()),
            Kind::File if has(libc::O_TRUNC) && !only_named && place.found.is_some() => {
                self.cut(node, now)?;
            }
            _ => {}
        }
        self.open_object(node, &stat, access, flags, Some((place.directory, place.name)))
    }

    /// Opens a file or directory of the tree, or the device that a node stands for, unless `O_PATH`
    /// asks for the node itself.
    pub(in crate::sentry) fn open_object(
        &mut self,
        node: Node,
        stat: &Stat,
        access: Access,
        flags: i32,
        found: Option<(Node, Arc<[u8]>)>,
    ) -> SyscallResult {
        let is_device = stat.kind == Kind::Device && flags & libc::O_PATH == 0;
        if is_device && is_special(stat.device) {
            return self.open_special(stat.device, node, access, flags, found);
        }
        let open = self.change().tree.open(node, access)?;
        match self.device_of(stat.device).filter(|_| is_device) {
            Some(device) => self.add_found(FileObject::Device(device, open), flags, found),
            None => self.add_found(FileObject::File(open), flags, found),
        }
    }

    /// Truncates an opened file.
    pub(in crate::sentry) fn cut(
        &mut self,
        node: Node,
        now: afresh_files::Time,
    ) -> SyscallResult<()> {
        let size = self.state.tree.stat(node)?.size;
        self.state.seals.may_resize(node, size, 0)?;
        let state = self.change();
        state.tree.set_size(node, 0, now)?;
        state.tell_file(node, libc::IN_MODIFY);
        Ok(())
    }

    /// A file that is made as it is opened, and cannot be written.
    pub(in crate::sentry) fn open_text(&mut self, text: &[u8], flags: i32) -> SyscallResult {
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            return Err(Errno::ACCESS.into());
        }
        self.state.table.check_room()?;
        let (tree, now) = (&mut self.change().tree, crate::sentry::kernel::time::now());
        let node = tree.create_unnamed(0o444, now)?;
        let written = tree.write(node, 0, text, now);
        let access = Access { read: true, write: false, append: false };
        let open = tree.open(node, access);
        tree.release(node);
        written?;
        self.add(FileObject::File(open?), flags)
    }

    /// A descriptor for an opened object, which is closed again where the table is full.
    pub(in crate::sentry) fn add(&mut self, open: FileObject, flags: i32) -> SyscallResult {
        self.add_found(open, flags, None)
    }

    /// As [`Sentry::add`], with the directory and the name that were opened.
    pub(in crate::sentry) fn add_found(
        &mut self,
        open: FileObject,
        flags: i32,
        found: Option<(Node, Arc<[u8]>)>,
    ) -> SyscallResult {
        let kept = libc::O_ACCMODE | libc::O_APPEND | libc::O_NONBLOCK | libc::O_PATH;
        let description = Description { found, ..Description::new(open, flags & kept) };
        let close_on_exec = flags & libc::O_CLOEXEC != 0;
        let state = self.change();
        state.tell_open(&description, true);
        match state.table.add(description, close_on_exec) {
            Ok(number) => Ok(SyscallControl::Value(u64::from(number))),
            Err((errno, description)) => {
                state.forget(Some(*description));
                Err(errno.into())
            }
        }
    }

    pub(in crate::sentry) fn close(&mut self, descriptor: u64) -> SyscallResult {
        self.state.table.get(descriptor)?;
        let state = self.change();
        let last = state.table.close(descriptor)?;
        state.forget(last);
        Ok(ZERO)
    }

    pub(in crate::sentry) fn sys_close_range(
        &mut self,
        first: u64,
        last: u64,
        flags: u64,
    ) -> SyscallResult {
        const CLOEXEC: u32 = 4;
        let (first, last, flags) = (first as u32, last as u32, flags as u32);
        if first > last || flags & !(CLOEXEC | 2) != 0 {
            return Err(Errno::INVAL.into());
        }
        let numbers = self.state.table.numbers(first.into(), last.into());
        if flags & CLOEXEC != 0 {
            let table = &mut self.change().table;
            numbers.into_iter().try_for_each(|number| table.set_close_on_exec(number, true))?;
            return Ok(ZERO);
        }
        self.closing(numbers.clone(), |sentry| {
            sentry.change().close_all(&numbers);
            Ok(ZERO)
        })
    }

    pub(in crate::sentry) fn sys_lseek(
        &mut self,
        descriptor: u64,
        offset: i64,
        whence: u64,
    ) -> SyscallResult {
        let whence = match whence as i32 {
            libc::SEEK_SET => Whence::Start,
            libc::SEEK_CUR => Whence::Current,
            libc::SEEK_END => Whence::End,
            libc::SEEK_DATA => Whence::Data,
            libc::SEEK_HOLE => Whence::Hole,
            _ => return Err(Errno::INVAL.into()),
        };
        let open = match &self.state.table.get(descriptor)?.open {
            FileObject::File(open) => open,
            FileObject::Device(..) => return Ok(ZERO),
            FileObject::Folder(folder, at) => {
                let at = match whence {
                    Whence::Start => offset,
                    Whence::Current => (*at as i64).saturating_add(offset),
                    // Their size is 0.
                    Whence::End => offset,
                    _ => return Err(Errno::INVAL.into()),
                };
                let at = u64::try_from(at).map_err(|_| Errno::INVAL)?;
                let open = FileObject::Folder(*folder, at);
                self.change().table.get_mut(descriptor)?.open = open;
                return Ok(SyscallControl::Value(at));
            }
            FileObject::Proc(file) => {
                let moved = match whence {
                    Whence::Start => Some(offset),
                    Whence::Current => (file.offset as i64).checked_add(offset),
                    // Their size is 0.
                    Whence::End => Some(offset),
                    _ => None,
                };
                let moved = moved.and_then(|at| u64::try_from(at).ok()).ok_or(Errno::INVAL)?;
                let open = FileObject::Proc(ProcFile { offset: moved, ..*file });
                self.change().table.get_mut(descriptor)?.open = open;
                return Ok(SyscallControl::Value(moved));
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
            self.change().table.get_mut(descriptor)?.open = FileObject::File(moved);
        }
        Ok(SyscallControl::Value(new))
    }

    pub(in crate::sentry) fn sys_dup(&mut self, old: u64) -> SyscallResult {
        let number = self.change().table.duplicate(old, 0, false)?;
        Ok(SyscallControl::Value(u64::from(number)))
    }

    pub(in crate::sentry) fn replace(
        &mut self,
        old: u64,
        new: u64,
        flags: u64,
        same: bool,
    ) -> SyscallResult {
        self.state.table.get(old)?;
        if old as u32 == new as u32 {
            return if same { Ok(SyscallControl::Value(new)) } else { Err(Errno::INVAL.into()) };
        }
        let close_on_exec = flags & libc::O_CLOEXEC as u64 != 0;
        let state = self.change();
        let (number, last) = state.table.replace(old, new, close_on_exec)?;
        state.forget(last);
        Ok(SyscallControl::Value(u64::from(number)))
    }

    pub(in crate::sentry) fn sys_ftruncate(&mut self, descriptor: u64, size: u64) -> SyscallResult {
        let FileObject::File(open) = &self.state.table.get(descriptor)?.open else {
            return Err(Errno::INVAL.into());
        };
        let node = open.node;
        if !open.access.write || size > i64::MAX as u64 {
            return Err(Errno::INVAL.into());
        }
        self.state.seals.may_resize(node, self.state.tree.stat(node)?.size, size)?;
        self.check_size(node, self.state.tree.stat(node)?.size, size)?;
        self.change().tree.set_size(node, size, crate::sentry::kernel::time::now())?;
        self.change().tell_file(node, libc::IN_MODIFY);
        Ok(ZERO)
    }

    /// There is nothing behind memory that bytes could be flushed to.
    pub(in crate::sentry) fn sys_fsync(&mut self, descriptor: u64) -> SyscallResult {
        match self.state.table.get(descriptor)?.open {
            FileObject::File(_) => Ok(ZERO),
            _ => Err(Errno::INVAL.into()),
        }
    }

    /// `fadvise64`: nothing is read ahead.
    pub(in crate::sentry) fn sys_fadvise64(
        &mut self,
        descriptor: u64,
        len: u64,
        advice: u64,
    ) -> SyscallResult {
        let description = self.state.table.get(descriptor)?;
        if description.flags & libc::O_PATH as u32 != 0 {
            return Err(Errno::BADF.into());
        }
        match description.open {
            FileObject::Pipe { .. }
            | FileObject::Fifo(_)
            | FileObject::Terminal(_)
            | FileObject::Input
            | FileObject::Output
            | FileObject::Messages => Err(Errno::SPIPE.into()),
            _ if (len as i64) < 0
                || !(libc::POSIX_FADV_NORMAL..=libc::POSIX_FADV_NOREUSE)
                    .contains(&(advice as i32)) =>
            {
                Err(Errno::INVAL.into())
            }
            _ => Ok(ZERO),
        }
    }

    /// The attributes of the description `id`.
    pub(in crate::sentry) fn attributes_of(
        &self,
        id: u64,
        description: &Description,
    ) -> SyscallResult<FileStatus> {
        let inode = self.state.inode_of(id, &description.open);
        let none = FileStatus { inode, links: 1, ..FileStatus::default() };
        match &description.open {
            FileObject::Input
            | FileObject::Output
            | FileObject::Messages
            | FileObject::Pipe { .. } => Ok(FileStatus { mode: libc::S_IFIFO | 0o600, ..none }),
            FileObject::Socket(_) => Ok(FileStatus { mode: libc::S_IFSOCK | 0o777, ..none }),
            FileObject::Event { .. }
            | FileObject::Timer(_)
            | FileObject::Epoll(_)
            | FileObject::Process(_)
            | FileObject::Watches(_)
            | FileObject::Signals(_) => Ok(FileStatus { mode: 0o600, ..none }),
            FileObject::Queue(queue) => {
                let mode = self.state.named_queues.get(*queue).map_or(0, |queue| queue.mode);
                // The size is that of the text about it.
                Ok(FileStatus { mode: libc::S_IFREG | mode, size: 80, ..none })
            }
            FileObject::Proc(file) => {
                self.attributes_meant(&ProcTarget::Setting(file.setting), true)
            }
            FileObject::Folder(folder, _) => {
                self.attributes_meant(&ProcTarget::Folder(*folder), true)
            }
            // Its name may be removed, or be another file's.
            FileObject::File(open)
            | FileObject::Device(_, open)
            | FileObject::Fifo(Fifo { open, .. })
            | FileObject::Terminal(TerminalEnd { open, .. }) => {
                Ok(FileStatus::from(self.state.tree.stat(open.node)?))
            }
        }
    }

    pub(in crate::sentry) fn sys_fstat(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
    ) -> SyscallResult {
        let id = self.state.table.id(descriptor)?;
        let attributes = self.attributes_of(id, self.state.table.get(descriptor)?)?;
        copy_out(process, to, &abi::stat(&attributes, self.state.owner()))?;
        Ok(ZERO)
    }

    fn attributes_at(
        &self,
        process: &Process,
        at: u64,
        path: u64,
        flags: u64,
    ) -> SyscallResult<FileStatus> {
        let flags = flags as i32;
        let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
        let node = if flags & libc::AT_EMPTY_PATH != 0
            && (path == 0 || copy_in(process, path, 1)? == [0])
        {
            if at as i32 != libc::AT_FDCWD {
                return self.attributes_of(self.state.table.id(at)?, self.state.table.get(at)?);
            }
            self.state.current().directory
        } else {
            match self.reach(at, &path_in(process, path)?, |walk| walk.follow(follow))? {
                ResolvedPath::Place(place) => place.node()?,
                ResolvedPath::Own(meant) => return self.attributes_meant(&meant, follow),
            }
        };
        Ok(FileStatus::from(self.state.tree.stat(node)?))
    }

    pub(in crate::sentry) fn sys_newfstatat(
        &mut self,
        process: &mut Process,
        at: u64,
        path: u64,
        to: u64,
        flags: u64,
    ) -> SyscallResult {
        let attributes = self.attributes_at(process, at, path, flags)?;
        copy_out(process, to, &abi::stat(&attributes, self.state.owner()))?;
        Ok(ZERO)
    }

    pub(in crate::sentry) fn sys_statx(
        &mut self,
        process: &mut Process,
        at: u64,
        path: u64,
        flags: u64,
        mask: u64,
        to: u64,
    ) -> SyscallResult {
        const SYNC: u64 = (libc::AT_STATX_FORCE_SYNC | libc::AT_STATX_DONT_SYNC) as u64;
        let known = libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT | libc::AT_EMPTY_PATH;
        let unknown = flags as u32 as u64 & !(known as u64 | SYNC) != 0;
        if unknown || flags & SYNC == SYNC || mask as u32 & 1 << 31 != 0 {
            return Err(Errno::INVAL.into());
        }
        let attributes = self.attributes_at(process, at, path, flags)?;
        copy_out(process, to, &abi::statx(&attributes, self.state.owner()))?;
        Ok(ZERO)
    }

    pub(in crate::sentry) fn sys_faccessat2(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        mode: u64,
        flags: u64,
    ) -> SyscallResult {
        if mode & !7 != 0 {
            return Err(Errno::INVAL.into());
        }
        let attributes = self.attributes_at(process, at, path, flags)?;
        let is_directory = attributes.mode & libc::S_IFMT == libc::S_IFDIR;
        let may = self.state.permits(attributes.mode, is_directory, mode as u32);
        if may { Ok(ZERO) } else { Err(Errno::ACCESS.into()) }
    }
}

impl Kernel {
    /// Descriptors for both; for neither where there is no room.
    pub(in crate::sentry) fn add_pair(
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
