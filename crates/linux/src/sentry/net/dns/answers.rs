//! Answers to the questions of a guest.

use std::net::Ipv4Addr;

use crate::sentry::Sentry;
use crate::sentry::kernel::channels::Ancillary;
use crate::sentry::net::dns_message::{ADDRESS, HEAD, answer, question};
use crate::sentry::net::sockets::{Address, SocketState};
use crate::sentry::result::{SyscallControl, SyscallResult};

/// The type of a question for any record.
const ANY: u16 = 255;

/// How a question is answered, in the form's numbers.
const FINE: u8 = 0;

const MALFORMED: u8 = 1;

const FULL: u8 = 2;

const NO_SUCH_NAME: u8 = 3;

impl Sentry {
    /// A question was sent: its answer is there at once, unless there is no room for it.
    pub(in crate::sentry) fn ask_name(
        &mut self,
        descriptor: u64,
        message: &[u8],
        from: Address,
    ) -> SyscallResult {
        let sent = SyscallControl::Value(message.len() as u64);
        let SocketState::Datagrams { inbox, .. } = self.socket_of(descriptor)?.stage else {
            return Ok(sent);
        };
        let Some(answer) = self.answer_name(message) else { return Ok(sent) };
        if let Some(channel) =
            self.change().channels.get_mut(inbox).filter(|c| c.takes(answer.len()))
        {
            channel.post(&answer, from, Ancillary::default());
        }
        Ok(sent)
    }

    /// Answers a question; `None` for a message that is too short.
    fn answer_name(&mut self, message: &[u8]) -> Option<Vec<u8>> {
        if message.len() < HEAD {
            return None;
        }
        let Some(asked) = question(message) else {
            return Some(answer(message, None, MALFORMED, None));
        };
        let name = asked.name.as_str();
        let local = name == "localhost" || name.ends_with(".localhost");
        if !local && !self.lines.knows(name) {
            if let Some(console) = &self.console {
                console.lookups.refused_host(name);
            }
            return Some(answer(message, Some(&asked), NO_SUCH_NAME, None));
        }
        if ![ADDRESS, ANY].contains(&asked.kind) {
            // It exists, and has no other kind of address.
            return Some(answer(message, Some(&asked), FINE, None));
        }
        let address = match self.state.names.find_address(name) {
            _ if local => Some(Ipv4Addr::LOCALHOST),
            Some(address) => Some(address),
            None => self.change().names.give(name),
        };
        let how = if address.is_some() { FINE } else { FULL };
        Some(answer(message, Some(&asked), how, address))
    }
}
