//! The input of a caller, for a guest that waits for it.

use std::time::Instant;

use super::{Guest, StopReason};
use crate::frozen_state::IdleWait;
use crate::platform::{Continuation, PlatformError, StubCommands, Trap};
use crate::sentry::{End, InputSource};

impl Guest {
    /// Passes the caller's input (nothing is the end of its input), if it calls, after `orders`,
    /// and lets the guest continue from its wait.
    pub(crate) fn resume(
        &mut self,
        wait: &IdleWait,
        request: Option<&[u8]>,
        mut orders: StubCommands,
        deadline: Instant,
    ) -> Result<Option<StopReason>, PlatformError> {
        let bytes = request.unwrap_or_default();
        let streams = &mut self.sentry.streams;
        streams.input.clear();
        streams.input.extend(bytes);
        streams.taken = 0;
        streams.ended = false;
        streams.expects = !bytes.is_empty();
        streams.through = Some(match wait {
            IdleWait::Read { .. } => InputSource::Input,
            IdleWait::Parked(ear) | IdleWait::Resting(ear) => *ear,
        });
        self.sentry.resumed = None;
        match (wait, request) {
            (IdleWait::Read { .. }, None) => {
                // Its only thread waits for the caller.
                self.body.process.execute(&orders, Continuation::Ask)?;
                return Ok(Some(StopReason::Idle(*wait)));
            }
            (IdleWait::Read { to, wanted }, Some(request)) => {
                let taken = request.len().min(crate::platform::INPUT_LEN).min(*wanted as usize);
                let bytes = &request[..taken];
                if !self.sentry.state.has_plain_memory(*to, taken) {
                    // A fault in the stub would end the process.
                    self.body.process.execute(&orders, Continuation::Ask)?;
                    return self.read_request(*to, bytes);
                }
                self.sentry.streams.taken = taken;
                orders.input = Some((*to, bytes.to_vec()));
                self.body.process.set_result(taken as i64);
                if self.sentry.has_signal() {
                    // Its handler runs before the read returns.
                    self.body.process.execute(&orders, Continuation::Ask)?;
                    return self.go_on();
                }
                self.give_answers();
                self.body.process.execute(&orders, Continuation::Resume)?;
                return Ok(None);
            }
            (IdleWait::Parked(ear) | IdleWait::Resting(ear), request) => {
                if !orders.is_empty() {
                    self.body.process.execute(&orders, Continuation::Ask)?;
                }
                if let Some(request) = request {
                    if self.sentry.state.has_callers() {
                        self.sentry.change().hang_up();
                    }
                    match ear {
                        InputSource::Input => self.sentry.streams.ended = request.is_empty(),
                        InputSource::Port => {
                            self.sentry.streams.taken = request.len();
                            if !self.sentry.change().call_in(request) {
                                return Ok(Some(StopReason::End(End::Deadlock, Trap::Stub)));
                            }
                        }
                    }
                }
            }
        }
        self.take_turns(deadline)
    }

    /// Ends the read that the guest waits in, with `bytes` at `to`. With `EFAULT` the request stays
    /// unread.
    fn read_request(&mut self, to: u64, bytes: &[u8]) -> Result<Option<StopReason>, PlatformError> {
        let fits = self.sentry.state.is_writable(to, bytes.len());
        if fits && self.body.process.write(to, bytes)? {
            self.sentry.streams.taken = bytes.len();
            self.body.process.set_result(bytes.len() as i64);
        } else {
            self.body.process.set_result(-i64::from(libc::EFAULT));
        }
        self.go_on()
    }
}
