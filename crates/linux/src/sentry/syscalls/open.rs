//! System calls that open files: `open`, `creat` and `openat`.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use afresh_files::{Access, Kind, New, Node, Refused, Stat, Walk};
use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::fs::devices::is_special;
use crate::sentry::fs::directory_paths::DirectoryPaths;
use crate::sentry::fs::permissions::{FilePermissions, access_of};
use crate::sentry::fs::proc_files::ResolvedPath;
use crate::sentry::fs::proc_maps::ProcMaps;
use crate::sentry::fs::special_files::SOCKET;
use crate::sentry::kernel::fd_table::{CREATED, Description, FileObject};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::mm::user_memory::path_in;
use crate::sentry::result::{SyscallControl, SyscallResult};
use crate::sentry::syscalls::AT_FDCWD;
use crate::sentry::syscalls::open_how::Resolve;

impl Sentry {
    /// `open(2)`: as `openat` from the current directory.
    pub(in crate::sentry) fn sys_open(
        &mut self,
        process: &Process,
        path: u64,
        flags: u64,
        mode: u64,
    ) -> SyscallResult {
        self.sys_openat(process, AT_FDCWD, path, flags, mode)
    }

    /// `creat(2)`: as `openat` from the current directory.
    pub(in crate::sentry) fn sys_creat(
        &mut self,
        process: &Process,
        path: u64,
        mode: u64,
    ) -> SyscallResult {
        let flags = libc::O_CREAT | libc::O_TRUNC | libc::O_WRONLY;
        self.sys_openat(process, AT_FDCWD, path, flags as u64, mode)
    }

    /// `openat(2)`: `O_SYNC`, `O_DSYNC` and `O_NOATIME` are accepted and change nothing, and
    /// neither does `O_DIRECT` on a file.
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
                .own_new(node)
                .and_then(|()| state.set_inherited(node, &inherited))
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
                self.change().notify_created(&place);
                node
            }
            None => return Err(Errno::NOENT.into()),
        };
        let stat = self.state.tree.stat(node)?;
        if place.found.is_some() && stat.kind != Kind::Link {
            self.may_open(FilePermissions::of(&stat), access, flags)?;
        }
        if place.found.is_some()
            && stat.kind == Kind::File
            && !only_named
            && let Some(waits) = self.break_leases(node, writes || has(libc::O_TRUNC), flags)?
        {
            return Ok(waits);
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
        let is_new = place.found.is_none();
        let found = Some((place.directory, place.name));
        let opened = self.open_object(node, &stat, access, flags, found)?;
        if let (true, SyscallControl::Value(number)) = (is_new, &opened) {
            self.change().table.get_mut(*number)?.flags |= CREATED;
        }
        Ok(opened)
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
        state.notify_file(node, libc::IN_MODIFY);
        Ok(())
    }

    /// A file that is made as it is opened, and cannot be written.
    pub(in crate::sentry) fn open_text(&mut self, text: &[u8], flags: i32) -> SyscallResult {
        let mut text = Some(text);
        self.open_pieces(flags, |_| text.take().map(Cow::Borrowed))
    }

    /// As [`Self::open_text`], with a list of mappings.
    pub(in crate::sentry) fn open_maps(&mut self, maps: ProcMaps, flags: i32) -> SyscallResult {
        let (mut from, mut paths) = (0, DirectoryPaths::default());
        let opened = self.open_pieces(flags, |state| {
            let (text, next) = state.maps_piece(maps, from, &mut paths)?;
            from = next;
            Some(Cow::Owned(text.into_bytes()))
        })?;
        if let SyscallControl::Value(number) = opened
            && let Some(node) = self.file_of(number)
        {
            self.change().note_map_file(node, maps.memory);
        }
        Ok(opened)
    }

    /// As [`Self::open_text`], with a text of pieces, which `next` makes one after the other. They
    /// count as bytes of the file tree. It is `ENOMEM` where there is no room for all of them, and
    /// `EINTR` past the deadline, at which the guest stops.
    fn open_pieces<'a>(
        &mut self,
        flags: i32,
        mut next: impl FnMut(&Kernel) -> Option<Cow<'a, [u8]>>,
    ) -> SyscallResult {
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            return Err(Errno::ACCESS.into());
        }
        self.state.table.check_room()?;
        let deadline = self.deadline;
        let (state, now) = (self.change(), crate::sentry::kernel::time::now());
        let node = state.tree.create_unnamed(0o444, now)?;
        let (mut written, mut size) = (Ok(()), 0);
        while let Some(piece) = next(state).filter(|_| written.is_ok()) {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                written = Err(Errno::INTR);
                break;
            }
            written = match state.tree.write(node, size, &piece, now) {
                Ok(len) if len == piece.len() => Ok(()),
                Ok(_) | Err(Refused::Full) => Err(Errno::NOMEM),
                Err(refused) => Err(refused.errno()),
            };
            size += piece.len() as u64;
        }
        let access = Access { read: true, write: false, append: false };
        let open = written.and_then(|()| Ok(state.tree.open(node, access)?));
        state.tree.release(node);
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
        let mut kept = libc::O_ACCMODE | libc::O_APPEND | libc::O_NONBLOCK | libc::O_PATH;
        if matches!(open, FileObject::File(_) | FileObject::Device(..)) {
            kept |= libc::O_DIRECT | libc::O_SYNC | libc::O_NOATIME | libc::O_ASYNC;
        }
        if flags & libc::O_PATH != 0 {
            kept |= libc::O_DIRECTORY | libc::O_NOFOLLOW;
        }
        let description = Description { found, ..Description::new(open, flags & kept) };
        let close_on_exec = flags & libc::O_CLOEXEC != 0;
        let state = self.change();
        state.notify_open(&description, true);
        match state.table.add(description, close_on_exec) {
            Ok(number) => Ok(SyscallControl::Value(u64::from(number))),
            Err((errno, description)) => {
                state.forget(Some(*description));
                Err(errno.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use afresh_files::{Budget, Tree};

    use super::*;
    use crate::sentry::mm::layout::Layout;

    #[test]
    fn a_file_of_pieces_is_made_until_the_deadline() {
        let tree = Tree::new(Budget::default());
        let state = Kernel::new(Layout::new(1 << 20), tree, None, Vec::new());
        let mut sentry = Sentry::new(Arc::new(state), 0, afresh_egress::EgressPolicy::default());
        let mut made = 0;
        let mut opened = |sentry: &mut Sentry, deadline| {
            (sentry.deadline, made) = (deadline, 0);
            let result = sentry.open_pieces(libc::O_RDONLY, |_| {
                made += 1;
                (made <= 5).then_some(Cow::Borrowed(b"piece"))
            });
            let interrupted =
                matches!(result, Err(crate::sentry::result::SyscallError::Errno(Errno::INTR)));
            assert_eq!(result.is_err(), interrupted);
            (interrupted, made)
        };
        assert_eq!(opened(&mut sentry, None), (false, 6));
        let files = sentry.state.tree.used();
        assert_eq!(opened(&mut sentry, Some(Instant::now())), (true, 1));
        assert_eq!(sentry.state.tree.used(), files, "the file is gone");
    }
}
