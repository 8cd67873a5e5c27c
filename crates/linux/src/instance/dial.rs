//! Connections of the host's own, between two calls. What goes through them the guest sees when it goes on.

use super::Instance;
use crate::error::CallError;
use crate::personality::{Dialed, Exchanged};

impl Instance {
    /// Connects to who listens on `port` of the program's loopback, in any of its processes; nothing where nobody does.
    ///
    /// # Errors
    /// As [`Instance::change_files`].
    pub fn dial(&mut self, port: u16) -> Result<Option<Dialed>, CallError> {
        self.change(|state| state.dial(port))
    }

    /// Hands `bytes` over, as many as the connection has room for (64 KiB), and takes at most `room` bytes of what the program has
    /// written. One that is not there any more, in the state that the program has gone to, has ended.
    ///
    /// # Errors
    /// As [`Instance::change_files`].
    pub fn exchange(
        &mut self,
        dialed: Dialed,
        bytes: &[u8],
        room: usize,
    ) -> Result<Exchanged, CallError> {
        match self.state().has_news(dialed, bytes.len(), room) {
            true => self.change(|state| state.exchange(dialed, bytes, room)),
            false => Ok(Exchanged::default()),
        }
    }

    /// Writes no more to a connection; with `both` it is read no more either, and is gone.
    ///
    /// # Errors
    /// As [`Instance::change_files`].
    pub fn hang_up(&mut self, dialed: Dialed, both: bool) -> Result<(), CallError> {
        self.change(|state| state.hang_up_on(dialed, both))
    }

    /// Hangs up every connection but `known`: those of whoever went on from this state before.
    ///
    /// # Errors
    /// As [`Instance::change_files`].
    pub fn hang_up_strangers(&mut self, known: &[Dialed]) -> Result<(), CallError> {
        let strangers = self.state().strangers(known);
        if strangers.is_empty() {
            return Ok(());
        }
        self.change(|state| state.hang_up_strangers(&strangers))
    }
}
