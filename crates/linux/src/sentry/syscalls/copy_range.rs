//! Copies from one descriptor to another without a copy through memory: `sendfile` and
//! `copy_file_range`.

use afresh_files::Kind;
use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::mm::user_memory::{copy_out, word_in};
use crate::sentry::result::{SyscallControl, SyscallResult};
use crate::sentry::syscalls::read_write::check_offset;

/// Bytes that are copied by one call, at most: it may always do less than it was asked to.
const MAX_COPY: u64 = 1 << 20;

impl Sentry {
    /// `sendfile(2)`: one call copies at most 1 MiB, and only from a file.
    pub(in crate::sentry) fn sys_sendfile(
        &mut self,
        process: &mut Process,
        to: u64,
        from: u64,
        offset: u64,
        len: u64,
    ) -> SyscallResult {
        let sink = self.state.table.get(to)?;
        if !sink.writes() {
            return Err(Errno::BADF.into());
        }
        let appends = sink.flags & libc::O_APPEND as u32 != 0;
        let start = self.copied_from(process, from, offset)?;
        let directory = match &self.state.table.get(from)?.open {
            FileObject::File(open) => self.state.tree.stat(open.node)?.kind == Kind::Directory,
            _ => false,
        };
        // The end is a position, too.
        let fits = i64::try_from(len).is_ok() && i64::try_from(start.saturating_add(len)).is_ok();
        if appends || directory || !fits {
            return Err(Errno::INVAL.into());
        }
        let bytes = self.file_bytes(from, start, len)?;
        let outcome = self.put(to, &bytes, None)?;
        self.copied(process, outcome, &[(from, offset, start)])
    }

    /// `copy_file_range(2)`: one call copies at most 1 MiB.
    pub(in crate::sentry) fn sys_copy_file_range(
        &mut self,
        process: &mut Process,
        &[fd_in, off_in, fd_out, off_out, len, flags]: &[u64; 6],
    ) -> SyscallResult {
        if flags != 0 {
            return Err(Errno::INVAL.into());
        }
        let start = self.copied_from(process, fd_in, off_in)?;
        let target = self.copied_from(process, fd_out, off_out)?;
        let description = self.state.table.get(fd_out)?;
        if description.flags & libc::O_APPEND as u32 != 0 {
            return Err(Errno::BADF.into());
        }
        // A file may be copied within itself, but not onto itself. As in Linux, the requested range
        // counts, as far as the file goes, also where the call copies less.
        let (len, same) = match (&self.state.table.get(fd_in)?.open, &description.open) {
            (FileObject::File(one), FileObject::File(other)) => {
                let size = self.state.tree.stat(one.node)?.size;
                (len.min(size.saturating_sub(start)), one.node == other.node)
            }
            _ => (len, false),
        };
        if same && start < target.saturating_add(len) && target < start.saturating_add(len) {
            return Err(Errno::INVAL.into());
        }
        let len = len.min(MAX_COPY);
        let bytes = self.file_bytes(fd_in, start, len)?;
        let outcome = self.put(fd_out, &bytes, Some(target))?;
        self.copied(process, outcome, &[(fd_in, off_in, start), (fd_out, off_out, target)])
    }

    /// The offset of a copy in a file: the value at `offset`, or the file's position.
    fn copied_from(&self, process: &Process, descriptor: u64, offset: u64) -> SyscallResult<u64> {
        let FileObject::File(open) = &self.state.table.get(descriptor)?.open else {
            return Err(Errno::INVAL.into());
        };
        let start = if offset == 0 { open.offset } else { word_in(process, offset)? };
        check_offset(start)?;
        Ok(start)
    }

    fn file_bytes(&self, descriptor: u64, start: u64, len: u64) -> SyscallResult<Vec<u8>> {
        let description = self.state.table.get(descriptor)?;
        if !description.reads() {
            return Err(Errno::BADF.into());
        }
        self.bytes_at(description, start, len.min(MAX_COPY))
    }

    /// Stores the end of a copy at `offset`, or as the file's position.
    fn copied(
        &mut self,
        process: &mut Process,
        outcome: SyscallControl,
        files: &[(u64, u64, u64)],
    ) -> SyscallResult {
        if let SyscallControl::Value(len) = outcome {
            for &(descriptor, offset, start) in files {
                if offset != 0 {
                    copy_out(process, offset, &(start + len).to_le_bytes())?;
                } else if let FileObject::File(open) =
                    &mut self.change().table.get_mut(descriptor)?.open
                {
                    open.offset = start + len;
                }
            }
        }
        Ok(outcome)
    }
}
