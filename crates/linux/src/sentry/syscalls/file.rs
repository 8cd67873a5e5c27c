//! System calls on open files: positions, sizes and advice. Paths of calls are resolved here.

use afresh_files::{Kind, Node, Walk, Whence};
use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::fs::proc_files::ResolvedPath;
use crate::sentry::fs::proc_settings::ProcFile;
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::mm::user_memory::path_in;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

/// Two descriptors, as the guest reads them.
pub(in crate::sentry) type Pair = [u8; 8];

impl Sentry {
    /// The directory that relative paths of a call start from.
    pub(in crate::sentry) fn base(&self, at: u64, path: &[u8]) -> SyscallResult<Node> {
        if path.is_empty() {
            return Err(Errno::NOENT.into());
        }
        if path.starts_with(b"/") {
            return Ok(self.state.root());
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

    /// `lseek(2)`: `SEEK_END` counts from 0 in a file of `/proc`. Descriptors of events, timers and
    /// signals are `ESPIPE`.
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
        // The memory of a live file has its data, without a look at each page.
        if matches!(whence, Whence::Data | Whence::Hole)
            && let Some(memory) = self.shared.get(open.node)
        {
            let size = self.state.tree.stat(open.node)?.size;
            let offset = u64::try_from(offset).map_err(|_| Errno::NXIO)?;
            moved.offset = memory.seek(offset, size, whence == Whence::Data)?;
            let new = moved.offset;
            if *open != moved {
                self.change().table.get_mut(descriptor)?.open = FileObject::File(moved);
            }
            return Ok(SyscallControl::Value(new));
        }
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

    /// `ftruncate(2)`: a descriptor of `O_PATH` is `EINVAL`.
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
        self.change().notify_file(node, libc::IN_MODIFY);
        Ok(ZERO)
    }

    /// `fadvise64(2)`: checks its arguments, and reads nothing ahead.
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

    /// `readahead(2)`: checks its descriptor, and reads nothing ahead.
    pub(in crate::sentry) fn sys_readahead(&mut self, fd: u64) -> SyscallResult {
        let description = self.state.table.get(fd)?;
        match description.open {
            FileObject::File(ref open) if description.reads() => {
                match self.state.tree.stat(open.node)?.kind {
                    Kind::File => Ok(ZERO),
                    _ => Err(Errno::INVAL.into()),
                }
            }
            _ if !description.reads() => Err(Errno::BADF.into()),
            _ => Err(Errno::INVAL.into()),
        }
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
