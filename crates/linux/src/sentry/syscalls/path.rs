//! System calls on names: links, directories, modes, and the current directory.

use afresh_files::{Kind, New, Node, Rename, ResolvedName, Tree};
use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::DirectoryEntries;
use crate::sentry::fs::mounts::FileSystem;
use crate::sentry::fs::permissions::SEARCH;
use crate::sentry::fs::proc_files::ResolvedPath;
use crate::sentry::fs::proc_paths::ProcTarget;
use crate::sentry::fs::special_files::type_of;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::open_fifo::Fifo;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::user_namespaces::SYS_CHROOT;
use crate::sentry::mm::user_memory::{copy_out, path_in};
use crate::sentry::name_lengths::PATH_LEN;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::AT_FDCWD;
use crate::sentry::tty::terminals::TerminalEnd;

/// The last name of a path; nothing for the root and an empty path.
fn last_name(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').find(|name| !name.is_empty()).unwrap_or_default()
}

impl Sentry {
    /// `readlinkat(2)`, as on Linux.
    pub(in crate::sentry) fn sys_readlinkat(
        &mut self,
        process: &mut Process,
        at: u64,
        path: u64,
        to: u64,
        len: u64,
    ) -> SyscallResult {
        let path = path_in(process, path)?;
        if len as i32 <= 0 {
            return Err(Errno::INVAL.into());
        }
        let named = match &self.state.table.get(at).map(|description| &description.open) {
            Ok(FileObject::File(open)) if path.is_empty() => Some(open.node),
            _ => None,
        };
        let target = match named {
            Some(node) if self.state.tree.stat(node)?.kind == Kind::Link => {
                self.state.tree.read_link(node)?.to_vec()
            }
            Some(_) => return Err(Errno::NOENT.into()),
            None => match self.reach(at, &path, |walk| walk.follow(false))? {
                ResolvedPath::Place(place) => self.state.tree.read_link(place.node()?)?.to_vec(),
                ResolvedPath::Own(ProcTarget::Hidden(..)) => return Err(Errno::ACCESS.into()),
                ResolvedPath::Own(meant) => self.state.target(&meant).ok_or(Errno::INVAL)??,
            },
        };
        let bytes = &target[..target.len().min(len as usize)];
        copy_out(process, to, bytes)?;
        Ok(SyscallControl::Value(bytes.len() as u64))
    }

    /// `readlink(2)`: as `readlinkat` from the current directory.
    pub(in crate::sentry) fn sys_readlink(
        &mut self,
        process: &mut Process,
        path: u64,
        to: u64,
        len: u64,
    ) -> SyscallResult {
        self.sys_readlinkat(process, AT_FDCWD, path, to, len)
    }

    /// `getdents64(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getdents64(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
        len: u64,
    ) -> SyscallResult {
        self.list_directory(process, descriptor, (to, len), false)
    }

    /// `getdents(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getdents(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
        len: u64,
    ) -> SyscallResult {
        self.list_directory(process, descriptor, (to, len), true)
    }

    fn list_directory(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        (to, len): (u64, u64),
        older: bool,
    ) -> SyscallResult {
        if self.state.table.get(descriptor)?.is_path() {
            return Err(Errno::BADF.into());
        }
        // A length that is negative has room for nothing.
        let len = u64::try_from(len as i32).map_err(|_| Errno::INVAL)?;
        let listed = DirectoryEntries::new(len, older);
        match &self.state.table.get(descriptor)?.open {
            FileObject::File(_) => {}
            FileObject::Folder(..) => return self.list_folder(process, descriptor, to, listed),
            _ => return Err(Errno::NOTDIR.into()),
        }
        let Kernel { table, tree, .. } = self.change();
        let FileObject::File(open) = &mut table.get_mut(descriptor)?.open else {
            return Err(Errno::NOTDIR.into());
        };
        let from = open.offset;
        let mut listed = listed;
        let mut next = from;
        for (after, entry) in open.entries(tree, from)? {
            let device = match entry.kind {
                Kind::Device => tree.stat(entry.node).map_or(0, |stat| stat.device),
                _ => 0,
            };
            let kind = type_of(entry.kind, device);
            if !listed.push(tree.inode_number(entry.node), after, kind, &entry.name[..])? {
                break;
            }
            next = after;
        }
        copy_out(process, to, &listed.bytes.0)?;
        open.offset = next;
        Ok(SyscallControl::Value(listed.bytes.0.len() as u64))
    }

    /// `getcwd(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getcwd(
        &mut self,
        process: &mut Process,
        to: u64,
        len: u64,
    ) -> SyscallResult {
        let mut bytes = self.state.directory_path()?;
        bytes.push(0);
        if bytes.len() as u64 > len {
            return Err(Errno::RANGE.into());
        }
        copy_out(process, to, &bytes)?;
        Ok(SyscallControl::Value(bytes.len() as u64))
    }

    /// `chdir(2)`: a directory below `/proc` is `EACCES`.
    pub(in crate::sentry) fn sys_chdir(&mut self, process: &Process, path: u64) -> SyscallResult {
        let node = self.follow(process, AT_FDCWD, path, true)?;
        self.enter(node)
    }

    /// `fchdir(2)`: a directory below `/proc` is `ENOTDIR`.
    pub(in crate::sentry) fn sys_fchdir(&mut self, descriptor: u64) -> SyscallResult {
        match &self.state.table.get(descriptor)?.open {
            FileObject::File(open) => {
                let node = open.node;
                self.enter(node)
            }
            _ => Err(Errno::NOTDIR.into()),
        }
    }

    /// `chroot(2)`: a directory below `/proc` is `EACCES`.
    pub(in crate::sentry) fn sys_chroot(&mut self, process: &Process, path: u64) -> SyscallResult {
        let node = self.follow(process, AT_FDCWD, path, true)?;
        if self.state.tree.stat(node)?.kind != Kind::Directory {
            return Err(Errno::NOTDIR.into());
        }
        self.state.may(node, SEARCH)?;
        if self.state.credentials().effective & 1 << SYS_CHROOT == 0 {
            return Err(Errno::PERM.into());
        }
        self.change().set_root(node)?;
        self.change().spread_directories();
        Ok(ZERO)
    }

    fn enter(&mut self, node: Node) -> SyscallResult {
        if self.state.tree.stat(node)?.kind != Kind::Directory {
            return Err(Errno::NOTDIR.into());
        }
        self.state.may(node, SEARCH)?;
        self.change().enter(node)?;
        self.change().spread_directories();
        Ok(ZERO)
    }

    /// `mkdirat(2)`, as on Linux.
    pub(in crate::sentry) fn sys_mkdirat(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        mode: u64,
    ) -> SyscallResult {
        let place = self.place(process, at, path)?;
        self.create_name(&place, New::Directory, mode as u32 & 0o7777)?;
        Ok(ZERO)
    }

    /// `mkdir(2)`: as `mkdirat` from the current directory.
    pub(in crate::sentry) fn sys_mkdir(
        &mut self,
        process: &Process,
        path: u64,
        mode: u64,
    ) -> SyscallResult {
        self.sys_mkdirat(process, AT_FDCWD, path, mode)
    }

    /// Creates an object at a path, if its directory allows that, and reports the new name to
    /// watches. The process's mask applies to its mode.
    pub(in crate::sentry) fn create_name(
        &mut self,
        place: &ResolvedName,
        new: New<'_>,
        mode: u32,
    ) -> SyscallResult<()> {
        self.state.may_make(place)?;
        let state = self.change();
        state.create_at(place, new, mode)?;
        state.notify_created(place);
        Ok(())
    }

    /// `unlinkat(2)`, as on Linux.
    pub(in crate::sentry) fn sys_unlinkat(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        flags: u64,
    ) -> SyscallResult {
        if flags & !(libc::AT_REMOVEDIR as u64) != 0 {
            return Err(Errno::INVAL.into());
        }
        let place = self.place(process, at, path)?;
        if flags & libc::AT_REMOVEDIR as u64 != 0 {
            match last_name(&path_in(process, path)?) {
                b"" => return Err(Errno::BUSY.into()),
                b"." => return Err(Errno::INVAL.into()),
                b".." => return Err(Errno::NOTEMPTY.into()),
                _ => {}
            }
            if let Some((node, Kind::Directory)) = place.found
                && FileSystem::is_mount_point(&self.state.tree, node)
            {
                return Err(Errno::BUSY.into());
            }
        }
        self.state.may_remove(&place)?;
        let (tree, now) = (&mut self.change().tree, crate::sentry::kernel::time::now());
        if flags & libc::AT_REMOVEDIR as u64 != 0 {
            tree.remove_directory_at(&place, now)?;
        } else {
            tree.remove_file_at(&place, now)?;
        }
        self.change().notify_removed(&place);
        Ok(ZERO)
    }

    /// `unlink(2)`: as `unlinkat` from the current directory.
    pub(in crate::sentry) fn sys_unlink(&mut self, process: &Process, path: u64) -> SyscallResult {
        self.sys_unlinkat(process, AT_FDCWD, path, 0)
    }

    /// `rmdir(2)`: as `unlinkat` from the current directory.
    pub(in crate::sentry) fn sys_rmdir(&mut self, process: &Process, path: u64) -> SyscallResult {
        self.sys_unlinkat(process, AT_FDCWD, path, libc::AT_REMOVEDIR as u64)
    }

    /// `renameat2(2)`: `RENAME_WHITEOUT` is `EINVAL`.
    pub(in crate::sentry) fn sys_renameat2(
        &mut self,
        process: &Process,
        at: u64,
        from: u64,
        to_at: u64,
        to: u64,
        flags: u64,
    ) -> SyscallResult {
        let names = [path_in(process, from)?, path_in(process, to)?];
        let [is_plain, to_plain] = names.each_ref().map(|path| {
            let name = last_name(path);
            !matches!(name, b"" | b"." | b"..")
        });
        let from = self.place(process, at, from)?;
        let to = self.place(process, to_at, to)?;
        let tree = &self.state.tree;
        let systems = [&from, &to].map(|place| FileSystem::of_directory(tree, place.directory));
        if systems[0] != systems[1] {
            return Err(Errno::XDEV.into());
        }
        let is_busy = |place: &ResolvedName| {
            place.found.is_some_and(|(node, _)| FileSystem::is_mount_point(tree, node))
        };
        if is_plain && to_plain && (is_busy(&from) || is_busy(&to)) {
            return Err(Errno::BUSY.into());
        }
        // A directory's own name, and that of the one above it, stay.
        if !is_plain || !to_plain {
            let keeps = is_plain && flags & u64::from(libc::RENAME_NOREPLACE) != 0;
            return Err(if keeps { Errno::EXIST } else { Errno::BUSY }.into());
        }
        self.may_rename(&from, &to)?;
        let how = match flags as u32 {
            0 => Rename::Replace,
            libc::RENAME_NOREPLACE => Rename::Keep,
            libc::RENAME_EXCHANGE => Rename::Exchange,
            _ => return Err(Errno::INVAL.into()),
        };
        self.change().tree.rename_at(&from, &to, how, crate::sentry::kernel::time::now())?;
        self.change().notify_moved(&from, &to, how == Rename::Exchange);
        Ok(ZERO)
    }

    /// `renameat(2)`: as `renameat2`.
    pub(in crate::sentry) fn sys_renameat(
        &mut self,
        process: &Process,
        old_at: u64,
        old: u64,
        new_at: u64,
        new: u64,
    ) -> SyscallResult {
        self.sys_renameat2(process, old_at, old, new_at, new, 0)
    }

    /// `rename(2)`: as `renameat2` from the current directory.
    pub(in crate::sentry) fn sys_rename(
        &mut self,
        process: &Process,
        old: u64,
        new: u64,
    ) -> SyscallResult {
        self.sys_renameat2(process, AT_FDCWD, old, AT_FDCWD, new, 0)
    }

    /// `symlinkat(2)`, as on Linux.
    pub(in crate::sentry) fn sys_symlinkat(
        &mut self,
        process: &Process,
        target: u64,
        at: u64,
        path: u64,
    ) -> SyscallResult {
        let target = path_in(process, target)?;
        let place = self.place(process, at, path)?;
        self.create_name(&place, New::Link(&target), 0o777)?;
        Ok(ZERO)
    }

    /// `symlink(2)`: as `symlinkat` from the current directory.
    pub(in crate::sentry) fn sys_symlink(
        &mut self,
        process: &Process,
        target: u64,
        path: u64,
    ) -> SyscallResult {
        self.sys_symlinkat(process, target, AT_FDCWD, path)
    }

    /// `fchmodat(2)`, as on Linux.
    pub(in crate::sentry) fn sys_fchmodat(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        mode: u64,
    ) -> SyscallResult {
        let node = self.follow(process, at, path, true)?;
        let old = self.state.tree.stat(node)?.mode;
        self.state.seals.may_turn(node, old, mode as u32)?;
        self.state.check_ownership(node)?;
        self.change().set_mode(node, mode as u32)?;
        self.change().notify_file(node, libc::IN_ATTRIB);
        Ok(ZERO)
    }

    /// `chmod(2)`: as `fchmodat` from the current directory.
    pub(in crate::sentry) fn sys_chmod(
        &mut self,
        process: &Process,
        path: u64,
        mode: u64,
    ) -> SyscallResult {
        self.sys_fchmodat(process, AT_FDCWD, path, mode)
    }

    /// `fchmod(2)`: objects that are no files, such as pipes and sockets, are `EPERM`.
    pub(in crate::sentry) fn sys_fchmod(&mut self, descriptor: u64, mode: u64) -> SyscallResult {
        let description = self.state.table.get(descriptor)?;
        if description.flags & libc::O_PATH as u32 != 0 {
            return Err(Errno::BADF.into());
        }
        let node = match &description.open {
            FileObject::File(open)
            | FileObject::Device(_, open)
            | FileObject::Fifo(Fifo { open, .. })
            | FileObject::Terminal(TerminalEnd { open, .. }) => open.node,
            _ => return Err(Errno::PERM.into()),
        };
        let old = self.state.tree.stat(node)?.mode;
        self.state.seals.may_turn(node, old, mode as u32)?;
        self.state.check_ownership(node)?;
        self.change().set_mode(node, mode as u32)?;
        self.change().notify_file(node, libc::IN_ATTRIB);
        Ok(ZERO)
    }

    /// `umask(2)`, as on Linux.
    pub(in crate::sentry) fn sys_umask(&mut self, mask: u64) -> SyscallResult {
        let old = self.state.current().umask;
        self.change().current_mut().umask = mask as u32 & 0o777;
        self.change().spread_directories();
        Ok(SyscallControl::Value(u64::from(old)))
    }
}

impl Kernel {
    /// Makes `node` the directory that relative paths start from.
    pub(crate) fn enter(&mut self, node: Node) -> Result<(), afresh_files::Refused> {
        self.tree.hold(node)?;
        self.tree.release(self.processes.current.directory);
        self.processes.current.directory = node;
        Ok(())
    }
}

/// The path of a directory; `ENAMETOOLONG` for one that no call takes. A guest may nest directories
/// without a limit, so that the path is given up while it grows.
pub(crate) fn path_of(tree: &Tree, directory: Node) -> Result<Vec<u8>, Errno> {
    let (mut names, mut at, mut len) = (Vec::new(), directory, 0);
    while at != Tree::ROOT {
        let above = tree.parent(at)?;
        let name = tree.name(at).map(|(_, name)| name);
        let name = name.filter(|name| tree.lookup(above, name) == Ok(at));
        let name = match name {
            Some(name) => name,
            None => {
                let inside = tree.list(above)?;
                inside.into_iter().find(|entry| entry.node == at).ok_or(Errno::NOENT)?.name
            }
        };
        len += name.len() + 1;
        if len >= PATH_LEN {
            return Err(Errno::NAMETOOLONG);
        }
        names.push(name);
        at = above;
    }
    let mut path = Vec::with_capacity(len.max(1));
    for name in names.iter().rev() {
        path.push(b'/');
        path.extend(&name[..]);
    }
    Ok(if path.is_empty() { b"/".to_vec() } else { path })
}

/// The path of a name in a directory, as [`path_of`].
pub(crate) fn path_of_name(tree: &Tree, directory: Node, name: &[u8]) -> Result<Vec<u8>, Errno> {
    let mut path = path_of(tree, directory)?;
    if !path.ends_with(b"/") {
        path.push(b'/');
    }
    path.extend(name);
    if path.len() < PATH_LEN { Ok(path) } else { Err(Errno::NAMETOOLONG) }
}

#[cfg(test)]
mod tests {
    use afresh_files::{Budget, Time, Walk};

    use super::*;

    #[test]
    fn a_path_that_no_call_takes_is_refused() {
        let mut tree = Tree::new(Budget::default());
        let (mut at, mut depth) = (Tree::ROOT, 0);
        let mut deeper = |tree: &mut Tree, name: &[u8]| {
            let place = tree.walk(name, Walk::new(at).name()).unwrap();
            at = tree.create_at(&place, New::Directory, 0o700, Time::default()).unwrap();
            depth += 1;
            (at, depth)
        };
        for _ in 0..15 {
            deeper(&mut tree, &[b'd'; 255]);
        }
        let (last, _) = deeper(&mut tree, &[b'd'; 254]);
        let path = path_of(&tree, last).unwrap();
        assert_eq!(path.len(), PATH_LEN - 1);
        assert_eq!(tree.walk(&path, Walk::new(Tree::ROOT)).unwrap().node().unwrap(), last);
        assert_eq!(path_of_name(&tree, last, b"f"), Err(Errno::NAMETOOLONG));
        let (beyond, depth) = deeper(&mut tree, b"e");
        assert_eq!((path_of(&tree, beyond), depth), (Err(Errno::NAMETOOLONG), 17));
        assert_eq!(path_of_name(&tree, Tree::ROOT, b"f").unwrap(), b"/f");
    }
}
