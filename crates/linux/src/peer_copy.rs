//! Copies between the memories of two guest processes, for `process_vm_readv` and
//! `process_vm_writev`.
//!
//! The process of the other memory is made the current one for each part, as when it runs, so that
//! it has a body with all of its shared memory. The call ends at its deadline, however much it is
//! to copy.

use std::time::Instant;

use crate::guest::{Guest, StopReason};
use crate::platform::{Call, PlatformError, Trap};
use crate::sentry::{PeerCopy, read_some, write_some};

/// Maximum bytes of a part.
const MAX_PART: u64 = 1 << 20;

/// A place in a list of pieces of memory.
struct Cursor<'a> {
    pieces: &'a [(u64, u64)],
    /// Bytes of the first piece that were passed.
    passed: u64,
}

impl Cursor<'_> {
    /// The address, and the bytes that follow there.
    fn next(&self) -> Option<(u64, u64)> {
        let (start, len) = self.pieces.first()?;
        Some((start.wrapping_add(self.passed), len - self.passed))
    }

    fn advance(&mut self, by: u64) {
        self.passed += by;
        if let Some((_, len)) = self.pieces.first()
            && self.passed >= *len
        {
            (self.pieces, self.passed) = (&self.pieces[1..], 0);
        }
    }
}

impl Guest {
    /// Copies between the current process and another, or within the current one, and has the call
    /// return the number of bytes.
    pub(crate) fn copy_peer(
        &mut self,
        call: &Call,
        copy: &PeerCopy,
        deadline: Instant,
    ) -> Result<Option<StopReason>, PlatformError> {
        self.body.detach(call)?;
        let own = self.sentry.state.processes.current_id();
        let (source, target) = if copy.writes { (own, copy.peer) } else { (copy.peer, own) };
        let mut from = Cursor { pieces: &copy.from, passed: 0 };
        let mut to = Cursor { pieces: &copy.to, passed: 0 };
        let (mut done, mut failed) = (0, false);
        while let (Some((start, len)), Some((end, room)), false) = (from.next(), to.next(), failed)
        {
            let late = Instant::now() >= deadline;
            if late || !self.proceeds() {
                self.switch_to(own)?;
                return Ok(Some(if late { StopReason::Late } else { StopReason::Unheard }));
            }
            let len = len.min(room).min(MAX_PART);
            self.switch_to(source)?;
            let bytes = read_some(&self.body.process, start, len)?;
            self.switch_to(target)?;
            let written = write_some(&mut self.body.process, end, &bytes)?;
            failed = written < len;
            done += written;
            from.advance(written);
            to.advance(written);
        }
        self.switch_to(own)?;
        let value = if failed && done == 0 { -i64::from(libc::EFAULT) } else { done as i64 };
        self.finish(&Call { place: Trap::Stub, ..*call }, value as u64)
    }
}
