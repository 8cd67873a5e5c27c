//! Objects outside the tree: their paths, and opening, listing and `stat` of them.

use afresh_files::{Kind, Node, ResolvedName, Tree, Walk};
use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::{DirectoryEntries, FileStatus};
use crate::sentry::fs::mounts::FileSystem;
use crate::sentry::fs::permissions::{FilePermissions, access_of};
use crate::sentry::fs::proc_dir::ProcDir;
use crate::sentry::fs::proc_paths::ProcTarget;
use crate::sentry::fs::proc_settings::{NAMESPACES, ProcFile};
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::open_fifo::Fifo;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::mm::user_memory::copy_out;
use crate::sentry::result::{SyscallControl, SyscallResult};
use crate::sentry::tty::terminals::TerminalEnd;

/// Position of the first entry of a list of `/proc` that is not in the tree.
const BEHIND: u64 = 1 << 32;
/// As above, after the files of `/proc` itself.
const BEHIND_FILES: u64 = BEHIND + 16;

/// The target of a path.
#[derive(Debug)]
pub(in crate::sentry) enum ResolvedPath {
    Place(ResolvedName),
    /// An object outside the tree.
    Own(ProcTarget),
}

/// An entry of a list: where the next begins, its number, type and name.
type Entry = (u64, u64, u32, Vec<u8>);

impl Sentry {
    /// Resolves a path of the guest from the directory `at`, with the options in `how`.
    pub(in crate::sentry) fn reach(
        &self,
        at: u64,
        path: &[u8],
        how: impl Fn(Walk) -> Walk,
    ) -> SyscallResult<ResolvedPath> {
        match self.state.meant(at, path) {
            Some(ProcTarget::Beneath(node, rest)) => {
                let walk = how(self.state.searching(Walk::new(node)));
                return Ok(ResolvedPath::Place(self.state.tree.walk(&rest, walk)?));
            }
            Some(meant) => return Ok(ResolvedPath::Own(meant)),
            None => {}
        }
        let how = how(self.state.searching(Walk::new(self.base(at, path)?)));
        let walked = self.state.tree.walk(path, how);
        if let Some(console) = &self.console {
            console.lookups.walked(how.from, path, &walked);
        }
        match walked {
            Err(afresh_files::Refused::Missing) => {
                let follow = how.follow && !how.name;
                match self.state.meant_behind(how.from, path, follow) {
                    Some(ProcTarget::Beneath(..)) | None => Err(Errno::NOENT.into()),
                    Some(meant) => Ok(ResolvedPath::Own(meant)),
                }
            }
            place => Ok(ResolvedPath::Place(place?)),
        }
    }

    /// The file of the tree that something means, where it means one.
    pub(in crate::sentry) fn node_of(&self, meant: &ProcTarget) -> SyscallResult<Node> {
        let state = &self.state;
        match meant {
            ProcTarget::Descriptor(id, number) => match &state.open_of(*id, *number) {
                Some(Description {
                    open:
                        FileObject::File(open)
                        | FileObject::Device(_, open)
                        | FileObject::Fifo(Fifo { open, .. })
                        | FileObject::Terminal(TerminalEnd { open, .. }),
                    ..
                }) => Ok(open.node),
                Some(_) => Err(Errno::ACCESS.into()),
                None => Err(Errno::NOENT.into()),
            },
            ProcTarget::Program(id) => {
                let info = state.processes.info(*id).ok_or(Errno::NOENT)?;
                Ok(state.tree.walk(&info.program, Walk::new(Tree::ROOT))?.node()?)
            }
            ProcTarget::Current(id) => Ok(state.processes.get(*id).ok_or(Errno::NOENT)?.directory),
            ProcTarget::Root(id) => Ok(state.processes.get(*id).ok_or(Errno::NOENT)?.root()),
            ProcTarget::Folder(ProcDir::All) => {
                Ok(state.tree.walk(b"/proc", Walk::new(Tree::ROOT))?.node()?)
            }
            // They cannot be changed or entered.
            ProcTarget::Folder(_)
            | ProcTarget::Name(..)
            | ProcTarget::Text(_)
            | ProcTarget::Maps(_)
            | ProcTarget::Clock(_)
            | ProcTarget::Ipc(_)
            | ProcTarget::Keys
            | ProcTarget::Setting(_)
            | ProcTarget::Hidden(..)
            | ProcTarget::Beneath(..) => Err(Errno::ACCESS.into()),
        }
    }

    /// The path of a program to run, and the directory that it starts from. `is_descriptor` for the
    /// path of a descriptor, which has no name.
    pub(in crate::sentry) fn program_at(
        &self,
        at: u64,
        path: Vec<u8>,
        is_descriptor: bool,
    ) -> SyscallResult<(Vec<u8>, Node)> {
        let meant = match is_descriptor {
            true => self.state.meant_by(&path),
            false => self.state.meant(at, &path),
        };
        match meant {
            Some(ProcTarget::Beneath(node, rest)) => Ok((rest, node)),
            // The root directory of the process may not lead to it.
            Some(ProcTarget::Descriptor(id, number))
                if is_descriptor && self.state.has_own_root() =>
            {
                let path = self.state.descriptor_path(id, number).ok_or(Errno::NAMETOOLONG)?;
                Ok((path.strip_prefix(b"/").unwrap_or(&path).to_vec(), Tree::ROOT))
            }
            Some(meant) => {
                let target = self.state.target(&meant).ok_or(Errno::ACCESS)??;
                Ok((target, self.state.root()))
            }
            None => {
                let from = self.base(at, &path)?;
                Ok((path, from))
            }
        }
    }

    /// Opens an object outside the tree.
    pub(in crate::sentry) fn open_meant(
        &mut self,
        meant: &ProcTarget,
        flags: i32,
    ) -> SyscallResult {
        let has = |flag: i32| flags & flag == flag;
        let is_link = self.state.target(meant).is_some();
        if has(libc::O_CREAT | libc::O_EXCL) {
            return Err(Errno::EXIST.into());
        }
        if is_link && has(libc::O_NOFOLLOW) {
            return Err(Errno::LOOP.into());
        }
        match meant {
            ProcTarget::Text(_)
            | ProcTarget::Maps(_)
            | ProcTarget::Clock(_)
            | ProcTarget::Ipc(_)
            | ProcTarget::Keys
            | ProcTarget::Setting(_)
                if has(libc::O_DIRECTORY) =>
            {
                Err(Errno::NOTDIR.into())
            }
            ProcTarget::Clock(is_stat) => {
                let text = self.clock_text(*is_stat);
                self.open_text(text.as_bytes(), flags)
            }
            ProcTarget::Ipc(file) => {
                let text = self.state.ipc_text(*file);
                self.open_text(text.as_bytes(), flags)
            }
            ProcTarget::Keys => {
                let text = self.keys_text();
                self.open_text(text.as_bytes(), flags)
            }
            ProcTarget::Text(text) => self.open_text(text, flags),
            ProcTarget::Maps(maps) => self.open_maps(*maps, flags),
            ProcTarget::Setting(setting) => {
                let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
                if !has(libc::O_PATH) {
                    self.state.may_open_setting(*setting, writes)?;
                }
                let opener = self.state.credentials().namespace;
                self.add(FileObject::Proc(ProcFile { setting: *setting, opener, offset: 0 }), flags)
            }
            ProcTarget::Folder(folder) | ProcTarget::Name(_, folder) => {
                if flags & libc::O_ACCMODE != libc::O_RDONLY || has(libc::O_CREAT) {
                    return Err(Errno::ISDIR.into());
                }
                self.add(FileObject::Folder(*folder, 0), flags)
            }
            ProcTarget::Descriptor(id, number) => {
                let found = self.state.open_of(*id, *number).ok_or(Errno::NOENT)?;
                let (open, name) = (found.open.clone(), found.found.clone());
                self.open_again(open, name, flags)
            }
            meant => {
                let node = self.node_of(meant)?;
                self.open_node(node, None, flags)
            }
        }
    }

    /// Reopens an open object: a file from its start, a new end of a pipe.
    fn open_again(
        &mut self,
        open: FileObject,
        name: Option<(Node, std::sync::Arc<[u8]>)>,
        flags: i32,
    ) -> SyscallResult {
        let mode = flags & libc::O_ACCMODE;
        if flags & libc::O_DIRECTORY != 0
            && !matches!(open, FileObject::File(_) | FileObject::Folder(..))
        {
            return Err(Errno::NOTDIR.into());
        }
        match open {
            FileObject::File(open)
            | FileObject::Device(_, open)
            | FileObject::Fifo(Fifo { open, .. })
            | FileObject::Terminal(TerminalEnd { open, .. }) => {
                self.open_node(open.node, name, flags)
            }
            FileObject::Proc(file) => self.open_meant(&ProcTarget::Setting(file.setting), flags),
            FileObject::Folder(folder, _) if mode == libc::O_RDONLY => {
                self.add(FileObject::Folder(folder, 0), flags)
            }
            FileObject::Input if mode == libc::O_RDONLY => self.add(FileObject::Input, flags),
            open @ (FileObject::Output | FileObject::Messages) if mode == libc::O_WRONLY => {
                self.add(open, flags)
            }
            FileObject::Folder(..)
            | FileObject::Input
            | FileObject::Output
            | FileObject::Messages => Err(Errno::ACCESS.into()),
            FileObject::Pipe { channel, .. } if mode != libc::O_RDWR => {
                let writes = mode == libc::O_WRONLY;
                self.state.table.check_room()?;
                self.change().channels.join(channel, writes);
                self.add(FileObject::Pipe { channel, writes }, flags)
            }
            // An object without a name cannot be opened by one.
            _ => Err(Errno::NXIO.into()),
        }
    }

    /// Opens a file of the tree that was found otherwise than by its path.
    fn open_node(
        &mut self,
        node: Node,
        name: Option<(Node, std::sync::Arc<[u8]>)>,
        flags: i32,
    ) -> SyscallResult {
        let only_named = flags & libc::O_PATH != 0;
        let access = access_of(flags);
        let stat = self.state.tree.stat(node)?;
        self.may_open(FilePermissions::of(&stat), access, flags)?;
        match stat.kind {
            Kind::Directory if access.write || flags & libc::O_CREAT != 0 => {
                return Err(Errno::ISDIR.into());
            }
            Kind::Directory => {}
            _ if flags & libc::O_DIRECTORY != 0 => return Err(Errno::NOTDIR.into()),
            Kind::File if flags & libc::O_TRUNC != 0 && !only_named => {
                self.cut(node, crate::sentry::kernel::time::now())?;
            }
            _ => {}
        }
        self.state.table.check_room()?;
        self.open_object(node, &stat, access, flags, name)
    }

    /// The attributes of an object outside the tree; of a link itself, unless it is followed.
    pub(in crate::sentry) fn attributes_meant(
        &self,
        meant: &ProcTarget,
        follow: bool,
    ) -> SyscallResult<FileStatus> {
        let none = FileStatus { system: FileSystem::Proc, ..FileStatus::default() };
        let owned = |status: FileStatus, process: Option<u32>| {
            let owner = process.and_then(|id| self.state.owner_of_process(id));
            FileStatus { owner, ..status }
        };
        let link = |inode: u64, mode: u32| FileStatus {
            inode,
            mode: libc::S_IFLNK | mode,
            links: 1,
            size: 64,
            ..none
        };
        match meant {
            ProcTarget::Folder(folder) => Ok(self.folder_attributes(*folder)),
            ProcTarget::Name(_, folder) if follow => Ok(self.folder_attributes(*folder)),
            ProcTarget::Name(_, folder) => Ok(link(folder.inode() + (8 << 32), 0o777)),
            ProcTarget::Text(_)
            | ProcTarget::Maps(_)
            | ProcTarget::Clock(_)
            | ProcTarget::Ipc(_)
            | ProcTarget::Keys => {
                Ok(FileStatus { inode: 1, mode: libc::S_IFREG | 0o444, links: 1, ..none })
            }
            ProcTarget::Setting(setting) => {
                let (inode, mode) = (setting.inode(), setting.mode());
                let none = owned(none, setting.process());
                if !follow && setting.link().is_some() {
                    return Ok(link(inode, 0o777));
                }
                Ok(FileStatus { inode, mode: libc::S_IFREG | mode, links: 1, ..none })
            }
            ProcTarget::Descriptor(id, number) => {
                let mut list = self.state.descriptors_of(*id);
                let found = list.find(|(n, _, _)| n == number);
                let (_, open, description) = found.ok_or(Errno::NOENT)?;
                if follow {
                    return self.attributes_of(open, description);
                }
                let may = |may: bool, bits: u32| if may { bits } else { 0 };
                let bits = may(description.reads(), 0o500) | may(description.writes(), 0o300);
                let inode = ProcDir::Descriptors(*id).inode() + ((u64::from(*number) + 8) << 32);
                Ok(owned(link(inode, bits), Some(*id)))
            }
            ProcTarget::Program(id) | ProcTarget::Current(id) if !follow => {
                Ok(owned(link(ProcDir::Process(*id).inode() + (9 << 32), 0o777), Some(*id)))
            }
            ProcTarget::Root(_) if !follow => Ok(link(ProcDir::All.inode() + (9 << 32), 0o777)),
            ProcTarget::Hidden(id, mode) => {
                let is_link = mode & libc::S_IFMT == libc::S_IFLNK;
                if *mode == 0 || is_link && follow {
                    return Err(Errno::ACCESS.into());
                }
                let inode = ProcDir::Process(*id).inode() + (9 << 32);
                Ok(owned(FileStatus { inode, mode: *mode, links: 1, ..none }, Some(*id)))
            }
            meant => Ok(FileStatus::of(&self.state.tree, self.node_of(meant)?)?),
        }
    }

    fn folder_attributes(&self, folder: ProcDir) -> FileStatus {
        let mode = libc::S_IFDIR | 0o555;
        let owner = folder.process().and_then(|id| self.state.owner_of_process(id));
        let (inode, system) = (folder.inode(), FileSystem::Proc);
        FileStatus { inode, mode, links: 2, owner, system, ..FileStatus::default() }
    }

    /// Lists a directory that is in no tree.
    pub(in crate::sentry) fn list_folder(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
        mut listed: DirectoryEntries,
    ) -> SyscallResult {
        let FileObject::Folder(folder, from) = self.state.table.get(descriptor)?.open else {
            return Err(Errno::NOTDIR.into());
        };
        let mut next = from;
        let entries = self.state.entries(folder);
        for (after, inode, kind, name) in entries.iter().filter(|(after, ..)| *after > from) {
            if !listed.push(*inode, *after, *kind, &name[..])? {
                break;
            }
            next = *after;
        }
        copy_out(process, to, &listed.bytes.0)?;
        self.change().table.get_mut(descriptor)?.open = FileObject::Folder(folder, next);
        Ok(SyscallControl::Value(listed.bytes.0.len() as u64))
    }
}

impl Kernel {
    /// The file system of an open object.
    pub(in crate::sentry) fn file_system_of(&self, open: &FileObject) -> FileSystem {
        match open {
            // A memory file is in no directory.
            FileObject::File(open) if self.seals.has(open.node) => FileSystem::SharedMemory,
            FileObject::File(open)
            | FileObject::Device(_, open)
            | FileObject::Fifo(Fifo { open, .. })
            | FileObject::Terminal(TerminalEnd { open, .. }) => {
                FileSystem::of(&self.tree, open.node)
            }
            FileObject::Proc(_) | FileObject::Folder(..) => FileSystem::Proc,
            FileObject::Input
            | FileObject::Output
            | FileObject::Messages
            | FileObject::Pipe { .. } => FileSystem::Pipes,
            FileObject::Socket(_) => FileSystem::Sockets,
            FileObject::Queue(_) => FileSystem::Queues,
            FileObject::Event { .. }
            | FileObject::Timer(_)
            | FileObject::Epoll(_)
            | FileObject::Process(_)
            | FileObject::Watches(_)
            | FileObject::Signals(_) => FileSystem::Anonymous,
        }
    }

    /// The entries of a directory, in order. Positions of entries do not depend on others, so
    /// entries may come and go between two calls.
    fn entries(&self, folder: ProcDir) -> Vec<Entry> {
        let (directory, link, file) = (libc::S_IFDIR, libc::S_IFLNK, libc::S_IFREG);
        let named = |at: u64, inode: u64, kind: u32, name: &str| {
            (at, inode, kind, name.as_bytes().to_vec())
        };
        let mut entries =
            vec![named(1, folder.inode(), directory, "."), named(2, 1, directory, "..")];
        let numbered = |number: u32, behind: u64, kind: u32| {
            let at = behind + u64::from(number) + 3;
            named(at, folder.inode() + u64::from(number), kind, &number.to_string())
        };
        match folder {
            ProcDir::All => {
                let walk = self.tree.walk(b"/proc", Walk::new(Tree::ROOT));
                let listed = walk.and_then(|place| self.tree.list(place.node()?));
                let listed = listed.unwrap_or_default().into_iter().enumerate();
                entries.extend(listed.map(|(at, entry)| {
                    (at as u64 + 3, entry.node.0, entry.kind.mode(), entry.name.to_vec())
                }));
                entries.push(named(BEHIND, folder.inode(), link, "self"));
                let first = BEHIND + 1;
                entries.push(named(first, ProcDir::Ipc.inode(), directory, "sysvipc"));
                let own = crate::sentry::fs::procfs::OWN_FILES.iter().zip(first + 1..);
                entries.extend(own.map(|(name, at)| named(at, folder.inode(), file, name)));
                let mut ids = self.processes.numbers();
                ids.sort_unstable();
                entries.extend(ids.into_iter().map(|id| numbered(id, BEHIND_FILES, directory)));
            }
            ProcDir::Process(id) | ProcDir::Thread(id, _) => {
                let lives = self.processes.lives(id);
                let all = crate::sentry::fs::procfs::FILES.iter().filter(|name| lives || name.1);
                let files = all.map(|(name, _)| (*name, file));
                let links = [("cwd", link), ("exe", link), ("root", link)];
                let folders = ["fd", "fdinfo", "ns", "task"].map(|name| (name, directory));
                let rest = links.into_iter().chain(folders).filter(|_| lives);
                entries.extend(
                    files
                        .chain(rest)
                        .enumerate()
                        .map(|(at, (name, kind))| named(at as u64 + 3, folder.inode(), kind, name)),
                );
            }
            ProcDir::Descriptors(id) | ProcDir::Infos(id) => {
                let kind = if matches!(folder, ProcDir::Infos(_)) { file } else { link };
                let list = self.descriptors_of(id);
                entries.extend(list.map(|(number, ..)| numbered(number, 0, kind)));
            }
            ProcDir::Ipc => {
                let all = crate::sentry::fs::ipc_files::NAMES.iter().zip(3..);
                entries.extend(all.map(|((name, _), at)| named(at, 1, file, name)));
            }
            ProcDir::Namespaces(id) => {
                let all = NAMESPACES.iter().filter(|_| self.processes.lives(id)).zip(3..);
                entries.extend(all.map(|((name, inode), at)| named(at, *inode, link, name)));
            }
            ProcDir::Threads(id) => {
                let process = self.processes.get(id);
                let threads = process.into_iter().flat_map(|process| process.threads.iter());
                entries.extend(threads.map(|(thread, _)| numbered(thread, 0, directory)));
            }
        }
        entries
    }
}
