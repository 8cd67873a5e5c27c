//! Reads and writes of `/proc/PID/mem`, whose positions are addresses.
//!
//! Promises: a process reaches its own memory, as its instructions can, and that of processes that
//! it could trace. There it also writes to private memory that the other process may not write, as
//! tracers do for breakpoints. May break it: `readv` and its relatives, which reach own memory
//! only.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::fs::proc_settings::{ProcFile, ProcSetting};
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::trace_request::{TraceOperation, TraceRequest};
use crate::sentry::kernel::users::FOR_FILES;
use crate::sentry::mm::user_memory::{copy_in, read_some, write_some};
use crate::sentry::result::{SyscallControl, SyscallResult};

/// Maximum bytes of one access to the memory of another process.
const MAX_PEER_BYTES: u64 = 1 << 20;

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

    /// The request for memory of another process, if a descriptor is that. Also the position.
    fn peer_request(
        &self,
        descriptor: u64,
        at: Option<u64>,
        operation: impl FnOnce(u64) -> SyscallResult<TraceOperation>,
    ) -> SyscallResult<Option<TraceRequest>> {
        let Some((id, file)) = memory_of(self.state.table.get(descriptor)?) else {
            return Ok(None);
        };
        if self.state.has_memory_of(id) {
            return Ok(None);
        }
        let Some(process) = self.state.processes.get(id) else { return Ok(None) };
        // It may have changed its users since the file was opened.
        if !self.state.may_inspect(id, FOR_FILES) {
            return Err(Errno::ACCESS.into());
        }
        let operation = operation(at.unwrap_or(file.offset))?;
        Ok(Some(TraceRequest {
            process: id,
            thread: process.threads.current_id(),
            operation,
            to: 0,
            room: 0,
            length_to: None,
            counts: false,
            moves: at.is_none().then_some(descriptor),
        }))
    }

    /// Reads memory of another process, if a descriptor is that.
    pub(in crate::sentry) fn read_peer(
        &self,
        descriptor: u64,
        at: Option<u64>,
        (to, len): (u64, u64),
    ) -> SyscallResult<Option<SyscallControl>> {
        let len = len.min(MAX_PEER_BYTES);
        let request =
            self.peer_request(descriptor, at, |from| Ok(TraceOperation::Read(from, len)))?;
        let place = |request| TraceRequest { to, room: len, ..request };
        Ok(request.map(|request| SyscallControl::Trace(Box::new(place(request)))))
    }

    /// Writes memory of another process, if a descriptor is that.
    pub(in crate::sentry) fn write_peer(
        &self,
        process: &Process,
        descriptor: u64,
        at: Option<u64>,
        (from, len): (u64, u64),
    ) -> SyscallResult<Option<SyscallControl>> {
        if !self.state.table.get(descriptor)?.writes() {
            return Ok(None);
        }
        let request = self.peer_request(descriptor, at, |to| {
            let bytes = copy_in(process, from, len.min(MAX_PEER_BYTES) as usize)?;
            Ok(TraceOperation::Write(to, bytes))
        })?;
        Ok(request.map(|request| SyscallControl::Trace(Box::new(request))))
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
