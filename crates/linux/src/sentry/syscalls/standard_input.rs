//! Standard input, which comes from the caller or from a host descriptor. A guest sees a pipe.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::poll_events::IN;
use crate::sentry::mm::user_memory::copy_out;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

/// Bytes that a pipe of the host holds if its size was not changed.
const PIPE_SIZE: u64 = 64 << 10;
const PIPE_SIZE_WORD: i32 = PIPE_SIZE as i32;

impl Sentry {
    /// Reads input into pieces of memory. If none is left, the guest is idle, unless it has other
    /// threads.
    pub(in crate::sentry) fn take_input(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
    ) -> SyscallResult {
        let wanted: u64 = pieces.iter().map(|(_, len)| len).sum();
        if wanted == 0 {
            return Ok(ZERO);
        }
        let bytes = match self.peek_input(descriptor, wanted)? {
            Ok(bytes) => bytes,
            Err(wait) => {
                let waits = self.state.table.get(descriptor)?.flags & libc::O_NONBLOCK as u32 == 0;
                let is_idle = self.streams.source.is_none() && self.state.is_alone();
                // The caller's bytes go to the first piece then.
                let is_idle = is_idle && waits && pieces.len() == 1;
                return if is_idle { Ok(SyscallControl::Idle) } else { wait };
            }
        };
        let (mut rest, mut done) = (&bytes[..], 0);
        for &(to, len) in pieces {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at(rest.len().min(len as usize));
            // As in Linux, an address that cannot be written leaves all of them there.
            copy_out(process, to, now)?;
            done += now.len();
            rest = later;
        }
        self.skip_input(done);
        Ok(SyscallControl::Value(done as u64))
    }

    /// The next bytes of input, which stay there, none at its end; or the wait for them.
    pub(in crate::sentry) fn peek_input(
        &mut self,
        descriptor: u64,
        len: u64,
    ) -> SyscallResult<Result<Vec<u8>, SyscallResult>> {
        if let Some(source) = &mut self.streams.source {
            match source.peek(len as usize)? {
                Some([]) if self.streams.stops_at_end => self.streams.source = None,
                Some(bytes) => return Ok(Ok(bytes.to_vec())),
                None => return Ok(Err(self.wait_for(descriptor, IN, 0))),
            }
        }
        let rest = &self.streams.input[self.streams.taken..];
        if !rest.is_empty() {
            return Ok(Ok(rest[..rest.len().min(len as usize)].to_vec()));
        }
        if std::mem::take(&mut self.streams.ended) {
            return Ok(Ok(Vec::new()));
        }
        Ok(Err(self.wait_for(descriptor, IN, 0)))
    }

    /// So many bytes of [`Sentry::peek_input`] were read.
    pub(in crate::sentry) fn skip_input(&mut self, len: usize) {
        match &mut self.streams.source {
            Some(source) => source.skip(len),
            None => self.streams.taken += len,
        }
    }

    /// The size of the pipe behind a standard stream: it is that of a new pipe, and does not grow.
    pub(in crate::sentry) fn standard_pipe_size(&self, new: Option<u64>) -> SyscallResult {
        match new.unwrap_or(PIPE_SIZE) as i32 {
            ..0 => Err(Errno::INVAL.into()),
            0..=PIPE_SIZE_WORD => Ok(SyscallControl::Value(PIPE_SIZE)),
            _ => Err(Errno::PERM.into()),
        }
    }
}
