//! System calls that move bytes of several buffers: `readv`, `writev` and their kind.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::result::{SyscallControl, SyscallResult};
use crate::sentry::syscalls::read_write::{MAX_COUNT, check_offset, pieces_of};

impl Sentry {
    /// `readv(2)`: one call reads at most 8 MiB of a stream.
    pub(in crate::sentry) fn sys_readv(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        vector: u64,
        count: u64,
    ) -> SyscallResult {
        let pieces = pieces_of(process, vector, count, self.most(descriptor)?)?;
        if self.state.table.get(descriptor)?.open.is_stream() {
            return self.take(process, descriptor, &pieces, false);
        }
        if self.state.table.get(descriptor)?.open == FileObject::Input {
            return self.take_input(process, descriptor, &pieces);
        }
        let offset = self.state.table.get(descriptor)?.offset();
        let done = self.scatter(process, descriptor, &pieces, offset)?;
        self.advance(descriptor, done)?;
        Ok(SyscallControl::Value(done))
    }

    /// `preadv(2)`, as on Linux.
    pub(in crate::sentry) fn sys_preadv(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        vector: u64,
        count: u64,
        offset: u64,
    ) -> SyscallResult {
        check_offset(offset)?;
        self.state.table.get(descriptor)?.check_positions()?;
        let pieces = pieces_of(process, vector, count, MAX_COUNT)?;
        let done = self.scatter(process, descriptor, &pieces, offset)?;
        self.accessed(descriptor, done)?;
        Ok(SyscallControl::Value(done))
    }

    /// `preadv2(2)`: as `preadv`. All of a file is in memory, so that the flags change nothing, and
    /// unknown ones are `EOPNOTSUPP`.
    pub(in crate::sentry) fn sys_preadv2(
        &mut self,
        process: &mut Process,
        &[fd, iov, iovcnt, offset, _, flags]: &[u64; 6],
    ) -> SyscallResult {
        const FLAGS: i32 = libc::RWF_HIPRI | libc::RWF_NOWAIT | libc::RWF_DSYNC | libc::RWF_SYNC;
        if flags as i32 & !FLAGS != 0 {
            return Err(Errno::OPNOTSUPP.into());
        }
        match offset {
            u64::MAX => self.sys_readv(process, fd, iov, iovcnt),
            offset => self.sys_preadv(process, fd, iov, iovcnt, offset),
        }
    }

    /// `writev(2)`: one call writes at most 8 MiB to a stream.
    pub(in crate::sentry) fn sys_writev(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        vector: u64,
        count: u64,
    ) -> SyscallResult {
        let pieces = pieces_of(process, vector, count, self.most(descriptor)?)?;
        self.write_pieces(process, descriptor, &pieces)
    }

    /// `pwritev(2)`, as on Linux.
    pub(in crate::sentry) fn sys_pwritev(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        vector: u64,
        count: u64,
        offset: u64,
    ) -> SyscallResult {
        let description = self.state.table.get(descriptor)?;
        description.check_positions()?;
        check_offset(offset)?;
        let pieces = pieces_of(process, vector, count, MAX_COUNT)?;
        self.write_parts(process, descriptor, &pieces, Some(offset))
    }

    /// `pwritev2(2)`: as `pwritev`. `RWF_HIPRI`, `RWF_DSYNC` and `RWF_SYNC` change nothing, and
    /// other flags are `EOPNOTSUPP`.
    pub(in crate::sentry) fn sys_pwritev2(
        &mut self,
        process: &mut Process,
        &[fd, iov, iovcnt, offset, _, flags]: &[u64; 6],
    ) -> SyscallResult {
        const FLAGS: i32 = libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC;
        if flags as i32 & !FLAGS != 0 {
            return Err(Errno::OPNOTSUPP.into());
        }
        match offset {
            u64::MAX => self.sys_writev(process, fd, iov, iovcnt),
            offset => self.sys_pwritev(process, fd, iov, iovcnt, offset),
        }
    }
}
