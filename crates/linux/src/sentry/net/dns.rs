//! Host names, resolved for a guest: DNS questions to port 53 of any address.
//!
//! Promises: every granted name has a unique address, which stays the same in the guest's state and means nothing
//! outside; all other names do not exist. May break it: nothing outside; which server is behind a name is found out
//! when it is connected to.

use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};

use crate::egress;
use crate::sentry::net::sockets::{Address, SocketState};
use crate::sentry::{Sentry, SyscallControl, SyscallResult};

/// The port of the name server.
const PORT: u16 = 53;
/// The first address that stands for a name, in a block for benchmarks of networks (RFC 2544).
const FIRST: u32 = u32::from_be_bytes([198, 18, 0, 1]);
/// Maximum names that a guest may resolve.
const NAMES: usize = 4096;
/// Longest name.
const MAX_NAME: usize = 253;
/// Time to live of an answer, in seconds.
const MAX_TTL: u32 = 60;

const HEAD: usize = 12;
const INTERNET: u16 = 1;
const ADDRESS: u16 = 1;
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
    fn known(&self, name: &str) -> Option<Ipv4Addr> {
        let index = self.0.iter().position(|known| known == name)?;
        Some(Ipv4Addr::from(FIRST + index as u32))
    }

    /// The address that stands for a name from now on; nothing where there are too many.
    fn give(&mut self, name: &str) -> Option<Ipv4Addr> {
        if self.0.len() >= NAMES {
            return None;
        }
        self.0.push(name.to_owned());
        self.known(name)
    }

    /// Whether a guest could have resolved them.
    pub(crate) fn is_sound(&self) -> bool {
        let short = |name: &String| name.len() <= MAX_NAME;
        self.0.len() <= NAMES && self.0.iter().all(short)
    }
}

/// A question: a name in lower case, and its type.
#[derive(Debug, PartialEq, Eq)]
struct DnsQuestion<'a> {
    name: String,
    kind: u16,
    /// The question as it stands in the message.
    bytes: &'a [u8],
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// The only question of a message.
fn question(message: &[u8]) -> Option<DnsQuestion<'_>> {
    let flags = half(message, 2)?;
    // A question in the usual way, and one.
    if flags & 0xf800 != 0 || half(message, 4)? != 1 {
        return None;
    }
    let (mut at, mut labels) = (HEAD, Vec::new());
    loop {
        let len = usize::from(*message.get(at)?);
        at += 1;
        match len {
            0 => break,
            1..=63 => {
                let label = std::str::from_utf8(message.get(at..at + len)?).ok()?;
                labels.push(label.to_ascii_lowercase());
                at += len;
            }
            // A name in a question points nowhere.
            _ => return None,
        }
    }
    let (kind, class) = (half(message, at)?, half(message, at + 2)?);
    let name = labels.join(".");
    let known = class == INTERNET && name.len() <= MAX_NAME;
    known.then_some(DnsQuestion { name, kind, bytes: &message[HEAD..at + 4] })
}

/// The answer to a message, in its form: how it went, and an address.
fn answer(
    message: &[u8],
    asked: Option<&DnsQuestion<'_>>,
    how: u8,
    address: Option<Ipv4Addr>,
) -> Vec<u8> {
    let flag = |holds: bool| u8::from(holds);
    let mut out = message[..2].to_vec();
    // An answer, with authority; recursion if it is wanted, which there is.
    out.push(0x84 | message[2] & 1);
    out.push(0x80 | how);
    let (one, given) = (flag(asked.is_some()), flag(address.is_some()));
    out.extend([0, one, 0, given, 0, 0, 0, 0]);
    out.extend(asked.map_or(&[][..], |asked| asked.bytes));
    if let Some(address) = address {
        // The name is the question's.
        out.extend([0xc0, HEAD as u8]);
        out.extend(ADDRESS.to_be_bytes());
        out.extend(INTERNET.to_be_bytes());
        out.extend(MAX_TTL.to_be_bytes());
        out.extend([0, 4]);
        out.extend(address.octets());
    }
    out
}

impl Address {
    /// Whether a message to this address is a question to the sentry, if no socket of the guest takes it.
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
            channel.post(&answer, from, None);
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
        if !local && !egress::knows(&self.lines.granted, name) {
            return Some(answer(message, Some(&asked), NO_SUCH_NAME, None));
        }
        if ![ADDRESS, ANY].contains(&asked.kind) {
            // It exists, and has no other kind of address.
            return Some(answer(message, Some(&asked), FINE, None));
        }
        let address = match self.state.names.known(name) {
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

    fn ask(name: &str, kind: u16) -> Vec<u8> {
        let mut message = vec![7, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.').filter(|label| !label.is_empty()) {
            message.push(label.len() as u8);
            message.extend(label.bytes());
        }
        message.push(0);
        message.extend(kind.to_be_bytes());
        message.extend(INTERNET.to_be_bytes());
        message
    }

    #[test]
    fn a_question_is_read_as_it_is_written() {
        let message = ask("Api.Example.ORG", ADDRESS);
        let read = question(&message).unwrap();
        assert_eq!((&*read.name, read.kind), ("api.example.org", ADDRESS));
        assert_eq!(read.bytes, &message[HEAD..]);
        let out = answer(&message, Some(&read), FINE, Some(Ipv4Addr::new(198, 18, 0, 1)));
        assert_eq!(&out[..HEAD], [7, 9, 0x85, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
        assert_eq!(&out[out.len() - 4..], [198, 18, 0, 1]);
    }

    #[test]
    fn what_is_no_question_is_none() {
        let good = ask("a.b", ADDRESS);
        assert!(question(&good).is_some());
        for cut in 0..good.len() {
            assert_eq!(question(&good[..cut]), None, "{cut} bytes");
        }
        for (at, byte) in [(2, 0x80), (5, 2), (HEAD, 0xc0), (HEAD, 64), (HEAD + 1, 0xff)] {
            let mut bad = good.clone();
            bad[at] = byte;
            assert_eq!(question(&bad), None, "{at}: {byte}");
        }
        let long = ask(&"a.".repeat(130), ADDRESS);
        assert_eq!(question(&long), None);
    }

    #[test]
    fn a_name_keeps_its_address() {
        let mut names = ResolvedNames::default();
        let (one, two) = (names.give("one").unwrap(), names.give("two").unwrap());
        assert_ne!(one, two);
        assert_eq!((names.known("one"), names.name_of(two.into())), (Some(one), Some("two")));
        assert_eq!(names.name_of(Ipv4Addr::LOCALHOST.into()), None);
        assert_eq!(names.name_of(Ipv4Addr::new(198, 18, 0, 3).into()), None);
        while names.give("more").is_some() {}
        assert!(names.is_sound() && names.0.len() == NAMES);
        names.0.push(String::new());
        assert!(!names.is_sound());
    }
}
