//! System calls that move bytes of several buffers: `readv`, `writev` and their kind.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::result::{SyscallControl, SyscallError, SyscallResult};
use crate::sentry::syscalls::read_write::{check_offset, copy_out_some, pieces, written};

impl Sentry {
    /// `readv(2)`: one call reads at most 8 MiB, and of standard input only into the first buffer.
    pub(in crate::sentry) fn sys_readv(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        vector: u64,
        count: u64,
    ) -> SyscallResult {
        let pieces = pieces(process, vector, count)?;
        if self.state.table.get(descriptor)?.open.is_stream() {
            return self.take(process, descriptor, &pieces, false);
        }
        if self.state.table.get(descriptor)?.open == FileObject::Input {
            // One piece at a time is a short read, which is allowed.
            let &(to, len) = pieces.first().unwrap_or(&(0, 0));
            return self.sys_read(process, descriptor, to, len);
        }
        let offset = self.state.table.get(descriptor)?.offset();
        let done = self.scatter(process, descriptor, &pieces, offset)?;
        self.advance(descriptor, done)?;
        Ok(SyscallControl::Value(done))
    }

    /// `preadv(2)`: one call reads at most 8 MiB.
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
        let pieces = pieces(process, vector, count)?;
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

    /// Reads at `offset` into pieces until one is not filled.
    fn scatter(
        &self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
        offset: u64,
    ) -> SyscallResult<u64> {
        let description = self.state.table.get(descriptor)?;
        if !description.reads() {
            return Err(Errno::BADF.into());
        }
        let mut done = 0;
        for &(to, len) in pieces {
            let from = offset.saturating_add(done);
            let bytes = match self.bytes_or_memory_at(process, description, from, len) {
                Err(SyscallError::Errno(_)) if done > 0 => break,
                bytes => bytes?,
            };
            match copy_out_some(process, to, &bytes) {
                Ok(some) if some == len => done += some,
                Ok(some) => return Ok(done + some),
                Err(SyscallError::Errno(_)) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// `writev(2)`: one call writes at most 8 MiB.
    pub(in crate::sentry) fn sys_writev(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        vector: u64,
        count: u64,
    ) -> SyscallResult {
        self.state.table.get(descriptor)?;
        let pieces = pieces(process, vector, count)?;
        self.write_pieces(process, descriptor, &pieces)
    }

    /// `pwritev(2)`: one call writes at most 8 MiB.
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
        let bytes = written(process, description, &pieces(process, vector, count)?)?;
        self.put_or_write_memory(process, descriptor, &bytes, Some(offset))
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
