//! Reads and writes of `/proc/PID/mem`, whose positions are addresses.
//!
//! Promises: only mapped guest memory of the current process is reached, as its own instructions
//! can. Linux also writes to memory that the process may not write.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::fs::proc_settings::{ProcFile, ProcSetting};
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::mm::user_memory::{read_some, write_some};
use crate::sentry::result::{SyscallControl, SyscallResult};

/// The open file, if it is the memory of a process, and the process.
fn memory_of(description: &Description) -> Option<(u32, &ProcFile)> {
    match &description.open {
        FileObject::Proc(file) => match file.setting {
            ProcSetting::Memory(id) => Some((id, file)),
            _ => None,
        },
        _ => None,
    }
}

impl Sentry {
    /// The bytes from `address` up to the first gap, at most `len`.
    fn mapped_len(&self, address: u64, len: u64) -> u64 {
        let mut end = address;
        for (part, _) in self.state.layout.parts(&(address..address.saturating_add(len))) {
            if part.start != end {
                break;
            }
            end = part.end;
        }
        end - address
    }

    /// Bytes of a file that is read: of memory, or as [`Sentry::bytes_at`].
    pub(in crate::sentry) fn bytes_or_memory_at(
        &self,
        process: &Process,
        description: &Description,
        offset: u64,
        len: u64,
    ) -> SyscallResult<Vec<u8>> {
        let Some((id, _)) = memory_of(description) else {
            return self.bytes_at(description, offset, len);
        };
        let (wanted, len) = (len, self.mapped_len(offset, len));
        let bytes = match self.state.has_memory_of(id) {
            true => read_some(process, offset, len)?,
            false => Vec::new(),
        };
        if bytes.is_empty() && wanted > 0 { Err(Errno::IO.into()) } else { Ok(bytes) }
    }

    /// Writes bytes to a file: to memory, or as [`Sentry::put`].
    pub(in crate::sentry) fn put_or_write_memory(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        bytes: &[u8],
        at: Option<u64>,
    ) -> SyscallResult {
        let description = self.state.table.get(descriptor)?;
        let Some((id, file)) = memory_of(description) else {
            return self.put(descriptor, bytes, at);
        };
        if !description.writes() {
            return Err(Errno::BADF.into());
        }
        let address = at.unwrap_or(file.offset);
        let len = self.mapped_len(address, bytes.len() as u64) as usize;
        let done = match self.state.has_memory_of(id) {
            true => write_some(process, address, &bytes[..len])?,
            false => 0,
        };
        if done == 0 && !bytes.is_empty() {
            return Err(Errno::IO.into());
        }
        if at.is_none() {
            self.advance(descriptor, done)?;
        }
        Ok(SyscallControl::Value(done))
    }
}
