//! System calls that flush files: `fsync` and its kind.

use rustix::io::Errno;

use crate::sentry::Sentry;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::result::{SyscallResult, ZERO};

/// Flags of `sync_file_range`.
const SYNC_FLAGS: u32 = 7;

impl Sentry {
    /// `fsync(2)`: returns at once, because there is no storage behind a file.
    pub(in crate::sentry) fn sys_fsync(&mut self, descriptor: u64) -> SyscallResult {
        match self.state.table.get(descriptor)?.open {
            FileObject::File(_) => Ok(ZERO),
            _ => Err(Errno::INVAL.into()),
        }
    }

    /// `fdatasync(2)`: as `fsync`.
    pub(in crate::sentry) fn sys_fdatasync(&mut self, fd: u64) -> SyscallResult {
        self.sys_fsync(fd)
    }

    /// `sync_file_range(2)`: as `fsync`, after a check of the range.
    pub(in crate::sentry) fn sys_sync_file_range(
        &mut self,
        fd: u64,
        offset: u64,
        len: u64,
        flags: u64,
    ) -> SyscallResult {
        let description = self.state.table.get(fd)?;
        if description.is_path() {
            return Err(Errno::BADF.into());
        }
        if flags as u32 & !SYNC_FLAGS != 0 {
            return Err(Errno::INVAL.into());
        }
        let is_file = matches!(description.open, FileObject::File(_));
        let end = offset.checked_add(len).filter(|_| offset <= i64::MAX as u64);
        if end.is_none_or(|end| end > i64::MAX as u64) {
            return Err(Errno::INVAL.into());
        }
        if !is_file {
            return Err(Errno::SPIPE.into());
        }
        self.sys_fsync(fd)
    }

    /// `sync(2)`: returns at once, because there is no storage behind a file.
    pub(in crate::sentry) fn sys_sync(&mut self) -> SyscallResult {
        Ok(ZERO)
    }

    /// `syncfs(2)`: as `sync`, after a check of the descriptor.
    pub(in crate::sentry) fn sys_syncfs(&mut self, fd: u64) -> SyscallResult {
        if self.state.table.get(fd)?.is_path() { Err(Errno::BADF.into()) } else { Ok(ZERO) }
    }
}
