//! Moves bytes to or from a pipe: `splice`, `tee`, `vmsplice`.
//!
//! They are copied: what the pages of a pipe hold does not change when their origin does.

use afresh_files::Kind;
use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::poll_events::{IN, OUT};
use crate::sentry::mm::user_memory::{copy_out, word_in};
use crate::sentry::result::{SyscallControl, SyscallError, SyscallResult, ZERO};
use crate::sentry::syscalls::read_write::{check_offset, gather, pieces};

/// Bytes that one call moves.
const CHUNK_SIZE: u64 = 64 << 10;
const MOVE: u64 = libc::SPLICE_F_MOVE as u64;
const NONBLOCK: u64 = libc::SPLICE_F_NONBLOCK as u64;
const MORE: u64 = libc::SPLICE_F_MORE as u64;
const GIFT: u64 = libc::SPLICE_F_GIFT as u64;

/// Refuses to wait, where a call must not.
fn unless(nonblock: bool, outcome: SyscallResult) -> SyscallResult {
    match outcome {
        Ok(SyscallControl::Wait(_)) if nonblock => Err(Errno::AGAIN.into()),
        outcome => outcome,
    }
}

impl Sentry {
    /// The channel of an end of a pipe.
    fn pipe_end(&self, descriptor: u64, writes: bool) -> Result<Option<u64>, Errno> {
        let description = self.state.table.get(descriptor)?;
        let allowed = if writes { description.writes() } else { description.reads() };
        if !allowed {
            return Err(Errno::BADF);
        }
        Ok(match &description.open {
            FileObject::Pipe { channel, .. } => Some(*channel),
            FileObject::Fifo(fifo) => Some(fifo.channel),
            _ => None,
        })
    }

    /// Whether a descriptor is a pipe, or a standard stream, which a guest sees as one.
    fn is_pipe(&self, descriptor: u64) -> Result<bool, Errno> {
        let open = &self.state.table.get(descriptor)?.open;
        Ok(open.is_standard() || matches!(open, FileObject::Pipe { .. } | FileObject::Fifo(_)))
    }

    /// The offset that a call is given for a descriptor, if it is; pipes have none.
    fn spliced_offset(&self, process: &Process, pipe: bool, at: u64) -> SyscallResult<Option<u64>> {
        match at {
            0 => Ok(None),
            _ if pipe => Err(Errno::SPIPE.into()),
            at => {
                let offset = word_in(process, at)?;
                check_offset(offset)?;
                Ok(Some(offset))
            }
        }
    }

    /// `splice(2)`: the bytes are copied, at most 64 KiB a call. Later writes to the file do not
    /// change those in the pipe.
    pub(in crate::sentry) fn sys_splice(
        &mut self,
        process: &mut Process,
        &[fd_in, off_in, fd_out, off_out, len, flags]: &[u64; 6],
    ) -> SyscallResult {
        if flags & !(MOVE | NONBLOCK | MORE | GIFT) != 0 {
            return Err(Errno::INVAL.into());
        }
        let (source, sink) = (self.pipe_end(fd_in, false)?, self.pipe_end(fd_out, true)?);
        if let FileObject::File(open) = &self.state.table.get(fd_in)?.open
            && self.state.tree.stat(open.node)?.kind == Kind::Directory
        {
            return Err(Errno::INVAL.into());
        }
        // Before a wait for the source.
        if matches!(
            self.state.table.get(fd_out)?.open,
            FileObject::Epoll(_)
                | FileObject::Event { .. }
                | FileObject::Signals(_)
                | FileObject::Timer(_)
                | FileObject::Process(_)
        ) {
            return Err(Errno::INVAL.into());
        }
        let nonblock = flags & NONBLOCK != 0;
        let (reads_pipe, writes_pipe) = (self.is_pipe(fd_in)?, self.is_pipe(fd_out)?);
        let from_offset = self.spliced_offset(process, reads_pipe, off_in)?;
        let to_offset = self.spliced_offset(process, writes_pipe, off_out)?;
        if !reads_pipe && !writes_pipe || source.is_some() && source == sink {
            return Err(Errno::INVAL.into());
        }
        if len == 0 {
            return Ok(ZERO);
        }
        for offset in [from_offset, to_offset].into_iter().flatten() {
            check_offset(offset.saturating_add(len))?;
        }
        let mut len = len.min(CHUNK_SIZE);
        if let Some(sink) = sink {
            let held = self.state.channels.get(sink).ok_or(Errno::IO)?;
            if held.readers == 0 {
                return self.broken_pipe(false);
            }
            if held.room() == 0 {
                return unless(nonblock, self.wait_for(fd_out, OUT, 0));
            }
            len = len.min(held.room() as u64);
        } else if self.state.table.get(fd_out)?.flags & libc::O_APPEND as u32 != 0 {
            return Err(Errno::INVAL.into());
        }
        let bytes = match self.spliced_bytes(fd_in, from_offset, len)? {
            Ok(bytes) => bytes,
            Err(wait) => return unless(nonblock, Ok(wait)),
        };
        if bytes.is_empty() {
            return Ok(ZERO);
        }
        let outcome = match &self.state.table.get(fd_out)?.open {
            // A sink with room for some of the bytes takes those.
            open if open.is_stream() => {
                let room = self.room_of(fd_out);
                match room {
                    Some(0) => return unless(nonblock, self.wait_for(fd_out, OUT, 0)),
                    Some(room) => self.pour(fd_out, &bytes[..bytes.len().min(room)])?,
                    None => self.pour(fd_out, &bytes)?,
                }
            }
            _ => self.put(fd_out, &bytes, to_offset)?,
        };
        let SyscallControl::Value(done) = outcome else { return unless(nonblock, Ok(outcome)) };
        self.spliced(fd_in, from_offset, done)?;
        for (at, offset) in [(off_in, from_offset), (off_out, to_offset)] {
            if let Some(offset) = offset {
                copy_out(process, at, &(offset + done).to_le_bytes())?;
            }
        }
        Ok(SyscallControl::Value(done))
    }

    /// Bytes that a stream has room for, where it is one of channels.
    fn room_of(&self, descriptor: u64) -> Option<usize> {
        let open = &self.state.table.get(descriptor).ok()?.open;
        let (channel, _) = open.ends().into_iter().find(|(_, writes)| *writes)?;
        let held = self.state.channels.get(channel)?;
        (held.readers > 0).then(|| held.room())
    }

    /// The next bytes of a source, which stay there; or the wait for them.
    fn spliced_bytes(
        &mut self,
        from: u64,
        offset: Option<u64>,
        len: u64,
    ) -> SyscallResult<Result<Vec<u8>, SyscallControl>> {
        let description = self.state.table.get(from)?;
        if !description.open.is_stream() {
            if description.open == FileObject::Input {
                return match self.peek_input(from, len)? {
                    Ok(bytes) => Ok(Ok(bytes)),
                    Err(wait) => wait.map(Err),
                };
            }
            let offset = offset.unwrap_or_else(|| description.offset());
            return self.bytes_at(description, offset, len).map(Ok);
        }
        let ends = description.open.ends();
        let readable = ends.into_iter().find(|(_, writes)| !*writes);
        let (channel, _) = readable.ok_or(Errno::INVAL)?;
        let held = self.state.channels.get(channel).ok_or(Errno::IO)?;
        if held.letter().is_some() {
            return Err(Errno::INVAL.into());
        }
        if !held.is_empty() {
            return Ok(Ok(held.peek(len.min(held.together() as u64) as usize)));
        }
        match held.has_ended() {
            true => Ok(Ok(Vec::new())),
            false => self.wait_for(from, IN, 0).map(Err),
        }
    }

    /// So many bytes of a source were moved.
    fn spliced(&mut self, from: u64, offset: Option<u64>, done: u64) -> SyscallResult<()> {
        let description = self.state.table.get(from)?;
        if !description.open.is_stream() {
            return match offset {
                Some(_) => Ok(()),
                None if description.open == FileObject::Input => {
                    self.skip_input(done as usize);
                    Ok(())
                }
                None => self.advance(from, done),
            };
        }
        let readable = description.open.ends().into_iter().find(|(_, writes)| !*writes);
        let (channel, _) = readable.ok_or(Errno::INVAL)?;
        let parcel =
            self.change().channels.get_mut(channel).and_then(|held| held.skip(done as usize));
        if let Some(parcel) = parcel {
            self.change().drop_parcel(parcel);
        }
        Ok(())
    }

    /// `tee(2)`: the bytes are copied, at most 64 KiB a call.
    pub(in crate::sentry) fn sys_tee(
        &mut self,
        from: u64,
        to: u64,
        len: u64,
        flags: u64,
    ) -> SyscallResult {
        if flags & !(MOVE | NONBLOCK | MORE | GIFT) != 0 {
            return Err(Errno::INVAL.into());
        }
        let (source, sink) = (self.pipe_end(from, false)?, self.pipe_end(to, true)?);
        let are_pipes = self.is_pipe(from)? && self.is_pipe(to)?;
        if !are_pipes || source.is_some() && source == sink {
            return Err(Errno::INVAL.into());
        }
        if len == 0 {
            return Ok(ZERO);
        }
        let nonblock = flags & NONBLOCK != 0;
        let mut len = len.min(CHUNK_SIZE);
        if let Some(sink) = sink {
            let held = self.state.channels.get(sink).ok_or(Errno::IO)?;
            if held.readers == 0 {
                return self.broken_pipe(false);
            }
            if held.room() == 0 {
                return unless(nonblock, self.wait_for(to, OUT, 0));
            }
            len = len.min(held.room() as u64);
        }
        let bytes = match self.spliced_bytes(from, None, len)? {
            Ok(bytes) => bytes,
            Err(wait) => return unless(nonblock, Ok(wait)),
        };
        if bytes.is_empty() {
            return Ok(ZERO);
        }
        self.put(to, &bytes, None)
    }

    /// `vmsplice(2)`: the bytes are copied, so that later writes to the memory do not change those
    /// in the pipe.
    pub(in crate::sentry) fn sys_vmsplice(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        vector: u64,
        count: u64,
        flags: u64,
    ) -> SyscallResult {
        if flags & !(MOVE | NONBLOCK | MORE | GIFT) != 0 {
            return Err(Errno::INVAL.into());
        }
        let nonblock = flags & NONBLOCK != 0;
        if !self.is_pipe(descriptor)? {
            return Err(Errno::BADF.into());
        }
        match self.pipe_end(descriptor, true) {
            Ok(_) => {
                let bytes = gather(process, vector, count)?;
                let room = self.room_of(descriptor);
                match room {
                    Some(0) if !bytes.is_empty() => {
                        unless(nonblock, self.wait_for(descriptor, OUT, 0))
                    }
                    Some(room) => self.pour(descriptor, &bytes[..bytes.len().min(room)]),
                    None => self.put(descriptor, &bytes, None),
                }
            }
            Err(Errno::BADF) => {
                let pieces = pieces(process, vector, count)?;
                let taken = match self.state.table.get(descriptor)?.open {
                    FileObject::Input => self.take_input(process, descriptor, &pieces),
                    _ => self.take(process, descriptor, &pieces, false),
                };
                unless(nonblock, taken)
            }
            Err(errno) => Err(SyscallError::Errno(errno)),
        }
    }
}
