//! System calls that flush files: `fsync` and its kind.

use rustix::io::Errno;

use crate::sentry::Sentry;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::result::{SyscallResult, ZERO};

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
    ) -> SyscallResult {
        let end = offset.checked_add(len).filter(|_| offset <= i64::MAX as u64);
        if end.is_none_or(|end| end > i64::MAX as u64) {
            return Err(Errno::INVAL.into());
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
