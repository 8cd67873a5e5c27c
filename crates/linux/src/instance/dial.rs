//! Connections of the host between two calls. The guest sees their bytes when it continues.

use super::Instance;
use crate::error::CallError;
use crate::sentry::{ExchangeResult, InboundConnection};

impl Instance {
    /// Connects to the listener on the program's loopback `port`, in any process; `None` without
    /// one.
    ///
    /// # Errors
    /// As [`Instance::change_files`].
    pub fn dial(&mut self, port: u16) -> Result<Option<InboundConnection>, CallError> {
        self.change(|state| state.dial(port))
    }

    /// Passes on the part of `bytes` that the connection has room for (64 KiB), and takes at most
    /// `room` bytes of output. A connection that does not exist in the program's present state has
    /// ended.
    ///
    /// # Errors
    /// As [`Instance::change_files`].
    pub fn exchange(
        &mut self,
        dialed: InboundConnection,
        bytes: &[u8],
        room: usize,
    ) -> Result<ExchangeResult, CallError> {
        match self.state().has_news(dialed, bytes.len(), room) {
            true => self.change(|state| state.exchange(dialed, bytes, room)),
            false => Ok(ExchangeResult::default()),
        }
    }

    /// Closes a connection for writing, or with `both` for reading as well.
    ///
    /// # Errors
    /// As [`Instance::change_files`].
    pub fn hang_up(&mut self, dialed: InboundConnection, both: bool) -> Result<(), CallError> {
        self.change(|state| state.hang_up_on(dialed, both))
    }

    /// Closes every connection except `known`: those of earlier continuations of this state.
    ///
    /// # Errors
    /// As [`Instance::change_files`].
    pub fn close_other_connections(
        &mut self,
        known: &[InboundConnection],
    ) -> Result<(), CallError> {
        let strangers = self.state().strangers(known);
        if strangers.is_empty() {
            return Ok(());
        }
        self.change(|state| state.close_other_connections(&strangers))
    }
}
