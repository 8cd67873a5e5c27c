//! Blocks of sparse memory that become accessible when the guest touches them, or a call of it.
//!
//! Promises: a touch within the memory limit is as one of other memory.

use std::ops::Range;

use crate::guest::Guest;
use crate::platform::{Call, Continuation, PlatformError, Trap};
use crate::sentry::SyscallControl;

/// Maximum times that a call is served again because it has met sparse memory.
const MAX_RETRIES: usize = 64;
/// The result of a call that has named memory which it cannot use.
const FAULT: u64 = (-(libc::EFAULT as i64)) as u64;

impl Guest {
    /// Opens the block that an instruction of the guest has touched. Returns whether a block was
    /// opened. The instruction then runs again.
    pub(super) fn opens_block(&mut self, signal: i32) -> Result<bool, PlatformError> {
        let opened = self.sentry.open_touched(&mut self.body.process, signal);
        let Some(change) = opened else { return Ok(false) };
        self.enact(change, Continuation::Ask)?;
        Ok(true)
    }

    /// Serves one call. Sparse memory that it uses is opened before, so that its result has a place
    /// when the call takes effect. A call that has failed at other sparse memory is served again.
    pub(super) fn serve_open(&mut self, call: &mut Call) -> Result<SyscallControl, PlatformError> {
        for _ in 0..MAX_RETRIES {
            for place in self.sentry.used_by(&self.body.process, call) {
                if let Some(pause) = self.sentry.pause_to_open(&place) {
                    return Ok(pause);
                }
                self.open(call, place)?;
            }
            // Memory that an earlier call was refused.
            self.body.process.take_refused();
            let control = self.sentry.serve(&mut self.body.process, call)?;
            match (&control, self.body.process.take_refused()) {
                (SyscallControl::Value(FAULT), Some(place))
                    if self.open(call, place.clone())? => {}
                _ => return Ok(control),
            }
        }
        Ok(SyscallControl::Value(FAULT))
    }

    /// Opens sparse memory in `place`. Whether there was any, and the limit has room for it.
    fn open(&mut self, call: &mut Call, place: Range<u64>) -> Result<bool, PlatformError> {
        let Some(change) = self.sentry.open_sparse(place) else { return Ok(false) };
        self.body.detach(call)?;
        call.place = Trap::Stub;
        self.enact(change, Continuation::Ask)?;
        Ok(true)
    }
}
