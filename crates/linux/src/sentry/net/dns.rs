//! Host names, resolved for a guest: DNS questions to port 53 of any address.
//!
//! Promises: every granted name has a unique address, which stays the same in the guest's state and
//! means nothing outside; all other names do not exist. May break it: nothing outside; which server
//! is behind a name is found out when it is connected to.

use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};

use crate::sentry::kernel::channels::Ancillary;
use crate::sentry::net::dns_message::{ADDRESS, HEAD, MAX_NAME, answer, question};
use crate::sentry::net::sockets::{Address, SocketState};
use crate::sentry::{Sentry, SyscallControl, SyscallResult};

/// The port of the name server.
const PORT: u16 = 53;
/// The first address that stands for a name, in a block for benchmarks of networks (RFC 2544).
const FIRST: u32 = u32::from_be_bytes([198, 18, 0, 1]);
/// Maximum names that a guest may resolve.
pub(in crate::sentry) const NAMES: usize = 4096;

/// The type of a question for any record.
const ANY: u16 = 255;

/// How a question is answered, in the form's numbers.
const FINE: u8 = 0;
const MALFORMED: u8 = 1;
const FULL: u8 = 2;
const NO_SUCH_NAME: u8 = 3;

/// The resolved names, in order: their addresses follow one another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ResolvedNames(Vec<String>);

impl ResolvedNames {
    /// The name that an address stands for.
    pub(crate) fn name_of(&self, address: IpAddr) -> Option<&str> {
        let IpAddr::V4(address) = address else { return None };
        let index = u32::from(address).checked_sub(FIRST)?;
        self.0.get(index as usize).map(String::as_str)
    }

    /// The address that stands for a name, if it has one.
    fn find_address(&self, name: &str) -> Option<Ipv4Addr> {
        let index = self.0.iter().position(|known| known == name)?;
        Some(Ipv4Addr::from(FIRST + index as u32))
    }

    /// The address that stands for a name from now on; nothing where there are too many.
    fn give(&mut self, name: &str) -> Option<Ipv4Addr> {
        if self.0.len() >= NAMES {
            return None;
        }
        self.0.push(name.to_owned());
        self.find_address(name)
    }

    /// Whether a guest could have resolved them.
    pub(crate) fn is_sound(&self) -> bool {
        let short = |name: &String| name.len() <= MAX_NAME;
        self.0.len() <= NAMES && self.0.iter().all(short)
    }
}

impl Address {
    /// Whether a message to this address is a question to the sentry, if no socket of the guest
    /// takes it.
    pub(in crate::sentry) fn is_for_names(&self) -> bool {
        self.is_internet() && self.port() == PORT
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_address() {
        let mut names = ResolvedNames::default();
        let (one, two) = (names.give("one").unwrap(), names.give("two").unwrap());
        assert_ne!(one, two);
        assert_eq!(
            (names.find_address("one"), names.name_of(two.into())),
            (Some(one), Some("two"))
        );
        assert_eq!(names.name_of(Ipv4Addr::LOCALHOST.into()), None);
        assert_eq!(names.name_of(Ipv4Addr::new(198, 18, 0, 3).into()), None);
        while names.give("more").is_some() {}
        assert!(names.is_sound() && names.0.len() == NAMES);
        names.0.push(String::new());
        assert!(!names.is_sound());
    }
}
