//! System calls that read attributes of files: `stat`, `statx` and `access`.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::{self, FileStatus, StructBuilder};
use crate::sentry::attribute_prefetch::FileLookup;
use crate::sentry::fs::permissions::FilePermissions;
use crate::sentry::fs::proc_files::ResolvedPath;
use crate::sentry::fs::proc_paths::ProcTarget;
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::open_fifo::Fifo;
use crate::sentry::mm::user_memory::{copy_in, copy_out, path_in};
use crate::sentry::result::{SyscallResult, ZERO};
use crate::sentry::syscalls::AT_FDCWD;
use crate::sentry::tty::terminals::TerminalEnd;

/// Flags of `name_to_handle_at`, the bytes of a handle, and the most that a caller may have room
/// for.
const AT_HANDLE_MNT_ID_UNIQUE: i32 = 1;
const AT_HANDLE_CONNECTABLE: i32 = 2;
const AT_HANDLE_FID: i32 = 0x200;
const HANDLE_FLAGS: i32 = libc::AT_SYMLINK_FOLLOW
    | libc::AT_EMPTY_PATH
    | AT_HANDLE_MNT_ID_UNIQUE
    | AT_HANDLE_CONNECTABLE
    | AT_HANDLE_FID;
const HANDLE_LEN: u32 = 12;
const MAX_HANDLE: u32 = 128;

/// Flags of `newfstatat` and `statx`.
const STAT_FLAGS: i32 = libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT | libc::AT_EMPTY_PATH;

impl Sentry {
    /// `stat(2)`: as `newfstatat` from the current directory.
    pub(in crate::sentry) fn sys_stat(
        &mut self,
        process: &mut Process,
        path: u64,
        to: u64,
    ) -> SyscallResult {
        self.sys_newfstatat(process, AT_FDCWD, path, to, 0)
    }

    /// `lstat(2)`: as `newfstatat` from the current directory.
    pub(in crate::sentry) fn sys_lstat(
        &mut self,
        process: &mut Process,
        path: u64,
        to: u64,
    ) -> SyscallResult {
        self.sys_newfstatat(process, AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW as u64)
    }

    /// `fstat(2)`: the standard streams of the host are reported as pipes.
    pub(in crate::sentry) fn sys_fstat(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
    ) -> SyscallResult {
        let id = self.state.table.id(descriptor)?;
        let attributes = self.attributes_of(id, self.state.table.get(descriptor)?)?;
        copy_out(process, to, &abi::stat(&attributes, self.state.seen_owner(attributes.owner)))?;
        Ok(ZERO)
    }

    /// The attributes of the description `id`.
    pub(in crate::sentry) fn attributes_of(
        &self,
        id: u64,
        description: &Description,
    ) -> SyscallResult<FileStatus> {
        let inode = self.state.inode_of(id, &description.open);
        let system = self.state.file_system_of(&description.open);
        let none = FileStatus { inode, links: 1, system, ..FileStatus::default() };
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
                Ok(FileStatus::within(&self.state.tree, open.node, system)?)
            }
        }
    }

    /// `newfstatat(2)`: unknown flags are ignored.
    pub(in crate::sentry) fn sys_newfstatat(
        &mut self,
        process: &mut Process,
        at: u64,
        path: u64,
        to: u64,
        flags: u64,
    ) -> SyscallResult {
        if flags as i32 & !(STAT_FLAGS | libc::AT_STATX_FORCE_SYNC | libc::AT_STATX_DONT_SYNC) != 0
        {
            return Err(Errno::INVAL.into());
        }
        let attributes = self.attributes_at(process, at, path, flags)?;
        copy_out(process, to, &abi::stat(&attributes, self.state.seen_owner(attributes.owner)))?;
        Ok(ZERO)
    }

    /// `name_to_handle_at(2)`: a handle is the inode number, and no call opens it.
    pub(in crate::sentry) fn sys_name_to_handle_at(
        &mut self,
        process: &mut Process,
        at: u64,
        path: u64,
        handle: u64,
        mount: u64,
        flags: u64,
    ) -> SyscallResult {
        let flags = flags as i32;
        let has = |flag: i32| flags & flag != 0;
        if has(!HANDLE_FLAGS) || has(AT_HANDLE_FID) && has(AT_HANDLE_CONNECTABLE) {
            return Err(Errno::INVAL.into());
        }
        let follow = if has(libc::AT_SYMLINK_FOLLOW) { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
        let found = follow | flags & libc::AT_EMPTY_PATH;
        let attributes = self.attributes_at(process, at, path, found as u64)?;
        let room = copy_in(process, handle, 4)?;
        let room = u32::from_le_bytes([room[0], room[1], room[2], room[3]]);
        if room > MAX_HANDLE {
            return Err(Errno::INVAL.into());
        }
        let id_len = if has(AT_HANDLE_MNT_ID_UNIQUE) { 8 } else { 4 };
        let id = attributes.system.mount_id(has(AT_HANDLE_MNT_ID_UNIQUE));
        copy_out(process, mount, &id.to_le_bytes()[..id_len])?;
        let head = StructBuilder::default().int(HANDLE_LEN).int(1);
        if room < HANDLE_LEN {
            copy_out(process, handle, &head.0)?;
            return Err(Errno::OVERFLOW.into());
        }
        copy_out(process, handle, &head.word(attributes.inode).int(0).0)?;
        Ok(ZERO)
    }

    /// The attributes of the file at a path, or of a descriptor with `AT_EMPTY_PATH`.
    pub(in crate::sentry) fn attributes_at(
        &mut self,
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
            let path = path_in(process, path)?;
            match self.reach(at, &path, |walk| walk.follow(follow))? {
                ResolvedPath::Place(place) => {
                    let node = place.node()?;
                    if flags == libc::AT_SYMLINK_NOFOLLOW {
                        self.lookup = FileLookup::new(at as i32, path, &place);
                    }
                    return Ok(FileStatus::of_entry(&self.state.tree, node, place.directory)?);
                }
                ResolvedPath::Own(meant) => return self.attributes_meant(&meant, follow),
            }
        };
        Ok(FileStatus::of(&self.state.tree, node)?)
    }

    /// `statx(2)`: every mask returns the basic fields and the mount. There is no time of birth,
    /// and `AT_STATX_FORCE_SYNC` changes nothing.
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
        let unknown = flags as u32 as u64 & !(STAT_FLAGS as u64 | SYNC) != 0;
        if unknown || flags & SYNC == SYNC || mask as u32 & 1 << 31 != 0 {
            return Err(Errno::INVAL.into());
        }
        let attributes = self.attributes_at(process, at, path, flags)?;
        let owner = self.state.seen_owner(attributes.owner);
        copy_out(process, to, &abi::statx(&attributes, owner, mask as u32))?;
        Ok(ZERO)
    }

    /// `access(2)`: as `faccessat2` from the current directory.
    pub(in crate::sentry) fn sys_access(
        &mut self,
        process: &Process,
        path: u64,
        mode: u64,
    ) -> SyscallResult {
        self.sys_faccessat2(process, AT_FDCWD, path, mode, 0)
    }

    /// `faccessat(2)`: as `faccessat2`.
    pub(in crate::sentry) fn sys_faccessat(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        mode: u64,
    ) -> SyscallResult {
        self.sys_faccessat2(process, at, path, mode, 0)
    }

    /// `faccessat2(2)`: the directories on the way are searched with the effective user. Unknown
    /// flags are ignored.
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
        let file = FilePermissions { mode: attributes.mode, owner: attributes.owner };
        let effective = flags as i32 & libc::AT_EACCESS != 0;
        let may = match effective {
            true => self.state.permits(file, is_directory, mode as u32),
            false => self.state.permits_really(file, is_directory, mode as u32),
        };
        if may { Ok(ZERO) } else { Err(Errno::ACCESS.into()) }
    }
}
