//! System calls that change times, owners, sizes and links of files, and `statfs`.

use std::ops::Range;

use afresh_files::{Kind, Node, Time};
use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::fs::mounts::{FileSystem, MOUNTS, Mount};
use crate::sentry::fs::permissions::WRITE;
use crate::sentry::fs::proc_files::ResolvedPath;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::identity::DEFAULT_OWNER;
use crate::sentry::kernel::open_fifo::Fifo;
use crate::sentry::kernel::signals::SignalInfo;
use crate::sentry::kernel::user_namespaces::{CHOWN, INITIAL};
use crate::sentry::kernel::users::FOR_FILES;
use crate::sentry::mm::layout::PAGE;
use crate::sentry::mm::user_memory::{copy_out, path_in, word_in};
use crate::sentry::result::{SyscallResult, ZERO};
use crate::sentry::syscalls::AT_FDCWD;
use crate::sentry::tty::terminals::TerminalEnd;

/// The format of the times of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sentry) enum TimeFormat {
    /// Seconds (`utime`).
    Seconds,
    /// Seconds and microseconds (`utimes`).
    Micro,
    /// Seconds and nanoseconds, or a word for now or never (`utimensat`).
    Nano,
}

impl Sentry {
    /// The time that starts at `at`; nothing when it is to stay.
    fn time_in(process: &Process, at: u64, times: TimeFormat) -> SyscallResult<Option<Time>> {
        let word = |offset: u64| word_in(process, at.wrapping_add(offset)).map(|word| word as i64);
        let (seconds, nanoseconds) = match times {
            TimeFormat::Seconds => (word(0)?, 0),
            TimeFormat::Micro => (word(0)?, word(8)?.checked_mul(1000).ok_or(Errno::INVAL)?),
            TimeFormat::Nano => (word(0)?, word(8)?),
        };
        match nanoseconds {
            libc::UTIME_NOW if times == TimeFormat::Nano => {
                Ok(Some(crate::sentry::kernel::time::now()))
            }
            libc::UTIME_OMIT if times == TimeFormat::Nano => Ok(None),
            0..1_000_000_000 => Ok(Some(Time { seconds, nanos: nanoseconds as u32 })),
            _ => Err(Errno::INVAL.into()),
        }
    }

    pub(in crate::sentry) fn set_times(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        times: (u64, TimeFormat),
        flags: u64,
    ) -> SyscallResult {
        let (list, kind) = times;
        let size = if kind == TimeFormat::Seconds { 8 } else { 16 };
        let (accessed, modified) = if list == 0 {
            (Some(crate::sentry::kernel::time::now()), Some(crate::sentry::kernel::time::now()))
        } else {
            let second = list.wrapping_add(size);
            (Self::time_in(process, list, kind)?, Self::time_in(process, second, kind)?)
        };
        if accessed.is_none() && modified.is_none() && path != 0 {
            return Ok(ZERO);
        }
        let flags = flags as i32;
        if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH) != 0 {
            return Err(Errno::INVAL.into());
        }
        let empty =
            flags & libc::AT_EMPTY_PATH != 0 && path != 0 && path_in(process, path)?.is_empty();
        let node = if empty {
            self.described_file(at)?.ok_or(Errno::INVAL)?
        } else if path == 0 {
            if at as i32 == libc::AT_FDCWD {
                return Err(Errno::FAULT.into());
            }
            if self.state.table.get(at)?.is_path() {
                return Err(Errno::BADF.into());
            }
            match &self.state.table.get(at)?.open {
                FileObject::File(open)
                | FileObject::Device(_, open)
                | FileObject::Fifo(Fifo { open, .. })
                | FileObject::Terminal(TerminalEnd { open, .. }) => open.node,
                _ => return Err(Errno::INVAL.into()),
            }
        } else {
            self.follow(process, at, path, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?
        };
        // Without times, the right to write the file is enough.
        let may_touch = list == 0 && self.state.may(node, WRITE).is_ok();
        if !may_touch && let Err(error) = self.state.check_ownership(node) {
            return Err(if list == 0 { Errno::ACCESS } else { error }.into());
        }
        if accessed.is_some() || modified.is_some() {
            self.change().tree.set_times(
                node,
                accessed,
                modified,
                crate::sentry::kernel::time::now(),
            )?;
            self.change().notify_file(node, libc::IN_ATTRIB);
        }
        Ok(ZERO)
    }

    /// `utimensat(2)`, as on Linux.
    pub(in crate::sentry) fn sys_utimensat(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        times: u64,
        flags: u64,
    ) -> SyscallResult {
        self.set_times(process, at, path, (times, TimeFormat::Nano), flags)
    }

    /// `utimes(2)`: as `utimensat` from the current directory.
    pub(in crate::sentry) fn sys_utimes(
        &mut self,
        process: &Process,
        path: u64,
        times: u64,
    ) -> SyscallResult {
        self.set_times(process, AT_FDCWD, path, (times, TimeFormat::Micro), 0)
    }

    /// `utime(2)`: as `utimensat` from the current directory.
    pub(in crate::sentry) fn sys_utime(
        &mut self,
        process: &Process,
        path: u64,
        times: u64,
    ) -> SyscallResult {
        self.set_times(process, AT_FDCWD, path, (times, TimeFormat::Seconds), 0)
    }

    /// `futimesat(2)`: as `utimensat`.
    pub(in crate::sentry) fn sys_futimesat(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        times: u64,
    ) -> SyscallResult {
        self.set_times(process, at, path, (times, TimeFormat::Micro), 0)
    }

    /// The owner that a file gets, or a refusal. Without `CAP_CHOWN` a user gives files to its own
    /// groups alone.
    fn new_owner(
        &self,
        recorded: Option<[u32; 2]>,
        [user, group]: [u32; 2],
    ) -> Result<[u32; 2], Errno> {
        let old = self.state.owner_of(recorded);
        let pick = |id: u32, old: u32| if id == u32::MAX { old } else { id };
        let new = [pick(user, old[0]), pick(group, old[1])];
        if self.state.has_over(recorded, CHOWN) {
            return Ok(new);
        }
        let ids = self.state.ids();
        let is_own = ids.user[FOR_FILES] == old[0];
        let may_group = is_own && (new[1] == old[1] || ids.is_in_group(new[1]));
        let may =
            (user == u32::MAX || is_own && new[0] == old[0]) && (group == u32::MAX || may_group);
        if may { Ok(new) } else { Err(Errno::PERM) }
    }

    /// Whether a user namespace allows these IDs: no file has another owner there. `root` may name
    /// the usual user of guests, as where Linux maps that number to a second user. The call
    /// succeeds without an effect.
    fn check_namespace_owner(&self, ids: [u32; 2]) -> Result<(), Errno> {
        let own = self.state.seen_owner(None);
        let has_second = own[0] == 0 && self.state.has_over(None, CHOWN);
        let stays = |(id, (own, usual)): (u32, (u32, u32))| {
            id == u32::MAX || id == own || has_second && id == usual
        };
        let all = ids.into_iter().zip(own.into_iter().zip(DEFAULT_OWNER));
        if all.into_iter().all(stays) { Ok(()) } else { Err(Errno::INVAL) }
    }

    /// Gives an object to a user and a group. Only files record them.
    fn give(&mut self, node: Option<Node>, ids: (u64, u64)) -> SyscallResult {
        let ids = [ids.0 as u32, ids.1 as u32];
        let stat = node.map(|node| self.state.tree.stat(node)).transpose()?;
        let recorded = stat.as_ref().and_then(|stat| stat.owner);
        if self.state.credentials().namespace != INITIAL {
            self.check_namespace_owner(ids)?;
            // The owner has no number here.
            if recorded.is_some() && ids != [u32::MAX; 2] {
                return Err(Errno::PERM.into());
            }
        } else {
            let new = self.new_owner(recorded, ids)?;
            if let (Some(node), Some(stat)) = (node, stat)
                && new != self.state.owner_of(recorded)
            {
                let now = crate::sentry::kernel::time::now();
                let owner = (new != self.state.owner_of(None)).then_some(new);
                self.change().tree.set_owner(node, owner, now)?;
                // As on Linux, also for `root`.
                let drops = libc::S_ISUID | if stat.mode & 0o10 == 0 { 0 } else { libc::S_ISGID };
                if stat.kind == Kind::File && stat.mode & drops != 0 {
                    self.change().set_mode(node, stat.mode & !drops)?;
                }
            }
        }
        if let Some(node) = node {
            self.change().notify_file(node, libc::IN_ATTRIB);
        }
        Ok(ZERO)
    }

    /// `fchownat(2)`: in a user namespace a file keeps its owner, and other IDs are `EINVAL`.
    /// `root` there may name the usual user of guests, which changes nothing.
    pub(in crate::sentry) fn sys_fchownat(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        owner: (u64, u64),
        flags: u64,
    ) -> SyscallResult {
        let flags = flags as i32;
        if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH) != 0 {
            return Err(Errno::INVAL.into());
        }
        let node = match flags & libc::AT_EMPTY_PATH != 0 && path_in(process, path)?.is_empty() {
            true => self.described_file(at)?,
            false => {
                Some(self.follow(process, at, path, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?)
            }
        };
        self.give(node, owner)
    }

    /// `chown(2)`: as `fchownat` from the current directory.
    pub(in crate::sentry) fn sys_chown(
        &mut self,
        process: &Process,
        path: u64,
        user: u64,
        group: u64,
    ) -> SyscallResult {
        self.sys_fchownat(process, AT_FDCWD, path, (user, group), 0)
    }

    /// `lchown(2)`: as `fchownat` from the current directory.
    pub(in crate::sentry) fn sys_lchown(
        &mut self,
        process: &Process,
        path: u64,
        user: u64,
        group: u64,
    ) -> SyscallResult {
        self.sys_fchownat(process, AT_FDCWD, path, (user, group), libc::AT_SYMLINK_NOFOLLOW as u64)
    }

    /// The file that an empty path means (`AT_EMPTY_PATH`): that of a descriptor, or the current
    /// directory; `None` for a descriptor of something else.
    fn described_file(&self, at: u64) -> SyscallResult<Option<Node>> {
        if at as i32 == libc::AT_FDCWD {
            return Ok(Some(self.state.current().directory));
        }
        Ok(match &self.state.table.get(at)?.open {
            FileObject::File(open)
            | FileObject::Device(_, open)
            | FileObject::Fifo(Fifo { open, .. })
            | FileObject::Terminal(TerminalEnd { open, .. }) => Some(open.node),
            _ => None,
        })
    }

    /// `fchown(2)`: as `fchownat`.
    pub(in crate::sentry) fn sys_fchown(
        &mut self,
        descriptor: u64,
        user: u64,
        group: u64,
    ) -> SyscallResult {
        if self.state.table.get(descriptor)?.flags & libc::O_PATH as u32 != 0 {
            return Err(Errno::BADF.into());
        }
        let node = self.described_file(descriptor)?;
        self.give(node, (user, group))
    }

    /// `linkat(2)`: an empty path is `ENOENT`, with `AT_EMPTY_PATH` as well.
    pub(in crate::sentry) fn sys_linkat(
        &mut self,
        process: &Process,
        from: (u64, u64),
        to: (u64, u64),
        flags: u64,
    ) -> SyscallResult {
        let flags = flags as i32;
        if flags & !(libc::AT_SYMLINK_FOLLOW | libc::AT_EMPTY_PATH) != 0 {
            return Err(Errno::INVAL.into());
        }
        let follow = flags & libc::AT_SYMLINK_FOLLOW != 0;
        let node = self.follow(process, from.0, from.1, follow)?;
        let place = self.place(process, to.0, to.1)?;
        let tree = &self.state.tree;
        let target = FileSystem::of_directory(tree, place.directory);
        if FileSystem::of_named(tree, node).is_some_and(|system| system != target) {
            let exists = place.found.is_some();
            return Err(if exists { Errno::EXIST } else { Errno::XDEV }.into());
        }
        self.state.may_make(&place)?;
        self.change().tree.link_at(node, &place, crate::sentry::kernel::time::now())?;
        self.change().notify_created(&place);
        self.change().notify_file(node, libc::IN_ATTRIB);
        Ok(ZERO)
    }

    /// `link(2)`: as `linkat` from the current directory.
    pub(in crate::sentry) fn sys_link(
        &mut self,
        process: &Process,
        old: u64,
        new: u64,
    ) -> SyscallResult {
        self.sys_linkat(process, (AT_FDCWD, old), (AT_FDCWD, new), 0)
    }

    /// `truncate(2)`, as on Linux.
    pub(in crate::sentry) fn sys_truncate(
        &mut self,
        process: &Process,
        path: u64,
        size: u64,
    ) -> SyscallResult {
        let node = self.follow(process, AT_FDCWD, path, true)?;
        if self.state.tree.stat(node)?.kind == Kind::Directory {
            return Err(Errno::ISDIR.into());
        }
        if size > i64::MAX as u64 {
            return Err(Errno::INVAL.into());
        }
        self.state.may(node, WRITE)?;
        if let Some(waits) = self.break_leases(node, true, 0)? {
            return Ok(waits);
        }
        self.state.seals.may_resize(node, self.state.tree.stat(node)?.size, size)?;
        self.check_size(node, self.state.tree.stat(node)?.size, size)?;
        self.change().tree.set_size(node, size, crate::sentry::kernel::time::now())?;
        self.change().notify_file(node, libc::IN_MODIFY);
        Ok(ZERO)
    }

    /// `fallocate(2)`: of the modes, the plain one, `FALLOC_FL_KEEP_SIZE`, `FALLOC_FL_PUNCH_HOLE`
    /// and `FALLOC_FL_ZERO_RANGE` are served. Files take memory when they are written, so that
    /// nothing is reserved.
    pub(in crate::sentry) fn sys_fallocate(
        &mut self,
        descriptor: u64,
        mode: u64,
        offset: u64,
        len: u64,
    ) -> SyscallResult {
        let open = match &self.state.table.get(descriptor)?.open {
            FileObject::File(open) => open,
            FileObject::Pipe { writes: true, .. } => return Err(Errno::SPIPE.into()),
            FileObject::Fifo(fifo) if fifo.open.access.write => return Err(Errno::SPIPE.into()),
            FileObject::Pipe { .. } | FileObject::Fifo(_) => return Err(Errno::BADF.into()),
            _ => return Err(Errno::NODEV.into()),
        };
        let node = open.node;
        if !open.access.write {
            return Err(Errno::BADF.into());
        }
        if len == 0 || offset.max(len) > i64::MAX as u64 {
            return Err(Errno::INVAL.into());
        }
        let end = offset + len;
        let (mode, keeps) = (mode as i32, mode as i32 & libc::FALLOC_FL_KEEP_SIZE != 0);
        let clears = match mode & !libc::FALLOC_FL_KEEP_SIZE {
            0 => false,
            libc::FALLOC_FL_ZERO_RANGE => true,
            libc::FALLOC_FL_PUNCH_HOLE if keeps => true,
            _ => return Err(Errno::OPNOTSUPP.into()),
        };
        if end > i64::MAX as u64 {
            return Err(Errno::FBIG.into());
        }
        let size = self.state.tree.stat(node)?.size;
        if clears {
            self.state.seals.may_write(node, end.min(size), size)?;
            self.clear_bytes(node, offset..end.min(size))?;
        }
        if !keeps && size < end {
            self.state.seals.may_resize(node, size, end)?;
            self.check_size(node, size, end)?;
            self.change().tree.set_size(node, end, crate::sentry::kernel::time::now())?;
        }
        self.change().notify_file(node, libc::IN_MODIFY);
        Ok(ZERO)
    }

    /// Has a part of a file read as zeros. Parts that do take no memory for it.
    fn clear_bytes(&mut self, node: Node, range: Range<u64>) -> SyscallResult<()> {
        const CHUNK_SIZE: u64 = 64 << 10;
        // A hole may be as long as any file.
        let stored = self.state.tree.stored_ranges(node)?.into_iter();
        let stored = stored.map(|part| part.start.max(range.start)..part.end.min(range.end));
        for (at, end) in stored.flat_map(|part| {
            part.clone().step_by(CHUNK_SIZE as usize).map(move |at| (at, part.end))
        }) {
            let mut bytes = vec![0; (end - at).min(CHUNK_SIZE) as usize];
            let read = self.state.tree.read(node, at, &mut bytes)?;
            if bytes[..read].iter().any(|byte| *byte != 0) {
                bytes.fill(0);
                let now = crate::sentry::kernel::time::now();
                self.change().tree.write(node, at, &bytes[..read], now)?;
            }
        }
        Ok(())
    }

    /// Refuses to make a file larger than the process may have files (`RLIMIT_FSIZE`), or than the
    /// host may.
    pub(in crate::sentry) fn check_size(
        &mut self,
        node: Node,
        size: u64,
        new: u64,
    ) -> SyscallResult<()> {
        if new > size && new > self.state.current().info.limits.file_size() {
            return Err(self.too_large().into());
        }
        if new > size && new > self.host_size_limit(node) {
            return Err(Errno::FBIG.into());
        }
        Ok(())
    }

    /// The error for a file that would be too large, which comes with a signal.
    pub(in crate::sentry) fn too_large(&mut self) -> Errno {
        let id = self.state.current().threads.current_id();
        let own = self.state.sender(self.state.processes.current_id());
        self.change().send(Some(id), SignalInfo::new(libc::SIGXFSZ as u8, 0, own, 0));
        Errno::FBIG
    }

    /// `statfs(2)`: the free space is the budget of the guest.
    pub(in crate::sentry) fn sys_statfs(
        &mut self,
        process: &mut Process,
        path: u64,
        to: u64,
    ) -> SyscallResult {
        let path = path_in(process, path)?;
        let system = match self.reach(AT_FDCWD, &path, |walk| walk.follow(true))? {
            ResolvedPath::Place(place) => FileSystem::of(&self.state.tree, place.node()?),
            ResolvedPath::Own(meant) => self.attributes_meant(&meant, true)?.system,
        };
        self.write_statfs(process, system, to)
    }

    /// `fstatfs(2)`: as `statfs`.
    pub(in crate::sentry) fn sys_fstatfs(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
    ) -> SyscallResult {
        let system = self.state.file_system_of(&self.state.table.get(descriptor)?.open);
        self.write_statfs(process, system, to)
    }

    /// `ustat(2)`: the free space is the budget of the guest.
    pub(in crate::sentry) fn sys_ustat(
        &mut self,
        process: &mut Process,
        device: u64,
        to: u64,
    ) -> SyscallResult {
        let is_device = |mount: &&Mount| u64::from(mount.system.device()) == device & 0xffff_ffff;
        let mount = MOUNTS.iter().find(is_device).ok_or(Errno::INVAL)?;
        let (_, [blocks, files]) = self.room(mount.system);
        let bytes = StructBuilder::default().int(blocks.try_into().unwrap_or(u32::MAX));
        copy_out(process, to, &bytes.int(0).word(files).zeros(16).0)?;
        Ok(ZERO)
    }

    /// All blocks and files of a file system, and the free ones.
    fn room(&self, system: FileSystem) -> ([u64; 2], [u64; 2]) {
        if !system.stores_files() {
            return ([0; 2], [0; 2]);
        }
        let (all, used) = (self.state.tree.budget(), self.state.tree.used());
        let free = [all.bytes.saturating_sub(used.bytes), all.files.saturating_sub(used.files)];
        ([all.bytes / PAGE, all.files], [free[0] / PAGE, free[1]])
    }

    /// `struct statfs` of a file system. Those that store files of the guest are as large as it may
    /// store.
    fn write_statfs(&self, process: &mut Process, system: FileSystem, to: u64) -> SyscallResult {
        const ST_VALID: u64 = 0x20;
        let ([all, files], [free, free_files]) = self.room(system);
        let read_only = system.mount().is_some_and(|mount| mount.read_only);
        let flags = ST_VALID | if read_only { libc::ST_RDONLY } else { 0 };
        let bytes = StructBuilder::default()
            .word(system.magic())
            .word(PAGE)
            .word(all)
            .word(free)
            .word(free)
            .word(files)
            .word(free_files)
            // The same as the device.
            .int(system.device())
            .int(0)
            .word(255)
            .word(PAGE)
            .word(flags)
            .zeros(32);
        copy_out(process, to, &bytes.0)?;
        Ok(ZERO)
    }
}
